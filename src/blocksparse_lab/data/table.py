"""Labelled rows of numbers to train and test a classifier on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError

from .labels import check, digest, drawn

TEST_PART = 0.2
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Table:
    """Rows to train on and to test on.

    Args:
        name: of the table.
        train, test: float32 `[n, features]`.
        train_labels, test_labels: int64 `[n]`, class indices.
        classes: names of the classes.
        validation, validation_labels: optional rows to validate with.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    validation: Tensor | None = None
    validation_labels: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise BlockSparseError.expected(self.name, "two classes or more", ", ".join(self.classes) or "none")
        for part, (rows, labels) in self._parts().items():
            name = f"{self.name}, {part}"
            check(name, rows, labels, torch.float32, [self.features], len(self.classes))
            if not all(bool(some.isfinite().all()) for some in rows.split(_ROWS_AT_ONCE)):
                raise BlockSparseError.expected(name, "finite numbers", "infinite ones or NaN")

    def _parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The features and labels of the training, test and, if there is one, validation set."""
        parts = {"train": (self.train, self.train_labels), "test": (self.test, self.test_labels)}
        if self.validation is not None and self.validation_labels is not None:
            parts["validation"] = (self.validation, self.validation_labels)
        return parts

    @property
    def features(self) -> int:
        return self.train.shape[-1]

    @property
    def rows(self) -> int:
        """Number of rows to train on."""
        return len(self.train)

    @property
    def tested(self) -> int:
        """Number of rows of `held_out`."""
        return len(self._held_out()[0])

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return rows to train on, by index, and their labels."""
        index = torch.from_numpy(rows)
        return self.train[index], self.train_labels[index]

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the validation rows, or the test rows if there are none, and their labels, in batches."""
        rows, labels = self._held_out()
        return zip(rows.split(batch), labels.split(batch), strict=True)

    def _held_out(self) -> tuple[Tensor, Tensor]:
        return self._parts().get("validation") or (self.test, self.test_labels)

    def digest(self) -> dict[str, Any]:
        """Return facts that identify the data, ready for JSON."""
        sizes = {"rows": self.rows, "features": self.features, "classes": len(self.classes)}
        tensors = [tensor for part in self._parts().values() for tensor in part]
        return {"name": self.name, **sizes, "sha256": digest(*tensors)}


def standardised(train: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Standardise each feature by its mean and deviation over the training rows, in place; constant ones become 0.

    The tensors are float32 `[n, features]`.

    >>> import torch
    >>> from blocksparse_lab.data.table import standardised
    >>> standardised(torch.tensor([[1.0, 7.0], [3.0, 7.0]]), torch.tensor([[5.0, 7.0]]))
    (tensor([[-1.,  0.],
            [ 1.,  0.]]), tensor([[3., 0.]]))
    """
    # numpy's sums are the same for any number of threads.
    rows = train.numpy()
    mean = rows.mean(0, dtype=np.float64)
    squares = np.zeros_like(mean)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        squares += np.square(rows[start : start + _ROWS_AT_ONCE] - mean).sum(0)
    deviation = np.sqrt(squares / len(rows))
    deviation[deviation <= 1e-12 * np.abs(mean)] = np.inf
    for part in (train, *others):
        array = part.numpy()
        for start in range(0, len(array), _ROWS_AT_ONCE):
            some = array[start : start + _ROWS_AT_ONCE]
            some[:] = (some - mean) / deviation
    return train, *others


def split(name: str, rows: Tensor, labels: Tensor, classes: tuple[str, ...], seed: int = 0) -> Table:
    """Return a standardised table; a fifth of each class, drawn with the seed, is to test on."""
    for label, count in zip(classes, labels.bincount(minlength=len(classes)).tolist(), strict=True):
        if count < 2:
            raise BlockSparseError.expected(name, f"two rows or more of class {label}, to split them", count)
    test = torch.from_numpy(drawn(labels.numpy(), len(classes), TEST_PART, seed))
    train_rows, test_rows = standardised(rows[~test], rows[test])
    return Table(name, train_rows, labels[~test], test_rows, labels[test], classes)
