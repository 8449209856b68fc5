"""The base class of experiments: contenders and seeds, whose runs of the trainer are compared."""

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
Progress = Callable[[str, int, int], None]  # of a stage, what is done, and of how much


@dataclass(frozen=True)
class Column:
    """A column of a report's table, or a row of it.

    Args:
        title: its name.
        of: where the value is in a run, as "settings.steps", "task.model.width" or "facts.epochs"; or `of(run,
            contender)`. What is in settings and task was chosen, and is shown as it is. Of other floats, and ints that
            differ, mean and standard deviation over the seeds are shown. None is unknown; where all are, there is no
            such column.
        digits: of the floats; None for those that suit their size.
        against: a contender; each run is compared with its run of the same seed. Where runs of the same seed share
            nothing, or were not trained with the same instruction set, all are compared with all, as independent; of
            the latter the cell says so. It ends with the probability that chance alone makes such a difference.
        compared: how, by default the difference.
        show: makes the cell from the values of all seeds.
    """

    title: str
    of: str | Callable[[Run, Any], Any]
    digits: int | None = None
    against: str | None = None
    compared: Callable[[Any, Any], float] = sub
    show: Callable[[list[Any]], str] | None = None

    def value(self, run: Run, contender: Any) -> Any:
        if callable(self.of):
            return self.of(run, contender)
        first, *keys = self.of.split(".")
        value = getattr(run, first)
        for key in keys:
            value = value.get(key)
        return said(value) if first in ("settings", "task") else value

    def cells(
        self, contenders: Mapping[str, Any], runs: Mapping[str, Sequence[Run]], paired: bool = True
    ) -> list[str] | None:
        """The cells, one per contender that has runs; None where none of them is known, or cannot be compared. A cell
        says of how many seeds it is, where that is not all.

        Args:
            paired: whether runs of the same seed share anything.
        """
        found = {
            name: {
                run.settings["seed"]: value for run in some if (value := self.value(run, contenders[name])) is not None
            }
            for name, some in runs.items()
        }
        unknown = {name for name, values in found.items() if not values}
        if len(unknown) == len(found) or (unknown and (self.against or self.show)):
            return None
        if self.against is None:
            return [
                "-" if name in unknown else noted(self._cell(list(values.values())), _part(len(values), runs[name]))
                for name, values in found.items()
            ]
        if self.against not in found:
            return None
        base, sets = found[self.against], {name: _instruction_sets(some) for name, some in runs.items()}
        cells = []
        for name, of in found.items():
            same = sets[name] == sets[self.against]
            if name == self.against or (paired and same):
                pairs = [self.compared(value, base[seed]) for seed, value in of.items() if seed in base]
                part = _part(len(pairs), _both(runs[name], runs[self.against])) if pairs else ""
                # Of a cell in a form of its own, a ratio say, 0 is not what chance would make.
                cells.append(noted(self._cell(pairs, "+"), part, "" if self.show else chance(pairs)))
            else:
                label = "" if same else UNPAIRED if paired else OTHER_MACHINE
                some = _part(len(of), runs[name]), _part(len(base), runs[self.against])
                cells.append(
                    self._independent(
                        list(of.values()), list(base.values()), label, " against ".join(filter(None, some))
                    )
                )
        return cells

    def _independent(self, found: list[float], base: list[float], *notes: str) -> str:
        ours, theirs = ([self.compared(value, fmean(base)) for value in values] for values in (found, base))
        cell = f"{fmean(ours):+,.{self.digits}f}"
        if min(len(ours), len(theirs)) > 1:
            cell += f" ± {hypot(stdev(ours), stdev(theirs)):,.{self.digits}f}"
        return noted(cell, *notes, chance(ours, theirs))

    def _cell(self, values: list[Any], sign: str = "") -> str:
        if self.show or not values:
            return self.show(values) if self.show and values else "-"
        different = list(dict.fromkeys(map(said, values)))
        if isinstance(values[0], float) or (len(different) > 1 and isinstance(values[0], int)):
            return spread(values, self.digits, sign)
        return ", ".join(different)


def _part(known: int, runs: Sequence[Run]) -> str:
    """Of how many seeds a cell is, where that is not all."""
    return "" if known == len(runs) else f"{known} of {len(runs)} seeds"


