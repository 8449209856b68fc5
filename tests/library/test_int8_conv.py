"""Convolutions in 8 bits: what each output rounds, geometries of all kinds, models of them."""

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.autograd import forward_ad

import blocksparse as bs
from blocksparse.ops.int8_conv import int8_conv
from blocksparse.ops.int8_linear import int8_linear, quantized
from conv_backends import DENSE
from linear_backends import CPU, assert_close, running

BACKENDS = ["reference", *CPU]
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# (out, in), block, density, kernel, image, steps
SHAPES = {
    "even": ((64, 32), 16, 0.5, (3, 3), (6, 5), {"padding": 1}),
    "strides": ((24, 16), 8, 0.6, (3, 2), (9, 8), {"stride": (2, 3), "padding": (1, 0)}),
    "dilation": ((24, 16), 8, 0.6, (2, 3), (8, 9), {"dilation": (3, 2), "padding": (2, 3)}),
    "same": ((24, 16), 8, 0.6, (4, 3), (5, 6), {"padding": "same"}),
    "odd blocks": ((15, 21), (5, 7), 0.6, (3, 3), (5, 5), {"padding": "valid"}),
    "tall blocks": ((96, 6), (96, 2), 0.7, (3, 3), (5, 5), {"padding": 2}),
    "one pixel": ((16, 32), 8, 0.5, (1, 1), (5, 4), {}),
    "one pixel in steps": ((16, 32), 8, 0.5, (1, 1), (5, 4), {"stride": 2}),
    "empty rows": ((96, 16), 8, 0.1, (3, 3), (5, 5), {}),
    "nothing": ((16, 16), 8, 0.0, (3, 3), (5, 5), {}),
    "one axis": ((24, 16), 8, 0.5, (5,), (17,), {"padding": 2, "stride": 3}),
    "three axes": ((24, 16), 8, 0.5, (2, 3, 2), (4, 5, 3), {"padding": (1, 1, 0), "stride": (1, 2, 1)}),
}
ACTIVATIONS = {None: lambda y: y, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu}


def by_hand(x, values, scales, layout, bias, activation, **steps):
    """Compute the definition in float64: one dense convolution of each output's own rounded inputs."""
    axes, kernel = x.dim() - 2, values.shape[3:]
    weight = bs.to_dense(values.double() * scales.double()[(..., *[None] * (axes + 1))], layout)
    # A convolution with a kernel of ones at one tap and channel each gathers the patches [n, in * taps, *space].
    numbers = weight[0].numel()
    ones = torch.eye(numbers, dtype=torch.float64).reshape(numbers, x.shape[1], *kernel)
    rows = DENSE[axes](x.double(), ones, **steps).movedim(1, -1)
    largest = rows.float().abs().amax(-1, keepdim=True)
    factor = torch.where(largest > 0, 127 / largest, 0)
    rounded = (rows.float() * factor).round().double()
    y = (rounded @ weight.flatten(1).T * (largest / 127).double()).movedim(-1, 1)
    y = y if bias is None else y + bias.double().reshape(-1, *[1] * axes)
    return ACTIVATIONS[activation](y)


def numbers(*shape, dtype=torch.float32):
    """Images in which no number is next to the middle between two integers, where rounding is anyone's guess.

    In the first channel are the largest, so that each output that sees any pixel has a scale of a power of two.
    """
    x = torch.randint(-126, 127, shape) + torch.empty(shape).uniform_(-0.4, 0.4)
    x[:, 0] = 127.0
    return (x * 2.0 ** torch.randint(-4, 4, (shape[0], *[1] * (len(shape) - 1)))).to(dtype)


def operands(name, dtype=torch.float32, images=2):
    size, block, density, kernel, image, steps = SHAPES[name]
    layout = bs.patterns.random(size, block, density=density, seed=0)
    values, scales = quantized(torch.randn(*layout.values_shape, *kernel))
    return numbers(images, size[1], *image, dtype=dtype), values, scales, layout, steps


