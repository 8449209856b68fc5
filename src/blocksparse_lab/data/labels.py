"""Checks and draws for labelled rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError


def check(name: str, rows: Tensor, labels: Tensor, dtype: torch.dtype, shape: Sequence[int], classes: int) -> None:
    """Raise a BlockSparseError about `name` unless rows have this shape, with int64 labels below `classes`.

    >>> check("train", torch.zeros(2, 3), torch.tensor([0, 2]), torch.float32, [3], classes=2)
    Traceback (most recent call last):
        ...
    blocksparse.errors.BlockSparseError: train: expected labels from 0 to 1, got 0 to 2
    """
    if rows.dtype != dtype or list(rows.shape[1:]) != list(shape) or not rows.numel():
        wanted = f"{str(dtype).removeprefix('torch.')} [n, {', '.join(map(str, shape))}]"
        raise BlockSparseError.expected(name, wanted, f"{rows.dtype} {list(rows.shape)}")
    if labels.dtype != torch.int64 or list(labels.shape) != [len(rows)]:
        raise BlockSparseError.expected(name, f"int64 labels [{len(rows)}]", f"{labels.dtype} {list(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise BlockSparseError.expected(name, f"labels from 0 to {classes - 1}", f"{low} to {high}")


def digest(*tensors: Tensor) -> str:
    """Identify the content of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()[:16]


def drawn(labels: np.ndarray, classes: int, part: float, seed: int) -> np.ndarray:
    """Draw a fraction of each class, at least one row; return a mask, bool `[n]`."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(len(labels), dtype=bool)
    ends = np.bincount(labels, minlength=classes).cumsum()
    for rows in np.split(np.argsort(labels, kind="stable"), ends[:-1]):
        mask[rng.permutation(rows)[: max(1, round(part * len(rows)))]] = True
    return mask
