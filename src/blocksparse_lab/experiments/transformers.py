"""Transformers over bytes at equal multiply-adds: dense, block-sparse and wider, and made sparse in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..data.text import Text
from ..machine import where
from ..models.gpt import GPTConfig
from ..recipes import gpt
from ..recipes.grow import FIXED, GRADUAL, GrowTask, Growth
from ..recipes.prune import PruneTask, Pruning
from ..training import compare
from ..training.compare import Run
from ..training.trainer import Task, Trainer, device_of
from .equal_seconds import EqualSeconds
from .experiment import SEEDS, Column, Experiment, Results, Table
from .inference import race
from .language import READ, CorpusExperiment

WINDOWS = 16  # of the measured inference


@dataclass(frozen=True)
class TransformerContender:
    """A transformer with its learning rate, how it becomes sparse if it starts dense, and how its blocks move.

    `steps` are those of the experiment if None.
    """

    config: GPTConfig
    learning_rate: float
    pruning: Pruning | None = None
    growth: Growth | None = None
    steps: int | None = None

    @property
    def begins(self) -> GPTConfig:
        if self.growth is not None and self.growth.method == GRADUAL:
            return replace(self.config, density=self.growth.initial_density)
        return self.config if self.pruning is None else replace(self.config, density=1.0)


BASES = "dense", "fixed", "SET"  # contenders that the others are compared with, where they run


@dataclass(frozen=True, kw_only=True)
class TransformerExperiment(CorpusExperiment):
    """Transformers on one text; a seed determines blocks and weights, the order of the text is the same for all.

    Args:
        settings: shared by all; each contender has its own learning rate, each run its own seed.
        timed: whether to report times; False if runs shared a GPU.
    """

    contenders: Mapping[str, TransformerContender]
    settings: gpt.GPTSettings
    timed: bool = True

    paired: ClassVar[bool] = False
    caption: ClassVar[str] = (
        "Figures are means and standard deviations over the seeds. All models read the text once, in the same order, "
        "with Adam whose learning rate decays linearly after the warm-up. Held-out bytes are predicted from half a "
        "window of text or more."
    )

    def trainer(self, contender: str, seed: int, run: Path, data: Text) -> Trainer:
        of = self.contenders[contender]
        model = replace(of.begins, seed=seed)
        # Blocks that move do not fit into a CUDA graph, nor a clock to an optimizer for one.
        graph = self.settings.cuda_graph and (of.growth is None or of.growth.method == FIXED)
        device = self.settings.device if torch.cuda.is_available() else "cpu"
        s = replace(
            self.settings, model=model, learning_rate=of.learning_rate, seed=seed, device=device, cuda_graph=graph,
            steps=of.steps or self.settings.steps,
        )  # fmt: skip
        task: Task = gpt.GPTTask(gpt.network(model), data, s.steps, s.batch, s.evaluated, device_of(s.device))
        if of.pruning is not None:
            task = PruneTask(task, of.pruning, s.steps, seed)
        if of.growth is not None:
            task = GrowTask(task, of.growth, s.steps, seed)
        return Trainer(task, run, s, gpt.facts(replace(of.config, seed=seed), self.text))

    @property
    def curves(self) -> str:  # type: ignore[override]
        return "Bits per character against steps" + (" and seconds" if self.timed else "")

    def picture(self, path: Path, results: Results) -> None:
        of = [compare.Group(contender, tuple(runs)) for contender, runs in results.runs.items()]
        compare.picture(path, of, timed=self.timed)

    def facts(self, run: Run) -> dict[str, Any]:
        return {"held_out": run.held_out, "bytes_per_second": run.as_dict()["bytes_per_second"]}

    def more(self) -> dict[str, Any] | None:
        """Return the inference times of all contenders, untrained and as sparse as they end, if `timed`."""
        if not self.timed:
            return None
        models = {name: gpt.network(of.config).eval() for name, of in self.contenders.items()}
        text = torch.randint(256, (self.seq, WINDOWS), generator=torch.Generator().manual_seed(0))
        samples, here = race(models, text)
        return {"seconds": {name: samples.time(name).median for name in models}, "machine": here}

    def tables(self, results: Results) -> Iterator[Table]:
        yield from super().tables(results)
        if results.more:
            load = f"load {results.more['machine']['load'][0]:.1f}"
            yield Table(
                f"Inference of {WINDOWS} windows, float32: models of these sizes and densities, untrained, in turn in "
                f"one process, medians ({where(results.more['machine'])}, {load}):",
                ("", "ms"),
                [(name, f"{1e3 * seconds:.1f}") for name, seconds in results.more["seconds"].items()],
            )

    @property
    def columns(self) -> Sequence[Column]:
        return [
            Column("features of a byte", "task.model.width"),
            Column("blocks", lambda _, of: blocks(of)),
            Column("density of the layers' weights", lambda run, _: f"{run.facts['density']:.3g}"),
            Column("parameters", "facts.parameters"),
            Column("multiply-adds per byte", "facts.multiply_adds_per_byte"),
            Column("multiply-adds per byte during training, mean", lambda _, of: _while_trained(of)),
            Column("learning rate", "settings.learning_rate"),
            Column("steps", "settings.steps"),
            Column("bytes per step", lambda run, _: run.config["bytes_per_step"]),
            READ,
            SEEDS,
            Column("bits per character, held out", "facts.held_out", 3),
            *(Column(f"bits per character, against {base}", "facts.held_out", 4, base) for base in BASES),
            *self._times,
        ]

    @property
    def _times(self) -> Sequence[Column]:
        if not self.timed:
            return []
        return [
            EqualSeconds("bits per character at equal seconds, against dense", against="dense"),
            Column("bytes/s of training", "facts.bytes_per_second"),
        ]


def blocks(contender: TransformerContender) -> str:
    """Describe the layers' blocks."""
    how = "fixed" if contender.config.method == "fixed" else "RigL"
    if contender.pruning is not None:
        how = f"dense at first, {contender.pruning.method} pruning"
    if contender.growth is not None:
        how = _growth(contender.growth)
    return (
        "dense"
        if contender.config.density == 1
        else f"{contender.config.block_size} x {contender.config.block_size}, {how}"
    )


