"""Byte-level recurrent language models: the task for the trainer, and models from its checkpoints."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checkpoint import part
from blocksparse.conversion import load_sparsified
from blocksparse.distributed import group
from blocksparse.errors import BlockSparseError

from ..data.text import Text
from ..models.char_lm import CharLM, CharLMConfig, least_parameters, multiply_adds, parameter_count
from ..option import option
from . import stored
from .callback import Task, part_of_batch
from .memory import check_room
from .settings import Settings
from .trainer import Trainer, device_of

KIND = "charlm"

# The least length of a stream in an evaluation, if the text has as many bytes: the first bytes of each stream are
# predicted from little context.
EVALUATION_STREAM = 8192


@dataclass(frozen=True)
class CharLMSettings(Settings):
    """A language model of bytes is trained by Adam, with a rate that rises, then falls to 0 in a line."""

    learning_rate: float = option(0.002, "The highest learning rate.", "lr")
    seed: int = option(0, "Of pattern, weights and whatever is drawn.")


@dataclass(frozen=True)
class Batches:
    """What a step and an evaluation read."""

    batch: int = option(64, "Streams of text side by side.")
    seq: int = option(128, "Bytes of a stream per step.")
    evaluated: int = option(0, "Held-out bytes per evaluation; 0 for all.", "eval-bytes")


class CharLMTask(Task):
    """Truncated backpropagation over streams of a text.

    `batch` streams begin evenly spaced in the training text and read it in chunks of `seq` bytes. The state after a
    chunk, without its gradient, is the one before the next; where a stream comes to the end of the text it begins at
    the text's beginning, with state zero.

    Args:
        model: a `CharLM`; or any module with its `forward(text, state)` and `initial_state(batch)`.
        text: what to train and to evaluate on.
        batch, seq: streams, and bytes of a chunk.
        evaluated: held-out bytes that an evaluation reads, from the first; 0 for all.
    """

    kind = KIND
    unit = "bits per character"
    per_nat = 1 / math.log(2)

    def __init__(
        self,
        model: nn.Module,
        text: Text,
        batch: int = 64,
        seq: int = 128,
        evaluated: int = 0,
        device: torch.device | str = "cpu",
    ):
        for name, value in (("batch", batch), ("seq", seq)):
            if value < 1:
                raise BlockSparseError.expected(name, "a positive int", value)
        if evaluated < 0 or evaluated == 1:
            raise BlockSparseError.expected("evaluated", "0 for all held-out bytes, or 2 or more", evaluated)
        # Each chunk has the byte after it too, which is to be predicted.
        self._chunks = (len(text.train) - 1) // seq
        if self._chunks < batch:
            raise BlockSparseError.expected(
                text.name,
                f"{batch * seq + 1:,} bytes or more to train on, for {batch} streams with {seq} bytes a step",
                f"{len(text.train):,}; a smaller batch or sequence needs less",
            )
        if len(text.held_out) < 2:
            raise BlockSparseError.expected(text.name, "2 held-out bytes or more", len(text.held_out))
        device = torch.device(device)
        self.model = model.to(device)
        self.batch, self.seq, self.bytes_per_step = batch, seq, batch * seq
        self._digest = _digest(text)
        config = getattr(model, "config", None)
        self._about = (
            asdict(config) if is_dataclass(config) and not isinstance(config, type) else repr(model)
        )  # before FSDP2 renames it
        self._train = text.train.to(device)
        self._held_out = text.held_out[: evaluated or None].to(device)
        self._first = torch.arange(batch, device=device) * self._chunks // batch
        self._mine = slice(0, batch)  # of the streams
        self._offsets = torch.arange(seq + 1, device=device).unsqueeze(1)
        # Tensors that stay: a CUDA graph writes the next state into them.
        self._state = self._zeros(batch)

    def split(self, rank: int, processes: int) -> None:
        mine, self.share = part_of_batch(self.batch, rank, processes)
        self._first, self._mine = self._first[mine], mine
        self._state = self._zeros(len(self._first))

    def _zeros(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(self.model.initial_state(batch))  # type: ignore[operator]

    def inputs(self, step: int) -> tuple[Tensor, Tensor]:
        """The chunk of each stream with the byte after it, `[seq + 1, batch]`, and whether the stream begins there."""
        at = (self._first + step) % self._chunks
        begins = torch.ones_like(at, dtype=torch.bool) if step == 0 else at == 0
        return self._train[at * self.seq + self._offsets], begins

    def loss_of(self, *inputs: Tensor) -> Tensor:
        """The cross entropy of `inputs` in nats; the state goes on."""
        chunk, begins = inputs
        before = tuple(part.masked_fill(begins.view(-1, 1), 0) for part in self._state)
        logits, after = self.model(chunk[:-1], before)
        with torch.no_grad():
            for own, new in zip(self._state, after, strict=True):
                own.copy_(new)
        return F.cross_entropy(logits.flatten(0, 1).float(), chunk[1:].flatten().long())

    def evaluate(self, model: nn.Module) -> float:
        """Bits per character of the held-out text, in streams of `EVALUATION_STREAM` bytes or more, from state zero."""
        predicted = len(self._held_out) - 1
        streams = min(max(1, predicted // EVALUATION_STREAM), 64)
        length = -(-predicted // streams)
        # The last stream may be shorter: beyond its end nothing is counted.
        data = F.pad(self._held_out.long(), (0, streams * length - predicted), value=-1)
        inputs, targets = data[:-1].view(streams, length).T, data[1:].view(streams, length).T
        state, total = self._zeros(streams), torch.zeros((), dtype=torch.float64, device=data.device)
        for text, target in zip(inputs.split(256), targets.split(256), strict=True):
            logits, state = model(text.clamp(min=0), state)
            scores, right = logits.flatten(0, 1).float(), target.flatten()
            total += F.cross_entropy(scores, right, ignore_index=-1, reduction="sum")
        return float(total) / predicted * self.per_nat

    def state_dict(self) -> dict[str, Tensor]:
        if self.share == 1:
            return {f"state.{nth}": own for nth, own in enumerate(self._state)}
        parts = group.all_gather([own.cpu() for own in self._state])  # of all streams
        return {f"state.{nth}": torch.cat(own, -2) for nth, own in enumerate(zip(*parts, strict=True))}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for nth, own in enumerate(self._state):
            whole = state[f"state.{nth}"].reshape(*own.shape[:-2], self.batch, own.shape[-1])
            own.copy_(whole[..., self._mine, :])

    def about(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "model": self._about,
            "text": self._digest,
            "batch": self.batch,
            "seq": self.seq,
            "evaluated": len(self._held_out),
        }


def network(config: CharLMConfig) -> CharLM:
    """The language model, newly drawn."""
    check_room(f"width {config.width:,}, layers {config.layers:,}", least_parameters(config))
    return CharLM(config)


def facts(config: CharLMConfig, text: str) -> dict[str, Any]:
    """Facts on a model and its text, for the run's folder."""
    return {
        "text": text,
        "parameters": parameter_count(config),
        "multiply_adds_per_byte": multiply_adds(config),
        "density": 1.0 if config.layout is None else config.layout.density,
    }