@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_definition(backend, dtype, shape):
    x, values, scales, layout, steps = operands(shape, dtype)
    assert values.dtype == torch.int8
    bias = torch.randn(layout.shape[0], dtype=dtype)
    with running(backend):
        for given, activation in ((bias, None), (None, "relu"), (bias, "gelu"), (bias, "silu")):
            y = int8_conv(x, values, scales, layout, given, activation=activation, **steps)
            assert y.dtype == dtype
            expected = by_hand(x, values, scales, layout, given, activation, **steps)
            assert_close(y, expected, DTYPES[dtype], f"{shape} {activation}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_position_is_the_linear_product_of_its_patch(backend):
    """To the bit, and so whatever else is in the image or in the batch."""
    x, values, scales, layout, _ = operands("even", images=3)
    with running(backend):
        y = int8_conv(x, values, scales, layout, padding=1)
        patch = x[1, :, 1:4, 2:5]
        alone = int8_conv(patch, values, scales, layout)
        assert (alone[:, 0, 0] == y[1, :, 2, 3]).all()
        wide = bs.BlockLayout(layout.mask(), (16, 9 * 16))
        rows = patch.unflatten(0, (-1, 16)).permute(0, 2, 3, 1).flatten()
        assert (int8_linear(rows, values.permute(0, 1, 3, 4, 2).flatten(2), scales, wide) == alone[:, 0, 0]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_and_shapes(backend):
    x, values, scales, layout, steps = operands("even")
    with running(backend):
        expected = int8_conv(x, values, scales, layout, **steps)
        last = int8_conv(x.to(memory_format=torch.channels_last), values, scales, layout, **steps)
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert expected.is_contiguous()
        assert (last == expected).all()
        wide = x.repeat_interleave(2, 3)[..., ::2]
        assert (int8_conv(wide, values, scales, layout, **steps) == expected).all()
        assert (int8_conv(x[1], values, scales, layout, **steps) == expected[1]).all()
        assert int8_conv(x[:0], values, scales, layout, **steps).shape == (0, 64, 6, 5)
        assert (int8_conv(torch._neg_view(-x), values, scales, layout, **steps) == expected).all()


@pytest.mark.parametrize("backend", CPU)
def test_more_outputs_than_are_rounded_at_once(backend):
    """The core rounds 8 MiB at a time: some 7,000 outputs of 1,152 inputs."""
    layout = bs.patterns.random((16, 128), 16, density=0.3, seed=0)
    values, scales = quantized(torch.randn(*layout.values_shape, 3, 3))
    x = numbers(2, 128, 70, 71)
    with running(backend):
        y = int8_conv(x, values, scales, layout, padding=1)
    with bs.use_backend("reference"):
        assert_close(y, int8_conv(x, values, scales, layout, padding=1).double(), 1e-6, "all")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_outputs_of_patches_that_are_not_finite_are_nan(backend, bad):
    x, values, scales, layout, steps = operands("even")
    with running(backend):
        expected = int8_conv(x, values, scales, layout, **steps)
        x[1, 5, 2, 1] = bad
        y = int8_conv(x, values, scales, layout, **steps)
    seen = torch.zeros(2, 6, 5, dtype=torch.bool)
    seen[1, 1:4, 0:3] = True
    assert (y.isnan() == seen[:, None]).all()
    assert torch.where(seen[:, None], 0, y).equal(torch.where(seen[:, None], 0, expected))


def test_refused_arguments():
    x, values, scales, layout, _ = operands("even")
    for wrong, message in (
        (lambda: int8_conv(x[:, :16], values, scales, layout), r"x: expected \[n, 32, height, width\]"),
        (lambda: int8_conv(x.double(), values, scales, layout), "x: expected one of torch.float32"),
        (lambda: int8_conv(x, values.float(), scales, layout), "values: expected .*torch.int8"),
        (lambda: int8_conv(x, values[1:], scales, layout), "values: expected"),
        (lambda: int8_conv(x, values[..., 0, 0], scales, layout), "a kernel of 1 to 3 axes"),
        (lambda: int8_conv(x, values, scales[:, :4], layout), "scales: expected"),
        (lambda: int8_conv(x, values, scales, layout, x[0, 0, 0]), "bias: expected"),
        (lambda: int8_conv(x.clone().requires_grad_(), values, scales, layout), "tensors without gradients"),
        (lambda: int8_conv(x, values, scales, "layout"), "layout: expected"),
        (lambda: int8_conv(x, values, scales, layout, activation="tanh"), "activation: expected"),
        (lambda: int8_conv(x, values, scales, layout, stride=0), "stride: expected"),
        (lambda: int8_conv(x, values, scales, layout, dilation=9), "a padded image of at least"),
        (lambda: int8_conv([1.0], values, scales, layout), "x: expected a torch.Tensor"),
    ):
        with pytest.raises(bs.BlockSparseError, match=message):
            wrong()


# -- layers and models -------------------------------------------------------------------------------------------------


def model():
    return nn.Sequential(
        bs.nn.Conv2d(5, 40, 3, padding=1, density=0.5, block_size=(16, 2), activation="relu", padding_mode="reflect"),
        bs.nn.Conv2d(40, 30, (3, 2), stride=2, padding=1, dilation=2, density=0.5, block_size=8, bias=False),
        nn.Conv2d(30, 6, 1),
    )


LAYERS = {
    "one axis": (lambda: bs.nn.Conv1d(20, 30, 5, padding="same", density=0.5, block_size=8), (2, 20, 13)),
    "two axes": (lambda: bs.nn.Conv2d(20, 30, 3, padding=1, density=0.5, block_size=8), (2, 20, 7, 6)),
    "three axes": (lambda: bs.nn.Conv3d(20, 30, 3, padding=1, stride=2, density=0.5, block_size=8), (2, 20, 4, 5, 6)),
}


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("axes", LAYERS)
def test_layers(axes, mode, any_backend):
    make, shape = LAYERS[axes]
    layer, x = make(), torch.randn(shape)
    layer.padding_mode = mode
    small = bs.quantize(layer)
    assert type(small) is {1: bs.nn.QuantizedConv1d, 2: bs.nn.QuantizedConv2d, 3: bs.nn.QuantizedConv3d}[layer.axes]
    assert not list(small.parameters())
    with torch.no_grad():
        y, expected, rounded = small(x), layer(x), small.dequantized()(x)
    assert y.shape == expected.shape
    assert (y - expected).norm() < 0.02 * expected.norm()
    assert (y - rounded).norm() < 0.01 * rounded.norm()
    torch.testing.assert_close(small(x[1]), y[1])


def test_a_model_in_8_bits(any_backend):
    net, x = model(), torch.randn(4, 5, 8, 9)
    small = bs.quantize(net)
    assert [type(layer).__name__ for layer in small] == ["QuantizedConv2d", "QuantizedConv2d", "Conv2d"]
    assert type(net[0]) is bs.nn.Conv2d
    assert type(bs.quantize(net, skip="0")[0]) is bs.nn.Conv2d
    assert "padding=(1, 1), padding_mode='reflect', block_size=(16, 2)" in repr(small[0])
    assert "activation='relu'" in repr(small[0])
    with torch.no_grad():
        assert (small(x) - net(x)).norm() < 0.03 * net(x).norm()
        expected = small(x)
        torch.testing.assert_close(small.to(memory_format=torch.channels_last)(x), expected)


def test_sizes_may_be_open_in_a_graph(any_backend):
    small = bs.quantize(model())[:2]
    dims = {0: torch.export.Dim("n", min=2, max=50), 2: torch.export.Dim("height", min=6, max=50)}
    exported = torch.export.export(small, (torch.randn(4, 5, 8, 9),), dynamic_shapes=({**dims},)).module()
    x = torch.randn(3, 5, 13, 9)
    torch.testing.assert_close(exported(x), small(x))


def test_calls_with_other_arguments(any_backend):
    small, x = bs.quantize(model())[0], torch.randn(4, 5, 8, 9)
    for wrong, message in (
        (lambda: small(x, torch.ones(3)), "no gates"),
        (lambda: small(x[:, 1:]), r"x: expected a tensor \[n, 5, height, width\], with or without n, got"),
        (lambda: small([x]), "x: expected a tensor"),
        (lambda: small(x.double()), "x: expected one of torch.float32"),
        (lambda: small(x.clone().requires_grad_()), "tensors without gradients"),
        (lambda: bs.nn.QuantizedConv2d.of(small), "layer: expected a blocksparse.nn.Conv2d of torch.float32"),
        (lambda: bs.nn.QuantizedConv1d.of(model()[0]), "layer: expected a blocksparse.nn.Conv1d of torch.float32"),
        (lambda: bs.nn.QuantizedConv2d.of(model()[0].double()), "layer: expected a blocksparse.nn.Conv2d"),
        (lambda: bs.quantize(bs.nn.ConvTranspose2d(8, 8, 3, density=0.5, block_size=4)), "to quantize"),
    ):
        with pytest.raises(bs.BlockSparseError, match=message):
            wrong()
    x, values, scales, layout, _ = operands("even")
    with pytest.raises(bs.BlockSparseError, match="reverse-mode"), forward_ad.dual_level():
        int8_conv(forward_ad.make_dual(x, x), values, scales, layout)
