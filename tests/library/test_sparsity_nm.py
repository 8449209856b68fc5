"""N:M masks, layouts and orders of columns, against brute force and the published values."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity.nm.permutation import _Search

pytestmark = pytest.mark.usefixtures("one_thread")


def published():
    return torch.from_numpy(np.random.RandomState(1).rand(128, 64))


def kept(weight, n=2, m=4):
    return weight.abs()[bs.sparsity.nm_mask(weight, n, m)].sum().item()


# -- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (1, 4), (3, 8), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", [(), (3,), (2, 3)], ids=str)
def test_the_largest_of_each_group(n, m, dtype, kernel):
    # Few different values: many ties.
    weight = torch.randint(-3, 4, (5, 24, *kernel)).to(dtype)
    mask = bs.sparsity.nm_mask(weight, n, m)
    assert mask.shape == weight.shape
    assert mask.dtype == torch.bool
    rows = weight.double().movedim(1, -1).reshape(-1, m).tolist()
    for row, chosen in zip(rows, mask.movedim(1, -1).reshape(-1, m).tolist(), strict=True):
        best = sorted(range(m), key=lambda i: (-abs(row[i]), i))[:n]
        assert [i for i in range(m) if chosen[i]] == sorted(best)


def test_published_magnitudes():
    weight = published()
    rows = weight.topk(32).values.sum().item()
    assert weight.sum().item() == pytest.approx(4083.169, abs=1e-3)
    assert weight.flatten().topk(weight.numel() // 2).values.sum().item() == pytest.approx(3060.238, abs=1e-3)
    assert rows == pytest.approx(3042.332, abs=1e-3)
    assert kept(weight) == pytest.approx(2852.377, abs=1e-3)


def test_masks_of_views_and_of_parameters():
    weight = torch.randn(12, 8)
    expected = bs.sparsity.nm_mask(weight)
    assert torch.equal(bs.sparsity.nm_mask(nn.Parameter(weight.T.contiguous().T)), expected)
    wide = torch.randn(12, 16)
    wide[:, ::2] = weight
    assert torch.equal(bs.sparsity.nm_mask(wide[:, ::2]), expected)


BAD = [
    ({"weight": torch.zeros(4, 6)}, "weight: expected a multiple of 4 inputs, got 6"),
    ({"weight": torch.zeros(8)}, r"weight: expected floating-point \[out, in\] .*, got shape \[8\]"),
    ({"weight": torch.zeros(4, 8, dtype=torch.int64)}, "weight: expected floating-point"),
    ({"weight": torch.zeros(0, 8)}, "weight: expected .* not empty"),
    ({"weight": torch.zeros(4, 8, device="meta")}, "weight: expected a dense tensor with data"),
    ({"weight": torch.eye(4).to_sparse()}, "weight: expected a dense tensor with data"),
    ({"weight": [[1.0] * 8]}, "weight: expected a dense tensor with data, got list"),
    ({"n": 5}, "n and m: expected ints, 0 < n <= m, got 5 and 4"),
    ({"n": 0}, "n and m: expected ints, 0 < n <= m, got 0 and 4"),
    ({"n": 1.0}, "n and m: expected ints"),
    ({"m": True}, "n and m: expected ints"),
]
BAD = [(function, *case) for function in ("nm_mask", "nm_permutation", "nm_efficacy") for case in BAD] + [
    ("nm_permutation", {"escapes": -1}, "escapes: expected an int, 0 or more"),
    ("nm_permutation", {"seed": 0.5}, "seed: expected an int, 0 or more"),
    ("nm_permutation", {"weight": torch.full((2, 8), torch.nan)}, "weight: expected finite numbers"),
    *(
        ("nm_efficacy", {"order": order}, rf"order: expected each of 0 to 7 once, got shape \[{got}$")
        for order, got in (
            (torch.arange(7), r"7\] without 7"),
            (torch.zeros(8).long(), r"8\] without 1"),
            (torch.arange(8) - 1, r"8\] without 7"),
            (torch.arange(9), r"9\]"),
        )
    ),
]


@pytest.mark.parametrize(("function", "arguments", "message"), BAD)
def test_bad_arguments(function, arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        getattr(bs.sparsity, function)(**{"weight": torch.rand(4, 8)} | arguments)


# -- whole blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "block", "n", "m"),
    [((64, 128), 8, 2, 4), ((61, 125), (16, 8), 1, 4), ((32, 24), (16, 1), 2, 4), ((10, 15, 3, 3), 4, 1, 2)],
    ids=str,
)
@pytest.mark.parametrize("norm", ["l2", "mean"])
def test_each_group_keeps_its_largest_blocks(shape, block, n, m, norm):
    weight = torch.randn(shape, dtype=torch.float64)
    layout = bs.sparsity.nm_layout(weight, n, m, block, norm=norm)
    mask = layout.mask()
    assert (mask.unflatten(1, (-1, m)).sum(-1) == n).all()
    height, width = layout.block_shape
    for row, first in itertools.product(range(layout.grid[0]), range(0, layout.grid[1], m)):
        blocks = [
            weight[row * height : (row + 1) * height, col * width : (col + 1) * width]
            for col in range(first, first + m)
        ]
        size = [b.abs().sum() if norm == "mean" else b.square().sum() for b in blocks]
        best = sorted(range(m), key=lambda i: -size[i])[:n]
        assert mask[row, first : first + m].nonzero().flatten().tolist() == sorted(best)


def test_the_layout_computes_what_the_mask_does():
    weight, x = torch.randn(64, 128), torch.randn(5, 128)
    layout = bs.sparsity.nm_layout(weight, block_size=(16, 8))
    dense = weight * layout.mask().repeat_interleave(16, 0).repeat_interleave(8, 1)
    torch.testing.assert_close(bs.linear(x, bs.from_dense(weight, layout), layout), x @ dense.T, rtol=1e-4, atol=1e-4)


def test_bad_arguments_of_layouts():
    with pytest.raises(
        bs.BlockSparseError, match=r"weight: expected a multiple of 4 blocks.*, got 3: 24 inputs in blocks of 8"
    ):
        bs.sparsity.nm_layout(torch.zeros(8, 24), block_size=8)
    with pytest.raises(bs.BlockSparseError, match="block_size: expected a positive int"):
        bs.sparsity.nm_layout(torch.zeros(8, 24), block_size=0)
    with pytest.raises(bs.BlockSparseError, match="norm: expected one of"):
        bs.sparsity.nm_layout(torch.zeros(8, 32), block_size=8, norm="l1")


# -- orders of columns --------------------------------------------------------------------------------------------


def test_published_order():
    weight = published()
    greedy = bs.sparsity.nm_permutation(weight, escapes=0)
    assert kept(weight[:, greedy]) == pytest.approx(2913.351, abs=1e-3)
    order = bs.sparsity.nm_permutation(weight)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(64))
    assert kept(weight[:, order]) > 2920
    efficacy = (kept(weight[:, order]) - 2852.377) / (3042.332 - 2852.377)
    assert bs.sparsity.nm_efficacy(weight, order) == pytest.approx(efficacy, abs=1e-4)
    assert bs.sparsity.nm_efficacy(weight) == bs.sparsity.nm_efficacy(weight, order)
    assert bs.sparsity.nm_efficacy(weight, torch.arange(64)) == 0


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (1, 4), (3, 4)])
def test_no_swap_of_two_columns_is_left_that_helps(n, m):
    weight = torch.randn(7, 4 * m, dtype=torch.float64)
    order = bs.sparsity.nm_permutation(weight, n, m, escapes=5)
    best = kept(weight[:, order], n, m)
    assert best >= kept(weight, n, m)
    for a, b in itertools.combinations(range(4 * m), 2):
        swapped = order.clone()
        swapped[[a, b]] = order[[b, a]]
        assert kept(weight[:, swapped], n, m) <= best + 1e-9


def test_gains_are_those_of_the_swaps():
    weight = torch.rand(9, 12, dtype=torch.float64)
    search = _Search(weight.T.contiguous(), 2, 4)
    search.shake(np.random.default_rng(0))
    order, before = search.order.flatten(), kept(weight[:, search.order.flatten()])
    assert search.kept.sum().item() == pytest.approx(before)
    for first, second in itertools.permutations(range(3), 2):
        gains = {}
        for i, j in itertools.product(range(4), repeat=2):
            swapped = order.clone()
            a, b = first * 4 + i, second * 4 + j
            swapped[[a, b]] = order[[b, a]]
            gains[i * 4 + j] = kept(weight[:, swapped]) - before
        assert search.gain[first, second].item() == pytest.approx(max(gains.values()))
        assert gains[int(search.places[first, second])] == pytest.approx(max(gains.values()))


def test_escapes_only_help_and_are_seeded():
    weight = torch.randn(64, 32)
    found = [kept(weight[:, bs.sparsity.nm_permutation(weight, escapes=n, seed=3)]) for n in (0, 10, 40)]
    assert found == sorted(found)
    orders = [bs.sparsity.nm_permutation(weight, escapes=20, seed=seed) for seed in (1, 1)]
    assert torch.equal(*orders)


def test_convolutions_and_half_precision():
    weight = torch.randn(8, 16, 3, 3)
    permutation = partial(bs.sparsity.nm_permutation, escapes=5)
    order = permutation(weight)
    rows = weight.movedim(1, -1).reshape(-1, 16)
    assert torch.equal(order, permutation(rows))
    assert bs.sparsity.nm_efficacy(weight, order) > 0
    assert kept(weight[:, order]) > kept(weight)
    half = rows.to(torch.bfloat16)
    assert torch.equal(permutation(half), permutation(half.float()))


@pytest.mark.parametrize(("n", "columns"), [(4, 16), (2, 4)])
def test_orders_that_cannot_help(n, columns):
    weight = torch.randn(5, columns)
    assert torch.equal(bs.sparsity.nm_permutation(weight, n, 4), torch.arange(columns))
    assert bs.sparsity.nm_efficacy(weight, n=n) == 0


def test_two_layers_in_the_new_order_compute_the_same():
    before, layer = nn.Linear(8, 16), nn.Linear(16, 4)
    x = torch.randn(3, 8)
    expected = layer(before(x).relu())
    order = bs.sparsity.nm_permutation(layer.weight)
    with torch.no_grad():
        before.weight.copy_(before.weight[order])
        before.bias.copy_(before.bias[order])
        layer.weight.copy_(layer.weight[:, order])
    torch.testing.assert_close(layer(before(x).relu()), expected)
