"""The sparse topology distance, against its definition neuron by neuron; trees and points from distances."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster import hierarchy
from scipy.optimize import linear_sum_assignment

import blocksparse as bs
from blocksparse import BlockLayout, BlockSparseError
from blocksparse.sparsity.sparse_training.growth import draw_unused
from blocksparse.topology import Trajectory, distances, embedding, linkage, nnstd, nnstd_matching
from blocksparse_lab.models.mlp import SparseMLP


def neurons(layout):
    return np.kron(layout.mask().numpy(), np.ones(layout.block_shape, dtype=bool))


def jaccard(a, b):
    """[n, n], from bool [n, inputs] each."""
    common, either = (a[:, None] & b).sum(2), (a[:, None] | b).sum(2)
    return np.where(either > 0, 1 - common / np.maximum(either, 1), 0)


def by_definition(a, b):
    """The distances of the layers of two nets of bool masks of neurons."""
    found, match = [], slice(None)
    for mine, other in zip(a, b, strict=True):
        cost = jaccard(mine, other[:, match])
        rows, match = linear_sum_assignment(cost)
        found.append(cost[rows, match].mean())
    return found


@st.composite
def layers(draw, height, width, most):
    """A random layout of height x width features, with blocks that divide them."""
    block = tuple(draw(st.sampled_from([n for n in range(1, most + 1) if size % n == 0])) for size in (height, width))
    grid = height // block[0], width // block[1]
    mask = np.random.default_rng(draw(st.integers(0, 2**32))).random(grid) < draw(st.floats(0, 1))
    return BlockLayout(mask, block)


@given(layers(12, 18, 6), layers(12, 18, 6))
@settings(max_examples=80)
def test_one_layer_of_any_blocks_is_the_best_match_of_neurons(a, b):
    expected = by_definition([neurons(a)], [neurons(b)])
    found = nnstd_matching(a, b)
    assert found.layers == pytest.approx(expected, abs=1e-6)
    assert found.distance == nnstd(a, b) == pytest.approx(nnstd([b], (a,)), abs=1e-6)
    cost = jaccard(neurons(a), neurons(b))
    assert sorted(found.matches[0]) == list(range(12))
    assert cost[np.arange(12), found.matches[0]].mean() == pytest.approx(found.distance, abs=1e-6)


def random_net(sizes, density, seed, block=1):
    return [
        bs.patterns.random((out, in_), block, density=density, seed=seed + i)
        for i, (in_, out) in enumerate(itertools.pairwise(sizes))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_nets_agree_with_the_definition(seed):
    a, b = random_net([60, 50, 40, 30], 0.3, seed), random_net([60, 50, 40, 30], 0.3, seed + 10)
    found = nnstd_matching(a, b)
    assert found.ambiguous == (0, 0, 0)
    assert found.layers == pytest.approx(by_definition(map(neurons, a), map(neurons, b)), abs=1e-6)
    assert found.distance == pytest.approx(np.mean(found.layers))
    assert nnstd(a, a) == 0


def renumbered(net, seed):
    """Masks of a net whose neurons have a random order in every layer but the input."""
    rng = np.random.default_rng(seed)
    order, masks = np.arange(net[0].shape[1]), []
    for layout in net:
        mask = neurons(layout)[:, order]
        order = rng.permutation(mask.shape[0])
        masks.append(mask[order])
    return masks


@pytest.mark.parametrize("block", [1, 4, (2, 8)])
def test_a_renumbered_copy_is_at_distance_0(block):
    net = random_net([256, 192, 160, 64], 0.3, 5, block)
    copy = [BlockLayout(mask, 1) for mask in renumbered(net, 0)]
    found = nnstd_matching(net, copy)
    assert (found.distance, nnstd(copy, net)) == (0, 0)
    if block == 1:
        assert found.ambiguous == (0, 0, 0)
        mine, other = neurons(net[0]), neurons(copy[0])
        assert (mine == other[found.matches[0]]).all()


def test_blocks_are_matched_whole_and_the_distance_stays():
    a, b = random_net([128, 96, 64], 0.3, 1, 8), random_net([128, 96, 64], 0.3, 7, 8)
    whole, single = nnstd_matching(a, b, level="block"), nnstd_matching(a, b)
    assert whole.layers == pytest.approx(single.layers)
    assert [len(match) for match in whole.matches] == [12, 8]
    assert [len(match) for match in single.matches] == [96, 64]
    assert (single.matches[0] // 8 == np.repeat(whole.matches[0], 8)).all()
    # The same connections, written in other blocks, are the same connections.
    fine = [BlockLayout(neurons(layout), 1) for layout in b]
    mixed = [fine[0], BlockLayout(b[1].mask().numpy().repeat(2, 0), (4, 8))]
    assert nnstd(b, mixed) == 0
    assert nnstd(a, mixed) == pytest.approx(single.distance)
    with pytest.raises(BlockSparseError, match=r'the same blocks for level "block", got \(8, 8\) and \(1, 1\)'):
        nnstd(a, mixed, level="block")


def test_extremes():
    left = BlockLayout([[1, 1, 0, 0], [1, 1, 0, 0]], 3)
    right = BlockLayout([[0, 0, 1, 1], [0, 0, 1, 0]], 3)
    empty = BlockLayout(np.zeros((2, 4), dtype=bool), 3)
    assert nnstd(left, right) == 1
    assert nnstd(left, empty) == 1
    assert nnstd(empty, empty) == 0
    assert nnstd_matching(left, right).ambiguous == (6,)  # of the six neurons in the two blocks of `left`
    assert nnstd_matching(empty, empty).ambiguous == (12,)


def rewired(layout, part, rng):
    drop = rng.choice(layout.nnz, round(part * layout.nnz), replace=False)
    keys = draw_unused(layout.keys_of_blocks(), layout.grid, drop.size, rng)
    return layout.replaced(drop, *np.divmod(keys, layout.grid[1]))[0]


@pytest.mark.parametrize(
    ("part", "expected"), [(0.01, 0.019), (0.1, 0.18), (0.5, 0.7), (1, 0.85)], ids=["1", "10", "50", "100"]
)
def test_published_distances_of_rewired_nets(part, expected):
    # Three layers of 784 x 784 with about 6.5 connections per neuron. With 13 or 3.25, two independent nets would have
    # a distance of 0.90 or 0.78.
    net = [bs.patterns.erdos_renyi((784, 784), 1, epsilon=3.25, seed=seed) for seed in range(3)]
    rng = np.random.default_rng(0)
    assert nnstd(net, [rewired(layout, part, rng) for layout in net]) == pytest.approx(expected, abs=0.03)


def test_models_are_compared_without_their_padding():
    a, b = (SparseMLP([50, 41, 30, 10], density=0.4, block_size=8, seed=seed) for seed in (0, 10))
    masks = []
    for model in (a, b):
        sizes = list(zip(model.sizes[1:], model.sizes, strict=False))
        cut = [neurons(one.layout)[:out, :in_] for one, (out, in_) in zip(model.layers, sizes, strict=True)]
        masks.append([BlockLayout(mask, 1) for mask in cut])
    found = nnstd_matching(a, b)
    assert [len(match) for match in found.matches] == [41, 30, 10]
    assert found.layers[0] == pytest.approx(by_definition([neurons(masks[0][0])], [neurons(masks[1][0])])[0], abs=1e-6)
    assert nnstd(a, masks[0]) == 0
    assert nnstd(a, list(a.layers)) == 0
    assert nnstd(a.layers[0], b.layers[0]) == pytest.approx(found.layers[0])
    assert nnstd(a, b, level="block") > 0.3


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            lambda: random_net([8, 8, 8], 0.5, 0),
            lambda: random_net([8, 8], 0.5, 0),
            "number of layers, got 2 and 1",
        ),
        (lambda: random_net([8, 8, 8], 0.5, 0), lambda: random_net([8, 4, 8], 0.5, 0), r"got \(8, 8\) and \(4, 8\)"),
        (lambda: [bs.patterns.dense((4, 8), 1)] * 2, None, "4 outputs of layer 0 and 8 inputs of the next"),
        (lambda: torch.nn.Linear(2, 2), None, "expected a model with block-sparse weights, got Linear"),
        (lambda: [], None, "expected one layer or more, got none"),
        (lambda: "net", None, "expected a layout, a model, or a list of its layers, got str"),
        (lambda: [3], None, "expected a layout, a model, or a list of its layers, got int"),
    ],
    ids=["layers", "sizes", "chain", "dense", "none", "str", "ints"],
)
def test_bad_networks(a, b, message):
    with pytest.raises(BlockSparseError, match=message):
        nnstd(a(), (b or a)())


def test_a_trajectory_of_an_evolving_net():
    model = SparseMLP([40, 48, 48, 5], epsilon=3, seed=0)
    method = bs.sparsity.SET(model, torch.optim.SGD(model.parameters(), lr=0.1), zeta=0.3, skip=model.output)
    trajectory = Trajectory()
    for epoch in range(5):
        trajectory.record(model, f"epoch {epoch}")
        method.step()
    trajectory.record([layer.layout for layer in model.layers])
    found = trajectory.distances()
    assert trajectory.labels == [*(f"epoch {epoch}" for epoch in range(5)), 5]
    assert found.shape == (6, 6)
    assert (found == found.T).all()
    assert not found.diagonal().any()
    assert found[0, 1] < found[0, 2] < found[0, 5]
    assert found[0, 1] == nnstd(trajectory.nets[0], trajectory.nets[1])
    tree = linkage(found)
    assert hierarchy.is_valid_linkage(tree)
    assert len(hierarchy.dendrogram(tree, no_plot=True)["leaves"]) == 6


def test_points_keep_their_distances():
    rng = np.random.default_rng(3)
    points = rng.standard_normal((7, 2))
    wanted = np.linalg.norm(points[:, None] - points, axis=2)
    found = embedding(wanted)
    assert np.allclose(np.linalg.norm(found[:, None] - found, axis=2), wanted)
    assert (found[-1] >= found[0]).all()
    assert np.allclose(embedding(wanted, 9)[:, 2:], 0, atol=1e-6)
    assert np.allclose(embedding(wanted, 1), found[:, :1])
    assert (embedding(np.zeros((3, 3))) == 0).all()


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((1, 1)), "two nets or more"),
        (np.zeros((2, 3)), r"got shape \(2, 3\)"),
        (np.array([[0, 1], [2, 0]]), "symmetric"),
        (np.eye(3), "0 on the diagonal"),
        (np.array([[0, np.nan], [np.nan, 0]]), "symmetric"),
    ],
    ids=["one", "rectangle", "skew", "diagonal", "nan"],
)
def test_bad_distances(matrix, message):
    for function in (linkage, embedding):
        with pytest.raises(BlockSparseError, match=message):
            function(matrix)
    with pytest.raises(BlockSparseError, match="dimensions: expected an int, 1 or more, got 0"):
        embedding(np.zeros((2, 2)), 0)
    assert distances([]).shape == (0, 0)
