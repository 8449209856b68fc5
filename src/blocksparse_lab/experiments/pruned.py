"""Experiments on dense nets that are made block-sparse: MLPs on tables, and language models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checkpoint import part
from blocksparse.conversion import load_sparsified

from ..data import tables
from ..data import text as texts
from ..data.table import Table
from ..models.char_lm import CharLMConfig
from ..models.mlp import SparseMLP
from ..recipes import charlm
from ..recipes.classify import ClassifyTask
from ..recipes.prune import FIXED, Pruning
from ..training.settings import EpochSettings, Settings
from ..training.trainer import Task
from .experiment import Column, DataDir, Experiment
from .language import READ, CorpusExperiment
from .pruning import BATCH, DENSE, MODEL, Dense, PruningExperiment


@dataclass(frozen=True, kw_only=True)
class ClassifierPruning(PruningExperiment):
    """An MLP with ReLU on a table.

    Args:
        data: a name of `data.tables`, or a csv file.
        hidden: features of the hidden layers.
        epochs, batch, learning_rate: of the training, by Adam with a linear decay.
    """

    data: str = "fashion_mnist"
    hidden: tuple[int, ...] = (4096, 4096)
    epochs: int = 4
    batch: int = 128
    learning_rate: float = 1e-3
    figure: ClassVar[str] = "test accuracy, %"

    def load(self, data_dir: DataDir) -> Table:
        return tables.load(self.data, data_dir)

    def dense(self, seed: int, data: Table) -> tuple[Task, Settings, dict[str, Any]]:
        """Return (task, settings, facts) of the dense net."""
        sizes = [data.features, *self.hidden, len(data.classes)]
        task = ClassifyTask(_mlp(sizes, seed), data, self.epochs, self.batch, seed=seed, about={"sizes": sizes})
        warmup = min(100, task.steps // 10)
        settings = EpochSettings(
            epochs=self.epochs,
            batch=self.batch,
            learning_rate=self.learning_rate,
            clip=0.0,
            save_minutes=2.0,
            seed=seed,
        ).in_epochs(task.steps_per_epoch, warmup=warmup, save_every=0)
        return task, settings, {"data": self.data, "tested": data.tested, "epochs": self.epochs}

    def load_model(self, run: Path) -> nn.Module:
        tensors, about = checkpoint.load(run / MODEL)
        return load_sparsified(_mlp(about["task"]["model"]["sizes"], 0), part(tensors, "model."))

    def inputs(self, model: Any) -> Tensor:
        return torch.randn(BATCH, model.sizes[0])

    def shown(self, held_out: float) -> float:
        return 100 - held_out


@dataclass(frozen=True, kw_only=True)
class LanguagePruning(PruningExperiment, CorpusExperiment):
    """An LSTM that reads bytes; `trained` has the dense model and its training."""

    trained: charlm.CharLMSettings
    figure: ClassVar[str] = "bits per character, held out"
    unit: ClassVar[str] = "%"
    digits: ClassVar[int] = 1
    tested: ClassVar[tuple[Column, ...]] = (READ,)

    def compared(self, quality: float, dense: float) -> float:
        return 100 * (quality / dense - 1)

    def dense(self, seed: int, data: texts.Text) -> tuple[Task, Settings, dict[str, Any]]:
        settings = replace(self.trained, model=replace(self.trained.model, seed=seed), seed=seed)
        task = charlm.task(charlm.network(settings.model), data, settings)
        return task, settings, charlm.facts(self.trained.model, self.text)

    def load_model(self, run: Path) -> nn.Module:
        return charlm.load(run / MODEL)

    def inputs(self, model: Any) -> Tensor:
        return torch.randint(256, (self.seq, BATCH))


def _mlp(sizes: list[int], seed: int) -> SparseMLP:
    return SparseMLP(sizes, density=None, activation="relu", dropout=0.0, init="fan_in", seed=seed)


def _at_densities(method: str, **other: Any) -> dict[str, Pruning]:
    """Return runs of a method at density 0.1, and at other densities for the curve."""
    return {method: Pruning(method, 0.1, **other)} | _at(method, (0.05, 0.2, 0.3), **other)


def _at(method: str, densities: tuple[float, ...], **other: Any) -> dict[str, Pruning]:
    return {f"{method}-{density:g}": Pruning(method, density, **other) for density in densities}


def _at_strengths(method: str, strengths: tuple[float, ...], **other: Any) -> dict[str, Pruning]:
    """Return runs of a method with several strengths.

    One of them may come near the target density; that depends on widths and steps.
    """
    return {f"{method}-{strength:g}": Pruning(method, strength=strength, **other) for strength in strengths}


def _classifier() -> PruningExperiment:
    """Prune an MLP on Fashion-MNIST by all methods."""
    skip = ("layers.2",)  # the weight of ten outputs
    return ClassifierPruning(
        about="An MLP 784-4096-4096-10 on Fashion-MNIST, dense and made block-sparse in blocks of 32 by training",
        contenders={
            DENSE: Dense(),
            FIXED: Pruning(FIXED, density=0.1, search=0, skip=skip),
            **_at_densities("one-shot", skip=skip),
            **_at_densities("gradual", skip=skip),
            "movement": Pruning("movement", density=0.1, skip=skip),
            **_at_strengths("threshold", (0.3, 0.4, 0.5), skip=skip),
            **_at_densities("group lasso", strength=2, skip=skip),
            **_at_densities("l0", strength=5e-8, skip=skip),
        },
        pruned=(0.05, 0.1, 0.2, 0.3, 0.5),
        skip=skip,
    )


def _inputs() -> PruningExperiment:
    """Select inputs: blocks have all rows and one column."""
    width = 512
    inputs: dict[str, Any] = {"block_size": (width, 1), "skip": ("layers.1", "layers.2")}
    return ClassifierPruning(
        about="Which inputs an MLP 784-512-512-10 needs on Fashion-MNIST: L0 gates and group lasso on inputs",
        contenders={
            DENSE: Dense(),
            **_at_strengths("l0", (5e-7, 7e-7, 1e-6, 2e-6), **inputs),
            **_at_strengths("group lasso", (10, 20), **inputs),
            # As many inputs as l0 leaves: those with the largest weights, and random ones.
            **_at("one-shot", (0.39, 0.27), **inputs),
            **_at(FIXED, (0.39, 0.27), search=0, **inputs),
        },
        controls=(f"{FIXED}-0.39", f"{FIXED}-0.27"),
        hidden=(width, width),
        epochs=20,
        minutes=3,
    )


def _language() -> PruningExperiment:
    """Prune an LSTM on Wikipedia by all methods."""
    skip = ("recurrent.weight_ih_l0",)  # the weight of the embedding
    # In short runs, an early choice of the layout is better: 2.80, 2.94 and 3.05 bits per character with 512 units if
    # a fifth, two fifths and two thirds of the steps search.
    early: dict[str, Any] = {"search": 0.2, "skip": skip}
    return LanguagePruning(
        about="An LSTM of 1,536 units on Wikipedia, dense and made block-sparse in blocks of 32 by training",
        text="wikipedia",
        minutes=15,
        # Half an hour on one core.
        trained=charlm.CharLMSettings(
            steps=2000,
            learning_rate=0.006,
            warmup=50,
            save_every=0,
            save_minutes=2.0,
            batch=32,
            seq=64,
            evaluated=150_000,
            model=CharLMConfig(width=1536, embedding=32),
        ),
        contenders={
            DENSE: Dense(),
            "dense x3": Dense(times=3),
            "one-shot": Pruning("one-shot", density=0.1, search=0.4, skip=skip),
            **_at_densities("gradual", **early),
            "fixed x3": Pruning(FIXED, density=0.1, search=0, times=3, skip=skip),
            # An LSTM that starts sparse learns best at twice the rate: see wikipedia-small.
            "fixed x3, rate x2": Pruning(FIXED, density=0.1, search=0, times=3, rate=2, skip=skip),
            "gradual x3": Pruning("gradual", density=0.1, search=0.2 / 3, times=3, skip=skip),
            # Separates the effect of the recurrent blocks from that of the output layer's blocks.
            "fixed x3, dense outlet": Pruning(FIXED, density=0.1, search=0, times=3, skip=(*skip, "outlet")),
            "gradual x3, dense outlet": Pruning(
                "gradual", density=0.1, search=0.2 / 3, times=3, skip=(*skip, "outlet")
            ),
            "gradual x3, rate x2": Pruning("gradual", density=0.1, search=0.2 / 3, times=3, rate=2, skip=skip),
            "movement": Pruning("movement", density=0.1, **early),
            **_at_strengths("threshold", (0.7, 0.85, 1), search=0.4, skip=skip),
            "threshold-0.85 x3": Pruning("threshold", strength=0.85, search=0.4 / 3, times=3, skip=skip),
            "threshold-0.85 x9": Pruning("threshold", strength=0.85, search=0.4 / 9, times=9, skip=skip),
            "threshold-glp": Pruning("threshold", strength=0.85, penalty=1e-3, search=0.4, skip=skip),
            "group lasso": Pruning("group lasso", density=0.1, strength=6, **early),
            "l0": Pruning("l0", density=0.1, strength=3e-8, **early),
        },
        pruned=(0.1, 0.2, 0.3, 0.5),
        skip=skip,
        controls=("fixed x3", "fixed x3, dense outlet"),
    )


EXPERIMENTS: dict[str, Experiment] = {
    "prune-fashion_mnist": _classifier(),
    "prune-charlm": _language(),
    "gate-fashion_mnist": _inputs(),
}