def trainer(
    config: CharLMConfig, text: Text, run: str | Path, how: Settings, batches: Batches | None = None
) -> Trainer:
    """A language model, ready to be trained in a folder."""
    of = batches or Batches()
    task = CharLMTask(network(config), text, of.batch, of.seq, of.evaluated, device_of(how.device))
    return Trainer(task, run, how, facts(config, text.name))


def load(path: str | Path) -> CharLM:
    """The language model of a checkpoint, or of a run's folder, on the CPU; of mean parameters if there are any."""
    path, tensors, task = stored.read(path, KIND, "a byte-level language model")
    given = stored.config_of(path, task, {field.name for field in fields(CharLMConfig)}, "a CharLM")
    usual = asdict(CharLMConfig()) | given
    sizes = ("width", "embedding", "layers", *(("depth",) if usual["cell"] == "smallworld" else ()))
    checkpoint.check_sizes(path, tensors, {name: usual[name] for name in sizes})
    config = CharLMConfig(**given)
    # The tensors bring the layouts, those of weights that were made block-sparse after the training too.
    with torch.device("meta"):
        model = CharLM(replace(config, pattern="dense", layouts="shared", seed=0))
    model.config = config
    with stored.parameters_of(path, config):
        load_sparsified(model, part(tensors, "model.") | part(tensors, "ema."))
    return model.eval()


def _digest(text: Text) -> dict[str, Any]:
    """Identifies the text and where it is split."""
    sha = hashlib.sha256()
    for data in (text.train, text.held_out):
        sha.update(data.numpy().data)
    return {"sha256": sha.hexdigest()[:16], "train": len(text.train), "held_out": len(text.held_out)}
