"""Fine-tune language models of another experiment to classify texts, and train the same models from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from blocksparse.errors import BlockSparseError

from ..data import reviews
from ..recipes import charlm, finetune
from ..recipes.text_features import digest
from ..training.compare import Run
from ..training.trainer import Trainer
from .experiment import SEEDS, Column, DataDir, Experiment, Progress, read_results, run_folder
from .language import EXPERIMENTS as LANGUAGE
from .language import LanguageExperiment


@dataclass(frozen=True)
class FinetuneContender:
    """A language model of another experiment, with the weights of the run of the same seed, or newly drawn."""

    model: str
    settings: finetune.FinetuneSettings
    pretrained: bool = True


@dataclass(frozen=True, kw_only=True)
class FineTuningExperiment(Experiment):
    """Classifiers of texts that start as language models.

    Args:
        begins: name of the experiment with the language models, whose runs are in the same folder.
        data: a name of `data.reviews`, or a csv file.

    A seed is that of the language model, the order of texts and dropout. All seeds share the split.
    """

    contenders: Mapping[str, FinetuneContender]
    begins: str
    data: str

    curves: ClassVar[str] = "Validation error against epochs and seconds"
    caption: ClassVar[str] = (
        "All weights are trained, including the language model's. The learning rate was tuned on the validation set "
        "in short runs of one seed. Errors are those of the test set after the last epoch, as means and standard "
        "deviations over the seeds; differences compare runs of the same seed."
    )

    @property
    def _models(self) -> LanguageExperiment:
        return LANGUAGE[self.begins]

    def load(self, data_dir: DataDir) -> reviews.Splits:
        return reviews.load(self.data, data_dir)

    def needs(self, runs: Path, contender: str, seed: int) -> Path | None:
        of = self.contenders[contender]
        return run_folder(runs.parent / self.begins, of.model, seed) if of.pretrained else None

    def trainer(self, contender: str, seed: int, run: Path, data: reviews.Splits) -> Trainer:
        """Return a trainer of a new model, or of the pretrained one that the contender needs; it must be finished."""
        of, begun = self.contenders[contender], self.needs(run.parent, contender, seed)
        config = replace(self._models.contenders[of.model].config, seed=seed)
        settings = replace(of.settings, seed=seed)
        if begun is None:
            return finetune.trainer(charlm.network(config), data, run, settings)
        if not self._models.is_finished(begun):
            needed = f"a finished run of {self.begins} to start from: blocksparse experiment {self.begins}"
            raise BlockSparseError.expected(contender, needed, f"none in {begun}")
        reader = charlm.load(begun)
        if reader.config != config:
            raise BlockSparseError.expected(str(begun), f"a run of {self.begins}, of {config}", reader.config)
        weights = digest(begun / "last.safetensors")
        return finetune.trainer(reader, data, run, settings, weights)

    def probe(self, run: Path, data_dir: DataDir = None, progress: Progress | None = None) -> None:
        """Measure the error on the test part."""
        if not self.is_probed(run):
            report = (lambda done, of: progress("testing", done, of)) if progress else None
            finetune.evaluate(run, self.load(data_dir), progress=report)

    def is_probed(self, run: Path) -> bool:
        return bool(read_results(run, finetune.TESTED))

    def facts(self, run: Run) -> dict[str, Any]:
        contender, _, seed = run.path.name.rpartition("-")
        begun = self.needs(run.path.parent, contender, int(seed))
        return {
            "bits": read_results(begun, "result.json").get("held_out") if begun else None,
            "validation error": run.held_out,
            **read_results(run.path, finetune.TESTED),
            "cpu_seconds": (run.result or {}).get("cpu_seconds"),
        }

    @property
    def columns(self) -> Sequence[Column]:
        first = next(iter(self.contenders))
        return [
            Column("pretrained on unlabelled texts", lambda run, of: "yes" if of.pretrained else "no"),
            Column("bits per character of the language model, held out", "facts.bits", 3),
            Column("hidden units", "task.model.width"),
            Column("pattern of the recurrent weights", "task.model.pattern"),
            Column("parameters", "facts.parameters"),
            Column("learning rate", "settings.learning_rate"),
            Column("texts per step", "task.batch"),
            Column("bytes read of a text (its last), at most", "task.data.longest"),
            Column("epochs", "facts.epochs"),
            SEEDS,
            Column("validation error, %", "facts.validation error", 2),
            Column("test texts", "facts.texts"),
            Column("test error, %", "facts.test error", 2),
            Column(f"test error, against {first}", "facts.test error", 2, first),
            Column("seconds of a core", "facts.cpu_seconds", 0),
        ]


def _finetuned(begins: str, data: str, minutes: float) -> FineTuningExperiment:
    """Fine-tune the models of one language experiment, and train them from scratch."""
    # Learning rate: after two epochs on the last 512 bytes of 4,000 texts, the dense model of imdb-long has a
    # validation error of 37.4, 33.2 and 34.6 % at 0.001, 0.002 and 0.004, and the block-sparse one of 28.9 % at
    # 0.002. At 0.01 both had learnt nothing after 200 steps on all texts. Half of the reviews have fewer than 1,000
    # bytes.
    recipe = finetune.FinetuneSettings(epochs=2, longest=1024, learning_rate=0.002, dtype="bfloat16")
    # All models were still learning. Four dense epochs take about the time of two small-world epochs.
    longer = replace(recipe, epochs=4)
    return FineTuningExperiment(
        about=f"The language models of {begins}, fine-tuned on {data} end to end or trained from scratch",
        begins=begins,
        data=data,
        minutes=minutes,
        longer={"dense, 4 epochs": 75, "small-world, 4 epochs": 120},
        contenders={
            "dense": FinetuneContender("dense", recipe),
            "small-world": FinetuneContender("small-world", recipe),
            "dense, 4 epochs": FinetuneContender("dense", longer),
            "small-world, 4 epochs": FinetuneContender("small-world", longer),
            "dense, from scratch": FinetuneContender("dense", recipe, pretrained=False),
            "small-world, from scratch": FinetuneContender("small-world", recipe, pretrained=False),
        },
    )


EXPERIMENTS: dict[str, Experiment] = {"imdb-finetuned": _finetuned("imdb-long", "imdb", 60)}
