"""Makes a dense model block-sparse in one shot."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..checked import number
from ..errors import MAX_NAMED, BlockSparseError, Page, SparsityWarning
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule
from ..sparsity.calibration.activations import shares
from ..sparsity.calibration.calibrate import Batches, keep
from ..sparsity.calibration.reconstruction import fit
from ..surgery.carry import REASONS
from ..surgery.model_tools import copy_model
from ..surgery.prunable import Skip, Unexpected, skipped, survey
from ..surgery.replace import replace_with_sparse
from .choice import Choice, Criterion, Given, Kept, Layouts
from .sparser import dense_name, make_sparser, stored_weights
from .speed import Example, Speed, checked_tokens

# A module that is measured to gain less than this may be slower the next time.
FASTER = 1.05

# How far the density may be from the one that was asked for without a word, as a part of it.
TOLERANCE = 0.1


@torch.no_grad()
def sparsify(
    model: nn.Module,
    density: float | Mapping[str, float] = 0.1,
    block_size: int | tuple[int, int] = 32,
    *,
    criterion: Criterion | None = None,
    scope: str = "careful",
    skip: Skip = (),
    layouts: Mapping[str, BlockLayout] | None = None,
    force: bool = False,
    tokens: int = 64,
    example: Example | None = None,
    data: Batches | None = None,
    inplace: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Makes a model's weights block-sparse: keeps the blocks with the highest scores and drops the others.

    Linear layers (and what the transformers library calls Conv1D), convolutions without groups, recurrent layers and
    cells, multi-head attention and the experts of mixtures, as Mixtral has them, become modules of `blocksparse.nn`;
    their biases and all else stay. A module that is not measured to be faster stays dense and unpruned, unless it is
    forced; with an example the model as a whole is never slower than before. A `SparsityWarning` says when the density
    is missed, which layers unexpectedly stay as they are, and why; `report` says it of each weight.

    Hooks, attributes, buffers and modules that a user put on a layer go along, and so do attributes and hooks of its
    weight: hooks of the gradient get it as that of the dense weight. A layer that calls something else than its class
    does, or that functions or objects of the model use, stays dense.

    Of a model whose weights are block-sparse already, these become sparser: each keeps the best of its blocks, of the
    size that they have. Where others are still dense, block-sparse ones stay as they are.

    Args:
        model: any module; as it is afterwards, unless `inplace`.
        density: the part of the numbers that is kept in the weights that become block-sparse, above 0 and at most 1;
            or one for each weight by its name, and those without a name stay dense.
        block_size: an int or (rows, columns) of the weights `[out, in]`; what is no multiple of it is padded.
        criterion: the score of a block: "l2" (its l2 norm for each number in it), "magnitude" (its mean |w|), "max"
            (its largest |w|), "lamp" (sum w^2 over that of all blocks of the weight that have no less; by default,
            where there are no data); scores `[out_blocks, in_blocks]` by the name of the weight; or a function of the
            name and the weight, padded to whole blocks, that gives them.
        scope: "careful": one threshold over all weights, but each has half of the density for certain, and the best
            block of each row of blocks where that is enough for them; unless forced, a trained weight keeps as many
            more as it takes for no row to lose more than 5 % of its sum of squares. "global": one threshold, which
            weights of small numbers do not reach, unless the criterion is "lamp", which knows no scale. "layer": each
            weight has the density. "erk": densities by `sparsity.erk`. Each weight keeps a block at least.
        skip: what stays dense: modules, or names of modules or weights, or patterns of names as in a shell,
            "encoder.layers.*" say.
        layouts: the blocks to keep by the name of the weight, in place of densities and scores.
        force: whether also what is not faster, or loses much, becomes block-sparse. Nothing is measured then.
        tokens: rows of the inputs to be fast for; positions of the output of a convolution; steps of a recurrent layer.
        example: instead of that, what the model is called with: a tensor, a tuple or list of its arguments, or a dict
            of arguments by name. Each module is then timed on what it gets from it, and the whole model too.
        data: some hundred samples of what the model is called with, in batches: a DataLoader say. Weights, biases and
            the statistics of batch norms are then fitted to what the dense model makes of them, as by
            `sparsity.reconstruct`: the criterion, or the part in a layer's outputs by default, says how many blocks
            each weight keeps, and `reconstruct` which. With `layouts` only the values are fitted.
        inplace: whether the model itself is changed, and not a copy of it.
        optimizer: in place, the one that trains the model: it goes on with the new parameters, with what it has kept.

    Returns:
        The model; in place another object only where the model itself is one such layer.

    Raises:
        BlockSparseError: a density out of range or not possible, a model on the meta device or without a weight that
            can become block-sparse, unknown names, weights or data that are not finite, scores or layouts that do not
            fit, an example or data that the model does not take, an optimizer without `inplace` or without the weights.
            Nothing is changed then.

    Example:
        >>> import torch, blocksparse as bs
        >>> bs.sparsify(torch.nn.Linear(256, 512), density=0.25, force=True)
        Linear(in_features=256, out_features=512, block_size=(32, 32), nnz=32, density=0.25, bias=True)

    Source of "lamp": Lee, Park, Mo, Ahn, Shin, Layer-adaptive sparsity for the magnitude-based pruning (2021).
    """
    checked_tokens(tokens)
    if optimizer is not None and not inplace:
        raise BlockSparseError(
            "optimizer= requires inplace=True; without it, a copy is returned that the optimizer does not train."
        )
    found = survey(model, block_size, skip)  # before the copy: what is refused costs nothing
    weights = {weight.name: weight for weight, reason in found if reason is None}
    reasons = {weight.name: reason for weight, reason in found if reason is not None}
    stored = stored_weights(model, skip) if not weights else {}
    if stored and (layouts is not None or data is not None):
        given = "layouts=" if layouts is not None else "data="
        raise BlockSparseError(
            f"{given} is for dense weights, and all are block-sparse: blocksparse.densify(model) first."
        )
    if stored:
        model, sparser, left = make_sparser(
            model, stored, density, criterion, scope, bounded=not force, inplace=inplace, optimizer=optimizer
        )
        _tell(sparser, left, {}, {})
        return model
    if not weights:
        got = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:MAX_NAMED]) or "none"
        got = f"{type(model).__name__} with {got}"
        raise BlockSparseError.expected("model", "dense weights that can become block-sparse", got, Page.SPARSIFY)
    others = _of_other_density(model, density, skip)
    if inplace and data is not None and not torch.is_inference_mode_enabled():
        _check_writable(model)
    sparse = dict.fromkeys(
        _names_of_sparse(model), "block-sparse already: sparsify its layer alone, or densify it before"
    )
    _check_named("layouts", layouts, sparse | reasons)
    _check_named("density", density, sparse | reasons)
    # 1. Which blocks: `choice.layouts(names)` says it for all weights, or for those that are left.
    batches = None if data is None else keep(data)
    if layouts is not None:
        choice: Kept = Given(weights, layouts)
    elif batches is None:
        choice = Choice(weights, density, "lamp" if criterion is None else criterion, scope, bounded=not force)
    else:
        if criterion is None and not isinstance(density, Mapping):
            criterion = shares(model, batches, weights.values(), number("density", density, 0, 1))
        # Those scores have a floor of their own, and what is lost is fitted.
        scope = "global" if scope == "careful" else scope
        choice = Choice(weights, density, "l2" if criterion is None else criterion, scope)
    reasons |= {name: "no density was given" for name in weights if name not in choice.weights}
    # 2. Which weights.
    kept = choice.layouts(choice.weights) if force else _fast(choice, Speed(model, tokens, example), reasons)
    # 3. The model.
    if inplace and batches is None:
        model = replace_with_sparse(model, kept, optimizer)
    else:  # also in place a copy is fitted, so that nothing is changed if that fails
        made = copy_model(model, otherwise="inplace=True without data=")
        if batches is not None:
            kept = _fitted(made, model, batches, kept, choose=layouts is None)
        model = _taking(model, made, kept, optimizer) if inplace else replace_with_sparse(made, kept)
    for name, reason in reasons.items():
        module, _, parameter = name.rpartition(".")
        model.get_submodule(module).__dict__.setdefault(REASONS, {})[parameter] = reason
    untold: dict[str, str] = {name: reason for name, reason in reasons.items() if isinstance(reason, Unexpected)}
    if layouts is None and not isinstance(density, Mapping):
        untold |= others
    _tell(choice, kept, untold, reasons)
    return model


