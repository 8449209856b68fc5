"""Base classes of the methods that learn a gate or a score for each block of a dense weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checked import number
from ...errors import BlockSparseError
from ...surgery.blocks import Blocks
from ...surgery.model_tools import add_parametrization, remove_parametrization
from .dense_pruner import DensePruner


class Gate(nn.Module):
    """A parametrization of a weight, with one learnt number for each block."""

    def __init__(self, blocks: Blocks):
        super().__init__()
        self.blocks = blocks

    @property
    def multiplier(self) -> Tensor:
        """What each block is multiplied with once the search is over, `[out_blocks, in_blocks]`."""
        raise NotImplementedError

    def plain(self, weight: Tensor) -> Tensor:
        """The weight as it is once the search is over."""
        return weight * self.blocks.spread(self.multiplier.to(weight.dtype))


class Gated(DensePruner):
    """A `DensePruner` that learns a number for each block by gradients, with parameters of its own.

    They are parameters of the model from then on, so that checkpoints and data parallel training include them, until
    `finish` takes them out again. A weight `w` is used through `torch.nn.utils.parametrize` until then.

    Args:
        model, block_size, skip: as for `DensePruner`.
        optimizer: gets the new parameters as a group of its own; without one, `parameters()` are to be given to the
            one that trains. Make schedulers of the learning rate after this. The group stays, empty, after `finish`.
        lr: of that group; None for the optimizer's default.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        lr: float | None = None,
        **options: Any,
    ):
        super().__init__(model, optimizer, **options)
        self.lr = None if lr is None else number("lr", lr, 0)
        self.gates: dict[str, Any] = {}
        self._settled = False

    def parameters(self) -> list[nn.Parameter]:
        """What the method learns, one parameter `[out_blocks, in_blocks]` for each weight."""
        return [parameter for gate in self.gates.values() for parameter in gate.parameters()]

    def _attach(self, gates: dict[str, Any]) -> None:
        """Puts the gates before the weights, once all is checked."""
        self.gates = gates
        for name, gate in gates.items():
            weight = self.weights[name]
            gate.train(weight.module.training)
            add_parametrization(weight.module, weight.parameter, gate)
        if self.optimizer is not None:
            group: dict[str, Any] = {"params": self.parameters(), "weight_decay": 0.0}
            self.optimizer.add_param_group(group if self.lr is None else group | {"lr": self.lr})

    @torch.no_grad()
    def settle(self) -> None:
        if self.finished or self._settled:
            return
        self._settled = True
        mine = {id(parameter) for parameter in self.parameters()}
        for name, gate in self.gates.items():
            weight, dense = self.weights[name], self.dense[name]
            dense.copy_(gate.plain(dense))
            remove_parametrization(weight.module, weight.parameter, leave_parametrized=False)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in mine]
            for parameter in self.parameters():
                self.optimizer.state.pop(parameter, None)

    def _check_unfinished(self, what: str) -> None:
        super()._check_unfinished(what)
        if self._settled and what != "finish":
            raise BlockSparseError(
                f"{what}() called after the gates of {type(self).__name__} were taken off, when its training ended: "
                "call finish(early=True), or make another one to prune further"
            )

    def _kept(self) -> Mapping[str, Tensor]:
        return {name: gate.multiplier > 0 for name, gate in self.gates.items()}
