"""Sparse classifiers of tables: dense, sparse in fixed places, and sparse with an evolving topology, of one shape."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..data import tables
from ..data.table import Table
from ..recipes import mlp
from ..recipes.compare import Run
from ..recipes.trainer import Trainer
from .experiment import Experiment, Row, Runs
from .report import spread

TOPOLOGIES = {
    "dense": "dense",
    "fixed": "sparse, never changed",
    "set": "sparse, evolved (SET)",
    "rigl": "sparse, evolved (RigL)",
}


@dataclass(frozen=True)
class Contender:
    """How a net gets its topology, a name of `mlp.METHODS`, and further settings of the net and its training."""

    method: str
    recipe: mlp.Recipe


@dataclass(frozen=True, kw_only=True)
class ClassifierExperiment(Experiment):
    """Nets of one shape on a table, which differ in their topology.

    Args:
        data: a name of `data.tables`.
        tested_on: which of its rows.

    The seeds are of topology, weights, the order of the rows and dropout. The rows to test on are the same for all.
    """

    contenders: Mapping[str, Contender]
    data: str
    tested_on: str

    def load(self, data_dir: str | Path | None) -> Table:
        return tables.load(self.data, data_dir)

    def trainer(self, contender: str, seed: int, run: Path, data: Table) -> Trainer:
        of = self.contenders[contender]
        return mlp.trainer(of.recipe, data, run, of.method, seed)

    def found(self, run: Run) -> dict[str, Any]:
        return {"lowest": lowest(run), "seconds_per_epoch": seconds_per_epoch(run)}

    def rows(self, of: Runs) -> Iterator[Row]:
        def figure(title: str, value: Callable[[Run], float], digits: int) -> Row:
            return title, [spread([value(run) for run in runs], digits) for runs in of.values()]

        facts = [runs[0].config["facts"] for runs in of.values()]
        yield "topology", [TOPOLOGIES[runs[0].task["model"]["method"]] for runs in of.values()]
        yield "weights, and multiply-adds of a row forward", [f"{one['connections']:,}" for one in facts]
        yield "density", [f"{100 * one['density']:.3g} %" for one in facts]
        yield "epochs", [f"{one['epochs']:,}" for one in facts]
        yield "seeds", [str(len(runs)) for runs in of.values()]
        yield figure("test error after the last epoch, %", last, 2)
        fewest = min(one["epochs"] for one in facts)
        if fewest < max(one["epochs"] for one in facts):
            yield figure(f"test error after epoch {fewest:,}, %", lambda run: errors(run)[fewest - 1], 2)
        yield figure("lowest test error after any epoch, %", lowest, 2)
        yield figure("seconds of training per epoch", seconds_per_epoch, 3)
        yield figure("seconds of training in all", lambda run: run.seconds, 1)

    def notes(self, of: Runs) -> list[str]:
        run = next(iter(of.values()))[0]
        recipes, data = [contender.recipe for contender in self.contenders.values()], run.task["data"]
        recipe = recipes[-1]
        tested = run.config["facts"]["tested"]
        sizes = "-".join(f"{size:,}" for size in run.task["model"]["sizes"])
        every = recipe.evolve_every
        after = "after each epoch" if every == 1 else f"after every {every} epochs"
        grown = {"zeros": "with new ones at 0"}.get(recipe.regrow, f"with new ones drawn ({recipe.regrow})")
        return [
            *_verdict(of),
            f"Nets of {sizes} neurons with All-ReLU of slope {recipe.alpha:g} and dropout {recipe.dropout:g}; "
            f"sparse ones begin as Erdos-Renyi graphs with epsilon {recipe.epsilon:g}, of which SET replaces "
            f"{100 * recipe.zeta:g} % {after}, {grown}. SGD with learning rate {recipe.learning_rate:g} throughout, "
            f"momentum {recipe.momentum:g}, weight decay {recipe.weight_decay:g}, batches of {recipe.batch}. "
            f"{data['rows']:,} rows of {data['features']:,} features to train on, {tested:,} to test on, "
            f"{self.tested_on}.{_unlike(recipes[0], recipe)}",
            "Mean and standard deviation over the seeds. The lowest error is chosen by the rows that it is measured "
            "on, and so flatters them all. Seconds are those of training alone; of an epoch, the median over a run.",
        ]

    @property
    def curves(self) -> str:
        return "Test error against epochs and seconds"


def errors(run: Run) -> list[float]:
    """The test error after each epoch, in %."""
    return [line["held_out"] for line in run.evaluations]


def last(run: Run) -> float:
    """The test error after the last epoch, in %."""
    return errors(run)[-1]


def lowest(run: Run) -> float:
    """The lowest test error after any epoch, in %."""
    return min(errors(run))


def seconds_per_epoch(run: Run) -> float:
    """The median time of training in an epoch."""
    return statistics.median(now - before for before, now in pairwise([0.0, *(e["seconds"] for e in run.evaluations)]))


def _verdict(of: Runs) -> list[str]:
    """Compares SET with the others in a sentence; none where there is nothing to compare."""
    seeds = {name: {run.settings["seed"] for run in runs} for name, runs in of.items()}
    others = [name for name in of if name != "set" and seeds[name] & seeds.get("set", set())]
    if not others:
        return []

    def against(figure: Callable[[Run], float]) -> str:
        return " and ".join(f"{_points(of['set'], of[name], figure)} {name}" for name in others)

    epochs = {name: runs[0].config["facts"]["epochs"] for name, runs in of.items()}
    told = [f"{epochs[name]:,} of {name}" for name in others if epochs[name] != epochs["set"]]
    had = f" ({epochs['set']:,} epochs of set, {', '.join(told)})" if told else ""
    return [
        f"**After the last epoch{had} the test error of set is {against(last)}**; the lowest of each run is "
        f"{against(lowest)}. In percentage points, run by run with the same seed."
    ]


def _unlike(dense: mlp.Recipe, recipe: mlp.Recipe) -> str:
    """A sentence on how the training of the dense net differs."""
    own = {
        f"learning rate {dense.learning_rate:g}": dense.learning_rate != recipe.learning_rate,
        f"weights drawn as {dense.init}": dense.init != recipe.init,
    }
    told = [what for what, differs in own.items() if differs]
    return f" The dense one has {' and '.join(told)}: it diverges with those of the others." if told else ""


def _points(one: Sequence[Run], other: Sequence[Run], figure: Callable[[Run], float]) -> str:
    """The difference of two contenders' figures, over the seeds that both have."""
    by_seed = {run.settings["seed"]: figure(run) for run in other}
    found = [figure(run) - by_seed[run.settings["seed"]] for run in one if run.settings["seed"] in by_seed]
    lower = statistics.fmean(found) < 0
    return f"{spread([-x if lower else x for x in found], 2)} points {'lower' if lower else 'higher'} than that of"


