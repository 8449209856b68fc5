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
from ...surgery.prunable import Skip
from ...surgery.rewire import OnLayoutChange
from ...surgery.stored import Stored
from ..training_method import TrainingMethod

Modules = nn.Module | Iterable[nn.Module]


class DynamicSparsity(TrainingMethod):
    """Changes the layouts of block-sparse modules while they are trained; see `TrainingMethod` for when.

    Args:
        modules: a model, or some modules; the method applies to all block-sparse weights in them.
        optimizer: the one that trains them; None without one, or if it keeps no state.
        skip: what is left as it is: modules, or their names in the model, with all that is in them.
        every: `step` works at every `every`-th call.
        seed: of all that is drawn.
        on_layout_change: as for `rewire`.

    What is drawn depends on the seed and the number of calls only, so these two are the state that a checkpoint needs
    besides the model's and the optimizer's.

    Raises:
        BlockSparseError: a model without block-sparse weights, or with one that is empty; nothing left after `skip`; a
            name that the model does not have; an optimizer without the parameter of one of them; numbers out of range;
            DistributedDataParallel of a tensor-parallel model.
    """

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
        return call % self.every == 0

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
        expected = "fully_shard (FSDP2) for data parallelism, beside tensor parallelism whose parts change their size"
        raise BlockSparseError.expected("model", expected, "DistributedDataParallel, whose buckets keep their sizes")


def find_modules(modules: Modules, skip: Skip = ()) -> dict[str, BlockSparseModule]:
    """The block-sparse modules in a model, or in several, by name, without those to be skipped."""
    several = not isinstance(modules, nn.Module)
    roots = list(modules) if isinstance(modules, Iterable) and several else [modules]
    named: dict[nn.Module, str] = {}
    for i, root in enumerate(roots):
        if not isinstance(root, nn.Module):
            raise BlockSparseError.expected("modules", "a model, or some modules", type(root).__name__)
        if not any(isinstance(module, BlockSparseModule) for module in root.modules()):
            raise BlockSparseError.expected(
                "modules", "one with block-sparse weights", type(root).__name__, Page.SPARSE_TRAINING
            )
        for name, module in root.named_modules():
            named.setdefault(module, f"{i}.{name}".rstrip(".") if several else name)
    left_out: set[nn.Module] = set()
    for item in [skip] if isinstance(skip, str | nn.Module) else skip:
        found = [module for module, name in named.items() if module is item or name == item]
        if not found:
            got = type(item).__name__ if isinstance(item, nn.Module) else repr(item)
            raise BlockSparseError.expected("skip", "modules of the model, or their names", got)
        left_out.update(found[0].modules())
    chosen = {name: m for m, name in named.items() if isinstance(m, BlockSparseModule) and m not in left_out}
    if not chosen:
        raise BlockSparseError.expected("skip", "something but it with block-sparse weights", "nothing")
    return chosen
