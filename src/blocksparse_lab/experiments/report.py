"""Reports of experiments: JSON from the finished runs, and Markdown and PNG from that JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from blocksparse.checkpoint import read_json
from blocksparse.errors import BlockSparseError

from ..bench.report import columns, markdown, rows, write_json, write_text
from ..machine import commits, where
from ..training import compare
from ..training.compare import Run
from .equal_seconds import NOTE
from .experiment import UNPAIRED, Experiment, Results, run_folder, seed_of

MACHINE = frozenset(("cpu", "isa", "torch", "blocksparse", "commit"))  # facts that reports name
POINTS = 8  # most points of a saved curve


def write(name: str, experiment: Experiment, runs: Path, out: Path, add: bool = False) -> list[Path]:
    """Write `NAME.json` with the results, and from it `NAME.md` and `NAME.png`.

    With `add`, runs of the existing report remain unless a run of the same contender and seed is finished here. Its
    reasons of runs without a result remain in any case, until these runs are finished.

    Raises:
        BlockSparseError: no run is finished, runs of the existing report would be lost, or a file cannot be written.
    """
    of = {contender: [_read(path) for path in paths] for contender, paths in experiment.finished(runs).items() if paths}
    if not of:
        raise BlockSparseError.expected("runs", "finished runs of the experiment", f"none in {runs}")
    experiment.race(of)
    known: dict[str, Sequence[Run]] = {
        contender: [replace(run, config=run.config | {"facts": run.facts | experiment.facts(run)}) for run in some]
        for contender, some in of.items()
    }
    if add:
        old = existing_runs(name, out)
        known = {
            one: sorted({**old.get(one, {}), **{_seed(run): run for run in known.get(one, ())}}.values(), key=_seed)
            for one in experiment.contenders
            if one in known or one in old
        }
    else:
        check_no_loss(name, out, {one: {_seed(run) for run in some} for one, some in known.items()})
    made = {run_folder(runs, one, _seed(run)).name for one, some in known.items() for run in some}
    reasons = {**_existing_report(name, out).left_out, **experiment.left_out(runs)}
    left_out = {run: why for run, why in reasons.items() if run not in made}
    save(out / f"{name}.json", experiment, Results(known, left_out, experiment.more()))
    return [out / f"{name}.json", *draw(name, experiment, out)]


def _read(path: Path) -> Run:
    """Read a finished run, and check its seed and its machine."""
    run = compare.read(path)
    if (seed := run.settings.get("seed")) != seed_of(path):
        raise BlockSparseError.expected(f"{path}, seed", f"{seed_of(path)}, as in its name", seed)
    if run.result is not None and not _has_machine(run):
        got = f"{run.result.get('machine')!r:.99}"
        raise BlockSparseError.expected(f"{path / 'result.json'}, machine", ", ".join(sorted(MACHINE)), got)
    return run


def _has_machine(run: Run) -> bool:
    machine = (run.result or {}).get("machine")
    return isinstance(machine, dict) and machine.keys() >= MACHINE


def existing_runs(name: str, out: Path) -> dict[str, dict[int, Run]]:
    """Return the runs of a report by contender and seed; {} without a report."""
    return {one: {_seed(run): run for run in some} for one, some in _existing_report(name, out).runs.items()}


def _existing_report(name: str, out: Path) -> Results:
    path = out / f"{name}.json"
    return _report(path, name) if path.exists() else Results({})


def _report(path: Path, name: str) -> Results:
    """Read a report and check that it is of this experiment."""
    of = load(path)
    if of.experiment not in (None, name):
        raise BlockSparseError.expected(str(path), f"the report of {name}", of.experiment)
    return of


def check_no_loss(name: str, out: Path, seeds: Mapping[str, Collection[int]]) -> None:
    """Raise if a report of these contenders and seeds would replace one that has others."""
    lost = {one: sorted(runs.keys() - set(seeds.get(one, ()))) for one, runs in existing_runs(name, out).items()}
    if lost_runs := [f"{one}, seed {', '.join(map(str, some))}" for one, some in lost.items() if some]:
        wanted = f"a folder without another report of {name}, or --add, which keeps its runs"
        raise BlockSparseError.expected("out", wanted, f"{out}, whose report has {'; '.join(lost_runs)} too")


def _seed(run: Run) -> int:
    return int(run.settings["seed"])


def _kind(machine: Mapping[str, Any]) -> str:
    """Return the GPU that a run used, or the instruction set."""
    gpu: Mapping[str, Any] = machine.get("gpu") or {}
    return str(gpu.get("name") or machine["isa"] or "no compiled core")


def draw(name: str, experiment: Experiment, out: Path) -> list[Path]:
    """Write `NAME.md` and `NAME.png` from `NAME.json` in the same folder."""
    path = out / f"{name}.json"
    of = _report(path, name)
    if not any(of.runs.values()):
        raise BlockSparseError.expected(str(path), f"the report of {name}", "one without runs")
    if others := of.runs.keys() - experiment.contenders.keys():
        raise BlockSparseError.expected(str(path), f"the report of {name}", f"runs of {', '.join(sorted(others))}")
    text, picture = out / f"{name}.md", out / f"{name}.png"
    by_contender = {one: [(run.result or {})["machine"] for run in runs] for one, runs in of.runs.items()}
    machines = list(chain.from_iterable(by_contender.values()))
    parts = [f"# {name}", f"{experiment.about}."]
    for table in experiment.tables(of):
        parts += [table.caption, "\n".join(markdown(table.head, table.rows))]
    if any("(p " in part for part in parts):
        test = "by a t-test of runs paired by seed" if experiment.paired else "by Welch's t-test"
        parts.append(f"p is the probability that chance makes a difference this large, {test}.")
    if any(UNPAIRED in part for part in parts):
        parts.append(
            f"({UNPAIRED}): the runs come from machines with other instruction sets, where equal seeds give different "
            "runs; p is by Welch's t-test."
        )
    if any(" at equal seconds" in part for part in parts):
        parts.append(NOTE)
    more, shown = commits(by_contender), experiment.curves
    if len(set(map(_kind, machines))) > 1:  # times on different instruction sets do not compare
        used = {one: sorted(set(map(_kind, some))) for one, some in by_contender.items()}
        more += ". " + ", ".join(f"{one}: {' and '.join(sets)}" for one, sets in used.items())
        shown = shown.removesuffix(" and seconds")
    parts += [f"![{shown}]({name}.png)", where(machines[0]) + more]
    write_text(text, "\n\n".join(parts) + "\n")
    experiment.picture(picture, of)
    return [text, picture]


def save(path: Path, experiment: Experiment, results: Results) -> None:
    """Save the results as JSON, with common values stored once and thinned curves of five digits."""
    every = {name: [_record(run) for run in runs] for name, runs in results.runs.items() if runs}
    common = shared([run for runs in every.values() for run in runs])
    own = {name: [without(run, common) for run in runs] for name, runs in every.items()}
    of_each = {name: shared(runs) for name, runs in own.items()}
    content = {
        "experiment": path.stem,
        "what": experiment.about,
        "all": common,
        "each": of_each,
        "runs": {name: columns([without(run, of_each[name]) for run in runs]) for name, runs in own.items()},
        "left_out": dict(results.left_out),
        "more": results.more,
    }
    write_json(path, {key: value for key, value in content.items() if value})


def load(path: Path) -> Results:
    """Load the results from JSON."""
    content = read_json(path)
    try:
        common = {name: merged(content["all"], of) for name, of in content["each"].items()}
        runs = {name: [_run(merged(common[name], run)) for run in rows(of)] for name, of in content["runs"].items()}
        if not all("seed" in run.settings and _has_machine(run) for of in runs.values() for run in of):
            raise KeyError("machine")
        return Results(runs, content.get("left_out", {}), content.get("more"), content.get("experiment"))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BlockSparseError.expected(str(path), "the report of an experiment", f"{error!r:.99}") from None


def _record(run: Run) -> dict[str, Any]:
    """Return a run as the report's JSON stores it."""
    machine = run.result and run.result.get("machine")
    if machine:  # keep the last minute's load, the day, and the instruction set in use
        short = {"load": 1, "commit": 12, "date": 10}
        machine = machine | {key: machine[key][:most] for key, most in short.items() if machine.get(key)}
        machine.pop("features", None)
    curve = columns(thinned(run.evaluations))
    return {
        "run": run.name,
        "steps": run.steps,
        "seconds": run.seconds,
        "machine": machine,
        **run.config,
        "curve": {name: [float(f"{x:.5g}") if isinstance(x, float) else x for x in of] for name, of in curve.items()},
    }


