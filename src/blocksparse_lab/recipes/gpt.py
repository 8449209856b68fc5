"""Byte-level transformers: the task for the trainer, and models from its checkpoints."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checkpoint import part
from blocksparse.conversion import load_sparsified
from blocksparse.sparsity import RigL

from ..data.text import Text
from ..models.gpt import GPT, GPTConfig, least_parameters, multiply_adds, parameter_count
from . import stored
from .charlm import Batches, CharLMTask
from .memory import check_room
from .running_means import follow
from .settings import Settings
from .trainer import Trainer, device_of

KIND = "gpt"
EVERY, FRACTION = 100, 0.3  # of RigL: steps from one change to the next, and the part of the blocks that goes at first
AT_ONCE = 64  # windows of an evaluation


class GPTTask(CharLMTask):
    """Next bytes of windows of a text: the streams of `CharLMTask`, of which each chunk is seen by itself.

    Args:
        model: a `GPT`, or one that was made sparse; its context is the length of a chunk.
        steps: of the run; the blocks of "rigl" move in the first three quarters.
        text, batch, evaluated, device: as of `CharLMTask`.
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
        self._methods: list[RigL] = []

    def _zeros(self, batch: int) -> tuple[Tensor, ...]:
        return ()

    def attach(self, optimizer: torch.optim.Optimizer, ema: dict[str, Tensor]) -> None:
        if self.model.config.method == "rigl":
            change = follow(self.model, ema)
            self._methods = [
                RigL(self.model, optimizer, self._end, every=EVERY, alpha=FRACTION, on_layout_change=change)
            ]

    def after_update(self) -> None:
        for method in self._methods:
            method.step()

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """The cross entropy of `inputs` in nats."""
        chunk, _ = inputs
        logits, _ = self.model(chunk[:-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), chunk[1:].flatten().long())

    def evaluate(self, model: nn.Module) -> float:
        """Bits per character of the held-out text, of each byte from half a context before it or more, if there is."""
        context = self.seq
        step = max(1, context // 2)
        predicted = len(self._held_out) - 1
        windows = max(0, -(-(predicted - context) // step)) + 1
        length = context + (windows - 1) * step
        data = F.pad(self._held_out.long(), (0, length - predicted), value=-1)
        inputs, targets = data[:-1].unfold(0, context, step), data[1:].unfold(0, context, step).clone()
        targets[1:, : context - step] = -1  # which the window before has predicted
        total = torch.zeros((), dtype=torch.float64, device=data.device)
        for text, target in zip(inputs.split(AT_ONCE), targets.split(AT_ONCE), strict=True):
            logits, _ = model(text.T.clamp(min=0))
            scores, right = logits.flatten(0, 1).float(), target.T.flatten()
            total += F.cross_entropy(scores, right, ignore_index=-1, reduction="sum")
        return float(total) / predicted * self.per_nat

    def state_dict(self) -> dict[str, Tensor]:
        return {key: tensor for method in self._methods for key, tensor in method.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for method in self._methods:
            method.load_state_dict(state)


def network(config: GPTConfig) -> GPT:
    """The transformer, newly drawn."""
    check_room(f"width {config.width:,}, layers {config.layers:,}", least_parameters(config))
    return GPT(config)


def facts(config: GPTConfig, text: str) -> dict[str, Any]:
    """Facts on a model and its text, for the run's folder."""
    return {
        "text": text,
        "parameters": parameter_count(config),
        "multiply_adds_per_byte": multiply_adds(config),
        "density": config.density,
    }


def trainer(config: GPTConfig, text: Text, run: str | Path, how: Settings, batches: Batches | None = None) -> Trainer:
    """A transformer, ready to be trained in a folder; its context is that of the configuration."""
    of = batches or Batches()
    task = GPTTask(network(config), text, how.steps, of.batch, of.evaluated, device_of(how.device))
    return Trainer(task, run, how, facts(config, text.name))


def load(path: str | Path) -> GPT:
    """The transformer of a checkpoint, or of a run's folder, on the CPU; of mean parameters if there are any."""
    path, tensors, task = stored.read(path, KIND, "a byte-level transformer")
    given = stored.config_of(path, task, {field.name for field in fields(GPTConfig)}, "a GPT")
    sizes = ("width", "layers", "heads", "context")
    checkpoint.check_sizes(path, tensors, {name: given.get(name, getattr(GPTConfig(), name)) for name in sizes})
    config = GPTConfig(**given)
    # The tensors bring the layouts.
    with torch.device("meta"):
        model = GPT(GPTConfig(**given | {"density": 1.0, "method": "fixed"}))
    model.config = config
    with stored.parameters_of(path, config):
        load_sparsified(model, part(tensors, "model.") | part(tensors, "ema."))
    return model.eval()
