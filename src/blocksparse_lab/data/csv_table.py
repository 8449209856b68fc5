"""Read csv files: tables of numbers with a column of labels, or any rows."""

from __future__ import annotations

import csv
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError

LABEL_COLUMNS = ("label", "class", "target")
# Largest float32.
LARGEST = 3.4028235e38


def records(path: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the nonempty rows of a csv file in UTF-8, gzipped or not, with the number of their first line.

    Raises:
        BlockSparseError: the file is missing, not UTF-8 or not csv; a row, which quoted fields may spread over lines,
            has more than 16 Mi characters; a field has more than 131,072 characters. The error names the line.
    """
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        for line, text in files.lines(path, "csv file", "latin1"):
            taken += len(text)
            if taken > files.MAX_IN_A_LINE:
                wanted = f"rows of at most {files.MAX_IN_A_LINE:,} characters"
                raise BlockSparseError.expected(f"{path}, line {line}", wanted, "more")
            try:  # not in files.lines, which decodes many lines at once
                yield text.encode("latin1").decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                got = f"byte {error.object[error.start]:#x}"
                raise BlockSparseError.expected(f"{path}, line {line}", "UTF-8", got) from error

    reader = csv.reader(texts(), strict=True)
    while True:
        first, taken = reader.line_num + 1, 0
        try:
            row = next(reader, None)
        except csv.Error as error:
            wanted = "a row of a csv file"
            if "larger" in str(error):  # than the limit of Python's csv module
                wanted = f"fields of at most {csv.field_size_limit():,} characters"
            raise BlockSparseError.expected(f"{path}, line {first}", wanted, error) from error
        if row is None:
            return
        if row:
            yield first, row


def read(path: str | Path, columns: Sequence[str] | None = None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Read features float32 `[n, features]`, labels int64 `[n]` and the names of the classes.

    The first line names the columns: one of label, class and target, and features. Labels are numbers or words; classes
    are in numeric or alphabetic order.

    Args:
        path: the file, gzipped or not.
        columns: names for a file without such a line.

    Raises:
        BlockSparseError: as for `records`; a hole, or a field that is not a finite number, with line and column; a line
            with another number of columns than the first; labels that are all equal, or that look like the target of a
            regression: numbers with more than 1000 different values that are more than half the rows, or, with
            fractions, more than 20 that are more than half the rows, or more than 1000.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from blocksparse_lab.data import csv_table
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "animals.csv")
    ...     _ = path.write_text("legs,wings,label\\n4,0,cat\\n2,2,bird\\n")
    ...     csv_table.read(path)
    (tensor([[4., 0.],
            [2., 2.]]), tensor([1, 0]), ('bird', 'cat'))
    """
    numbers, indices = array("f"), array("q")
    names: dict[str, int] = {}
    rows = records(path)
    line, header = next(rows, (1, []))
    if columns is not None and all(_is_number(field) for field in header):
        rows, header = itertools.chain([(line, header)], rows), list(columns)
    header = [name.strip() for name in header]
    label_at = _label_column(path, header)
    features = header[:label_at] + header[label_at + 1 :]
    for line, row in rows:
        where = f"{path}, line {line}"
        if len(row) != len(header):
            raise BlockSparseError.expected(where, f"{len(header)} columns", len(row))
        label = _plain(row.pop(label_at))
        if not label:
            raise BlockSparseError.expected(f"{where}, column {header[label_at]}", "a label", "a hole")
        numbers.extend(numbers_at(where, row, features))
        indices.append(names.setdefault(label, len(names)))
    if len(names) < 2:
        got = f"only {next(iter(names))} down to line {line}" if names else "no row"
        raise BlockSparseError.expected(str(path), "labels of two classes or more", got)
    _check_classes(f"{path}, column {header[label_at]}", names, len(indices))
    classes = in_order(names)
    at = {name: number for number, name in enumerate(classes)}
    order = np.array([at[name] for name in names], dtype=np.int64)
    values = np.frombuffer(numbers, np.float32).reshape(-1, len(features)).copy()
    return torch.from_numpy(values), torch.from_numpy(order[np.frombuffer(indices, np.int64)]), classes


def number(text: str) -> float:
    """Parse a number of digits 0 to 9; Python's float would also accept 1_0 and digits of other scripts.

    Raises:
        ValueError: not a number.
    """
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def numbers_at(where: str, fields: Sequence[str], columns: Iterable[object]) -> list[float]:
    """Parse the numbers in the fields of a row.

    Raises:
        BlockSparseError: a field is not a number, or not in float32's range; with the column.
    """
    together = "".join(fields)
    try:
        values = list(map(float, fields)) if together.isascii() and "_" not in together else []
    except ValueError:
        values = []
    if values and all(map(LARGEST.__ge__, map(abs, values))):
        return values
    wrong = (pair for pair in zip(columns, fields, strict=True) if not _is_number(pair[1], LARGEST))
    column, text = next(wrong)
    got = repr(text[:40]) if text.strip() else "a hole"
    raise BlockSparseError.expected(f"{where}, column {column}", "a finite number", got)


def _plain(label: str) -> str:
    """Normalise a label: whole numbers lose their fraction, as HIGGS.csv has 1.000000000000000000e+00."""
    label = label.strip()
    if label.isascii() and label.isdigit():
        return label.lstrip("0") or "0"  # as floats, large labels would become equal
    if not _is_number(label):
        return label
    value = float(label)
    if math.isnan(value):
        return ""
    return str(int(value)) if value.is_integer() else label


def _is_number(text: str, most: float | None = None) -> bool:
    """Return whether a cell is a number, of magnitude `most` at most if given."""
    try:
        value = number(text)
    except ValueError:
        return False
    return most is None or abs(value) <= most


def _label_column(path: str | Path, header: list[str]) -> int:
    """Return the index of the column of labels."""
    columns = [at for at, name in enumerate(header) if name.lower() in LABEL_COLUMNS]
    if len(columns) != 1 or len(header) < 2:
        shown = ", ".join(header[:8]) + (", ..." if len(header) > 8 else "")
        wanted = f"names of columns, one of them {', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}, and features"
        raise BlockSparseError.expected(f"{path}, line 1", wanted, shown or "nothing")
    return columns[0]


def _check_classes(where: str, names: Iterable[str], rows: int) -> None:
    """Raise if the labels look like the target of a regression: too many different numbers."""
    if not all(map(_is_number, names)):
        return
    numbers = list(map(float, names))
    count, whole = len(numbers), all(map(float.is_integer, numbers))
    if count > (max(1000, rows // 2) if whole else min(max(20, rows // 2), 1000)):
        wanted = "labels of classes (as words, if there are so many)"
        got = f"{count:,} different numbers in {rows:,} rows, which looks like the target of a regression"
        raise BlockSparseError.expected(where, wanted, got)


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Sort class names by number, if all are numbers, or alphabetically."""
    try:
        return tuple(sorted(labels, key=number))
    except ValueError:
        return tuple(sorted(labels, key=lambda label: (label.lower(), label)))
