"""The contract of the convolutions, the same for every backend and instruction set, against dense float64."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse.ops.conv.op import conv_op, conv_wgrad_op
from blocksparse.ops.gpu.tiles import Tile, use_tiles
from conv_backends import BACKENDS, FAST, SLOW, conv, dense, indices, sparse, wgrad
from linear_backends import CPU, DTYPES, GPU, MAIN, Expected, assert_close, bound, cases, running
from strategies import layouts

MAIN_FAST = [backend for backend in MAIN if backend in FAST]
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
on_every_backend_in_its_dtypes = pytest.mark.parametrize(("backend", "dtype"), cases(BACKENDS))
# The interpreter takes seconds for what others do at once, fewer with few and large tiles.
WIDE = Tile(block_m=512, block_n=32, block_k=64, warps=8, stages=2)


@contextmanager
def running_wide(backend):
    tiles = {"forward": WIDE, "dgrad": WIDE, "wgrad": WIDE} if backend in SLOW else {}
    with running(backend), use_tiles(**tiles):
        yield


def check(
    backend, layout, space, kernel, dtype, n=2, transposed=False, activation=None, with_bias=True, channels_last=True,
    **steps,
):  # fmt: skip
    """Forward and both gradients against the dense convolution in float64."""
    dims = len(space)
    x = torch.randn(n, layout.shape[1], *space, dtype=dtype)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    inputs = [x, torch.randn(*layout.values_shape, *kernel, dtype=dtype)]
    inputs += [torch.randn(layout.shape[0], dtype=dtype)] if with_bias else []
    for tensor in inputs:
        tensor.requires_grad_()
    expected = Expected(
        lambda x, values, *bias: dense(dims, transposed, x, values, layout, *bias, **steps), inputs, activation
    )
    most = bound(backend, dtype)
    y = sparse(dims, transposed, *inputs[:2], layout, *inputs[2:], activation=activation, **steps)
    assert y.dtype == dtype
    assert_close(y, expected.y, most, "forward", expected.terms)
    with torch.no_grad():  # there the activation is fused
        fused = sparse(dims, transposed, *inputs[:2], layout, *inputs[2:], activation=activation, **steps)
        assert_close(fused, expected.y, most, "fused", expected.terms)
    if activation is not None:
        return
    grad = torch.randn(y.shape, dtype=dtype)
    got = torch.autograd.grad(y, inputs, grad)
    for name, a, (right, terms) in zip(("x", "values", "bias"), got, expected.gradients(grad), strict=False):
        assert_close(a, right, most, f"gradient of {name}", terms)


# -- the nine configurations of 2017: axes, strides, dilation, overlapping and diagonal blocks, transposed ------------

OVERLAPPING = bs.patterns.banded((128, 128), block_size=32, bandwidth=1)
DIAGONAL = bs.patterns.block_diagonal((128, 128), block_size=32)
CONFIGURATIONS = {
    "1-D": (DIAGONAL, (32,), (5,), {"padding": 2}),
    "1-D strided and dilated": (OVERLAPPING, (33,), (3,), {"stride": 2, "padding": 2, "dilation": 2}),
    "2-D": (OVERLAPPING, (9, 8), (3, 3), {"padding": 1}),
    "2-D valid, rectangular kernel": (DIAGONAL, (7, 10), (2, 5), {}),
    "2-D strided": (OVERLAPPING, (8, 9), (3, 3), {"stride": 2, "padding": 1}),
    "2-D dilated, rectangular blocks": (bs.patterns.banded((64, 32), (16, 8), 1), (9, 9), (3, 3), {"dilation": (2, 3)}),
    "3-D": (DIAGONAL, (4, 5, 6), (3, 3, 3), {"padding": 1}),
    "3-D strided": (
        bs.patterns.banded((32, 64), (8, 16), 1),
        (5, 6, 7),
        (2, 3, 3),
        {"stride": (1, 2, 2), "padding": 1},
    ),
    "2-D transposed": (OVERLAPPING, (5, 6), (4, 4), {"stride": 2, "padding": 1, "transposed": True}),
}


def of_configurations():
    """All in float32 and bfloat16, of the other dtypes those of more steps; interpreted, small ones."""
    for case in cases(BACKENDS):
        backend, dtype = case.values
        names = [name for name in CONFIGURATIONS if dtype in (torch.float32, torch.bfloat16) or "strided" in name]
        if backend in SLOW:
            names = [{torch.float32: "2-D dilated, rectangular blocks"}.get(dtype, "1-D")]
        few = backend in SLOW and dtype == torch.float32
        for name in CONFIGURATIONS if few else names:
            marks = case.marks if name in names else pytest.mark.full
            yield pytest.param(backend, dtype, name, id=f"{case.id}-{name}", marks=marks)


@pytest.mark.parametrize(("backend", "dtype", "name"), list(of_configurations()))
def test_the_configurations_of_2017(backend, dtype, name):
    layout, space, kernel, steps = CONFIGURATIONS[name]
    with running_wide(backend):
        check(backend, layout, space, kernel, dtype, n=1 if backend in SLOW else 2, **steps)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("name", ["2-D", "3-D strided", "2-D transposed"])
def test_many_images(backend, name):
    layout, space, kernel, steps = CONFIGURATIONS[name]
    with running(backend):
        check(backend, layout, space, kernel, torch.float32, n=28, **steps)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("channels", [256, 288])
def test_positions_that_are_copied_apart(backend, channels):
    """On tiles, the positions of 256 channels are copied with gaps, those of 288 without."""
    layout = bs.patterns.random((64, channels), 32, density=0.4, seed=0)
    with running(backend):
        check(backend, layout, (9, 10), (3, 3), torch.bfloat16, padding=1)


@st.composite
def geometries(draw):
    dims = draw(st.integers(1, 3))

    def each(numbers):
        return tuple(draw(st.sampled_from(numbers)) for _ in range(dims))

    space = each([1, 2, 3, 4, 5, 7, 8] if dims == 3 else [1, 2, 5, 9, 13, 17, 20])
    kernel = each([1, 2, 3, 4])
    steps = {"stride": each([1, 1, 2, 3]), "padding": each([0, 1, 2, 4]), "dilation": each([1, 1, 2, 3])}
    transposed = draw(st.booleans())
    per_axis = zip(space, kernel, *steps.values(), strict=True)
    if transposed:
        steps["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(steps["stride"], steps["dilation"], strict=True)
        )
        more = steps["output_padding"]
        assume(
            all((x - 1) * s - 2 * p + d * (k - 1) + m >= 0 for (x, k, s, p, d), m in zip(per_axis, more, strict=True))
        )
    else:
        assume(all(x + 2 * p > d * (k - 1) for x, k, s, p, d in per_axis))
    return space, kernel, {**steps, "transposed": transposed}


PRODUCTS = {
    "layout": layouts(max_grid=4),
    "geometry": geometries(),
    "n": st.sampled_from([0, 1, 2, 3]),
    "activation": st.sampled_from([None, None, "relu", "gelu", "silu"]),
    "with_bias": st.booleans(),
    "channels_last": st.booleans(),
    "seed": st.integers(0, 2**31),
}


def check_drawn(backend, dtype, layout, geometry, n, activation, with_bias, channels_last, seed):
    torch.manual_seed(seed)
    space, kernel, steps = geometry
    with running_wide(backend):
        check(backend, layout, space, kernel, dtype, n, **steps, activation=activation, with_bias=with_bias,
              channels_last=channels_last)  # fmt: skip


@pytest.mark.parametrize(("backend", "dtype"), cases(["reference", *CPU]))
@settings(max_examples=8)
@given(**PRODUCTS)
def test_agrees_with_float64(backend, dtype, **drawn):
    check_drawn(backend, dtype, **drawn)


@pytest.mark.parametrize("backend", [*GPU[:1], *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
@settings(max_examples=3, phases=[Phase.explicit, Phase.generate])  # shrinking would take minutes
@given(dtype=st.sampled_from(DTYPES), **PRODUCTS)
def test_triton_agrees_with_float64(backend, dtype, **drawn):
    check_drawn(backend, dtype, **drawn)


def of_blocks():
    """In bfloat16 and float32 all blocks, in other dtypes some; interpreted one, and `full` one in each dtype. On a
    GPU most are `full`, of other CPUs' kernels half."""
    blocks = [1, 3, 4, 8, 16, 32, 64, 128, (32, 4), (16, 3), (8, 32), (12, 20), (128, 4)]
    for case in cases(FAST):
        some = {torch.float64: [3, 16, (12, 20)], torch.float16: [1, 8, (16, 3)]}.get(case.values[1], blocks)
        some = some if case.values[0] != "reference" else [3, 32, (12, 20)]
        for nth, block in enumerate(some):
            backend = case.values[0]
            seldom = (backend in GPU and nth % 3) or (backend in CPU and backend not in MAIN and nth % 2 == 0)
            marks = pytest.mark.full if seldom else case.marks
            yield pytest.param(*case.values, block, id=f"{case.id}-block {block}", marks=marks)
    for backend in SLOW:
        for dtype, block in zip(DTYPES, [8, (32, 4), (12, 20), 64], strict=True):
            marks = () if block == (12, 20) else pytest.mark.full
            yield pytest.param(backend, dtype, block, id=f"{backend}-block {block}", marks=marks)


