"""Momentum SGD as the sparse training codes have it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...checked import check_kept, number
from ...ops import momentum
from ...surgery.sharding import local_of


class SGD(torch.optim.Optimizer):
    """v <- momentum v - lr g; w <- w + v - weight_decay w: the decay is not multiplied by lr, and has no momentum.

    `torch.optim.SGD` cannot say that: its weight_decay goes through the momentum and is multiplied by lr, and its
    momentum holds gradients, so that another lr changes the steps of the past too. With weight_decay 0 and the same
    lr throughout, both are the same.

    Args:
        params: parameters, or groups of them.
        lr, momentum, weight_decay: by default those of the papers; 0 or more.

    A state dict holds a momentum of each parameter's shape. Where parameters change with their layout, as by the state
    dict of a module with another pattern, load the optimizer's of then too, or clear `optimizer.state`.

    Raises:
        BlockSparseError: numbers out of range; from `load_state_dict`, parameter groups without these; from `step`, a
            momentum or a gradient of another shape than its parameter's.

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
        super().__init__(params, _checked({"lr": lr, "momentum": momentum, "weight_decay": weight_decay}))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _checked({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state; momenta are compared with their parameters in `step`, for these may be loaded later."""
        for group in state_dict.get("param_groups", ()):
            _checked(group)
        super().load_state_dict(state_dict)

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
            momenta = [self._momentum(w) for w in weights]
            grads = [w.grad for w in weights]
            weights, momenta, grads = ([local_of(t) for t in some] for some in (weights, momenta, grads))
            rates = {"momentum": group["momentum"], "rate": group["lr"], "keep": 1 - group["weight_decay"]}
            momentum.step(weights, momenta, grads, **rates)
        return loss

    def _momentum(self, w: Tensor) -> Tensor:
        state = self.state[w]
        found = state.get("momentum_buffer")
        if found is None:  # not yet; torch.optim.SGD saves None for it where it has no momentum
            found = state["momentum_buffer"] = torch.zeros_like(w)
        else:
            check_kept({"momentum_buffer": found}, w, "its parameter", scalars=False)
        return found


_MOST = {"lr": math.inf, "momentum": 1, "weight_decay": 1}


def _checked(rates: dict[str, Any]) -> dict[str, float]:
    """Those of a group; a BlockSparseError where one is missing or out of range."""
    return {name: number(name, rates.get(name), 0, most) for name, most in _MOST.items()}
