"""Makes a dense model block-sparse in one shot: surveys its weights, selects blocks, fits values, replaces layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..checked import check_model, checked_block, positive_fraction
from ..errors import MAX_NAMED, BlockSparseError, Page, format_reasons, warn_user
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule
from ..sparsity.calibration.activations import energy_shares
from ..sparsity.calibration.calibrate import Batches, Stop, collect_batches, never
from ..sparsity.calibration.reconstruction import fit
from ..sparsity.feature_order import reorder_features
from ..surgery.carry import record_reasons
from ..surgery.model_tools import copy_model
from ..surgery.optimizer import check_optimizer_is_inplace
from ..surgery.prunable import Prunable, Skip, Unexpected, find_skipped, skip_by_name, survey
from ..surgery.replace import replace_with_sparse
from .padding import leave_larger_dense, smaller_than_a_block, weights_with_large_blocks
from .selection import Criterion, FixedSelection, Layouts, Plan, ScoredSelection, Selection, padded_size
from .sparser import dense_name, drop_blocks, stored_weights
from .speed import KEEPS_ALL, Example, Speed, checked_tokens, keep_faster
from .zeros import BLOCK_SIZES, BlockSizes, layouts_of_zeros

# A warning reports densities that miss the target by more than this fraction of it.
DENSITY_TOLERANCE = 0.1

SPARSE_ALREADY = "it is block-sparse already: sparsify its layer alone, or densify it first"


@torch.no_grad()
def sparsify(
    model: nn.Module,
    density: float | Mapping[str, float] = 0.1,
    block_size: BlockSizes | None = None,
    *,
    keep: str | None = None,
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
    """Make a model's weights block-sparse: keep the blocks with the highest scores and drop the others.

    Linear layers (and Conv1D of the transformers library), convolutions without groups, recurrent layers and cells,
    multi-head attention, and the experts of mixtures like Mixtral's become modules of `blocksparse.nn`. Biases and all
    else stay. Without `force`, modules that are not measurably faster stay dense and unpruned; with an example, and
    without `keep`, the model as a whole never gets slower. A `SparsityWarning` reports a missed density and layers that
    unexpectedly stay dense; `report` explains each weight.

    Hooks, attributes, buffers and modules that a user added to a layer move to the new layer, and so do attributes and
    hooks of its weight: gradient hooks get the gradient in the dense weight's shape. A layer stays dense if its forward
    was replaced, or if functions or objects of the model use it directly.

    If all weights are block-sparse already, each keeps the best of its own blocks. If some are still dense, the
    block-sparse ones stay as they are.

    Args:
        model: any module; it stays as it is unless `inplace`.
        density: fraction of the parameters to keep in weights that become block-sparse, above 0 and at most 1 (default
            0.1). A weight that keeps all of its blocks counts too, and stays dense unless `force`. A dict gives the
            density of each weight by its name or that of a module around it; others stay dense.
        block_size: an int or (rows, columns) of the weights `[out, in]` (default 32); other sizes are padded.
        keep: "nonzero" if the weights were pruned: blocks with a nonzero value are kept, instead of densities and
            scores, and outputs stay equal. `block_size` may then be a list to choose from (default 32, 16, 8, 4, 1):
            each weight gets the fastest size or, with `force`, the one that takes the least memory.
        criterion: the score of a block.
            "lamp" (default without data): its squared norm / the sum over all blocks of the weight whose squared norm
            is no smaller.
            "l2": its l2 norm per parameter.
            "magnitude": mean |w|.
            "max": largest |w|.
            A dict gives scores `[out_blocks, in_blocks]` by name of the weight. A function returns them given the name
            and the weight, padded to whole blocks.
        scope: the blocks that compete. Each weight keeps at least one block.
            "careful" (default): one threshold for all weights, but each keeps at least half of the density, and first
            the best block of each row of blocks. Unless forced, a trained weight also keeps enough blocks to preserve
            95 % of each row's squared norm.
            "global": one threshold for all weights. Weights of small values may keep only one block, except with
            "lamp", which does not depend on scale.
            "layer": each weight has the density.
            "erk": densities by `sparsity.erk`.
        skip: what stays dense: modules, names of modules or weights, or shell patterns such as "encoder.layers.*".
        layouts: the blocks to keep by name of the weight, instead of densities and scores.
        force: whether to sparsify every layer without timing it, however much it loses. Use it before fine-tuning.
            Unless there are densities by name or layouts, a layer stays dense that padding to whole blocks would make
            much larger, such as a first convolution of 3 channels or an output layer of 10 units.
        tokens: rows of the inputs to time with (default 64), or steps of a recurrent layer; a convolution gets an image
            with 16 times as many output positions.
        example: inputs of the model to time with, instead of `tokens`: a tensor, a tuple or list of arguments, or a
            dict of arguments by name. Each module is timed on the inputs it gets, and so is the whole model.
        data: a few hundred samples in batches, a DataLoader say. Weights, biases and batch-norm statistics are then
            fitted to the dense model's outputs, as by `sparsity.reconstruct`. The criterion (by default the share in a
            layer's outputs) then decides how many blocks a weight keeps, and `reconstruct` decides which. With
            `layouts`, only values are fitted. Hidden features are first reordered where that leaves the outputs as they
            are, as by `sparsity.permute_features`, unless there are `layouts`, given scores, densities by name or an
            optimizer that has taken a step.
        inplace: whether to change the model itself instead of a copy.
        optimizer: with `inplace`, the optimizer that trains the model. It continues with the new parameters, and keeps
            its state.

    Returns:
        The model. In place this is another object only if the model itself is one layer.

    Raises:
        BlockSparseError: a density that is out of range or impossible; a model on the meta device or without a weight
            that can become block-sparse; unknown names; weights or data that are not finite; scores or layouts that do
            not fit; an example or data that the model does not accept; an optimizer without `inplace` or without the
            weights. Nothing is changed then.

    Example:
        >>> import torch, blocksparse as bs
        >>> bs.sparsify(torch.nn.Linear(256, 512), density=0.25, force=True)
        Linear(in_features=256, out_features=512, block_size=(32, 32), nnz=32, density=0.25, bias=True)

    Source of "lamp": Lee, Park, Mo, Ahn, Shin, Layer-adaptive sparsity for the magnitude-based pruning (2021).
    """
    check_optimizer_is_inplace(optimizer, inplace)
    check_model(model)
    skip = skip_by_name(model, skip)
    if keep is not None:
        if keep != "nonzero":
            raise BlockSparseError.expected("keep", '"nonzero", or None to keep blocks by their scores', repr(keep))
        others = {"density": density != 0.1, "criterion": criterion, "scope": scope != "careful",
                  "layouts": layouts is not None, "data": data is not None}  # fmt: skip
        if useless := [argument for argument, is_given in others.items() if is_given]:
            raise BlockSparseError(
                f'{useless[0]}= has no effect with keep="nonzero", which keeps all values: omit one.'
            )
        options: dict[str, Any] = {"force": force, "tokens": tokens, "example": example, "inplace": inplace}
        return keep_nonzero(
            model, BLOCK_SIZES if block_size is None else block_size, skip, **options, optimizer=optimizer
        )
    _check_timing(force, tokens, example)
    block = checked_block(32 if block_size is None else block_size)
    candidates = survey_weights(model, block, skip)
    if not candidates.weights:
        stored = stored_weights(model, skip)
        if not stored:
            raise no_weights_error(model, candidates)
        has_other_size = block_size is not None and any(each.layout.block_shape != block for each in stored.values())
        _check_only_dense_options(
            {"layouts=": layouts is not None, "data=": data is not None, f"block_size={block_size}": has_other_size}
        )
        model, plan = drop_blocks(
            model, stored, density, criterion, scope, limit_loss=not force, inplace=inplace, optimizer=optimizer
        )
        _warn_if_missed(plan, can_calibrate=False)
        return model
    if isinstance(density, Mapping):
        density = _densities_of_weights(density, candidates.weights)
    if inplace and data is not None:
        _check_writable(model)
    batches = None if data is None else collect_batches(data, "data")
    original, is_scored = model, layouts is None and isinstance(criterion, str | None)
    if batches and is_scored and not isinstance(density, Mapping) and not (optimizer and optimizer.state):
        model = reorder_features(model, batches[0], density, block, skip)
        candidates = survey_weights(model, block, skip)
    leaves_larger = force and layouts is None and not isinstance(density, Mapping)
    if leaves_larger:
        small = smaller_than_a_block(candidates.weights)
        weights = {name: weight for name, weight in candidates.weights.items() if name not in small}
        candidates = replace(candidates, weights=weights, reasons={**candidates.reasons, **small})
    plan = select_blocks(model, candidates, density, criterion, scope, layouts, batches, limit_loss=not force)
    if leaves_larger:
        plan = leave_larger_dense(plan)
    elif not force:
        plan = keep_faster(model, plan, example, tokens)
    fitted, plan = fit_values(model, plan, batches, choose=layouts is None, inplace=inplace, jointly=True)
    model = replace_weights(original, fitted, plan, optimizer, inplace=inplace)
    _warn_if_missed(plan)
    return model


def keep_nonzero(
    model: nn.Module,
    block_size: BlockSizes,
    skip: Skip,
    *,
    force: bool,
    tokens: int,
    example: Example | None,
    inplace: bool,
    optimizer: torch.optim.Optimizer | None = None,
    name: str = "sparsify",
) -> nn.Module:
    """Make weights with zeros block-sparse; the arguments are those of `sparsify`, `name` is the caller's."""
    _check_timing(force, tokens, example)
    candidates = survey_weights(model, 1, skip)
    if not candidates.weights:
        raise no_weights_error(model, candidates)
    speed = None if force else Speed(model, tokens, example)
    layouts, slow = layouts_of_zeros(candidates.weights, block_size, speed, name=name)
    sparse = replace_with_sparse(model if inplace else copy_model(model), layouts, optimizer)
    record_reasons(sparse, {**candidates.reasons, **slow})
    return sparse


