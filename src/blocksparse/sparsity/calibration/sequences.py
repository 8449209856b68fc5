"""Recurrent layers fitted over whole sequences, so that their states stay close to those of the dense layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .calibrate import Stop
from .inputs import States, level_layer, level_states, pack_inputs, run_level
from .passes import MAX_BYTES, Passes

# Steps of Adam and the sequences of each; fewer steps if all of them would process more than this number of time steps.
STEPS, SEQUENCES, MAX_TIME_STEPS = 120, 32, 1_000_000
# The highest learning rate of a parameter, relative to the root mean square of its values; the norm at which gradients
# are clipped.
RATE, MAX_NORM = 0.03, 0.1
MIN_VALUE = 1e-3  # the smallest root mean square for this, as biases may be 0

Sequences = tuple[PackedSequence, States, Tensor]
"""The inputs of a level, which is one layer of a stacked recurrent module, the initial states of all levels, and the
outputs of the dense level `[rows, states]`."""


def fit_states(
    model: nn.Module,
    dense: nn.Module,
    name: str,
    level: int,
    masks: Mapping[str, Tensor | None],
    passes: Passes,
    stop: Stop,
) -> None:
    """Change parameters of one level of a recurrent layer such that its outputs come close to those of the dense layer.

    Least squares fits the weights to states of the dense layer. In use, each step gets the states of the pruned layer,
    and errors add up. Adam therefore minimizes the mean squared error of the outputs of whole sequences. The values
    stay as they are if that does not reduce the error, and in 16-bit layers.

    Args:
        model, dense: the pruned and the dense model.
        name: name of the recurrent layer.
        level: which of its levels.
        masks: the parameters to change, by name, with a mask of the weights that are stored, or None for all.
        passes: the calibration batches.
        stop: returns whether to take no more steps.
    """
    module: Any = model.get_submodule(name)
    batches = _record_sequences(model, dense, name, level, passes)
    if not batches or not masks or batches[0][0].data.dtype not in (torch.float32, torch.float64):
        return
    with torch.inference_mode(False), torch.enable_grad():
        layer = level_layer(module, level, to_train=True)
        suffix = f"_l{level}"
        trained: dict[str, nn.Parameter] = {}
        for key in [key for key, _ in layer.named_parameters()]:
            parameter = nn.Parameter(getattr(layer, key).detach().clone())
            setattr(layer, key, parameter)
            if (full_name := key.replace("_l0", suffix)) in masks:
                trained[full_name] = parameter
        before = _error(layer, level, batches)
        _train(layer, level, batches, trained, masks, stop)
        if not _error(layer, level, batches) < before:
            return
    for key, parameter in trained.items():
        getattr(module, key).copy_(parameter.detach())


def _record_sequences(model: nn.Module, dense: nn.Module, name: str, level: int, passes: Passes) -> list[Sequences]:
    """Run both models on the batches and record one level's inputs in `model` and its outputs in `dense`.

    Return an entry for each call of the module, up to 256 MiB. Return none if sequences differ between the models, as
    a router may send them to other experts.
    """
    inputs, outputs = _record_outputs(model, name, level, passes), _record_outputs(dense, name, level + 1, passes)
    pairs = list(zip(inputs, outputs, strict=False))
    if any(not torch.equal(x.batch_sizes, y.batch_sizes) for (x, _), (y, _) in pairs):
        return []
    return [(x, state, y.data) for (x, state), (y, _) in pairs]


def _record_outputs(model: nn.Module, name: str, levels: int, passes: Passes) -> list[tuple[PackedSequence, States]]:
    """Return what the first `levels` levels of a recurrent module compute in each call, and the initial states."""
    calls: list[tuple[PackedSequence, States]] = []
    size = 0

    def record(module: Any, args: tuple[Any, ...]) -> None:
        nonlocal size
        if size < MAX_BYTES // 2:
            x, state = pack_inputs(module, args)
            for lower in range(levels):
                x = run_level(module, lower, x, state)
            size += x.data.numel() * x.data.element_size()
            calls.append((x, state))

    passes.run(model, [name], record)
    return calls


def _train(
    layer: Any,
    level: int,
    batches: list[Sequences],
    trained: dict[str, nn.Parameter],
    masks: Mapping[str, Tensor | None],
    stop: Stop,
) -> None:
    """Train some parameters of a one-level layer to give the dense outputs; masked values stay 0."""
    generator = torch.Generator().manual_seed(0)
    longest = max(len(x.batch_sizes) for x, _, _ in batches)
    steps = min(STEPS, max(1, MAX_TIME_STEPS // (SEQUENCES * longest)))

    def loss() -> Tensor:
        batch = batches[int(torch.randint(len(batches), (), generator=generator, device="cpu"))]
        x, state, target = _sample(batch, generator)
        error = layer(x, level_states(layer, level, state))[0].data - target
        return error.square().mean()

    train_by_adam(trained, masks, steps, loss, stop=stop, max_norm=MAX_NORM)


def train_by_adam(
    parameters: Mapping[str, nn.Parameter],
    masks: Mapping[str, Tensor | None],
    steps: int,
    loss: Callable[[], Tensor],
    *,
    stop: Stop | None = None,
    max_norm: float = math.inf,
) -> None:
    """Minimize `loss()`, which takes another sample in each call, by Adam; masked values stay 0.

    The learning rate rises and falls over the steps, and is in proportion to the values of each parameter.
    """
    rates = [RATE * max(root_mean_square(parameter), MIN_VALUE) for parameter in parameters.values()]
    optimizer = torch.optim.Adam([{"params": [parameter]} for parameter in parameters.values()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1)
    for _ in range(steps):
        if stop is not None and stop():
            break
        optimizer.zero_grad()
        loss().backward()
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(parameters.values(), max_norm)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                if (mask := masks[name]) is not None:
                    parameter.mul_(mask)
    optimizer.zero_grad()


def root_mean_square(parameter: Tensor) -> float:
    """Return the root mean square of the values that are not 0; 0 if all are."""
    values = parameter.detach()
    return float(values.square().sum() / values.count_nonzero().clamp(min=1)) ** 0.5


def _sample(batch: Sequences, generator: torch.Generator) -> Sequences:
    """Draw up to 32 whole sequences of a batch."""
    x, state, target = batch
    sizes = x.batch_sizes
    count = int(sizes[0])
    if count <= SEQUENCES:
        return batch
    chosen = torch.randperm(count, generator=generator, device="cpu")[:SEQUENCES].sort().values
    begins = (sizes.cumsum(0) - sizes).tolist()
    parts = [begin + chosen[chosen < size] for begin, size in zip(begins, sizes.tolist(), strict=True)]
    rows = torch.cat(parts).to(target.device)
    some_sizes = torch.tensor([len(part) for part in parts if len(part)], device="cpu")
    some_state = state if state is None else tuple(each[:, chosen.to(each.device)] for each in state)
    return PackedSequence(x.data[rows], some_sizes), some_state, target[rows]


@torch.no_grad()
def _error(layer: Any, level: int, batches: list[Sequences]) -> float:
    """Return the summed squared error of a layer's outputs over all batches."""
    outputs = ((layer(x, level_states(layer, level, state))[0].data, target) for x, state, target in batches)
    return sum(float((y - target).double().square().sum()) for y, target in outputs)
