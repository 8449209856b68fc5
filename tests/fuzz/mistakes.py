"""Operands that do not fit: every public function refuses them before a kernel sees them."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from torch import Tensor

import blocksparse as bs
from blocksparse import BlockLayout, BlockSparseError
from blocksparse.ops import lstm_gates
from blocksparse.ops.checks import SUM_DTYPES
from blocksparse.ops.conv.op import conv_op, conv_wgrad_op
from blocksparse.ops.linear import linear_transposed
from blocksparse.ops.linear.op import linear_op, linear_wgrad_op

from .calls import DTYPES, Calls, Fault
from .layouts import build_layout, draw_layout

CONVS = {1: bs.conv1d, 2: bs.conv2d, 3: bs.conv3d}
TRANSPOSED = {1: bs.conv_transpose1d, 2: bs.conv_transpose2d, 3: bs.conv_transpose3d}
PUBLIC = ("linear", "linear_transposed", "conv", "conv_transpose")
FUNCTIONS = (*PUBLIC, "linear op", "wgrad op", "conv op", "conv wgrad op", "gates forward", "gates backward")
WRONG = ("longer", "shorter", "empty", "one axis more", "one axis less", "dtype", "int", "sparse", "no tensor")


def draw(rng: Random) -> dict:
    block = rng.choice(((1, 1), (rng.randint(1, 20), rng.randint(1, 20))))
    return {
        "layout": {**draw_layout(rng, block, 1000, 8), "filling": "full"},
        "function": rng.choice(FUNCTIONS),
        "dtype": rng.choice(list(DTYPES)),
        "dims": rng.choice((1, 2, 3)),
        "tokens": rng.choice((0, 1, 5, 20)),
        "operand": rng.randint(0, 99),
        "wrong": rng.choice(WRONG),
        "axis": rng.randint(0, 99),
        "bias": rng.random() < 0.5,
    }


def run(case: dict, numbers: np.random.Generator, calls: Calls) -> None:
    """Check that a call with a wrong operand raises."""
    layout, dtype = build_layout(case["layout"], numbers), DTYPES[case["dtype"]]
    call, operands, free = _call(case, layout, dtype)
    calls.on_each("right operands", dtype, lambda: call(**operands), lambda _: None, any_isa=True)
    name = sorted(operands)[case["operand"] % len(operands)]
    wrong = _wrong(operands[name], case["wrong"], case["axis"], free.get(name, ()))
    if wrong is None:
        return
    changed = {**operands, name: wrong}

    # A direct call of an op may raise any error, but must not read outside of its operands.
    errors = BlockSparseError if case["function"] in PUBLIC else Exception

    def refused():
        try:
            call(**changed)
        except errors:
            return True
        return False

    def check(was_refused):
        if not was_refused:
            got = list(wrong.shape) if isinstance(wrong, Tensor) else wrong
            raise Fault(f"{case['function']} took {name} {got}, {case['wrong']}")

    calls.on_each("mistakes", dtype, refused, check, any_isa=True)


def _wrong(tensor: Tensor, how: str, axis: int, free: tuple[int, ...]):
    """Return an invalid replacement for this tensor, or None; only the free axes may have any length."""
    axes = [axis for axis in range(tensor.dim()) if axis not in free]
    along = axes[axis % len(axes)]
    size = tensor.shape[along]
    if how == "longer":
        return torch.cat([tensor, tensor.narrow(along, 0, 1) if size else tensor], along) if size else None
    if how == "shorter":
        return tensor.narrow(along, 0, size - 1) if size else None
    if how == "empty":
        return tensor.narrow(along, 0, 0) if size else None
    if how == "one axis more":
        return None if -1 in free else tensor[None]
    if how == "one axis less":
        return None if -1 in free or tensor.shape[0] == 0 else tensor[0]
    if how == "dtype":
        return tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32)
    if how == "int":
        return tensor.int()
    if how == "sparse":
        return tensor.to_sparse()
    return "no tensor"


def _call(case: dict, layout: BlockLayout, dtype: torch.dtype):
    """Return a function, its operands, and for each operand the axes that may have any length; -1 stands for any number
    of axes.
    """
    (outs, ins), tokens, dims = layout.shape, case["tokens"], case["dims"]
    indices, in_blocks = [layout.crow_indices(), layout.col_indices()], layout.grid[1]
    space, kernel, ones = (5, 4, 3)[:dims], (3, 2, 1)[:dims], [1] * dims
    smaller = [a - b + 1 for a, b in zip(space, kernel, strict=True)]

    def tensors(of: torch.dtype = dtype, **shapes) -> dict:
        return {name: torch.ones(shape, dtype=of) for name, shape in shapes.items()}

    bias = {"bias": (outs,)} if case["bias"] else {}
    values, filters = layout.values_shape, (*layout.values_shape, *kernel)
    state, n, hidden = SUM_DTYPES[dtype], tokens, outs

    def gates_forward(**given):
        h, c, gates = (torch.empty(n, k * hidden, dtype=of) for k, of in ((1, dtype), (1, state), (4, dtype)))
        lstm_gates.forward(**{"add": None, "gain": None, "h_out": h, "c_out": c, "gates_out": gates, **given})

    def gates_backward(**given):
        lstm_gates.backward(**{"grad_h": None, "grad_y": None, "grad_c": None, **given})

    one, four = (n, hidden), (n, 4 * hidden)
    return {
        "linear": lambda: (
            lambda **given: bs.linear(layout=layout, **given),
            tensors(x=(tokens, ins), values=values, **bias),
            {"x": (0, -1)},
        ),
        "linear_transposed": lambda: (
            lambda **given: linear_transposed(layout=layout, **given),
            tensors(x=(tokens, outs), values=values),
            {"x": (0, -1)},
        ),
        "conv": lambda: (
            lambda **given: CONVS[dims](layout=layout, **given),
            tensors(x=(tokens, ins, *space), values=filters, **bias),
            {"x": (0, *range(2, 2 + dims), -1), "values": tuple(range(3, 3 + dims))},
        ),
        "conv_transpose": lambda: (
            lambda **given: TRANSPOSED[dims](layout=layout, **given),
            tensors(x=(tokens, ins, *space), values=filters, **bias),
            {"x": (0, *range(2, 2 + dims), -1), "values": tuple(range(3, 3 + dims))},
        ),
        "linear op": lambda: (
            lambda x, values, bias=None: linear_op(x, values, bias, indices, in_blocks, False, None),
            tensors(x=(tokens, ins), values=values, **bias),
            {"x": (0,), "values": (1,)},  # the op accepts blocks of any height
        ),
        "wgrad op": lambda: (
            lambda grad, x: linear_wgrad_op(grad, x, indices, in_blocks),
            tensors(grad=(tokens, outs), x=(tokens, ins)),
            {"grad": (1,), "x": (1,)},  # the operands determine the block size
        ),
        "conv op": lambda: (
            lambda x, values, bias=None: conv_op(
                x, values, bias, indices, in_blocks, False, False, smaller, ones, [0] * dims, ones, None
            ),
            tensors(x=(tokens, *space, ins), values=filters, **bias),
            {"x": tuple(range(1 + dims)), "values": (1, *range(3, 3 + dims))},
        ),
        "conv wgrad op": lambda: (
            lambda grad, x: conv_wgrad_op(grad, x, indices, in_blocks, False, kernel, ones, [0] * dims, ones),
            tensors(grad=(tokens, *smaller, outs), x=(tokens, *space, ins)),
            {"grad": tuple(range(1, 2 + dims)), "x": tuple(range(1, 2 + dims))},
        ),
        "gates forward": lambda: (
            gates_forward,
            {
                **tensors(z=four, add=four, gain=four[1:], h_out=one, gates_out=four),
                **tensors(state, c=one, c_out=one),
            },
            {"add": (-1,)},
        ),
        "gates backward": lambda: (
            gates_backward,
            {
                **tensors(gates=four, grad_h=one, grad_y=one, grad_pre_out=four),
                **tensors(state, c_before=one, c=one, grad_c=one, grad_c_out=one),
            },
            {},
        ),
    }[case["function"]]()
