"""Diffusion over citation graphs, with all transitions and without the weak ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..data import planetoid
from ..data.synthetic import growing_graph
from ..recipes import dcnn
from ..recipes.dcnn import DCNNSettings
from ..training.compare import Run
from ..training.trainer import Trainer
from .experiment import SEEDS, Column, DataDir, Experiment, Results, Table, format_setting


@dataclass(frozen=True, kw_only=True)
class DiffusionExperiment(Experiment):
    """Networks of one shape on a graph; the first contender keeps all transitions.

    Args:
        graph: a name of `data.planetoid`; None for a grown graph of 100,000 nodes.
    """

    contenders: Mapping[str, DCNNSettings]
    graph: str | None

    caption: ClassVar[str] = (
        f"Each seed splits the nodes at random into thirds for training, validation and test. The optimizer is "
        f"Adagrad with learning rate {DCNNSettings.learning_rate:g} and batches of {DCNNSettings.batch}; accuracy is "
        "that after the last epoch. Each column of P is A / (degree + 1); transitions are removed before P is "
        "squared. Figures are means and standard deviations over the seeds; differences compare runs of the same seed."
    )

    def load(self, data_dir: DataDir) -> planetoid.Graph:
        return growing_graph() if self.graph is None else planetoid.load(self.graph, data_dir)

    def trainer(self, contender: str, seed: int, run: Path, data: planetoid.Graph) -> Trainer:
        return dcnn.trainer(replace(self.contenders[contender], seed=seed), data, run)

    def facts(self, run: Run) -> dict[str, Any]:
        return {"accuracy": 100 - run.evaluations[-1]["held_out"]}

    def more(self) -> list[tuple[int, int, int]] | None:
        return None if self.graph is None else dcnn.growth()

    @property
    def columns(self) -> Sequence[Column]:
        first = next(iter(self.contenders))
        return [
            Column("transitions removed, up to", lambda _, of: "at random" if of.at_random else f"{of.threshold:g}"),
            Column("entries of P^1", lambda run, _: run.facts["nnz"][0]),
            Column("entries of P^2", lambda run, _: run.facts["nnz"][1]),
            Column(
                "fewer of P^2",
                lambda run, _: run.facts["nnz"][1],
                against=first,
                compared=lambda entries, whole: whole / entries,
                show=lambda values: f"{values[0]:.2f}x",
            ),
            Column("kB of P and P^2", lambda run, _: round(run.facts["bytes"] / 1e3)),
            Column("nodes", "facts.nodes"),
            Column("test nodes", "facts.tested"),
            Column("epochs", "facts.epochs"),
            SEEDS,
            Column("accuracy, %", "facts.accuracy", 2),
            Column(f"accuracy, against {first}", "facts.accuracy", 2, against=first),
        ]

    def tables(self, results: Results) -> Iterator[Table]:
        yield from super().tables(results)
        if results.more is None:
            return
        yield Table(
            "P and P^2 of Barabasi-Albert graphs with 4 edges for each new node, without transitions up to 0.05:",
            ("nodes", "entries", "entries per node", "MB", "bytes per node"),
            [
                (
                    format_setting(nodes),
                    format_setting(entries),
                    f"{entries / nodes:.1f}",
                    f"{size / 1e6:.2f}",
                    f"{size / nodes:.0f}",
                )
                for nodes, entries, size in results.more
            ],
        )


CONTENDERS = {
    "all transitions": DCNNSettings(),
    "above 0.05": DCNNSettings(threshold=0.05),
    "above 0.1": DCNNSettings(threshold=0.1),
    "at random, for 0.05": DCNNSettings(threshold=0.05, at_random=True),
    "at random, for 0.1": DCNNSettings(threshold=0.1, at_random=True),
}
EXPERIMENTS: dict[str, Experiment] = {
    "diffusion-cora": DiffusionExperiment(
        about="Diffusion-convolution over two hops of the citation graph Cora, with and without weak transitions",
        graph="cora",
        contenders=CONTENDERS,
        minutes=0.1,
        seeds=tuple(range(10)),  # with three, differences were not significant
    ),
    "diffusion-hubs": DiffusionExperiment(
        about="Diffusion-convolution over two hops of a grown graph of 100,000 nodes, which has hubs, with and without "
        "weak transitions",
        graph=None,
        contenders=CONTENDERS,
        minutes=1,
    ),
}
