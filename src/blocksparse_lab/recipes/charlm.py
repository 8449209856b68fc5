"""Byte-level recurrent language models: settings, task, trainer, and models from checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.distributed import group

from ..data.text import Text
from ..models.char_lm import CharLM, CharLMConfig, least_parameters, multiply_adds, parameter_count
from ..option import option
from ..training import saved_models
from ..training.memory import check_room
from ..training.streams import LanguageSettings, Streams
from ..training.trainer import Trainer, device_of

KIND = "charlm"

# Least length of a stream in an evaluation, for texts that are long enough: the first bytes of a stream are predicted
# from little context.
EVALUATION_STREAM = 8192


@dataclass(frozen=True)
class CharLMSettings(LanguageSettings):
    """A recurrent language model and its training."""

    seq: int = option(128, "Bytes of each stream per step.")
    model: CharLMConfig = field(default_factory=CharLMConfig)


class CharLMTask(Streams):
    """Truncated backpropagation over streams of a text.

    A chunk starts from the state after the previous chunk, detached. At the start of a stream, and at the beginning of
    the text, the state is zero.

    Args:
        model: a `CharLM`, or any module with `forward(text, state)` and `initial_state(batch)`.
        text, batch, seq, evaluated, device: as for `Streams`.
    """

    kind = KIND

    def __init__(self, model: nn.Module, text: Text, *sizes: Any, **options: Any):
        super().__init__(model, text, *sizes, **options)
        # These tensors are reused: a CUDA graph writes the next state into them.
        self._state = self._zeros(self.batch)

    def split(self, rank: int, processes: int) -> None:
        super().split(rank, processes)
        self._state = self._zeros(self.mine.stop - self.mine.start)

    def _zeros(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(self.model.initial_state(batch))  # type: ignore[operator]

    def inputs(self, step: int) -> tuple[Tensor, Tensor]:
        """Return each stream's chunk with the byte after it, `[seq + 1, batch]`, and whether the stream starts
        there."""
        chunk, at = self.chunk(step)
        return chunk, torch.ones_like(at, dtype=torch.bool) if step == 0 else at == 0

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """Return the cross entropy of `inputs` in nats and advance the state."""
        chunk, begins = inputs
        before = tuple(part.masked_fill(begins.view(-1, 1), 0) for part in self._state)
        logits, after = self.model(chunk[:-1], before)
        with torch.no_grad():
            for own, new in zip(self._state, after, strict=True):
                own.copy_(new)
        return self.cross_entropy(logits, chunk[1:])

    def evaluate(self, model: nn.Module) -> float:
        """Return bits per character of the held-out text, read in streams of `EVALUATION_STREAM` or more bytes."""
        nats, counts = self.stream_nats(model)
        return float(nats.sum() / counts.sum()) * self.per_nat

    @torch.no_grad()
    def stream_nats(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return, for each stream, its nats and the number of predicted bytes, both float64 `[streams]`."""
        predicted = len(self.held_out) - 1
        streams = min(max(1, predicted // EVALUATION_STREAM), 64)
        length = -(-predicted // streams)
        # The last stream may be shorter; targets beyond its end are ignored.
        data = F.pad(self.held_out.long(), (0, streams * length - predicted), value=-1)
        inputs, targets = data[:-1].view(streams, length).T, data[1:].view(streams, length).T
        state, total = self._zeros(streams), torch.zeros(streams, dtype=torch.float64, device=data.device)
        for text, target in zip(inputs.split(256), targets.split(256), strict=True):
            logits, state = model(text.clamp(min=0), state)
            total += self.cross_entropy(logits, target, "none").view(target.shape).sum(0)
        return total, (targets >= 0).sum(0).double()

    def state_dict(self) -> dict[str, Tensor]:
        if self.share == 1:
            return {f"state.{nth}": own for nth, own in enumerate(self._state)}
        parts = group.all_gather([own.cpu() for own in self._state])  # all streams
        return {f"state.{nth}": torch.cat(own, -2) for nth, own in enumerate(zip(*parts, strict=True))}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for nth, own in enumerate(self._state):
            whole = state[f"state.{nth}"].reshape(*own.shape[:-2], self.batch, own.shape[-1])
            own.copy_(whole[..., self.mine, :])


def network(config: CharLMConfig) -> CharLM:
    """Draw the language model."""
    check_room(f"width {config.width:,}, layers {config.layers:,}", least_parameters(config))
    return CharLM(config)


def facts(config: CharLMConfig, text: str) -> dict[str, Any]:
    """Describe a model and its text for the run's folder."""
    layout = config.layout
    return {
        "text": text,
        "parameters": parameter_count(config),
        "multiply_adds_per_byte": multiply_adds(config),
        "density": 1.0 if layout is None else layout.density,
    }


def task(model: nn.Module, text: Text, settings: CharLMSettings) -> CharLMTask:
    """Return the task of training a model on a text."""
    s = settings
    return CharLMTask(model, text, s.batch, s.seq, s.evaluated, device_of(s.device))


def trainer(settings: CharLMSettings, text: Text, run: str | Path) -> Trainer:
    """Return a trainer of a new language model in a run folder."""
    made = task(network(settings.model), text, settings)
    return Trainer(made, run, settings, facts(settings.model, text.name))


def load(path: str | Path) -> CharLM:
    """Load the language model of a checkpoint or run folder on the CPU, with mean parameters if there are any."""

    def sizes(config: dict[str, Any]) -> tuple[str, ...]:
        return ("width", "embedding", "layers", *(("depth",) if config["cell"] == "smallworld" else ()))

    # The tensors bring the layouts, also of weights that became block-sparse after training.
    empty = {"pattern": "dense", "layouts": "shared", "init": "uniform"}
    return saved_models.load_model(
        path, KIND, "a recurrent language model of bytes", CharLMConfig, CharLM, sizes, empty
    )
