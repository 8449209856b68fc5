"""Language models: dense against block-sparse and wider, at equal parameters, on the same text in the same order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data import corpora, reviews
from ..data import text as texts
from ..models.char_lm import CharLMConfig
from ..recipes import charlm, sentiment
from ..recipes.compare import Run
from ..recipes.trainer import Settings, Trainer, device_of
from .experiment import Experiment, Row, Runs
from .report import spread

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
        found, checkpoint = probes_of(run), run / "last.safetensors"
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
        return {"probes": probes_of(run.path)}

    def rows(self, of: Runs) -> Iterator[Row]:
        firsts = [runs[0] for runs in of.values()]
        yield "hidden units", [f"{run.task['model']['width']:,}" for run in firsts]
        yield "pattern", [_pattern(run.task["model"]) for run in firsts]
        yield "density of the recurrent weights", [f"{run.config['facts']['density']:.3g}" for run in firsts]
        yield "parameters", [f"{run.config['facts']['parameters']:,}" for run in firsts]
        yield "multiply-adds per byte", [f"{run.config['facts']['multiply_adds_per_byte']:,}" for run in firsts]
        yield "learning rate", [f"{run.settings['learning_rate']:g}" for run in firsts]
        yield "seeds", [str(len(runs)) for runs in of.values()]
        for title, figure in self._figures().items():
            found = [[figure(run) for run in runs] for runs in of.values()]
            known = [[value for value in values if value is not None] for values in found]
            if known == found:
                yield title, [spread(values) for values in known]

    def _figures(self) -> dict[str, Figure]:
        def test(data: str, key: str) -> Figure:
            def figure(run: Run) -> float | None:
                probes = probes_of(run.path)
                return probes[data]["probe"][key] if data in probes else None

            return figure

        figures: dict[str, Figure] = {"bits per character, held out": lambda run: run.held_out}
        for data, limit in self.reviews.items():
            some = "" if limit is None else f" of {limit:,}"
            figures[f"{data}, part of test texts{some} taken wrongly"] = test(data, "test error")
            figures[f"{data}, features used"] = test(data, "used")
        figures["bytes/s"] = lambda run: run.as_dict()["bytes_per_second"]
        return figures

    def notes(self, of: Runs) -> list[str]:
        run = next(iter(of.values()))[0]
        return [
            f"Mean and standard deviation over the seeds. {run.settings['steps']:,} steps of "
            f"{run.config['bytes_per_step']:,} bytes, {run.as_dict()['bytes'] / 1e6:.1f} MB of the text, which all "
            f"read once and in the same order; Adam with {run.settings['warmup']} steps of warm-up and a linear decay, "
            f"gradients clipped at {run.settings['clip']:g}. Bits per character of one text do not compare with "
            "those of another, nor with published figures for enwik8."
        ]

    @property
    def curves(self) -> str:
        return "Bits per character against steps and seconds"


Figure = Callable[[Run], float | None]


def probes_of(path: Path) -> dict[str, Any]:
    """The probes of a run that were made."""
    kept = path / PROBES
    return json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}


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
