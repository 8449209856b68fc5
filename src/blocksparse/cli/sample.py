"""`blocksparse sample`: text that a language model writes."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of a byte model, or the folder of a run.")],
    prompt: Annotated[str, typer.Option(help="What comes before.")] = "",
    length: Annotated[int, typer.Option(help="Bytes to write.")] = 1000,
    temperature: Annotated[float, typer.Option(help="Below 1 prefers the likely; 0 takes the likeliest.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Only of so many likeliest bytes.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
) -> None:
    """Write text, byte by byte as it comes. What is no UTF-8 shows as a replacement character."""
    from ..recipes import charlm

    model = charlm.load(checkpoint)
    console = Console()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    console.out(_harmless(prompt), end="", style="bold", highlight=False)
    written = charlm.sample(
        model, prompt.encode(errors="replace"), length, temperature=temperature, top_k=top_k, seed=seed
    )
    for byte in written:
        console.out(_harmless(decoder.decode(byte)), end="", highlight=False)
        console.file.flush()
    console.out(_harmless(decoder.decode(b"", final=True)), highlight=False)


def _harmless(text: str) -> str:
    """Without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