def _check_named(what: str, named: Any, reasons: Mapping[str, str]) -> None:
    """Raises a BlockSparseError where something is given for a weight that stays dense."""
    for name in named if isinstance(named, Mapping) else ():
        if name in reasons:
            raise BlockSparseError.expected(what, f"weights that can be block-sparse, not {name}", reasons[name])


def _names_of_sparse(model: nn.Module) -> list[str]:
    """The names that the block-sparse weights of a model have where they are dense."""
    return [dense_name(name, each) for name, each in model.named_modules() if isinstance(each, BlockSparseModule)]


def _of_other_density(model: nn.Module, density: Any, skip: Skip) -> dict[str, str]:
    """The weights that are block-sparse already, with another density than is asked for; each with its density."""
    if isinstance(density, bool) or not isinstance(density, int | float):
        return {}
    left, _ = skipped(model, skip)
    return {
        name: f"block-sparse already, with density {module.layout.density:.3g}: sparsify it alone, or densify it before"
        for name, module in model.named_modules()
        if isinstance(module, BlockSparseModule)
        and module not in left
        and abs(module.layout.density - density) > TOLERANCE * density + 0.5 / math.prod(module.layout.grid)
    }


def _fitted(made: nn.Module, model: nn.Module, batches: list[Any], layouts: Layouts, choose: bool) -> Layouts:
    """Fits the weights of a copy of a model to its outputs; returns the layouts."""
    fitted, errors = fit(made, model, batches, layouts, choose=choose)
    if len(errors) < len(fitted):
        names = ", ".join([name for name in fitted if name not in errors][:MAX_NAMED])
        why = "no batch does, or not where it can be seen; they keep their largest blocks"
        warnings.warn(f"sparsify: the data do not show what reaches {names}: {why}", SparsityWarning, stacklevel=5)
    return fitted


