"""`blocksparse sentiment`: probe a language model for sentiment, by the published protocol."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blocksparse.errors import BlockSparseError

from .terminal import make_folder, say, stages, table, write

if TYPE_CHECKING:
    from ..recipes.sentiment import Result


def sentiment(
    checkpoint: Annotated[Path, typer.Argument(help="Byte model's checkpoint or run folder.")],
    data: Annotated[str, typer.Option(help="sst, imdb, or a csv file with columns text and label.")] = "sst",
    data_dir: Annotated[Path | None, typer.Option(help="Folder with sst/ or aclImdb/; by default downloads.")] = None,
    limit: Annotated[int | None, typer.Option(help="About this many texts per part, for a quick test.")] = None,
    of: Annotated[
        str,
        typer.Option(
            help="State to probe: cell, the last cell state; squashed, its tanh; hidden, the last hidden state; "
            "fading, a fading mean of the hidden states; mean, their mean."
        ),
    ] = "cell",
    standardize: Annotated[bool, typer.Option("--standardize", help="Standardise features first.")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="Also fit TF-IDF of words and pairs of words.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON and PNG; by default the checkpoint's.")] = None,
    batch: Annotated[int, typer.Option(help="Texts per batch.")] = 128,
    chunk: Annotated[int, typer.Option(help="Bytes per call of the model; more need more memory.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Random seed of the split.")] = 0,
) -> None:
    """Fit a sparse linear probe on a language model's states of texts: accuracy, features used, best unit.

    L1 logistic regression; C is chosen on the validation set, and the test set is used once. Features are cached next
    to the checkpoint.
    """
    from .. import machine
    from ..bench import report
    from ..data import reviews
    from ..recipes import sentiment as recipe
    from ..training.trainer import device_of

    path = checkpoint / "last.safetensors" if checkpoint.is_dir() else checkpoint
    if not path.is_file():
        raise BlockSparseError.expected("checkpoint", "a file, or a folder with last.safetensors", checkpoint)
    for name, number in (("batch", batch), ("chunk", chunk)):
        if number < 1:
            raise BlockSparseError.expected(name, "a positive number", number)
    if of not in recipe.STATES:
        raise BlockSparseError.expected("of", f"one of {', '.join(recipe.STATES)}", of)
    device_of(device)
    report.figure_and_axes((1, 1))  # report a missing package now, not after hours
    folder = make_folder(path.parent if out is None else out)

    def load() -> Any:
        charlm = import_module("blocksparse_lab.recipes.charlm")
        return charlm.load(path).to(device)

    console, stderr = Console(), Console(stderr=True)
    with stages(stderr) as tell:
        splits = reviews.load(data, data_dir, seed, lambda done, total: tell(f"downloading {data}", done, total))
        whole = splits
        splits = splits if limit is None else splits.limited(limit, seed)
        cache = recipe.CachedFeatures(path)
        result = recipe.evaluate(
            load, splits, of=of, standardize=standardize, cache=cache, with_baseline=baseline,
            batch=batch, chunk=chunk, progress=tell,
        )  # fmt: skip

    sizes = [len(part) for part in (splits.train, splits.validation, splits.test)]
    named = escape(f"{splits.classes[0]} or {splits.classes[1]}")
    console.print(f"[bold]{escape(splits.name)}[/]: {named}", highlight=False)
    say(console, "{:,} texts to fit, {:,} to choose with, {:,} to test".format(*sizes), "dim")
    if splits != whole:
        full = len(whole.train) + len(whole.validation) + len(whole.test)
        warning = (
            f"a quick test of {sum(sizes):,} of {full:,} texts (--limit); do not compare it with published results"
        )
        say(console, warning, "yellow")
    console.print(_table(result))
    for line in [*_remarks(result), *filter(None, [cache.note])]:
        say(console, line, "yellow")

    facts = machine.machine(device)
    kind = f"-{of}" * (of != "cell") + "-standardized" * standardize + f"-limit{limit}" * (limit is not None)
    base = folder / f"sentiment-{Path(splits.name).stem}{kind}"
    settings = {
        "checkpoint": str(path), "checkpoint digest": cache.state, "limit": limit, "seed": seed, "device": device,
        "batch": batch, "chunk": chunk, "strengths": list(recipe.STRENGTHS), "solver seed": recipe.SEED,
    }  # fmt: skip
    content = {
        "what": "sentiment probe on the states of a byte language model",
        "machine": facts | {"scikit-learn": recipe.sklearn_version()},
        "settings": settings,
        "result": result.as_dict(),
    }
    if result.unit is not None:
        recipe.picture(base.with_name(f"{base.name}.png"), result, machine.where(facts))
    write(console, "out", base.with_name(f"{base.name}.json"), content, " and .png" if result.unit is not None else "")


def _table(result: Result) -> Table:
    """Build the table of accuracies."""
    probe, unit, words = result.probe, result.unit, result.baseline
    title = f"probe, {probe.used:,} of {result.width:,} features, C {_power(probe.strength)}"
    rows: list[tuple[str, Any, str | None]] = [(title, probe, "bold")]
    if unit is not None:
        rows.append((f"unit {unit.index} alone", unit, None))
    if words is not None:
        rows.append((f"TF-IDF, {words.terms:,} terms, C {_power(words.strength)}", words, None))
    made = table(("", "train", "validation", "test", "test error"))
    for title, of, style in rows:
        made.add_row(
            title, *(f"{100 * part:.1f} %" for part in (of.train, of.validation, of.test, 1 - of.test)), style=style
        )
    return made


def _power(strength: float) -> str:
    return f"2^{math.log2(strength):g}"


def _remarks(result: Result) -> list[str]:
    """Return warnings about the result."""
    remarks = []
    if result.unit is None:
        remarks.append("no feature helps on the validation part: all coefficients are zero, and there is no best unit")
    if not result.probe.converged:
        remarks.append("the solver reached its limit of iterations; the coefficients are approximate")
    strengths = list(result.probe.tried)
    if result.unit is not None and result.probe.strength == strengths[-1]:
        remarks.append(f"C {_power(strengths[-1])} is the largest that was tried")
    return remarks