@pytest.mark.parametrize(("backend", "dtype", "block"), list(of_blocks()))
def test_every_block_size(backend, dtype, block):
    out_block, in_block = block if isinstance(block, tuple) else (block, block)
    grid = (2, 2) if backend in SLOW else (3, 4)
    layout = bs.patterns.random((grid[0] * out_block, grid[1] * in_block), block, density=0.5, seed=1)
    with running_wide(backend):
        n = 1 if backend in SLOW else 2
        check(backend, layout, (3, 4) if backend in SLOW else (7, 11), (3, 3), dtype, n, padding=1)
        check(backend, layout, (4, 3), (3, 3), dtype, n, padding=1, stride=2, transposed=True)


@on_every_backend_in_its_dtypes
def test_a_kernel_of_one(backend, dtype):
    layout = bs.patterns.random((32, 32) if backend in SLOW else (96, 64), 16, density=0.5, seed=0)
    steps = [{}, {"stride": 2}, {"padding": (1, 0)}]
    with running_wide(backend):
        for transposed, step in itertools.product((False, True), steps[:2] if backend in SLOW else steps):
            check(backend, layout, (5, 6), (1, 1), dtype, transposed=transposed, **step)


SPACES = [(1, 1), (1, 7), (300, 2), (2, 300), (40, 41)]


