"""Gates of an LSTM, dropout, and steps with momentum."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor

from blocksparse.ops import dropout
from blocksparse.ops.checks import SUM_DTYPES
from blocksparse.ops.dropout import cpu as dropout_cpu
from blocksparse.ops.dropout import reference as dropout_reference
from blocksparse.ops.lstm_gates import cpu as gates_cpu
from blocksparse.ops.lstm_gates import reference as gates_reference
from blocksparse.ops.momentum import cpu as momentum_cpu

from .calls import DTYPES, ROUNDING, Calls, assert_same, assert_within
from .layouts import draw_tokens, normal
from .memory import rows, whole

# Strides of outputs: elements do not overlap, and features are contiguous.
PLACES = ("plain", "apart 1", "apart 5", "offset 1", "offset 3")


def draw_gates(rng: Random) -> dict:
    return {
        "n": draw_tokens(rng, 70),
        "hidden": rng.choice((1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, rng.randint(1, 100))),
        "dtype": rng.choice(list(DTYPES)),
        "places": [rng.choice(PLACES) for _ in range(12)],
        "add": rng.choice(("rows", "one", "none", "none")),
        "gain": rng.random() < 0.3,
        "keep": rng.random() < 0.6,
        "given": [rng.random() < 0.6 for _ in range(3)],
        "size": rng.choice((1, 1, 1, 10, 100)),
        "in_place": rng.random() < 0.2,
        "threads": 2 if rng.random() < 0.1 else 1,
    }


def run_gates(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare both passes of the gates with their definition in float64."""
    n, hidden, dtype, places = case["n"], case["hidden"], DTYPES[case["dtype"]], iter(case["places"])
    state, size = SUM_DTYPES[dtype], case["size"]

    def given(features: int, of: torch.dtype, wanted: bool = True) -> Tensor | None:
        return rows(normal(numbers, n, features) * size, of, next(places)) if wanted else next(places) and None

    z, c = given(4 * hidden, dtype), given(hidden, state)
    add = given(4 * hidden, dtype, case["add"] == "rows")
    if case["add"] == "one":
        add = whole(normal(numbers, 4 * hidden), dtype, 1)
    gain = whole(normal(numbers, 4 * hidden), dtype, 1) if case["gain"] else None

    wide = [None if tensor is None else tensor.double() for tensor in (z, add, gain, c)]
    pre = wide[0].abs() * (1 if gain is None else wide[2].abs()) + (0 if add is None else wide[1].abs())
    h, after, gates = (torch.empty(n, k * hidden, dtype=torch.float64) for k in (1, 1, 4))
    gates_reference.forward(*wide, h_out=h, c_out=after, gates_out=gates)
    unit = 16 * ROUNDING[state]
    at_gates = unit * (1 + pre)
    of_state = at_gates.view(n, 4, hidden).amax(1) if n else at_gates[:, :hidden]
    of_state = of_state * (2 + wide[3].abs())

    def output(features: int, of: torch.dtype) -> Tensor:
        return rows(torch.full((n, features), torch.nan), of, next(places))

    h_out, c_out, gates_out = output(hidden, dtype), output(hidden, state), output(4 * hidden, dtype)

    def forward():
        before, kept = c, gates_out if case["keep"] else None
        if case["in_place"]:
            before = c_out.copy_(c)
        gates_cpu.forward(z, add, gain, before, h_out=h_out, c_out=c_out, gates_out=kept)
        return h_out.clone(), c_out.clone(), kept

    def check(got):
        for what, one, right, bound in zip(
            ("h", "c", "gates"), got, (h, after, gates), (2 * of_state, of_state, at_gates), strict=True
        ):
            if one is not None:
                assert_within(one, right, bound, what)

    calls.on_each("gates forward", dtype, forward, check, case["threads"])

    grad_h, grad_y, grad_c = (
        given(hidden, of, wanted) for of, wanted in zip((dtype, dtype, state), case["given"], strict=True)
    )
    saved, ended = whole(gates, dtype), whole(after, state)
    wide = [None if tensor is None else tensor.double() for tensor in (saved, c, ended, grad_h, grad_y, grad_c)]
    pre, before = (torch.empty(n, k * hidden, dtype=torch.float64) for k in (4, 1))
    gates_reference.backward(*wide, grad_pre_out=pre, grad_c_out=before)
    terms = sum(
        (tensor.abs() for tensor in wide[3:] if tensor is not None), torch.zeros(n, hidden, dtype=torch.float64)
    )
    bound = unit * terms * (2 + wide[1].abs())
    pre_out, before_out = output(4 * hidden, dtype), output(hidden, state)

    def backward():
        gates_cpu.backward(saved, c, ended, grad_h, grad_y, grad_c, grad_pre_out=pre_out, grad_c_out=before_out)
        return pre_out.clone(), before_out.clone()

    def check_backward(got):
        assert_within(got[0], pre, bound.repeat(1, 4), "grad_pre")
        assert_within(got[1], before, bound, "grad_c")

    calls.on_each("gates backward", dtype, backward, check_backward, case["threads"])


