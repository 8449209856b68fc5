"""Momentum SGD as in the published code of sparse training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...checked import check_optimizer_state, number
from ...ops import momentum
from ...surgery.sharding import local_of


class SGD(torch.optim.Optimizer):
    """Momentum SGD whose weight decay is not multiplied by lr: v <- momentum v - lr g; w <- w + v - weight_decay w.

    `torch.optim.SGD` adds the decay to the gradient, so it goes through the momentum and is multiplied by lr. Its
    momentum sums gradients, so a new lr rescales past steps too. Without weight decay and with a constant lr both are
    the same.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, 0.01 by default.
        momentum: 0 to 1, 0.9 by default.
        weight_decay: 0 to 1, 2e-4 by default. The defaults are those of the papers.

    If a module loads a state dict with another pattern, load the optimizer's state of the same time too, or clear
    `optimizer.state`: momenta have the shapes of the parameters.

    Raises:
        BlockSparseError: numbers out of range; in `load_state_dict`, parameter groups without them; in `step`, a
            momentum or a gradient whose shape differs from its parameter's.

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
        super().__init__(params, _check_rates({"lr": lr, "momentum": momentum, "weight_decay": weight_decay}))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_rates({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. `step` compares momenta with parameters, since these may be loaded later."""
        for group in state_dict.get("param_groups", ()):
            _check_rates(group)
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; return the closure's loss, if any."""
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
            weights, momenta, grads = ([local_of(t) for t in tensors] for tensors in (weights, momenta, grads))
            rates = {"momentum": group["momentum"], "rate": group["lr"], "keep": 1 - group["weight_decay"]}
            momentum.step(weights, momenta, grads, **rates)
        return loss

    def _momentum(self, w: Tensor) -> Tensor:
        """Return the momentum of a parameter, zeros at first."""
        state = self.state[w]
        buffer = state.get("momentum_buffer")
        if buffer is None:  # torch.optim.SGD without momentum saves None
            buffer = state["momentum_buffer"] = torch.zeros_like(w)
        else:
            check_optimizer_state({"momentum_buffer": buffer}, w, "its parameter", scalars=False)
        return buffer


_UPPER_BOUNDS = {"lr": math.inf, "momentum": 1, "weight_decay": 1}


def _check_rates(rates: dict[str, Any]) -> dict[str, float]:
    """Return lr, momentum and weight_decay of a group; raise a BlockSparseError if one is missing or out of range."""
    return {name: number(name, rates.get(name), 0, bound) for name, bound in _UPPER_BOUNDS.items()}