def _check_writable(model: nn.Module) -> None:
    """Raises a BlockSparseError where values of a model cannot be changed in place."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            expected = "tensors that can be changed, with data and inplace=True"
            raise BlockSparseError.expected("model", expected, f"{name}, made under torch.inference_mode()")


def _taking(
    model: nn.Module, fitted: nn.Module, layouts: Layouts, optimizer: torch.optim.Optimizer | None
) -> nn.Module:
    """The model with the values of its fitted copy, which gets its own, and block-sparse; as it was if that fails."""
    pairs = zip((*model.parameters(), *model.buffers()), (*fitted.parameters(), *fitted.buffers()), strict=True)
    changed = [(mine, new) for mine, new in pairs if not mine.is_meta and not torch.equal(mine, new)]
    done = []
    try:
        for mine, new in changed:
            old = mine.clone()
            mine.copy_(new)
            done.append((mine, new.copy_(old)))
        return replace_with_sparse(model, layouts, optimizer)
    except BaseException:
        for mine, old in done:
            mine.copy_(old)
        raise


# -- speed decides -----------------------------------------------------------------------------------------------


def _fast(choice: Kept, speed: Speed, reasons: dict[str, str]) -> Layouts:
    """The layouts of the weights that are faster with them, module by module and then all together."""
    names = list(choice.weights)
    speed.record(weight.module for weight in choice.weights.values())
    while names:
        every = choice.layouts(names)
        layouts = {name: layout for name, layout in every.items() if layout.density < 1}
        full = {name: choice.why(name) or "keeps all of its blocks" for name in every if name not in layouts}
        ratios, slower = _speed_ups(choice, layouts, speed)
        if not slower:
            whole = speed.of_model(layouts) if layouts else None
            if whole is None or whole >= 1:
                reasons |= full
                return layouts
            # Those that gain least go first, by halves, so that few measurements are enough.
            bound = statistics.median_low(set(ratios.values()))
            slower = {
                name: f"{ratio:.3g} times as fast block-sparse by itself, but then the model {whole:.2g} times"
                for name, ratio in ratios.items()
                if ratio <= bound
            }
        reasons |= slower
        names = [name for name in names if name not in slower]
    return {}


def _speed_ups(choice: Kept, layouts: Layouts, speed: Speed) -> tuple[dict[str, float], dict[str, str]]:
    """The speed-ups of the weights' modules, and why some of them are better left dense."""
    weights = choice.weights
    of_module: dict[nn.Module, list[str]] = {}
    for name in layouts:
        of_module.setdefault(weights[name].module, []).append(name)
    ratios: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for names in of_module.values():
        try:
            ratio = speed.of_weights([(weights[name], layouts[name]) for name in names])
        except BlockSparseError as error:
            reasons |= dict.fromkeys(names, f"does not run block-sparse here: {error}")
            continue
        for name in names:
            ratios[name], layout = ratio, layouts[name]
            if ratio < FASTER:
                rows, columns = layout.block_shape
                how = f"density {layout.density:.2g}, blocks of {rows} x {columns}, {speed.inputs}"
                how += "; times varied: is the machine busy?" if speed.is_busy else ""
                because = f"; {choice.why(name)}" if choice.why(name) else ""
                reasons[name] = f"{ratio:.3g} times as fast block-sparse ({how}){because}"
    return ratios, reasons


