"""CIFAR-10 in its Python version: five pickled training batches and one test batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError

from . import pickles
from .download import Progress, located

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
HASH = "md5:c58f30108f718f92721af3b95e74349a"
FOLDER = "cifar-10-batches-py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32


def read(data_dir: str | Path | None = None, progress: Progress | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pixels, uint8 `[n, 3072]`, red first, and labels, int64 `[n]`, to train on, then those to test on.

    Args:
        data_dir: folder with the files; by default they are downloaded.
        progress: called during a download with bytes so far and in all.
    """
    places = f"{FOLDER}/data_batch_1", "data_batch_1"
    folder = located("cifar10", places, data_dir, URL, HASH, progress).parent
    batches = [read_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    pixels, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return pixels, labels, *read_batch(folder / "test_batch")


def read_batch(path: str | Path) -> tuple[Tensor, Tensor]:
    """Return pixels, uint8 `[n, 3072]`, and labels, int64 `[n]`, of a batch, without calls of pickled functions."""
    content = pickles.read(path, "cifar10", "a batch of CIFAR-10")
    content = content if isinstance(content, dict) else {}
    pixels, labels = (content.get(name, content.get(name.encode())) for name in ("data", "labels"))
    try:
        array = pixels.numpy() if isinstance(pixels, pickles.Array) else None
    except ValueError as error:
        raise BlockSparseError.expected(str(path), "a batch of CIFAR-10", f"a broken one: {error}") from error
    if array is None or array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != PIXELS or not len(array):
        got = "no such data" if array is None else f"{array.dtype} {list(array.shape)}"
        raise BlockSparseError.expected(str(path), f"data of uint8 [n, {PIXELS}]", got)
    if not isinstance(labels, list) or len(labels) != len(array):
        got = f"{len(labels)}" if isinstance(labels, list) else "none"
        raise BlockSparseError.expected(str(path), f"{len(array)} labels", got)
    for label in labels:
        if type(label) is not int or not 0 <= label < len(CLASSES):
            got = f"{label}" if type(label) is int else f"a {type(label).__name__}"
            raise BlockSparseError.expected(str(path), f"labels from 0 to {len(CLASSES) - 1}", got)
    return torch.from_numpy(array), torch.tensor(labels)
