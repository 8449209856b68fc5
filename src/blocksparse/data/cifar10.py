"""CIFAR-10 in its python version: five batches to train on and one to test on, pickled."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import BlockSparseError
from .download import Progress, fetch
from .table import Table, first, standardised

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
HASH = "md5:c58f30108f718f92721af3b95e74349a"

FOLDER = "cifar-10-batches-py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXELS = 3 * 32 * 32


def load(data_dir: str | Path | None = None, progress: Progress | None = None) -> Table:
    """The 50,000 images to train on and 10,000 to test on, as rows of 3 x 32 x 32 pixels, red first.

    Each pixel is standardised over the training images, as in the codes of sparse evolutionary training.

    Args:
        data_dir: a folder with `cifar-10-batches-py/`, or that folder itself; without one it is downloaded, once.
        progress: told of a download after each chunk: bytes there, and of how many.

    Raises:
        BlockSparseError: a file that is missing or broken, a failed download.

    Source: Krizhevsky, Learning multiple layers of features from tiny images (2009).
    """
    train, labels, test, test_labels = read(data_dir, progress)
    train, test = standardised(train.float(), test.float())
    return Table("cifar10", train, labels, test, test_labels, CLASSES)


def read(data_dir: str | Path | None = None, progress: Progress | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pixels, uint8 `[n, 3072]`, and the labels, int64 `[n]`, of the images to train on; those to test on.

    Args:
        data_dir, progress: as for `load`.

    Raises:
        BlockSparseError: as `load`.
    """
    if data_dir is None:
        folder = fetch(URL, HASH, "cifar10", progress) / FOLDER
    else:
        places = [Path(data_dir) / FOLDER, Path(data_dir)]
        folder = first("cifar10", [place / "data_batch_1" for place in places]).parent
    batches = [read_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    pixels, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return pixels, labels, *read_batch(folder / "test_batch")


def read_batch(path: str | Path) -> tuple[Tensor, Tensor]:
    """The pixels, uint8 `[n, 3072]`, and the labels, int64 `[n]`, of a batch.

    Of a pickle only what these files need is done: nothing that is named in it is called.

    Raises:
        BlockSparseError: a file that is missing, broken, or none of CIFAR-10's.
    """
    try:
        with open(path, "rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except OSError as error:
        raise BlockSparseError.expected("cifar10", "a readable file", f"{path}: {error.strerror}") from error
    except Exception as error:  # a broken pickle may raise whatever there is
        raise BlockSparseError.expected(str(path), "a batch of CIFAR-10", f"a broken one: {error}") from error
    content = content if isinstance(content, dict) else {}
    pixels, labels = (content.get(name, content.get(name.decode())) for name in (b"data", b"labels"))
    array = pixels.tensor() if isinstance(pixels, _Array) else None
    if array is None or array.dim() != 2 or array.shape[1] != PIXELS or not len(array):
        got = "no such data" if array is None else f"{list(array.shape)}"
        raise BlockSparseError.expected(str(path), f"data of uint8 [n, {PIXELS}]", got)
    if not isinstance(labels, list) or len(labels) != len(array):
        got = f"{len(labels)}" if isinstance(labels, list) else "none"
        raise BlockSparseError.expected(str(path), f"{len(array)} labels", got)
    wrong = [label for label in labels if type(label) is not int or not 0 <= label < len(CLASSES)]
    if wrong:
        raise BlockSparseError.expected(str(path), f"labels from 0 to {len(CLASSES) - 1}", repr(wrong[0]))
    return array, torch.tensor(labels)


class _Array:
    """What takes the place of numpy's array while a pickle is read: its bytes and its shape."""

    shape: Any = None
    data: Any = None
    fortran: Any = False

    def __setstate__(self, state: Any) -> None:
        _, self.shape, dtype, self.fortran, self.data = state
        _check_uint8(dtype)

    def tensor(self) -> Tensor | None:
        data = self.data if isinstance(self.data, bytes | bytearray) else b""
        shape = self.shape if isinstance(self.shape, tuple) else ()
        if len(shape) != 2 or not all(type(n) is int and n >= 0 for n in shape) or shape[0] * shape[1] != len(data):
            return None
        array = np.frombuffer(data, np.uint8).reshape(shape, order="F" if self.fortran else "C")
        return torch.from_numpy(array.copy(order="C"))


class _Dtype:
    def __init__(self, name: Any, *_: Any):
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass


def _check_uint8(dtype: Any) -> None:
    if not isinstance(dtype, _Dtype) or dtype.name not in ("u1", "|u1", "uint8"):
        raise pickle.UnpicklingError("an array that is not of uint8")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> _Array:
    _check_uint8(dtype)
    array = _Array()
    array.data, array.shape, array.fortran = data, shape, order == "F"
    return array


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Reads numbers, strings, lists, dicts and arrays of uint8, and refuses all else."""

    _known = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy.core.numeric", "_frombuffer"): _from_buffer,
        ("numpy._core.numeric", "_frombuffer"): _from_buffer,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"{module}.{name} is not to be in it")
        return self._known[module, name]
