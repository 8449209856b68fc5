"""The patterns: their graphs, their counts, their seeds, and what they refuse."""

import pickle
import random as python_random

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocksparse import BlockLayout, BlockSparseError, patterns
from blocksparse.patterns.random_layouts import random_of_features
from blocksparse.topology import degrees
from strategies import grids

DRAWN = {
    "random": lambda seed: patterns.random((64, 96), 4, 0.2, seed),
    "random, barely covering": lambda seed: patterns.random((64, 96), 4, 24 / (16 * 24), seed),
    "erdos_renyi": lambda seed: patterns.erdos_renyi((64, 96), 4, 1.5, seed),
    "watts_strogatz": lambda seed: patterns.watts_strogatz(128, 4, 4, 0.3, seed),
    "watts_strogatz_2d": lambda seed: patterns.watts_strogatz_2d(128, 4, 4, 0.3, seed),
    "barabasi_albert": lambda seed: patterns.barabasi_albert(128, 4, 3, seed),
}
GRAPHS = {name: DRAWN[name] for name in ("watts_strogatz", "watts_strogatz_2d", "barabasi_albert")}


def features(grid, block):
    return grid[0] * block[0], grid[1] * block[1]


def uses_all(layout):
    return all(bool((degree > 0).all()) for degree in degrees(layout))


# -- regular -----------------------------------------------------------------------------------------------------


@given(grids())
def test_dense(grid):
    layout = patterns.dense(features(grid, (2, 3)), (2, 3))
    assert layout.grid == grid
    assert layout.block_shape == (2, 3)
    assert layout.mask().all()


@given(grids())
def test_block_diagonal(grid):
    layout = patterns.block_diagonal(features(grid, (2, 3)), (2, 3))
    assert uses_all(layout)
    assert layout.nnz == max(grid)
    out_degrees, in_degrees = degrees(layout)
    assert max(int(d.max() - d.min()) for d in (out_degrees, in_degrees)) <= 1
    assert patterns.block_diagonal(features(grid, (2, 3))[::-1], (3, 2)) == layout.T


@given(grids(), st.integers(1, 4), st.integers(0, 9))
def test_diagonals_wrap_around_the_shorter_side(grid, count, seed):
    short, long = sorted(grid)
    count = min(count, short)
    layout = patterns.diagonals(features(grid, (2, 3)), (2, 3), count / short, seed)
    assert layout.nnz == count * long
    assert uses_all(layout)
    assert max(int(d.max() - d.min()) for d in degrees(layout)) <= count
    tall = layout if grid[0] >= grid[1] else layout.T
    offsets = (tall.col_of_block.astype(int) - tall.row_of_block) % short
    assert len(set(offsets.tolist())) == count
    assert layout == patterns.diagonals(features(grid, (2, 3)), (2, 3), offsets=sorted(set(offsets.tolist())))


def test_permuted():
    layout = patterns.random((24, 40), 4, 0.3)
    mask, rows, columns = layout.mask(), [5, 3, 1, 0, 2, 4], torch.randperm(10).tolist()
    moved = patterns.permuted(layout, rows=rows, columns=columns).mask()
    assert torch.equal(moved[rows][:, columns], mask)
    drawn = patterns.permuted(layout, seed=1).mask()
    assert torch.equal(drawn.sum(1), mask.sum(1))
    assert torch.equal(drawn.sum(0).sort().values, mask.sum(0).sort().values)
    assert not torch.equal(drawn, mask)
    for arguments, message in (
        ({"rows": [0, 1]}, r"rows: expected a permutation of 0 to 5, got 2 ints"),
        ({"columns": [0] * 10}, "columns: expected a permutation"),
        ({"columns": range(1, 11)}, "columns: expected indices from 0 to 9"),
        ({"seed": -1}, "seed: expected"),
    ):
        with pytest.raises(BlockSparseError, match=message):
            patterns.permuted(layout, **arguments)
    for offsets in ([1, 1], [], [6]):
        with pytest.raises(BlockSparseError, match="offsets: expected"):
            patterns.diagonals((24, 40), 4, offsets=offsets)
    with pytest.raises(BlockSparseError, match="seed: expected an int"):
        patterns.diagonals((24, 40), 4, seed="a", offsets=[0])
    with pytest.raises(BlockSparseError, match="seed: expected an int"):
        patterns.permuted(layout, seed=-1, rows=range(layout.grid[0]))


