"""The state that optimizers keep for a parameter, when its blocks move or another parameter takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..checked import averaged_axis, check_kept
from ..errors import BlockSparseError
from ..nn.optimizer_watch import before_first_step, call_before_next_step, stepped_optimizers
from .sharding import local_of

# How the state of new weights begins, by the names that PyTorch and others give it. At 0: means of gradients.
FROM_ZERO = {"momentum_buffer", "exp_avg", "exp_avg_diff", "grad_avg", "prev", "neg_pre_grad", "last_grad", "moment1"}
# At the weight: means and copies of it, of ASGD, schedule-free optimizers, Prodigy and Lookahead.
FROM_WEIGHT = {"ax", "z", "p0", "x0", "slow_buffer", "slow_params", "cached_params", "lookahead_slow_buff"}
# At the learning rate: the steps of Rprop.
FROM_RATE = {"step_size"}
# By other names: near the weights it is a copy of them, and else, if never negative, it sums or averages squares. That
# begins at the mean of the weights that stay.

SECOND_MOMENTS = "exp_avg_sq", "max_exp_avg_sq", "square_avg"
# At least, so that they differ from those of blocks that have never had a gradient.
LEAST = 1e-30

# How much larger the squares of a block's next gradients may be than those of its first one.
SPREAD = 1.5


class ParameterState(NamedTuple):
    """What one optimizer keeps for a parameter, which can be written to, and the parameter's group."""

    kept: dict[str, Any]
    group: Mapping[str, Any]


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those that it wraps, as accelerate, ZeroRedundancyOptimizer and Lookahead do."""
    waiting, seen = [optimizer] if is_optimizer(optimizer) else [], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            for held in vars(each).values():
                inner = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else [held]
                waiting += [other for other in inner if isinstance(other, torch.optim.Optimizer)]


def is_optimizer(given: Any) -> bool:
    """Whether it is an optimizer, or a wrapper that passes on the groups and the state of one."""
    if isinstance(given, torch.optim.Optimizer):
        return True
    return all(hasattr(given, name) for name in ("param_groups", "state", "step")) and isinstance(given.state, Mapping)


def has_parameter(optimizer: Any, parameter: Tensor) -> bool:
    """Whether the optimizer trains the parameter; a BlockSparseError where it is no optimizer."""
    if not is_optimizer(optimizer):
        several = " (of several, make a method for each)" if isinstance(optimizer, list | tuple) else ""
        raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__ + several)
    return _group_of(optimizer, parameter) is not None


def _group_of(optimizer: Any, parameter: Tensor) -> Mapping[str, Any] | None:
    for group in optimizer.param_groups:
        if any(given is parameter for given in group["params"]):
            found: Mapping[str, Any] = group
            return found
    return None


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of what accelerate or Lightning put around it, which has neither its hooks nor its state."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    # Some wrappers leave out the constructor of their base class, and have no hooks.
    return next((each for each in optimizers_in(optimizer) if hasattr(each, "_optimizer_step_pre_hooks")), optimizer)


def trainers_of(parameter: Tensor, optimizer: Any = None) -> list[Any]:
    """The optimizer, those that it wraps, and all others that have stepped and have the parameter."""
    others = [each for each in stepped_optimizers() if _group_of(each, parameter) is not None]
    return list({id(each): each for each in (*optimizers_in(optimizer), *others)}.values())


def states_of(parameter: Tensor, optimizer: Any = None) -> list[ParameterState]:
    """What optimizers keep for the parameter: the given one, and all others that have stepped on it."""
    found: dict[int, ParameterState] = {}
    for each in trainers_of(parameter, optimizer):
        kept = each.state.get(parameter)
        if kept:  # wrappers may have the same dict
            found.setdefault(id(kept), ParameterState(kept, _group_of(each, parameter) or {}))
    return list(found.values())


def follows_blocks(name: str, kept: Any, shape: torch.Size) -> bool:
    """Whether a state has a part for each block of values of this shape: it has the shape itself, or is a factor."""
    if isinstance(kept, Tensor) and kept.shape == shape:
        return True
    return len(shape) > 2 and averaged_axis(name, kept, shape) is not None


def check_optimizer(optimizer: Any, parameter: Tensor, name: str, *, replaced: bool = False) -> None:
    """Raises a BlockSparseError unless the optimizer, if any, has the parameter, and a state that can follow it.

    Args:
        replaced: whether another parameter, of the values, will take its place.
    """
    if optimizer is not None and not has_parameter(optimizer, parameter):
        expected = f"one that has the parameter {name} (or name it in skip, or freeze it: requires_grad_(False))"
        raise BlockSparseError.expected("optimizer", expected, type(optimizer).__name__)
    for each in optimizers_in(optimizer) if replaced else trainers_of(parameter, optimizer):
        kind = type(each).__name__
        if isinstance(each, torch.optim.LBFGS):
            raise BlockSparseError(
                f"optimizer: {kind} keeps one vector for all parameters, which cannot follow blocks of {name}: "
                "train with SGD or Adam while layouts change"
            )
        if replaced:
            _check_takes_values(each, name)
        if (key := _copies_outside(each, parameter)) is not None:
            raise BlockSparseError(
                f"optimizer: {kind} keeps tensors of the shape of {name} in its attribute {key}, which cannot follow "
                f"blocks: they are to be in {kind}.state[parameter], or use an optimizer without them"
            )
        remedy = f"{kind} cannot follow blocks, whose places change: train with AdamW, or one that keeps such state"
        check_kept(each.state.get(parameter, {}), parameter, name, remedy=remedy)


def _copies_outside(optimizer: Any, parameter: Tensor) -> str | None:
    """The attribute in which an optimizer keeps tensors for parameters besides its state, if it does."""
    mine = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for key, held in vars(optimizer).items():
        for each in held if isinstance(held, list | tuple) else ():
            if isinstance(each, Tensor) and each.shape == parameter.shape and id(each) not in mine:
                return key
    return None


def _check_takes_values(optimizer: Any, name: str) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise BlockSparseError(
            f"optimizer: {kind} trains matrices, and {name} becomes values of three axes, "
            "[blocks, rows, columns]: give this weight to AdamW, or skip it"
        )
    if kind == "ZeroRedundancyOptimizer":
        raise BlockSparseError(
            f"optimizer: {kind} cannot exchange the parameter {name} for its values: use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), or start from block-sparse layers"
        )


def replace_parameter(
    optimizer: Any,
    old: nn.Parameter,
    new: nn.Parameter,
    convert: Callable[[Tensor], Tensor],
    absent: Tensor | None = None,
) -> None:
    """Has the optimizer, those that it wraps, and others that have stepped on it, train another parameter.

    The state comes along. Others whose state cannot are left with the old parameter.

    Args:
        convert: of a tensor of the old shape one of the new shape.
        absent: bool of the new shape, the weights that did not exist before; None for none.
    """
    named = list(optimizers_in(optimizer))
    for each in trainers_of(old, optimizer):
        if each not in named and not _can_follow(each, old):
            continue
        for group in each.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        if old in each.state:
            group = _group_of(each, new) or {}
            kept = _converted(each.state.pop(old), old.shape, convert)
            if absent is not None:
                _begin(kept, absent, new, group)
            each.state[new] = kept


def _can_follow(optimizer: Any, parameter: Tensor) -> bool:
    """Whether the optimizer can train values in the place of the parameter, with the state that it has."""
    try:
        check_optimizer(optimizer, parameter, "", replaced=True)
    except BlockSparseError:
        return False
    return True


def _converted(kept: dict[str, Any], shape: torch.Size, convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    new = {}
    for name, each in kept.items():
        axis = averaged_axis(name, each, shape)
        if axis is not None:
            # A block has other rows and columns than the matrix: averages of the squares that both stand for.
            squares = convert(_product_of_factors(kept, name, axis, len(shape)))
            new[name] = squares.mean(axis, keepdim=each.dim() == len(shape)).to(each.dtype)
        else:
            new[name] = convert(each) if isinstance(each, Tensor) and each.shape == shape else each
    return new


def _product_of_factors(kept: Mapping[str, Tensor], name: str, axis: int, dims: int) -> Tensor:
    """The mean squares that a factored second moment stands for, `[..., rows, columns]`."""
    row, col = ("row", "col") if "row" in name or "col" in name else ("_r", "_c")
    rows, cols = kept[name.replace(col, row)], kept[name.replace(row, col)]
    if rows.dim() < dims:
        rows, cols = rows.unsqueeze(-1), cols.unsqueeze(-2)
    return rows * (cols / rows.mean(-2, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny))


class Measures(NamedTuple):
    """What is known of a state of the weights that stay."""

    total: float
    numbers: int
    negative: int
    """How many are below 0."""
    distance: float
    """The sum of squares of the differences to the weights."""
    squares: float
    """The sum of squares of the weights."""


def start_of(name: str, group: Mapping[str, Any], measure: Callable[[], Measures]) -> float | None:
    """What the state of new weights begins with; None for the weights themselves.

    Args:
        measure: of the weights that stay.
    """
    if name in FROM_ZERO:
        return 0.0
    if name in FROM_WEIGHT:
        return None
    if name in FROM_RATE:
        return float(group.get("lr", 0))
    found = measure()
    if found.negative:
        return None if 4 * found.distance < found.squares else 0.0
    return max(LEAST, found.total / found.numbers) if found.numbers else 0.0


def measure_state(state: Tensor, weights: Tensor | None) -> Measures:
    """Measures a state; the weights are those of its numbers, None where it has one for several."""
    distance = squares = 0.0
    if weights is not None:
        distance = float((state.float() - weights.float()).square().sum(dtype=torch.float64))
        squares = float(weights.float().square().sum(dtype=torch.float64))
    return Measures(float(state.sum(dtype=torch.float64)), state.numel(), int((state < 0).sum()), distance, squares)


class NewBlocks:
    """Raises the second moments of new blocks to the squares of their first gradient, where these are larger.

    RigL grows where gradients are large: to start at the mean of the others would move such blocks too far. Only Adam
    and its relatives, and RMSprop, need it: in other optimizers no start lets a block move by more than a rate.

    Args:
        parameter: which an optimizer is to call this for before its steps.
        blocks: those of the parameter, as far as this process has it, that have had no gradient yet; bool.
    """

    def __init__(self, parameter: Tensor, blocks: Tensor):
        self._parameter, self._blocks = ref(parameter), blocks

    @torch.no_grad()
    def __call__(self, optimizer: Any) -> bool:
        """Returns whether all blocks have had a gradient, or the layout has changed again."""
        parameter, blocks = self._parameter(), self._blocks
        if parameter is None or parameter.grad is None or len(local_of(parameter)) != len(blocks):
            return True
        kept, group = optimizer.state.get(parameter), _group_of(optimizer, parameter)
        if not kept or group is None:
            return False
        grad = local_of(parameter.grad)[blocks].float() / float(getattr(optimizer, "grad_scale", None) or 1)
        squares = SPREAD * grad.square().flatten(1).mean(1)
        if not squares.isfinite().all():  # an update that is skipped
            return False
        least = squares
        if "betas" in group and "step" in kept:
            least = squares * (1 - float(group["betas"][1]) ** (float(kept["step"]) + 1))
        for name in SECOND_MOMENTS:
            if isinstance(each := kept.get(name), Tensor) and each.shape == parameter.shape:
                local = local_of(each)
                local[blocks] = local[blocks].maximum(least.view(-1, *[1] * (local.dim() - 1)).to(local.dtype))
        self._blocks[blocks.clone()] = squares == 0
        return not bool(self._blocks.any())


def watch_new_blocks(parameter: Tensor, kept: Mapping[str, Any]) -> None:
    """Has the next steps on the parameter raise the second moments of blocks whose state shows no gradient yet.

    The state of an optimizer that is saved and loaded shows the same: their first moments are 0 and their second ones
    are not, but equal.
    """
    second = next((kept[name] for name in SECOND_MOMENTS if isinstance(kept.get(name), Tensor)), None)
    if second is None or second.dim() < 3:
        return
    numbers, first = local_of(second).flatten(1), kept.get("exp_avg")
    if not isinstance(first, Tensor) and numbers.shape[1] == 1:  # nothing tells a new number from others
        return
    blocks = (numbers[:, :1] != 0).all(1) & (numbers == numbers[:, :1]).all(1)
    if isinstance(first, Tensor) and first.shape == second.shape:
        blocks &= (local_of(first).flatten(1) == 0).all(1)
    if blocks.any():
        call_before_next_step(parameter, NewBlocks(parameter, blocks))


def _watch_loaded(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if kept := optimizer.state.get(parameter):
                watch_new_blocks(parameter, kept)


before_first_step.append(_watch_loaded)


def _begin(kept: dict[str, Any], absent: Tensor, values: Tensor, group: Mapping[str, Any]) -> None:
    """Fills in the state of weights that did not exist before."""
    for name, each in kept.items():
        if isinstance(each, Tensor) and each.shape == absent.shape:
            start = start_of(name, group, partial(measure_state, each[~absent], values.detach()[~absent]))
            each[absent] = values.detach()[absent] if start is None else start
