"""The base class of experiments, which compare training runs of several contenders and seeds."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from operator import sub
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, ClassVar

from blocksparse.checkpoint import read_json
from blocksparse.errors import BlockSparseError

from ..bench.report import chance, noted, spread, write_json
from ..training import compare
from ..training.compare import Run
from ..training.trainer import Diverged, Trainer

FAILED = "failed.json"
SEED = re.compile("0|[1-9][0-9]*")
DataDir = str | Path | None
Progress = Callable[[str, int, int], None]  # called with stage, done and total


@dataclass(frozen=True)
class Column:
    """A column, or a row, of a report's table.

    Args:
        title: its name.
        of: path of the value in a run, such as "settings.steps", "task.model.width" or "facts.epochs", or a function of
            run and contender. Settings and task are shown as they are; other floats, and ints that differ, by mean and
            standard deviation over seeds. None means unknown; a column without known values is left out.
        digits: of floats; None chooses by their size.
        against: a contender to compare with, run by run with the same seed. Runs that share nothing by seed, or that
            ran on another instruction set, are compared all with all as independent; the cell says so for the latter.
            It ends with the probability that chance alone makes such a difference.
        compared: how to compare two values, by default their difference.
        show: makes the cell from the values of all seeds.
    """

    title: str
    of: str | Callable[[Run, Any], Any]
    digits: int | None = None
    against: str | None = None
    compared: Callable[[Any, Any], float] = sub
    show: Callable[[list[Any]], str] | None = None

    def value(self, run: Run, contender: Any) -> Any:
        """Return the value of a run."""
        if callable(self.of):
            return self.of(run, contender)
        first, *keys = self.of.split(".")
        value = getattr(run, first)
        for key in keys:
            value = value.get(key)
        return format_setting(value) if first in ("settings", "task") else value

    def cells(
        self, contenders: Mapping[str, Any], runs: Mapping[str, Sequence[Run]], paired: bool = True
    ) -> list[str] | None:
        """Return the cells of contenders that have runs; None if no value is known or comparable.

        A cell names its number of seeds if some have no value.

        Args:
            paired: whether runs of the same seed share anything.
        """
        by_seed = {
            name: {
                run.settings["seed"]: value for run in some if (value := self.value(run, contenders[name])) is not None
            }
            for name, some in runs.items()
        }
        unknown = {name for name, values in by_seed.items() if not values}
        if len(unknown) == len(by_seed) or (unknown and (self.against or self.show)):
            return None
        if self.against is None:
            return [
                "-" if name in unknown else noted(self._cell(list(values.values())), _coverage(len(values), runs[name]))
                for name, values in by_seed.items()
            ]
        if self.against not in by_seed:
            return None
        base, sets = by_seed[self.against], {name: _instruction_sets(some) for name, some in runs.items()}
        cells = []
        for name, of in by_seed.items():
            same = sets[name] == sets[self.against]
            if name == self.against or (paired and same):
                pairs = [self.compared(value, base[seed]) for seed, value in of.items() if seed in base]
                part = _coverage(len(pairs), _common_seeds(runs[name], runs[self.against])) if pairs else ""
                # For a cell with its own format, such as a ratio, chance would not make 0.
                cells.append(noted(self._cell(pairs, "+"), part, "" if self.show else chance(pairs)))
            else:
                label = "" if same else UNPAIRED if paired else OTHER_MACHINE
                some = _coverage(len(of), runs[name]), _coverage(len(base), runs[self.against])
                cells.append(
                    self._independent(
                        list(of.values()), list(base.values()), label, " against ".join(filter(None, some))
                    )
                )
        return cells

    def _independent(self, values_of: list[float], base: list[float], *notes: str) -> str:
        """Format the difference of independent runs."""
        ours, theirs = ([self.compared(value, fmean(base)) for value in values] for values in (values_of, base))
        if self.show:
            return noted(self.show(ours), *notes)
        cell = f"{fmean(ours):+,.{self.digits}f}"
        if min(len(ours), len(theirs)) > 1:
            cell += f" ± {hypot(stdev(ours), stdev(theirs)):,.{self.digits}f}"
        return noted(cell, *notes, chance(ours, theirs))

    def _cell(self, values: list[Any], sign: str = "") -> str:
        """Format the values of all seeds."""
        if self.show or not values:
            return self.show(values) if self.show and values else "-"
        different = list(dict.fromkeys(map(format_setting, values)))
        if isinstance(values[0], float) or (len(different) > 1 and isinstance(values[0], int)):
            return spread(values, self.digits, sign)
        return ", ".join(different)


def _coverage(known: int, runs: Sequence[Run]) -> str:
    """Return how many seeds a cell covers, if not all."""
    return "" if known == len(runs) else f"{known} of {len(runs)} seeds"


def _common_seeds(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Return the runs whose seed is also among the others."""
    seeds = {run.settings["seed"] for run in others}
    return [run for run in runs if run.settings["seed"] in seeds]


