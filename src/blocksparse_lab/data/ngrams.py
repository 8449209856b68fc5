"""Texts as hashed words and pairs of words: wide rows with few nonzero features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError

from .labels import digest
from .reviews import Splits

FEATURES = 65_536
LENGTH = np.float32(32)


class Ngrams:
    """TF-IDF of the hashed words and pairs of words of labelled texts, stored as scipy's CSR; batches are dense.

    Rows are scaled to length 32: with TF-IDF's 1 a first layer learns slowly, and with 256, as of standardised rows, a
    net starts with large wrong outputs. Word frequencies are those of the training texts.

    Args:
        splits: texts to train and to test on.
        choosing: evaluate on the validation texts instead of the test texts.
        features: of a row.

    >>> import numpy as np
    >>> from blocksparse_lab.data.ngrams import Ngrams
    >>> from blocksparse_lab.data.reviews import Labelled, Splits
    >>> some = Labelled(["a good film", "a bad film"], [1, 0])
    >>> rows = Ngrams(Splits("films", ("bad", "good"), some, some, some), features=64)
    >>> x, y = rows.take(np.array([1]))
    >>> x.shape, y, round(float(x.norm()), 3)
    (torch.Size([1, 64]), tensor([0]), 32.0)
    """

    def __init__(self, splits: Splits, choosing: bool = False, features: int = FEATURES):
        try:
            from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
        except ImportError as error:
            message = f"hashed words need scikit-learn ({error}): pip install scikit-learn"
            raise BlockSparseError(message) from error
        self.splits, self.features = splits, features
        self.name, self.classes = splits.name, splits.classes
        others = splits.validation if choosing else splits.test
        self.rows, self.tested = len(splits.train), len(others)
        counts = HashingVectorizer(n_features=features, ngram_range=(1, 2), norm=None, alternate_sign=False)
        rarity = TfidfTransformer().fit(counts.transform(splits.train.texts))
        self._parts = [
            (LENGTH * rarity.transform(counts.transform(part.texts)).astype(np.float32), torch.tensor(part.labels))
            for part in (splits.train, others)
        ]

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return rows to train on, by index, and their labels."""
        return self._dense(0, rows)

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the held-out rows and their labels in batches."""
        return (self._dense(1, rows.numpy()) for rows in torch.arange(self.tested).split(batch))

    def digest(self) -> dict[str, Any]:
        """Return facts that identify the data, ready for JSON."""
        parts = [torch.from_numpy(part) for of, _ in self._parts for part in (of.indptr, of.indices, of.data)]
        sizes = {"rows": self.rows, "features": self.features, "classes": len(self.classes)}
        return {"name": f"{self.name}, words and pairs", **sizes, "sha256": digest(*parts)}

    def _dense(self, part: int, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        features, labels = self._parts[part]
        return torch.from_numpy(features[rows].toarray()), labels[torch.from_numpy(rows)]
