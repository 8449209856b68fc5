"""The properties that all modules in 8 bits share: one test per property, for linear layers, convolutions and LSTMs."""

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import blocksparse as bs

# The model, its input, and the relative error that rounding to 8 bits may have.
MODELS = {
    "linear": (
        lambda: nn.Sequential(
            bs.nn.Linear(50, 70, density=0.5, block_size=16, activation="gelu"),
            bs.nn.Linear(70, 30, density=0.5, bias=False),
        ),
        (4, 50),
        0.03,
    ),
    "conv": (
        lambda: nn.Sequential(
            bs.nn.Conv2d(5, 40, 3, padding=1, density=0.5, block_size=(16, 2), padding_mode="reflect"),
            bs.nn.Conv2d(40, 30, (3, 2), stride=2, padding=1, dilation=2, density=0.5, block_size=8, bias=False),
        ),
        (4, 5, 8, 9),
        0.04,
    ),
    "lstm": (lambda: bs.nn.LSTM(50, 70, num_layers=2, density=0.5, block_size=16), (4, 3, 50), 0.05),
}
on_every_model = pytest.mark.parametrize("name", MODELS)


def example(name):
    make, shape, bound = MODELS[name]
    return make(), torch.randn(shape), bound


def output(y):
    return y if isinstance(y, torch.Tensor) else y[0]


def first_layer(net):
    return net[0] if isinstance(net, nn.Sequential) else net


def assert_equal(got, expected):
    # A state of an LSTM near the middle between two integers may be rounded to either.
    torch.testing.assert_close(output(got), output(expected), rtol=1e-3, atol=1e-3)


def error(got, expected):
    return (output(got).float() - output(expected)).norm() / output(expected).norm()


TRANSFORMS = {
    "compiled": lambda net, x: torch.compile(net, fullgraph=True, backend="aot_eager"),
    "exported": lambda net, x: torch.export.export(net, (x,)).module(),
    "traced": lambda net, x: torch.jit.trace(net, (x,), check_trace=False),
    "make_fx": lambda net, x: make_fx(net)(x),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit")
@pytest.mark.parametrize("way", TRANSFORMS)
@on_every_model
def test_transforms(name, way, any_backend):
    net, x, _ = example(name)
    small = bs.quantize(net)
    assert_equal(TRANSFORMS[way](small, x)(x), small(x))


@on_every_model
def test_vmap(name, any_backend):
    net, x, _ = example(name)
    small, batch = bs.quantize(net), torch.stack([x, -x])
    expected = torch.stack([output(small(each)) for each in batch])
    assert_equal(torch.vmap(lambda x: output(small(x)))(batch), expected)


@on_every_model
def test_a_layer_shares_nothing_with_its_source_or_the_dequantized_one(name, any_backend):
    net, x, _ = example(name)
    layer = first_layer(net)
    kind = type(bs.quantize(layer))
    small = kind.of(layer)
    before, again = small(x), small.dequantized()
    assert_equal(kind.of(again)(x), before)
    with torch.no_grad():
        for parameter in (*layer.parameters(), *again.parameters()):
            parameter.zero_()
    assert_equal(small(x), before)
    assert all(each.dtype == torch.bfloat16 for each in small.to(torch.bfloat16).dequantized().parameters())


@on_every_model
def test_back_to_dense(name, any_backend):
    net, x, bound = example(name)
    small = bs.quantize(net)
    dense = bs.densify(small)
    assert not any("Quantized" in type(module).__name__ for module in dense.modules())
    with torch.no_grad():
        assert error(small(x), dense(x)) < bound
    with pytest.raises(bs.BlockSparseError, match="layers in 8 bits have no report"):
        bs.report(small)


@on_every_model
def test_refusals(name, any_backend):
    net, x, _ = example(name)
    small = bs.quantize(net)
    with pytest.raises(bs.BlockSparseError, match="reverse-mode"), forward_ad.dual_level():
        small(forward_ad.make_dual(x, x))
    with pytest.raises(bs.BlockSparseError, match="meta"):
        bs.quantize(MODELS[name][0]().to("meta"))
    nn.utils.prune.l1_unstructured(net.weight_hh_l0 if name == "lstm" else net[0], "values", 0.5)
    with pytest.raises(bs.BlockSparseError, match="`values` that are a parameter"):
        bs.quantize(net)


def test_a_weight_norm_may_be_skipped():
    model = nn.Sequential(bs.nn.WeightNorm(bs.nn.Linear(32, 32, block_size=8)), bs.nn.Linear(32, 32, block_size=8))
    with pytest.raises(bs.BlockSparseError, match=r"0 is a WeightNorm .* or skip it"):
        bs.quantize(model)
    assert type(bs.quantize(model, skip="0")[1]).__name__ == "QuantizedLinear"
