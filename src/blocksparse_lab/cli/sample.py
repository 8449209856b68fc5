"""`blocksparse sample`: text from a language model, or images from a PixelCNN."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TextColumn

from .terminal import COUNT, LEFT, bar, say


def sample(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint or run folder.")],
    prompt: Annotated[str, typer.Option(help="Text: the beginning.")] = "",
    length: Annotated[int, typer.Option(help="Text: number of bytes.")] = 1000,
    temperature: Annotated[
        float, typer.Option(help="Text: below 1 prefers likely bytes; 0 takes the likeliest.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Text: draw only from this many likeliest bytes.")] = None,
    count: Annotated[int, typer.Option(help="Images: how many.")] = 16,
    out: Annotated[Path, typer.Option(help="Images: the PNG file.")] = Path("samples.png"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Write text byte by byte, or draw images into one PNG, depending on the model.

    Invalid UTF-8 shows as a replacement character.
    """
    from blocksparse import checkpoint as checkpoints

    from ..recipes import pixelcnn

    path = checkpoint / "last.safetensors" if checkpoint.is_dir() else checkpoint
    if checkpoints.task_of(checkpoints.about(path)).get("kind") == pixelcnn.KIND:
        _draw(path, count, out, seed)
    else:
        _write(path, prompt, length, temperature, top_k, seed)


def _draw(path: Path, count: int, out: Path, seed: int) -> None:
    """Draw images into a PNG."""
    from blocksparse.topology.drawings.style import image_writer

    from ..recipes import pixelcnn

    model, (_, height, width) = pixelcnn.load(path)
    write = image_writer(out)
    console = Console()
    with bar(console, *COUNT[:3], TextColumn("pixels of each,"), *LEFT[1:], transient=False) as progress:
        task = progress.add_task("drawing", total=height * width)
        images = pixelcnn.sample(
            model, count, height, width, seed=seed, progress=lambda done, _: progress.update(task, completed=done)
        )
    write(pixelcnn.grid(images))
    say(console, f"wrote {out}: {count} images of {height} x {width}")


def _write(path: Path, prompt: str, length: int, temperature: float, top_k: int | None, seed: int) -> None:
    """Print text byte by byte."""
    from ..recipes import language_model

    model = language_model.load(path)
    console = Console()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    console.out(_harmless(prompt), end="", style="bold", highlight=False)
    written = language_model.sample(
        model, prompt.encode(errors="replace"), length, temperature=temperature, top_k=top_k, seed=seed
    )
    for byte in written:
        console.out(_harmless(decoder.decode(byte)), end="", highlight=False)
        console.file.flush()
    console.out(_harmless(decoder.decode(b"", final=True)), highlight=False)


def _harmless(text: str) -> str:
    """Replace characters that control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
