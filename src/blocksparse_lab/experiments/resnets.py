"""Residual networks, dense and block-sparse in their channels, and networks blind to circular shifts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from ..data import images
from ..recipes import resnet
from ..recipes.resnet import ResNetSettings
from ..training.compare import Run
from ..training.trainer import Trainer
from .classifiers import seconds_per_epoch
from .equal_seconds import EqualSeconds
from .experiment import SEEDS, Column, DataDir, Experiment, Progress, format_setting, read_results

KEPT = "consistency.json"
# Columns that all networks on images have.
SIZE_AND_TRAINING = (
    Column("parameters", "facts.parameters"),
    Column("multiply-adds per image", "facts.multiply_adds_per_image"),
    Column("learning rate", "settings.learning_rate"),
    Column("weight decay", "settings.weight_decay"),
    Column("images per batch", "task.batch"),
    Column("epochs", "facts.epochs"),
    SEEDS,
)


@dataclass(frozen=True, kw_only=True)
class ResNetExperiment(Experiment):
    """Residual networks on one set of images.

    Args:
        contenders: settings, by name.
        data: a name of `data.images`.

    A seed determines weights, order of images, crops and flips.
    """

    contenders: Mapping[str, ResNetSettings]
    data: str

    caption: ClassVar[str] = (
        "Accuracy is that on all test images. The optimizer is AdamW; training images are cropped at random with a "
        f"margin of {resnet.MARGIN} and mirrored. Figures are means and standard deviations over the seeds; "
        "differences compare runs of the same seed."
    )

    def load(self, data_dir: DataDir) -> images.Images:
        return images.load(self.data, data_dir)

    def trainer(self, contender: str, seed: int, run: Path, data: images.Images) -> Trainer:
        return resnet.trainer(replace(self.contenders[contender], seed=seed), data, run)

    def facts(self, run: Run) -> dict[str, Any]:
        return {"accuracy": 100 - run.evaluations[-1]["held_out"], "seconds_per_epoch": seconds_per_epoch(run)}

    @property
    def columns(self) -> Sequence[Column]:
        first = next(iter(self.contenders))
        return [
            Column("down-sampling", lambda run, _: _sampling(run.task["model"])),
            Column("padding", lambda run, _: run.task["model"]["padding_mode"] or "zeros"),
            Column(
                "density of the convolutions", lambda run, _: format_setting(run.task["model"]["density"] or "dense")
            ),
            Column("channels of the stages", lambda run, _: format_setting(_channels(run.task["model"]))),
            Column("blocks of the stages", "task.model.blocks"),
            *SIZE_AND_TRAINING,
            Column("test images", "facts.tested"),
            Column("test accuracy, %", "facts.accuracy", 2),
            Column(f"test accuracy, against {first}", "facts.accuracy", 2, against=first),
            EqualSeconds(
                f"test accuracy at equal seconds, against {first}",
                digits=2,
                against=first,
                figure=lambda error: 100 - error,
            ),
            *self.further,
            Column("seconds of training per epoch", "facts.seconds_per_epoch", 1),
        ]

    @property
    def further(self) -> Sequence[Column]:
        """Columns of further measurements."""
        return ()


@dataclass(frozen=True, kw_only=True)
class ShiftExperiment(ResNetExperiment):
    """Residual networks that downsample in different ways.

    Args:
        shifted: test images that are evaluated at all of their circular shifts.
    """

    shifted: int = 64

    caption: ClassVar[str] = (
        "Consistency is the probability that two random circular shifts of an image get the same class, computed over "
        "all pairs on the first test images. Accuracy is that on all test images, unshifted. The optimizer is AdamW; "
        f"training images are cropped at random with a margin of {resnet.MARGIN} and mirrored. Figures are means and "
        "standard deviations over the seeds; differences compare runs of the same seed."
    )

    def probe(self, run: Path, data_dir: DataDir = None, progress: Progress | None = None) -> None:
        """Measure the consistency over shifts."""
        if read_results(run, KEPT).get("images") != self.shifted:
            report = (lambda done, of: progress("shifts", done, of)) if progress else None
            resnet.shift_consistency(run, self.load(data_dir), self.shifted, report)

    def facts(self, run: Run) -> dict[str, Any]:
        return super().facts(run) | {"consistency": read_results(run.path, KEPT)}

    @property
    def further(self) -> Sequence[Column]:
        return [
            Column("images shifted", "facts.consistency.images"),
            Column("circular shifts of each", "facts.consistency.shifts"),
            Column(
                "consistency over all circular shifts, %",
                lambda run, _: (share := run.facts["consistency"].get("agreement")) and 100.0 * share,
                2,
            ),
            Column(
                "largest difference of a logit by a shift",
                "facts.consistency.difference",
                show=lambda values: f"{max(values):.1e}",
            ),
        ]


def _density(model: Mapping[str, Any]) -> str:
    return format_setting(model["density"] or "dense")


def _sampling(model: Mapping[str, Any]) -> str:
    return model["downsample"] + (f", blur {model['blur']}" if model["blur"] > 1 else "")


def _channels(model: Mapping[str, Any]) -> list[int]:
    return [model["width"] << stage for stage in range(len(model["blocks"]))]


EXPERIMENTS: dict[str, Experiment] = {
    "shifts-cifar10": ShiftExperiment(
        about="A residual network on CIFAR-10, with strides or adaptive polyphase sampling, under circular shifts",
        data="cifar10",
        contenders={
            "stride": ResNetSettings(padding_mode="circular"),
            "stride, blurred": ResNetSettings(padding_mode="circular", blur=3),
            "aps": ResNetSettings(downsample="aps", padding_mode="circular"),
            "aps, blurred": ResNetSettings(downsample="aps", padding_mode="circular", blur=3),
            # Zero padding reveals where an image ends.
            "stride, zeros": ResNetSettings(),
        },
    ),
    "resnet-cifar10": ResNetExperiment(
        about="A residual network on CIFAR-10, dense, block-sparse, and block-sparse and twice as wide",
        data="cifar10",
        contenders={
            "dense": ResNetSettings(width=16),
            "sparse": ResNetSettings(width=16, density=0.25),
            # Has the multiply-adds of the dense network.
            "sparse, wide": ResNetSettings(width=32, density=0.25),
        },
    ),
}