# -- survey ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """The weights of a model.

    Args:
        weights: the dense weights that can become block-sparse, by name.
        reasons: why other dense weights cannot, by name.
        sparse: the layouts of block-sparse weights that are not skipped, by name.
    """

    weights: Mapping[str, Prunable]
    reasons: Mapping[str, str]
    sparse: Layouts


def survey_weights(model: nn.Module, block_size: int | tuple[int, int], skip: Skip) -> Survey:
    """Return which weights of a model can become block-sparse, which cannot and why, and which already are."""
    surveyed = survey(model, block_size, skip)
    skipped_modules, _ = find_skipped(model, skip)
    return Survey(
        weights={weight.name: weight for weight, reason in surveyed if reason is None},
        reasons={weight.name: reason for weight, reason in surveyed if reason is not None},
        sparse={
            dense_name(name, module): module.layout
            for name, module in model.named_modules()
            if isinstance(module, BlockSparseModule) and module not in skipped_modules
        },
    )


def no_weights_error(model: nn.Module, candidates: Survey) -> BlockSparseError:
    """Return the error for a model without a weight to sparsify, with the reasons."""
    listed = "; ".join(format_reasons(candidates.reasons))
    if not listed:
        listed = "block-sparse weights only: call bs.densify(model) first" if candidates.sparse else "none"
    got = f"{type(model).__name__} with {listed}"
    return BlockSparseError.expected("model", "dense weights that can become block-sparse", got, Page.SPARSIFY)


def warn_of_sparse_weights(caller: str, candidates: Survey) -> None:
    """Warn that a function changes dense weights only, and name the block-sparse ones."""
    if candidates.sparse:
        kept = {name: f"stays at density {layout.density:.3g}" for name, layout in candidates.sparse.items()}
        listed = "\n  ".join(format_reasons(kept))
        warn_user(
            f"{caller} changes dense weights only. To change these too, call bs.densify(model) first; to agree, name "
            f"them in skip=\n  {listed}"
        )


def _densities_of_weights(densities: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Return densities by the names of weights instead of modules; the longest name that fits a weight counts.

    >>> from blocksparse.conversion.sparsify import _densities_of_weights
    >>> _densities_of_weights({"head": 0.5, "head.1": 0.1}, ["body.weight", "head.0.weight", "head.1.weight"])
    {'head.0.weight': 0.5, 'head.1.weight': 0.1}
    """
    names, found = set(names), dict[str, float]()
    for name in sorted(densities, key=lambda each: len(str(each))):
        inside = sorted(each for each in names if isinstance(name, str) and each.startswith(f"{name}."))
        found |= dict.fromkeys(inside or [name], densities[name])
    return found


