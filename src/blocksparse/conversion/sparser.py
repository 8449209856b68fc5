"""Makes block-sparse weights of a model sparser: keeps some of the blocks that they store."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..convert import block_coordinates, to_dense
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule, Weight, check_parameters
from ..nn.weight_norm import WeightNorm
from ..surgery.blocks import Blocks
from ..surgery.model_tools import copy_model
from ..surgery.optimizer import check_optimizer, has_parameter
from ..surgery.prunable import Prunable, Skip, skipped
from ..surgery.rewire import rewire
from .choice import Choice, Criterion, Layouts


class StoredWeight(NamedTuple):
    """A block-sparse weight of a model: the name of its module, and the dense weight with zeros, to choose from."""

    module: str
    layout: BlockLayout
    dense: Prunable


def dense_name(name: str, module: BlockSparseModule) -> str:
    """The name that the weight of a block-sparse module has where it is dense."""
    return name if isinstance(module, Weight) else f"{name}.weight".lstrip(".")


def stored_weights(model: nn.Module, skip: Skip) -> dict[str, StoredWeight]:
    """The block-sparse weights of a model by the names that they have where they are dense, but for those to skip.

    Raises:
        BlockSparseError: values that are computed from others, tied, or stored by several processes together.
    """
    left, names = skipped(model, skip)
    left |= {module.module for module in model.modules() if isinstance(module, WeightNorm)}
    owners: dict[Tensor, str] = {}
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, BlockSparseModule) or module in left:
            continue
        check_parameters(module, name or "model")
        weight = dense_name(name, module)
        if f"{name}.values".lstrip(".") in names or weight in names:
            continue
        if module.part is not None or hasattr(module.values, "device_mesh"):
            expected = "a weight that this process has whole (RigL and SET change sharded ones)"
            raise BlockSparseError.expected(weight, expected, "one that several processes store")
        if (other := owners.setdefault(module.values, weight)) != weight:
            raise BlockSparseError.expected(weight, "values of its own (untie them, or skip both)", f"those of {other}")
        found[weight] = StoredWeight(name, module.layout, _dense_of(weight, module))
    return found


def make_sparser(
    model: nn.Module,
    stored: dict[str, StoredWeight],
    density: Any,
    criterion: Criterion | None,
    scope: str,
    *,
    bounded: bool,
    inplace: bool,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[nn.Module, Choice, Layouts]:
    """Drops blocks of a model's block-sparse weights; the parameters stay the same objects.

    Returns:
        The model, or its copy; what chose, and the layouts by the name of the weight.
    """
    choice = Choice({name: each.dense for name, each in stored.items()}, density, criterion or "lamp", scope, bounded)
    for name, scores in choice.scores.items():
        absent = ~stored[name].layout.mask().to(scores.device)
        choice.scores[name] = scores.masked_fill(absent, float(scores.min()) - 1)  # they come last
    kept = {
        name: BlockLayout(layout.mask() & stored[name].layout.mask(), layout.block_shape)
        for name, layout in choice.layouts(choice.weights).items()
    }
    if all(layout == stored[name].layout for name, layout in kept.items()):
        had = ", ".join(f"{name} {stored[name].layout.density:.3g}" for name in list(kept)[:6])
        expected = (
            "a density below that of the block-sparse weights (blocksparse.densify(model) makes them dense again)"
        )
        raise BlockSparseError.expected("density", expected, f"{density} for {had}")
    model = model if inplace else copy_model(model, otherwise="inplace=True")
    modules: dict[str, Any] = {name: model.get_submodule(stored[name].module) for name in kept}
    trained = {name for name in kept if optimizer is not None and has_parameter(optimizer, modules[name].values)}
    if optimizer is not None and not trained:
        what = f"one that has parameters of the model, {next(iter(kept))} say"
        raise BlockSparseError.expected("optimizer", what, type(optimizer).__name__)
    for name in trained:  # before anything is changed
        check_optimizer(optimizer, modules[name].values, name)
    for name, module in modules.items():
        rows, columns = block_coordinates(stored[name].layout, torch.device("cpu"))
        dropped = (~kept[name].mask()[rows, columns]).nonzero()[:, 0]
        if len(dropped):
            rewire(module, dropped, [], [], optimizer if name in trained else None)
    return model, choice, kept


def _dense_of(name: str, module: Any) -> Prunable:
    """A weight, dense with zeros and in whole blocks."""
    values, layout = module.values.detach(), module.layout
    dense = nn.Module()
    dense.weight = nn.Parameter(to_dense(values, layout), requires_grad=False)
    return Prunable(name, dense, "weight", Blocks(dense.weight.shape, layout.block_shape))
