"""Inputs of a recurrence as rows in time order: their own, or those of a table."""

from __future__ import annotations

import torch
from torch import Tensor

from .steps import Steps


class Rows:
    """What each step takes of `data`.

    Args:
        steps: which.
        data: `[rows, features]`, or with an index `[n, features]`.
        index: `[rows]`, the row of data that each row is.
    """

    def __init__(self, steps: Steps, data: Tensor, index: Tensor | None):
        self._data = data
        self._cut = steps.cut(data if index is None else index)
        self._indexed = index is not None

    def __getitem__(self, t: int) -> Tensor:
        return self._data.index_select(0, self._cut[t]) if self._indexed else self._cut[t]


def gather_rows(data: Tensor, index: Tensor | None) -> Tensor:
    """All rows, differentiable."""
    return data if index is None else data.index_select(0, index)


def scatter_add_rows(grad: Tensor, data: Tensor, index: Tensor | None) -> Tensor:
    """The gradient of data `[n, ...]` from that of all rows."""
    if index is None:
        return grad
    # Unlike index_add, this has a fixed order and runs in parallel.
    return torch.ops.aten.embedding_dense_backward(grad, index, len(data), -1, False)
