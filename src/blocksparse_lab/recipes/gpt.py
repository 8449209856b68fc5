"""Byte-level transformers: settings, task, trainer, and models from checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.sparsity import RigL

from ..data.text import Text
from ..models.gpt import GPT, GPTConfig, density, least_parameters, multiply_adds, parameter_count
from ..training import saved_models
from ..training.memory import check_room
from ..training.running_means import sync_means
from ..training.streams import LanguageSettings, Streams
from ..training.trainer import Trainer, device_of

KIND = "gpt"
EVERY, FRACTION = 100, 0.3  # RigL: steps between changes, and initial fraction of moved blocks
AT_ONCE = 4096  # bytes of an evaluation's batch, unless a step has more


@dataclass(frozen=True)
class GPTSettings(LanguageSettings):
    """A transformer and its training; a step reads one context of each stream."""

    model: GPTConfig = field(default_factory=GPTConfig)


class GPTTask(Streams):
    """Independent chunks of the streams of a text.

    Args:
        model: a `GPT`, possibly made sparse; its context is the length of a chunk.
        steps: of the run; blocks of "rigl" move in its first three quarters.
        text, batch, evaluated, device: as for `Streams`.
    """

    kind = KIND
    model: GPT

    def __init__(
        self,
        model: GPT,
        text: Text,
        steps: int,
        batch: int = 64,
        evaluated: int = 0,
        device: torch.device | str = "cpu",
    ):
        super().__init__(model, text, batch, model.config.context, evaluated, device)
        self._end = max(1, 3 * steps // 4)
        self._method: RigL | None = None

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        if self.model.config.method == "rigl":
            every = max(1, min(EVERY, self._end // 10))  # so that short runs have changes too
            change = sync_means(self.model, ema)
            self._method = RigL(self.model, optimizer, self._end, every=every, alpha=FRACTION, on_layout_change=change)

    def after_update(self) -> None:
        if self._method is not None:
            self._method.step()

    def inputs(self, step: int) -> tuple[Tensor, ...] | None:
        """Return the chunk of a step; None while blocks move, which a CUDA graph would not see."""
        return (self.chunk(step)[0],) if self.model.config.method == "fixed" else None

    def loss(self, step: int) -> Tensor:
        return self.loss_of(self.chunk(step)[0])

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return the cross entropy of a chunk in nats."""
        (chunk,) = inputs
        return self.cross_entropy(self.model(chunk[:-1])[0], chunk[1:])

    def evaluate(self, model: nn.Module) -> float:
        """Return bits per character of the held-out text; each byte sees at least half a context, if there is one."""
        context = self.seq
        step = max(1, context // 2)
        predicted = len(self.held_out) - 1
        windows = max(0, -(-(predicted - context) // step)) + 1
        length = context + (windows - 1) * step
        data = F.pad(self.held_out.long(), (0, length - predicted), value=-1)
        inputs, targets = data[:-1].unfold(0, context, step), data[1:].unfold(0, context, step).clone()
        targets[1:, : context - step] = -1  # predicted by the previous window
        total = torch.zeros((), dtype=torch.float64, device=data.device)
        at_once = max(self.batch, AT_ONCE // context)
        for text, target in zip(inputs.split(at_once), targets.split(at_once), strict=True):
            logits, _ = model(text.T.clamp(min=0))
            total += self.cross_entropy(logits, target.T, "sum")
        return float(total) / predicted * self.per_nat

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._method is None else self._method.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self._method is not None:
            self._method.load_state_dict(state)


def network(config: GPTConfig) -> GPT:
    """Draw the transformer."""
    check_room(f"width {config.width:,}, layers {config.layers:,}", least_parameters(config))
    return GPT(config)


def facts(config: GPTConfig, text: str) -> dict[str, Any]:
    """Describe a model and its text for the run's folder."""
    return {
        "text": text,
        "parameters": parameter_count(config),
        "multiply_adds_per_byte": multiply_adds(config),
        "density": density(config),
    }


def trainer(settings: GPTSettings, text: Text, run: str | Path) -> Trainer:
    """Return a trainer of a new transformer in a run folder."""
    s = settings
    task = GPTTask(network(s.model), text, s.steps, s.batch, s.evaluated, device_of(s.device))
    return Trainer(task, run, settings, facts(s.model, text.name))


def load(path: str | Path) -> GPT:
    """Load the transformer of a checkpoint or run folder on the CPU, with mean parameters if there are any."""
    empty = {"density": 1.0, "method": "fixed"}
    sizes = ("width", "layers", "heads", "context")
    return saved_models.load_model(path, KIND, "a transformer of bytes", GPTConfig, GPT, lambda _: sizes, empty)
