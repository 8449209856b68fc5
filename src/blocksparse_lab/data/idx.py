"""Read images and labels in the idx format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError

_DTYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
MAX_DIMENSIONS = 8
_AT_ONCE = 1 << 20


class Images(NamedTuple):
    """Images with labels: uint8 `[n, height, width]` and int64 `[n]`, to train and to test on."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def read(path: str | Path) -> Tensor:
    """Read the tensor in an idx file, gzipped or not."""
    with files.opened(path, "idx file", gzipped=True) as file:
        head = file.read(4)
        sizes = file.read(4 * head[3]) if len(head) == 4 else b""
        if head[:2] != b"\0\0" or len(head) < 4 or head[2] not in _DTYPES or len(sizes) < 4 * head[3]:
            raise BlockSparseError.expected("idx file", "two zero bytes, a known dtype, the sizes", f"{path}: {head!r}")
        dtype = np.dtype(_DTYPES[head[2]])
        shape = [int(size) for size in np.frombuffer(sizes, ">u4")]
        if len(shape) > MAX_DIMENSIONS:
            got = f"{path}: {len(shape)}"
            raise BlockSparseError.expected("idx file", f"at most {MAX_DIMENSIONS} dimensions", got)
        expected = math.prod(shape) * dtype.itemsize
        data = bytearray()
        while len(data) <= expected and (some := file.read(min(_AT_ONCE, expected + 1 - len(data)))):
            data += some
    if len(data) != expected or math.prod(filter(None, shape)) >= 2**60:
        got = "more" if len(data) > expected else f"{len(data)} bytes"
        raise BlockSparseError.expected("idx file", f"{expected} bytes for {shape}", f"{path}: {got}")
    array = np.frombuffer(data, dtype).reshape(shape)
    return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))


def mnist(folder: str | Path) -> Images:
    """Read the four files of MNIST or Fashion-MNIST, with their published names, `.gz` or unpacked."""
    parts = []
    for name in ("train", "t10k"):
        images, labels = (_find(folder, f"{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            got = f"{list(images.shape)} and {list(labels.shape)}"
            raise BlockSparseError.expected(f"{name} images and labels", "[n, height, width] and [n]", got)
        parts += [images, labels.long()]
    return Images(*parts)


def _find(folder: str | Path, name: str) -> Tensor:
    """Read a published file, gzipped or not."""
    return read(files.first_existing("folder", folder, f"{name}.gz", name))
