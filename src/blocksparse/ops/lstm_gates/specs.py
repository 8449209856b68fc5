"""Named shapes of the gates, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GatesSpec:
    """One step: its rows and features, and the dtype of all but the states.

    >>> SPECS["recurrent, one row"]
    GatesSpec(rows=1, hidden=2048, dtype='float32')
    """

    rows: int
    hidden: int
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


SPECS: dict[str, GatesSpec] = {
    "recurrent, one row": GatesSpec(1, 2048),
    "small-world LSTM": GatesSpec(32, 2048),
    "many rows": GatesSpec(128, 512),
    "many rows, bf16": GatesSpec(128, 512, "bfloat16"),
}

# Rows and features for tests: none, one, odd ones, fewer features than a vector, more than a part of the CPU's work.
TEST_SHAPES: tuple[tuple[int, int], ...] = ((0, 8), (1, 1), (1, 4101), (7, 13), (7, 64), (33, 65))
