"""GPU kernels refuse sizes beyond int32 where they count in it, and addresses are int64: interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch

import blocksparse as bs
from blocksparse.ops import lstm_gates
from blocksparse.ops.conv import triton as conv_backend
from blocksparse.ops.conv.plan import Axis
from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse.ops.gpu.tiles import Tile, use_tiles
from blocksparse.ops.linear import triton as linear_backend
from conv_backends import conv
from conv_backends import wgrad as conv_wgrad
from linear_backends import forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton_runtime.unavailable() is not None, reason=str(triton_runtime.unavailable())),
]

DEVICE = torch.device("cpu" if triton_runtime.interpreting() else "cuda:0")
TOO_MANY = 2**31
LAYOUT = bs.patterns.dense((2, 2), block_size=2)


def wide(*shape):
    """A tensor of this shape that is one number in memory."""
    return torch.zeros(1, device=DEVICE).expand(shape)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ((1, TOO_MANY + 1), 1, "features, in blocks of a power of two, on a GPU, got 2147483649"),
        ((1, 2**29), 3, "features, in blocks of a power of two, on a GPU, got 2147483648"),
        ((1, 1), (2**16, 2**15), "numbers in a block on a GPU, got 2147483648"),
    ],
    ids=["columns", "lanes", "one block"],
)
def test_layouts(grid, block, message):
    layout = bs.BlockLayout.from_indices([0], [grid[1] - 1], grid, block)
    message = f"layout: expected at most 2147418112 {message}"
    with pytest.raises(bs.BlockSparseError, match=message):
        linear_backend.schedule(layout, DEVICE, torch.float32, 16)
    with pytest.raises(bs.BlockSparseError, match=message):
        conv_backend.conv_wgrad(wide(1, 1, 1), wide(1, 3, 1), layout, False, [Axis(3, 1, 3, 1, 0, 1)])


@pytest.mark.parametrize(
    "call",
    [
        lambda x, values: linear_backend.linear(x, values, None, LAYOUT, False, None),
        lambda x, values: linear_backend.linear(x, values, None, LAYOUT, True, None),
        lambda x, values: linear_backend.linear_wgrad(x, x, LAYOUT),
    ],
    ids=["forward", "dgrad", "wgrad"],
)
def test_tokens(call):
    with pytest.raises(bs.BlockSparseError, match="x: expected at most 2147418112 tokens on a GPU, got 2147483648"):
        call(wide(TOO_MANY, 2), wide(1, 2, 2))


@pytest.mark.parametrize(
    ("images", "padding", "most", "message"),
    [
        (2, TOO_MANY - 1, TOO_MANY - 2**16, "2147418112 positions along an axis with all that its taps reach on a GPU"),
        (9, 1, 17, "17 positions in one call, with all that its taps reach, on a GPU, got 35"),
    ],
    ids=["reach", "images"],
)
def test_positions(monkeypatch, images, padding, most, message):
    monkeypatch.setattr(triton_runtime, "MAX_COUNTED", most)
    x, values = torch.ones(images, 3, 2, device=DEVICE), torch.ones(1, 2, 2, 3, device=DEVICE)
    steps = (1,), (padding,), (1,)
    for call in (lambda: conv(x, values, LAYOUT, (3,), *steps), lambda: conv_wgrad(x, x, LAYOUT, (3,), *steps)):
        with bs.use_backend("triton"), pytest.raises(bs.BlockSparseError, match=f"x: expected at most {message}"):
            call()


def test_positions_between_axes():
    """Where each axis fits, and the taps of one times the positions of the next do not."""
    x, values = torch.randn(1, 1, 2, 65536, device=DEVICE), torch.randn(1, 1, 1, 2, 1, device=DEVICE)
    how = {"stride": (512, 65536), "padding": (32768, 0), "dilation": (32768, 1)}
    with bs.use_backend("triton"), pytest.raises(bs.BlockSparseError, match="positions in one call, with all that"):
        bs.conv2d(x, values, bs.patterns.dense((1, 1), 1), **how)


def test_lanes_of_all_taps():
    layout = bs.BlockLayout.from_indices([0], [0], (1, 2**14), 1)
    axes = [Axis(2**18, 1, 2**18, 1, 0, 1)]
    with pytest.raises(bs.BlockSparseError, match="once for each tap, on a GPU, got 4294967296"):
        conv_backend._wgrad_launches(wide(1, 1, 1), wide(1, 1, 1), layout, False, axes)


@pytest.fixture(scope="module")
def memory():
    """More than 2^31 numbers, of which only those that are used take memory."""
    return torch.empty(2**31 + 2**16, dtype=torch.bfloat16, device=DEVICE)


def far_rows(memory, rows):
    """Rows that begin beyond 2^31, though each is less from the next."""
    return memory.as_strided((3, rows.shape[1]), (2**30 + 64, 1)).copy_(rows)


@pytest.mark.parametrize("transpose", [False, True])
def test_addresses_of_products(memory, monkeypatch, transpose):
    layout = bs.patterns.random((32, 48), 16, density=0.7, seed=0)
    values = torch.randn(layout.values_shape, device=DEVICE).bfloat16()
    rows = torch.randn(3, 32 if transpose else 48, device=DEVICE).bfloat16()
    expected = linear_backend.linear(rows, values, None, layout, transpose, None)
    assert torch.equal(linear_backend.linear(far_rows(memory, rows), values, None, layout, transpose, None), expected)
    monkeypatch.setattr(linear_backend.torch, "empty", lambda *size, **of: far_rows(memory, torch.zeros(*size)))
    assert torch.equal(linear_backend.linear(rows, values, None, layout, transpose, None), expected)


@pytest.mark.parametrize("far", ["grad", "x"])
def test_addresses_of_gradients(memory, far):
    layout = bs.patterns.random((32, 48), 16, density=0.7, seed=0)
    of = {"grad": torch.randn(3, 32, device=DEVICE).bfloat16(), "x": torch.randn(3, 48, device=DEVICE).bfloat16()}
    expected = linear_backend.linear_wgrad(of["grad"], of["x"], layout)
    of[far] = far_rows(memory, of[far])
    assert torch.equal(linear_backend.linear_wgrad(of["grad"], of["x"], layout), expected)


@pytest.mark.parametrize("taps", [1, 2])
def test_addresses_of_convolutions(memory, taps):
    """Convolutions with two outputs of one tap each, or two taps of one output."""
    channels, far = 2**16, 2**15
    layout = bs.BlockLayout.from_indices([0], [channels // 16 - 1], (1, channels // 16), 16)
    values = torch.randn(1, 16, 16, taps, device=DEVICE).bfloat16()
    x = memory[: channels * (far + 1)].view(1, far + 1, channels)
    read = torch.randn(2, 16, device=DEVICE).bfloat16()
    x[0, ::far, -16:] = read
    with bs.use_backend("triton"):
        y = conv(x, values, layout, (3 - taps,), (far,), (0,), (far,))
    expected = torch.einsum("tj,kijt->ki" if taps == 2 else "tj,kijs->ti", read.float(), values.float())
    torch.testing.assert_close(y[0].float(), expected, atol=3e-2, rtol=1e-2)


def test_features_of_gates():
    # Never touched.
    z, c = torch.empty(1, 2**31, dtype=torch.float16, device=DEVICE), torch.empty(1, 2**29, device=DEVICE)
    with bs.use_backend("triton"), pytest.raises(bs.BlockSparseError, match="c: expected at most 2147418112 features"):
        lstm_gates.forward(z, None, None, c, h_out=z[:, : 2**29], c_out=c)


def changed(monkeypatch, backend, **arguments):
    """Launches of the backend have these arguments instead of their own."""

    def launch(kernel, grid, tensors, given, *rest, **options):
        return triton_runtime.Launch(kernel, grid, tensors, given | arguments, *rest, **options)

    monkeypatch.setattr(backend, "Launch", launch)


def test_tasks_in_groups(monkeypatch):
    # Four times these tasks are 0 in int32, and programs are divided among groups of up to four tiles.
    changed(monkeypatch, linear_backend, tasks=2**30)
    x, values = torch.randn(2, 2, device=DEVICE), torch.randn(1, 2, 2, device=DEVICE)
    with bs.use_backend("triton"), use_tiles(forward=Tile(16, 16, 16, 1, 2, group_m=4)):
        y = forward(x, values, bs.BlockLayout(LAYOUT.mask(), 2))
    torch.testing.assert_close(y, x @ values[0].T, atol=1e-2, rtol=0)
