"""Vision transformers at equal multiply-adds: dense, or wider with blocks that are fixed or move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..data import images
from ..data.images import Images
from ..models.gpt import GPTConfig
from ..recipes import resnet, vit
from ..recipes.grow import Growth
from ..recipes.vit import ViTSettings
from ..training.compare import Run
from ..training.trainer import Trainer
from .classifiers import VALIDATION, seconds_per_epoch
from .equal_seconds import EqualSeconds
from .experiment import Column, DataDir, Experiment
from .resnets import SIZE_AND_TRAINING
from .transformers import TransformerContender, blocks

VALIDATED = 5000  # training images that tune settings


@dataclass(frozen=True, kw_only=True)
class ViTExperiment(Experiment):
    """Vision transformers on one set of images.

    Args:
        data: a name of `data.images`.
        settings: shared by all; each contender has its own learning rate, each run its own seed.
        choosing: tune settings: report errors on training images that are drawn once and not trained on.

    A seed determines blocks, weights, order of images, crops and flips.
    """

    contenders: Mapping[str, TransformerContender]
    data: str
    settings: ViTSettings
    choosing: bool = False

    caption: ClassVar[str] = (
        f"The optimizer is AdamW; training images are cropped at random with a margin of {resnet.MARGIN} and mirrored. "
        "Figures are means and standard deviations over the seeds; differences compare runs of the same seed."
    )

    def load(self, data_dir: DataDir) -> Images:
        return held_back(images.load(self.data, data_dir)) if self.choosing else images.load(self.data, data_dir)

    def trainer(self, contender: str, seed: int, run: Path, data: Images) -> Trainer:
        of = self.contenders[contender]
        settings = replace(
            self.settings, model=replace(of.begins, seed=seed), learning_rate=of.learning_rate, seed=seed
        )
        trainer = vit.trainer(settings, data, run, of.growth)
        if self.choosing:
            trainer.task.unit = VALIDATION
        return trainer

    def facts(self, run: Run) -> dict[str, Any]:
        return {"error": run.evaluations[-1]["held_out"], "seconds_per_epoch": seconds_per_epoch(run)}

    @property
    def in_rows(self) -> bool:
        return self.choosing

    @property
    def columns(self) -> Sequence[Column]:
        error = "validation error" if self.choosing else "test error"
        bases = [] if self.choosing else ["dense", "fixed"]
        return [
            Column("features of a patch", "task.model.width"),
            Column("blocks", lambda _, of: blocks(of)),
            Column("density of the layers' weights", lambda run, _: f"{run.facts['density']:.3g}"),
            *SIZE_AND_TRAINING,
            Column("validation images" if self.choosing else "test images", "facts.tested"),
            Column(f"{error}, %", "facts.error", 2),
            *(Column(f"{error}, against {base}", "facts.error", 2, against=base) for base in bases),
            *(EqualSeconds(f"{error} at equal seconds, against {base}", digits=2, against=base) for base in bases),
            Column("seconds of training per epoch", "facts.seconds_per_epoch", 1),
        ]


def held_back(of: Images) -> Images:
    """Return the images with some of those to train on, drawn once, in place of those to test on."""
    order = torch.randperm(len(of.train), generator=torch.Generator().manual_seed(0))
    tested, rest = order[:VALIDATED], order[VALIDATED:]
    train, labels = of.train, of.train_labels
    return replace(of, train=train[rest], train_labels=labels[rest], test=train[tested], test_labels=labels[tested])


DENSE = GPTConfig(width=64, layers=3, context=16)
WIDE = replace(DENSE, width=128, density=0.23, block_size=8)

# Tuned in `rates-vit`.
CONTENDERS = {
    "dense": TransformerContender(DENSE, 0.001),
    "fixed": TransformerContender(WIDE, 0.002),
    "SET": TransformerContender(WIDE, 0.004, growth=Growth("set")),
    "RigL": TransformerContender(WIDE, 0.002, growth=Growth("rigl")),
    "SMET": TransformerContender(WIDE, 0.004, growth=Growth("smet", fraction=0.2, end=1.0)),
    "CHTs, clock": TransformerContender(WIDE, 0.004, growth=Growth("chts", fraction=0.1, clock=True)),
}
RATES = 0.001, 0.002, 0.004, 0.008

EXPERIMENTS: dict[str, Experiment] = {
    "vit-methods": ViTExperiment(
        about="A vision transformer on CIFAR-10 with patches of 8 x 8, dense, or twice as wide with blocks that are "
        "fixed or move. Learning rates are the best of four for each, tuned on a validation set in two epochs",
        data="cifar10",
        contenders=CONTENDERS,
        settings=ViTSettings(),
        minutes=5,
    ),
    "rates-vit": ViTExperiment(
        about="Learning rates of vision transformers on CIFAR-10, dense, or twice as wide with blocks that are fixed "
        "or move, tuned on a validation set",
        data="cifar10",
        contenders={
            f"{name}, {rate:g}": replace(of, learning_rate=rate) for name, of in CONTENDERS.items() for rate in RATES
        },
        settings=ViTSettings(epochs=2),
        minutes=2,
        seeds=(0,),
        choosing=True,
    ),
}
