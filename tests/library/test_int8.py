"""Products in 8 bits: integers exact on every instruction set; layers and models of them."""

import itertools

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import blocksparse as bs
from blocksparse.ops.int8_linear import int8_linear, quantized, reference
from linear_backends import CPU, assert_close, assert_same_bits, running

BACKENDS = ["reference", *CPU]
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = {
    "even": ((128, 96), 32, 0.5),
    "small blocks": ((40, 64), 8, 0.4),
    "odd blocks": ((45, 70), (5, 7), 0.5),
    "tall blocks": ((192, 40), (96, 4), 0.5),
    "empty rows": ((256, 32), 16, 0.2),
    "nothing": ((64, 64), 32, 0.0),
    "single numbers": ((9, 7), 1, 0.5),
}
ACTIVATIONS = {None: lambda y: y, "relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu}


def by_hand(x, values, scales, layout, bias, activation):
    """Compute the definition in float64, block by block."""
    x = x.double()
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).double()
    factor = torch.tensor(127.0) / x.float().abs().amax(-1, keepdim=True)
    numbers = (x.float() * factor).round().double()
    y = x.new_zeros(len(x), layout.shape[0])
    (height, width), rows, cols = layout.block_shape, layout.row_of_block, layout.col_of_block
    for i, (row, col) in enumerate(zip(rows.tolist(), cols.tolist(), strict=True)):
        w = values[i].double() * scales[i].double()[:, None]
        y[:, row * height : (row + 1) * height] += numbers[:, col * width : (col + 1) * width] @ w.T
    y = y * scale
    return ACTIVATIONS[activation](y if bias is None else y + bias.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_products(backend, dtype, shape):
    size, block, density = SHAPES[shape]
    layout = bs.patterns.random(size, block, density=density, seed=0)
    weight = torch.randn(layout.values_shape)
    of_blocks, of_rows = quantized(weight), quantized(weight, layout)
    with running(backend):
        for (values, scales), (tokens, activation) in itertools.product(
            (of_blocks, of_rows), ((1, None), (2, "relu"), (5, "gelu"), (70, "silu"))
        ):
            x, bias = torch.randn(tokens, size[1], dtype=dtype), torch.randn(size[0], dtype=dtype)
            for given in (bias, None):
                y = int8_linear(x, values, scales, layout, given, activation)
                assert y.dtype == dtype
                assert_close(
                    y, by_hand(x, values, scales, layout, given, activation), DTYPES[dtype], f"{tokens} tokens"
                )


@pytest.mark.parametrize("backend", CPU)
def test_the_definition_rounds_each_number_as_kernels_do(backend):
    """Among a million numbers some are so near to half an integer that a second rounding of the factor shows."""
    layout = bs.patterns.dense((8, 1024), 8)
    values, scales = quantized(torch.randn(layout.values_shape))
    x = torch.randn(1000, 1024)
    with running(backend):
        y = int8_linear(x, values, scales, layout)
    assert_close(y, reference.int8_linear(x, values, scales, None, layout, None).double(), 2e-7)


def test_scales_of_rows_are_equal_in_all_blocks_and_no_smaller_than_those_of_blocks():
    layout = bs.patterns.random((96, 128), 32, density=0.5, seed=0)
    weight = torch.randn(layout.values_shape)
    (values, scales), (_, of_blocks) = quantized(weight, layout), quantized(weight)
    rows = torch.from_numpy(layout.row_of_block.copy())
    for row in rows.unique():
        assert torch.equal(scales[rows == row], of_blocks[rows == row].amax(0).expand(int((rows == row).sum()), 32))
    assert ((values * scales[..., None] - weight).abs() <= scales[..., None] * 0.5001).all()
    layer = bs.nn.Linear(128, 96, layout=layout)
    with torch.no_grad():
        layer.values.copy_(weight)
    assert torch.equal(bs.quantize(layer, scale="row").scales, scales)
    assert torch.equal(bs.quantize(layer).scales, of_blocks)
    with pytest.raises(bs.BlockSparseError, match="scale: expected one of"):
        bs.quantize(layer, scale="tensor")


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("backend", CPU)
def test_the_same_bits_on_any_number_of_threads_and_tokens(backend, by_row):
    layout = bs.patterns.random((192, 160), 32, density=0.5, seed=0)
    values, scales = quantized(torch.randn(layout.values_shape), layout if by_row else None)
    x = torch.randn(150, 160)
    with running(backend):
        assert_same_bits(lambda: (int8_linear(x, values, scales, layout),))
        assert torch.equal(int8_linear(x[:3], values, scales, layout), int8_linear(x, values, scales, layout)[:3])


@pytest.mark.parametrize("backend", CPU)
def test_integers_are_exact(backend):
    """Whole numbers whose products fill 16 bits, in sums that are whole numbers below 2^24: no rounding anywhere."""
    layout = bs.patterns.dense((48, 64), 16)
    values = torch.randint(-127, 128, layout.values_shape, dtype=torch.int8)
    values[0] = 127
    scales, x = torch.ones(layout.values_shape[:2]), torch.randint(-127, 128, (13, 64)).float()
    x[:, 0], x[3] = 127, 127
    with running(backend):
        y = int8_linear(x, values, scales, layout)
    assert (y.double() == x.double() @ bs.to_dense(values.double(), layout).T).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides_and_shapes(backend):
    layout = bs.patterns.random((64, 96), 16, density=0.5, seed=0)
    values, scales = quantized(torch.randn(layout.values_shape))
    x, bias = torch.randn(6, 96), torch.randn(64)
    with running(backend):
        expected = int8_linear(x, values, scales, layout, bias)
        wide = x.repeat_interleave(2, 1)[:, ::2]
        torch.testing.assert_close(int8_linear(wide, values, scales, layout, bias.repeat_interleave(2)[::2]), expected)
        y = int8_linear(x.unflatten(0, (2, 3)).transpose(0, 1), values, scales, layout, bias)
        torch.testing.assert_close(y.transpose(0, 1).flatten(0, 1), expected)
        assert int8_linear(x[:0], values, scales, layout).shape == (0, 64)
        assert int8_linear(x[0], values, scales, layout).shape == (64,)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_tokens_that_are_not_finite_give_nan(backend, bad):
    layout = bs.patterns.dense((32, 40), 8)
    values, scales = quantized(torch.randn(layout.values_shape))
    x = torch.randn(9, 40)
    with running(backend):
        expected = int8_linear(x, values, scales, layout)
        x[4, 17] = bad
        y = int8_linear(x, values, scales, layout)
    assert y[4].isnan().all()
    kept = [*range(4), *range(5, 9)]
    assert (y[kept] == expected[kept]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_give_the_bias(backend):
    layout = bs.patterns.dense((32, 40), 8)
    values, scales = quantized(torch.zeros(layout.values_shape))
    bias = torch.randn(32)
    with running(backend):
        assert (int8_linear(torch.zeros(2, 40), values, scales, layout, bias) == bias).all()
        assert (int8_linear(torch.randn(2, 40), values, scales, layout, bias) == bias).all()


def test_the_layer_that_it_was_made_of_computes_the_same_bits(any_backend):
    layer = bs.nn.Linear(256, 192, density=0.05, block_size=1).eval()
    x = torch.randn(64, 256)
    with torch.no_grad():
        y = layer(x)
        bs.quantize(layer)(x)
        assert torch.equal(layer(x), y)


def test_writes_to_values_and_scales_count(any_backend):
    layout = bs.patterns.dense((32, 40), 8)
    values, scales = quantized(torch.randn(layout.values_shape))
    x = torch.randn(3, 40)
    before = int8_linear(x, values, scales, layout)
    values.neg_()
    torch.testing.assert_close(int8_linear(x, values, scales, layout), -before)
    scales.mul_(2)
    torch.testing.assert_close(int8_linear(x, values, scales, layout), -2 * before)


def test_refused_arguments():
    layout = bs.patterns.dense((32, 40), 8)
    values, scales = quantized(torch.randn(layout.values_shape))
    x = torch.randn(3, 40)
    for wrong, message in (
        (lambda: int8_linear(x[:, :32], values, scales, layout), r"x: expected \[\.\.\., 40\]"),
        (lambda: int8_linear(x.double(), values, scales, layout), "x: expected one of torch.float32"),
        (lambda: int8_linear(x, values.float(), scales, layout), "values: expected .*torch.int8"),
        (lambda: int8_linear(x, values[1:], scales, layout), "values: expected"),
        (lambda: int8_linear(x, values, scales[:, :4], layout), "scales: expected"),
        (lambda: int8_linear(x, values, scales, layout, x[0]), "bias: expected"),
        (
            lambda: int8_linear(x.bfloat16(), values, scales, layout, torch.ones(32)),
            r"x: expected torch.float32, as the",
        ),
        (lambda: int8_linear(x.requires_grad_(), values, scales, layout), "tensors without gradients"),
        (lambda: int8_linear(x, values, scales, "layout"), "layout: expected"),
        (lambda: int8_linear(x, values, scales, layout, activation="tanh"), "activation: expected"),
        (lambda: int8_linear([1.0], values, scales, layout), "x: expected a torch.Tensor"),
        (lambda: quantized(torch.tensor([[[torch.nan]]])), "values: expected finite"),
    ):
        with pytest.raises(bs.BlockSparseError, match=message):
            wrong()


# -- layers and models -------------------------------------------------------------------------------------------------


def model():
    return nn.Sequential(
        bs.nn.Linear(50, 70, density=0.5, block_size=16, activation="gelu"),
        bs.nn.Linear(70, 30, density=0.5, bias=False),
    )


def test_a_model_in_8_bits(any_backend):
    net, x = model(), torch.randn(4, 50)
    small = bs.quantize(net)
    assert [type(layer) for layer in small] == [bs.nn.QuantizedLinear] * 2
    assert type(net[0]) is bs.nn.Linear
    with torch.no_grad():
        assert (small(x) - net(x)).norm() < 0.02 * net(x).norm()
    assert not list(small.parameters())


def test_a_layer_with_a_transposed_weight_gets_its_class_back():
    class Transposed(torch.nn.Module):
        """The Conv1D of transformers: its weight is `[in, out]`."""

        def __init__(self, out_features, in_features):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(in_features, out_features))

    net = torch.nn.Sequential(bs.nn.Linear(50, 70, density=0.5, block_size=16))
    net[0].dense_kind = Transposed
    dense = bs.densify(bs.quantize(net))[0]
    assert type(dense) is Transposed
    torch.testing.assert_close(dense.weight, bs.densify(net)[0].weight, atol=0.01, rtol=0)


def test_weights_of_a_weight_norm_are_refused_until_they_are_folded():
    layer = bs.nn.WeightNorm(bs.nn.Linear(32, 32, density=0.5, block_size=16))
    net = torch.nn.Sequential(layer, bs.nn.Linear(32, 32, density=0.5, block_size=16))
    with pytest.raises(bs.BlockSparseError, match=r"model: 0 is a WeightNorm of a layer .*fold first"):
        bs.quantize(net, inplace=True)
    assert type(net[1]) is bs.nn.Linear
    assert type(bs.quantize(bs.nn.fold(net))[0]) is bs.nn.QuantizedLinear


def test_a_model_without_layers_to_quantize():
    net = torch.nn.Sequential(bs.nn.MultiplicativeLSTM(8, 16, density=0.5, block_size=8))
    with pytest.raises(bs.BlockSparseError, match=r"to quantize \(Linear.*got none \(MultiplicativeLSTM"):
        bs.quantize(net)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: bs.nn.Linear(8, 8, block_size=4).double(), "Linear: torch.float64 is not supported"),
        (lambda: bs.nn.Linear(1 << 17, 1, block_size=(1, 1 << 17)), "Linear: its blocks have 131072 inputs, more than"),
        (lambda: bs.nn.LSTM(3, 3), "LSTM: its weights are dense"),
    ],
)
def test_the_reason_why_a_layer_is_not_quantized(layer, reason):
    with pytest.raises(bs.BlockSparseError, match=rf"to quantize .*got none \({reason}"):
        bs.quantize(layer())


