"""BlockLayout: its properties, its behaviour as a value, its refusals."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import textwrap
import weakref
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse import BlockLayout, BlockSparseError, compiled_core
from blocksparse.indices import free_keys
from strategies import layouts


@given(layouts())
def test_describes_its_mask(layout):
    mask = layout.mask()
    assert mask.dtype == torch.bool
    assert mask.shape == layout.grid
    assert layout.shape == (layout.grid[0] * layout.block_shape[0], layout.grid[1] * layout.block_shape[1])
    assert layout.nnz == int(mask.sum())
    assert layout.density == layout.nnz / mask.numel()
    assert layout.values_shape == (layout.nnz, *layout.block_shape)
    assert BlockLayout(mask, layout.block_shape) == layout
    assert BlockLayout(mask.int().tolist(), layout.block_shape) == layout


@given(layouts())
def test_indices_are_those_of_torch_bsr(layout):
    crow, col = layout.crow_indices(), layout.col_indices()
    assert crow.dtype == col.dtype == torch.int32
    rows, cols = np.nonzero(layout.mask().numpy())
    assert np.array_equal(crow.diff(), np.bincount(rows, minlength=layout.grid[0]))
    assert crow[0] == 0
    assert np.array_equal(col, cols)
    assert np.array_equal(layout.row_of_block, rows)


@given(layouts())
def test_transposed(layout):
    assert layout.T.T is layout
    assert layout.T.shape == layout.shape[::-1]
    assert layout.T.block_shape == layout.block_shape[::-1]
    assert torch.equal(layout.T.mask(), layout.mask().T)
    # Blocks reordered and transposed one by one are the values of the transposed weight.
    values = torch.randn(layout.values_shape)
    moved = values[torch.from_numpy(layout.transpose_order)].transpose(1, 2)
    assert torch.equal(bs.to_dense(moved, layout.T), bs.to_dense(values, layout).T)
    assert np.array_equal(layout.transpose_order[layout.T.transpose_order], np.arange(layout.nnz))


@given(layouts())
def test_is_a_value(layout):
    order = np.random.default_rng(0).permutation(layout.nnz)
    rows, cols = layout.row_of_block[order], layout.col_indices().numpy()[order]
    same = BlockLayout.from_indices(rows, cols, layout.grid, layout.block_shape)
    assert same == layout
    assert hash(same) == hash(layout)
    assert {layout: "found"}[same] == "found"
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.copy(layout) is layout
    assert copy.deepcopy([layout])[0] is layout
    assert layout != BlockLayout(~layout.mask(), layout.block_shape)
    assert layout != BlockLayout(layout.mask(), (layout.block_shape[0] + 1, layout.block_shape[1]))
    assert layout != layout.mask()


def test_cannot_be_changed():
    mask = np.ones((2, 2), dtype=bool)
    layout = BlockLayout(mask, 4)
    mask[0, 0] = False
    assert layout.nnz == 4
    for name in ("grid", "block_shape", "anything"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(layout, name, (1, 1))
        with pytest.raises(AttributeError, match="cannot be changed"):
            delattr(layout, name)
    layout.mask().zero_()
    assert layout.mask().all()


def test_made_in_inference_mode_it_can_be_trained_on():
    with torch.inference_mode():
        layout = BlockLayout([[True, False], [True, True]], 4).T
        assert not layout.col_indices("meta").is_inference()
    assert not layout.crow_indices().is_inference()
    assert not layout.col_indices().is_inference()
    assert not layout.col_indices("meta").is_inference()


def test_derived_is_built_once():
    layout, built = BlockLayout([[True]], 4), []
    for _ in range(2):
        assert layout.derived("plan", lambda: built.append(1) or "made") == "made"
    assert built == [1]


def test_is_freed():
    layout = BlockLayout([[True, False]], 4)
    layout.T.T.crow_indices()
    gone = weakref.ref(layout)
    del layout
    gc.collect()
    assert gone() is None


def test_index_tensors_can_be_saved():
    col, file = BlockLayout([[True, False, True]], 4).col_indices(), io.BytesIO()
    torch.save(col, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False), col)
    assert torch.equal(copy.deepcopy(col), col)


def core(is_there):
    """Hide the compiled core from the functions on indices, unless it is to be there."""
    return nullcontext() if is_there else mock.patch.object(compiled_core, "load", return_value=(None, "hidden"))


@pytest.mark.parametrize("is_there", [True, False], ids=["core", "numpy"])
@given(layout=layouts(max_grid=8), data=st.data())
def test_replaced_merges_what_stays_with_what_comes(layout, data, is_there):
    mask = layout.mask().numpy()
    drop = data.draw(st.lists(st.integers(0, max(layout.nnz - 1, 0)), unique=True, max_size=layout.nnz))
    gone = mask.copy()
    gone[layout.row_of_block[drop], layout.col_of_block[drop]] = False
    free = np.argwhere(~gone)
    chosen = data.draw(st.lists(st.integers(0, max(len(free) - 1, 0)), unique=True, max_size=len(free)))
    rows, cols = free[chosen].T
    with core(is_there):
        new, source = layout.replaced(torch.tensor(drop, dtype=torch.int64), rows, torch.from_numpy(cols))
    expected = gone.copy()
    expected[rows, cols] = True
    assert new == BlockLayout(expected, layout.block_shape)
    assert new.nnz == layout.nnz - len(drop) + len(chosen)
    assert source.dtype == torch.int64
    positions = np.full(layout.grid, -1)
    positions[gone] = np.flatnonzero(~np.isin(np.arange(layout.nnz), drop))
    assert np.array_equal(source, positions[expected])


@pytest.mark.parametrize("grid", [(1500, 2000), (2, 1_500_000), (50_000, 60), (4000, 2**31 + 2)], ids=str)
def test_replaced_changes_many_blocks(grid):
    rng = np.random.default_rng(0)
    places = np.unique(rng.integers(grid[0] * grid[1], size=1_200_000))
    taken, added = np.sort(rng.permutation(places)[:800_000]), rng.permutation(places[::7])
    layout = BlockLayout.from_indices(*np.divmod(taken, grid[1]), grid, block_size=1)
    drop = np.flatnonzero((rng.random(taken.size) < 0.3) | np.isin(taken, added))
    rows, cols = np.divmod(added, grid[1])
    new, source = layout.replaced(drop, rows, cols)
    kept = np.setdiff1d(np.arange(taken.size), drop)
    keys = np.concatenate([taken[kept], added])
    order = keys.argsort()
    assert np.array_equal(new.keys_of_blocks(), keys[order])
    assert np.array_equal(source, np.concatenate([kept, np.full(added.size, -1)])[order])


@pytest.mark.parametrize("is_there", [True, False], ids=["core", "numpy"])
def test_free_keys(is_there):
    rng = np.random.default_rng(0)
    for total, taken in [(1, 0), (5, 5), (10, 3), (300_000, 100_000)]:
        taken = np.sort(rng.permutation(total)[:taken])
        free = np.delete(np.arange(total), taken)
        ranks = np.flatnonzero(rng.random(free.size) < 0.8)
        with core(is_there):
            assert np.array_equal(free_keys(taken, ranks), free[ranks])


@pytest.mark.parametrize(
    ("drop", "rows", "cols", "said"),
    [
        ([3], [], [], "drop: expected indices from 0 to 2, got 3 to 3"),
        ([-1], [], [], "drop: expected indices"),
        ([0.0], [], [], "drop: expected a vector of ints"),
        ([1, 1], [], [], "drop: expected each position once"),
        ([], [0, 0], [1, 1], r"each block once, got block \(0, 1\) more than once"),
        ([0], [1], [1], r"blocks that the layout does not have, got block \(1, 1\)"),
        ([], [1], [], "vectors of equal length"),
        ([], [2], [0], "rows: expected indices"),
        ([], [0], [2], "cols: expected indices"),
    ],
)
def test_replaced_refuses(drop, rows, cols, said):
    layout = BlockLayout([[True, False], [True, True]], block_size=2)
    with pytest.raises(BlockSparseError, match=said):
        layout.replaced(drop, rows, cols)


@pytest.mark.parametrize("size", [250_000, 2**31 + 2], ids=["250000", "beyond int32"])
def test_huge_grids_need_no_mask(size):
    cols = size - 1 - np.arange(1000)
    layout = BlockLayout.from_indices(np.arange(1000), cols, (1000, size), block_size=1)
    assert np.array_equal(layout.col_indices(), cols)
    assert layout.density == 1000 / (1000 * size)


def test_a_square_grid_of_250_000():
    n = 250_000
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(n * n, size=100_000))
    rows, cols = np.divmod(rng.permutation(keys), n)
    layout = BlockLayout.from_indices(torch.from_numpy(rows), torch.from_numpy(cols), (n, n), block_size=(2, 4))
    assert layout.shape == (2 * n, 4 * n)
    assert np.array_equal(layout.row_of_block * n + layout.col_indices().numpy(), keys)
    assert layout.T.T is layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert BlockLayout.from_indices(cols, rows, (n, n), block_size=(4, 2)) == layout.T


def test_a_few_blocks_in_very_many_rows():
    # Where each row starts would take 4 GiB, which nothing here asks for.
    rows, n = [5, 2**30 - 1, 5], 2**30
    layout = BlockLayout.from_indices(rows, [1, 0, 0], (n, 2), block_size=1)
    assert np.array_equal(layout.row_of_block, [5, 5, n - 1])
    same = BlockLayout.from_indices([n - 1, 5, 5], [0, 0, 1], (n, 2), block_size=1)
    assert (same, hash(same)) == (layout, hash(layout))
    assert layout != BlockLayout.from_indices([5, 6, n - 1], [0, 1, 0], (n, 2), block_size=1)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert layout.T.T is layout
    assert np.array_equal(layout.T.row_start, [0, 2, 3])
    assert np.array_equal(layout.T.col_of_block, [5, n - 1, 5])
    other = BlockLayout.from_indices([1, 0, 0], rows, (2, n), block_size=1)
    assert other == layout.T
    assert layout == other.T
    kept = layout.select([True, False, True])
    assert np.array_equal(kept.replaced([0], [7], [1])[0].row_of_block, [7, n - 1])
    assert all(each._crow is None for each in (layout, same, kept, other.T))


def test_starts_of_very_many_rows_are_found_when_they_are_asked_for():
    n = 2**20
    layout = BlockLayout.from_indices([3, n - 1, 3], [0, 0, 1], (n, 2), block_size=1)
    expected = np.zeros(n + 1)
    expected[4:] = 2
    expected[n] = 3
    assert np.array_equal(layout.crow_indices(), expected)
    assert np.array_equal(layout.row_start, expected)
    assert layout.col_indices().tolist() == [0, 1, 0]
    x, values = torch.randn(2, 2), torch.randn(3, 1, 1)
    y = bs.linear(x, values, layout)
    torch.testing.assert_close(y[:, 3], x @ values[:2, 0, 0])
    torch.testing.assert_close(y[:, n - 1], x[:, 0] * values[2, 0, 0])
    assert y.count_nonzero() == 4


@pytest.mark.parametrize(
    ("mask", "said"),
    {
        "vector": ([True, False], "2-D"),
        "3-D": (np.ones((1, 2, 3), dtype=bool), "2-D"),
        "empty": (np.ones((0, 3), dtype=bool), "2-D"),
        "float": (torch.ones(2, 2), "bool"),
        "bfloat16": (torch.ones(2, 2, dtype=torch.bfloat16), "bool"),
        "twos": ([[0, 2]], "0s and 1s"),
        "ragged": ([[True], [True, False]], "bool matrix"),
        "sparse": (torch.ones(2, 2, dtype=torch.bool).to_sparse(), "bool matrix"),
        "meta": (torch.ones(2, 2, dtype=torch.bool, device="meta"), "bool matrix"),
        "text": ([["x"]], "bool"),
        "none": (None, "2-D"),
    }.values(),
    ids=["vector", "3-D", "empty", "float", "bfloat16", "twos", "ragged", "sparse", "meta", "text", "none"],
)
def test_refuses_masks(mask, said):
    with pytest.raises(BlockSparseError, match=f"mask: expected .*{said}.*, got "):
        BlockLayout(mask, 4)


@pytest.mark.parametrize("block", [0, -8, 8.0, True, None, "8", (8,), (8, 8, 8), (8, 0), (8, True), (2.0, 2)], ids=repr)
def test_refuses_block_sizes(block):
    with pytest.raises(BlockSparseError, match="block_size: expected a positive int"):
        BlockLayout([[True]], block)
    with pytest.raises(BlockSparseError, match="block_size: expected a positive int"):
        BlockLayout.from_indices([0], [0], (1, 1), block)


@pytest.mark.parametrize(
    ("rows", "cols", "grid", "said"),
    [
        ([0, 1, 0], [1, 1, 1], (2, 2), r"each block once, got block \(0, 1\)"),
        ([0, 0], [1, 1], (2, 2), "each block once"),
        ([0, 2], [0, 0], (2, 2), "rows: expected indices from 0 to 1, got 0 to 2"),
        ([0, 1], [0, -1], (2, 2), "cols: expected indices"),
        ([0, 1], [0], (2, 2), "vectors of equal length, got 2 rows and 1 columns"),
        ([0.0], [0], (2, 2), "rows: expected a vector of ints"),
        ([True], [0], (2, 2), "rows: expected a vector of ints"),
        ([[0]], [[0]], (2, 2), "rows: expected a vector of ints"),
        ([[0], [0, 1]], [0], (2, 2), "rows: expected a vector of ints"),
        (np.array([2**64 - 1], dtype=np.uint64), [0], (2, 2), "rows: expected indices"),
        ([0], [0], (2,), "grid: expected a pair"),
        ([0], [0], (2, 0), "grid: expected a pair"),
        ([0], [0], (2, 2.0), "grid: expected a pair"),
        ([0], [0], 2, "grid: expected a pair"),
        ([0], [0], (2**32, 2**32), "grid: expected fewer than 2"),
    ],
)
def test_refuses_indices(rows, cols, grid, said):
    with pytest.raises(BlockSparseError, match=said):
        BlockLayout.from_indices(rows, cols, grid, 4)


def test_import_loads_no_optional_package_and_no_engine_of_many_processes():
    script = """
        import sys
        import torch
        before = set(sys.modules)
        import blocksparse
        optional = {"triton", "matplotlib", "scipy", "networkx", "sklearn", "pooch", "tensorboard"}
        found = {name.split(".")[0] for name in set(sys.modules) - before} & optional
        print(sorted(found), "blocksparse.distributed" in sys.modules)
    """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "[] False\n"


@pytest.mark.parametrize(("rows", "columns"), [(8, 6), (24, 3), (4, 30), (24, 30)])
def test_crop_is_that_of_the_mask(rows, columns):
    layout = bs.patterns.random((24, 30), block_size=(4, 3), density=0.4, seed=2)
    cropped = layout.crop(rows, columns)
    assert (cropped.shape, cropped.block_shape) == ((rows, columns), (4, 3))
    assert torch.equal(cropped.mask(), layout.mask()[: rows // 4, : columns // 3])
    many = bs.BlockLayout.from_indices([0, 5, 2**30], [7, 2, 9], (2**31, 10), 1)  # few blocks in very many rows
    assert many.crop(6, 8).nnz == 2


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        (6, 30, "rows: expected a multiple of the block, 4, up to the 24 of"),
        (24, 33, "columns: expected a multiple of the block, 3, up to the 30 of"),
        (0, 30, "rows: .*got 0"),
        (24, 3.0, "columns: .*got 3.0"),
        (-4, 30, "rows: .*got -4"),
    ],
)
def test_crop_refuses_other_sizes(rows, columns, said):
    with pytest.raises(bs.BlockSparseError, match=said):
        bs.patterns.dense((24, 30), block_size=(4, 3)).crop(rows, columns)


@given(layouts(), st.data())
def test_selections_are_those_of_the_mask(layout, data):
    keys = tuple(data.draw(st.one_of(st.integers(-n, n - 1), st.slices(n))) for n in layout.grid)
    rows, columns = (slice(k, k + 1 or None) if isinstance(k, int) else k for k in keys)
    mask = layout.mask().numpy()[rows, columns]
    if mask.size and all(isinstance(k, int) or k.step in (None, 1) for k in keys):
        assert layout[keys] == BlockLayout(mask, layout.block_shape)
    else:
        with pytest.raises(BlockSparseError, match="ints or slices with step 1 that select"):
            layout[keys]
    assert layout[-1] == layout[-1:]


def test_unions_and_intersections():
    one, other = (bs.patterns.random((24, 30), block_size=(4, 3), density=0.4, seed=i) for i in (1, 2))
    assert torch.equal((one | other).mask(), one.mask() | other.mask())
    assert torch.equal((one & other).mask(), one.mask() & other.mask())
    assert (one & other).block_shape == (4, 3)
    for wrong in (other[1:], bs.patterns.dense((48, 60), (8, 6))):
        with pytest.raises(
            BlockSparseError, match=r"layout \| layout: expected the grid and block size of BlockLayout"
        ):
            one | wrong
    with pytest.raises(TypeError):
        one & one.mask()


@pytest.mark.parametrize("key", [(0, 0, 0), 7, -7, slice(3, 3), slice(None, None, 2), None, True, 1.0, (0, "a")])
def test_selections_that_are_refused(key):
    with pytest.raises(BlockSparseError, match=r"layout\[...\]: expected ints or slices"):
        bs.patterns.dense((24, 30), block_size=(4, 3))[key]


def test_a_transpose_numbers_blocks_beyond_32_bits():
    layout = bs.patterns.random((3000, 3000), 1, density=0.1, seed=0)
    assert layout.grid[1] * layout.nnz > 2**31
    assert np.array_equal(layout.T.mask().numpy(), layout.mask().numpy().T)


def test_a_layout_is_not_iterable():
    with pytest.raises(TypeError, match="not iterable"):
        iter(bs.patterns.dense((32, 32), 8))


@pytest.mark.parametrize("key", [slice(1.5, None), slice("a", 2), (slice(None), slice(0, 2.0))])
def test_slices_of_blocks_are_ints(key):
    with pytest.raises(bs.BlockSparseError, match="ints or slices with step 1"):
        bs.patterns.dense((32, 32), 8)[key]
