"""Time single recurrent layers: inference with few sequences and steps, as in a service, and training.

The peer is the dense layer of PyTorch with the same number of parameters, which has fewer units.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from torch import nn

from blocksparse.measure import Call
from blocksparse.nn import GRU, LSTM, RNN
from blocksparse_lab.bench.case import OURS, forward
from targets.rows import RowIterator, race, timing_options

WIDTHS, DENSITY = (4096, 1024), 0.1
SIZES = ((1, 1), (1, 32), (8, 1), (8, 32), (32, 1), (32, 32))  # sequences and steps
TRAINED_WIDTH, TRAINED_BATCHES, STEPS = 1024, (1, 8, 32), 32
# Our layer, PyTorch's layer and cell, and the number of gates.
LAYERS: dict[str, tuple[Any, Any, Any, int]] = {
    "LSTM": (LSTM, nn.LSTM, nn.LSTMCell, 4),
    "GRU": (GRU, nn.GRU, nn.GRUCell, 3),
    "RNN": (RNN, nn.RNN, nn.RNNCell, 1),
}


def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield rows of inference, by layer, width, number of sequences and steps, and of training; `quick` is smaller."""
    options, divisor = timing_options(budget / 2, quick), 8 if quick else 1
    with torch.no_grad():
        for name in LAYERS:
            for width in WIDTHS:
                yield from _layer_rows(name, width // divisor, options)
    for name in LAYERS:
        yield from _training_rows(name, TRAINED_WIDTH // divisor, options)


def _training_rows(name: str, width: int, options: dict[str, Any]) -> RowIterator:
    """Yield a row of forward and backward for each number of sequences."""
    ours, layer, narrow = _layers(name, width)
    peer = f"torch.nn.{name}"
    for batch in TRAINED_BATCHES:
        calls = {OURS: _training_step(ours, batch, width), peer: _training_step(layer, batch, narrow)}
        timed = race(calls, **options)
        seconds = timed.samples.time(OURS).median
        work = f"training, one {name} layer of {width} units, density {DENSITY:g}, {batch} sequences, {STEPS} steps"
        goal = f">= 1x PyTorch's {name} of as many parameters"
        more = f" of {narrow} units; {1e3 * seconds:.3g} ms"
        yield timed.row(work, peer, OURS, peer, least=1.0, target=goal, more=more)


def _training_step(layer: nn.Module, batch: int, width: int) -> Call:
    """Return a call of forward and backward."""
    x = torch.randn(STEPS, batch, width, requires_grad=True)

    def step() -> None:
        layer.zero_grad()
        layer(x)[0].square().mean().backward()

    return step


def _layers(name: str, width: int) -> tuple[nn.Module, nn.Module, int]:
    """Return our layer, and PyTorch's of as many parameters with its number of units."""
    ours_type, layer_type, _, gates = LAYERS[name]
    torch.manual_seed(0)
    ours = ours_type(width, width, density=DENSITY)
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    narrow = max(isqrt(parameters // (2 * gates)), 1)  # two weights of gates * narrow^2
    return ours, layer_type(narrow, narrow), narrow


def _layer_rows(name: str, width: int, options: dict[str, Any]) -> RowIterator:
    ours, layer, narrow = _layers(name, width)
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    cell = LAYERS[name][2](narrow, narrow)
    peer, peer_cell = f"torch.nn.{name}", f"torch.nn.{name}Cell"
    for batch, steps in SIZES:
        calls = {
            OURS: forward(ours, torch.randn(steps, batch, width)),
            peer: forward(layer, torch.randn(steps, batch, narrow)),
        }
        if steps == 1:  # for one step, a cell takes a tenth of the layer's time
            calls[peer_cell] = forward(cell, torch.randn(batch, narrow))
        timed = race(calls, **options)
        seconds = {name: timed.samples.time(name).median for name in calls}
        best = min((name for name in calls if name != OURS), key=lambda name: seconds[name])
        work = f"inference, one {name} layer of {width} units, density {DENSITY:g}, {batch} sequences, {steps} steps"
        per_weight = 1e12 * seconds[OURS] / (parameters * batch * steps)
        more = f" of {narrow} units; {1e3 * seconds[OURS]:.3g} ms, {per_weight:.3g} ps per weight, sequence and step"
        goal = f">= 1x PyTorch's {name} of as many parameters"
        yield timed.row(work, best, OURS, best, least=1.0, target=goal, more=more)
