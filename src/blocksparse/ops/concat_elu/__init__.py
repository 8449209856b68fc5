"""ELUs of x and of -x side by side, followed by dropout, in one pass on the CPU.

    y = scale [elu(x), elu(-x)]

x is `[rows, features]`, y `[rows, 2 features]`. A number of y is dropped if one of 65,536 equally likely numbers is
below `least`, as in `ops.dropout`; which numbers are dropped depends on the seed and the position in x only. The
gradient needs x only: the mask is drawn again.
"""

from __future__ import annotations

from torch import Tensor

from .op import ConcatEluNode, backward, forward
from .reference import keep_mask

__all__ = ["backward", "concat_elu", "forward", "keep_mask"]


def concat_elu(x: Tensor, scale: float = 1.0, seed: int = 0, least: int = 0) -> Tensor:
    """Return the outputs, contiguous, differentiable any number of times. x is a tensor that only autograd sees.

    >>> import torch
    >>> concat_elu(torch.tensor([[2.0, -2.0]]))
    tensor([[ 2.0000, -0.8647, -0.8647,  2.0000]])

    Source: Salimans, Karpathy, Chen, Kingma, PixelCNN++ (2017), after the CReLU of Shang et al. (2016).
    """
    y: Tensor = ConcatEluNode.apply(x, scale, seed, least)  # type: ignore[no-untyped-call]
    return y
