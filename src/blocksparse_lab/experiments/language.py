"""Language models: dense against block-sparse and wider, at equal parameters, on the same text in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ..data import corpora, reviews
from ..data import text as texts
from ..models.char_lm import CharLMConfig
from ..recipes import charlm, sentiment
from ..recipes.compare import Run
from ..recipes.trainer import Settings, Trainer, device_of
from .experiment import SEEDS, Column, Experiment, fact, kept, model, setting

PROBES = "probes.json"


@dataclass(frozen=True)
class Contender:
    """A model of an experiment, and the learning rate that suits it."""

    config: CharLMConfig
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class LanguageExperiment(Experiment):
    """Language models of one size on one text.

    Args:
        text: a name of `data.corpora`.
        settings: of all of them; each has its own learning rate, each run its own seed.
        batch, seq: streams, and bytes of each in a step.
        held_out: the part of the text, its tail, that is evaluated on.
        evaluated: bytes of it that an evaluation along the way reads.
        reviews: labelled texts, names of `data.reviews`, on which the models' states are probed afterwards, with the
            number of texts of each part at most; None for all.

    The seeds are of pattern and weights. The order of the text is the same for all.
    """

    contenders: Mapping[str, Contender]
    text: str
    settings: Settings
    batch: int = 32
    seq: int = 64
    held_out: float = 0.02
    evaluated: int = 300_000
    reviews: Mapping[str, int | None] = field(default_factory=dict)

    curves: ClassVar[str] = "Bits per character against steps and seconds"
    caption: ClassVar[str] = (
        "Mean and standard deviation over the seeds. All read the text once and in the same order; Adam with a linear "
        "decay after the warm-up. Bits per character of one text do not compare with those of another, nor with "
        "published figures for enwik8."
    )

    def load(self, data_dir: str | Path | None) -> texts.Text:
        content = corpora.load(self.text, data_dir)
        return texts.split(content, self.seq, name=self.text, held_out=self.held_out)

    def trainer(self, contender: str, seed: int, run: Path, data: texts.Text) -> Trainer:
        of = self.contenders[contender]
        config = replace(of.config, seed=seed)
        settings = replace(self.settings, learning_rate=of.learning_rate, seed=seed)
        device = device_of(settings.device)
        task = charlm.CharLMTask(charlm.network(config), data, self.batch, self.seq, self.evaluated, device)
        return Trainer(task, run, settings, charlm.facts(config, self.text))

    def probe(
        self,
        run: Path,
        data_dir: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """The sentiment probes; by data, what `sentiment` finds."""
        found, checkpoint = kept(run, PROBES), run / "last.safetensors"
        device = self.settings.device
        for data, limit in self.reviews.items():
            if data in found:
                continue
            splits = reviews.load(data, data_dir)
            splits = splits if limit is None else splits.limited(limit)
            cache = sentiment.CachedFeatures(checkpoint)
            result = sentiment.evaluate(
                lambda: charlm.load(checkpoint).to(device), splits, cache=cache, progress=progress
            )
            found[data] = result.as_dict() | {"limit": limit}
            (run / PROBES).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def found(self, run: Run) -> dict[str, Any]:
        # What is long is left in the folder of the run.
        long = ("coefficients", "validation of each C")
        return {
            "held_out": run.held_out,
            "bytes_per_second": run.as_dict()["bytes_per_second"],
            "probes": {
                data: found | {"probe": {key: value for key, value in found["probe"].items() if key not in long}}
                for data, found in kept(run.path, PROBES).items()
            },
        }

    @property
    def columns(self) -> Sequence[Column]:
        return [
            model("hidden units", "width"),
            Column("pattern", lambda run, _: _pattern(run.task["model"])),
            Column("density of the recurrent weights", lambda run, _: f"{run.config['facts']['density']:.3g}"),
            fact("parameters", "parameters"),
            fact("multiply-adds per byte", "multiply_adds_per_byte"),
            setting("learning rate", "learning_rate"),
            setting("steps", "steps"),
            setting("steps of warm-up", "warmup"),
            setting("gradients clipped at", "clip"),
            Column("bytes of a step", lambda run, _: run.config["bytes_per_step"]),
            SEEDS,
            fact("bits per character, held out", "held_out"),
            *(column for data, limit in self.reviews.items() for column in _probed(data, limit)),
            fact("bytes/s", "bytes_per_second"),
        ]


def _probed(data: str, limit: int | None) -> Iterator[Column]:
    """The columns of a probe."""
    some = "" if limit is None else f" of {limit:,}"
    for title, key in ((f"part of test texts{some} taken wrongly", "test error"), ("features used", "used")):

        def of(run: Run, _: Any, key: str = key) -> float | None:
            probes = run.config["facts"]["probes"]
            return float(probes[data]["probe"][key]) if data in probes else None

        yield Column(f"{data}, {title}", of)


def _small(text: str, **other: Any) -> LanguageExperiment:
    """1.5 million parameters: ten minutes a run on one core of a CPU."""
    # The learning rates are near the best of 0.003, 0.006, 0.012, 0.024 and 0.048 in runs of 800 steps on Wikipedia;
    # longer runs want less.
    wide = CharLMConfig(width=1536, embedding=32, pattern="barabasi_albert", m=2)
    return LanguageExperiment(
        about=f"An LSTM of 1.5 million parameters, dense or block-sparse and 2.7 times as wide, on {text}",
        text=text,
        contenders={
            "dense": Contender(CharLMConfig(width=576, embedding=32), 0.016),
            "small-world": Contender(wide, 0.012),
        },
        settings=Settings(steps=3500, warmup=100, eval_every=500, save_every=500),
        **other,
    )


def _large(text: str, **other: Any) -> LanguageExperiment:
    """42 million parameters in the recurrent weights, the sizes of the paper: hours on a GPU."""
    wide = CharLMConfig(width=18432, pattern="barabasi_albert", m=8)
    return LanguageExperiment(
        about=f"LSTMs of 3,168 dense and of 18,432 block-sparse units, as in the paper of 2017, on {text}",
        text=text,
        contenders={
            "dense": Contender(CharLMConfig(width=3168), 0.0005),
            "small-world": Contender(wide, 0.001),
        },
        settings=Settings(
            steps=20_000, warmup=500, eval_every=1000, save_every=1000, dtype="bfloat16", device="cuda", cuda_graph=True
        ),
        batch=128,
        seq=256,
        evaluated=1_000_000,
        **other,
    )


EXPERIMENTS: dict[str, Experiment] = {
    "wikipedia-small": _small("wikipedia"),
    "imdb-small": _small("imdb", reviews={"sst": None, "imdb": 2000}),
    "wikipedia-large": _large("wikipedia", seeds=(0,)),
    "imdb-large": _large("imdb", seeds=(0,), reviews={"sst": None, "imdb": None}),
}


def _pattern(model: Mapping[str, Any]) -> str:
    blocks = f", blocks of {model['block_size']}"
    return {
        "dense": "dense",
        "barabasi_albert": f"Barabasi-Albert, m {model['m']}{blocks}",
        "watts_strogatz": f"Watts-Strogatz, {model['neighbors']} neighbors{blocks}",
        "random": f"random{blocks}",
    }[model["pattern"]]
