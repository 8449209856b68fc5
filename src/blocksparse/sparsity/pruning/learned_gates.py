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


class BlockGate(nn.Module):
    """A parametrization of a weight with one learned number per block."""

    def __init__(self, blocks: Blocks):
        super().__init__()
        self.blocks = blocks

    @property
    def multiplier(self) -> Tensor:
        """The factor of each block after the search, `[out_blocks, in_blocks]`."""
        raise NotImplementedError

    def plain(self, weight: Tensor) -> Tensor:
        """Return the weight after the search; checkpoints store it as the plain weight."""
        return weight * self.blocks.spread(self.multiplier.to(weight.dtype))


class GatedPruner(DensePruner):
    """A `DensePruner` that learns a number for each block by gradients.

    These parameters belong to the model until `finish` removes them, so checkpoints and data-parallel training include
    them. Until then each weight is used through `torch.nn.utils.parametrize`.

    Args:
        model, block_size, skip: see `DensePruner`.
        optimizer: the optimizer, which gets the new parameters as a group of its own; the group stays, empty, after
            `finish`. If None (default), pass `parameters()` to the optimizer that trains them. Create learning-rate
            schedulers after the method.
        lr: learning rate of that group; None (default) for the optimizer's default.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        lr: float | None = None,
        **options: Any,
    ):
        self.gates: dict[str, Any] = {}
        super().__init__(model, optimizer, **options)
        self.lr = None if lr is None else number("lr", lr, 0)
        self._settled = False

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the method learns, one `[out_blocks, in_blocks]` for each weight."""
        return [parameter for gate in self.gates.values() for parameter in gate.parameters()]

    def _named_parameters(self) -> dict[str, Tensor]:
        learned = {f"{name}.{key}": each for name, gate in self.gates.items() for key, each in gate.named_parameters()}
        return super()._named_parameters() | learned

    def _attach(self, gates: dict[str, Any]) -> None:
        """Parametrize the weights by these gates. Call it after all checks, since it changes the model."""
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
        """Multiply the weights by their gates, and remove the gates from the modules and the optimizer."""
        if self.finished or self._settled:
            return
        self._settled = True
        learned = {id(parameter) for parameter in self.parameters()}
        for name, gate in self.gates.items():
            weight, dense = self.weights[name], self.dense[name]
            dense.copy_(gate.plain(dense))
            remove_parametrization(weight.module, weight.parameter, leave_parametrized=False)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in learned]
            for parameter in self.parameters():
                self.optimizer.state.pop(parameter, None)

    def _check_unfinished(self, call: str) -> None:
        """Raise a BlockSparseError also if the gates were removed."""
        super()._check_unfinished(call)
        if self._settled and call != "finish":
            raise BlockSparseError(
                f"{call}() called after the gates of {type(self).__name__} were removed, when its training ended: "
                "call finish(early=True), or create a new method to prune further"
            )

    def _masks(self) -> Mapping[str, Tensor]:
        return {name: gate.multiplier > 0 for name, gate in self.gates.items()}
