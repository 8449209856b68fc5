"""Madelon: 500 features, 20 of them informative, and two classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError

from .csv_table import number_at
from .table import Table, standardised

FEATURES = 500
CLASSES = ("-1", "1")


def load(data_dir: str | Path | None = None) -> Table:
    """The 2000 rows to train on, and the 600 of the validation part to test on, as the test part has no known labels.

    Each feature is standardised over the training rows, as in the codes of sparse evolutionary training.

    Source: Guyon, Gunn, Ben-Hur, Dror, Result analysis of the NIPS 2003 feature selection challenge (2004).
    """
    if data_dir is None:
        raise BlockSparseError.expected("madelon", "its files in a folder given by --data-dir", "none")
    folder = files.first("madelon", data_dir, "madelon/madelon_train.data", "madelon_train.data").parent
    train, train_labels = read(folder / "madelon_train.data")
    test, test_labels = read(folder / "madelon_valid.data")
    train, test = standardised(train, test)
    return Table("madelon", train, train_labels, test, test_labels, CLASSES)


def read(path: Path) -> tuple[Tensor, Tensor]:
    """The rows of `NAME.data`, float32 `[n, 500]`, and the labels of `NAME.labels`, int64 `[n]`."""
    rows: list[list[float]] = []
    for line, fields in _lines(path):
        if len(fields) != FEATURES:
            raise BlockSparseError.expected(f"{path}, line {line}", f"{FEATURES} numbers", len(fields))
        rows.append([number_at(f"{path}, line {line}, column {n}", text) for n, text in enumerate(fields, 1)])
    labels: list[int] = []
    beside = path.with_suffix(".labels")
    for line, fields in _lines(beside):
        if len(fields) != 1 or fields[0].lstrip("+") not in CLASSES:
            raise BlockSparseError.expected(f"{beside}, line {line}", "-1 or 1", " ".join(fields)[:40])
        labels.append(CLASSES.index(fields[0].lstrip("+")))
    if len(labels) != len(rows) or not rows:
        raise BlockSparseError.expected(str(beside), f"{len(rows) or 'some'} labels, one for each row", len(labels))
    return torch.tensor(rows), torch.tensor(labels)


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        for number, line in files.lines(path, "madelon", "ascii"):
            if line.strip():
                yield number, line.split()
    except UnicodeDecodeError as error:
        raise BlockSparseError.expected("madelon", "a readable file", f"{path}: {error}") from error