# -- what is told ------------------------------------------------------------------------------------------------


def _tell(choice: Kept, kept: Layouts, untold: Mapping[str, str], reasons: Mapping[str, str]) -> None:
    """Warns where the density is another one than was asked for, nothing became sparse, or some stay unexpectedly."""
    reached = choice.density_of(kept)
    # Of padding: a weight of 32 x 1 x 5 in blocks of 32 x 32 has 32 times as many numbers as it had.
    dense = {name: weight.tensor.numel() for name, weight in choice.weights.items()}
    added = {name: choice.weights[name].stored(layout) - dense[name] for name, layout in kept.items()}
    advice = "smaller blocks, or skip=, save memory"
    larger = {
        name: f"{number + dense[name]:,} numbers stored, {dense[name]:,} when dense: {advice}"
        for name, number in added.items()
        if number > TOLERANCE * sum(dense.values()) and choice.asked < 1
    }
    if not kept:
        head = "nothing became block-sparse"
    elif abs(reached - choice.asked) > TOLERANCE * choice.asked + choice.half_a_block:
        head = f"the density is {reached:.2g}, not {choice.asked:.2g}"
    elif untold:
        head = "some layers stay as they are"
    elif larger:
        head = "the blocks of some weights are larger than the weights"
    else:
        return
    denser = {name: choice.why(name) for name, layout in kept.items() if layout.density > choice.asked}
    why = {name: reason for name, reason in reasons.items() if name in choice.weights} | dict(untold)
    why |= {name: reason for name, reason in denser.items() if reason} | larger
    lines = [f"{name}: {reason}" for name, reason in list(why.items())[:MAX_NAMED]]
    if len(why) > MAX_NAMED:
        lines.append(f"and {len(why) - MAX_NAMED} more, as bs.report(model) says")
    if not why:
        lines = ["each weight keeps one block at least; a smaller block_size comes closer"]
    if any(choice.why(name) for name in why):
        lines.append("force=True takes the density all the same, for a training that goes on")
    lines.append(f"see {Page.SPARSIFY}")
    warnings.warn("\n  ".join([f"sparsify: {head}", *lines]), SparsityWarning, stacklevel=4)
