"""Settings of a training run. A recipe extends them by its own fields: one frozen dataclass is a run's identity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError

from ..option import option

DECAYS = ("linear", "cosine", "none")
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adam", "sgd", "adagrad")

# Settings that may change when a run resumes. None affects what is learned, but on another device bits differ.
FREE = ("log_every", "eval_every", "save_every", "save_minutes", "device", "cuda_graph", "shard")


@dataclass(frozen=True)
class Settings:
    """Settings that all training runs share."""

    steps: int = option(10_000, "Training steps.")
    learning_rate: float = option(1e-3, "The highest learning rate.", "lr")
    warmup: int = option(100, "Steps over which the learning rate rises.")
    decay: str = option("linear", "Decay of the learning rate after the warmup: linear or cosine, to 0, or none.")
    decay_per_step: float = 1.0  # factor per step, besides `decay`
    betas: tuple[float, float] = (0.9, 0.999)  # Adam
    eps: float = 1e-8  # Adam
    # "adam" decays only parameters with two or more dimensions. "sgd" decays all and does not multiply by the learning
    # rate. "adagrad" adds the decay of all parameters to the gradient.
    weight_decay: float = option(0.0, "Decoupled weight decay.")
    clip: float = option(1.0, "Clip the gradient at this norm; 0: never.")
    ema: float = option(0.0, "Evaluate a running mean of the weights with this decay; 0: the weights.")
    dtype: str = option("float32", "float32, or bfloat16 by autocast.")
    log_every: int = option(20, "Steps between log lines; fewer in short runs.")
    eval_every: int = option(500, "Steps between evaluations; fewer in short runs; 0: only at the end.")
    save_every: int = option(500, "Steps between checkpoints; at least one every 5 minutes.")
    save_minutes: float = 5.0  # largest age of a checkpoint; 0: no limit
    seed: int = option(0, "Random seed.")
    device: str = option("cpu", "cpu or cuda.")
    cuda_graph: bool = option(False, "On cuda, with adam: run each step as one CUDA graph.")
    shard: bool = False  # each of several processes stores a shard of every parameter (FSDP2)
    optimizer: str = "adam"  # AdamW, "sgd" (`bs.sparsity.SGD`) or "adagrad"
    momentum: float = 0.9  # SGD

    def __post_init__(self) -> None:
        for name, known in (("decay", DECAYS), ("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise BlockSparseError.expected(name, f"one of {', '.join(known)}", repr(getattr(self, name)))
        for name, least in (("steps", 1), ("warmup", 0), ("log_every", 0), ("eval_every", 0), ("save_every", 0)):
            integer(name, getattr(self, name), least)
        for name in ("learning_rate", "weight_decay", "clip", "save_minutes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BlockSparseError.expected(name, "a number, not negative", getattr(self, name))
        for name in ("ema", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise BlockSparseError.expected(name, "a number from 0 to below 1", getattr(self, name))
        if not 0 < self.decay_per_step <= 1:
            raise BlockSparseError.expected("decay_per_step", "a number above 0, to 1", self.decay_per_step)
        integer("seed", self.seed, 0, below=2**32)


@dataclass(frozen=True)
class EpochSettings(Settings):
    """Settings of a run over epochs of rows; the recipe derives the steps from the number of rows (`in_epochs`)."""

    epochs: int = 1
    batch: int = 128  # rows per step
    steps: int = 1
    warmup: int = 0
    decay: str = "linear"
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.0
    dtype: str = "float32"
    log_every: int = 20
    eval_every: int = 500
    save_every: int = 500
    cuda_graph: bool = False

    def in_epochs(self, steps_per_epoch: int, **changes: Any) -> Self:
        """Return settings of `epochs` times `steps_per_epoch` steps that evaluate and save after each epoch."""
        pace = {"steps": self.epochs * steps_per_epoch, "log_every": min(steps_per_epoch, 100)}
        pace |= {"eval_every": steps_per_epoch, "save_every": steps_per_epoch}
        return replace(self, **pace | changes)
