"""Compare training runs: their results, and curves over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blocksparse.checked import integer, is_int
from blocksparse.checkpoint import read_json
from blocksparse.errors import BlockSparseError
from blocksparse.topology.drawings.style import COLORS, figure_and_axes, save

from . import resume, run_log
from .settings import Settings

_DASHES = ("-", "--", "-.", ":")
_LABEL = 40  # characters; two such labels fit beside each other
_POINTS = 60  # most points of a curve that are drawn as markers
_BANDS = 8  # most groups whose deviations are drawn, since more bands hide the lines

# Settings that do not distinguish runs: they only say how often a run is logged and where it ran.
_IGNORED = ("seed", "log_every", "eval_every", "save_every", "save_minutes", "cuda_graph")

# Keys of config.json, with their types.
_CONFIG: dict[str, tuple[Any, str]] = {
    "unit": (str, "text"),
    "bytes_per_step": (int, "an int"),
    "task": (dict, "a dict"),
    "settings": (dict, "a dict"),
    "facts": (dict, "a dict"),
}
_LARGEST = 1e100  # Larger numbers overflow when they are squared and summed.

# Options that only the named cell or pattern uses.
_ONLY_OF = {
    "lstm": {"projection"},
    "smallworld": {"depth", "init", "layouts", "stride"},
    "barabasi_albert": {"block_size", "m"},
    "watts_strogatz": {"block_size", "neighbors", "rewire"},
    "random": {"block_size", "density"},
    "random_diagonal": {"block_size", "density"},
    "block_diagonal": {"block_size", "density"},
}


@dataclass(frozen=True)
class Run:
    """A run as its folder records it: `config.json`, the lines of `log.jsonl`, and `result.json` once it is
    finished."""

    path: Path
    config: dict[str, Any]
    log: list[dict[str, Any]]
    result: dict[str, Any] | None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def unit(self) -> str:
        return self.config["unit"]

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["settings"]

    @property
    def task(self) -> dict[str, Any]:
        return self.config["task"]

    @property
    def facts(self) -> dict[str, Any]:
        return self.config["facts"]

    @property
    def steps(self) -> int:
        """Steps done according to the log."""
        return max((line["step"] for line in self.log), default=0)

    @property
    def seconds(self) -> float:
        return max((line["seconds"] for line in self.log if "seconds" in line), default=0.0)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self.log if "held_out" in line]

    @property
    def evaluated(self) -> int:
        """Step of the newest held-out figure; 0 if there is none."""
        return self.evaluations[-1]["step"] if self.evaluations else 0

    @property
    def held_out(self) -> float | None:
        """The newest held-out figure."""
        return self.evaluations[-1]["held_out"] if self.evaluations else None

    def as_dict(self) -> dict[str, Any]:
        """Return the run's numbers, ready for JSON."""
        seconds = self.seconds
        read = self.steps * self.config["bytes_per_step"]
        return {
            "run": self.name,
            "unit": self.unit,
            "held_out": self.held_out,
            "steps": self.steps,
            "finished": self.result is not None,
            "bytes": read,
            "seconds": seconds,
            "bytes_per_second": read / seconds if seconds else None,
            **self.config["facts"],
            "task": self.task,
            "settings": self.settings,
            "machine": self.result.get("machine") if self.result else None,
            "curve": self.evaluations,
        }


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed; the label says how the group differs from others."""

    label: str
    runs: tuple[Run, ...]

    @property
    def comparable(self) -> tuple[Run, ...]:
        """The runs to average: one per seed, among those that were evaluated after the most steps."""
        most = max(run.evaluated for run in self.runs)
        of_seeds: dict[str, Run] = {}
        for run in self.runs:
            if run.evaluated == most:
                of_seeds.setdefault(json.dumps(run.settings.get("seed")), run)
        return tuple(of_seeds.values())

    @property
    def held_out(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the newest figures of `comparable`; the deviation of one run is 0."""
        figures = [run.held_out for run in self.comparable if run.held_out is not None]
        return _spread(figures) if figures else None

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps per epoch, if the run records epochs."""
        epochs = self.runs[0].config["facts"].get("epochs")
        return self.runs[0].settings["steps"] / epochs if _is_number(epochs) and epochs > 0 else None

    def curve(self, of: str) -> tuple[list[float], list[float], list[float]]:
        """Return x (median "step" or "seconds"), mean and deviation where all comparable runs were evaluated."""
        by_step = [{line["step"]: line for line in run.evaluations if of in line} for run in self.comparable]
        shared = sorted(set.intersection(*map(set, by_step)))
        x = [statistics.median(lines[step][of] for lines in by_step) for step in shared]
        spreads = [_spread([lines[step]["held_out"] for lines in by_step]) for step in shared]
        return x, [mean for mean, _ in spreads], [deviation for _, deviation in spreads]


def read(path: str | Path) -> Run:
    """Read a run from its folder.

    Raises:
        BlockSparseError: the folder has no run, or broken files.
    """
    path, there = Path(path), Path(path) / "config.json"
    if not there.is_file():
        raise BlockSparseError.expected("run", "a folder with a run's config.json", path)
    config = read_json(there)
    for key, (kind, wanted) in _CONFIG.items():
        if not isinstance(config.get(key), kind) or isinstance(config[key], bool):
            raise BlockSparseError.expected(f"{there}, {key}", f"a run's, {wanted}", f"{config.get(key)!r:.99}")
    integer(f"{there}, steps", config["settings"].get("steps"), 1, 2**63)
    integer(f"{there}, bytes_per_step", config["bytes_per_step"], 0, 2**63)
    # Values that are not numbers, or too large to compute with, count as unknown.
    lines = [{key: value for key, value in line.items() if _is_number(value)} for line in run_log.read(path)]
    result = resume.read_result(path / "result.json") if (path / "result.json").exists() else None
    run = Run(path, config, [line for line in lines if {"step", "seconds"} <= line.keys()], result)
    if result is not None and _is_number(ended := result.get("held_out")) and run.held_out != ended:
        wanted = f"{ended} last, as in result.json; delete the folder to train the run again"
        raise BlockSparseError.expected(f"{path / 'log.jsonl'}, held_out", wanted, run.held_out)
    return run


def _is_number(value: Any) -> bool:
    return (is_int(value) or isinstance(value, float)) and abs(value) < _LARGEST


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group runs by everything but their seed, in order of the first run of each group.

    Raises:
        BlockSparseError: the runs have different units.
    """
    units = list(dict.fromkeys(run.unit for run in runs))
    if len(units) > 1:
        raise BlockSparseError.expected("runs", "figures of one unit", " and ".join(units))
    by_identity: dict[str, list[Run]] = {}
    for run in runs:
        by_identity.setdefault(json.dumps(_without_seed(run), sort_keys=True), []).append(run)
    identities = [_flat(_without_seed(of[0])) for of in by_identity.values()]
    differ = [
        key
        for key in dict.fromkeys(k for one in identities for k in one)
        if len({str(m.get(key)) for m in identities}) > 1
    ]
    # Run names are the shortest labels if every group has one run.
    alone = all(len(of) == 1 for of in by_identity.values())
    return [
        Group(of[0].name if alone else _label(one, differ) or of[0].name, tuple(of))
        for one, of in zip(identities, by_identity.values(), strict=True)
    ]


