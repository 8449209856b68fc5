"""The check of byte texts that the language models share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blocksparse.errors import BlockSparseError


def check_bytes(name: str, text: Any, batch: int | None = None) -> None:
    """Raise a BlockSparseError unless the text is integers `[steps, batch]`."""
    integers = isinstance(text, Tensor) and not (text.is_floating_point() or text.is_complex())
    if integers and text.dim() == 2 and batch in (None, text.shape[1]):
        return
    got = f"{list(text.shape)}, {text.dtype}" if isinstance(text, Tensor) else type(text).__name__
    raise BlockSparseError.expected(name, f"integer bytes [steps, {'batch' if batch is None else batch}]", got)