@given(st.integers(1, 12), st.integers(0, 15))
def test_banded_square(n, bandwidth):
    i = torch.arange(n)
    expected = (i[:, None] - i).abs() <= bandwidth
    assert torch.equal(patterns.banded((n, n), 1, bandwidth).mask(), expected)


@given(st.integers(1, 12))
def test_butterfly_square(n):
    strides = [0, *(2**s for s in range(8))]
    expected = [[i ^ j in strides for j in range(n)] for i in range(n)]
    assert patterns.butterfly(4 * n, 4) == BlockLayout(expected, 4)
    assert patterns.butterfly((4 * n, 4 * n), 4) == patterns.butterfly(4 * n, 4)


@given(grids(), st.integers(0, 3))
def test_stretched_patterns(grid, bandwidth):
    n = min(grid)
    rows, cols = (np.arange(size) * n // size for size in grid)
    for pattern in (lambda shape: patterns.banded(shape, 1, bandwidth), lambda shape: patterns.butterfly(shape, 1)):
        assert torch.equal(pattern(grid).mask(), pattern((n, n)).mask()[rows][:, cols])


def test_butterfly_of_a_power_of_two():
    layout = patterns.butterfly(32 * 1024, 32)
    assert all((degree == 11).all() for degree in degrees(layout))


# -- random ------------------------------------------------------------------------------------------------------


@given(grids(), st.floats(0, 1), st.integers(0, 2**40))
def test_random(grid, density, seed):
    layout = patterns.random(features(grid, (2, 3)), (2, 3), density, seed)
    assert layout.grid == grid
    assert layout.nnz == layout.mask().sum() == round(density * grid[0] * grid[1]), "no block twice"
    used = [int((degree > 0).sum()) for degree in degrees(layout)]
    assert used == [min(layout.nnz, size) for size in grid], "as many rows and columns as there are blocks for"


@given(grids(), st.integers(0, 9))
def test_random_with_just_enough_blocks(grid, seed):
    density = max(grid) / (grid[0] * grid[1])
    layout = patterns.random(grid, 1, density, seed)
    assert layout.nnz == max(grid)
    assert uses_all(layout)


@pytest.mark.parametrize("density", [4 / 24, 0.3, 0.7], ids=["sparse", "barely covering", "more than half"])
def test_random_blocks_are_equally_likely(density):
    draws = 3000
    times = sum(patterns.random((4, 6), 1, density, seed).mask().long() for seed in range(draws))
    share = round(density * 24) / 24
    deviation = (draws * share * (1 - share)) ** 0.5
    assert (times - draws * share).abs().max() < 4.5 * deviation


@pytest.mark.parametrize("density", [4e-6, 8e-6], ids=["as few as cover", "twice that"])
def test_random_on_a_huge_grid(density):
    layout = patterns.random((250_000, 250_000), 1, density)
    assert layout.nnz == round(density * 250_000**2)
    assert uses_all(layout)


@given(grids(), st.integers(0, 31), st.integers(0, 3), st.floats(0.01, 1), st.integers(0, 9))
def test_random_of_features_counts_real_numbers(grid, padding, lines, density, seed):
    used = [np.arange(32 * size) < 32 * size - min(padding, 31) for size in grid]
    used[0] = np.concatenate([used[0], np.zeros(32 * lines, dtype=bool)])
    layout = random_of_features(tuple(used), 32, density, seed)
    sizes = [side.reshape(-1, 32).sum(1) for side in used]
    real = (sizes[0][layout.row_of_block] * sizes[1][layout.col_of_block]).sum()
    largest = sizes[0].max() * sizes[1].max()
    target = density * used[0].sum() * used[1].sum()
    assert abs(real - target) <= max(0.5 * largest, 0.05 * target) + 1
    rows, cols = degrees(layout)
    assert not rows[grid[0] :].any(), "a row of padding alone has no block"
    if round(density * grid[0] * grid[1]) >= max(grid):
        assert rows[: grid[0]].all()
        assert cols.all()


def test_random_of_features_is_random_where_nothing_is_padded():
    used = np.ones(64, dtype=bool), np.ones(96, dtype=bool)
    assert random_of_features(used, 8, 0.3, seed=5) == patterns.random((64, 96), 8, 0.3, seed=5)


def test_erdos_renyi_on_a_huge_grid():
    layout = patterns.erdos_renyi((250_000, 65_536), 1, epsilon=1)
    assert layout.nnz == pytest.approx(250_000 + 65_536, rel=0.01)


def test_erdos_renyi_counts():
    grid, epsilon = (20, 30), 1.2
    share = epsilon * (20 + 30) / (20 * 30)
    masks = torch.stack([patterns.erdos_renyi((160, 240), 8, epsilon, seed).mask() for seed in range(2000)]).double()
    assert masks.shape[1:] == grid
    assert (masks.mean(0) - share).abs().max() < 4.5 * (share * (1 - share) / 2000) ** 0.5
    # Independent blocks: their number varies like a binomial one.
    assert masks.sum((1, 2)).var().item() == pytest.approx(600 * share * (1 - share), rel=0.15)


@pytest.mark.parametrize(("epsilon", "density"), [(0, 0), (1e9, 1)], ids=["none", "capped"])
def test_erdos_renyi_limits(epsilon, density):
    assert patterns.erdos_renyi((64, 64), 8, epsilon).density == density


# -- small worlds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_graphs_are_symmetric_with_the_diagonal(pattern, seed):
    mask = pattern(seed).mask()
    assert torch.equal(mask, mask.T)
    assert mask.diagonal().all()


def test_watts_strogatz_is_that_of_networkx():
    graph = networkx.watts_strogatz_graph(100, 6, 0.3, seed=5)
    expected = networkx.to_numpy_array(graph).astype(bool) | np.eye(100, dtype=bool)
    assert patterns.watts_strogatz(400, 4, 6, 0.3, seed=5) == BlockLayout(expected, 4)


@pytest.mark.parametrize(
    ("neighbors", "offsets"),
    [
        (2, [(0, 1), (1, 0)]),
        (4, [(0, 1), (1, 0)]),
        (6, [(0, 1), (1, 0), (1, 1)]),
        (8, [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0)]),
        (12, [(0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1)]),
    ],
)
def test_watts_strogatz_2d_before_rewiring(neighbors, offsets):
    y, x = np.divmod(np.arange(48), 8)  # 6 x 8
    expected = np.eye(48, dtype=bool)
    for down, right in offsets:
        end = (y + down) % 6 * 8 + (x + right) % 8
        expected[np.arange(48), end] = expected[end, np.arange(48)] = True
    assert patterns.watts_strogatz_2d(48, 1, neighbors, rewire=0) == BlockLayout(expected, 1)


