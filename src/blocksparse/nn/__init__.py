"""Modules named as in torch.nn, with block-sparse weights."""

from ..compat.edge_bias import EdgeBias
from ..ops.attention import attention, topk_blocks
from .all_relu import AllReLU
from .cells import GRUCell, LSTMCell, RNNCell
from .conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .dropout import Dropout
from .experts import Experts
from .gated_mlp import GatedMLP
from .gru import GRU, RNN
from .linear import Linear
from .lstm import LSTM
from .multihead_attention import MultiheadAttention
from .multiplicative_lstm import MultiplicativeLSTM
from .quantized import QuantizedLinear
from .quantized_conv import QuantizedConv1d, QuantizedConv2d, QuantizedConv3d
from .quantized_lstm import QuantizedLSTM
from .research.adaptive_polyphase import AdaptivePolyphaseDownsample, AdaptivePolyphaseUpsample
from .research.causal import Causal2d, Shift2d, bands
from .research.diffusion_conv import Diffusion, DiffusionConv
from .research.elu import concat_elu
from .small_world_lstm import SmallWorldLSTM
from .weight_norm import WeightNorm, fold, initialise_from_data, l2_normalize

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "AdaptivePolyphaseDownsample",
    "AdaptivePolyphaseUpsample",
    "AllReLU",
    "Causal2d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Diffusion",
    "DiffusionConv",
    "Dropout",
    "EdgeBias",
    "Experts",
    "GRUCell",
    "GatedMLP",
    "LSTMCell",
    "Linear",
    "MultiheadAttention",
    "MultiplicativeLSTM",
    "QuantizedConv1d",
    "QuantizedConv2d",
    "QuantizedConv3d",
    "QuantizedLSTM",
    "QuantizedLinear",
    "RNNCell",
    "Shift2d",
    "SmallWorldLSTM",
    "WeightNorm",
    "attention",
    "bands",
    "concat_elu",
    "fold",
    "initialise_from_data",
    "l2_normalize",
    "topk_blocks",
]


def __dir__() -> list[str]:
    return __all__