def _check_only_dense_options(options: Mapping[str, bool]) -> None:
    """Raise a BlockSparseError if options for dense weights are given.

    Args:
        options: for each option, as it is written, whether it is given.
    """
    for argument, is_given in options.items():
        if is_given:
            raise BlockSparseError(
                f"{argument} applies to dense weights, and all are block-sparse: call blocksparse.densify(model) first."
            )


def _check_timing(force: bool, tokens: int, example: Example | None) -> None:
    """Check the number of rows to time with, and that no example is given if nothing is timed."""
    checked_tokens(tokens)
    if force and example is not None:
        raise BlockSparseError("example= has no effect with force=True, which times nothing: omit one.")


def _check_writable(model: nn.Module) -> None:
    """Raise a BlockSparseError if values of a model cannot be changed in place."""
    if torch.is_inference_mode_enabled():
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            expected = "tensors that can be changed, for data= with inplace=True"
            raise BlockSparseError.expected("model", expected, f"{name}, made under torch.inference_mode()")


# -- select ------------------------------------------------------------------------------------------------------


def select_blocks(
    model: nn.Module,
    candidates: Survey,
    density: float | Mapping[str, float],
    criterion: Criterion | None,
    scope: str,
    layouts: Mapping[str, BlockLayout] | None,
    batches: list[Any] | None,
    *,
    limit_loss: bool,
) -> Plan:
    """Select the blocks of each dense weight, and record why others stay dense.

    Args:
        model: the model, which calibration runs on `batches`.
        candidates: its weights that can become block-sparse, and those that cannot.
        density, criterion, scope: see `sparsify`.
        layouts: layouts by name, used as they are, or None to score blocks.
        batches: inputs of the model, or None. With inputs and one density, the default criterion is `energy_shares`.
        limit_loss: whether trained weights keep more blocks if they would lose too much. Not with layouts or inputs.

    Raises:
        BlockSparseError: `layouts` or `density` name a weight that cannot become block-sparse.
    """
    for argument, named in (("layouts", layouts), ("density", density)):
        for name in named if isinstance(named, Mapping) else ():
            if reason := candidates.reasons.get(name) or (name in candidates.sparse and SPARSE_ALREADY):
                raise BlockSparseError(f"{argument}: {name} cannot be block-sparse: {reason}")
    selection: Selection
    if layouts is not None:
        selection = FixedSelection(candidates.weights, layouts)
    elif batches is None:
        selection = ScoredSelection(
            candidates.weights, density, "lamp" if criterion is None else criterion, scope, limit_loss
        )
    else:
        if criterion is None and not isinstance(density, Mapping):
            share = positive_fraction("density", density)
            criterion = energy_shares(model, batches, candidates.weights.values(), share)
        # These scores have a minimum per weight already, and fitting makes up for what rows lose.
        scope = "global" if scope == "careful" else scope
        selection = ScoredSelection(candidates.weights, density, "l2" if criterion is None else criterion, scope)
    missing = "density" if layouts is None else "layout"
    reasons = {
        **candidates.reasons,
        **{name: f"no {missing} was given" for name in candidates.weights if name not in selection.weights},
    }
    unexpected: dict[str, str] = {name: reason for name, reason in reasons.items() if isinstance(reason, Unexpected)}
    if layouts is None and not isinstance(density, Mapping):
        unexpected |= {
            name: f"block-sparse already, with density {layout.density:.3g}: sparsify it alone, or densify it first"
            for name, layout in candidates.sparse.items()
            if abs(layout.density - density) > DENSITY_TOLERANCE * density + 0.5 / math.prod(layout.grid)
        }
    return Plan(selection, selection.layouts(selection.weights), reasons, unexpected)


