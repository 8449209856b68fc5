"""WASAP's formulas, compared with dense matrices: gradients of old layouts, averages, pruning and the warm-up."""

import math

import pytest
import torch

import blocksparse as bs
from blocksparse.distributed import prune_to, retain_valid, union_average, warm_up


def random_weight(seed, density=0.3, block=(2, 3), kernel=()):
    shape = (20 * block[0], 30 * block[1])
    layout = bs.patterns.random(shape, block, density=density, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return layout, torch.randn(*layout.values_shape, *kernel, generator=generator)


def dense(values, layout):
    return bs.to_dense(values, layout)


@pytest.mark.parametrize("block", [(1, 1), (2, 3)])
def test_retain_valid(block):
    (before, grad), (now, _) = random_weight(0, block=block), random_weight(1, density=0.4, block=block)
    mapped = retain_valid(grad, before, now)
    assert mapped.shape == now.values_shape
    stays = dense(torch.ones_like(grad), before) * dense(torch.ones(now.values_shape), now)
    assert torch.equal(dense(mapped, now), dense(grad, before) * stays)


def test_retain_valid_returns_the_gradient_of_an_equal_layout_and_maps_kernels():
    layout, grad = random_weight(0)
    assert retain_valid(grad, layout, random_weight(0)[0]) is grad
    before, grad = random_weight(0, kernel=(3, 3))
    now, _ = random_weight(1)
    for i in range(3):
        assert torch.equal(retain_valid(grad, before, now)[..., i, 1], retain_valid(grad[..., i, 1], before, now))


def test_retain_valid_without_blocks():
    full, none = (bs.BlockLayout([[bit, bit]], 2) for bit in (True, False))
    assert torch.equal(retain_valid(torch.ones(0, 2, 2), none, full), torch.zeros(2, 2, 2))
    assert retain_valid(torch.ones(2, 2, 2), full, none).shape == (0, 2, 2)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_union_average(workers):
    layouts, values = zip(*(random_weight(seed) for seed in range(workers)), strict=True)
    layout, mean = union_average(layouts, values)
    assert torch.equal(layout.mask(), torch.stack([one.mask() for one in layouts]).any(0))
    expected = sum(dense(v.double(), one) for one, v in zip(layouts, values, strict=True)) / workers
    torch.testing.assert_close(dense(mean.double(), layout), expected, rtol=1e-6, atol=1e-7)
    if workers == 1:
        assert torch.equal(mean, values[0])


def test_union_average_rounds_half_precision_once():
    layout, _ = random_weight(0)
    parts = [torch.full(layout.values_shape, v).bfloat16() for v in (1.0, 2**-8, 2**-8)]
    _, mean = union_average([layout] * 3, parts)
    assert mean.dtype == torch.bfloat16
    assert torch.equal(mean, torch.full_like(mean, (1 + 2**-7) / 3))


def test_prune_to():
    layout, values = random_weight(0)
    pruned, remaining = prune_to(layout, values, 70)
    norms = values.flatten(1).norm(dim=1)
    largest = norms.argsort(descending=True)[:70].sort().values
    assert torch.equal(remaining, values[largest])
    mask = torch.zeros(layout.nnz, dtype=torch.bool)
    mask[largest] = True
    assert torch.equal(dense(remaining, pruned), dense(values * mask[:, None, None], layout))
    same, all_of_it = prune_to(layout, values, layout.nnz)
    assert same == layout
    assert torch.equal(all_of_it, values)
    assert prune_to(layout, torch.ones_like(values), 7)[0].nnz == 7, "ties are broken"


def test_pruning_the_union_restores_the_number_of_blocks():
    layouts, values = zip(*(random_weight(seed) for seed in range(4)), strict=True)
    layout, mean = union_average(layouts, values)
    assert layout.nnz > layouts[0].nnz
    assert prune_to(layout, mean, layouts[0].nnz)[0].nnz == layouts[0].nnz


def test_warm_up():
    assert [warm_up(1.0, 4, e) for e in range(8)] == pytest.approx([1, 1.6, 2.2, 2.8, 3.4, 4, 4, 4])
    assert all(warm_up(0.01, 1, e) == 0.01 for e in range(8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, v: retain_valid(v[1:], a, a), "values: expected shape"),
        (lambda a, v: retain_valid(v, a, a.T), "layouts: expected one grid and block"),
        (lambda a, v: retain_valid(v, a, 3), "layout: expected a BlockLayout, got int"),
        (lambda a, v: union_average([], []), "layouts and values: expected one of each"),
        (lambda a, v: union_average([a, a], [v]), "got 2 layouts and 1 values"),
        (lambda a, v: union_average([a, a.T], [v, v]), "layouts: expected one grid and block"),
        (lambda a, v: union_average([a, a], [v, v.double()]), "values: expected as the first ones"),
        (lambda a, v: union_average([a, a], [v, v.to("meta")]), "values: expected .*float32, cpu, got .*, meta"),
        (lambda a, v: prune_to(a, v, a.nnz + 1), "nnz: expected at most the 180 blocks"),
        (lambda a, v: prune_to(a, v, -1), "nnz: expected an int, 0 or more"),
        (lambda a, v: warm_up(math.nan, 2, 0), "rate: expected"),
        (lambda a, v: warm_up(0.1, 0, 0), "workers: expected an int, 1 or more"),
        (lambda a, v: warm_up(0.1, 2, -1), "epoch: expected an int, 0 or more"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        call(*random_weight(0))
