"""The optimizer of a run, and its learning rate at each step."""

from __future__ import annotations

import math

import torch
from torch import nn

from blocksparse.sparsity import SGD

from .settings import Settings


def optimizer_for(parameters: list[nn.Parameter], s: Settings, device: torch.device) -> torch.optim.Optimizer:
    """Build the optimizer of the settings. Adam decays parameters with two or more dimensions, in a group of their
    own."""
    if s.optimizer == "sgd":
        return SGD(parameters, s.learning_rate, s.momentum, s.weight_decay)
    if s.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, s.learning_rate, weight_decay=s.weight_decay)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": s.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    graph = s.cuda_graph and device.type == "cuda"  # one graph, in which the learning rate changes
    rate = torch.tensor(s.learning_rate, device=device) if graph else s.learning_rate
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=rate, betas=s.betas, eps=s.eps, fused=True, capturable=graph
    )


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> from blocksparse_lab.training.optimizers import learning_rate
    >>> from blocksparse_lab.training.settings import Settings
    >>> settings = Settings(steps=6, warmup=2, learning_rate=1.0)
    >>> [learning_rate(settings, step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> settings = Settings(warmup=0, decay="none", decay_per_step=0.5, learning_rate=1.0)
    >>> [learning_rate(settings, step) for step in range(3)]
    [1.0, 0.5, 0.25]
    """
    s = settings
    rate = s.learning_rate * s.decay_per_step**step
    if step < s.warmup:
        return rate * (step + 1) / s.warmup
    done = (step - s.warmup) / max(1, s.steps - s.warmup)
    falls = {"linear": 1 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done), "none": 1.0}
    return rate * falls[s.decay]