# -- fit ---------------------------------------------------------------------------------------------------------


def fit_values(
    model: nn.Module,
    plan: Plan,
    batches: list[Any] | None,
    *,
    choose: bool,
    inplace: bool,
    jointly: bool = False,
    states: bool = True,
    stop: Stop = never,
) -> tuple[nn.Module, Plan]:
    """Fit weights to the data; return the fitted model and the plan with its layouts.

    The fitted model is a copy, so that nothing is changed if fitting fails. Without data nothing is fitted: the model
    itself is returned if `inplace`, else a copy.

    Args:
        model: the dense model.
        plan: the layouts.
        batches: inputs of the model, or None to fit nothing.
        choose: whether fitting may select other blocks, the same number per weight.
        inplace: whether the model itself is to be changed.
        jointly: whether to fit repeated blocks of layers as a whole too, which takes longer.
        states: whether to fit recurrent layers over whole sequences too.
        stop: returns whether the layers that are not fitted yet keep the values and blocks that they have.
    """
    if inplace and batches is None:
        return model, plan
    copied = copy_model(model, otherwise="inplace=True without data=")
    if batches is None:
        return copied, plan
    options: dict[str, Any] = {"choose": choose, "jointly": jointly, "states": states, "stop": stop}
    layouts, errors = fit(copied, model, batches, plan.layouts, **options)
    if len(errors) < len(layouts):
        names = ", ".join([name for name in layouts if name not in errors][:MAX_NAMED])
        warn_user(
            f"sparsify: the data do not reach {names}, or not visibly: these weights keep their largest blocks (pass "
            "data that reach them, or skip= them)",
        )
    return copied, replace(plan, layouts=layouts)


