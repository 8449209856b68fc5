"""The base class of experiments: contenders and seeds, whose runs of the trainer are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path
from typing import Any, ClassVar

from blocksparse.checkpoint import read_json
from blocksparse.errors import BlockSparseError

from ..bench.report import spread
from ..recipes import compare
from ..recipes.compare import Run
from ..recipes.trainer import Trainer


@dataclass(frozen=True)
class Column:
    """A column of a report's table, or a row of it.

    Args:
        title: its name.
        of: `of(run, contender)` gives a text or an int, as of the first run; a float, of which mean and standard
            deviation over the seeds are shown; or None where it is not known: then no contender has this column.
        digits: of the floats; None for those that suit their size.
        against: a contender; each run is compared with its run of the same seed.
        compared: how, by default the difference.
        show: makes the cell from the values of all seeds.
    """

    title: str
    of: Callable[[Run, Any], Any]
    digits: int | None = None
    against: str | None = None
    compared: Callable[[Any, Any], float] = sub
    show: Callable[[list[Any]], str] | None = None

    def cells(self, contenders: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> list[str] | None:
        """The cells, one per contender that has runs; None where one of them is unknown."""
        found = {name: [self.of(run, contenders[name]) for run in some] for name, some in runs.items()}
        if any(value is None for values in found.values() for value in values):
            return None
        if self.against is None:
            return [self._cell(values) for values in found.values()]
        if self.against not in runs:
            return None
        seed = {run.settings["seed"]: value for run, value in zip(runs[self.against], found[self.against], strict=True)}
        cells = []
        for name, values in found.items():
            pairs = [(run.settings["seed"], value) for run, value in zip(runs[name], values, strict=True)]
            cells.append(self._cell([self.compared(value, seed[at]) for at, value in pairs if at in seed], "+"))
        return cells

    def _cell(self, values: list[Any], sign: str = "") -> str:
        if self.show or not values:
            return self.show(values) if self.show and values else "-"
        return spread(values, self.digits, sign) if isinstance(values[0], float) else said(values[0])


SEEDS = Column("seeds", lambda run, _: run, show=lambda found: str(len(found)))


def fact(title: str, name: str, digits: int | None = None, **other: Any) -> Column:
    """A fact of the runs' `config.json`, or one that `Experiment.found` added."""
    return Column(title, lambda run, _: run.config["facts"].get(name), digits, **other)


def model(title: str, name: str) -> Column:
    """One of the sizes and options of the runs' model."""
    return Column(title, lambda run, _: said(run.task["model"].get(name)))


def text(title: str, of: Callable[[Run, Any], Any]) -> Column:
    """What `of(run, contender)` gives, as text."""
    return Column(title, lambda run, contender: said(of(run, contender)))


def setting(title: str, name: str) -> Column:
    """One of the runs' settings."""
    return Column(title, lambda run, _: said(run.settings.get(name)))


def seconds(digits: int, title: str = "seconds of training") -> Column:
    """The seconds of a whole run."""
    return Column(title, lambda run, _: float(run.seconds), digits)


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
    """All that a report is made from.

    Args:
        runs: the finished runs of each contender, at least one each; their facts include those of `Experiment.found`.
        left_out: runs that ended without a result, with the reason.
        more: what `Experiment.more` computed.
    """

    runs: Mapping[str, Sequence[Run]]
    left_out: Mapping[str, str] = field(default_factory=dict)
    more: Any = None


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """A comparison of training runs. Subclasses define how a run is made, and the columns of the report.

    The runs go on where they were stopped, and may be done at the same time by several processes.

    Args:
        about: the question, in a line.
        contenders: by name, the dense one first.
        seeds: of each contender's runs.
    """

    about: str
    contenders: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)

    caption: ClassVar[str]
    """What the table's figures are."""

    curves: ClassVar[str] = "Test error against epochs and seconds"
    """What the picture shows."""

    in_rows: ClassVar[bool] = False
    """Whether the report's table has a row for each contender, where there are many, and not a column."""

    # -- defined by subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, data_dir: str | Path | None) -> Any:
        """The data of all runs."""

    @abstractmethod
    def trainer(self, contender: str, seed: int, run: Path, data: Any) -> Trainer:
        """A run, ready to be trained in its folder."""

    @property
    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """The columns of the report's table."""

    def probe(  # noqa: B027  most kinds have nothing to do
        self,
        run: Path,
        data_dir: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Evaluates a finished run, once; the result is kept in its folder."""

    def failed(self, trainer: Trainer, error: BlockSparseError) -> bool:
        """Whether the error that ended a run is a result too, kept in the run's folder; the other runs then go on."""
        return False

    def race(self, of: Mapping[str, Sequence[Run]]) -> None:  # noqa: B027
        """Measures the finished runs side by side, again for each report; kept in their folders."""

    def found(self, run: Run) -> dict[str, Any]:
        """Further facts on a run, for columns and picture."""
        return {}

    def left_out(self, runs: Path) -> dict[str, str]:
        """Runs that ended without a result, with the reason."""
        return {}

    def more(self) -> Any:
        """Further results that need no runs, ready for JSON."""
        return None

    def tables(self, of: Results) -> Iterator[Table]:
        """The tables of the report."""
        columns = [(column.title, column.cells(self.contenders, of.runs)) for column in self.columns]
        table = [["", *of.runs], *([title, *cells] for title, cells in columns if cells)]
        head, *rows = zip(*table, strict=True) if self.in_rows else table
        yield Table(self.caption, head, rows)
        if of.left_out:
            yield Table("Left out:", ("run", "reason"), list(of.left_out.items()))

    def picture(self, path: Path, of: Results) -> None:
        """The report's picture, a PNG: curves of the trainings."""
        compare.picture(path, [compare.Group(contender, tuple(runs)) for contender, runs in of.runs.items()])

    # -- the runs ------------------------------------------------------------------------------------------------

    def trainers(
        self,
        runs: Path,
        data_dir: str | Path | None = None,
        only: Sequence[str] = (),
        seeds: Sequence[int] = (),
    ) -> Iterator[Trainer]:
        """The runs, ready to be trained, one after the other.

        Args:
            runs: the folder for them, each in one of its own.
            data_dir: where the data lies; else it is downloaded, where that can be.
            only, seeds: some of the contenders and of the seeds; all where there are none.

        Raises:
            BlockSparseError: a contender that is unknown; what loaders and trainers refuse.
        """
        unknown = set(only) - set(self.contenders)
        if unknown:
            raise BlockSparseError.expected("only", f"some of {', '.join(self.contenders)}", ", ".join(unknown))
        data = self.load(data_dir)
        for seed in seeds or self.seeds:
            for name in only or self.contenders:
                yield self.trainer(name, seed, folder(runs, name, seed), data)

    def finished(self, runs: Path) -> dict[str, list[Path]]:
        """The folders of the finished runs, by contender."""
        folders = {name: [folder(runs, name, seed) for seed in self.seeds] for name in self.contenders}
        return {name: [path for path in of if (path / "result.json").is_file()] for name, of in folders.items()}


def folder(runs: Path, contender: str, seed: int) -> Path:
    """Where a run is."""
    return runs / f"{contender}-{seed}"


def kept(run: Path, name: str) -> dict[str, Any]:
    """A file of results in the folder of a run, where there is one."""
    return read_json(run / name) if (run / name).is_file() else {}
