"""L0 regularization by hard-concrete gates, one for each block."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...checked import integer, number
from ...surgery.blocks import Blocks
from ...surgery.prunable import Skip
from ..selection import DensityLimit
from .learned_gates import Gate, Gated

GAMMA, ZETA, BETA = -0.1, 1.1, 2 / 3
LOWEST, HIGHEST = math.log(0.01), math.log(100)  # of log_alpha


def open_probability(log_alpha: Tensor) -> Tensor:
    """P(z != 0) = sig(log_alpha - beta log(-gamma / zeta))."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def sampled_gate(log_alpha: Tensor, u: Tensor) -> Tensor:
    """The gate for u, uniform in (0, 1): clip((zeta - gamma) sig((log u - log(1 - u) + log_alpha) / beta) + gamma)."""
    return _stretched(torch.sigmoid((torch.log(u) - torch.log1p(-u) + log_alpha) / BETA))


def final_gate(log_alpha: Tensor) -> Tensor:
    """The gate at test time: clip((zeta - gamma) sig(log_alpha) + gamma), 0 up to log_alpha = -2.398."""
    return _stretched(torch.sigmoid(log_alpha))


def _stretched(s: Tensor) -> Tensor:
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


class HardConcrete(Gate):
    """Multiplies a weight by the gate of each block: sampled at each use in training mode, the final one otherwise."""

    def __init__(self, blocks: Blocks, like: Tensor, closed: float):
        super().__init__(blocks)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        start = torch.empty(blocks.grid, dtype=dtype, device=like.device)
        self.log_alpha = nn.Parameter(start.normal_(math.log((1 - closed) / closed), 0.01))

    def forward(self, weight: Tensor) -> Tensor:
        gate = self.multiplier
        if self.training:
            gate = sampled_gate(self.log_alpha, torch.empty_like(self.log_alpha).uniform_(1e-6, 1 - 1e-6))
        return weight * self.blocks.spread(gate.to(weight.dtype))

    @property
    def multiplier(self) -> Tensor:
        return final_gate(self.log_alpha)


class L0Gates(Gated):
    """L0 regularization: each block has a gate, a random number from 0 to 1 with a distribution that is learnt.

    `penalty()` is added to the loss; `step` keeps log_alpha within log 0.01 to log 100. In training mode gates are
    drawn with PyTorch's generator in each forward pass; in evaluation they are fixed, and blocks whose gate is 0 are
    not stored by `finish`, which multiplies the others with theirs.

    Args:
        model, optimizer, lr, block_size, skip: as for all methods with parameters of their own; see `Gated`. With
            blocks of all rows and one column the gates are on input features.
        strength: lambda, the price of a weight whose gate is not 0.
        samples: N, the number of examples to train on, by which the penalty is divided.
        weight_decay: of the weights whose gates are not 0; the optimizer's own is better 0 then.
        closed: the probability p to be shut at the start: log_alpha is drawn from N(log((1 - p) / p), 0.01).
        density: the most that `finish` stores, of the gates that are most probably open; None for any.
        scope: "global", where all blocks compete for that density, or "layer", where it is each weight's.

    Raises:
        BlockSparseError: as `DensePruner`; numbers out of range, a density that leaves a weight without a block, an
            unknown scope; in `finish`, a weight of which every gate is 0.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> method = bs.sparsity.L0Gates(model, optimizer, strength=0.1, samples=1000, lr=0.01, block_size=8)
        >>> (model(torch.randn(16, 64)).square().mean() + method.penalty()).backward()
        >>> optimizer.step()
        >>> method.step(), type(method.finish()) is bs.nn.Linear
        (True, True)

    Source: Louizos, Welling, Kingma, Learning sparse neural networks through L0 regularization (2018).
    """

    remedy = "a lower strength"

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
        self.cap = DensityLimit(density, scope, self.blocks)
        gates = {name: HardConcrete(blocks, self.dense[name], closed) for name, blocks in self.blocks.items()}
        with torch.no_grad():
            self._counts = {
                name: blocks.sums(torch.ones_like(self.dense[name])) for name, blocks in self.blocks.items()
            }
        self._attach(gates)

    def penalty(self) -> Tensor:
        """(1 / N) sum P(z != 0) (weight_decay w^2 / 2 + lambda) over all weights, a differentiable scalar."""
        total = torch.zeros(())
        for name, gate in self.gates.items():
            dense = self.dense[name]
            price = self.strength * self._counts[name]
            if self.weight_decay:
                price = price + self.weight_decay / 2 * self.blocks[name].sums(dense.to(price.dtype).square())
            total = total + (open_probability(gate.log_alpha) * price).sum()
        return total / self.samples

    def _kept(self) -> Mapping[str, Tensor]:
        return self.cap(super()._kept(), {name: gate.log_alpha for name, gate in self.gates.items()})

    def _step(self) -> bool:
        for gate in self.gates.values():
            gate.log_alpha.clamp_(LOWEST, HIGHEST)
        return True
