"""The base class of the methods that change layouts: which modules, when, and how they resume."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...checked import integer
from ...errors import BlockSparseError
from ...nn.module import BlockSparseModule
from ...pages import Page
from ...surgery.agreement import check_layouts
from ...surgery.fsdp import reshard
from ...surgery.optimizer import check_optimizer
from ...surgery.prunable import Skip, skipped
from ...surgery.rewire import OnLayoutChange
from ...surgery.stored import Stored
from ..training_method import TrainingMethod

Modules = nn.Module | Iterable[nn.Module]


class DynamicSparsity(TrainingMethod):
    """Changes the layouts of block-sparse modules while they are trained; see `TrainingMethod` for when.

    What is drawn depends on the seed and the number of calls only, so these two are the state that a checkpoint needs
    besides the model's and the optimizer's. Arguments are as for `SET`.

    Raises:
        BlockSparseError: a model without block-sparse weights, or with one that is empty; nothing left after `skip`; a
            name that the model does not have; an optimizer without the parameter of one of them; numbers out of range;
            DistributedDataParallel of a tensor-parallel model.
    """

    begin = 0
    end: int | None = None
    """The call of `step` from which on the layouts stay."""

    def __init__(
        self,
        modules: Modules,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        skip: Skip = (),
        every: int = 1,
        seed: int = 0,
        on_layout_change: OnLayoutChange | None = None,
    ):
        if isinstance(modules, Iterable) and not isinstance(modules, nn.Module):
            modules = list(modules)
        self.modules = find_modules(modules, skip)
        parameters: set[Tensor] = set()
        self._roots = [modules] if isinstance(modules, nn.Module) else modules
        self._reshard()
        for name, module in self.modules.items():
            stored = Stored(module)
            check_optimizer(optimizer, stored.parameter, f"{name}.values" if name else "values")
            if stored.layout.nnz == 0:
                raise BlockSparseError.expected(name or "modules", "a layer with connections", repr(stored.layout))
            if stored.parameter in parameters:
                raise BlockSparseError.expected(f"{name}.values", "a parameter of one module", "one that others share")
            parameters.add(stored.parameter)
        if any(isinstance(root, DistributedDataParallel) for root in self._roots):
            check_beside_ddp(self.modules.values())
        self.optimizer, self.on_layout_change = optimizer, on_layout_change
        self.every, self.seed = integer("every", every, 1), integer("seed", seed, 0)
        self._watch_updates()

    def _trained(self) -> dict[str, Tensor]:
        return {f"{name}.values".lstrip("."): Stored(module).parameter for name, module in self.modules.items()}

    def _step(self) -> bool:
        due = self._due(self.calls)
        if due:
            self._reshard()
            self._change()
            self._check_agreement()
        return due

    def _check_agreement(self) -> None:
        """Raises a BlockSparseError, on all processes that train the same weights, where the layouts part."""
        groups: dict[Any, dict[str, nn.Module]] = {}
        for name, module in self.modules.items():
            for group in Stored(module).replicas:
                groups.setdefault(group, {})[name] = module
        for root in self._roots:
            if isinstance(root, DistributedDataParallel):
                groups[root.process_group] = {"": root}
        for group, modules in groups.items():
            check_layouts(modules, group)

    def _reshard(self) -> None:
        for root in self._roots:
            reshard(root)

    def _due(self, call: int) -> bool:
        return call % self.every == 0 and self.begin <= call and (self.end is None or call < self.end)

    def _change(self) -> None:
        raise NotImplementedError

    def _generator(self, module: int) -> np.random.Generator:
        """For one module in one call."""
        return np.random.default_rng([self.seed, self.calls, module])

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"seed": torch.tensor(self.seed)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.seed = int(state["seed"])


def check_beside_ddp(modules: Iterable[BlockSparseModule]) -> None:
    """Raises a BlockSparseError for weights that are cut: while blocks move, parts change their size."""
    if any(module.part is not None for module in modules):
        expected = "fully_shard (FSDP2) for data parallelism, with tensor parallelism whose parts change their size"
        raise BlockSparseError.expected("model", expected, "DistributedDataParallel, whose buckets keep their sizes")


def find_modules(modules: Modules, skip: Skip = ()) -> dict[str, BlockSparseModule]:
    """The block-sparse modules in a model, or in several, by name, without those to be skipped."""
    several = isinstance(modules, Iterable) and not isinstance(modules, nn.Module)
    roots: list[Any] = [*modules] if several else [modules]  # type: ignore[misc]
    for root in roots:
        if not isinstance(root, nn.Module):
            raise BlockSparseError.expected("modules", "a model, or some modules", type(root).__name__)
        if not any(isinstance(module, BlockSparseModule) for module in root.modules()):
            raise BlockSparseError.expected(
                "modules", "one with block-sparse weights", type(root).__name__, Page.SPARSE_TRAINING
            )
    whole = nn.ModuleList(roots) if several else roots[0]
    left_out, parameters = skipped(whole, skip)
    chosen = {
        name: module
        for name, module in whole.named_modules()
        if isinstance(module, BlockSparseModule)
        and module not in left_out
        and f"{name}.values".lstrip(".") not in parameters
    }
    if not chosen:
        raise BlockSparseError.expected("skip", "something but it with block-sparse weights", "nothing")
    return chosen