def _growth(growth: Growth) -> str:
    """Describe how blocks move."""
    if growth.method == GRADUAL:
        how = f"gradual pruning from density {growth.initial_density:g}, growth by {growth.growth}"
    else:
        how = {"fixed": "fixed", "set": "SET", "rigl": "RigL", "smet": "SMET", "chts": "CHTs"}[growth.method]
    how += ", clock per block" if growth.clock else ""
    return how + (", rates divided by density" if growth.by_density else "")


def _while_trained(contender: TransformerContender) -> int:
    if contender.growth is not None:
        mean = contender.growth.mean_density(contender.config.density)
        begins, ends = contender.begins.density, contender.config.density
        searched = (mean - ends) / (begins - ends) if begins > ends else 0.0
    else:
        searched = contender.pruning.search if contender.pruning else 0
    begin, end = gpt.multiply_adds(contender.begins), gpt.multiply_adds(contender.config)
    return round(end + (begin - end) * searched)


def _small(text: str) -> TransformerExperiment:
    """0.9 million multiply-adds per byte: about twenty minutes per run on one CPU core."""
    dense = GPTConfig(width=128)
    wide = replace(dense, width=256, density=0.22)
    # In runs of 500 steps, by the loss of text read for the first time, 0.002 was the best of 0.001, 0.002, 0.004 and
    # 0.008 for the dense model and for fixed blocks, with 3.62 and 3.38 bits; 0.004 came next.
    rate = 0.002
    gradual = Pruning("gradual", wide.density, search=0.5, skip=("outlet",))
    return TransformerExperiment(
        about=f"A transformer of 0.9 million multiply-adds per byte, dense or twice as wide and sparse, on {text}",
        text=text,
        contenders={
            "dense": TransformerContender(dense, rate),
            "block-sparse": TransformerContender(wide, rate),
            "RigL": TransformerContender(replace(wide, method="rigl"), rate),
            "dense to sparse": TransformerContender(wide, rate, gradual),
        },
        minutes=12,
        longer={"dense to sparse": 24},
        settings=gpt.GPTSettings(steps=3400, eval_every=400, save_every=400, batch=16, evaluated=300_000),
        seq=dense.context,
    )


def _methods(text: str) -> TransformerExperiment:
    """Return the experiment with methods that move blocks; a run takes a minute of a GPU, or forty of one CPU core."""
    dense = GPTConfig(width=128)
    wide = replace(dense, width=256, density=0.22, block_size=16)

    # Rates are the best of 0.001, 0.002, 0.004 and 0.008 (half of these if divided by the density), in runs of 650
    # steps with seed 100, by the loss of text read for the first time.
    def moves(method: str, rate: float = 0.008, **options: Any) -> TransformerContender:
        return TransformerContender(wide, rate, growth=Growth(method, **options))

    gradual: dict[str, Any] = {"rate": 0.004, "density": wide.density, "end": 0.5, "clock": True}
    return TransformerExperiment(
        about=f"A transformer of 0.9 million multiply-adds per byte, dense, or twice as wide with blocks that are "
        f"fixed or move, on {text}. Products are in TF32 on a GPU. Learning rates are the best of four for each, in "
        "runs of 650 steps by the loss of training text; for those at 0.008, the highest was best. The runs shared a "
        "GPU or a CPU, so their times do not compare; 1.6 times the steps take dense about as long as fixed blocks on "
        "a quiet Xeon with one thread, and read 1.6 times the text",
        text=text,
        contenders={
            "dense": TransformerContender(dense, 0.004),
            "dense, 1.6 times the steps": TransformerContender(dense, 0.004, steps=4880),
            "fixed": TransformerContender(wide, 0.008),
            "fixed, rates by density": moves("fixed", 0.001, by_density=True),
            "SET": moves("set"),
            "RigL": moves("rigl"),
            "RigL, clock": moves("rigl", clock=True),
            "SMET": moves("smet", fraction=0.2, end=1.0),
            "SMET, rates by density": moves("smet", 0.001, fraction=0.2, end=1.0, by_density=True),
            "CHTs, clock": moves("chts", fraction=0.1, clock=True),
            "prune and regrow": moves(GRADUAL, **gradual),
            "prune and regrow, topology": moves(GRADUAL, growth="topology", **gradual),
        },
        minutes=40,
        longer={"dense, 1.6 times the steps": 64},
        timed=False,
        settings=gpt.GPTSettings(
            steps=3050,
            eval_every=1016,
            save_every=508,
            batch=32,
            evaluated=300_000,
            device="cuda",
            cuda_graph=True,
        ),
        seq=dense.context,
    )


EXPERIMENTS: dict[str, Experiment] = {"gpt-small": _small("wikipedia"), "gpt-methods": _methods("wikipedia")}
