"""Load tables by name or from a csv file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError

from . import csv_table, images
from .download import Progress, located
from .table import Table, split, standardised

NAMES = ("fashion_mnist", "cifar10", "madelon", "higgs")

MADELON_FEATURES, MADELON_CLASSES = 500, ("-1", "1")
# Columns of the published HIGGS.csv, which does not name them: low-level features, then high-level ones.
HIGGS_COLUMNS = (
    "label", "lepton_pT", "lepton_eta", "lepton_phi", "missing_energy_magnitude", "missing_energy_phi",
    *(f"jet_{jet}_{what}" for jet in range(1, 5) for what in ("pt", "eta", "phi", "btag")),
    "m_jj", "m_jjj", "m_lv", "m_jlv", "m_bb", "m_wbb", "m_wwbb",
)  # fmt: skip
HIGGS_FILES = ("higgs.csv", "HIGGS.csv", "HIGGS.csv.gz")


def load(
    data: str | Path, data_dir: str | Path | None = None, seed: int = 0, progress: Progress | None = None
) -> Table:
    """Load a table by name or from a csv file.

    Each feature is standardised over the training rows, as in the codes of sparse evolutionary training.

    Args:
        data: "fashion_mnist", "cifar10", "madelon", "higgs", or the path of a file for `csv_table.read`.
        data_dir: folder with the files of a name; by default they are downloaded, except madelon and higgs.
        seed: draws the rows to test on, a fifth of each class, of higgs and csv files.
        progress: called during a download with bytes so far and in all.
    """
    if str(data) in images.NAMES:
        of = images.load(str(data), data_dir, progress)
        train, test = standardised(of.train.flatten(1).float(), of.test.flatten(1).float())
        return Table(of.name, train, of.train_labels, test, of.test_labels, of.classes)
    if str(data) == "madelon":
        return madelon(data_dir)
    if str(data) == "higgs":
        return higgs(data_dir, seed)
    path = files.path_of("data", data)
    if not os.path.isfile(path):
        raise BlockSparseError.expected("data", f"one of {', '.join(NAMES)}, or a csv file", data)
    return split(path.name, *csv_table.read(path), seed=seed)


def higgs(data_dir: str | Path | None = None, seed: int = 0) -> Table:
    """Load collisions with and without a Higgs boson, with 28 features; a fifth of each class is to test on.

    Arguments are those of `load`; there is no download.

    Source: Baldi, Sadowski, Whiteson, Searching for exotic particles in high-energy physics with deep learning (2014).
    """
    path = located("higgs", (*(f"higgs/{name}" for name in HIGGS_FILES), *HIGGS_FILES), data_dir)
    rows, labels, classes = csv_table.read(path, columns=HIGGS_COLUMNS)
    if rows.shape[1] != len(HIGGS_COLUMNS) - 1 or classes != ("0", "1"):
        got = f"{rows.shape[1]} and {', '.join(classes[:5])}"
        raise BlockSparseError.expected(str(path), f"{len(HIGGS_COLUMNS) - 1} features and labels 0 and 1", got)
    return split("higgs", rows, labels, classes, seed)


def madelon(data_dir: str | Path | None = None) -> Table:
    """Load Madelon: 500 features, 20 of them informative, and two classes; 2000 rows to train on, 600 to test on.

    The test rows are those of its validation part, as the labels of its test part are not known. They
    are in `data_dir`; there is no download.

    Source: Guyon, Gunn, Ben-Hur, Dror, Result analysis of the NIPS 2003 feature selection challenge (2004).
    """
    folder = located("madelon", ("madelon/madelon_train.data", "madelon_train.data"), data_dir).parent
    train, train_labels = read_madelon(folder / "madelon_train.data")
    test, test_labels = read_madelon(folder / "madelon_valid.data")
    train, test = standardised(train, test)
    return Table("madelon", train, train_labels, test, test_labels, MADELON_CLASSES)


def read_madelon(path: Path) -> tuple[Tensor, Tensor]:
    """Read the rows of `NAME.data`, float32 `[n, 500]`, and the labels of `NAME.labels`, int64 `[n]`."""
    columns = range(1, MADELON_FEATURES + 1)
    rows = [csv_table.numbers_at(where, fields, columns) for where, fields in _fields(path, MADELON_FEATURES)]
    labels: list[int] = []
    beside = path.with_suffix(".labels")
    for where, (label,) in _fields(beside, 1):
        if label.lstrip("+") not in MADELON_CLASSES:
            raise BlockSparseError.expected(where, "-1 or 1", label[:40])
        labels.append(MADELON_CLASSES.index(label.lstrip("+")))
    if len(labels) != len(rows) or not rows:
        raise BlockSparseError.expected(str(beside), f"{len(rows) or 'some'} labels, one for each row", len(labels))
    return torch.tensor(rows), torch.tensor(labels)


def _fields(path: Path, count: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields of nonempty lines, and where each line is."""
    try:
        for line, text in files.lines(path, "madelon", "ascii"):
            if fields := text.split():
                if len(fields) != count:
                    raise BlockSparseError.expected(f"{path}, line {line}", f"{count} numbers", len(fields))
                yield f"{path}, line {line}", fields
    except UnicodeDecodeError as error:
        raise BlockSparseError.expected("madelon", "a readable file", f"{path}: {error}") from error
