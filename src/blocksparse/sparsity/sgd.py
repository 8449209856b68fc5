"""Momentum SGD as the sparse training codes have it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..checked import number
from ..ops import momentum


class SGD(torch.optim.Optimizer):
    """v <- momentum v - lr g; w <- w + v - weight_decay w: the decay is not multiplied by lr, and has no momentum.

    `torch.optim.SGD` cannot say that: its weight_decay goes through the momentum and is multiplied by lr, and its
    momentum holds gradients, so that another lr changes the steps of the past too. With weight_decay 0 and the same
    lr throughout, both are the same.

    Args:
        params: parameters, or groups of them.
        lr, momentum, weight_decay: by default those of the papers; 0 or more.

    Raises:
        BlockSparseError: numbers out of range.

    Example:
        >>> import torch, blocksparse as bs
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = bs.sparsity.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.5)
        >>> w.grad = torch.tensor([2.0])
        >>> optimizer.step()
        >>> w.data      # 1 - 0.1 * 2 - 0.5 * 1
        tensor([0.3000])

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021), and its code.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 2e-4,
    ):
        bounds = {"lr": (lr, math.inf), "momentum": (momentum, 1), "weight_decay": (weight_decay, 1)}
        super().__init__(params, {name: number(name, value, 0, most) for name, (value, most) in bounds.items()})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step for all parameters that have a gradient; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [w for w in group["params"] if w.grad is not None]
            if not weights:
                continue
            for w in weights:
                if "momentum_buffer" not in self.state[w]:
                    self.state[w]["momentum_buffer"] = torch.zeros_like(w)
            momenta = [self.state[w]["momentum_buffer"] for w in weights]
            grads = [w.grad for w in weights]
            rates = {"momentum": group["momentum"], "rate": group["lr"], "keep": 1 - group["weight_decay"]}
            momentum.step(weights, momenta, grads, **rates)
        return loss
