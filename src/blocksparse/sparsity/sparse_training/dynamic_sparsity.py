"""The base class of the methods that change the layouts of block-sparse modules during training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...checked import integer
from ...errors import BlockSparseError, Page, warn_user
from ...nn.module import BlockSparseModule
from ...ops.checks import without_autocast
from ...surgery.agreement import check_layouts
from ...surgery.optimizer import check_optimizer
from ...surgery.prunable import Skip, find_skipped
from ...surgery.rewire import OnLayoutChange, check_on_layout_change
from ...surgery.sharding import reshard
from ...surgery.weight_handle import WeightHandle, handle_of
from ..selection import hash_positions
from ..training_method import TrainingMethod

TIE_BREAK_STREAM = 1  # separates the random numbers of `_tie_break` from those of `_generator`
Modules = nn.Module | Iterable[nn.Module]


def cosine_decay(first: float, last: float, t: int, end: int) -> float:
    """Return a fraction that falls by half a cosine, from `first` at call 0 to `last` at call `end`."""
    return last + (first - last) * (1 + math.cos(math.pi * t / end)) / 2


class DynamicSparsity(TrainingMethod):
    """A method that changes the layouts of block-sparse modules during training; see `TrainingMethod` for the loop.

    Random choices depend only on the seed and the number of calls. These two are its state in a checkpoint. See `SET`
    for the arguments.

    A weight that is frozen (`values.requires_grad` False) when `step` is called keeps its layout, since new blocks in
    it would never be trained. A `SparsityWarning` lists such weights once.

    Raises:
        BlockSparseError: a model without block-sparse weights, or with one that stores no block; nothing is left after
            `skip`; all weights are frozen, or one of the layers passed as `modules` is; a name that the model does not
            have; an optimizer that lacks one of the weights; numbers out of range; DistributedDataParallel around a
            tensor-parallel model.
    """

    begin = 0
    end: int | None = None
    """The first call of `step` that changes nothing; None for no such call."""
    keep_lines: bool
    ramp = 1

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
        if _is_list(modules):
            modules = list(modules)  # type: ignore[arg-type]
        self.modules = find_modules(modules, skip)
        parameters: set[Tensor] = set()
        self._roots = [modules] if isinstance(modules, nn.Module) else modules
        self._reshard()
        for name, module in self.modules.items():
            weight = handle_of(module)
            if not weight.parameter.requires_grad:
                self._refuse_frozen_layer(name, module)
            else:
                check_optimizer(optimizer, weight.parameter, f"{name}.values" if name else "values")
            if weight.layout.nnz == 0:
                raise BlockSparseError.expected(name or "modules", "a layer with connections", repr(weight.layout))
            if weight.parameter in parameters:
                expected = "a parameter of one module (untie them, or name all but one in skip)"
                raise BlockSparseError.expected(f"{name}.values", expected, "one that others share")
            parameters.add(weight.parameter)
        if any(isinstance(root, DistributedDataParallel) for root in self._roots):
            refuse_tensor_parallel_in_ddp(self.modules.values())
        check_on_layout_change(on_layout_change)
        self.optimizer, self.on_layout_change = optimizer, on_layout_change
        self.every, self.seed = integer("every", every, 1), integer("seed", seed, 0)
        self._frozen: set[str] = set()
        if not any(handle_of(module).parameter.requires_grad for module in self.modules.values()):
            expected = "weights that are trained, not all of them frozen: layer.requires_grad_(True) first"
            raise BlockSparseError.expected("modules", expected, "frozen ones only")
        self._trained_weights()
        self._watch_updates()

    def _named_parameters(self) -> dict[str, Tensor]:
        return {f"{name}.values".lstrip("."): handle_of(module).parameter for name, module in self.modules.items()}

    def _step(self) -> bool:
        """Change the layouts if this call is due, and return whether it was."""
        due = self._due(self.calls)
        if due:
            self._reshard()
            for _, name, weight in self._trained_weights():  # before the first layer changes
                check_optimizer(self.optimizer, weight.parameter, f"{name}.values".lstrip("."))
            with ExitStack() as stack:  # norms and gradients are compared in float32
                for device in {parameter.device for parameter in self._named_parameters().values()}:
                    stack.enter_context(without_autocast(device))
                self._change_layouts()
            self._check_agreement()
        return due

    def _check_agreement(self) -> None:
        """Raise a BlockSparseError on all processes that train the same weights unless their layouts are equal."""
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
        """Free the parameters that FSDP2 has gathered."""
        for root in self._roots:
            reshard(root)

    def _due(self, call: int) -> bool:
        """Return whether this call changes layouts."""
        return call % self.every == 0 and self.begin <= call and (self.end is None or call < self.end)

    def _warn_if_never_due(self) -> None:
        """Warn if `end` comes before the first change, but for a change in each call: that is a run of one epoch."""
        first = math.ceil(max(self.begin, 1) / self.every) * self.every
        if self.every > 1 and self.end is not None and 0 < self.end <= first:
            warn_user(
                f"{type(self).__name__} will never change a layout: the first change would be in step {first} "
                f"(every={self.every}), and end={self.end}. Choose a smaller `every` or a larger `end`."
            )

    def _ramp_factor(self, t: int) -> float:
        """Return the factor of the fraction in call t, which rises over the first `ramp` changes."""
        return min(1.0, max(1, t // self.every) / self.ramp)

    def _change_layouts(self) -> None:
        """Change the layouts of all weights that are not frozen."""
        raise NotImplementedError

    def _trained_weights(self) -> Iterator[tuple[int, str, WeightHandle]]:
        """Return index, name and weight of each module that is not frozen now; warn of newly frozen ones."""
        weights = [(i, name, handle_of(module)) for i, (name, module) in enumerate(self.modules.items())]
        frozen = {name for _, name, weight in weights if not weight.parameter.requires_grad}
        if newly_frozen := sorted(frozen - self._frozen):
            values = ", ".join(f"{name}.values".lstrip(".") for name in newly_frozen)
            warn_user(
                f"{type(self).__name__} does not change {values} while frozen: call requires_grad_(True) to change "
                "them too, or name them in skip",
            )
        self._frozen |= frozen
        return (each for each in weights if each[1] not in frozen)

    def _refuse_frozen_layer(self, name: str, module: nn.Module) -> None:
        """Raise a BlockSparseError if a frozen layer was itself passed as `modules`, not a model that contains it."""
        if any(module is root for root in self._roots):
            expected = "a layer that is trained: requires_grad_(True) first, or leave it out"
            raise BlockSparseError.expected(name or "modules", expected, "a frozen one")

    def _generator(self, module: int) -> np.random.Generator:
        """Return the random generator of one module in this call."""
        return np.random.default_rng([self.seed, self.calls, module])

    def _tie_break(self, module: int) -> partial[np.ndarray]:
        """Return the random order of equal blocks of one module in this call, by position."""
        words = np.random.SeedSequence([self.seed, self.calls, module, TIE_BREAK_STREAM]).generate_state(1, np.uint64)
        return partial(hash_positions, seed=int(words[0]))

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"seed": torch.tensor(self.seed, device="cpu")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.seed = int(state["seed"])


def refuse_tensor_parallel_in_ddp(modules: Iterable[BlockSparseModule]) -> None:
    """Raise a BlockSparseError for tensor-parallel weights: their parts change size, buckets of DDP do not."""
    if any(module.part is not None for module in modules):
        expected = "fully_shard (FSDP2) for data parallelism, with tensor parallelism whose parts change their size"
        raise BlockSparseError.expected("model", expected, "DistributedDataParallel, whose buckets keep their sizes")


def find_modules(modules: Modules, skip: Skip = (), argument: str = "modules") -> dict[str, BlockSparseModule]:
    """Return the block-sparse modules in one or several models, by name, without the skipped ones.

    `argument` is what errors call the models.
    """
    is_list = _is_list(modules)
    roots: list[Any] = [*modules] if is_list else [modules]  # type: ignore[misc]
    if not roots:
        raise BlockSparseError.expected(argument, "a model or a list of modules", "an empty list")
    for root in roots:
        if not isinstance(root, nn.Module):
            raise BlockSparseError.expected(argument, "a model or a list of modules", type(root).__name__)
        if not any(isinstance(module, BlockSparseModule) for module in root.modules()):
            raise BlockSparseError.expected(
                argument,
                "one with block-sparse weights",
                f"{type(root).__name__} (blocksparse.sparsify makes them; GradualPruning starts from dense ones)",
                Page.SPARSE_TRAINING,
            )
    whole = nn.ModuleList(roots) if is_list else roots[0]
    skipped_modules, skipped_parameters = find_skipped(whole, skip)
    chosen = {
        name: module
        for name, module in whole.named_modules()
        if isinstance(module, BlockSparseModule)
        and module not in skipped_modules
        and f"{name}.values".lstrip(".") not in skipped_parameters
    }
    if not chosen:
        raise BlockSparseError("skip leaves no block-sparse weight to change: skip fewer modules")
    return chosen


def _is_list(modules: Any) -> bool:
    """Return whether `modules` are several models; a container module is one."""
    return isinstance(modules, Iterable) and not isinstance(modules, nn.Module | Tensor)