# -- replace -----------------------------------------------------------------------------------------------------


def replace_weights(
    model: nn.Module, fitted: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None, *, inplace: bool
) -> nn.Module:
    """Replace the planned weights and record why others stay dense.

    Args:
        model: the original.
        fitted: the model with the values to use: the original, or a copy.
        plan: the layouts and reasons.
        optimizer: the optimizer of the original, or None.
        inplace: whether to change the original. If `fitted` is a copy, both swap their values.
    """
    if inplace and fitted is not model:
        sparse = _replace_with_values_of(fitted, model, plan.layouts, optimizer)
    else:
        sparse = replace_with_sparse(fitted, plan.layouts, optimizer)
    record_reasons(sparse, plan.reasons)
    return sparse


def _replace_with_values_of(
    fitted: nn.Module, model: nn.Module, layouts: Layouts, optimizer: torch.optim.Optimizer | None
) -> nn.Module:
    """Return the model with fitted values and replaced weights; restore its values if that fails.

    The copy `fitted` gets the old values.
    """
    pairs = zip((*model.parameters(), *model.buffers()), (*fitted.parameters(), *fitted.buffers()), strict=True)
    changed = [(old, new) for old, new in pairs if not old.is_meta and not torch.equal(old, new)]
    swapped = []
    try:
        for old, new in changed:
            values = old.clone()
            old.copy_(new)
            swapped.append((old, new.copy_(values)))
        return replace_with_sparse(model, layouts, optimizer)
    except BaseException:
        for old, new in swapped:
            old.copy_(new)
        raise


# -- warn --------------------------------------------------------------------------------------------------------


def _warn_if_missed(plan: Plan, can_calibrate: bool = True) -> None:
    """Warn if the density is missed, no weight became sparse, some stay dense unexpectedly, or blocks are too large."""
    selection, target = plan.selection, plan.selection.target_density
    reached, larger = selection.density_of(plan.layouts), weights_with_large_blocks(plan)
    if not plan.layouts:
        head = "nothing became block-sparse"
    elif abs(reached - target) > DENSITY_TOLERANCE * target + selection.rounding:
        head = f"the density is {reached:.2g}, not {target:.2g}"
    elif plan.unexpected:
        head = "some layers stay as they are"
    elif larger:
        head = "the blocks of some weights are larger than the weights"
    else:
        return
    why = {name: reason for name, reason in plan.reasons.items() if name in selection.weights} | dict(plan.unexpected)
    denser = {name: selection.excess(name) for name, layout in plan.layouts.items() if layout.density > target}
    why |= {name: reason for name, reason in denser.items() if reason} | larger
    if reached < target:
        why |= {name: _with_padding(selection.weights[name], why[name]) for name in why if name in selection.weights}
    lines = format_reasons(why) or ["each weight keeps at least one block: use a smaller block_size"]
    if any(selection.excess(name) for name in why):
        calibrate = "data= to calibrate, or " if can_calibrate else ""
        lines.append(f"to go lower, pass {calibrate}force=True and fine-tune")
    lines.append(f"see {Page.SPARSIFY}" + (", and bs.report(model) for all weights" if len(why) > MAX_NAMED else ""))
    warn_user("\n  ".join([f"sparsify: {head}", *lines]))


def _with_padding(weight: Prunable, reason: str) -> str:
    """Return the reason why a weight is dense, and how much of the others' share its padding took, if it took any."""
    size, padded = weight.tensor.numel(), padded_size(weight)
    if padded == size or not reason.startswith(KEEPS_ALL):
        return reason
    return f"{reason}, {padded:,} parameters with padding and {size:,} without: use smaller blocks or skip="
