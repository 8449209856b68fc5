"""The numbers of classes that go with rows or images."""

from __future__ import annotations

import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError


def check_labels(name: str, labels: Tensor, count: int, classes: int) -> None:
    """Raises a BlockSparseError about `name` unless these are `count` labels, int64, from 0 to below `classes`.

    >>> check_labels("train", torch.tensor([0, 2]), count=2, classes=2)
    Traceback (most recent call last):
        ...
    blocksparse.errors.BlockSparseError: train: expected labels from 0 to 1, got 0 to 2
    """
    if labels.dtype != torch.int64 or list(labels.shape) != [count]:
        raise BlockSparseError.expected(name, f"int64 labels [{count}]", f"{labels.dtype} {list(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise BlockSparseError.expected(name, f"labels from 0 to {classes - 1}", f"{low} to {high}")
