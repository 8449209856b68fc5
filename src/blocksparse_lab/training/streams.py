"""Streams of a text, on which language models of bytes are trained."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.errors import BlockSparseError

from ..data.labels import digest
from ..data.text import Text
from ..option import option
from .callback import Task, part_of_batch
from .settings import Settings


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Settings of training a language model of bytes by Adam."""

    learning_rate: float = option(0.002, "The highest learning rate.", "lr")
    batch: int = option(64, "Streams of text per step.")
    evaluated: int = option(0, "Held-out bytes per evaluation; 0: all.", "eval-bytes")


class Streams(Task):
    """Prediction of the next byte along a text.

    `batch` streams start evenly spaced in the training text and read it in chunks of `seq` bytes. At the end of the
    text a stream continues at the beginning.

    Args:
        model: scores the next byte after each byte.
        text: to train and to evaluate on.
        batch, seq: number of streams, and bytes of a chunk.
        evaluated: held-out bytes that an evaluation reads, from the first; 0 for all.
    """

    kind: ClassVar[str]
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
        # Each chunk has one more byte, which is only predicted.
        self.chunks = (len(text.train) - 1) // seq
        if self.chunks < batch:
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
        config = getattr(model, "config", None)
        described = asdict(config) if is_dataclass(config) and not isinstance(config, type) else repr(model)
        self._about = described, _digest(text)  # now, because FSDP2 renames the model
        self._train = text.train.to(device)
        self.held_out = text.held_out[: evaluated or None].to(device)
        self.mine = slice(0, batch)  # this process's streams
        self._first = torch.arange(batch, device=device) * self.chunks // batch
        self._offsets = torch.arange(seq + 1, device=device).unsqueeze(1)

    def split(self, rank: int, processes: int) -> None:
        self.mine, self.share = part_of_batch(self.batch, rank, processes)
        self._first = self._first[self.mine]

    def chunk(self, step: int) -> tuple[Tensor, Tensor]:
        """Return each stream's chunk with the byte after it, `[seq + 1, batch]`, and the indices of these chunks."""
        at = (self._first + step) % self.chunks
        return self._train[at * self.seq + self._offsets], at

    @staticmethod
    def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the cross entropy in nats for target bytes `[steps, batch]`; targets of -1 are ignored."""
        scores = logits.flatten(0, 1).float()
        return F.cross_entropy(scores, targets.flatten().long(), ignore_index=-1, reduction=reduction)

    def about(self) -> dict[str, Any]:
        model, text = self._about
        return {
            "kind": self.kind,
            "model": model,
            "text": text,
            "batch": self.batch,
            "seq": self.seq,
            "evaluated": len(self.held_out),
        }


def _digest(text: Text) -> dict[str, Any]:
    """Identify the text and where it is split."""
    return {"sha256": digest(text.train, text.held_out), "train": len(text.train), "held_out": len(text.held_out)}
