"""Images and labels in the idx format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import BlockSparseError

_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


@dataclass(frozen=True)
class Images:
    """Images with labels: uint8 `[n, height, width]` and int64 `[n]` each."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def read(path: str | Path) -> Tensor:
    """The tensor in an idx file, compressed with gzip or not.

    Raises:
        BlockSparseError: no such file, or one that is not in this format or breaks off.
    """
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise BlockSparseError.expected("idx file", "a readable file", f"{path}: {error}") from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES or len(data) < 4 + 4 * data[3]:
        raise BlockSparseError.expected("idx file", "two zero bytes, a known dtype, the sizes", f"{path}: {data[:4]!r}")
    shape = np.frombuffer(data, ">u4", count=data[3], offset=4).astype(np.int64)
    dtype = np.dtype(_DTYPES[data[2]])
    found, expected = len(data) - 4 - 4 * data[3], int(shape.prod()) * dtype.itemsize
    if found != expected:
        raise BlockSparseError.expected("idx file", f"{expected} bytes for {shape.tolist()}", f"{path}: {found} bytes")
    array = np.frombuffer(data, dtype, offset=4 + 4 * data[3]).reshape(shape)
    return torch.from_numpy(array.astype(dtype.newbyteorder("=")))


def mnist(folder: str | Path) -> Images:
    """The four files of MNIST or Fashion-MNIST in a folder, named as they are published, `.gz` or unpacked.

    Raises:
        BlockSparseError: a file that is missing or broken, or as many labels as there are not images.
    """
    parts = []
    for name in ("train", "t10k"):
        images, labels = (_find(Path(folder), f"{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            got = f"{list(images.shape)} and {list(labels.shape)}"
            raise BlockSparseError.expected(f"{name} images and labels", "[n, height, width] and [n]", got)
        parts += [images, labels.long()]
    return Images(*parts)


def _find(folder: Path, name: str) -> Tensor:
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            return read(path)
    raise BlockSparseError.expected("folder", f"one with {name}.gz or {name}", folder)
