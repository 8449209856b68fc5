"""Linear products with blocks, with blocks of 1, which have kernels of their own, and in 8 bits."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor

from blocksparse import BlockLayout, to_dense
from blocksparse.ops import cpu_core, int8_linear
from blocksparse.ops.linear import cpu

from .calls import DTYPES, Calls, assert_same, assert_within, exact_output, sum_bound
from .layouts import (
    build_layout,
    draw_block,
    draw_layout,
    draw_options,
    draw_tokens,
    normal,
    take_blocks,
    to_index,
    touched,
    vary,
)
from .memory import draw_rows, rows, whole

SQUARES = (2, 3, 4, 5, 8, 16, 24, 32, 33, 64, 128)


def _draw_product(rng: Random, layout: dict, tokens: int) -> dict:
    return {
        "layout": layout,
        "tokens": tokens,
        "x": draw_rows(rng),
        "grad": draw_rows(rng),
        **draw_options(rng),
    }


def draw_linear(rng: Random) -> dict:
    block = draw_block(rng, SQUARES, 128)
    if block == (1, 1):
        block = (1, 2)
    most = 150_000 if rng.random() < 0.03 else 10_000
    tokens = draw_tokens(rng) if rng.random() < 0.97 else rng.randint(200, 700)
    return _draw_product(rng, draw_layout(rng, block, max(most, block[0] * block[1])), tokens)


def draw_csr(rng: Random) -> dict:
    layout = draw_layout(rng, (1, 1), *((10_000, 200) if rng.random() < 0.9 else (60_000, 5000)))
    tokens = draw_tokens(rng)
    if rng.random() < 0.005:  # rows and outputs larger than the caches
        layout.update(grid=rng.choice(([3, 17_000], [70_000, 3])), filling="random", density=0.05)
        tokens = rng.choice((1, 65, 130))
    return _draw_product(rng, layout, tokens)


def run(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare a product and its gradients with float64."""
    layout, dtype, tokens = build_layout(case["layout"], numbers), DTYPES[case["dtype"]], case["tokens"]
    name = "csr" if layout.block_shape == (1, 1) else "linear"
    out_features, in_features = layout.shape
    kind = case["spread"]
    x = vary(numbers, normal(numbers, tokens, in_features), kind)
    grad = vary(numbers, normal(numbers, tokens, out_features), kind)
    values = vary(numbers, normal(numbers, *layout.values_shape), kind)
    x, grad = rows(x, dtype, case["x"]), rows(grad, dtype, case["grad"])
    values = whole(values, dtype, case["offset"])
    bias = whole(normal(numbers, out_features), dtype, case["offset"]) if case["bias"] else None
    product = ExactProduct(layout, values.double())
    threads = case["threads"]

    # Features without a block must not be read.
    clean = []
    for tensor, columns in ((x, True), (grad, False)):
        clean.append(tensor.double().clone())
        if tensor.stride(0) >= tensor.shape[1]:
            tensor[:, ~touched(layout, columns)] = torch.nan
    clean_x, clean_grad = clean

    expected, bound = exact_output(product(clean_x, False), bias, in_features, case["activation"], dtype)
    calls.on_each(
        name,
        dtype,
        lambda: cpu.linear(x, values, bias, layout, False, case["activation"]),
        lambda y: assert_within(y, expected, bound),
        threads,
    )
    expected_x, terms = product(clean_grad, True)
    bound_x = sum_bound(terms, out_features, dtype)
    out = whole(torch.full((tokens, in_features), torch.nan), dtype, case["offset"])
    calls.on_each(
        f"{name} transposed",
        dtype,
        lambda: cpu.linear(grad, values, None, layout, True, None, out=out.fill_(torch.nan)).clone(),
        lambda y: assert_within(y, expected_x, bound_x),
        threads,
    )
    x, grad = rows(clean_x, dtype, case["x"]), rows(clean_grad, dtype, case["grad"])
    expected_values, terms = product.sampled(clean_grad, clean_x)
    bound_values = sum_bound(terms, tokens, dtype)
    calls.on_each(
        f"{name} wgrad",
        dtype,
        lambda: cpu.linear_wgrad(grad, x, layout),
        lambda got: assert_within(got, expected_values, bound_values),
        threads,
    )
    if name != "csr":
        return

    needs_x = case["offset"] != 1
    bound_bias = sum_bound(clean_grad.abs().sum(0), tokens, dtype)

    def gradients():
        found = cpu.gradients(grad, x, values, layout, needs_x, case["bias"])
        return NotImplemented if found is None else found

    def check(found):
        grad_x, grad_values, grad_bias = found
        assert_within(grad_values, expected_values, bound_values, "values")
        if needs_x:
            assert_within(grad_x, expected_x, bound_x, "x")
        if case["bias"]:
            assert_within(grad_bias, clean_grad.sum(0), bound_bias, "bias")

    calls.on_each("csr gradients", dtype, gradients, check, threads)
    check_transposed_indices(layout, calls)


