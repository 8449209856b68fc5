"""Densities of layers, by their formulas and published examples."""

import math

import pytest

import blocksparse as bs
from blocksparse.sparsity import erdos_renyi_density, erk

LENET = [(300, 784), (100, 300), (10, 100)]


def test_published_sparsities():
    assert [round(1 - density, 4) for density in erk(LENET, 0.1)] == [0.9204, 0.7698, 0]


@pytest.mark.parametrize("density", [0.05, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("block_size", [1, 8, (4, 2)], ids=str)
def test_the_budget_and_the_proportions(density, kernel, block_size):
    shapes = [*LENET, (64, 32, 3, 3), (96, 64, 3)]
    densities = erk(shapes, density, block_size, kernel=kernel)
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    grids = [(math.ceil(s[0] / block[0]), math.ceil(s[1] / block[1]), *s[2:]) for s in shapes]
    blocks = [math.prod(grid) for grid in grids]
    assert sum(d * n for d, n in zip(densities, blocks, strict=True)) == pytest.approx(density * sum(blocks))
    assert all(0 < d <= 1 for d in densities)
    sides = [grid if kernel else grid[:2] for grid in grids]
    raw = [sum(side) / math.prod(side) for side in sides]
    scales = [d / r for d, r in zip(densities, raw, strict=True) if d < 1]
    assert scales == pytest.approx([scales[0]] * len(scales) if scales else [])
    # A dense layer would be denser than 1 by the scale of the others.
    assert all(r * max(scales, default=math.inf) >= 1 for d, r in zip(densities, raw, strict=True) if d == 1)


def test_erdos_renyi():
    assert erdos_renyi_density((1000, 784), 20) == pytest.approx(20 * 1784 / 784_000)
    assert erdos_renyi_density((1000, 784), 20, block_size=(8, 4)) == pytest.approx(20 * (125 + 196) / (125 * 196))
    assert erdos_renyi_density((10, 10), 20) == 1
    layout = bs.patterns.erdos_renyi((1000, 784), 1, epsilon=20)
    assert layout.density == pytest.approx(erdos_renyi_density((1000, 784), 20), rel=0.03)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: erk(LENET, 1.5), "density: expected a number above 0 and at most 1, got 1.5"),
        (lambda: erk(LENET, 0), "density: expected a number above 0 and at most 1, got 0"),
        (lambda: erk([(1000, 1000), (2, 2)], 1e-7), "density: expected enough for one block of .* larger density"),
        (lambda: erk([], 0.1), "shapes: expected one shape or more"),
        (lambda: erk(5, 0.1), "shapes: expected a list of shapes"),
        (lambda: erk(LENET, 0.1, kernel="a"), "kernel: expected True or False"),
        (lambda: erk([(3,)], 0.1), "shape: expected positive ints"),
        (lambda: erdos_renyi_density((10, 0), 1), "shape: expected positive ints"),
        (lambda: erdos_renyi_density((10, 10), -1), "epsilon: expected a finite number, 0 or more"),
        (
            lambda: erdos_renyi_density((1000, 1000), 1e-4),
            "epsilon: expected enough for one block of .* larger epsilon",
        ),
        (lambda: erdos_renyi_density((10, 10), 1, block_size=0), "block_size: expected"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        call()
