"""Recurrent layers, whose steps use slices of larger buffers, with their gradients."""

from __future__ import annotations

from copy import deepcopy
from random import Random

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import blocksparse as bs

from .calls import DTYPES, Calls, Fault
from .layouts import normal
from .memory import whole

# Error relative to the largest element of each tensor. Gates are bounded. Normalised layers divide by the deviation of
# few elements, which may cancel, so that they are compared in float64 only.
BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-12}
NORMALISED = 1e-7


def draw(rng: Random) -> dict:
    block = rng.choice((1, 2, 3, 8, 16))
    layer = rng.choice(("LSTM", "SmallWorldLSTM", "MultiplicativeLSTM"))
    case = {
        "layer": layer,
        "input": block * rng.randint(1, 4),
        "hidden": block * rng.randint(1, 6),
        "block": block,
        "density": rng.choice((None, 0.2, 0.6)),
        "directions": rng.choice((1, 1, 2)),
        "lengths": sorted((rng.randint(1, 12) for _ in range(rng.randint(1, 20))), reverse=True),
        "packed": rng.random() < 0.5,
        "dtype": "float64" if layer == "SmallWorldLSTM" else rng.choice(("float32", "float64")),
        "threads": 2 if rng.random() < 0.1 else 1,
    }
    return {**case, "refused": _refused(case)}


def _refused(case: dict) -> str | None:
    """Return the argument that this layer must refuse, and the reason."""
    if case["layer"] == "LSTM":
        return None  # every density that is drawn stores a block, as a weight has four gates
    if case["layer"] == "SmallWorldLSTM" and case["hidden"] == 1:
        return "hidden_size: the normalisation of one unit is always 0"
    hidden, inputs = (case[size] // case["block"] for size in ("hidden", "input"))
    blocks = hidden * min(hidden, inputs)
    if case["density"] is not None and round(case["density"] * blocks) == 0:
        return f"density: {case['density']} * {blocks} rounds to no block"
    return None


def run(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare outputs and gradients of a layer with the reference in float64."""
    dtype, lengths, two = DTYPES[case["dtype"]], case["lengths"], case["directions"] == 2
    torch.manual_seed(case["numbers"])
    layer = getattr(bs.nn, case["layer"])(
        case["input"], case["hidden"], bidirectional=two, density=case["density"], block_size=case["block"], dtype=dtype
    )
    x = whole(normal(numbers, lengths[0], len(lengths), case["input"]), dtype)
    grad = normal(numbers, sum(lengths), case["hidden"] * case["directions"])

    def outputs_and_gradients(layer: torch.nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        y, state = layer(pack_padded_sequence(x, lengths) if case["packed"] else x)
        y = y.data if case["packed"] else y
        rows = y.reshape(-1, y.shape[-1])
        leaves = [x, *layer.parameters()]
        found = torch.autograd.grad((rows[: len(grad)] * grad.to(x.dtype)).sum(), leaves, allow_unused=True)
        return y.detach(), *(part.detach() for part in state), *found

    with bs.use_backend("reference"):
        expected = outputs_and_gradients(deepcopy(layer).double(), x.double())

    bound = NORMALISED if case["layer"] == "SmallWorldLSTM" else BOUNDS[dtype]

    def check(got: tuple[Tensor, ...]) -> None:
        for i, (one, right) in enumerate(zip(got, expected, strict=True)):
            if (one is None) != (right is None) or (one is not None and one.shape != right.shape):
                raise Fault(f"tensor {i}: another shape, or none")
            # If a gradient's terms cancel, its error is relative to the terms, which are about 1.
            if one is not None and one.numel():
                error = (one.double() - right).abs().max()
                if not error <= bound * max(1.0, float(right.abs().max())):
                    raise Fault(f"tensor {i}: off by {error}")

    # PyTorch's dense products and its gradient of layer normalisation depend on the number of threads.
    ours = case["density"] is not None and case["layer"] != "SmallWorldLSTM"
    threads = case["threads"] if ours else 1
    calls.on_each(case["layer"], dtype, lambda: outputs_and_gradients(layer, x), check, threads)
