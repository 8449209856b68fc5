"""The alternated left ReLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..checked import integer, number


class AllReLU(nn.Module):
    """All-ReLU: x where x > 0, else -alpha x in even layers and alpha x in odd ones.

    Args:
        alpha: the slope of the negative side, 0 or more.
        layer: the number of the layer before the activation. The input is layer 1 and the first hidden layer 2, so the
            hidden layers have the slopes -alpha, alpha, -alpha, ...

    Shapes: any; elementwise.

    Raises:
        BlockSparseError: alpha is not a number of 0 or more, or the layer is not an int of 1 or more.

    Example:
        >>> import torch, blocksparse as bs
        >>> bs.nn.AllReLU(0.5, layer=2)(torch.tensor([-2.0, 3.0]))
        tensor([1., 3.])
        >>> bs.nn.AllReLU(0.5, layer=3)(torch.tensor([-2.0, 3.0]))
        tensor([-1.,  3.])

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021).
    """

    def __init__(self, alpha: float, layer: int):
        super().__init__()
        self.alpha, self.layer = number("alpha", alpha, 0), integer("layer", layer, 1)

    @property
    def slope(self) -> float:
        """The slope of the negative side."""
        return self.alpha if self.layer % 2 else -self.alpha

    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input, self.slope)

    def extra_repr(self) -> str:
        return f"{self.alpha:g}, layer={self.layer}"
