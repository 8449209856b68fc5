"""PixelCNN++ on the same images in the same order: dense, or sparse in its channels and deeper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..data import images
from ..recipes import pixelcnn
from ..recipes.pixelcnn import PixelCNNConfig, PixelCNNSettings
from ..training.compare import Run
from ..training.trainer import Trainer
from .equal_seconds import EqualSeconds
from .experiment import SEEDS, Column, DataDir, Experiment


@dataclass(frozen=True, kw_only=True)
class PixelExperiment(Experiment):
    """PixelCNNs on one set of images.

    Args:
        contenders: networks, by name.
        data: a name of `data.images`.
        settings: of all runs; each has its own network and seed.

    A seed determines weights, order of images and dropout.
    """

    contenders: Mapping[str, PixelCNNConfig]
    data: str
    settings: PixelCNNSettings

    curves: ClassVar[str] = "Bits per dimension against steps and seconds"
    caption: ClassVar[str] = (
        "All networks see the same images in the same order and are tested on the first test images, with the running "
        "mean of their weights (decay at most (1 + t) / (10 + t) at step t). The optimizer is Adam with a linear decay "
        "after the warm-up. Figures are means and standard deviations over the seeds. The published figures on "
        "CIFAR-10, 2.92 dense and 2.90 block-sparse, are for 160 filters and far longer training."
    )

    def load(self, data_dir: DataDir) -> images.Images:
        return images.load(self.data, data_dir)

    def trainer(self, contender: str, seed: int, run: Path, data: images.Images) -> Trainer:
        model = replace(self.contenders[contender], seed=seed)
        return pixelcnn.trainer(replace(self.settings, model=model, seed=seed), data, run)

    @property
    def columns(self) -> Sequence[Column]:
        every, steps = self.settings.eval_every, self.settings.steps
        return [
            Column("channels", lambda run, _: _channels(run.task["model"])),
            Column("gated residual layers of a stage", lambda run, _: _layers(run.task["model"])),
            Column("parameters", "facts.parameters"),
            Column("dropout", "task.model.dropout"),
            Column("learning rate", "settings.learning_rate"),
            Column("warm-up steps", "settings.warmup"),
            Column("running mean of the weights", "settings.ema"),
            Column("images per step", "task.batch"),
            Column("test images", "facts.tested"),
            SEEDS,
            *(
                Column(f"bits per dimension after {step:,} steps", partial(_at, step=step), 3)
                for step in range(every, steps + 1, every)
            ),
            EqualSeconds("bits per dimension at equal seconds, against dense", against="dense"),
            Column("seconds of training per step", lambda run, _: run.seconds / run.steps, 3),
        ]


def _channels(model: Mapping[str, Any]) -> str:
    groups = model["sparse"]
    return f"{model['filters']}, " + ("dense" if groups is None else f"{groups} shuffled groups")


def _layers(model: Mapping[str, Any]) -> int:
    return model["resnets"] * model["depth"]


def _at(run: Run, contender: Any, step: int) -> float | None:
    return next((line["held_out"] for line in run.evaluations if line["step"] == step), None)


def _small(data: str, label: str) -> PixelExperiment:
    """Return the experiment at toy size; a run takes minutes on one CPU core."""
    dense = PixelCNNConfig(filters=16, resnets=1)
    return PixelExperiment(
        about=f"PixelCNN++ of 16 filters on {label}: dense, and in 4 groups of channels with 4 and 5 times the layers",
        data=data,
        contenders={
            "dense": dense,
            # With fewer, and with slightly more, parameters than the dense network.
            "sparse x4": replace(dense, sparse=4, depth=4),
            "sparse x5": replace(dense, sparse=4, depth=5),
        },
        # In runs of 160 steps, 0.01 was better than 0.005 and 0.002 for both; longer runs get lower rates.
        settings=PixelCNNSettings(
            steps=800,
            learning_rate=0.006,
            warmup=20,
            decay="linear",
            decay_per_step=1.0,
            clip=1.0,
            eval_every=100,
            save_every=200,
            batch=8,
            evaluated=320,
        ),
    )


def _large(data: str, label: str) -> PixelExperiment:
    """Return the experiment with the sizes of the paper; runs take days on a GPU, and resume."""
    dense = PixelCNNConfig()
    return PixelExperiment(
        about=f"PixelCNN++ of 160 filters on {label}: dense, and in 5 groups of channels with 5 times the layers",
        data=data,
        minutes=None,
        contenders={"dense": dense, "sparse x5": replace(dense, sparse=5, block_size=16, depth=5)},
        settings=PixelCNNSettings(100_000, device="cuda", dtype="bfloat16", evaluated=1000),
        seeds=(0,),
    )


EXPERIMENTS: dict[str, Experiment] = {
    "cifar10-pixels-small": _small("cifar10", "CIFAR-10"),
    "fashion_mnist-pixels-small": _small("fashion_mnist", "Fashion-MNIST"),
    "cifar10-pixels-large": _large("cifar10", "CIFAR-10"),
}
