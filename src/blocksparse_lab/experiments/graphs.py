"""Diffusion over citation graphs, with all transitions and without the weak ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import planetoid
from ..recipes import dcnn
from ..recipes.compare import Run
from ..recipes.trainer import Trainer
from .classifiers import last
from .experiment import Experiment, Row, Runs
from .report import spread


@dataclass(frozen=True, kw_only=True)
class DiffusionExperiment(Experiment):
    """Networks of one shape on a graph, which differ in the transitions that they leave out.

    Args:
        contenders: thresholds, by name; the first leaves nothing out.
        graph: a name of `data.planetoid`.
    """

    contenders: Mapping[str, float]
    graph: str

    def load(self, data_dir: str | Path | None) -> planetoid.Graph:
        return planetoid.load(self.graph, data_dir)

    def trainer(self, contender: str, seed: int, run: Path, data: planetoid.Graph) -> Trainer:
        return dcnn.trainer(data, run, self.contenders[contender], seed)

    def found(self, run: Run) -> dict[str, Any]:
        return {"accuracy": 100 - last(run)}

    def rows(self, of: Runs) -> Iterator[Row]:
        facts = [runs[0].config["facts"] for runs in of.values()]
        whole = facts[0]["nnz"][-1]
        yield "transitions left out, up to", [f"{self.contenders[name]:g}" for name in of]
        for hop in range(dcnn.HOPS):
            yield f"entries of P^{hop + 1}", [f"{one['nnz'][hop]:,}" for one in facts]
        yield f"fewer of P^{dcnn.HOPS}", [f"{whole / one['nnz'][-1]:.2f}x" for one in facts]
        yield "kB of all powers", [f"{one['bytes'] / 1e3:,.0f}" for one in facts]
        yield "seeds", [str(len(runs)) for runs in of.values()]
        yield "accuracy, %", [spread([100 - last(run) for run in runs], 2) for runs in of.values()]

    def notes(self, of: Runs) -> list[str]:
        facts = next(iter(of.values()))[0].config["facts"]
        means = {name: statistics.fmean(100 - last(run) for run in runs) for name, runs in of.items()}
        first, *others = means
        told = [f"{means[name] - means[first]:+.2f} points {name}" for name in others]
        lines = ["| nodes | entries | entries per node | MB | bytes per node |", "|---:|---:|---:|---:|---:|"]
        lines += [
            f"| {nodes:,} | {entries:,} | {entries / nodes:.1f} | {size / 1e6:.2f} | {size / nodes:.0f} |"
            for nodes, entries, size in dcnn.growth()
        ]
        return [
            *([f"**Against {first}: {', '.join(told)}.**"] if told else []),
            f"{facts['nodes']:,} nodes in random thirds, another draw for each seed: to train on, to choose with, and "
            f"{facts['tested']:,} to test on. {dcnn.HOPS} hops, {facts['epochs']} epochs of Adagrad with learning rate "
            f"{dcnn.LEARNING_RATE:g} in batches of {dcnn.BATCH}; the figure is that after the last one. "
            "P = A / (degree + 1), column by column; what is left out goes before P is multiplied with itself.",
            "P and P^2 of Barabasi-Albert graphs with 4 edges for each new node, without transitions up to 0.05:",
            "\n".join(lines),
        ]

    @property
    def curves(self) -> str:
        return "Test error against epochs and seconds"


EXPERIMENTS: dict[str, Experiment] = {
    "diffusion-cora": DiffusionExperiment(
        about="Diffusion-convolution over two hops of the citation graph Cora, with and without weak transitions",
        graph="cora",
        contenders={"all transitions": 0.0, "above 0.05": 0.05, "above 0.1": 0.1},
    )
}
