"""Tensor parallelism of a model by a plan, with cuts that the layers share and that balance their blocks."""

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
from .slicing import Layer, Units, sliceable
from .styles import DENSE, SAME, ColwiseParallel, RowwiseParallel, facts_of, group_of, naming


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """`torch.distributed.tensor.parallel.parallelize_module` with cuts that balance the stored blocks.

    Layers that share hidden features are to be cut at the same places. PyTorch applies a plan layer by layer, and so
    block-sparse ones fall back to ranges of as many features each. Here, in the order in which the model has its
    modules, the layers with ColwiseParallel since the last one with RowwiseParallel, and the next one with
    RowwiseParallel, which reads what they write, get one `Cut`, of the stored blocks of all of them, before PyTorch's
    function applies the plan.

    The parts are ranges of features, unless all layers of a group have a `multiple`: how many features stay together,
    1 where only elementwise functions lie between, `head_dim` for attention. Then any units make a part, which balances
    better.

    Args:
        module, device_mesh, parallelize_plan, src_data_rank: as PyTorch's function has them. Names may have wildcards.

    Raises:
        BlockSparseError: on every process, with the layer's name, before anything is cut: layers of a group whose
            features do not go together; a parameter that two modules share; layouts, dtypes, biases or plans that
            differ; what the styles raise.

    >>> plan = {"layers.*.fc1": ColwiseParallel(multiple=1), "layers.*.fc2": RowwiseParallel(multiple=1)}
    >>> model = parallelize_module(model, mesh["tp"], plan)  # doctest: +SKIP
    """
    if isinstance(parallelize_plan, dict) and device_mesh is not None:
        parallelize_plan = _agreed_plan(module, device_mesh, parallelize_plan)
    return tensor.parallel.parallelize_module(module, device_mesh, parallelize_plan, src_data_rank=src_data_rank)


def _agreed_plan(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """The balanced plan, once all processes have found the same one, and that it can be applied."""
    with agreed(group_of(mesh), SAME) as facts:
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
            with naming(name):
                style.planned(modules[name], mesh)
    return new


def _check_ties(model: nn.Module, cut: Iterable[str]) -> None:
    """Raises a BlockSparseError where a layer that is to be cut shares a parameter."""
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
    """The plan for each single layer, with a cut for each group of layers that share features."""
    names = [name for name, _ in model.named_modules()]
    # Of names that several entries match, PyTorch applies all.
    chosen = {key: [name for name in names if _matches(name, key)] for key in plan}
    new = {name: style for key, style in plan.items() for name in chosen[key]}
    new |= {key: style for key, style in plan.items() if not chosen[key]}  # of which PyTorch warns
    group: dict[str, ColwiseParallel | RowwiseParallel] = {}
    for name in names:
        style = new.get(name)
        if not isinstance(style, ColwiseParallel | RowwiseParallel) or not style.shared or style.cut is not None:
            continue
        try:
            sliceable(model.get_submodule(name), style.axis)
        except BlockSparseError:  # PyTorch's, or one that the style refuses by name
            continue
        group[name] = style
        if isinstance(style, RowwiseParallel):
            cut = _shared_cut(model, ranks, group)
            new |= {each: style.with_cut(cut) for each, style in group.items()}
            group = {}
    # In the order of the model, for a plan that was written in another order on each process.
    return {name: new[name] for name in [*(each for each in names if each in new), *sorted(new.keys() - set(names))]}


def _matches(name: str, key: str) -> bool:
    parts, tokens = name.split("."), key.split(".")
    return len(parts) == len(tokens) and all(map(fnmatch, parts, tokens))


def _shared_cut(model: nn.Module, ranks: int, group: Mapping[str, ColwiseParallel | RowwiseParallel]) -> Cut:
    layers: dict[str, Layer | Units] = {
        name: sliceable(model.get_submodule(name), style.axis) for name, style in group.items()
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
    stored = [layer.stored(unit * (layer.features // features)) for layer in layers.values()]
    in_order = any(style.multiple is None for style in group.values())
    with naming(", ".join(layers)):
        return Cut.balanced(features, unit, ranks, np.concatenate(stored), in_order)
