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
from ...surgery.stored import Stored

Init = str | Callable[[BlockSparseModule, tuple[int, ...], torch.Generator], Tensor]
INITS = ("zeros", "he", "xavier")
TILE = 1 << 20  # numbers drawn at a time


def check_init(init: Any) -> None:
    """Raises a BlockSparseError unless it is a name or a function."""
    if not callable(init) and init not in INITS:
        raise BlockSparseError.expected("init", f"one of {', '.join(INITS)}, or a function", repr(init))


def first_values(
    stored: Stored,
    count: int,
    init: Init,
    generator: torch.Generator,
    places: Callable[[], tuple[np.ndarray, np.ndarray]],
    here: np.ndarray,
) -> Tensor:
    """Draws values for `count` new blocks of a weight, and returns those at positions `here`, rising (CPU).

    They are drawn in their order, so that each block gets the same numbers wherever it is. `places` gives the rows and
    columns of all; it is asked for only where there is padding, which gets zeros.
    """
    shape = (count, *stored.local.shape[1:])
    if isinstance(init, str):
        most = bound(init, *fans(stored))
        drawn = torch.empty(len(here), *shape[1:], dtype=torch.float32, device="cpu")
        # Some at a time, as not all may fit into this process's memory.
        step = max(1, TILE // math.prod(shape[1:]))
        for first in range(0, count, step):
            tile = torch.empty(min(step, count - first), *shape[1:], dtype=torch.float32, device="cpu")
            tile.uniform_(-most, most, generator=generator)
            begin, end = np.searchsorted(here, [first, first + step])
            drawn[begin:end] = tile[torch.from_numpy(here[begin:end] - first)]
    else:
        drawn = init(stored.module, shape, generator)
        if not isinstance(drawn, Tensor) or tuple(drawn.shape) != shape:
            got = list(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__name__
            raise BlockSparseError.expected("what init returns", f"a tensor {list(shape)}", got)
        drawn = drawn[torch.from_numpy(here)]
    if (used := stored.used) is not None:
        height, width = stored.layout.block_shape
        rows, cols = (torch.from_numpy(np.array(lines, np.int64)[here]) for lines in places())
        out, in_ = used
        kernel = [1] * (len(shape) - 3)
        drawn = drawn * out.view(-1, height)[rows].view(-1, height, 1, *kernel).to(drawn)
        drawn = drawn * in_.view(-1, width)[cols].view(-1, 1, width, *kernel).to(drawn)
    return drawn


def bound(init: str, n_out: int, n_in: int) -> float:
    """Of uniform values: "he" sqrt(6 / n_in), "xavier" sqrt(6 / (n_in + n_out)), of the dense layer; "zeros" 0."""
    return {"he": math.sqrt(6 / n_in), "xavier": math.sqrt(6 / (n_in + n_out)), "zeros": 0.0}[init]


def fans(stored: Stored) -> tuple[int, int]:
    """(n_out, n_in) of the dense layer: its real features, each with all taps of a kernel."""
    taps, used = math.prod(stored.local.shape[3:]), stored.used
    n_out, n_in = stored.layout.shape if used is None else (int(side.sum()) for side in used)
    return n_out * taps, n_in * taps