@pytest.mark.parametrize(
    ("backend", "space"),
    [(b, space) for b in FAST for space in SPACES[: 5 if b in MAIN_FAST and b in CPU + GPU else 2]],
    ids=str,
)
def test_images_of_every_size(backend, space):
    layout = bs.patterns.random((64, 64), 16, density=0.4, seed=0)
    with running_wide(backend):
        for n in (1,) if space == (40, 41) or backend in SLOW else (1, 9):
            check(backend, layout, space, (3, 3), torch.float32, n=n, padding=1)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("backend", MAIN_FAST)
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4), (1, 6)], ids=str)
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_named_paddings(backend, kernel, dilation, padding):
    with running(backend):
        layout = bs.patterns.random((24, 32), 8, density=0.5, seed=0)
        x, values = torch.randn(2, 32, 12, 13), torch.randn(*layout.values_shape, *kernel)
        y = bs.conv2d(x, values, layout, padding=padding, dilation=dilation)
        expected = F.conv2d(x.double(), bs.to_dense(values, layout).double(), padding=padding, dilation=dilation)
        torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("backend", [*FAST, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_long_sums_are_accurate(backend):
    layout = bs.patterns.dense((16, 2048), 16)
    with running(backend):
        x, values = torch.randn(1, 4, 4, 2048), torch.randn(*layout.values_shape, 3, 3)
        most = 6e-7 if backend.startswith("cpu") else bound(backend, torch.float32)
        y = conv(x, values, layout, (4, 4), (1, 1), (1, 1), (1, 1))
        expected = dense(2, False, x.movedim(-1, 1).double(), values.double(), layout, padding=1).movedim(1, -1)
        assert_close(y, expected, most, "forward")
        layout = bs.patterns.dense((16, 16), 16)
        x, grad = torch.randn(12, 32, 32, 16), torch.randn(12, 32, 32, 16)
        got = wgrad(grad, x, layout, (1, 3), (1, 1), (0, 1), (1, 1))
        expected = torch.nn.grad.conv2d_weight(
            x.movedim(-1, 1).double(), (16, 16, 1, 3), grad.movedim(-1, 1).double(), padding=(0, 1)
        )
        assert_close(got[0], expected, most, "wgrad")


# -- what is absent, and what is not a number ---------------------------------------------------------------------


@on_every_backend
def test_outputs_that_no_tap_reaches(backend):
    with running(backend):
        # Between the taps of a transposed convolution with a stride beyond its kernel, and far out in the padding.
        layout = bs.patterns.dense((8, 8), 8)
        x, values, bias = torch.randn(1, 8, 2, 2), torch.randn(1, 8, 8, 1, 1), torch.randn(8)
        y = bs.conv_transpose2d(x, values, layout, bias, stride=3)
        assert torch.equal(y[:, :, 1], bias.reshape(1, 8, 1).expand(1, 8, 4))
        assert (bs.conv2d(x, values, layout, padding=2)[:, :, 0] == 0).all()


@on_every_backend
@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_beyond_the_image_that_no_tap_reaches(backend, transposed):
    layout = bs.patterns.dense((32, 32), 32)
    x, values, bias = (torch.randn(shape).bfloat16() for shape in [(1, 32, 2), (1, 32, 32, 2), (32,)])
    with running(backend):
        if transposed:  # taps meet the positions before and behind all outputs
            y = bs.conv_transpose1d(x, values, layout, bias, padding=2, dilation=9)
        else:
            y = bs.conv1d(x, values, layout, bias, padding=10, dilation=13)
    assert y.shape[2] > x.shape[2]
    assert torch.equal(y, bias.reshape(1, 32, 1).expand_as(y))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if "triton" not in name])  # which multiplies the border
