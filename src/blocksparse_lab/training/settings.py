"""The settings that all training runs share."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from blocksparse.errors import BlockSparseError

from ..option import option

DECAYS = ("linear", "cosine", "none")
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adam", "sgd", "adagrad")

# Settings that may change when a run resumes: none affects what is learned. But on another device bits differ.
FREE = ("log_every", "eval_every", "save_every", "save_minutes", "device", "cuda_graph", "shard")


@dataclass(frozen=True)
class Settings:
    """How to train."""

    steps: int = option(10_000, "Of the whole run.")
    learning_rate: float = option(1e-3, "The highest learning rate.", "lr")
    warmup: int = option(100, "Steps over which it rises.")
    decay: str = option("linear", "How it falls after that: linear or cosine, to 0, or none.")
    decay_per_step: float = 1.0  # by which it is multiplied besides
    betas: tuple[float, float] = (0.9, 0.999)  # of Adam, as eps
    eps: float = 1e-8
    # Of "adam" only for parameters with two dimensions or more; of "sgd" for all, not multiplied by the learning rate;
    # of "adagrad" for all, as a part of the gradient.
    weight_decay: float = option(0.0, "Of the weights, decoupled.")
    clip: float = option(1.0, "The gradient's largest norm; 0 for any.")
    ema: float = option(0.0, "Evaluate a running mean of the weights of this decay; 0: none.")
    dtype: str = option("float32", "float32, or bfloat16 by autocast.")
    log_every: int = option(20, "Steps between lines of the log; fewer in short runs.")
    eval_every: int = option(500, "Steps between evaluations; fewer in short runs; 0: at the end.")
    save_every: int = option(500, "Steps between checkpoints, at least one in 5 minutes.")
    save_minutes: float = 5.0  # a checkpoint is this old at most; 0 for any age
    seed: int = option(0, "Of weights, order and whatever is drawn.")
    device: str = option("cpu", "cpu or cuda.")
    cuda_graph: bool = option(False, "On cuda, with adam: a step as one graph.")
    shard: bool = False  # several processes store a piece of each parameter, by FSDP2, instead of all of them
    optimizer: str = "adam"  # AdamW, "sgd" (`bs.sparsity.SGD`) or "adagrad"
    momentum: float = 0.9  # of "sgd"

    def __post_init__(self) -> None:
        for name, known in (("decay", DECAYS), ("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise BlockSparseError.expected(name, f"one of {', '.join(known)}", repr(getattr(self, name)))
        for name, least in (("steps", 1), ("warmup", 0), ("log_every", 0), ("eval_every", 0), ("save_every", 0)):
            if getattr(self, name) < least:
                raise BlockSparseError.expected(name, f"an int of {least} or more", getattr(self, name))
        for name in ("learning_rate", "weight_decay", "clip", "save_minutes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BlockSparseError.expected(name, "a number, not negative", getattr(self, name))
        for name in ("ema", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise BlockSparseError.expected(name, "a number from 0 to below 1", getattr(self, name))
        if not 0 < self.decay_per_step <= 1:
            raise BlockSparseError.expected("decay_per_step", "a number above 0, to 1", self.decay_per_step)
        if not 0 <= self.seed < 2**32:
            raise BlockSparseError.expected("seed", "an int from 0 to 2^32 - 1", self.seed)


def by_epochs(task: Any, recipe: Any = None, **how: Any) -> Settings:
    """Settings of an `EpochTask`, evaluated after each epoch; a recipe's fields of the same names are used."""
    epoch = task.steps_per_epoch
    usual = {"steps": task.steps, "log_every": min(epoch, 100), "eval_every": epoch, "save_every": epoch}
    own = {one.name: getattr(recipe, one.name) for one in fields(Settings) if hasattr(recipe, one.name)}
    return Settings(**usual | own | how)
