"""The base class of the methods that change layouts: which modules, when, and how they resume."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...checked import integer
from ...errors import BlockSparseError, Page, SparsityWarning
from ...nn.module import BlockSparseModule
from ...surgery.agreement import check_layouts
from ...surgery.optimizer import check_optimizer
from ...surgery.prunable import Skip, skipped
from ...surgery.rewire import OnLayoutChange
from ...surgery.sharding import reshard
from ...surgery.weight_handle import WeightHandle, handle_of
from ..selection import hash_positions
from ..training_method import TrainingMethod

TIES = 1  # sets these random numbers apart from those of `_generator`
Modules = nn.Module | Iterable[nn.Module]


class DynamicSparsity(TrainingMethod):
    """Changes the layouts of block-sparse modules while they are trained; see `TrainingMethod` for when.

    What is drawn depends on the seed and the number of calls only, so these two are the state that a checkpoint needs
    besides the model's and the optimizer's. Arguments are as for `SET`.

    A frozen weight, whose `values.requires_grad` is False at the call of `step`, keeps its layout: blocks that grow in
    it would never be trained. A `SparsityWarning` lists such weights once.

    Raises:
        BlockSparseError: a model without block-sparse weights, or with one that is empty; nothing left after `skip`;
            only frozen weights, or a frozen layer among the modules given; a
            name that the model does not have; an optimizer without the parameter of one of them; numbers out of range;
            DistributedDataParallel of a tensor-parallel model.
    """

    begin = 0
    end: int | None = None
    """The call of `step` from which on the layouts stay."""
    keep_lines: bool

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
            stored = handle_of(module)
            if not stored.parameter.requires_grad:
                self._check_not_asked_for(name, module)
            else:
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
        self._frozen: set[str] = set()
        if not any(handle_of(module).parameter.requires_grad for module in self.modules.values()):
            expected = "weights that are trained, not all of them frozen: layer.requires_grad_(True) first"
            raise BlockSparseError.expected("modules", expected, "frozen ones only")
        self._trained()
        self._watch_updates()

    def _named_parameters(self) -> dict[str, Tensor]:
        return {f"{name}.values".lstrip("."): handle_of(module).parameter for name, module in self.modules.items()}

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
            for group in handle_of(module).replicas:
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

    def _trained(self) -> Iterator[tuple[int, str, WeightHandle]]:
        """The position, the name and the weight of each module that is not frozen now; warns of newly frozen ones."""
        every = [(i, name, handle_of(module)) for i, (name, module) in enumerate(self.modules.items())]
        frozen = {name for _, name, stored in every if not stored.parameter.requires_grad}
        if new := sorted(frozen - self._frozen):
            values = ", ".join(f"{name}.values".lstrip(".") for name in new)
            warnings.warn(
                f"{type(self).__name__} leaves {values} as they are while they are frozen: set requires_grad_(True) to "
                "change them too, or name them in skip",
                SparsityWarning,
                stacklevel=4,
            )
        self._frozen |= frozen
        return (each for each in every if each[1] not in frozen)

    def _check_not_asked_for(self, name: str, module: nn.Module) -> None:
        """Raises a BlockSparseError for a frozen layer that was given itself, and not a model that it is in."""
        if any(module is root for root in self._roots):
            expected = "a layer that is trained: requires_grad_(True) first, or leave it out"
            raise BlockSparseError.expected(name or "modules", expected, "a frozen one")

    def _generator(self, module: int) -> np.random.Generator:
        """For one module in one call."""
        return np.random.default_rng([self.seed, self.calls, module])

    def _order(self, module: int) -> partial[np.ndarray]:
        """The random order of equal blocks of one module in one call, by their places: see `scattered`."""
        words = np.random.SeedSequence([self.seed, self.calls, module, TIES]).generate_state(1, np.uint64)
        return partial(hash_positions, seed=int(words[0]))

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
                "modules",
                "one with block-sparse weights",
                f"{type(root).__name__} (blocksparse.sparsify makes them; GradualPruning starts from dense ones)",
                Page.SPARSE_TRAINING,
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
