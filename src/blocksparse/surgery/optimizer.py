"""Optimizer state of parameters whose blocks move or which other parameters replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import numpy as np
import torch
from torch import Tensor, nn

from ..checked import (
    BLOCK_AGE,
    BLOCK_IS_NEW,
    STATES_OF_BLOCKS,
    averaged_axis,
    check_optimizer_state,
    check_state_of_blocks,
    is_state_of_blocks,
)
from ..errors import BlockSparseError, warn_user
from ..nn.optimizer_watch import before_first_step, call_before_next_step, stepped_optimizers
from .rows import fill_rows, put_rows, take_rows, true_positions
from .sharding import local_of

# The initial state of new weights, by the names that PyTorch and other libraries use:
# means of gradients begin at 0,
FROM_ZERO = {"momentum_buffer", "exp_avg", "exp_avg_diff", "grad_avg", "prev", "neg_pre_grad", "last_grad", "moment1"}
FROM_ZERO |= {BLOCK_AGE}
# means and copies of the weight (ASGD, schedule-free optimizers, Prodigy, Lookahead) at the weight,
FROM_WEIGHT = {"ax", "z", "p0", "x0", "slow_buffer", "slow_params", "cached_params", "lookahead_slow_buff"}
# the step sizes of Rprop at the learning rate.
FROM_RATE = {"step_size"}
# A state of another name that is near the weights counts as a copy of them. If it is never negative, it sums or
# averages squares and begins at the mean over the weights that stay.

SECOND_MOMENTS = "exp_avg_sq", "max_exp_avg_sq", "square_avg"
# With a `BlockClock`, second moments begin at 0, and no block waits for its first gradient.
FROM_ZERO_WITH_CLOCK = {*SECOND_MOMENTS, BLOCK_IS_NEW}
# Above 0, so that the state of new blocks differs from that of blocks that have never had a gradient.
MIN_SECOND_MOMENT = 1e-30

# How much larger the squares of a block's next gradients may be than those of its first one.
GRADIENT_SPREAD = 1.5


# Optimizers with a `BlockClock`, under which second moments of new blocks start at 0.
clocked: WeakSet[torch.optim.Optimizer] = WeakSet()


class ParameterState(NamedTuple):
    """The writable state of one optimizer for a parameter, the parameter's group, and whether it has a `BlockClock`."""

    state: dict[str, Any]
    group: Mapping[str, Any]
    clocked: bool = False


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it wraps, as accelerate, ZeroRedundancyOptimizer and Lookahead do."""
    waiting, seen = [optimizer] if is_optimizer(optimizer) else [], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            for value in vars(each).values():
                items = value.values() if isinstance(value, dict) else value
                items = items if isinstance(value, dict | list | tuple) else [value]
                waiting += [item for item in items if isinstance(item, torch.optim.Optimizer)]


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer, or a wrapper with the groups and the state of one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    return all(hasattr(value, name) for name in ("param_groups", "state", "step")) and isinstance(value.state, Mapping)


def has_parameter(optimizer: Any, parameter: Tensor) -> bool:
    """Return whether the optimizer trains the parameter; raise a BlockSparseError if it is not an optimizer."""
    if not is_optimizer(optimizer):
        hint = " (make a method for each optimizer)" if isinstance(optimizer, list | tuple) else ""
        raise BlockSparseError.expected("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__ + hint)
    return _group_of(optimizer, parameter) is not None


def trained_names(optimizer: Any, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of parameters that the optimizer trains; raise a BlockSparseError if it trains none."""
    trained = {name for name, parameter in parameters.items() if has_parameter(optimizer, parameter)}
    if not trained:
        expected = f"an optimizer with parameters of the model, such as {next(iter(parameters))}"
        raise BlockSparseError.expected("optimizer", expected, type(optimizer).__name__)
    return trained


def _group_of(optimizer: Any, parameter: Tensor) -> Mapping[str, Any] | None:
    """Return the group of a parameter, or None."""
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            owner: Mapping[str, Any] = group
            return owner
    return None


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper of accelerate or Lightning, which has neither its hooks nor its state."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    # Some wrappers do not call the constructor of their base class, so they have no hooks.
    return next((each for each in optimizers_in(optimizer) if hasattr(each, "_optimizer_step_pre_hooks")), optimizer)


