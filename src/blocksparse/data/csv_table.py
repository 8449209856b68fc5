"""Tables of numbers in csv files, with a column of labels."""

from __future__ import annotations

import csv
import gzip
import math
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import BlockSparseError

LABEL_COLUMNS = ("label", "class", "target")


def read(path: str | Path, columns: Sequence[str] | None = None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """The features float32 `[n, features]`, the labels int64 `[n]`, and the names of the classes.

    The first line names the columns: one of label, class and target, and features. Labels are numbers or words; classes
    are in the order of the numbers, or of the alphabet. Lines without anything are passed over.

    Args:
        path: the file, compressed with gzip where it ends in .gz.
        columns: what a file without such a line has; one with it is read by its own.

    Raises:
        BlockSparseError: no such file; with line and column, a hole or something that is no finite number; a line with
            fewer or more columns than the first; labels that are all the same.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from blocksparse.data import csv_table
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "animals.csv")
    ...     _ = path.write_text("legs,wings,label\\n4,0,cat\\n2,2,bird\\n")
    ...     csv_table.read(path)
    (tensor([[4., 0.],
            [2., 2.]]), tensor([1, 0]), ('bird', 'cat'))
    """
    path = Path(path)
    numbers, found = array("f"), array("q")
    names: dict[str, int] = {}
    line = 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if path.suffix == ".gz"
            else open(path, encoding="utf-8-sig", newline="") as file
        ):
            rows = csv.reader(file, strict=True)
            header = [name.strip() for name in next(rows, [])]
            waiting = None
            if columns is not None and _all_numbers(header):
                waiting, header = header, list(columns)
            label_at = _label_column(path, header)
            line = 1
            while waiting is not None or (waiting := next(rows, None)) is not None:
                line = rows.line_num
                if waiting:
                    label = _append(path, line, header, label_at, waiting, numbers)
                    found.append(names.setdefault(label, len(names)))
                waiting = None
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BlockSparseError.expected("csv file", "a readable file", f"{path}: {reason}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BlockSparseError.expected(f"{path}, after line {line}", "rows of a csv file in UTF-8", error) from error
    if len(names) < 2:
        got = f"only {next(iter(names))} down to line {line}" if names else "no row"
        raise BlockSparseError.expected(str(path), "labels of two classes or more", got)
    features = torch.from_numpy(np.frombuffer(numbers, np.float32).reshape(-1, len(header) - 1).copy())
    classes = _in_order(list(names))
    order = np.array([classes.index(name) for name in names], dtype=np.int64)
    return features, torch.from_numpy(order[np.frombuffer(found, np.int64)]), classes


def number_at(where: str, text: str) -> float:
    """The number in a field.

    Raises:
        BlockSparseError: there is none, or one that float32 does not have.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= 3.4028235e38:
        raise BlockSparseError.expected(where, "a finite number", repr(text) if text.strip() else "a hole")
    return value


def _append(path: Path, line: int, header: list[str], label_at: int, row: list[str], numbers: array[float]) -> str:
    """Appends a row's features and returns its label."""
    if len(row) != len(header):
        raise BlockSparseError.expected(f"{path}, line {line}", f"{len(header)} columns", len(row))
    label = _plain(row.pop(label_at))
    if not label:
        raise BlockSparseError.expected(f"{path}, line {line}, column {header[label_at]}", "a label", "a hole")
    try:
        values = list(map(float, row))
        fine = max(map(abs, values)) <= 3.4028235e38 and sum(values) == sum(values)
    except ValueError:
        fine = False
    if not fine:  # which of them?
        others = header[:label_at] + header[label_at + 1 :]
        values = [number_at(f"{path}, line {line}, column {n}", t) for n, t in zip(others, row, strict=True)]
    numbers.extend(values)
    return label


def _plain(label: str) -> str:
    """The label, a whole number without its fraction: HIGGS.csv has 1.000000000000000000e+00."""
    label = label.strip()
    try:
        value = float(label)
    except ValueError:
        return label
    if math.isnan(value):
        return ""
    return str(int(value)) if value.is_integer() else label


def _all_numbers(fields: list[str]) -> bool:
    try:
        return bool([float(field) for field in fields])
    except ValueError:
        return False


def _label_column(path: Path, header: list[str]) -> int:
    found = [at for at, name in enumerate(header) if name.lower() in LABEL_COLUMNS]
    if len(found) != 1 or len(header) < 2:
        shown = ", ".join(header[:8]) + (", ..." if len(header) > 8 else "")
        wanted = f"names of columns, one of them {', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}, and features"
        raise BlockSparseError.expected(f"{path}, line 1", wanted, shown or "nothing")
    return found[0]


def _in_order(labels: list[str]) -> tuple[str, ...]:
    try:
        return tuple(sorted(labels, key=float))
    except ValueError:
        return tuple(sorted(labels, key=lambda label: (label.lower(), label)))
