"""Time inference of single recurrent layers with few sequences and steps, as in a service.

The peer is the dense layer of PyTorch with the same number of parameters, which has fewer units.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from torch import nn

from blocksparse.nn import GRU, LSTM, RNN
from blocksparse_lab.bench.case import OURS, forward
from targets.rows import RowIterator, race, timing_options

WIDTHS, DENSITY = (4096, 1024), 0.1
SIZES = ((1, 1), (1, 32), (8, 1), (8, 32), (32, 1), (32, 32))  # sequences and steps
# Our layer, PyTorch's layer and cell, and the number of gates.
LAYERS: dict[str, tuple[Any, Any, Any, int]] = {
    "LSTM": (LSTM, nn.LSTM, nn.LSTMCell, 4),
    "GRU": (GRU, nn.GRU, nn.GRUCell, 3),
    "RNN": (RNN, nn.RNN, nn.RNNCell, 1),
}


@torch.no_grad()
def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield a row for each layer, width, number of sequences and steps; `quick` uses small layers."""
    for name in LAYERS:
        for width in WIDTHS:
            yield from _layer_rows(name, width // (8 if quick else 1), timing_options(budget / 2, quick))


def _layer_rows(name: str, width: int, options: dict[str, Any]) -> RowIterator:
    ours_type, layer_type, cell_type, gates = LAYERS[name]
    torch.manual_seed(0)
    ours = ours_type(width, width, density=DENSITY)
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    narrow = max(isqrt(parameters // (2 * gates)), 1)  # two weights of gates * narrow^2
    layer, cell = layer_type(narrow, narrow), cell_type(narrow, narrow)
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
