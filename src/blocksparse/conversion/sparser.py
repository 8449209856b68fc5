"""Makes block-sparse weights of a model sparser: keeps some of the blocks that they store."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..convert import block_coordinates, to_dense
from ..errors import MAX_NAMED, BlockSparseError, format_reasons
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule, Weight, check_parameters
from ..nn.weight_norm import WeightNorm
from ..surgery.blocks import Blocks
from ..surgery.model_tools import copy_model
from ..surgery.optimizer import check_optimizer, trained_names
from ..surgery.prunable import Prunable, Skip, find_skipped
from ..surgery.rewire import rewire
from .selection import Criterion, Plan, ScoredSelection


class StoredWeight(NamedTuple):
    """A block-sparse weight: the name of its module, its layout, and the dense weight with zeros, to select from."""

    module: str
    layout: BlockLayout
    dense: Prunable


def dense_name(name: str, module: BlockSparseModule) -> str:
    """Return the name that a block-sparse module's weight has in the dense model."""
    return name if isinstance(module, Weight) else f"{name}.weight".lstrip(".")


def owner_of(name: str, module: BlockSparseModule, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module that is called, one of the named `modules`: the owner of a weight among several, or itself."""
    return modules[name.rpartition(".")[0]] if isinstance(module, Weight) else module


def stored_weights(model: nn.Module, skip: Skip) -> dict[str, StoredWeight]:
    """Return a model's block-sparse weights by their names in the dense model.

    Raises:
        BlockSparseError: values that are computed from others, tied, or stored by several processes together.
    """
    skipped_modules, skipped_names = find_skipped(model, skip)
    skipped_modules |= {module.module for module in model.modules() if isinstance(module, WeightNorm)}
    owners: dict[Tensor, str] = {}
    stored = {}
    for name, module in model.named_modules():
        if not isinstance(module, BlockSparseModule) or module in skipped_modules:
            continue
        check_parameters(module, name or "model")
        weight = dense_name(name, module)
        if f"{name}.values".lstrip(".") in skipped_names or weight in skipped_names:
            continue
        if module.part is not None or hasattr(module.values, "device_mesh"):
            expected = "a weight that this process stores alone (RigL and SET change sharded ones)"
            raise BlockSparseError.expected(weight, expected, "a sharded weight")
        if (other := owners.setdefault(module.values, weight)) != weight:
            raise BlockSparseError.expected(weight, "values of its own (untie them, or skip both)", f"those of {other}")
        stored[weight] = StoredWeight(name, module.layout, _as_dense(weight, module))
    return stored


def drop_blocks(
    model: nn.Module,
    stored: dict[str, StoredWeight],
    density: Any,
    criterion: Criterion | None,
    scope: str,
    *,
    limit_loss: bool,
    inplace: bool,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[nn.Module, Plan]:
    """Drop blocks of a model's block-sparse weights; the parameters stay the same objects.

    Args are those of `sparsify`; `limit_loss` is that of `ScoredSelection`.

    Returns:
        The model or its copy, and the plan with the layouts.

    Raises:
        BlockSparseError: no block would be dropped, or `optimizer` cannot follow. Nothing is changed then.
    """
    weights = {name: weight.dense for name, weight in stored.items()}
    selection = ScoredSelection(weights, density, "lamp" if criterion is None else criterion, scope, limit_loss)
    for name, scores in selection.scores.items():
        absent = ~stored[name].layout.mask().to(scores.device)
        selection.scores[name] = scores.masked_fill(absent, -torch.inf)  # absent blocks rank last
    for name, value in density.items() if isinstance(density, Mapping) else ():
        layout = stored[name].layout
        if value > layout.density + 0.5 / math.prod(layout.grid):
            expected = (
                f"{layout.density:.3g} at most, as it has now (blocksparse.densify(model) stores all blocks again)"
            )
            raise BlockSparseError.expected(f"density of {name}", expected, value)
    layouts = {
        name: BlockLayout(layout.mask() & stored[name].layout.mask(), layout.block_shape)
        for name, layout in selection.layouts(selection.weights).items()
    }
    if all(layout == stored[name].layout for name, layout in layouts.items()):
        stored_densities = {name: stored[name].layout.density for name in list(layouts)[:MAX_NAMED]}
        got = f"{density} for " + ", ".join(f"{name} {each:.3g}" for name, each in stored_densities.items())
        expected = (
            "a density below that of the block-sparse weights (blocksparse.densify(model) makes them dense again)"
        )
        reasons = {name: f"it {excess}" for name in layouts if (excess := selection.excess(name))}
        if reasons and density < max(stored_densities.values()):
            expected = "weights that can lose blocks (force=True drops them; then train)"
            got = "\n  ".join([got, *format_reasons(reasons)])
        raise BlockSparseError.expected("density", expected, got)
    model = model if inplace else copy_model(model, otherwise="inplace=True")
    modules: dict[str, Any] = {name: model.get_submodule(stored[name].module) for name in layouts}
    parameters = {name: module.values for name, module in modules.items()}
    trained = set() if optimizer is None else trained_names(optimizer, parameters)
    for name in trained:  # before anything is changed
        check_optimizer(optimizer, modules[name].values, name)
    for name, module in modules.items():
        rows, columns = block_coordinates(stored[name].layout, torch.device("cpu"))
        dropped = (~layouts[name].mask()[rows, columns]).nonzero()[:, 0]
        if len(dropped):
            rewire(module, dropped, [], [], optimizer if name in trained else None)
    unchanged = {name: "stores no more blocks" for name, layout in layouts.items() if layout == stored[name].layout}
    return model, Plan(selection, layouts, unchanged)


def _as_dense(name: str, module: Any) -> Prunable:
    """Return a block-sparse weight as a dense one with zeros, in whole blocks."""
    dense = nn.Module()
    dense.weight = nn.Parameter(to_dense(module.values.detach(), module.layout), requires_grad=False)
    return Prunable(name, dense, "weight", Blocks(dense.weight.shape, module.layout.block_shape))
