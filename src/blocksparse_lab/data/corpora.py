"""Texts for language models by name, from downloads or local files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from blocksparse import files
from blocksparse.errors import BlockSparseError

from . import reviews, text
from .download import Progress, located


class Source(NamedTuple):
    """File name of a text, its size if known, and its URL."""

    file: str
    size: int | None = None
    url: str | None = None
    known_hash: str = ""


# enwik8 and text8 are the first 10^8 bytes of a Wikipedia dump of 2006, raw and cleaned: mattmahoney.net/dc.
SOURCES = {
    "enwik8": Source(
        "enwik8",
        10**8,
        "http://mattmahoney.net/dc/enwik8.zip",
        "sha256:547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
    "text8": Source(
        "text8",
        10**8,
        "http://mattmahoney.net/dc/text8.zip",
        "sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
    ),
    "tinyshakespeare": Source(
        "tinyshakespeare.txt",
        1_115_394,
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "wikipedia": Source("wikipedia_en.txt"),
    "enwik8_prefix": Source("enwik8_prefix"),
}

NAMES = (*SOURCES, "imdb", "python")


def load(name: str, data_dir: str | Path | None = None, progress: Progress | None = None) -> bytes:
    """Return a text as bytes.

    Args:
        name: "enwik8", "text8", "tinyshakespeare", "imdb" (the unlabelled reviews, encoded as in the sentiment
            protocol), "python" (Python's help topics, without download), "wikipedia" and "enwik8_prefix" (only from
            `data_dir`), or any file in `data_dir`.
        data_dir: folder with the files; by default they are downloaded.
        progress: called during a download with bytes so far and in all.

    >>> from blocksparse_lab.data import corpora
    >>> corpora.load("python")[:22]
    b'The "assert" statement'
    """
    if name == "python":
        return text.python_topics()
    if name == "imdb":
        return b"".join(map(reviews.encode, reviews.unlabelled(data_dir, progress)))
    if isinstance(name, str) and name in SOURCES:
        file, size, url, known_hash = SOURCES[name]
        data = text.read(located(name, (file, f"text/{file}"), data_dir, url, known_hash, progress))
        if size is not None and size != len(data):
            raise BlockSparseError.expected(name, f"all of its {size:,} bytes", f"{len(data):,} bytes")
        return data
    if data_dir is not None and isinstance(name, str):
        path = files.path_of("data_dir", data_dir) / name
        if os.path.isfile(path):
            return text.read(path)
    more = f" or a file in {data_dir}" if data_dir is not None else ", or a file's name with its folder as --data-dir"
    if isinstance(name, str) and os.path.isfile(name):
        more = f" (for a file of your own: --text {name})"
    raise BlockSparseError.expected("text", f"one of {', '.join(NAMES)}{more}", repr(name))