def trainers_of(parameter: Tensor, optimizer: Any = None) -> list[Any]:
    """Return the optimizer, those that it wraps, and all others that have stepped and have the parameter."""
    others = [each for each in stepped_optimizers() if _group_of(each, parameter) is not None]
    return list({id(each): each for each in (*optimizers_in(optimizer), *others)}.values())


def states_of(parameter: Tensor, optimizer: Any = None) -> list[ParameterState]:
    """Return the states of a parameter in an optimizer and in all others that have stepped on it."""
    states: dict[int, ParameterState] = {}
    for each in trainers_of(parameter, optimizer):
        state = each.state.get(parameter)
        if not state and has_block_clock(each) and type(each).__name__ == "SGD":  # without momentum it keeps no state
            states[id(each.state[parameter])] = ParameterState(each.state[parameter], {}, True)
        if state:  # a wrapper may share the dict of the optimizer inside
            known = states.get(id(state))
            has_clock = has_block_clock(each) or (known is not None and known.clocked)
            group = known.group if known else _group_of(each, parameter) or {}
            states[id(state)] = ParameterState(state, group, has_clock)
    return list(states.values())


def has_block_clock(optimizer: Any) -> bool:
    """Return whether a `BlockClock` corrects the steps of this optimizer."""
    return isinstance(optimizer, torch.optim.Optimizer) and optimizer in clocked


def follows_blocks(name: str, state: Any, shape: torch.Size) -> bool:
    """Return whether a state has entries per block of values of this shape: the same shape, or a factor of it."""
    if (isinstance(state, Tensor) and state.shape == shape) or is_state_of_blocks(name, state, shape):
        return True
    return len(shape) > 2 and averaged_axis(name, state, shape) is not None


def check_optimizer(optimizer: Any, parameter: Tensor, name: str, *, replaced: bool = False) -> None:
    """Raise a BlockSparseError if an optimizer lacks the parameter, or its state cannot follow blocks.

    Args:
        optimizer: the optimizer, or None.
        parameter: the parameter whose blocks move, or which block-sparse values replace.
        name: its name, for the error.
        replaced: whether block-sparse values replace the parameter (default: its blocks move).
    """
    if optimizer is not None and not has_parameter(optimizer, parameter):
        expected = f"an optimizer with the parameter {name} (or name it in skip, or freeze it: requires_grad_(False))"
        raise BlockSparseError.expected("optimizer", expected, type(optimizer).__name__)
    for each in optimizers_in(optimizer) if replaced else trainers_of(parameter, optimizer):
        kind = type(each).__name__
        if isinstance(each, torch.optim.LBFGS):
            raise BlockSparseError(
                f"optimizer: {kind} keeps one vector for all parameters, so its state cannot follow blocks of {name}: "
                "train with SGD or Adam while layouts change"
            )
        if replaced:
            _check_can_train_values(each, name)
        if (key := _copies_outside(each, parameter)) is not None:
            raise BlockSparseError(
                f"optimizer: {kind} keeps tensors for {name} in its attribute {key}, where they cannot follow blocks: "
                f"keep them in {kind}.state[parameter], or use another optimizer"
            )
        remedy = f"the state of {kind} cannot follow blocks that move: train with AdamW, or another optimizer that can"
        check_optimizer_state(each.state.get(parameter, {}), parameter, name, remedy=remedy)


def check_optimizer_is_inplace(optimizer: object, inplace: bool) -> None:
    """Raise a BlockSparseError if an optimizer is given for a model that is copied."""
    if optimizer is not None and not inplace:
        raise BlockSparseError(
            "optimizer= requires inplace=True; without it, a copy is returned that the optimizer does not train."
        )


def _copies_outside(optimizer: Any, parameter: Tensor) -> str | None:
    """Return the attribute in which an optimizer keeps tensors of a parameter outside its state, or None."""
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for key, value in vars(optimizer).items():
        for each in value if isinstance(value, list | tuple) else ():
            if isinstance(each, Tensor) and each.shape == parameter.shape and id(each) not in own:
                return key
    return None


