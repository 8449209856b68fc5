"""Networks on images that see where an image begins, and networks that do not."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import images
from ..recipes import resnet
from ..recipes.compare import Run
from ..recipes.trainer import Trainer
from .classifiers import last, seconds_per_epoch
from .experiment import Experiment, Row, Runs
from .report import spread


@dataclass(frozen=True, kw_only=True)
class ShiftExperiment(Experiment):
    """Residual networks of one shape on one set of images, which differ in how they halve an image.

    Args:
        contenders: recipes, by name.
        data: a name of `data.images`.
        shifted: test images that are seen at all of their circular shifts.

    The seeds are of the weights, the order of the images and how each is cropped and mirrored.
    """

    contenders: Mapping[str, resnet.Recipe]
    data: str
    shifted: int = 64

    def load(self, data_dir: str | Path | None) -> images.Images:
        return images.load(self.data, data_dir)

    def trainer(self, contender: str, seed: int, run: Path, data: images.Images) -> Trainer:
        return resnet.trainer(self.contenders[contender], data, run, seed)

    def probe(
        self,
        run: Path,
        data_dir: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """The consistency over shifts."""
        if _consistency(run)["images"] != self.shifted:
            told = (lambda done, of: progress("shifts", done, of)) if progress else None
            resnet.shifted(run, self.load(data_dir), self.shifted, told)

    def found(self, run: Run) -> dict[str, Any]:
        return {"accuracy": 100 - last(run), "consistency": _consistency(run.path)}

    def rows(self, of: Runs) -> Iterator[Row]:
        def figure(title: str, value: Callable[[Run], float], digits: int) -> Row:
            return title, [spread([value(run) for run in runs], digits) for runs in of.values()]

        models = [runs[0].task["model"] for runs in of.values()]
        facts = [runs[0].config["facts"] for runs in of.values()]
        yield "down-sampling", [_sampling(one) for one in models]
        yield "padding", [one["padding_mode"] or "zeros" for one in models]
        yield (
            "density of the convolutions",
            ["dense" if one["density"] is None else f"{one['density']:g}" for one in models],
        )
        yield "parameters", [f"{one['parameters']:,}" for one in facts]
        yield "epochs", [f"{one['epochs']:,}" for one in facts]
        yield "seeds", [str(len(runs)) for runs in of.values()]
        yield figure("test accuracy, %", lambda run: 100 - last(run), 2)
        known = {name: [_consistency(run.path) for run in runs] for name, runs in of.items()}
        if all(one["images"] for found in known.values() for one in found):
            shares = [spread([100 * one["agreement"] for one in found], 2) for found in known.values()]
            yield "consistency over all circular shifts, %", shares
            largest = [f"{max(one['difference'] for one in found):.1e}" for found in known.values()]
            yield "largest difference of a logit by a shift", largest
        yield figure("seconds of training per epoch", seconds_per_epoch, 1)

    def notes(self, of: Runs) -> list[str]:
        run = next(iter(of.values()))[0]
        model, facts, settings = run.task["model"], run.config["facts"], run.settings
        accuracy = {name: statistics.fmean(100 - last(one) for one in runs) for name, runs in of.items()}
        first, *others = accuracy
        told = [f"{accuracy[name] - accuracy[first]:+.2f} points {name}" for name in others]
        shifted = _consistency(run.path)
        channels = ", ".join(str(model["width"] << stage) for stage in range(len(model["blocks"])))
        return [
            *([f"**Accuracy against {first}: {', '.join(told)}.**"] if told else []),
            "Consistency: the probability that two circular shifts of an image, each drawn on its own of all "
            f"{shifted['shifts']:,}, are put in the same class; computed over all pairs, on the first "
            f"{shifted['images']:,} test images. Accuracy is that on all {facts['tested']:,} test images, as they are.",
            f"Residual networks with stages of {channels} channels and {', '.join(map(str, model['blocks']))} blocks. "
            f"AdamW with learning rate {settings['learning_rate']:g}, weight decay "
            f"{settings['weight_decay']:g}, batches of {run.task['batch']}; the images to train on are cropped with a "
            f"margin of {resnet.MARGIN} and mirrored at random. Mean and standard deviation over the seeds.",
        ]

    @property
    def curves(self) -> str:
        return "Test error against epochs and seconds"


def _sampling(model: Mapping[str, Any]) -> str:
    return model["downsample"] + (f", blur {model['blur']}" if model["blur"] > 1 else "")


def _consistency(run: Path) -> dict[str, Any]:
    kept = run / "consistency.json"
    return json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {"images": 0, "shifts": 0}


EXPERIMENTS: dict[str, Experiment] = {
    "shifts-cifar10": ShiftExperiment(
        about="A residual network on CIFAR-10, with strides or adaptive polyphase sampling, under circular shifts",
        data="cifar10",
        contenders={
            "stride": resnet.Recipe(padding_mode="circular"),
            "aps": resnet.Recipe(downsample="aps", padding_mode="circular"),
            "aps, blurred": resnet.Recipe(downsample="aps", padding_mode="circular", blur=3),
            # Its margins tell where an image ends.
            "stride, zeros": resnet.Recipe(),
        },
    )
}