UNPAIRED, OTHER_MACHINE = "unpaired", "another instruction set"


def _instruction_sets(runs: Sequence[Run]) -> set[str | None]:
    return {((run.result or {}).get("machine") or {}).get("isa") for run in runs}


SEEDS = Column("seeds", lambda run, _: run, show=lambda runs: str(len(runs)))


def format_setting(value: Any) -> str:
    """Format a setting: the shortest form of a number, "-" for None.

    >>> format_setting(0.0005), format_setting(20_000), format_setting(None), format_setting((8, 16))
    ('0.0005', '20,000', '-', '8-16')
    """
    if isinstance(value, list | tuple):
        return "-".join(map(format_setting, value))
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "-" if value is None else str(value)


# Tables print these instead of contenders' names, which committed reports and `--only` have.
PLAIN_NAMES = {f"{method} x3, dense outlet": f"{method} x3, dense output layer" for method in ("fixed", "gradual")}


@dataclass(frozen=True)
class Table:
    """A table of a report, with its caption."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Results:
    """Content of a report: finished runs by contender with the facts of `Experiment.found`, reasons of runs without a
    result, the result of `Experiment.more`, and the experiment's name if recorded."""

    runs: Mapping[str, Sequence[Run]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    more: Any = None
    experiment: str | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """A comparison of training runs. Subclasses define how to make a run, and the report's columns.

    Runs resume where they stopped, and several processes may train different runs at the same time.

    Args:
        about: the question, in one line.
        contenders: by name, the dense one first.
        minutes: rough time of a run on one CPU core; None if it needs a GPU.
        longer: the same for contenders that take much longer.
        seeds: of each contender's runs.
    """

    about: str
    contenders: Mapping[str, Any]
    minutes: float | None = 10
    longer: Mapping[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)

    caption: ClassVar[str]  # of the table
    paired: ClassVar[bool] = True  # runs of the same seed share data order or initial weights
    curves: ClassVar[str] = "Test error against epochs and seconds"  # describes the picture

    # -- defined by subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, data_dir: DataDir) -> Any:
        """Load the data of all runs."""

    @abstractmethod
    def trainer(self, contender: str, seed: int, run: Path, data: Any) -> Trainer:
        """Return the trainer of a run in its folder."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """Columns of the report's table."""

    @property
    def in_rows(self) -> bool:
        """Whether the table has a row per contender instead of a column."""
        return False

    def needs(self, runs: Path, contender: str, seed: int) -> Path | None:
        """Return the run that must be finished first, if any."""
        return None

    def is_probed(self, run: Path) -> bool:
        """Return whether the results of `probe` are in a finished run's folder."""
        return True

    def probe(self, run: Path, data_dir: DataDir = None, progress: Progress | None = None) -> None:  # noqa: B027
        """Evaluate a finished run once, and save the result in its folder."""

    def is_result(self, trainer: Trainer, error: BlockSparseError) -> bool:
        """Return whether the error that ended a run is a result of its settings, so that other runs continue."""
        return isinstance(error, Diverged)

    def race(self, runs_by_contender: Mapping[str, Sequence[Run]]) -> None:  # noqa: B027
        """Measure the finished runs side by side, for each report again, and save the results in their folders."""

    def facts(self, run: Run) -> dict[str, Any]:
        """Return further facts on a run, for columns and picture."""
        return {}

    def more(self) -> Any:
        """Return further results that need no runs, ready for JSON."""
        return None

    def tables(self, results: Results) -> Iterator[Table]:
        """Yield the tables of the report."""
        columns = [(column.title, column.cells(self.contenders, results.runs, self.paired)) for column in self.columns]
        table = [
            ["", *(PLAIN_NAMES.get(name, name) for name in results.runs)],
            *([title, *cells] for title, cells in columns if cells),
        ]
        caption = self.caption
        if self.in_rows and len(results.runs) > 1:
            same = [f"{title} {cells[0]}" for title, *cells in table[1:] if len(set(cells)) == 1 and cells[0] != "-"]
            caption += f" The same in all rows: {'; '.join(same)}." if same else ""
            table = [column for column in table if column is table[0] or len(set(column[1:])) > 1]
        head, *rows = zip(*table, strict=True) if self.in_rows else table
        yield Table(caption, head, rows)
        if results.left_out:
            yield Table("Left out:", ("run", "reason"), list(results.left_out.items()))

    def picture(self, path: Path, results: Results) -> None:
        """Draw the report's picture, a PNG with training curves."""
        compare.picture(path, [compare.Group(contender, tuple(runs)) for contender, runs in results.runs.items()])

    # -- the runs ------------------------------------------------------------------------------------------------

    def trainers(
        self, runs: Path, data_dir: DataDir = None, only: Sequence[str] = (), seeds: Sequence[int] = ()
    ) -> Iterator[Trainer]:
        """Yield a trainer for each run.

        Args:
            runs: the folder for all runs, each in a folder of its own.
            data_dir: folder of the data; None downloads them if possible.
            only, seeds: restrict contenders and seeds; empty for all.

        Raises:
            BlockSparseError: a contender is unknown; or as for loaders and trainers.
        """
        check_only(only, self.contenders)
        data = self.load(data_dir)
        for seed in dict.fromkeys(seeds or self.seeds):
            for name in dict.fromkeys(only or self.contenders):
                if not self._failed_before(runs, name, seed):
                    yield self.trainer(name, seed, run_folder(runs, name, seed), data)

    def check_finished(self, runs: Path, data_dir: DataDir = None) -> Iterator[Path]:
        """Yield the finished runs after a check that each belongs to its contender, seed and the current settings.

        Raises:
            BlockSparseError: a run does not; or as for loaders and trainers.
        """
        finished = [(name, path) for name, paths in self.finished(runs).items() for path in paths]
        data = self.load(data_dir) if finished else None
        for name, path in finished:
            self.trainer(name, seed_of(path), path, data).load()
            yield path

    def hours(self, contender: str) -> float | None:
        """Return the rough hours of a contender's run on one core."""
        return None if self.minutes is None else self.longer.get(contender, self.minutes) / 60

    def is_finished(self, run: Path) -> bool:
        """Return whether a run's folder has its result."""
        return (run / "result.json").is_file()

    def finished(self, runs: Path) -> dict[str, list[Path]]:
        """Return the folders of finished runs by contender, of any seed."""
        return {name: list(filter(self.is_finished, run_folders(runs, name))) for name in self.contenders}

    def record_failure(self, trainer: Trainer, error: BlockSparseError) -> bool:
        """Return whether the error that ended a run is a result; if so, save it in the run's folder."""
        if self.is_result(trainer, error):
            reason, *_ = str(error).split(". ")  # drop the advice
            write_json(trainer.run / FAILED, {"failed": reason})
            return True
        return False

    def left_out(self, runs: Path) -> dict[str, str]:
        """Return the reasons of runs that ended without a result."""
        all_runs = [run for name in self.contenders for run in run_folders(runs, name)]
        unfinished = [run for run in all_runs if not self.is_finished(run)]
        reasons = {run.name: read_results(run, FAILED).get("failed") for run in unfinished}
        before = {
            run_folder(runs, name, seed).name: self._failed_before(runs, name, seed)
            for name in self.contenders
            for seed in self.seeds
        }
        return {name: why for name, why in (before | reasons).items() if why}

    def _failed_before(self, runs: Path, contender: str, seed: int) -> str:
        """Return why the run that this one needs failed, or "" if it did not fail."""
        needed = self.needs(runs, contender, seed)
        if (
            needed is None
            or (needed / "result.json").is_file()
            or not (why := read_results(needed, FAILED).get("failed"))
        ):
            return ""
        return f"{needed.parent.name} {needed.name}: {why}"


def run_folder(runs: Path, contender: str, seed: int) -> Path:
    """Return the folder of a run."""
    return runs / f"{contender}-{seed}"


def run_folders(runs: Path, contender: str) -> list[Path]:
    """Return the folders of a contender's runs, sorted by seed; names such as 00 are not seeds."""
    split = {run: run.name.rpartition("-") for run in runs.glob("*")}
    of = (run for run, (name, _, seed) in split.items() if name == contender and SEED.fullmatch(seed))
    return sorted(of, key=seed_of)


def seed_of(run: Path) -> int:
    """Return the seed in a run folder's name."""
    return int(run.name.rpartition("-")[2])


def check_only(only: Sequence[str], contenders: Iterable[str]) -> None:
    """Raise if a contender is unknown."""
    known = list(dict.fromkeys(contenders))
    if unknown := sorted(set(only) - set(known)):
        names = ", ".join(map(repr, known))
        raise BlockSparseError.expected("only", f"some of {names}", ", ".join(map(repr, unknown)))


def read_results(run: Path, name: str) -> dict[str, Any]:
    """Read a file of results in a run's folder; {} if there is none."""
    return read_json(run / name) if (run / name).is_file() else {}