def test_infinite_weights_do_not_meet_the_border(backend):
    layout = bs.patterns.dense((32, 32), 32)
    x, values = torch.ones(1, 32, 8).bfloat16(), torch.ones(1, 32, 32, 3).bfloat16()
    values[0, 0, 0, 0] = torch.inf
    with running(backend):
        y = bs.conv1d(x, values, layout, padding=1)
    assert y[0, 0, 0] == 64
    assert (y[0, 0, 1:] == torch.inf).all()


@on_every_backend
def test_sizes_beyond_the_reach_of_any_tap_are_zeros(backend):
    # Callers of the op itself may ask for any output: where no tap reaches it is zero, and nothing outside is read.
    layout = bs.patterns.dense((8, 8), block_size=8)
    with running(backend):
        x, values = torch.randn(1, 3, 3, 8), torch.randn(1, 8, 8, 3, 3)
        y = conv(x, values, layout, (9, 9), (1, 1), (-1, 5), (1, 1))
    assert (y[:, 2:] == 0).all()
    assert (y[:, :, :3] == 0).all()


@on_every_backend_in_its_dtypes
def test_nan_reaches_connected_outputs_only(backend, dtype):
    with running(backend):
        layout = bs.BlockLayout([[True, False], [True, True]], block_size=16)
        x = torch.randn(2, 32, 7, 7, dtype=dtype)
        values = torch.randn(*layout.values_shape, 3, 3, dtype=dtype)
        x[1, 20, 0, 6] = torch.nan  # in a corner: next to it in memory lies the other side of the image
        x, values = x.requires_grad_(), values.requires_grad_()
        y = bs.conv2d(x, values, layout, padding=1, activation="silu")
        grad_values = torch.autograd.grad(bs.conv2d(x, values, layout, padding=1).sum(), values)[0]
        reached = torch.zeros(2, 32, 7, 7, dtype=torch.bool)
        reached[1, 16:, :2, 5:] = True
        assert torch.equal(y.isnan(), reached)
        # The taps that meet the corner with an output: up to one down and one left of it.
        taps = torch.zeros(3, 16, 16, 3, 3, dtype=torch.bool)
        taps[2, :, 4, :2, 1:] = True
        assert torch.equal(grad_values.isnan(), taps)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_output_has_the_memory_format_of_x():
    layout = bs.patterns.dense((16, 8), block_size=8)
    x, values = torch.randn(2, 8, 5, 5), torch.randn(*layout.values_shape, 3, 3)
    assert bs.conv2d(x, values, layout).is_contiguous()
    last = bs.conv2d(x.to(memory_format=torch.channels_last), values, layout)
    assert last.is_contiguous(memory_format=torch.channels_last)
    one = bs.conv2d(torch.randn(2, 8, 3, 3), values, layout)  # a single pixel is both
    assert one.view(2, 16).shape == (2, 16)