def _check_can_train_values(optimizer: Any, name: str) -> None:
    """Raise a BlockSparseError for optimizers that cannot train values of three axes."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        raise BlockSparseError(
            f"optimizer: {kind} trains matrices, and {name} becomes values of three axes, "
            "[blocks, rows, columns]: give this weight to AdamW, or skip it"
        )
    if kind == "ZeroRedundancyOptimizer":
        raise BlockSparseError(
            f"optimizer: {kind} cannot replace the parameter {name} by block-sparse values: use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), or start from block-sparse layers"
        )


def replace_parameter(
    optimizer: Any,
    old: nn.Parameter,
    new: nn.Parameter,
    convert: Callable[[Tensor], Tensor],
    absent: Tensor | None = None,
) -> None:
    """Replace a parameter in an optimizer, in optimizers that it wraps, and in all others that have stepped on it.

    The parameter's state is converted. If one of those others cannot train the new parameter, it keeps the old one.

    Args:
        optimizer: the optimizer, or None.
        old, new: the parameter and its replacement.
        convert: maps a tensor of the old shape to one of the new shape.
        absent: bool of the new shape, True for weights that did not exist before; None for none.
    """
    named = list(optimizers_in(optimizer))
    for each in trainers_of(old, optimizer):
        if each not in named and not _can_follow(each, old):
            continue
        for group in each.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        if old in each.state:
            group = _group_of(each, new) or {}
            state = _convert_state(each.state.pop(old), old.shape, convert)
            if absent is not None:
                _initialize_absent(state, absent, new, group)
            each.state[new] = state


def _can_follow(optimizer: Any, parameter: Tensor) -> bool:
    """Return whether the optimizer can train block-sparse values instead of the parameter, with its state."""
    try:
        check_optimizer(optimizer, parameter, "", replaced=True)
    except BlockSparseError:
        return False
    return True


def _convert_state(state: dict[str, Any], shape: torch.Size, convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return the state of a parameter of this shape, with each tensor per weight converted."""
    new = {}
    for name, each in state.items():
        if name in STATES_OF_BLOCKS:  # a dense weight has none
            continue
        axis = averaged_axis(name, each, shape)
        if axis is not None:
            # Blocks have other rows and columns than the matrix, so the squares are averaged again.
            squares = convert(_product_of_factors(state, name, len(shape)))
            new[name] = squares.mean(axis, keepdim=each.dim() == len(shape)).to(each.dtype)
        else:
            new[name] = convert(each) if isinstance(each, Tensor) and each.shape == shape else each
    return new


def _product_of_factors(state: Mapping[str, Tensor], name: str, dims: int) -> Tensor:
    """Return the mean squares that a factored second moment approximates, `[..., rows, columns]`."""
    row, col = ("row", "col") if "row" in name or "col" in name else ("_r", "_c")
    rows, cols = state[name.replace(col, row)], state[name.replace(row, col)]
    if rows.dim() < dims:
        rows, cols = rows.unsqueeze(-1), cols.unsqueeze(-2)
    return rows * (cols / rows.mean(-2, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny))


class Measures(NamedTuple):
    """Sums over a state of the weights that stay.

    Args:
        total: the sum of the state.
        size: its number of elements.
        negative: 0 if no element is below 0.
        distance: the squared distance to the weights.
        squares: the squared norm of the weights.
    """

    total: float
    size: int
    negative: int
    distance: float
    squares: float


def start_of(
    name: str, group: Mapping[str, Any], measure: Callable[[], Measures], *, has_clock: bool = False
) -> float | None:
    """Return the initial value of a state for new weights; None for the weights themselves.

    Args:
        name: the state's name.
        group: the parameter group.
        measure: returns the measures of the state over the weights that stay.
        has_clock: whether the optimizer has a `BlockClock`.
    """
    if name in FROM_ZERO or (has_clock and name in FROM_ZERO_WITH_CLOCK):
        return 0.0
    if name == BLOCK_IS_NEW:
        return 1.0
    if name in FROM_WEIGHT:
        return None
    if name in FROM_RATE:
        return float(group.get("lr", 0))
    measures = measure()
    if measures.negative:
        return None if 4 * measures.distance < measures.squares else 0.0
    return max(MIN_SECOND_MOMENT, measures.total / measures.size) if measures.size else 0.0


