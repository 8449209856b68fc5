"""Reports of experiments as JSON, Markdown and PNG, from the finished runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from blocksparse.errors import BlockSparseError

from ..bench.report import where
from ..recipes import compare
from .experiment import Experiment, Runs


def write(name: str, experiment: Experiment, runs: Path, out: Path) -> list[Path]:
    """Writes the results as `NAME.json`, `NAME.md` and `NAME.png`.

    Args:
        name: of the files.
        experiment: whose runs they are.
        runs: the folder with them.
        out: the folder for the files.

    Raises:
        BlockSparseError: no run is finished, or the files cannot be written.
    """
    found = {
        contender: [compare.read(path) for path in paths] for contender, paths in experiment.finished(runs).items()
    }
    of = {contender: some for contender, some in found.items() if some}
    if not of:
        raise BlockSparseError.expected("runs", "finished runs of the experiment", f"none in {runs}")
    experiment.race(of)
    paths = [out / f"{name}.{kind}" for kind in ("json", "md", "png")]
    content = {
        "what": experiment.about,
        "runs": {c: [run.as_dict() | experiment.found(run) for run in some] for c, some in found.items()},
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        paths[1].write_text(_markdown(name, experiment, of), encoding="utf-8")
    except OSError as error:
        raise BlockSparseError.expected("out", "a folder to write to", f"{out} ({error.strerror})") from error
    experiment.picture(paths[2], of)
    return paths


def _markdown(name: str, experiment: Experiment, of: Runs) -> str:
    lines = [f"# {name}", "", f"{experiment.about}.", ""]
    table = [["", *of], *([title, *cells] for title, cells in experiment.rows(of))]
    head, *rows = zip(*table, strict=True) if experiment.in_rows else table
    lines += ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    machine = (next(iter(of.values()))[0].result or {})["machine"]
    paragraphs = [*experiment.notes(of), f"![{experiment.curves}]({name}.png)", where(machine)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(paragraphs) + "\n"


def spread(values: Sequence[float], digits: int | None = None) -> str:
    """Mean and standard deviation, in as many digits as a person reads; of a single value that alone.

    >>> from blocksparse_lab.experiments.report import spread
    >>> spread([10.25, 10.75]), spread([8]), spread([1.5, 2.5], digits=1)
    ('10.50 ± 0.35', '8.0000', '2.0 ± 0.7')
    """
    if digits is None:
        digits = 4 if max(values) < 10 else 2 if max(values) < 100 else 0
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.{digits}f}{deviation}"