def test_watts_strogatz_2d_rewires_the_share_asked_for():
    lattice = patterns.watts_strogatz_2d(2500, 1, 8, rewire=0).mask()
    drawn = patterns.watts_strogatz_2d(2500, 1, 8, rewire=0.3).mask()
    kept = (lattice & drawn).sum() - 2500
    assert kept / (lattice.sum() - 2500) == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize("n", [3, 4, 5, 7, 9, 13], ids=str)
@pytest.mark.parametrize("rewire", [0, 0.5, 1])
def test_watts_strogatz_2d_on_small_tori(n, rewire):
    for seed in range(5):
        layout = patterns.watts_strogatz_2d(n, 1, (n - 1) // 2 * 2, rewire, seed)
        assert layout.grid == (n, n)
        assert layout.nnz > n


@pytest.mark.parametrize(("n", "m"), [(2, 1), (9, 8), (30, 1), (30, 4)])
def test_barabasi_albert_counts(n, m):
    for seed in range(5):
        layout = patterns.barabasi_albert(4 * n, 4, m, seed)
        assert layout.nnz == 2 * m * (n - m) + n + m * (m - 1)
        assert layout.mask()[:m, :m].all()
        assert degrees(layout)[0].min() >= m


def test_barabasi_albert_of_the_2017_lstm():
    layout = patterns.barabasi_albert(18432, 32, 8)
    assert layout.grid == (576, 576)
    assert round(layout.density, 4) == 0.0293
    assert layout.nnz * 32 * 32 == 9_953_280


@pytest.mark.parametrize(
    "pattern", [patterns.watts_strogatz, patterns.watts_strogatz_2d, patterns.barabasi_albert, patterns.butterfly]
)
def test_ten_thousand_blocks(pattern):
    assert pattern(320_000, 32).grid == (10_000, 10_000)


# -- seeds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", DRAWN.values(), ids=DRAWN)
def test_seeds(pattern):
    assert pattern(3) == pattern(3)
    assert pattern(np.int64(3)) == pattern(3)
    assert len({pattern(seed) for seed in range(4)}) == 4


@pytest.mark.parametrize("pattern", DRAWN.values(), ids=DRAWN)
def test_global_generators_are_left_alone(pattern):
    def states():
        return torch.get_rng_state().tolist(), pickle.dumps(np.random.get_state()), python_random.getstate()  # noqa: NPY002

    before = states()
    first = pattern(0)
    assert states() == before
    torch.manual_seed(1)
    assert pattern(0) == first


# -- refusals ----------------------------------------------------------------------------------------------------

SHAPED = ("dense", "block_diagonal", "banded", "butterfly", "erdos_renyi", "random")
SQUARE = ("watts_strogatz", "watts_strogatz_2d", "barabasi_albert")
NAN, INF = float("nan"), float("inf")
SHAPES = [(64, 65), (33, 64), (64,), (64, 64, 64), (0, 64), (-32, 64), (64.0, 64), (True, 64), None, "ab"]
REFUSED = [
    ("shape", SHAPED, SHAPES),
    ("features", SQUARE, [1000, 0, -32, 1024.0, True, (1024, 1024), None]),
    ("block_size", (*SHAPED, *SQUARE), [0, -1, 1.5, True, None, (8,)]),
    ("seed", ("random", "erdos_renyi", *SQUARE), [-1, 0.0, None, True, "0"]),
    ("density", ("random",), [-0.1, 1.1, NAN, INF, None, "0.1", True]),
    ("epsilon", ("erdos_renyi",), [-1, NAN, INF, None, "1", True]),
    ("bandwidth", ("banded",), [-1, 1.0, NAN, None, True]),
    ("m", ("barabasi_albert",), [0, -1, 32, 33, 2.0, None, True]),
    ("neighbors", SQUARE[:2], [0, -2, 3, 32, 34, 4.0, NAN, None, True]),
    ("rewire", SQUARE[:2], [-0.1, 1.1, NAN, None, "0.2", True]),
]
CASES = [(name, argument, value) for argument, names, values in REFUSED for name in names for value in values]


def made(name, size=1024, block_size=32, **arguments):
    sized = {"features": size} if name in SQUARE else {"shape": (size, size)}
    return getattr(patterns, name)(**sized | {"block_size": block_size} | arguments)


@pytest.mark.parametrize(("name", "argument", "value"), CASES, ids=[f"{p}-{n}={v!r}" for p, n, v in CASES])
def test_arguments_are_refused(name, argument, value):
    with pytest.raises(BlockSparseError, match=f"{argument}: expected"):
        made(name, **{argument: value})


@pytest.mark.parametrize("name", [*SHAPED, *SQUARE])
def test_more_blocks_than_can_be_numbered_are_refused(name):
    with pytest.raises(BlockSparseError, match="grid: expected fewer than 2"):
        made(name, size=2**40)


@pytest.mark.parametrize("name", SQUARE)
def test_rectangular_blocks_are_no_graph(name):
    with pytest.raises(BlockSparseError, match="block_size: expected a square block"):
        made(name, block_size=(8, 16))
