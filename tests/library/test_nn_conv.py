"""The convolution modules, edge bias and weight norm: as torch.nn's with zeros, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse.nn.module import BlockSparseModule

OURS = {1: bs.nn.Conv1d, 2: bs.nn.Conv2d, 3: bs.nn.Conv3d}
OURS_TRANSPOSED = {1: bs.nn.ConvTranspose1d, 2: bs.nn.ConvTranspose2d, 3: bs.nn.ConvTranspose3d}
TORCH = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TORCH_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def dense_twin(layer, make, **settings):
    """The dense module with the same weights and zeros where the layout stores none."""
    twin = make(layer.in_channels, layer.out_channels, layer.kernel_size, bias=layer.bias is not None, **settings)
    weight = bs.to_dense(layer.values, layer.layout)[: layer.out_channels, : layer.in_channels]
    twin.weight = nn.Parameter(weight.transpose(0, 1) if twin.transposed else weight)
    if layer.bias is not None:
        twin.bias = layer.bias
    return twin


CONVOLUTIONS = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": "same", "dilation": 2},
    {"padding": "valid"},
    {"padding": 2, "padding_mode": "circular"},
    {"padding": "same", "padding_mode": "reflect"},
    {"padding": 1, "padding_mode": "replicate", "stride": 2},
]
TRANSPOSED = [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2, "bias": False}]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("block_size", [8, (16, 4)], ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [(OURS, TORCH, settings) for settings in CONVOLUTIONS]
    + [(OURS_TRANSPOSED, TORCH_TRANSPOSED, settings) for settings in TRANSPOSED],
)
def test_a_convolution_is_that_of_torch(ours, theirs, settings, axes, block_size):
    torch.manual_seed(0)
    layer = ours[axes](21, 42, 3, density=0.5, block_size=block_size, **settings)
    x = torch.randn(2, 21, *(9, 8, 7)[:axes])
    twin = dense_twin(layer, theirs[axes], **{name: value for name, value in settings.items() if name != "bias"})
    torch.testing.assert_close(layer(x), twin(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(x[0]), twin(x[0]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [(9, 8), (10, 9), (9, 9)])
def test_output_size(size):
    layer = bs.nn.ConvTranspose2d(16, 16, 3, stride=2, padding=1, block_size=8)
    twin = dense_twin(layer, nn.ConvTranspose2d, stride=2, padding=1)
    x = torch.randn(2, 16, 5, 5)
    if size == (9, 8):
        with pytest.raises(bs.BlockSparseError, match=r"output_size: expected sizes from \(9, 9\) to \(10, 10\)"):
            layer(x, output_size=size)
    else:
        torch.testing.assert_close(layer(x, output_size=size), twin(x, output_size=size), atol=1e-5, rtol=1e-5)


def test_channels_last_stays_and_colours_are_padded():
    layer = bs.nn.Conv2d(3, 40, 3, padding=1, block_size=(32, 4))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    y = layer(x)
    assert layer.layout.shape == (64, 4)
    torch.testing.assert_close(y, dense_twin(layer, nn.Conv2d, padding=1)(x), atol=1e-5, rtol=1e-5)
    y = bs.nn.Conv2d(3, 64, 3, block_size=(32, 4))(x)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_weights_are_drawn_over_the_true_fan_in():
    torch.manual_seed(0)
    layout = bs.BlockLayout([[True, True], [True, False], [False, False]], 32)
    layer = bs.nn.Conv2d(50, 96, 3, layout=layout)
    bounds = [1 / (50 * 9) ** 0.5, 1 / (32 * 9) ** 0.5, 0]
    for row, bound in enumerate(bounds):
        weight = bs.to_dense(layer.values, layout)[32 * row : 32 * row + 32]
        assert weight.abs().max() <= bound
        assert layer.bias[32 * row : 32 * row + 32].abs().max() <= bound
        if bound:
            assert weight.abs().max() > 0.99 * bound
    assert (layer.values[1, :, 18:] == 0).all(), "the padding of the channels"


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "last"])
def test_what_comes_next_may_work_in_place(kernel, memory_format):
    layer = bs.nn.Conv2d(16, 16, kernel, density=0.5, block_size=8)
    x = torch.randn(2, 16, 5, 5).to(memory_format=memory_format)
    layer(x).relu_().sum().backward()
    found = layer.values.grad.clone()
    layer.values.grad = None
    layer(x).relu().sum().backward()
    assert torch.equal(layer.values.grad, found)


@pytest.mark.parametrize("axes", [1, 2])
def test_a_model_in_channels_last(axes):
    model = nn.Sequential(OURS[axes](16, 16, 3, block_size=8), TORCH[2](16, 4, 3))
    x = torch.randn(2, 16, *[9] * axes)
    before = model[0](x)
    before.sum().backward()
    model.to(memory_format=torch.channels_last)
    assert model[0].values.is_contiguous()
    assert model[0].values.grad.shape == model[0].values.shape
    assert torch.equal(model[0](x), before)
    assert model.double()[0].values.dtype == torch.float64


def convolutions():
    return nn.Sequential(
        bs.nn.Conv2d(3, 32, 3, padding=1, block_size=(16, 4), activation="gelu"),
        bs.nn.WeightNorm(bs.nn.Conv2d(32, 64, 3, stride=2, density=0.5, block_size=16)),
        bs.nn.EdgeBias(64, (8, 8), kernel_size=3, stride=2),
        bs.nn.ConvTranspose2d(64, 20, 2, stride=2, density=0.5, block_size=16),
    )


def test_compiles_whole():
    torch._dynamo.reset()
    model = convolutions()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    torch.testing.assert_close(compiled(x), expected)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    torch.testing.assert_close(torch.autograd.grad(compiled(x).square().sum(), list(model.parameters())), grads)


# -- edge bias -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "settings", "patterns"),
    [
        ((14, 14), {"kernel_size": 3, "padding": 1}, 8),
        ((14, 14), {"kernel_size": 5, "padding": 2}, 24),
        ((14, 15), {"kernel_size": 3, "padding": 1, "stride": 2}, 5),
        ((9,), {"kernel_size": 3, "padding": 1}, 2),
        ((5, 5, 5), {"kernel_size": 3, "padding": 1}, 26),
        ((14, 14), {"kernel_size": 3}, 0),
        ((2, 2), {"kernel_size": 3, "padding": 1}, 4),
    ],
    ids=str,
)
def test_edge_bias_has_a_row_for_each_pattern(size, settings, patterns):
    layer = bs.nn.EdgeBias(4, size, **settings)
    assert layer.gain.shape == layer.bias.shape == (patterns, 4)
    ones = torch.ones(1, 1, *size)
    steps = {name: value for name, value in settings.items() if name != "kernel_size"}
    kernel = torch.rand(1, 1, *[settings["kernel_size"]] * len(size))
    met = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(size)](ones, kernel, **steps)[0, 0]
    y = torch.randn(2, 4, *met.shape)
    assert torch.equal(layer(y), y)
    with torch.no_grad():
        layer.gain.uniform_()
        layer.bias.uniform_()
    # A convolution of ones with a random kernel identifies the taps inside the image at each position.
    out = layer(torch.ones(1, 4, *met.shape))[0, 0]
    inside = met >= kernel.sum() * (1 - 1e-6)
    assert (out[inside] == 1).all()
    assert len(met[~inside].mul(1e5).round().unique()) == len(out[~inside].unique()) == patterns


def test_edge_bias_makes_borders_whole():
    # With the right gain the borders of a mean over ones are ones.
    conv = bs.nn.Conv2d(8, 8, 3, padding=1, bias=False, block_size=8)
    with torch.no_grad():
        conv.values.fill_(1 / 72)
    edge = bs.nn.EdgeBias(8, (6, 6), kernel_size=3, padding=1)
    optimizer = torch.optim.LBFGS(edge.parameters(), line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = (edge(conv(torch.ones(1, 8, 6, 6))) - 1).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    assert loss() < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((3, 3), 5), "size: expected 5 or more"),
        ((7, 3), "size: expected the sizes of 1 to 3 axes"),
        (((7, 7), (3, 3, 3)), "kernel_size: expected"),
    ],
)
def test_edge_bias_refuses(arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.nn.EdgeBias(4, *arguments)
    with pytest.raises(bs.BlockSparseError, match=r"input: expected \[n, 4, 7, 7\] or \[4, 7, 7\], got \[1, 4, 6, 7\]"):
        bs.nn.EdgeBias(4, (7, 7), 3, padding=1)(torch.randn(1, 4, 6, 7))


# -- weight norm -----------------------------------------------------------------------------------------------------


def test_weight_norm_is_over_the_stored_fan_in():
    torch.manual_seed(0)
    layout = bs.BlockLayout([[True, True], [True, False], [False, False]], 8)
    values = torch.randn(*layout.values_shape, 3, 3, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(24, dtype=torch.float64, requires_grad=True)
    weight = bs.to_dense(bs.nn.l2_normalize(values, layout, gain), layout).flatten(1)
    torch.testing.assert_close(weight.norm(dim=1)[:16], gain[:16])
    assert (weight[16:] == 0).all()
    with pytest.raises(bs.BlockSparseError, match=r"gain: expected \[24\]"):
        bs.nn.l2_normalize(values, layout, gain[:1])
    assert torch.autograd.gradcheck(lambda v, g: bs.nn.l2_normalize(v, layout, g), (values, gain), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True], ids=["stored", "autocast"])
def test_weight_norm_in_16_bits(dtype, autocast):
    # The squares of some weights are below the least number of float16, and an output without blocks has the norm 0.
    layout = bs.BlockLayout([[True, True], [True, False], [False, False]], 8)
    values, gain = 1e-4 * torch.randn(layout.values_shape), torch.rand(24)
    if not autocast:
        values, gain = values.to(dtype), gain.to(dtype)
    wide = [tensor.double().requires_grad_() for tensor in (values, gain)]
    mine = [tensor.clone().requires_grad_() for tensor in (values, gain)]
    expected = bs.nn.l2_normalize(wide[0], layout, wide[1])
    with torch.autocast("cpu", dtype, enabled=autocast):
        got = bs.nn.l2_normalize(mine[0], layout, mine[1])
    assert got.dtype == values.dtype
    limits = {"rtol": 1e-5, "atol": 1e-6} if autocast else {"rtol": 0.02, "atol": 1e-3}
    torch.testing.assert_close(got.double(), expected, **limits)
    (got.double() * torch.arange(8)).sum().backward()
    (expected * torch.arange(8)).sum().backward()
    torch.testing.assert_close(mine[1].grad.double(), wide[1].grad, **limits)


def test_weight_norm_changes_nothing_at_first_and_folds():
    layer = bs.nn.Conv2d(20, 20, 3, density=0.5, block_size=8)
    x = torch.randn(2, 20, 5, 5)
    before = layer(x)
    normed = bs.nn.WeightNorm(layer)
    torch.testing.assert_close(normed(x), before)
    with torch.no_grad():
        normed.gain.mul_(2)
        normed.module.values.mul_(3)
    after = normed(x)
    torch.testing.assert_close(after - layer.bias.reshape(-1, 1, 1), 2 * (before - layer.bias.reshape(-1, 1, 1)))
    torch.testing.assert_close(normed.fold()(x), after)
    linear = bs.nn.WeightNorm(bs.nn.Linear(20, 30, density=0.5, block_size=8))
    assert linear(torch.randn(3, 20)).shape == (3, 30)
    for wrong in (nn.ReLU(), nn.ConvTranspose2d(4, 4, 3, groups=2)):
        with pytest.raises(bs.BlockSparseError, match=f"module: expected .* got {type(wrong).__name__}"):
            bs.nn.WeightNorm(wrong)


DENSE = {
    "Linear": (nn.Linear(6, 10), (7, 6)),
    "Conv2d": (nn.Conv2d(6, 10, (2, 3)), (7, 6, 5, 5)),
    "grouped Conv2d": (nn.Conv2d(6, 10, (2, 3), groups=2), (7, 6, 5, 5)),
    "ConvTranspose2d": (nn.ConvTranspose2d(6, 10, (2, 3), stride=2), (7, 6, 5, 5)),
}


@pytest.mark.parametrize("name", DENSE)
def test_weight_norm_of_dense_modules(name):
    module, shape = DENSE[name]
    axis = 1 if isinstance(module, nn.ConvTranspose2d) else 0
    x = torch.randn(shape)
    before = module(x)
    normed = bs.nn.WeightNorm(module)
    torch.testing.assert_close(normed(x), before)
    with torch.no_grad():
        normed.gain.copy_(torch.rand(10))
    torch.testing.assert_close(normed.values.transpose(0, axis).flatten(1).norm(dim=1), normed.gain)
    torch.testing.assert_close(normed(x), (after := normed.fold()(x)))
    assert not torch.allclose(after, before)


MODULES = {
    **{name: lambda name=name: DENSE[name] for name in DENSE},
    "block-sparse Conv2d": lambda: (bs.nn.Conv2d(6, 10, 3, density=0.5, block_size=4), (7, 6, 5, 5)),
    "block-sparse Linear": lambda: (bs.nn.Linear(6, 10, density=0.5, block_size=4), (70, 6)),
}


def test_fold_finds_a_module_under_all_of_its_names():
    normed, x = bs.nn.WeightNorm(nn.Linear(4, 4)), torch.randn(3, 4)
    model = nn.Sequential(normed, nn.ReLU(), normed)
    with torch.no_grad():
        normed.gain.mul_(2)
    folded = bs.nn.fold(model)
    assert [type(module) for module in folded] == [nn.Linear, nn.ReLU, nn.Linear]
    assert folded[0] is folded[2]
    torch.testing.assert_close(folded(x), model(x))


SPARSE = {
    "transposed": (lambda: bs.nn.ConvTranspose2d(8, 8, 2, block_size=4), (1, 8, 3, 3)),
    "transposed, fewer outputs": (lambda: bs.nn.ConvTranspose2d(8, 4, 2, block_size=4), (1, 8, 3, 3)),
    "padded": (lambda: bs.nn.Linear(8, 6, block_size=4), (3, 8)),
    "activated": (lambda: bs.nn.Conv2d(8, 6, 3, density=0.5, block_size=4, activation="relu"), (1, 8, 5, 5)),
    "an output without weights": (
        lambda: bs.nn.Linear(8, 8, layout=bs.BlockLayout([[True, False], [False, False]], 4)),
        (3, 8),
    ),
}


@pytest.mark.parametrize("name", SPARSE)
def test_densify_keeps_a_weight_norm(name):
    make, shape = SPARSE[name]
    model = nn.Sequential(bs.nn.WeightNorm(make(), scale=0.3))
    with torch.no_grad():
        model[0].gain.mul_(torch.rand_like(model[0].gain))
    dense, x = bs.densify(model), torch.randn(shape)
    torch.testing.assert_close(dense(x), model(x))
    (normed,) = (module for module in dense.modules() if isinstance(module, bs.nn.WeightNorm))
    assert normed.scale == 0.3
    assert not isinstance(normed.module, BlockSparseModule)
    for each in (model, dense):
        each(x).square().sum().backward()
    outputs = len(normed.gain)
    torch.testing.assert_close(normed.gain.grad, model[0].gain.grad[:outputs])
    assert not model[0].gain.grad[outputs:].any()


def test_a_gain_of_another_size_is_refused():
    normed = bs.nn.WeightNorm(nn.Linear(8, 6))
    normed.module = nn.Linear(8, 8)
    with pytest.raises(bs.BlockSparseError, match=r"gain: expected \[8\] for a weight \[8, 8\], got \[6\]"):
        normed(torch.randn(1, 8))


@pytest.mark.parametrize("name", MODULES)
def test_initialise_from_data_gives_mean_0_and_the_deviation(name):
    torch.manual_seed(1)
    module, shape = MODULES[name]()
    normed = bs.nn.WeightNorm(module, scale=0.3)
    x = 2 + 3 * torch.randn(shape)
    bs.nn.initialise_from_data(nn.Sequential(normed), x)
    y = normed(x).transpose(0, -1 if x.dim() == 2 else 1).flatten(1)
    std, mean = torch.std_mean(y, 1, correction=0)
    torch.testing.assert_close(mean, torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(std, torch.full((10,), 0.3), atol=1e-4, rtol=0)
    with pytest.raises(bs.BlockSparseError, match="module: expected one with a bias"):
        bs.nn.initialise_from_data(bs.nn.WeightNorm(nn.Linear(6, 3, bias=False)), torch.randn(2, 6))
    activated = bs.nn.WeightNorm(bs.nn.Linear(6, 3, block_size=3, activation="relu"))
    with pytest.raises(bs.BlockSparseError, match="expected one without an activation"):
        bs.nn.initialise_from_data(activated, torch.randn(2, 6))


# -- patterns of channels --------------------------------------------------------------------------------------------


def test_two_shuffled_layers_connect_all():
    layout = bs.patterns.shuffled_block_diagonal((128, 128), 8)
    mask = layout.mask().int()
    assert layout.density == 0.25
    assert ((mask @ mask) > 0).all()
    wide = bs.patterns.shuffled_block_diagonal((64, 128), 8, groups=4).mask()
    assert (wide.sum(0) == 2).all()
    assert (wide.sum(1) == 4).all()
    with pytest.raises(bs.BlockSparseError, match=r"groups: expected a divisor of both sides of the grid \(8, 16\)"):
        bs.patterns.shuffled_block_diagonal((64, 128), 8, groups=3)


@pytest.mark.parametrize("size", [11, ("11", "11"), (11.0, 11.0), (None, 11)], ids=repr)
def test_output_sizes_of_other_kinds_are_refused(size):
    layer = bs.nn.ConvTranspose2d(24, 16, 3, stride=2, block_size=8)
    with pytest.raises(bs.BlockSparseError, match="output_size: expected an int for each of 2 axes"):
        layer(torch.randn(2, 24, 5, 5), size)


def test_the_groups_of_torch_are_no_dilation():
    with pytest.raises(TypeError, match="positional"):
        bs.nn.ConvTranspose2d(64, 64, 3, 1, 1, 0, 2)  # groups=2 of torch.nn.ConvTranspose2d


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_torch_jit_trace_is_refused():
    with pytest.raises(bs.BlockSparseError, match=r"torch.jit.trace: expected torch.export.export\(model, args\)"):
        torch.jit.trace(bs.nn.Conv2d(16, 16, 3, block_size=8), torch.randn(2, 16, 8, 8))


@pytest.mark.parametrize("margins", [3, (1, 1), "same", [(1, 0)]])
def test_margins_are_pairs(margins):
    layer = bs.nn.Conv2d(8, 8, 3, block_size=4)
    x = torch.randn(1, 8, 5, 5)
    assert layer(x, margins=((2, 0), [1, 1])).shape == (1, 8, 5, 5)
    with pytest.raises(bs.BlockSparseError, match=r"expected a pair \(before, behind\) for each"):
        layer(x, margins=margins)
