"""Refusals of convolutions; the op itself reads and writes its operands only."""

import pytest
import torch

import blocksparse as bs
from blocksparse.ops.conv.op import conv_op, conv_wgrad_op
from conv_backends import BACKENDS, conv, indices
from linear_backends import running

STEPS = [1, 1], [0, 0], [1, 1]


def fitting():
    layout = bs.patterns.dense((32, 64), block_size=16)
    return {"x": torch.randn(2, 64, 6, 7), "values": torch.randn(8, 16, 16, 3, 3), "layout": layout}


@pytest.mark.parametrize("function", [bs.conv2d, bs.conv_transpose2d], ids=["conv", "transposed"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
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
        ({"bias": torch.randn(31)}, r"bias: expected \[32\]"),
        ({"bias": torch.randn(32).half()}, "bias: expected the dtype of x"),
        ({"activation": "tanh"}, "activation: expected one of .*relu.*, got 'tanh'"),
        ({"stride": 0}, r"stride: expected an int, 1 or more and below 2\^31, or 2 of them, got 0"),
        ({"stride": 2**70}, "stride: expected an int"),
        ({"stride": (1, 2, 3)}, r"stride: expected .*, got \(1, 2, 3\)"),
        ({"stride": 1.5}, "stride: expected an int"),
        ({"dilation": -1}, "dilation: expected an int, 1 or more"),
        ({"padding": -1}, "padding: expected an int, 0 or more.*got -1"),
        ({"padding": "full"}, "padding: expected .*got 'full'"),
        ({"layout": torch.ones(2, 4, dtype=torch.bool)}, "layout: expected a BlockLayout, got Tensor"),
        ({"x": [[1.0]]}, "x: expected a torch.Tensor, got list"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused(function, changed, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        function(**{**fitting(), **changed})


@pytest.mark.parametrize(
    ("function", "changed", "message"),
    [
        (
            bs.conv2d,
            {"x": torch.randn(2, 64, 2, 7)},
            r"x: expected a padded image of at least .*\(3, 3\).*got \(2, 7\)",
        ),
        (bs.conv2d, {"dilation": 3}, r"x: expected a padded image of at least the kernel's reach, \(7, 7\)"),
        (bs.conv2d, {"padding": "same", "stride": 2}, r'stride: expected 1 for each axis with .*"same", got \(2, 2\)'),
        (bs.conv_transpose2d, {"output_padding": 1}, "output_padding: expected less than the stride"),
        (bs.conv_transpose2d, {"padding": 5}, r"padding: expected a non-empty output .*got \(5, 5\)"),
        (bs.conv_transpose2d, {"padding": "same"}, "padding: expected an int, 0 or more"),
        (bs.conv1d, {}, r"x: expected \[n, 64, length\]"),
    ],
)
def test_sizes_that_do_not_fit(function, changed, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        function(**{**fitting(), **changed})


@pytest.mark.parametrize(
    "wrong",
    [
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
)
def test_direct_calls_of_the_op_stay_within_memory(wrong):
    layout = bs.patterns.dense((32, 64), block_size=16)
    with pytest.raises(bs.BlockSparseError, match="expected"):
        wrong(torch.randn(2, 6, 6, 64), torch.randn(2, 4, 4, 32), torch.randn(8, 16, 16, 3, 3), indices(layout))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_beyond_the_reach_of_any_tap_are_zeros(backend):
    # Callers of the op itself may ask for any output: where no tap reaches it is zero, and nothing outside is read.
    layout = bs.patterns.dense((8, 8), block_size=8)
    with running(backend):
        x, values = torch.randn(1, 3, 3, 8), torch.randn(1, 8, 8, 3, 3)
        y = conv(x, values, layout, (9, 9), (1, 1), (-1, 5), (1, 1))
    assert (y[:, 2:] == 0).all()
    assert (y[:, :, :3] == 0).all()
