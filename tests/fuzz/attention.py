"""Attention on layouts, one for all heads or one per head, with its gradients."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import torch
from torch import Tensor

import blocksparse as bs

from .calls import DTYPES, Calls, Fault
from .layouts import build_layout, draw_layout, normal

# Error per largest score and largest element: softmax turns the error of a score into a factor.
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-13}


def draw(rng: Random) -> dict:
    block = rng.choice(((1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (3, 5), (16, 2), (70, 12), (32, 300)))
    heads = rng.randint(1, 4)
    first = draw_layout(rng, block, most=2500, longest=12)
    others = [{**draw_layout(rng, block, most=2500, longest=12), "grid": first["grid"]} for _ in range(heads - 1)]
    return {
        "layouts": [first, *others] if rng.random() < 0.5 else [first],
        "one": rng.random() < 0.5,
        "batch": rng.randint(0, 3),
        "heads": heads,
        "d": [rng.choice((1, 3, 8, 16, 40)), rng.choice((1, 4, 8, 32))],
        "causal": rng.random() < 0.5,
        "scale": rng.choice((None, None, 0.5)),
        "less": [rng.randrange(block[0]), rng.randrange(block[1])],
        "shared": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "window": rng.choice((None, [rng.randint(-1, 40), rng.randint(-1, 40)])),
        "softcap": rng.choice((None, None, 2.0)),
        "dtype": rng.choice(("float32", "float64")),
    }


def run(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare attention and its gradients with a dense computation in float64."""
    dtype, batch, heads = DTYPES[case["dtype"]], case["batch"], case["heads"]
    layouts = [build_layout(each, numbers) for each in case["layouts"]]
    given = layouts if len(layouts) == heads and not (case["one"] and heads == 1) else layouts[0]
    layouts = layouts if isinstance(given, list) else layouts[:1] * heads
    less, shared = case.get("less", [0, 0]), case.get("shared", heads)
    queries, keys = (size - fewer for size, fewer in zip(layouts[0].shape, less, strict=True))
    d, d_v = case["d"]
    sizes = (heads, queries, d), (shared, keys, d), (shared, keys, d_v)
    operands = [normal(numbers, batch, *size).to(dtype) for size in sizes]
    grad = normal(numbers, batch, heads, queries, d_v).to(dtype)
    scale, softcap = d**-0.5 if case["scale"] is None else case["scale"], case.get("softcap")
    seen = torch.stack([bs.to_dense(torch.ones(layout.values_shape), layout).bool() for layout in layouts])
    first = keys - queries if queries < keys and _is_whole(layouts[0], keys) else 0
    seen = seen[:, first : first + queries, :keys]
    left, right = case.get("window") or (-1, -1)
    right = 0 if case["causal"] else right
    seen = seen if right < 0 else seen.tril(keys - queries + right)
    seen = seen if left < 0 else seen.triu(keys - queries - left)

    def outputs_and_gradients(attention, operands: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
        leaves = [operand.clone().requires_grad_() for operand in operands]
        y = attention(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(heads // shared, 1) for x in (k, v))
        scores = scale * q @ k.mT
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(~seen, -math.inf)
        # A query may see no key.
        return scores.masked_fill(~seen.any(-1, keepdim=True), 0).softmax(-1).masked_fill(~seen, 0) @ v

    expected = outputs_and_gradients(dense, [operand.double() for operand in operands], grad.double())
    largest = max((float(each.abs().max()) for each in operands if each.numel()), default=0.0)
    bound = BOUNDS[dtype] * (1 + abs(scale) * d * largest**2) * (1 + largest)

    def check(got: tuple[Tensor, ...]) -> None:
        for name, one, right in zip(("y", "q", "k", "v"), got, expected, strict=True):
            if one.shape != right.shape or one.dtype != dtype:
                raise Fault(f"{name}: {list(one.shape)}, {one.dtype} for {list(right.shape)}, {dtype}")
            error = float((one.double() - right).abs().max()) if one.numel() else 0.0
            if not error <= bound * max(1.0, float(right.abs().max()) if right.numel() else 0.0):
                raise Fault(f"{name}: off by {error}")
        if (got[0].where(~seen.any(-1, keepdim=True), 0) != 0).any():
            raise Fault("y: other than 0 for a query that sees no key")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = case.get("window")
        return bs.nn.attention(q, k, v, given, case["causal"], case["scale"], window_size=window, softcap=softcap)

    calls.on_each("attention", dtype, lambda: outputs_and_gradients(attention, operands, grad), check, any_isa=True)


def _is_whole(layout: bs.BlockLayout, keys: int) -> bool:
    """Return whether the layout has a row for each key."""
    return layout.shape[0] - layout.block_shape[0] < keys <= layout.shape[0]