def measure_state(state: Tensor, weights: Tensor | None) -> Measures:
    """Measure a state and its weights; the weights are None if one number of the state stands for several."""
    distance = squares = 0.0
    if weights is not None:
        distance = _sum((state.float() - weights.float()).square())
        squares = _sum(weights.float().square())
    return Measures(_sum(state), state.numel(), int((state < 0).any()), distance, squares)


def _sum(numbers: Tensor) -> float:
    """Return the sum in float64; by NumPy on the CPU, which is ten times as fast as PyTorch."""
    if numbers.device.type != "cpu":
        return float(numbers.sum(dtype=torch.float64))
    wide = numbers if numbers.dtype == torch.float64 else numbers.float()
    return float(wide.numpy().sum(dtype=np.float64))


class NewBlocks:
    """A hook before optimizer steps that raises second moments of new blocks to the squares of their first gradient.

    RigL grows blocks where gradients are large, so second moments that start at the mean of the others would move them
    too far. Only Adam and its relatives, and RMSprop, need this; others never move a block by more than the rate.
    """

    def __init__(self, parameter: Tensor, is_new: Tensor):
        self._parameter, self._size = ref(parameter), len(is_new)
        self._places = true_positions(is_new)

    @torch.no_grad()
    def __call__(self, optimizer: Any) -> bool:
        """Return whether the hook is done: all blocks have had a gradient, or the layout has changed again."""
        parameter, places = self._parameter(), self._places
        if parameter is None or parameter.grad is None or len(local_of(parameter)) != self._size:
            return True
        state, group = optimizer.state.get(parameter, {}), _group_of(optimizer, parameter)
        moments = second_moments(state, parameter)
        if group is None or not moments:  # another optimizer of the parameter
            return False
        grad = take_rows(local_of(parameter.grad), places).float()
        grad /= float(getattr(optimizer, "grad_scale", None) or 1)
        squares = GRADIENT_SPREAD * grad.square().flatten(1).mean(1)
        if not squares.isfinite().all():  # a GradScaler skips this update
            return False
        minimum = squares
        if "betas" in group and "step" in state:
            minimum = squares * (1 - float(group["betas"][1]) ** (float(state["step"]) + 1))
        for each in moments:
            rows = take_rows(local := local_of(each), places)
            bound = minimum.view(-1, *[1] * (local.dim() - 1))
            put_rows(local, places, rows.maximum(bound.to(local.dtype)))
        if BLOCK_IS_NEW in state:
            fill_rows(local_of(state[BLOCK_IS_NEW]), places[squares > 0], 0)
        self._places = places[squares == 0]
        return not self._places.numel()


def second_moments(state: Mapping[str, Any], parameter: Tensor) -> list[Tensor]:
    """Return the second moments of a parameter that `NewBlocks` can raise."""
    moments = (state.get(name) for name in SECOND_MOMENTS)
    return [each for each in moments if isinstance(each, Tensor) and each.shape == parameter.shape]


def watch_new_blocks(parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Register `NewBlocks` for the blocks of a parameter whose state marks them as new."""
    is_new = local_of(state[BLOCK_IS_NEW]).flatten().ne(0)
    if is_new.any():
        call_before_next_step(parameter, NewBlocks(parameter, is_new))


def _watch_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Register `NewBlocks` for a state that may have been loaded, before the first step; warn of a missing clock."""
    has_clock = any(has_block_clock(each) for each in optimizers_in(optimizer))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                if BLOCK_IS_NEW in state:
                    check_state_of_blocks(BLOCK_IS_NEW, state[BLOCK_IS_NEW], parameter.shape)
                    watch_new_blocks(parameter, state)
                if BLOCK_AGE in state and not has_clock:
                    has_clock = True  # one warning is enough
                    warn_user(
                        f"the state of {type(optimizer).__name__} has ages of blocks but no BlockClock, so young "
                        "blocks may move too far: wrap the optimizer in bs.sparsity.BlockClock after loading",
                    )


before_first_step.append(_watch_loaded)


def _initialize_absent(state: dict[str, Any], absent: Tensor, values: Tensor, group: Mapping[str, Any]) -> None:
    """Fill in the state of weights that did not exist before."""
    for name, each in state.items():
        if isinstance(each, Tensor) and each.shape == absent.shape:
            start = start_of(name, group, partial(measure_state, each[~absent], values.detach()[~absent]))
            each[absent] = values.detach()[absent] if start is None else start
