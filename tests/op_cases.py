"""Public products on layouts, each with its dense counterpart, for tests of properties that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import blocksparse as bs


@dataclass(frozen=True)
class OpCase:
    """A product, the dense function that computes the same, and the sizes of an example."""

    call: Callable
    dense: Callable
    space: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()

    def tensors(self, layout, n=2, **options) -> list[torch.Tensor]:
        """Return random x, values and bias."""
        shapes = (n, layout.shape[1], *self.space), (*layout.values_shape, *self.kernel), (layout.shape[0],)
        return [torch.randn(shape, **options) for shape in shapes]


def transposed(dense: Callable) -> Callable:
    """Return a dense transposed convolution that has outputs as the first axis of its weight."""
    return lambda x, weight, bias: dense(x, weight.transpose(0, 1), bias)


STEPS = {"stride": (2, 1), "padding": 1}
OPS = {
    "linear": OpCase(bs.linear, F.linear),
    "conv1d": OpCase(bs.conv1d, F.conv1d, (6,), (3,)),
    "conv2d": OpCase(partial(bs.conv2d, **STEPS), partial(F.conv2d, **STEPS), (4, 3), (2, 3)),
    "conv3d": OpCase(bs.conv3d, F.conv3d, (3, 2, 2), (2, 1, 2)),
    "conv_transpose1d": OpCase(bs.conv_transpose1d, transposed(F.conv_transpose1d), (4,), (3,)),
    "conv_transpose2d": OpCase(
        partial(bs.conv_transpose2d, **STEPS), transposed(partial(F.conv_transpose2d, **STEPS)), (2, 3), (2, 2)
    ),
    "conv_transpose3d": OpCase(bs.conv_transpose3d, transposed(F.conv_transpose3d), (2, 1, 2), (1, 2, 2)),
}
