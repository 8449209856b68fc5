"""L0 regularization by hard-concrete gates, one per block."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...checked import integer, number
from ...ops.checks import accumulator
from ...surgery.blocks import Blocks
from ...surgery.prunable import Skip
from ..selection import DensityLimit
from .learned_gates import BlockGate, GatedPruner

GAMMA, ZETA, BETA = -0.1, 1.1, 2 / 3
MIN_LOG_ALPHA, MAX_LOG_ALPHA = math.log(0.01), math.log(100)


def open_probability(log_alpha: Tensor) -> Tensor:
    """Return P(z != 0) = sig(log_alpha - beta log(-gamma / zeta))."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def sampled_gate(log_alpha: Tensor, u: Tensor) -> Tensor:
    """Return the gate for u in (0, 1): clip((zeta - gamma) sig((log u - log(1 - u) + log_alpha) / beta) + gamma)."""
    return _stretched(torch.sigmoid((torch.log(u) - torch.log1p(-u) + log_alpha) / BETA))


def final_gate(log_alpha: Tensor) -> Tensor:
    """Return the gate at test time: clip((zeta - gamma) sig(log_alpha) + gamma), 0 for log_alpha <= -2.398."""
    return _stretched(torch.sigmoid(log_alpha))


def _stretched(s: Tensor) -> Tensor:
    """Return s stretched from (0, 1) to (GAMMA, ZETA) and clipped to [0, 1]."""
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


class HardConcreteGate(BlockGate):
    """A gate for each block of a weight: sampled at each use in training mode, final otherwise."""

    def __init__(self, blocks: Blocks, dense: Tensor, closed: float):
        super().__init__(blocks)
        start = torch.empty(blocks.grid, dtype=accumulator(dense.dtype), device=dense.device)
        self.log_alpha = nn.Parameter(start.normal_(math.log((1 - closed) / closed), 0.01))

    def forward(self, weight: Tensor) -> Tensor:
        gate = self.multiplier
        if self.training:
            gate = sampled_gate(self.log_alpha, torch.empty_like(self.log_alpha).uniform_(1e-6, 1 - 1e-6))
        return weight * self.blocks.spread(gate.to(weight.dtype))

    @property
    def multiplier(self) -> Tensor:
        return final_gate(self.log_alpha)


class L0Gates(GatedPruner):
    """L0 regularization: multiplies each block by a random gate from 0 to 1, whose distribution is learned.

    Add `penalty()` to the loss. In training mode, each forward pass draws gates from PyTorch's generator; in evaluation
    mode gates are fixed. `step` clips log_alpha to log 0.01 ... log 100. `finish` drops blocks whose gate is 0, and
    multiplies the others by their gates.

    Args:
        model, optimizer, lr, block_size, skip: see `DensePruner` and `GatedPruner`. With blocks of all rows and one
            column, gates apply to input features.
        strength: lambda, the price of a weight whose gate is not 0; 0.1 by default.
        samples: N, the number of training examples, by which the penalty is divided.
        weight_decay: weight decay of weights whose gates are not 0; 0 by default. If it is used, set the optimizer's
            to 0.
        closed: probability p that a gate is 0 at the start, 0.5 by default: log_alpha is drawn from
            N(log((1 - p) / p), 0.01).
        density: upper bound of the density that `finish` stores, with the gates that are most likely open first; None
            (default) for no bound.
        scope: "global" (default): all blocks compete for that density. "layer": the bound applies to each weight.

    Raises:
        BlockSparseError: as for `DensePruner`; numbers out of range; a density that leaves a weight without a block; an
            unknown scope; in `finish`, a weight whose gates are all 0.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> method = bs.sparsity.L0Gates(model, optimizer, strength=0.1, samples=1000, block_size=8, density=0.5)
        >>> (model(torch.randn(16, 64)).square().mean() + method.penalty()).backward()
        >>> optimizer.step()
        >>> method.step(), type(method.finish()) is bs.nn.Linear
        (True, True)

    Source: Louizos, Welling, Kingma, Learning sparse neural networks through L0 regularization (2018).
    """

    remedy, stronger = "a lower strength", "a higher strength"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        strength: float = 0.1,
        *,
        samples: int,
        weight_decay: float = 0.0,
        closed: float = 0.5,
        density: float | None = None,
        scope: str = "global",
        lr: float | None = None,
        block_size: int | tuple[int, int] = 32,
        skip: Skip = (),
    ):
        super().__init__(model, optimizer, lr=lr, block_size=block_size, skip=skip)
        self.strength, self.samples = number("strength", strength, 0), integer("samples", samples, 1)
        self.weight_decay = number("weight_decay", weight_decay, 0)
        closed = number("closed", closed, 0.01, 0.99)
        self.limit = DensityLimit(density, scope, self.blocks)
        gates = {name: HardConcreteGate(blocks, self.dense[name], closed) for name, blocks in self.blocks.items()}
        with torch.no_grad():
            self._counts = {
                name: blocks.sums(torch.ones_like(self.dense[name], dtype=torch.float32))
                for name, blocks in self.blocks.items()
            }
        self._attach(gates)

    def penalty(self) -> Tensor:
        """Return (1 / N) sum P(z != 0) (weight_decay w^2 / 2 + lambda) over all weights, a differentiable scalar."""
        self._check_unfinished("penalty")
        total = torch.zeros((), device="cpu")
        for name, gate in self.gates.items():
            dense = self.dense[name]
            price = self.strength * self._counts[name].to(gate.log_alpha)
            if self.weight_decay:
                price = price + self.weight_decay / 2 * self.blocks[name].sums(dense.to(price.dtype).square())
            total = total + (open_probability(gate.log_alpha) * price).sum()
        return total / self.samples

    def _masks(self) -> Mapping[str, Tensor]:
        return self.limit(super()._masks(), {name: gate.log_alpha for name, gate in self.gates.items()})

    def _step(self) -> bool:
        for gate in self.gates.values():
            gate.log_alpha.clamp_(MIN_LOG_ALPHA, MAX_LOG_ALPHA)
        return True