@pytest.mark.parametrize("backend", MAIN_FAST)
def test_without_a_batch(backend):
    with running(backend):
        layout = bs.patterns.dense((16, 8), block_size=8)
        x, values = torch.randn(8, 5, 6), torch.randn(*layout.values_shape, 3, 3)
        for function in (bs.conv2d, bs.conv_transpose2d):
            torch.testing.assert_close(function(x, values, layout), function(x[None], values, layout)[0])


# -- compilers ------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, pytest.param("gelu", marks=pytest.mark.full)])
def test_opcheck(activation):
    layout = bs.patterns.random((12, 20), block_size=4, density=0.5, seed=0)
    x, values = (
        torch.randn(2, 5, 6, 20, requires_grad=True),
        torch.randn(*layout.values_shape, 3, 2, requires_grad=True),
    )
    grad, bias = torch.randn(2, 3, 7, 12, requires_grad=True), torch.randn(12, requires_grad=True)
    steps = [2, 1], [1, 1], [1, 1]
    torch.library.opcheck(conv_op, (x, values, bias, *indices(layout), False, False, [3, 7], *steps, activation))
    torch.library.opcheck(conv_op, (grad, values, None, *indices(layout), True, True, [5, 6], *steps, activation))
    torch.library.opcheck(conv_wgrad_op, (grad, x, *indices(layout), False, [3, 2], *steps))


def test_opcheck_on_an_empty_layout_and_no_images():
    layout = bs.BlockLayout(torch.zeros(2, 3, dtype=torch.bool), block_size=4)
    steps = [1], [0], [1]
    nothing = torch.randn(0, 5, 12), torch.randn(0, 4, 4, 3)
    torch.library.opcheck(conv_op, (*nothing, None, *indices(layout), False, False, [3], *steps, None))
    torch.library.opcheck(conv_wgrad_op, (torch.randn(0, 3, 8), nothing[0], *indices(layout), False, [3], *steps))


@pytest.mark.parametrize("padding", [((1, 2, 3), (0, 1)), ((1, 2),)])
def test_pairs_of_padding_are_one_for_each_axis(padding):
    layout = bs.patterns.dense((16, 16), 8)
    values = torch.randn(*layout.values_shape, 3, 3)
    with pytest.raises(bs.BlockSparseError, match=r"padding: expected a pair \(before, behind\) for each of 2 axes"):
        bs.conv2d(torch.randn(1, 16, 8, 8), values, layout, padding=padding)