def test_overwritten_indices_are_refused(any_backend):
    small, x = bs.quantize(model()), torch.randn(4, 50)
    small(x)
    # Drawn until it has as many blocks in each layer, at other places.
    other = next(
        each
        for each in (bs.quantize(model()) for _ in range(1000))
        if [b.shape for b in each.buffers()] == [b.shape for b in small.buffers()] and each[0].layout != small[0].layout
    )
    for (name, mine), (_, theirs) in zip(small[0].named_buffers(), other[0].named_buffers(), strict=True):
        if name.endswith("indices"):
            mine.copy_(theirs)
    with pytest.raises(bs.BlockSparseError, match="written to this buffer"):
        small(x)


def test_densify_keeps_hooks(any_backend):
    small, called = bs.quantize(model()), []
    small[0].register_forward_hook(lambda *_: called.append(1))
    bs.densify(small)(torch.randn(4, 50))
    assert called


def test_small_numbers(any_backend):
    layout = bs.patterns.dense((8, 8), 8)
    values, scales = quantized(torch.full(layout.values_shape, 1e-38))
    assert not values.any()
    assert not scales.any()
    values, scales = quantized(torch.ones(layout.values_shape))
    for size, expected in ((1e-35, 8e-35), (1e-37, 0.0)):
        y = int8_linear(torch.full((2, 8), size), values, scales, layout)
        torch.testing.assert_close(y, torch.full((2, 8), expected), atol=0, rtol=1e-5)