def _run(record: dict[str, Any]) -> Run:
    config = dict(record)
    name, steps, seconds, machine, curve = (config.pop(key) for key in ("run", "steps", "seconds", "machine", "curve"))
    return Run(Path(name), config, [*rows(curve), {"step": steps, "seconds": seconds}], {"machine": machine})


def thinned(points: Sequence[Any], limit: int = POINTS) -> list[Any]:
    """Return at most `limit` points, evenly spaced, with the last one.

    >>> thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(points) <= limit:
        return list(points)
    return [points[round(nth * (len(points) - 1) / (limit - 1))] for nth in range(limit)]


def shared(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the items that all records share, recursively in dicts."""
    first, *others = records
    common = {}
    for key, value in first.items():
        theirs = [other.get(key) for other in others]
        if isinstance(value, dict) and all(isinstance(other, dict) for other in theirs):
            value = shared([value, *theirs])  # type: ignore[list-item]
            if value:
                common[key] = value
        elif all(key in other and other[key] == value for other in others):
            common[key] = value
    return common


def without(record: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the entries of `common`; the inverse of `merged`."""
    own_items = {}
    for key, value in record.items():
        if key not in common:
            own_items[key] = value
        elif isinstance(value, dict) and (own := without(value, common[key])):
            own_items[key] = own
    return own_items


def merged(common: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the entries of `common` added."""
    both = {key: merged(common[key], value) for key, value in record.items() if isinstance(common.get(key), dict)}
    return {**common, **record, **both}
