"""The settings that all training runs share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blocksparse.errors import BlockSparseError

DECAYS = ("linear", "cosine", "none")
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adam", "sgd", "adagrad")

# Settings that may change when a run resumes: none affects what is learned. But on another device bits differ.
FREE = ("log_every", "eval_every", "save_every", "save_minutes", "device", "cuda_graph")


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        steps: of the whole run.
        learning_rate: the highest.
        warmup: steps over which it rises.
        decay: how it falls after them: "linear" or "cosine", to 0 at the end, or "none".
        decay_per_step: by which it is multiplied besides, once for each step.
        betas, eps: of Adam.
        weight_decay: of "adam", of the parameters with two dimensions or more, decoupled from the gradient; of "sgd",
            of all, not multiplied by the learning rate; of "adagrad", of all, as a part of the gradient.
        clip: the largest norm of the gradient of all parameters; 0 for any.
        ema: decay of the running mean of the parameters, which is what is evaluated; 0 for none.
        dtype: "float32", or "bfloat16" by autocast: parameters stay float32.
        log_every, eval_every, save_every: steps; 0 for the last one only.
        save_minutes: a checkpoint is this old at most; 0 for any age.
        seed: of PyTorch's generators, of which a task may draw.
        device: "cpu", or "cuda".
        cuda_graph: on "cuda", whether a step is captured as one graph, where the task allows it; with "adam" only.
        optimizer: "adam" (AdamW), "sgd", `bs.sparsity.SGD`, or "adagrad".
        momentum: of "sgd".
    """

    steps: int = 10_000
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: str = "linear"
    decay_per_step: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    ema: float = 0.0
    dtype: str = "float32"
    log_every: int = 20
    eval_every: int = 500
    save_every: int = 500
    save_minutes: float = 5.0
    seed: int = 0
    device: str = "cpu"
    cuda_graph: bool = False
    optimizer: str = "adam"
    momentum: float = 0.9

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