def _methods(
    data: str, called: str, epochs: int, tested_on: str, dense: Mapping[str, Any] | None = None
) -> ClassifierExperiment:
    """The contenders, with the papers' recipe; `dense` holds the settings of the dense net only."""
    recipe = replace(mlp.recipe_for(data), epochs=epochs)
    return ClassifierExperiment(
        about=f"One shape of net on {called}: dense, sparse in fixed places, and sparse with an evolving topology",
        data=data,
        contenders={
            method: Contender(method, replace(recipe, **dense or {}) if method == "dense" else recipe)
            for method in ("dense", "fixed", "set")
        },
        tested_on=tested_on,
    )


_PUBLISHED = "split as published"

EXPERIMENTS: dict[str, Experiment] = {
    "sparse-fashion_mnist": _methods("fashion_mnist", "Fashion-MNIST", 100, _PUBLISHED),
    "sparse-madelon": _methods(
        "madelon", "Madelon", 500, "its validation part, as no labels of its test part are known"
    ),
    "sparse-higgs": _methods("higgs", "Higgs", 150, "a fifth of each class, drawn once for all runs"),
    # A dense epoch takes as long as a dozen sparse ones; with the recipe, a dense net diverges in its first steps.
    "sparse-cifar10": _methods(
        "cifar10", "CIFAR-10", 80, _PUBLISHED, {"epochs": 15, "learning_rate": 0.005, "init": "xavier"}
    ),
}
