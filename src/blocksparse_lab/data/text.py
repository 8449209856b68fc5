"""Plain text as bytes, from a file or from Python's help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blocksparse import files
from blocksparse.errors import BlockSparseError


@dataclass(frozen=True)
class Text:
    """A text cut in two: a head to train on, and a tail that training never reads.

    Args:
        name: of the text.
        train, held_out: uint8 `[bytes]`.
    """

    name: str
    train: Tensor
    held_out: Tensor


def python_topics() -> bytes:
    """Return the texts of `help("topics")`, sorted by name: 0.4 to 0.8 MB of English, by Python version.

    >>> from blocksparse_lab.data import text
    >>> text.python_topics()[:37].decode()
    'The "assert" statement\\n**************'
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def read(path: str | Path) -> bytes:
    """Return the bytes of a file, in any encoding."""
    data = files.read(path, "text")
    if not data:
        raise BlockSparseError.expected("text", "a file with some bytes in it", f"{path}, which is empty")
    return data


def split(data: bytes, context: int, *, name: str = "text", held_out: float = 0.1) -> Text:
    """Cut `data` into a head to train on and a held-out tail.

    Args:
        data: the text.
        context: bytes before a predicted one; both parts must be longer.
        name: of the text.
        held_out: fraction of the bytes in the tail.

    >>> from blocksparse_lab.data import text
    >>> parts = text.split(b"a rose is a rose is a rose", context=4, held_out=0.25)
    >>> bytes(parts.held_out.tolist())
    b'a rose'
    """
    if not 1e-9 <= held_out <= 1 - 1e-9:
        raise BlockSparseError.expected("held_out", "a fraction above 0 and below 1", held_out)
    tail = int(len(data) * held_out)
    if min(tail, len(data) - tail) <= context:
        least = int((context + 1) / min(held_out, 1 - held_out)) + 1
        raise BlockSparseError.expected(
            name, f"about {least} bytes or more, for a context of {context} in both parts", f"{len(data)} bytes"
        )
    everything = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return Text(name, everything[: len(data) - tail], everything[len(data) - tail :])


def windows(data: Tensor, positions: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return the `context` bytes before each position, and the byte at it, to be predicted.

    Args:
        data: uint8 `[bytes]`.
        positions: int64 `[n]`, each from `context` to `len(data) - 1`.
        context: length of a window.

    Returns:
        int64 `[n, context]` and `[n]`.

    >>> import torch
    >>> from blocksparse_lab.data import text
    >>> text.windows(torch.arange(10, dtype=torch.uint8), torch.tensor([3, 9]), context=3)
    (tensor([[0, 1, 2],
            [6, 7, 8]]), tensor([3, 9]))
    """
    before = positions.unsqueeze(1) + torch.arange(-context, 0)
    return data[before].long(), data[positions].long()
