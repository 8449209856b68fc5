"""The base class of experiments: contenders and seeds, whose runs of the trainer are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from blocksparse.errors import BlockSparseError

from ..recipes import compare
from ..recipes.compare import Run
from ..recipes.trainer import Trainer

# The finished runs of each contender, at least one each.
Runs = Mapping[str, Sequence[Run]]
# A row of the report's table: its name, and a cell for each contender.
Row = tuple[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """A comparison of training runs. Subclasses define how a run is made, and what the report says.

    The runs go on where they were stopped, and may be done at the same time by several processes.

    Args:
        about: the question, in a line.
        contenders: by name, the dense one first.
        seeds: of each contender's runs.
    """

    about: str
    contenders: Mapping[str, Any]
    seeds: tuple[int, ...] = (0, 1, 2)

    in_rows: ClassVar[bool] = False
    """Whether the report's table has a row for each contender, where there are many, and not a column."""

    # -- defined by subclasses --------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, data_dir: str | Path | None) -> Any:
        """The data of all runs."""

    @abstractmethod
    def trainer(self, contender: str, seed: int, run: Path, data: Any) -> Trainer:
        """A run, ready to be trained in its folder."""

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

    def race(self, of: Runs) -> None:  # noqa: B027
        """Measures the finished runs side by side, again for each report; kept in their folders."""

    @abstractmethod
    def found(self, run: Run) -> dict[str, Any]:
        """Further facts on a run for the report's JSON."""

    @abstractmethod
    def rows(self, of: Runs) -> Iterator[Row]:
        """The rows of the report's table."""

    @abstractmethod
    def notes(self, of: Runs) -> list[str]:
        """Paragraphs below the table."""

    @property
    @abstractmethod
    def curves(self) -> str:
        """The curves of the picture."""

    def picture(self, path: Path, of: Runs) -> None:
        """The report's picture, a PNG: curves of the trainings."""
        compare.picture(path, [compare.Group(contender, tuple(runs)) for contender, runs in of.items()])

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
