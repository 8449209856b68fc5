"""The first values of connections."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...nn.module import BlockSparseModule

Init = str | Callable[[BlockSparseModule, tuple[int, ...], torch.Generator], Tensor]
INITS = ("zeros", "he", "xavier")


def check_init(init: Any) -> None:
    """Raises a BlockSparseError unless it is a name or a function."""
    if not callable(init) and init not in INITS:
        raise BlockSparseError.expected("init", f"one of {', '.join(INITS)}, or a function", repr(init))


def first_values(
    module: BlockSparseModule,
    count: int,
    init: Init,
    generator: torch.Generator,
    places: Callable[[], tuple[np.ndarray, np.ndarray]],
) -> Tensor:
    """Draws values for `count` new blocks of a module, `[count, *values.shape[1:]]` on the CPU; padding gets zeros.

    Their rows and columns are asked for only where there is padding. A function as `init` is called with
    module, shape and generator; what names mean is in `bound`.
    """
    values = module.values
    shape = (count, *values.shape[1:])
    if isinstance(init, str):
        most = bound(init, *fans(module))
        drawn = torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(-most, most, generator=generator)
    else:
        drawn = init(module, shape, generator)
        if not isinstance(drawn, Tensor) or tuple(drawn.shape) != shape:
            got = list(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__name__
            raise BlockSparseError.expected("what init returns", f"a tensor {list(shape)}", got)
    if module.used is not None:
        height, width = module.layout.block_shape
        rows, cols = (torch.from_numpy(np.array(lines, np.int64)) for lines in places())
        out, in_ = module.used
        kernel = [1] * (len(shape) - 3)
        drawn = drawn * out.view(-1, height)[rows].view(-1, height, 1, *kernel).to(drawn)
        drawn = drawn * in_.view(-1, width)[cols].view(-1, 1, width, *kernel).to(drawn)
    return drawn


def bound(init: str, n_out: int, n_in: int) -> float:
    """Of uniform values: "he" sqrt(6 / n_in), "xavier" sqrt(6 / (n_in + n_out)), "zeros" 0.

    As in the sparse training codes, n_in and n_out are those of the dense layer.
    """
    return {"he": math.sqrt(6 / n_in), "xavier": math.sqrt(6 / (n_in + n_out)), "zeros": 0.0}[init]


def fans(module: BlockSparseModule) -> tuple[int, int]:
    """(n_out, n_in) of the dense layer: its real features, each with all taps of a kernel."""
    taps = math.prod(module.values.shape[3:])
    n_out, n_in = module.layout.shape if module.used is None else (int(side.sum()) for side in module.used)
    return n_out * taps, n_in * taps