def draw_int8(rng: Random) -> dict:
    block = draw_block(rng, SQUARES, 128)
    tokens = draw_tokens(rng) if rng.random() < 0.97 else rng.randint(200, 700)
    case = _draw_product(rng, draw_layout(rng, block, max(10_000, block[0] * block[1])), tokens)
    return {**case, "dtype": rng.choice(("float32", "bfloat16", "float16")), "by_row": rng.random() < 0.5}


def run_int8(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Compare a product in 8 bits with that of the rounded numbers in float64."""
    layout, dtype, tokens = build_layout(case["layout"], numbers), DTYPES[case["dtype"]], case["tokens"]
    out_features, in_features = layout.shape
    x = vary(numbers, normal(numbers, tokens, in_features), case["spread"])
    x = rows(x, dtype, case["x"])
    weight = vary(numbers, normal(numbers, *layout.values_shape), case["spread"])
    values, scales = int8_linear.quantized(weight, layout if case["by_row"] else None)
    bias = whole(normal(numbers, out_features), dtype, case["offset"]) if case["bias"] else None
    integers, scale = int8_linear.reference.rounded(x)
    product = ExactProduct(layout, values.double() * scales.double()[..., None])
    exact = product(integers.double() * scale.double(), False)
    expected, bound = exact_output(exact, bias, in_features, case["activation"], dtype)
    calls.on_each(
        "int8",
        dtype,
        lambda: int8_linear.cpu.int8_linear(x, values, scales, bias, layout, case["activation"]),
        lambda y: assert_within(y, expected, bound),
        case["threads"],
    )


def check_transposed_indices(layout: BlockLayout, calls: Calls) -> None:
    """Check the indices by column, with 32 and 64 bits."""
    order = np.argsort(layout.col_of_block, kind="stable")
    expected = (
        np.concatenate([[0], np.cumsum(np.bincount(layout.col_of_block, minlength=layout.grid[1]))]),
        layout.row_of_block[order],
        order,
    )
    for index in (np.int32, np.int64):
        found = [np.full(len(array), 77, dtype=index) for array in expected]
        call = dict(zip(("to_start", "to_row", "to_position"), found, strict=True))
        calls.on_each(
            "csr transposed indices",
            None,
            lambda call=call: cpu_core.core().csr_transposed(start=layout.row_start, col=layout.col_of_block, **call),
            lambda _, found=found: [
                assert_same(torch.from_numpy(got).long(), torch.from_numpy(right).long())
                for got, right in zip(found, expected, strict=True)
            ],
            any_isa=True,
        )


class ExactProduct:
    """The products in float64, and the sums of the absolute values of their terms."""

    def __init__(self, layout: BlockLayout, values: Tensor):
        self.layout, self.values = layout, values
        self.is_hypersparse = layout.block_shape == (1, 1) and layout.nnz * 4 < layout.shape[0] * layout.shape[1]
        if self.is_hypersparse:
            self.row, self.col = to_index(layout.row_of_block), to_index(layout.col_of_block)
        else:
            self.weight = to_dense(values, layout)

    def __call__(self, x: Tensor, transpose: bool) -> tuple[Tensor, Tensor]:
        if not self.is_hypersparse:
            weight = self.weight if transpose else self.weight.T
            return x @ weight, x.abs() @ weight.abs()
        to, of = (self.col, self.row) if transpose else (self.row, self.col)
        terms = x[:, of] * self.values.flatten()
        zeros = terms.new_zeros(x.shape[0], self.layout.shape[1 if transpose else 0])
        return zeros.index_add(1, to, terms), zeros.index_add(1, to, terms.abs())

    def sampled(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.layout.values_shape
        if self.is_hypersparse:
            terms = grad[:, self.row] * x[:, self.col]
            return terms.sum(0).view(shape), terms.abs().sum(0).view(shape)
        return take_blocks(grad.T @ x, self.layout), take_blocks(grad.T.abs() @ x.abs(), self.layout)
