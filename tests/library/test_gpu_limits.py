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
        (9, 1, 17, "17 positions in one call on a GPU, got 27"),
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