def _both(runs: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """The runs whose seed is among the others too."""
    seeds = {run.settings["seed"] for run in others}
    return [run for run in runs if run.settings["seed"] in seeds]


UNPAIRED, OTHER_MACHINE = "unpaired", "another instruction set"


def _instruction_sets(runs: Sequence[Run]) -> set[str | None]:
    return {((run.result or {}).get("machine") or {}).get("isa") for run in runs}


SEEDS = Column("seeds", lambda run, _: run, show=lambda found: str(len(found)))


def said(value: Any) -> str:
    """A setting as text: the shortest form of a number, "-" for None.

    >>> said(0.0005), said(20_000), said(None), said((8, 16))
    ('0.0005', '20,000', '-', '8-16')
    """
    if isinstance(value, list | tuple):
        return "-".join(map(said, value))
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return "-" if value is None else str(value)


@dataclass(frozen=True)
class Table:
    """A table of a report, with its caption."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Results:
    """What a report is made from: the finished runs of each contender, with the facts of `Experiment.found`; why others
    ended without a result; what `Experiment.more` computed; and the name of the experiment, where a report says it."""

    runs: Mapping[str, Sequence[Run]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    more: Any = None
    experiment: str | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """A comparison of training runs. Subclasses define how a run is made, and the columns of the report.

    The runs go on where they were stopped, and may be done at the same time by several processes.

    Args:
        about: the question, in a line.
        contenders: by name, the dense one first.
        minutes: what a run takes of one core of a CPU, very roughly; None where it wants a GPU.
        longer: those of contenders that take much longer.
        seeds: of each contender's runs.
    """

    about: str
    contenders: Mapping[str, Any]
    minutes: float | None = 10
    longer: Mapping[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)

    caption: ClassVar[str]  # of the table
    paired: ClassVar[bool] = True  # runs of the same seed share something: the order of the data, first weights
    curves: ClassVar[str] = "Test error against epochs and seconds"  # what the picture shows

    # -- defined by subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, data_dir: DataDir) -> Any:
        """The data of all runs."""

    @abstractmethod
    def trainer(self, contender: str, seed: int, run: Path, data: Any) -> Trainer:
        """A run, ready to be trained in its folder."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """The columns of the report's table."""

    @property
    def in_rows(self) -> bool:
        """Whether the report's table has a row for each contender, and not a column."""
        return False

    def needs(self, runs: Path, contender: str, seed: int) -> Path | None:
        """The run that must be finished before this one."""
        return None

    def is_probed(self, run: Path) -> bool:
        """Whether what `probe` finds of a finished run is kept in its folder."""
        return True

    def probe(self, run: Path, data_dir: DataDir = None, progress: Progress | None = None) -> None:  # noqa: B027
        """Evaluates a finished run, once; the result is kept in its folder."""

    def is_result(self, trainer: Trainer, error: BlockSparseError) -> bool:
        """Whether the error that ended a run says something about its settings; the other runs then go on."""
        return isinstance(error, Diverged)

    def race(self, of: Mapping[str, Sequence[Run]]) -> None:  # noqa: B027
        """Measures the finished runs side by side, again for each report; kept in their folders."""

    def found(self, run: Run) -> dict[str, Any]:
        """Further facts on a run, for columns and picture."""
        return {}

    def more(self) -> Any:
        """Further results that need no runs, ready for JSON."""
        return None

    def tables(self, of: Results) -> Iterator[Table]:
        """The tables of the report."""
        columns = [(column.title, column.cells(self.contenders, of.runs, self.paired)) for column in self.columns]
        table = [["", *of.runs], *([title, *cells] for title, cells in columns if cells)]
        caption = self.caption
        if self.in_rows and len(of.runs) > 1:
            same = [f"{title} {cells[0]}" for title, *cells in table[1:] if len(set(cells)) == 1 and cells[0] != "-"]
            caption += f" The same in all rows: {'; '.join(same)}." if same else ""
            table = [column for column in table if column is table[0] or len(set(column[1:])) > 1]
        head, *rows = zip(*table, strict=True) if self.in_rows else table
        yield Table(caption, head, rows)
        if of.left_out:
            yield Table("Left out:", ("run", "reason"), list(of.left_out.items()))

    def picture(self, path: Path, of: Results) -> None:
        """The report's picture, a PNG: curves of the trainings."""
        compare.picture(path, [compare.Group(contender, tuple(runs)) for contender, runs in of.runs.items()])

    # -- the runs ------------------------------------------------------------------------------------------------

    def trainers(
        self, runs: Path, data_dir: DataDir = None, only: Sequence[str] = (), seeds: Sequence[int] = ()
    ) -> Iterator[Trainer]:
        """The runs, ready to be trained, one after the other.

        Args:
            runs: the folder for them, each in one of its own.
            data_dir: where the data lies; else it is downloaded, where that can be.
            only, seeds: some of the contenders and of the seeds; all where there are none.

        Raises:
            BlockSparseError: a contender that is unknown; what loaders and trainers refuse.
        """
        check_only(only, self.contenders)
        data = self.load(data_dir)
        for seed in dict.fromkeys(seeds or self.seeds):
            for name in dict.fromkeys(only or self.contenders):
                if not self._failed_before(runs, name, seed):
                    yield self.trainer(name, seed, folder(runs, name, seed), data)

    def checked(self, runs: Path, data_dir: DataDir = None) -> Iterator[Path]:
        """The finished runs, each after a look whether it is of its contender and seed, and of the settings of today.

        Raises:
            BlockSparseError: one that is not; what loaders and trainers refuse.
        """
        found = [(name, path) for name, paths in self.finished(runs).items() for path in paths]
        data = self.load(data_dir) if found else None
        for name, path in found:
            self.trainer(name, seed_of(path), path, data).load()
            yield path

    def hours(self, contender: str) -> float | None:
        """What a run of the contender takes of one core, very roughly."""
        return None if self.minutes is None else self.longer.get(contender, self.minutes) / 60

    def is_finished(self, run: Path) -> bool:
        """Whether a run's folder has its result."""
        return (run / "result.json").is_file()

    def finished(self, runs: Path) -> dict[str, list[Path]]:
        """The folders of the finished runs, by contender: those of the experiment's seeds and of any other."""
        return {name: list(filter(self.is_finished, folders(runs, name))) for name in self.contenders}

    def failed(self, trainer: Trainer, error: BlockSparseError) -> bool:
        """Whether the error that ended a run is a result, which is then kept in the run's folder."""
        if self.is_result(trainer, error):
            reason, *_ = str(error).split(". ")  # without advice
            write_json(trainer.run / FAILED, {"failed": reason})
            return True
        return False

    def left_out(self, runs: Path) -> dict[str, str]:
        """Runs that ended without a result, with the reason."""
        all_runs = [run for name in self.contenders for run in folders(runs, name)]
        reasons = {run.name: kept(run, FAILED).get("failed") for run in all_runs if not self.is_finished(run)}
        before = {
            folder(runs, name, seed).name: self._failed_before(runs, name, seed)
            for name in self.contenders
            for seed in self.seeds
        }
        return {name: why for name, why in (before | reasons).items() if why}

    def _failed_before(self, runs: Path, contender: str, seed: int) -> str:
        """Why the run that this one needs has no result, where it ended without one."""
        needed = self.needs(runs, contender, seed)
        if needed is None or (needed / "result.json").is_file() or not (why := kept(needed, FAILED).get("failed")):
            return ""
        return f"{needed.parent.name} {needed.name}: {why}"


def folder(runs: Path, contender: str, seed: int) -> Path:
    """Where a run is."""
    return runs / f"{contender}-{seed}"


def folders(runs: Path, contender: str) -> list[Path]:
    """The folders of a contender's runs, by seed; 00 and such are no seeds."""
    split = {run: run.name.rpartition("-") for run in runs.glob("*")}
    of = (run for run, (name, _, seed) in split.items() if name == contender and SEED.fullmatch(seed))
    return sorted(of, key=seed_of)


def seed_of(run: Path) -> int:
    """The seed of the run that a folder is for."""
    return int(run.name.rpartition("-")[2])


def check_only(only: Sequence[str], contenders: Iterable[str]) -> None:
    """Refuses a contender that is unknown."""
    known = list(dict.fromkeys(contenders))
    if unknown := sorted(set(only) - set(known)):
        said = ", ".join(map(repr, known))
        raise BlockSparseError.expected("only", f"some of {said}", ", ".join(map(repr, unknown)))


def kept(run: Path, name: str) -> dict[str, Any]:
    """A file of results in the folder of a run, where there is one."""
    return read_json(run / name) if (run / name).is_file() else {}
