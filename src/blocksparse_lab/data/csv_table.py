"""Tables of numbers in csv files, with a column of labels."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError

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
            fewer or more columns than the first; labels that are all the same, or numbers with so many different values
            that they look like the target of a regression: more different ones than half the rows and 1000, or of
            those with fractions more than half the rows and 20, or than 1000.

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
    path = files.path_of("csv file", path)
    numbers, found = array("f"), array("q")
    names: dict[str, int] = {}
    line = 0
    try:
        told = rows(path, (text for _, text in files.lines(path, "csv file", "utf-8-sig")))
        _, header = next(told, (0, []))
        header = [name.strip() for name in header]
        waiting = None
        if columns is not None and _all_numbers(header):
            waiting, header = (1, header), list(columns)
        label_at = _label_column(path, header)
        line = 1
        while waiting is not None or (waiting := next(told, None)) is not None:
            line, row = waiting
            if row:
                label = _append(path, line, header, label_at, row, numbers)
                found.append(names.setdefault(label, len(names)))
            waiting = None
    except (csv.Error, UnicodeDecodeError) as error:
        raise BlockSparseError.expected(f"{path}, after line {line}", "rows of a csv file in UTF-8", error) from error
    if len(names) < 2:
        got = f"only {next(iter(names))} down to line {line}" if names else "no row"
        raise BlockSparseError.expected(str(path), "labels of two classes or more", got)
    _check_classes(f"{path}, column {header[label_at]}", names, len(found))
    features = torch.from_numpy(np.frombuffer(numbers, np.float32).reshape(-1, len(header) - 1).copy())
    classes = in_order(list(names))
    at = {name: number for number, name in enumerate(classes)}
    order = np.array([at[name] for name in names], dtype=np.int64)
    return features, torch.from_numpy(order[np.frombuffer(found, np.int64)]), classes


def rows(path: Path, texts: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows of a csv file whose lines are given, each with the number of its last line.

    Raises:
        BlockSparseError: a row of more than 16 Mi characters, which quoted fields may spread over lines.
        csv.Error: no csv.
    """
    taken = 0

    def counted() -> Iterator[str]:
        nonlocal taken
        for text in texts:
            taken += len(text)
            if taken > files.MOST_IN_A_LINE:
                wanted = f"rows of {files.MOST_IN_A_LINE:,} characters at most"
                raise BlockSparseError.expected(f"{path}, line {reader.line_num + 1}", wanted, "more")
            yield text

    reader = csv.reader(counted(), strict=True)
    for row in reader:
        taken = 0
        yield reader.line_num, row


def number(text: str) -> float:
    """The number in a field, in digits from 0 to 9; Python itself would also read 1_0 and other scripts' digits.

    Raises:
        ValueError: not a number.
    """
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def number_at(where: str, text: str) -> float:
    """The number in a field.

    Raises:
        BlockSparseError: there is none, or one that float32 does not have.
    """
    try:
        value = number(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= 3.4028235e38:
        raise BlockSparseError.expected(where, "a finite number", repr(text[:40]) if text.strip() else "a hole")
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
        text = "".join(row)
        plain = "_" not in text and text.isascii()
        fine = plain and max(map(abs, values)) <= 3.4028235e38 and sum(values) == sum(values)
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
    if label.isascii() and label.isdigit():
        return label.lstrip("0") or "0"  # as a float, large ones would become one class
    try:
        value = number(label)
    except ValueError:
        return label
    if math.isnan(value):
        return ""
    return str(int(value)) if value.is_integer() else label


def _all_numbers(fields: list[str]) -> bool:
    try:
        return bool([number(field) for field in fields])
    except ValueError:
        return False


def _label_column(path: Path, header: list[str]) -> int:
    found = [at for at, name in enumerate(header) if name.lower() in LABEL_COLUMNS]
    if len(found) != 1 or len(header) < 2:
        shown = ", ".join(header[:8]) + (", ..." if len(header) > 8 else "")
        wanted = f"names of columns, one of them {', '.join(LABEL_COLUMNS[:-1])} or {LABEL_COLUMNS[-1]}, and features"
        raise BlockSparseError.expected(f"{path}, line 1", wanted, shown or "nothing")
    return found[0]


def _check_classes(where: str, names: Iterable[str], rows: int) -> None:
    """Refuses what looks like the target of a regression: too many classes, all of them numbers."""
    try:
        numbers = [number(name) for name in names]
    except ValueError:
        return
    count, whole = len(numbers), all(map(float.is_integer, numbers))
    if count > (max(1000, rows // 2) if whole else min(max(20, rows // 2), 1000)):
        wanted = "labels of classes (words, where there are that many)"
        got = f"{count:,} different numbers in {rows:,} rows, which looks like the target of a regression"
        raise BlockSparseError.expected(where, wanted, got)


def in_order(labels: list[str]) -> tuple[str, ...]:
    """The names of classes in the order of the numbers that they are, or else of the alphabet."""
    try:
        return tuple(sorted(labels, key=number))
    except ValueError:
        return tuple(sorted(labels, key=lambda label: (label.lower(), label)))
