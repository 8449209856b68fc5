"""Labelled images by the name of the set, as published: bytes in their own shape."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError

from . import cifar10, download, idx
from .labels import check, digest

NAMES = ("cifar10", "fashion_mnist")

FASHION_MNIST_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
FASHION_MNIST_HASHES = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Images to train and to test on.

    Args:
        name: of the set.
        train, test: uint8 `[n, channels, height, width]`.
        train_labels, test_labels: int64 `[n]`, class indices.
        classes: names of the classes.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("train", self.train, self.train_labels),
            ("test", self.test, self.test_labels),
        ):
            check(f"{self.name}, {part}", images, labels, torch.uint8, self.shape, len(self.classes))

    @property
    def shape(self) -> torch.Size:
        """(channels, height, width)."""
        return self.train.shape[1:]

    def digest(self) -> dict[str, Any]:
        """Return facts that identify the data, ready for JSON."""
        sizes = {"images": len(self.train), "shape": list(self.shape), "classes": len(self.classes)}
        sha = digest(self.train, self.train_labels, self.test, self.test_labels)
        return {"name": self.name, **sizes, "sha256": sha}


def load(name: str, data_dir: str | Path | None = None, progress: download.Progress | None = None) -> Images:
    """Load images by the name of their set.

    Args:
        name: "cifar10", 60,000 colour images of 32 x 32, or "fashion_mnist", 70,000 grey ones of 28 x 28.
        data_dir: folder with the files; by default they are downloaded.
        progress: called during a download with bytes so far and in all.

    Source: Krizhevsky, Learning multiple layers of features from tiny images (2009); Xiao, Rasul, Vollgraf,
    Fashion-MNIST (2017).
    """
    if name == "cifar10":
        train, labels, test, test_labels = cifar10.read(data_dir, progress)
        train, test = (pixels.unflatten(1, (3, 32, 32)) for pixels in (train, test))
        return Images(name, train, labels, test, test_labels, cifar10.CLASSES)
    if name == "fashion_mnist":
        grey = idx.mnist(_fashion_mnist_folder(data_dir, progress))
        train, test = (pixels.unsqueeze(1) for pixels in (grey.train, grey.test))
        return Images(name, train, grey.train_labels, test, grey.test_labels, FASHION_MNIST_CLASSES)
    raise BlockSparseError.expected("images", f"one of {', '.join(NAMES)}", repr(name))


def _fashion_mnist_folder(data_dir: str | Path | None, progress: download.Progress | None) -> Path:
    """Return the folder of Fashion-MNIST's files; without `data_dir`, download what is missing."""
    if data_dir is None:
        for file, known_hash in FASHION_MNIST_HASHES.items():
            path = download.fetch(FASHION_MNIST_URL + file, known_hash, f"fashion_mnist/{file}", progress)
        return path.parent
    folder = files.path_of("data_dir", data_dir)
    inner = folder / "fashion_mnist"
    return inner if os.path.isdir(inner) else folder
