"""Modules named as in torch.nn, with block-sparse weights."""

from .conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .edge_bias import EdgeBias
from .linear import Linear
from .weight_norm import WeightNorm, l2_normalize

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "EdgeBias",
    "Linear",
    "WeightNorm",
    "l2_normalize",
]
