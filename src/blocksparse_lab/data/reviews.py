"""Texts with one of two labels (SST-2, the IMDB reviews, any csv file), and their encoding as bytes."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blocksparse import files
from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError

from . import csv_table
from .download import Progress, fetch, located
from .labels import drawn

IMDB_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
IMDB_HASH = "md5:7c2ac02c03563afcf9b574c7e56c153a"

# The whole sentences of the Stanford Sentiment Treebank, as Radford, Jozefowicz and Sutskever published them.
SST_URL = "https://raw.githubusercontent.com/openai/generating-reviews-discovering-sentiment/master/data/"
SST_HASHES = {
    "train": "sha256:6003623bcb35aad3a446a265b8931b7ccab61fcc10f2e9c1fec916ff67c7be35",
    "dev": "sha256:f34c4987fea208fefc2d62a1b42c83a766cbfc7ce58c2a878ef953cf91f01729",
    "test": "sha256:519cea7ed4d22fe7ec4eccbb3d5ba6d88902a3b15ce129f476aa8364463a9fc7",
}

TEXT_COLUMNS = ("text", "sentence", "review")
LABEL_COLUMNS = ("label", "sentiment")
HELD_OUT = 0.1


@dataclass(frozen=True)
class Labelled:
    """Texts with a label of 0 or 1 each."""

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> Labelled:
        """Return some of the texts, in the order of `rows`."""
        return Labelled([self.texts[row] for row in rows], [self.labels[row] for row in rows])


@dataclass(frozen=True)
class Splits:
    """Texts to train on, to validate with, and to test on once.

    Args:
        name: of the data.
        classes: names of the labels 0 and 1 in the data.
    """

    name: str
    classes: tuple[str, str]
    train: Labelled
    validation: Labelled
    test: Labelled

    def limited(self, count: int, seed: int = 0) -> Splits:
        """Return about `count` texts of each split, stratified by class.

        >>> from blocksparse_lab.data.reviews import Labelled, Splits
        >>> some = Labelled(list("abcdefgh"), [0, 1, 1, 1, 0, 1, 1, 1])
        >>> Splits("letters", ("no", "yes"), some, some, some).limited(4).train.labels
        [0, 1, 1, 1]
        """
        if count < 2:
            raise BlockSparseError.expected("limit", "2 texts or more, for both classes", count)

        def part(of: Labelled) -> Labelled:
            return of if len(of) <= count else of.take(stratified(of.labels, count, seed)[0])

        return Splits(self.name, self.classes, part(self.train), part(self.validation), part(self.test))


def encode(text: str) -> bytes:
    """Encode a text for a model: entities resolved, on one line, between a newline with a space and a space.

    This is the encoding of Radford, Jozefowicz and Sutskever, "Learning to Generate Reviews and Discovering Sentiment"
    (2017).

    >>> from blocksparse_lab.data.reviews import encode
    >>> encode("Plain &amp;\\nsimple. ")
    b'\\n Plain & simple. '
    """
    text = html.unescape(text).replace("\n", " ").strip()
    # JSON may contain half a surrogate pair, which UTF-8 cannot encode.
    return f"\n {text} ".encode(errors="replace")


def load(
    data: str | Path, data_dir: str | Path | None = None, seed: int = 0, progress: Progress | None = None
) -> Splits:
    """Load labelled texts by name, "sst" or "imdb", or from a csv file.

    Args:
        data: "sst", "imdb", or the path of a file for `read_csv`, which is split 80 / 10 / 10.
        data_dir: folder with the files of "sst" or "imdb"; by default they are downloaded.
        seed: draws, stratified by class, IMDB's validation part or all parts of a csv file.
        progress: called during a download with bytes so far and in all.
    """
    integer("seed", seed, 0)
    if str(data) == "sst":
        return sst(data_dir, progress)
    if str(data) == "imdb":
        return imdb(data_dir, seed, progress)
    path = files.path_of("data", data)
    if not os.path.isfile(path):
        raise BlockSparseError.expected("data", "sst, imdb or a csv file", data)
    everything, classes = read_csv(path)
    rarer = min(everything.labels.count(0), everything.labels.count(1))
    if rarer < 10:
        raise BlockSparseError.expected(path.name, "10 texts of each class or more, to split them", f"{rarer} of one")
    held_out, train = stratified(everything.labels, 2 * HELD_OUT, seed)
    rest = everything.take(held_out)
    validation, test = stratified(rest.labels, 0.5, seed)
    return Splits(path.name, classes, everything.take(train), rest.take(validation), rest.take(test))


def sst(data_dir: str | Path | None = None, progress: Progress | None = None) -> Splits:
    """Load the whole sentences of SST-2: 6920 to train on, 872 to validate with, 1821 to test on.

    Arguments are those of `load`.
    """
    parts = []
    for part, known_hash in SST_HASHES.items():
        name = f"{part}_binary_sent.csv"
        if data_dir is None:
            path = fetch(SST_URL + name, known_hash, f"sst/{name}", progress)
        else:
            path = files.first_existing("sst", data_dir, f"sst/{name}", name)
        parts.append(read_csv(path)[0])
    return Splits("sst", ("negative", "positive"), *parts)


def imdb(data_dir: str | Path | None = None, seed: int = 0, progress: Progress | None = None) -> Splits:
    """Load the labelled reviews of Maas et al. 2011: 25,000 to test on; a tenth of the other 25,000 to validate with.

    Arguments are those of `load`.
    """
    folder = _imdb(data_dir, progress)
    parts = []
    for part in ("train", "test"):
        negative, positive = (_reviews(folder / part / kind) for kind in ("neg", "pos"))
        parts.append(Labelled(negative + positive, [0] * len(negative) + [1] * len(positive)))
    validation, train = stratified(parts[0].labels, HELD_OUT, seed)
    return Splits("imdb", ("negative", "positive"), parts[0].take(train), parts[0].take(validation), parts[1])


def unlabelled(data_dir: str | Path | None = None, progress: Progress | None = None) -> list[str]:
    """Load the 50,000 unlabelled reviews of Maas et al., in the order of their numbers; arguments as for `imdb`."""
    return _reviews(_imdb(data_dir, progress) / "train" / "unsup")


def read_csv(path: str | Path) -> tuple[Labelled, tuple[str, str]]:
    """Read texts, labels and the names of both classes from a csv file in UTF-8.

    The first line names the columns: one of text, sentence and review, and one of label and sentiment. Labels are any
    two words or numbers; the smaller number, or the first in the alphabet, becomes 0.
    """
    rows = csv_table.records(path)
    line, header = next(rows, (1, []))
    header = [name.strip().lower() for name in header]
    text_at, label_at = (_column(path, header, names) for names in (TEXT_COLUMNS, LABEL_COLUMNS))
    texts: list[str] = []
    labels: list[str] = []
    classes: list[str] = []
    for line, row in rows:
        where = f"{path}, line {line}"
        if len(row) != len(header):
            raise BlockSparseError.expected(where, f"{len(header)} columns as in line 1", len(row))
        text, label = row[text_at], row[label_at].strip()
        if not text.strip() or not label:
            hole = "label" if text.strip() else "text"
            raise BlockSparseError.expected(where, "a text and a label", f"no {hole}")
        if label not in classes:
            if len(classes) == 2:
                raise BlockSparseError.expected(where, f"a label {classes[0]} or {classes[1]}", repr(label))
            classes.append(label)
        texts.append(text)
        labels.append(label)
    if len(classes) < 2:
        got = f"only {classes[0]} down to line {line}" if classes else "no row below the header"
        raise BlockSparseError.expected(str(path), "labels of two classes", got)
    negative, positive = csv_table.in_order(classes)
    return Labelled(texts, [int(label == positive) for label in labels]), (negative, positive)


def stratified(labels: Sequence[int], part: float, seed: int) -> tuple[list[int], list[int]]:
    """Draw rows with each class in proportion; return them and the other rows, both in ascending order.

    Args:
        labels: the class of each row, 0 or 1.
        part: a fraction of all rows if below 1, else a number of rows; at least one per class.
        seed: of the draw.

    >>> from blocksparse_lab.data.reviews import stratified
    >>> stratified([0, 0, 0, 0, 1, 1], 0.5, seed=0)
    ([0, 2, 5], [1, 3, 4])
    """
    share = part if part < 1 else part / len(labels)
    chosen = drawn(np.asarray(labels), 2, share, seed)
    return np.flatnonzero(chosen).tolist(), np.flatnonzero(~chosen).tolist()


def _column(path: str | Path, header: list[str], names: tuple[str, ...]) -> int:
    """Return the index of the only column with one of these names."""
    columns = [at for at, name in enumerate(header) if name in names]
    if len(columns) != 1:
        raise BlockSparseError.expected(f"{path}, line 1", f"one column named {' or '.join(names)}", header)
    return columns[0]


def _imdb(data_dir: str | Path | None, progress: Progress | None) -> Path:
    return located("imdb", ("aclImdb/train", "train"), data_dir, IMDB_URL, IMDB_HASH, progress).parent


def _reviews(folder: Path) -> list[str]:
    """Read the reviews in a folder, in the order of the numbers that their names start with."""
    try:
        paths = sorted(folder.glob("*_*.txt"), key=lambda path: (int(path.name.split("_")[0]), path.name))
        texts = [files.read(path, "imdb").decode() for path in paths]
    except BlockSparseError:
        raise
    except (OSError, ValueError) as error:
        raise BlockSparseError.expected("imdb", f"reviews NUMBER_STARS.txt in UTF-8 in {folder}", error) from error
    if not texts:
        raise BlockSparseError.expected("imdb", f"reviews NUMBER_STARS.txt in {folder}", "none")
    return texts
