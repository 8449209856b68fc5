"""SparseMLP: topology, initial weights, order of layers."""

import itertools
import math

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse_lab.models.mlp import SparseMLP


def test_erdos_renyi_layers_of_a_published_network():
    sizes = [784, 1000, 1000, 1000, 10]
    model = SparseMLP(sizes, epsilon=20)
    for n_in, n_out, layer in zip(sizes[:-1], sizes[1:], model.layers, strict=True):
        assert layer.layout.shape == (n_out, n_in)
        assert layer.layout.block_shape == (1, 1)
        density = bs.sparsity.erdos_renyi_density((n_out, n_in), 20)
        # The number of connections is binomial; allow six standard deviations.
        total = n_in * n_out
        assert abs(layer.layout.nnz - density * total) <= 6 * math.sqrt(total * density * (1 - density))
        # He-uniform with the fan-in of the dense layer; biases 0.
        bound = math.sqrt(6 / n_in)
        assert 0.99 * bound < layer.values.abs().max() <= bound
        assert not layer.bias.any()
    weights = sum(p.numel() for p in model.parameters())
    assert weights < 0.06 * sum(p.numel() for p in SparseMLP(sizes, density=None).parameters())


@pytest.mark.parametrize("epsilon", [5, None], ids=["sparse", "dense"])
def test_no_two_layers_of_any_seed_are_alike(epsilon):
    sizes, density = [40, 40, 40, 40, 40], ... if epsilon else None
    models = [SparseMLP(sizes, epsilon=epsilon or 20, density=density, seed=seed) for seed in range(4)]
    weights = [
        layer.weight if density is None else bs.to_dense(layer.values, layer.layout)
        for m in models
        for layer in m.layers
    ]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(weights, 2))
    masks = [weight != 0 for weight in weights]
    assert epsilon is None or not any(torch.equal(one, other) for one, other in itertools.combinations(masks, 2))


def test_the_forward_pass_in_order():
    model = SparseMLP([20, 30, 30, 30, 5], density=0.5, block_size=5, alpha=0.6).eval()
    x = torch.randn(4, 20)
    h = x
    for layer, slope in zip(model.layers[:-1], [-0.6, 0.6, -0.6], strict=True):
        h = h @ bs.to_dense(layer.values, layer.layout).T + layer.bias
        h = torch.where(h > 0, h, slope * h)
    expected = h @ bs.to_dense(model.output.values, model.output.layout).T + model.output.bias
    torch.testing.assert_close(model(x), expected)
    model.train()
    assert not torch.equal(model(x), model(x)), "dropout"


@pytest.mark.parametrize("activation", ["all_relu", "relu", "gelu", "silu"])
@pytest.mark.parametrize("init", ["he", "xavier", "fan_in", "kaiming"])
@pytest.mark.parametrize("density", [None, 0.5, [0.2, 0.5, 1.0], ...], ids=str)
def test_kinds(activation, init, density):
    state = torch.get_rng_state()
    make = {"density": density, "block_size": 4, "activation": activation, "init": init, "dropout": 0}
    model, twin, other = (SparseMLP([21, 30, 30, 5], seed=seed, **make) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "PyTorch's generator is left alone"
    kind = nn.Linear if density is None else bs.nn.Linear
    assert all(isinstance(layer, kind) for layer in model.layers)
    x = torch.randn(3, 21)
    assert torch.equal(model(x), twin(x))
    assert not torch.equal(model(x), other(x))
    model(x).sum().backward()
    if density == [0.2, 0.5, 1.0]:
        assert [layer.layout.density for layer in model.layers] == pytest.approx([0.2, 0.5, 1.0], abs=0.02)


@pytest.mark.parametrize("density", [None, ...], ids=str)
def test_kaiming_is_larger_than_the_default_by_as_much_as_keeps_the_signal(density):
    make = {"density": density, "epsilon": 1, "alpha": 0.05, "dropout": 0}
    ours, theirs = (SparseMLP([4000, 4000, 500, 2], init=init, **make) for init in ("kaiming", "fan_in"))
    weights = lambda model: [p for name, p in model.named_parameters() if not name.endswith("bias")]  # noqa: E731
    for weight, default in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(weight, default * (6 / 1.0025) ** 0.5)
    assert not any(layer.bias.any() for layer in ours.layers)
    assert 0.5 < ours(torch.randn(64, 4000)).std() < 4


def test_erk_densities_fit_in():
    sizes = [784, 300, 100, 10]
    densities = bs.sparsity.erk([(b, a) for a, b in itertools.pairwise(sizes)], 0.1)
    model = SparseMLP(sizes, density=densities)
    stored = sum(layer.layout.nnz for layer in model.layers)
    assert stored == pytest.approx(0.1 * (784 * 300 + 300 * 100 + 1000), abs=3)


def test_padding_is_zero():
    model = SparseMLP([21, 30, 5], density=1.0, block_size=8)
    weight = bs.to_dense(model.layers[0].values.detach(), model.layers[0].layout)
    assert not weight[30:].any()
    assert not weight[:, 21:].any()
    assert weight[:30, :21].all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [10]}, "sizes: expected two positive ints or more"),
        ({"sizes": [10, 0, 2]}, "sizes: expected two positive ints or more"),
        ({"activation": "tanh"}, "activation: expected one of all_relu, relu"),
        ({"alpha": -1}, "alpha: expected a finite number, 0 or more"),
        ({"alpha": "x", "init": "kaiming"}, "alpha: expected a finite number, 0 or more"),
        ({"activation": [1]}, "activation: expected one of all_relu, relu"),
        ({"dropout": 1.0}, "dropout: expected a number from 0 to below 1"),
        ({"init": "zeros"}, "init: expected one of he, xavier, fan_in"),
        ({"seed": -1}, "seed: expected an int"),
        ({"epsilon": -1}, "epsilon: expected"),
        ({"epsilon": 0.001}, "epsilon: expected enough for one block of a layer"),
        ({"density": 0.001}, r"the topology: expected connections in a layer \(8, 10\), got none"),
        ({"density": 1.5}, "density: expected a number from 0 to 1"),
        ({"density": torch.tensor(0.5)}, "density: expected a number from 0 to 1"),
        ({"density": "0.5"}, "density: expected a number from 0 to 1"),
        ({"seed": 2**32}, "seed: expected an int, 0 or more and below 4294967296"),
        ({"layout_seed": 2**32}, "layout_seed: expected an int, 0 or more and below 4294967296"),
        ({"density": [0.5]}, "density: expected 2 numbers, one for each layer"),
        ({"block_size": 0}, "block_size: expected"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        SparseMLP(**{"sizes": [10, 8, 2]} | arguments)
