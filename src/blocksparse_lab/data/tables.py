"""Tables by their name, or of a csv file."""

from __future__ import annotations

import os
from pathlib import Path

from blocksparse import files
from blocksparse.errors import BlockSparseError

from . import cifar10, csv_table, higgs, images, madelon
from .download import Progress
from .table import Table, split, standardised

NAMES = ("fashion_mnist", "cifar10", "madelon", "higgs")


def load(
    data: str | Path, data_dir: str | Path | None = None, seed: int = 0, progress: Progress | None = None
) -> Table:
    """A table by name, or of a csv file.

    Args:
        data: "fashion_mnist", "cifar10", "madelon", "higgs", or the path of a file for `csv_table.read`.
        seed: of the draw of the rows to test on, of higgs and a csv file: a fifth of each class.
    """
    if str(data) == "fashion_mnist":
        return fashion_mnist(data_dir, progress)
    if str(data) == "cifar10":
        return cifar10.load(data_dir, progress)
    if str(data) == "madelon":
        return madelon.load(data_dir)
    if str(data) == "higgs":
        return higgs.load(data_dir, seed)
    path = files.path_of("data", data)
    if not os.path.isfile(path):
        raise BlockSparseError.expected("data", f"one of {', '.join(NAMES)}, or a csv file", data)
    return split(path.name, *csv_table.read(path), seed=seed)


def fashion_mnist(data_dir: str | Path | None = None, progress: Progress | None = None) -> Table:
    """The 60,000 images to train on and 10,000 to test on, as rows of 28 x 28 pixels.

    Each pixel is standardised over the training images, as in the codes of sparse evolutionary training.

    Source: Xiao, Rasul, Vollgraf, Fashion-MNIST (2017).
    """
    of = images.load("fashion_mnist", data_dir, progress)
    train, test = standardised(of.train.flatten(1).float(), of.test.flatten(1).float())
    return Table(of.name, train, of.train_labels, test, of.test_labels, of.classes)
