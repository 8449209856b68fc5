"""Refusals of bad input by the products on layouts, and of direct calls that would read beyond their operands."""

import numpy as np
import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.ops.conv.op import conv_op, conv_wgrad_op
from blocksparse.ops.linear.op import linear_op, linear_wgrad_op

STEPS = [1, 1], [0, 0], [1, 1]
LAYOUT = bs.patterns.dense((32, 64), block_size=16)
FITTING = {
    bs.linear: {"x": torch.randn(5, 64), "values": torch.randn(8, 16, 16), "bias": torch.randn(32)},
    bs.conv2d: {"x": torch.randn(2, 64, 6, 7), "values": torch.randn(8, 16, 16, 3, 3)},
}
FITTING |= dict.fromkeys((bs.conv_transpose2d, bs.conv1d), FITTING[bs.conv2d])
ALL = [
    ({"bias": torch.randn(31)}, r"bias: expected \[32\]"),
    ({"bias": torch.randn(32).half()}, "bias: expected the dtype of x"),
    ({"activation": "tanh"}, "activation: expected one of .*relu.*, got 'tanh'"),
    ({"layout": torch.ones(2, 4, dtype=torch.bool)}, "layout: expected a BlockLayout, got Tensor"),
    ({"x": [[1.0]]}, "x: expected a torch.Tensor, got list"),
]
LINEAR = [
    ({"x": torch.randn(5, 63)}, r"x: expected \[\.\.\., 64\] for BlockLayout\(.*\), got \[5, 63\]"),
    ({"x": torch.randn(())}, r"x: expected \[\.\.\., 64\]"),
    ({"values": torch.randn(7, 16, 16)}, r"values: expected \[8, 16, 16\] .*, got \[7, 16, 16\]"),
    ({"values": torch.randn(8, 16)}, r"values: expected \[8, 16, 16\]"),
    ({"values": torch.randn(8, 16, 16).double()}, "values: expected the dtype of x, torch.float32, got"),
    ({"values": torch.randn(8, 16, 16, device="meta")}, "values: expected the device of x, cpu, got meta"),
    ({"activation": ["relu"]}, r"activation: expected one of .*relu.*, got \['relu'\]"),
    ({"x": torch.randn(5, 64).to_sparse()}, "x: expected a plain dense tensor, got layout torch.sparse_coo"),
    (
        {"x": torch.nested.nested_tensor([torch.randn(5, 64)], layout=torch.jagged)},
        "x: expected a plain dense tensor, got a nested",
    ),
]
CONV = [
    (
        {"x": torch.randn(2, 63, 6, 7)},
        r"x: expected \[n, 64, height, width\] for BlockLayout\(.*, got \[2, 63, 6, 7\]",
    ),
    ({"x": torch.randn(64, 6)}, r"x: expected \[n, 64, height, width\]"),
    ({"x": torch.randn(1, 1, 64, 6, 7)}, r"x: expected \[n, 64, height, width\]"),
    ({"x": torch.randn(2, 64, 0, 7)}, "x: expected an image of at least one position per axis"),
    ({"values": torch.randn(8, 16, 16)}, r"values: expected \[8, 16, 16, kernel height, kernel width\] for BlockL"),
    ({"values": torch.randn(7, 16, 16, 3, 3)}, r"values: expected \[8, 16, 16, kernel .*, got \[7, 16, 16, 3, 3\]"),
    ({"values": torch.randn(8, 16, 16, 3)}, r"values: expected \[8, 16, 16, kernel"),
    ({"values": torch.randn(8, 16, 16, 3, 0)}, "values: expected a kernel with at least one tap per axis"),
    ({"values": torch.randn(8, 16, 16, 3, 3).double()}, "values: expected the dtype of x, torch.float32, got"),
    ({"values": torch.randn(8, 16, 16, 3, 3, device="meta")}, "values: expected the device of x, cpu, got meta"),
    ({"stride": 0}, r"stride: expected an int, 1 or more and below 2\^31, or 2 of them, got 0"),
    ({"stride": 2**70}, "stride: expected an int"),
    ({"stride": (1, 2, 3)}, r"stride: expected .*, got \(1, 2, 3\)"),
    ({"stride": 1.5}, "stride: expected an int"),
    ({"dilation": -1}, "dilation: expected an int, 1 or more"),
    ({"padding": -1}, "padding: expected an int, 0 or more.*got -1"),
    ({"padding": "full"}, "padding: expected .*got 'full'"),
    ({"padding": np.array([1, 1])}, r"padding: expected an int.*got array\(\[1, 1\]\)"),
    ({"x": nn.UninitializedParameter()}, "x: expected a tensor with a shape, got an uninitialized"),
]
SIZES = [
    (
        bs.conv2d,
        {"x": torch.randn(2, 64, 2, 7)},
        r"x: expected a padded image of at least .*\(3, 3\).*got \(2, 7\)",
    ),
    (bs.conv2d, {"dilation": 3}, r"x: expected a padded image of at least the kernel's reach, \(7, 7\)"),
    (bs.conv2d, {"padding": 2**31 - 1}, r"expected an output of less than 2\^31 positions per axis, got \[4294967298"),
    (bs.conv_transpose2d, {"stride": 2**31 - 1}, r"expected an output of less than 2\^31 positions per axis"),
    (bs.conv_transpose2d, {"output_padding": None}, "output_padding: expected an int, 0 or more.*got None"),
    (bs.conv2d, {"padding": "same", "stride": 2}, r'stride: expected 1 for each axis with .*"same", got \(2, 2\)'),
    (bs.conv_transpose2d, {"output_padding": 1}, "output_padding: expected less than the stride"),
    (bs.conv_transpose2d, {"padding": 5}, r"padding: expected a non-empty output .*got \(5, 5\)"),
    (bs.conv_transpose2d, {"padding": "same"}, "padding: expected an int, 0 or more"),
    (bs.conv1d, {}, r"x: expected \[n, 64, length\]"),
]
CALLS = [(bs.linear, *case) for case in ALL + LINEAR]
CALLS += [(function, *case) for function in (bs.conv2d, bs.conv_transpose2d) for case in ALL + CONV]
CALLS += SIZES


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    CALLS,
    ids=[f"{function.__name__}-{'-'.join(changed)}" for function, changed, _ in CALLS],
)
def test_bad_input_is_refused(function, changed, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        function(**{"layout": LAYOUT, **FITTING[function], **changed})


# x, a gradient, values, and the index tensors with their number of columns.
OPERANDS = {
    "linear": [torch.randn(5, 64), torch.randn(5, 32), torch.randn(8, 16, 16)],
    "conv": [torch.randn(2, 6, 6, 64), torch.randn(2, 4, 4, 32), torch.randn(8, 16, 16, 3, 3)],
}
DIRECT = {
    "linear": [
        lambda x, g, v, i: linear_op(x[:, :-1], v, None, *i, False, None),
        lambda x, g, v, i: linear_op(g, v, None, *i, False, None),
        lambda x, g, v, i: linear_op(x, v, None, *i, True, None),
        lambda x, g, v, i: linear_op(x, v[:-1], None, *i, False, None),
        lambda x, g, v, i: linear_op(x, v, x[0], *i, False, None),
        lambda x, g, v, i: linear_op(x, v, None, [i[0][0], i[0][1] + 2], 4, False, None),
        lambda x, g, v, i: linear_op(x, v, None, i[0], 3, False, None),
        lambda x, g, v, i: linear_op(x.double(), v.half(), None, *i, False, None),
        lambda x, g, v, i: linear_op(x, v, g[0].half(), *i, False, None),
        lambda x, g, v, i: linear_op(x, v[0], None, *i, False, None),
        lambda x, g, v, i: linear_op(x, v, None, *i, False, "tanh"),
        lambda x, g, v, i: linear_wgrad_op(g.double(), x, *i),
        lambda x, g, v, i: linear_wgrad_op(g, x, i[0], 0),
        lambda x, g, v, i: linear_wgrad_op(g[:-1], x, *i),
        lambda x, g, v, i: linear_wgrad_op(g, x[0], *i),
        lambda x, g, v, i: linear_wgrad_op(g[:, :-1], x, *i),
    ],
    "conv": [
        lambda x, g, v, i: conv_op(x[..., :-1], v, None, *i, False, False, [4, 4], *STEPS, None),
        lambda x, g, v, i: conv_op(x, v, None, *i, True, False, [4, 4], *STEPS, None),
        lambda x, g, v, i: conv_op(x, v[:-1], None, *i, False, False, [4, 4], *STEPS, None),
        lambda x, g, v, i: conv_op(x, v[..., 0], None, *i, False, False, [4, 4], *STEPS, None),
        lambda x, g, v, i: conv_op(x, v, x[0, 0, 0], *i, False, False, [4, 4], *STEPS, None),
        lambda x, g, v, i: conv_op(x, v, None, *i, False, False, [4], *STEPS, None),
        lambda x, g, v, i: conv_op(x, v, None, *i, False, False, [4, -1], *STEPS, None),
        lambda x, g, v, i: conv_op(x, v, None, *i, False, False, [4, 4], [0, 1], *STEPS[1:], None),
        lambda x, g, v, i: conv_op(x, v, None, *i, False, False, [4, 4], *STEPS, "tanh"),
        lambda x, g, v, i: conv_op(x.double(), v, None, *i, False, False, [4, 4], *STEPS, None),
        lambda x, g, v, i: conv_wgrad_op(g[:-1], x, *i, False, [3, 3], *STEPS),
        lambda x, g, v, i: conv_wgrad_op(g[..., :-1], x, *i, False, [3, 3], *STEPS),
        lambda x, g, v, i: conv_wgrad_op(g, x, *i, False, [3], *STEPS),
        lambda x, g, v, i: conv_wgrad_op(g, x, i[0], 0, False, [3, 3], *STEPS),
    ],
}


@pytest.mark.parametrize(("op", "wrong"), [(op, call) for op, calls in DIRECT.items() for call in calls])
def test_direct_calls_of_the_op_stay_within_memory(op, wrong):
    indices = list(LAYOUT.indices_on("cpu")), LAYOUT.grid[1]
    with pytest.raises(bs.BlockSparseError, match="expected"):
        wrong(*OPERANDS[op], indices)
