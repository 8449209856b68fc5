"""Train next-byte models side by side, on the same batches in the same order."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.errors import BlockSparseError
from blocksparse.measure import Spread

from ..data.text import Text, windows
from ..models.bytes import ByteLayouts, ByteMLP, dense_width, multiply_adds, parameters, small_world_layouts
from ..training.trainer import Callback, Settings, Task, Trainer

# Half and twice these rates are worse. A smaller fan-in needs a higher rate, as theory predicts.
LEARNING_RATES = {"dense": 0.002, "block-sparse": 0.008}


@dataclass(frozen=True)
class RaceSettings(Settings):
    """Settings of a race: models see `context` bytes, `batch` windows per step and `probe` per evaluation, for at most
    `seconds`."""

    steps: int = 1600
    warmup: int = 50
    decay: str = "cosine"
    clip: float = 0.0
    log_every: int = 0
    eval_every: int = 50
    save_every: int = 0
    save_minutes: float = 0.0
    context: int = 32
    batch: int = 256
    probe: int = 4096
    seconds: float = math.inf


class NextByteTask(Task):
    """Cross entropy of the byte after random windows of a text, determined by seed and step."""

    unit = "bits per byte"
    per_nat = 1 / math.log(2)

    def __init__(self, model: ByteMLP, text: Text, settings: RaceSettings):
        self.model, self.text, self.settings = model, text, settings
        self.bytes_per_step = settings.batch * settings.context

    def loss(self, step: int) -> Tensor:
        s = self.settings
        rng = np.random.default_rng([s.seed, step])
        positions = torch.from_numpy(rng.integers(s.context, len(self.text.train), s.batch))
        window, target = windows(self.text.train, positions, s.context)
        return F.cross_entropy(self.model(window), target)

    def evaluate(self, model: nn.Module) -> float:
        return bits_per_byte(model, self.text.held_out, self.settings.context, self.settings.probe)

    def about(self) -> dict[str, Any]:
        return {"kind": "next byte", "text": self.text.name, "parameters": parameters(self.model)}


@dataclass
class Curve(Callback):
    """Record of one model: bits per byte of each batch, seconds of each step, and held-out evaluations."""

    bits: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    evaluated_at: list[int] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)

    def before_step(self, step: int) -> None:
        self._began = time.perf_counter()

    def after_update(self) -> None:
        self.seconds.append(time.perf_counter() - self._began)

    def logged(self, record: Mapping[str, Any]) -> None:
        if "held_out" in record:
            self.evaluated_at.append(record["step"])
            self.held_out.append(record["held_out"])


class Race:
    """Models that train side by side, one step each in turn, so that load affects all equally.

    Args:
        models: by name.
        learning_rates: highest rate of each model, by name.
        text: to train and to evaluate on.
        settings: shared by all.

    The curves are up to date after each step of `run`, which a caller may leave at any time.
    """

    def __init__(
        self, models: Mapping[str, ByteMLP], learning_rates: Mapping[str, float], text: Text, settings: RaceSettings
    ):
        if models.keys() != learning_rates.keys():
            raise BlockSparseError.expected("learning_rates", f"one of each of {list(models)}", dict(learning_rates))
        if min(len(text.train), len(text.held_out)) <= settings.context:
            raise BlockSparseError.expected(
                text.name,
                f"more than a context of {settings.context} bytes in each part",
                f"{len(text.train)} to train on, {len(text.held_out)} held out",
            )
        self.models, self.learning_rates = dict(models), dict(learning_rates)
        self.text, self.settings = text, settings
        self.curves = {name: Curve() for name in models}

    @property
    def steps(self) -> int:
        """Steps that every model has done."""
        return min(len(curve.bits) for curve in self.curves.values())

    def run(self) -> Iterator[int]:
        """Train; yield the number of steps done after each."""
        s, started = self.settings, time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            trainers, steps = {}, {}
            for name, model in self.models.items():
                how = replace(s, learning_rate=self.learning_rates[name])
                trainers[name] = Trainer(NextByteTask(model, self.text, s), Path(folder, name), how)
                steps[name] = stack.enter_context(closing(trainers[name].steps(self.curves[name])))
            for step in range(1, s.steps + 1):
                for name, trainer in trainers.items():
                    next(steps[name])
                    self.curves[name].bits.append(trainer.loss * NextByteTask.per_nat)
                yield step
                if time.perf_counter() - started > s.seconds:
                    return


@dataclass(frozen=True)
class Outcome:
    """Result of a model: sizes, bits per byte on both parts of the text, and seconds per step."""

    name: str
    width: int
    parameters: int
    multiply_adds: int
    learning_rate: float
    train: float
    held_out: float
    step: Spread
    curve: Curve


def outcomes(race: Race, at_most: int | None = None) -> list[Outcome]:
    """Evaluate the models of a race after at least one step.

    `at_most` limits the held-out positions; the training text is evaluated at 20,000 positions at most.
    """
    context = race.settings.context
    results = []
    for name, model in race.models.items():
        train = bits_per_byte(model, race.text.train, context, min(at_most or 20_000, 20_000))
        held_out = bits_per_byte(model, race.text.held_out, context, at_most)
        curve = race.curves[name]
        # The first steps build plans and fill caches.
        step = Spread.of(curve.seconds[min(5, len(curve.seconds) - 1) :])
        rate = race.learning_rates[name]
        sizes = model.width, parameters(model), multiply_adds(model)
        results.append(Outcome(name, *sizes, rate, train, held_out, step, curve))
    return results


def contenders(
    context: int = 32, *, width: int = 720, depth: int = 6, embedding: int = 16, seed: int = 0, **graph: Any
) -> tuple[dict[str, ByteMLP], ByteLayouts]:
    """Build a wide block-sparse model with small-world layouts and a dense one with the same number of parameters.

    By default a block row stores 5 of 45 blocks, and the dense model has a third of the width.

    >>> from blocksparse_lab.models.bytes import parameters
    >>> from blocksparse_lab.recipes.next_byte import contenders
    >>> models, layouts = contenders()
    >>> [(name, model.width, parameters(model)) for name, model in models.items()]
    [('dense', 240, 879616), ('block-sparse', 720, 879616)]
    """
    layouts = small_world_layouts(context, width, depth, embedding=embedding, seed=seed, **graph)
    narrow = dense_width(layouts, context, embedding=embedding)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dense = ByteMLP(context, narrow, depth, embedding=embedding)
        torch.manual_seed(seed)
        sparse = ByteMLP(context, width, depth, embedding=embedding, layouts=layouts)
    return {"dense": dense, "block-sparse": sparse}, layouts


def bits_per_byte(model: nn.Module, data: Tensor, context: int, at_most: int | None = None) -> float:
    """Return the mean of -log2 p(next byte) over all positions of `data`, or over `at_most` evenly spaced ones."""
    positions = torch.arange(context, len(data))
    if at_most is not None and len(positions) > at_most:
        positions = positions[torch.linspace(0, len(positions) - 1, at_most).long()]
    total = 0.0
    with torch.no_grad():
        for chunk in positions.split(1024):
            window, target = windows(data, chunk, context)
            total += F.cross_entropy(model(window), target, reduction="sum").item()
    return total / len(positions) / math.log(2)