def test_calls_with_other_arguments(any_backend):
    small, x = bs.quantize(model()), torch.randn(4, 50)
    with pytest.raises(bs.BlockSparseError, match="no gates"):
        small[0](x, torch.ones(3))
    with pytest.raises(bs.BlockSparseError, match=r"x: expected a tensor( \[\.\.\., 50\])?, got list"):
        small[0]([x])
    torch.testing.assert_close(small(torch._neg_view(-x)), small(x))


def test_skipped_layers_and_wrong_models():
    net = model()
    assert type(bs.quantize(net, skip="0")[0]) is bs.nn.Linear
    assert type(bs.quantize(net, skip=net[1])[1]) is bs.nn.Linear
    assert bs.quantize(net, inplace=True) is net
    for wrong in (nn.Linear(3, 3), net, bs.nn.Linear(4, 4, dtype=torch.float64)):
        with pytest.raises(bs.BlockSparseError, match="block-sparse layer of"):
            bs.quantize(wrong)
    with pytest.raises(bs.BlockSparseError, match="model: expected a torch"):
        bs.quantize("model")


@pytest.mark.parametrize("kind", [bs.nn.QuantizedLinear, bs.nn.QuantizedConv2d])
def test_int8_layers_are_made_from_layers(kind):
    with pytest.raises(bs.BlockSparseError, match=f"^{kind.__name__} is made by its method `of"):
        kind(bs.patterns.dense((8, 8), 4), torch.zeros(4, 4, 4, dtype=torch.int8), torch.ones(4, 4))