def picture(path: str | Path, of: Sequence[Group], timed: bool = True) -> None:
    """Draw held-out figures as a PNG against steps, or epochs if all runs have them, and against seconds if `timed`.

    Lines are means over seeds. Bands are their deviation, drawn for few groups only. Runs on different instruction sets
    are not drawn against seconds.
    """
    from ..machine import where

    if not any(group.curve("step")[0] for group in of):
        raise BlockSparseError.expected("runs", "one that was evaluated", "none yet")
    machines = [(run.result or {}).get("machine") for group in of for run in group.runs]
    sets = {machine.get("isa") if isinstance(machine, dict) else None for machine in machines}
    timed = timed and len(sets) == 1 and any(group.curve("seconds")[0] for group in of)
    by = ("step", "seconds") if timed else ("step",)
    columns = 2 if max(len(group.label) for group in of) < _LABEL else 1  # of the legend
    figure, axes = figure_and_axes((11, 4.2 + 0.2 * math.ceil(len(of) / columns)), columns=len(by))
    axes = [axes] if len(by) == 1 else axes
    epochs = all(group.steps_per_epoch for group in of)
    for nth, group in enumerate(of):
        style = {"color": COLORS[nth % len(COLORS)], "ls": _DASHES[nth // len(COLORS) % len(_DASHES)]}
        for one, against in zip(axes, by, strict=True):
            x, mean, deviation = group.curve(against)
            if not x:
                continue
            if against == "step" and epochs:
                x = [step / (group.steps_per_epoch or 1) for step in x]
            count = f", {seeds} seeds" if (seeds := len(group.comparable)) > 1 else ""
            points = {"marker": "o", "ms": 3} if len(x) <= _POINTS else {}
            one.plot(x, mean, label=f"{group.label}{count}: {mean[-1]:.3f}", lw=1.8, **points, **style)
            if len(of) > _BANDS:
                continue
            low, high = ([float(m + sign * d) for m, d in zip(mean, deviation, strict=True)] for sign in (-1, 1))
            one.fill_between(list(map(float, x)), low, high, color=style["color"], alpha=0.18, lw=0)
    curves = [group.curve("step") for group in of]
    lowest, top = _y_limits([mean for _, means, _ in curves for mean in means])
    limits = min(lowest, *(mean - d for _, means, ds in curves for mean, d in zip(means, ds, strict=True))), top
    for one, name in zip(axes, ("epochs" if epochs else "steps", "seconds of training"), strict=False):
        one.set(xlabel=name, ylim=limits)
        one.set_xlim(left=0)
        one.grid(color="0.9", lw=0.8)
    axes[0].set_ylabel(f"held out, {of[0].runs[0].unit}")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper left", frameon=False, fontsize=9, ncols=columns
    )
    try:
        facts = {where(run.result["machine"]) for group in of for run in group.runs if run.result}
    except (KeyError, TypeError, AttributeError):
        facts = set()  # unknown, or from another version
    if len(facts) == 1:
        figure.supxlabel(facts.pop(), size=7.5, color="0.4", x=0.01, ha="left")
    save(figure, path)


def _y_limits(figures: Sequence[float]) -> tuple[float, float]:
    """Return y limits from the best figure to where 90 % of the points are: the first points would squeeze the rest."""
    best, worst = min(figures), max(figures)
    third = sorted(figures)[(len(figures) * 9) // 10]
    top = min(worst, best + 2.5 * (third - best)) if third > best else worst
    room = max(0.05 * (top - best), 1e-3 if top > best else 0.05 * abs(best))
    return best - room, top + room


def _without_seed(run: Run) -> dict[str, Any]:
    """Return a run's task and settings without the seed and settings that do not distinguish runs."""
    # A setting that did not exist when the run began had its default.
    usual = asdict(Settings())
    settings = {key: run.settings.get(key, default) for key, default in usual.items() if key not in _IGNORED}
    task = dict(run.task)
    if isinstance(model := task.get("model"), dict):
        chosen = "cell" in model  # a model with a choice of cells and patterns
        unused = {key for of, keys in _ONLY_OF.items() if chosen and of not in model.values() for key in keys}
        unused -= {key for of, keys in _ONLY_OF.items() if of in model.values() for key in keys}
        task["model"] = {key: value for key, value in model.items() if key not in _IGNORED and key not in unused}
    return {"task": task, "settings": settings}


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested dicts to leaves by their last key, which keeps labels short."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value) if isinstance(value, dict) else {key: value}
    return leaves


def _label(meant: dict[str, Any], differ: Sequence[str]) -> str:
    """Join a group's values of the keys in which groups differ, words first."""
    shown = {key: meant[key] for key in differ if meant.get(key) is not None}
    words = [value for value in shown.values() if isinstance(value, str)]
    return ", ".join(words + [f"{key} {value}" for key, value in shown.items() if not isinstance(value, str)])


def _spread(figures: Sequence[float]) -> tuple[float, float]:
    mean = statistics.fmean(figures)
    return mean, statistics.stdev(figures, mean) if len(figures) > 1 and math.isfinite(mean) else 0.0