def draw_dropout(rng: Random) -> dict:
    part = dropout_reference.PART
    return {
        "count": rng.choice((0, 1, rng.randint(2, 70), rng.randint(2, 2000), part + rng.randint(-2, 2), 3 * part + 45)),
        "dtype": rng.choice(list(DTYPES)),
        "p": rng.choice((0.0, 0.1, 0.5, 0.9, rng.random())),
        "slope": rng.choice((1.0, 0.0, -0.6, 0.25)),
        "seed": rng.getrandbits(64),
        "offset": rng.choice((0, 0, 1, 3)),
        "threads": 2 if rng.random() < 0.3 else 1,
    }


def run_dropout(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare both passes of dropout with its definition, exactly."""
    dtype, least = DTYPES[case["dtype"]], dropout.least_of(case["p"])
    factors = dropout.factors_of(least, case["slope"])
    x, grad = (whole(normal(numbers, case["count"]), dtype, case["offset"]) for _ in range(2))
    drawn = factors, case["seed"], least
    expected, code = dropout_reference.forward(x, *drawn)
    expected_grad = dropout_reference.backward(grad, code, factors)

    def check(got):
        assert_same(got[1], code, "code")
        assert_same(got[0], expected)

    threads = case["threads"]
    calls.on_each("dropout forward", dtype, lambda: dropout_cpu.forward(x, *drawn), check, threads)
    calls.on_each(
        "dropout backward",
        dtype,
        lambda: dropout_cpu.backward(grad, code, factors),
        lambda got: assert_same(got, expected_grad),
        threads,
    )


def draw_momentum(rng: Random) -> dict:
    return {
        "counts": [rng.choice((0, 1, rng.randint(2, 70), rng.randint(2, 5000))) for _ in range(rng.randint(1, 5))],
        "dtype": rng.choice(list(DTYPES)),
        "offset": rng.choice((0, 0, 1, 3)),
        "momentum": rng.choice((0.0, 0.5, 0.9)),
        "rate": rng.choice((0.0, 0.1, 1e-3)),
        "keep": rng.choice((1.0, 0.999)),
        "threads": 2 if rng.random() < 0.3 else 1,
    }


def run_momentum(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare steps with momentum with float64."""
    dtype, factors = DTYPES[case["dtype"]], {name: case[name] for name in ("momentum", "rate", "keep")}
    weights, velocities, grads = (
        [whole(normal(numbers, count), dtype, case["offset"]) for count in case["counts"]] for _ in range(3)
    )
    expected = []
    for w, v, g in zip(weights, velocities, grads, strict=True):
        left, right = factors["momentum"] * v.double(), factors["rate"] * g.double()
        bound = 4 * ROUNDING[dtype] * (left.abs() + right.abs())
        kept = factors["keep"] * w.double()
        expected.append((left - right, bound, kept + left - right, bound + 4 * ROUNDING[dtype] * kept.abs()))

    def step():
        new = [[whole(tensor, dtype, case["offset"]) for tensor in tensors] for tensors in (weights, velocities)]
        momentum_cpu.step(*new, grads, **factors)
        return *new[0], *new[1]

    def check(got):
        for w, v, (right_v, bound_v, right_w, bound_w) in zip(
            got[: len(grads)], got[len(grads) :], expected, strict=True
        ):
            assert_within(v, right_v, bound_v, "velocity")
            assert_within(w, right_w, bound_w, "weight")

    calls.on_each("momentum", dtype, step, check, case["threads"])
