"""Modules named as in torch.nn, with block-sparse weights."""

from .all_relu import AllReLU
from .attention import attention
from .conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .diffusion_conv import Diffusion, DiffusionConv
from .dropout import Dropout
from .edge_bias import EdgeBias
from .linear import Linear
from .lstm import LSTM
from .multiplicative_lstm import MultiplicativeLSTM
from .polyphase import AdaptivePolyphaseDownsample, AdaptivePolyphaseUpsample
from .small_world_lstm import SmallWorldLSTM
from .weight_norm import WeightNorm, l2_normalize

__all__ = [
    "LSTM",
    "AdaptivePolyphaseDownsample",
    "AdaptivePolyphaseUpsample",
    "AllReLU",
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
    "Linear",
    "MultiplicativeLSTM",
    "SmallWorldLSTM",
    "WeightNorm",
    "attention",
    "l2_normalize",
]
