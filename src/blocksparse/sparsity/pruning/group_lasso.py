"""Group lasso over blocks: a penalty on their norms, which makes whole blocks 0."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...checked import number
from ...errors import BlockSparseError
from ...ops.checks import accumulator
from ...surgery.prunable import Skip
from ..selection import DensityLimit, dense_norms, normalize_by_size
from .dense_pruner import DensePruner

MODES = ("proximal", "penalty")


class GroupLasso(DensePruner):
    """Group lasso: adds strength * sum_g ||w_g|| to the loss, over all blocks g, with l2 norms.

    In mode "proximal", `step` takes the proximal step of that term with the optimizer's learning rate (unscaled, also
    for Adam): w_g <- w_g max(0, 1 - lr strength / ||w_g||). Blocks with ||w_g|| <= lr strength become exactly 0, until
    their gradient moves them. In mode "penalty", add `penalty()` to the loss; blocks become small but rarely 0, so set
    a `threshold`. For the paper's GLP, add the penalty, prune the same model by `ThresholdPruning`, and call only the
    `finish` of the latter.

    Args:
        model, optimizer, block_size, skip: see `DensePruner`. The proximal mode requires the optimizer.
        strength: lambda, 1e-3 by default. If it is too large, a weight loses all of its blocks.
        mode: "proximal" (default) or "penalty".
        weighted: whether to multiply the norm of each block by sqrt(its number of weights), so that one strength suits
            blocks of all sizes; False by default.
        threshold: `finish` drops blocks whose largest |w| is at most this; 0 by default.
        density: upper bound of the density that `finish` stores, with the largest norms first (l2 norms normalized by
            the block's size); None (default) for no bound.
        scope: "global" (default): all blocks compete for that density. "layer": the bound applies to each weight.

    Raises:
        BlockSparseError: as for `DensePruner`; numbers out of range; an unknown mode or scope; a density that leaves a
            weight without a block; the proximal mode without an optimizer; in `finish`, a weight without blocks.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> method = bs.sparsity.GroupLasso(model, optimizer, strength=0.3, block_size=8)
        >>> x = torch.randn(256, 64)
        >>> for _ in range(40):
        ...     optimizer.zero_grad()
        ...     (model(x) - x.roll(8, 1)).square().sum(1).mean().backward()     # one block of each row would do
        ...     optimizer.step()
        ...     changed = method.step()
        >>> method.finish().layout.nnz
        8

    Source: Yuan, Lin, Model selection and estimation in regression with grouped variables (2006); Narang, Undersander,
    Diamos, Block-sparse recurrent neural networks (2017).
    """

    remedy, stronger = "a lower strength", "a higher strength"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        strength: float = 1e-3,
        *,
        mode: str = "proximal",
        weighted: bool = False,
        threshold: float = 0.0,
        density: float | None = None,
        scope: str = "global",
        block_size: int | tuple[int, int] = 32,
        skip: Skip = (),
    ):
        super().__init__(model, optimizer, block_size=block_size, skip=skip)
        if mode not in MODES:
            raise BlockSparseError.expected("mode", f"one of {', '.join(MODES)}", repr(mode))
        if mode == "proximal" and optimizer is None:
            raise BlockSparseError(
                'optimizer: mode="proximal" uses its learning rate: pass the optimizer, or mode="penalty"'
            )
        self.mode, self.strength = mode, number("strength", strength, 0)
        self.threshold = number("threshold", threshold, 0)
        self.limit = DensityLimit(density, scope, self.blocks)
        self.factors = {name: blocks.size**0.5 if weighted else 1.0 for name, blocks in self.blocks.items()}

    def penalty(self) -> Tensor:
        """Return strength * sum_g ||w_g||, a differentiable scalar; add it to the loss in mode "penalty" only."""
        self._check_unfinished("penalty")
        total: Tensor | float = 0.0
        for name, dense in self.dense.items():
            blocks = self.blocks[name].fold(dense.to(accumulator(dense.dtype)))
            norms = torch.linalg.vector_norm(blocks, dim=self.blocks[name].inside)
            total = total + self.factors[name] * norms.sum()
        return self.strength * torch.as_tensor(total)

    def _step(self) -> bool:
        """Shrink the norm of each block by learning rate x strength x factor; blocks with a smaller norm become 0.

        Returns whether weights changed: always False with mode "penalty" or without an optimizer.
        """
        if self.mode == "penalty" or self.optimizer is None:
            return False
        rates = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        for name in self._trained():
            dense = self.dense[name]
            norms = dense_norms(self.blocks[name], dense)
            threshold = float(rates[id(dense)]) * self.strength * self.factors[name]
            scale = (1 - threshold / norms).masked_fill(norms <= threshold, 0)
            dense.mul_(self.blocks[name].spread(scale.to(dense.dtype)))
        return True

    def _masks(self) -> Mapping[str, Tensor]:
        """Return which blocks of each weight have a value above the threshold, within the limits of density."""
        masks, norms = {}, {}
        for name, blocks in self.blocks.items():
            masks[name] = dense_norms(blocks, self.dense[name], "max") > self.threshold
            norms[name] = normalize_by_size(dense_norms(blocks, self.dense[name]), blocks, "l2")
        return self.limit(masks, norms)
