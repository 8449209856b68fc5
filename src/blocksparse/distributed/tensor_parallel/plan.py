"""Tensor parallelism of a model by a plan, with cuts that layers share and that balance their blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from types import NoneType

import numpy as np
from torch import nn
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...errors import BlockSparseError
from ...surgery.agreement import agreed, digest
from .cut import Cut
from .shardable import ShardableLayer, ShardableLSTM, shardable
from .styles import COMPARED, DENSE, ColwiseParallel, RowwiseParallel, facts_of, group_of, prefix_errors


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Apply `torch.distributed.tensor.parallel.parallelize_module` with cuts that balance the stored blocks.

    Layers that share hidden features need the same cut. PyTorch applies a plan layer by layer, so block-sparse layers
    then fall back to ranges of equally many features. This function groups layers first, in the order of the model's
    modules: a layer with RowwiseParallel ends a group, which has the layers with ColwiseParallel before it. All layers
    of a group get one `Cut`, which balances their blocks together.

    The parts of a cut are ranges of features unless all layers of the group have a `multiple`, the number of features
    that stay together: 1 if only elementwise functions lie between the layers, `head_dim` for attention. Then a part
    may consist of any units, which balances better.

    Args:
        module, device_mesh, parallelize_plan, src_data_rank: as in PyTorch's function. Names may have wildcards.

    Raises:
        BlockSparseError: on every process, with the layer's name, before anything is sharded: features of a group that
            do not fit each other; a parameter that two modules share; layouts, dtypes, biases or plans that differ
            between processes; and the errors of the styles.

    >>> plan = {"layers.*.fc1": ColwiseParallel(multiple=1), "layers.*.fc2": RowwiseParallel(multiple=1)}
    >>> model = parallelize_module(model, mesh["tp"], plan)  # doctest: +SKIP
    """
    if isinstance(parallelize_plan, dict) and device_mesh is not None:
        parallelize_plan = _agreed_plan(module, device_mesh, parallelize_plan)
    return tensor.parallel.parallelize_module(module, device_mesh, parallelize_plan, src_data_rank=src_data_rank)


def _agreed_plan(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return the balanced plan, after a check that all processes have the same one and can apply it."""
    with agreed(group_of(mesh), COMPARED) as facts:
        new = balanced_plan(model, mesh.size(), plan)
        modules = dict(model.named_modules())
        ours: dict[str, ColwiseParallel | RowwiseParallel] = {
            name: style
            for name, style in new.items()
            if isinstance(style, ColwiseParallel | RowwiseParallel)
            and not isinstance(modules.get(name), DENSE | NoneType)
        }
        _check_ties(model, ours)
        for name, style in new.items():
            label, own = name or "the model", ours.get(name)
            if name in modules:
                facts |= facts_of(label, modules[name])
            options = own and (own.input, own.output, own.use_local_output, own.multiple)
            facts[f"{label} (style)"] = 0, digest(type(style).__name__, options)
        for name, style in ours.items():
            with prefix_errors(name):
                style.checked_cut(modules[name], mesh)
    return new


def _check_ties(model: nn.Module, cut: Iterable[str]) -> None:
    """Raise a BlockSparseError if a layer that will be cut shares a parameter with another module."""
    owners: defaultdict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].append(f"{name}.{key}".lstrip("."))
    for names in owners.values():
        of_cut = (not each or name.startswith(f"{each}.") for name in names for each in cut)
        if len(names) > 1 and any(of_cut):
            expected = "a parameter of one module: clone it before parallelize_module"
            raise BlockSparseError.expected(names[0], expected, f"one that is {', '.join(names[1:])} too")


def balanced_plan(model: nn.Module, ranks: int, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return a plan with each layer's own name, and one cut for each group of layers that share features."""
    names = [name for name, _ in model.named_modules()]
    # PyTorch applies all entries that match a name; the last one decides here.
    chosen = {key: [name for name in names if _matches(name, key)] for key in plan}
    new = {name: style for key, style in plan.items() for name in chosen[key]}
    new |= {key: style for key, style in plan.items() if not chosen[key]}  # PyTorch warns of these
    group: dict[str, ColwiseParallel | RowwiseParallel] = {}
    for name in names:
        style = new.get(name)
        if not isinstance(style, ColwiseParallel | RowwiseParallel) or not style.is_shared or style.cut is not None:
            continue
        try:
            shardable(model.get_submodule(name), style.axis)
        except BlockSparseError:  # a dense layer, or one that the style refuses with its name
            continue
        group[name] = style
        if isinstance(style, RowwiseParallel):
            cut = _shared_cut(model, ranks, group)
            new |= {each: style.with_cut(cut) for each, style in group.items()}
            group = {}
    # The order of the model is the same on all processes; that of the plan may not be.
    return {name: new[name] for name in [*(each for each in names if each in new), *sorted(new.keys() - set(names))]}


def _matches(name: str, key: str) -> bool:
    """Return whether a module's name matches a pattern of a plan, part by part."""
    parts, tokens = name.split("."), key.split(".")
    return len(parts) == len(tokens) and all(map(fnmatch, parts, tokens))


def _shared_cut(model: nn.Module, ranks: int, group: Mapping[str, ColwiseParallel | RowwiseParallel]) -> Cut:
    """Return the cut of a group of layers, given by name with their styles."""
    layers: dict[str, ShardableLayer | ShardableLSTM] = {
        name: shardable(model.get_submodule(name), style.axis) for name, style in group.items()
    }
    features = min(layer.features for layer in layers.values())
    unit = 1
    for name, layer in layers.items():
        ratio, rest = divmod(layer.features, features)
        if rest:
            have = ", ".join(f"{each} with {other.features}" for each, other in layers.items())
            expected = "layers with as many cut features, or multiples: give others a `cut`"
            raise BlockSparseError.expected(f"the group of {name}", expected, have)
        together = math.lcm(layer.block, group[name].multiple or 1)
        unit = math.lcm(unit, together // math.gcd(together, ratio))
    stored = [layer.stored_per_unit(unit * (layer.features // features)) for layer in layers.values()]
    in_order = any(style.multiple is None for style in group.values())
    with prefix_errors(", ".join(layers)):
        return Cut.balanced(features, unit, ranks, np.concatenate(stored), in_order)
