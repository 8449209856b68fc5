"""The 2017 interface: its shapes, its order of blocks, its example."""

import pickle

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.compat.matmul import _z_order
from blocksparse.matmul import BlocksparseMatMul
from blocksparse.ops import linear_transposed

SPARSITY = np.array([[1, 0, 1], [0, 0, 1]])  # [in_blocks, out_blocks]


def dense_of(bsmm, w):
    """The matrix [in, out], block by block as the 2017 interface defines it."""
    inputs, outputs = bsmm.layout.block_shape
    dense = torch.zeros(bsmm.layout.shape, dtype=torch.float64)
    for k in range(len(w)):
        i, o = bsmm.block_coord(k)
        dense[i * inputs : (i + 1) * inputs, o * outputs : (o + 1) * outputs] = w[k]
    return dense


def relative_error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def test_the_2017_example():
    hidden_size, block_size, minibatch_size = 4096, 32, 64
    blocks = hidden_size // block_size
    sparsity = np.random.default_rng().integers(2, size=(blocks, blocks))
    bsmm = BlocksparseMatMul(sparsity, block_size=block_size)
    x, w = torch.randn(minibatch_size, hidden_size), torch.randn(bsmm.w_shape)
    assert bsmm.w_shape == (sparsity.sum(), 32, 32)
    y = bsmm(x, w)
    assert y.shape == bsmm.o_shape(minibatch_size)
    some = slice(0, 4)  # of the tokens: float64 is slow
    assert relative_error(y[some], x[some].double() @ bs.to_dense(w, bsmm.layout).double()) < 2e-6


@pytest.mark.parametrize("block_size", [8, (8, 16)], ids=str)
def test_blocks_map_inputs_to_outputs_in_row_major_order(block_size):
    bsmm = BlocksparseMatMul(SPARSITY, block_size)
    assert [bsmm.block_coord(k) for k in range(3)] == [(0, 0), (0, 2), (1, 2)]
    x, w = torch.randn(5, bsmm.layout.shape[0]), torch.randn(bsmm.w_shape)
    y = bsmm(x, w)
    assert relative_error(y, x.double() @ dense_of(bsmm, w)) < 2e-6
    width = bsmm.layout.block_shape[1]
    assert (y[:, width : 2 * width] == 0).all(), "outputs without blocks are exactly 0"


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list], ids=["numpy", "torch", "lists"])
def test_layouts_of_any_kind(kind):
    bsmm = BlocksparseMatMul(kind(SPARSITY.tolist()), block_size=8)
    assert bsmm.layout == bs.BlockLayout(SPARSITY, block_size=8)


def test_w_are_the_values_of_the_transposed_linear():
    bsmm = BlocksparseMatMul(SPARSITY, block_size=8)
    x, w = torch.randn(5, 16, dtype=torch.float64), torch.randn(bsmm.w_shape, dtype=torch.float64)
    values = w.mT[torch.from_numpy(bsmm.layout.transpose_order)]
    torch.testing.assert_close(bsmm(x, w), bs.linear(x, values, bsmm.layout.T))
    torch.testing.assert_close(bsmm(x, w), linear_transposed(x, w, bsmm.layout))


def test_feature_axis_0_is_the_transpose():
    by_row = BlocksparseMatMul(SPARSITY, block_size=8)
    by_column = BlocksparseMatMul(SPARSITY, block_size=8, feature_axis=0)
    assert (by_row.i_shape(5), by_row.o_shape(5)) == ((5, 16), (5, 24))
    assert (by_column.i_shape(5), by_column.o_shape(5)) == ((16, 5), (24, 5))
    x, w = torch.randn(by_column.i_shape(5)), torch.randn(by_column.w_shape)
    y = by_column(x, w)
    assert y.shape == by_column.o_shape(5)
    torch.testing.assert_close(y, by_row(x.T, w).T, rtol=0, atol=0)


# -- the order of blocks that the 2017 library saved ----------------------------------------------------------------

# The place of each block [input, output] of a grid of 4 x 8: four quarters of a square, each of four quarters.
Z_ORDER = [
    [0, 2, 8, 10, 32, 34, 40, 42],
    [1, 3, 9, 11, 33, 35, 41, 43],
    [4, 6, 12, 14, 36, 38, 44, 46],
    [5, 7, 13, 15, 37, 39, 45, 47],
]


def spelled_out(sparsity):
    """The stored blocks of a pattern of at most 4 x 8 blocks, in the order of the table."""
    stored = [(i, o) for i, row in enumerate(sparsity) for o, here in enumerate(row) if here]
    return sorted(stored, key=lambda block: Z_ORDER[block[0]][block[1]])


def some_pattern(grid):
    sparsity = torch.rand(grid) < 0.6
    sparsity[0, 0] = True
    return sparsity.int().tolist()


@pytest.mark.parametrize("grid", [(4, 8), (3, 5), (4, 4), (1, 7), (4, 1), (2, 6)], ids=str)
@pytest.mark.parametrize("block_size", [4, (2, 6)], ids=str)
def test_z_order(grid, block_size):
    sparsity = some_pattern(grid)
    bsmm = BlocksparseMatMul(sparsity, block_size, z_order=True)
    assert [bsmm.block_coord(k) for k in range(bsmm.layout.nnz)] == spelled_out(sparsity)
    x, w = torch.randn(5, bsmm.layout.shape[0]).double(), torch.randn(bsmm.w_shape).double()
    dense = dense_of(bsmm, w)
    torch.testing.assert_close(bsmm(x, w), x @ dense)
    torch.testing.assert_close(bs.to_dense(bsmm.row_major(w), bsmm.layout), dense, rtol=0, atol=0)


@pytest.mark.parametrize("feature_axis", [0, 1])
def test_z_order_of_gates_and_gradients(feature_axis):
    bsmm = BlocksparseMatMul(some_pattern((4, 4)), 2, feature_axis, z_order=True)
    x = torch.randn(bsmm.i_shape(3), dtype=torch.float64, requires_grad=True)
    w = torch.randn(bsmm.w_shape, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(bsmm.layout.nnz, dtype=torch.float64)
    torch.testing.assert_close(bsmm(x, w, gate), bsmm(x, w * gate[:, None, None]))
    assert torch.autograd.gradcheck(bsmm, (x, w))


def test_z_order_of_large_layouts_interleaves_all_bits():
    side = 1 << 17
    layout = bs.BlockLayout.from_indices([0, 1, side - 1, side - 1], [side - 1, 0, 0, side - 1], (side, side), 1)
    bsmm = BlocksparseMatMul([[1]], z_order=True)
    bsmm.layout, bsmm._order = layout, _z_order(layout)
    last = side - 1
    assert [bsmm.block_coord(k) for k in range(4)] == [(1, 0), (last, 0), (0, last), (last, last)]


def test_a_square_input_is_read_by_the_axis():
    by_row, by_column = (BlocksparseMatMul([[1, 0], [1, 1]], 4, axis) for axis in (1, 0))
    x, w = torch.randn(8, 8), torch.randn(by_row.w_shape)
    assert relative_error(by_row(x, w), x.double() @ dense_of(by_row, w)) < 2e-6
    assert relative_error(by_column(x, w), dense_of(by_row, w).T @ x.double()) < 2e-6


def test_weights_that_2017_saved_without_z_order_are_those_of_the_transposed_linear():
    """By output, then by input: what the page on moving says."""
    bsmm = BlocksparseMatMul(SPARSITY, block_size=8)
    places = sorted(zip(*(index.tolist() for index in SPARSITY.nonzero()), strict=True), key=lambda block: block[::-1])
    x, saved = torch.randn(5, 16, dtype=torch.float64), torch.randn(bsmm.w_shape, dtype=torch.float64)
    expected = torch.zeros(5, 24, dtype=torch.float64)
    for (i, o), block in zip(places, saved, strict=True):
        expected[:, 8 * o : 8 * o + 8] += x[:, 8 * i : 8 * i + 8] @ block
    torch.testing.assert_close(bs.linear(x, saved.mT.contiguous(), bsmm.layout.T), expected)


def test_row_major_weights_stay_as_they_are():
    bsmm = BlocksparseMatMul(SPARSITY, block_size=8)
    w = torch.randn(bsmm.w_shape)
    assert bsmm.row_major(w) is w
    for wrong in (w[1:], w.sum(), w.numpy()):
        with pytest.raises(bs.BlockSparseError, match=r"blocks: expected a tensor \[3, ...\], got"):
            bsmm.row_major(wrong)


@pytest.mark.parametrize("batch", [(), (1,), (0,), (2, 3)], ids=str)
def test_leading_dimensions(batch):
    bsmm = BlocksparseMatMul(SPARSITY, block_size=8)
    assert bsmm(torch.randn(*batch, 16), torch.randn(bsmm.w_shape)).shape == (*batch, 24)


@pytest.mark.parametrize("feature_axis", [0, 1])
def test_gradients(feature_axis):
    bsmm = BlocksparseMatMul(SPARSITY, block_size=2, feature_axis=feature_axis)
    x = torch.randn(bsmm.i_shape(3), dtype=torch.float64, requires_grad=True)
    w = torch.randn(bsmm.w_shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(bsmm, (x, w))
    assert torch.autograd.gradgradcheck(bsmm, (x, w))


def test_identity_init():
    bsmm = BlocksparseMatMul(np.ones((3, 3), dtype=int), block_size=4)
    x = torch.randn(2, 12, dtype=torch.float64)
    w = bsmm.identity_init(scale=2, dtype=torch.float64)
    assert w.shape == bsmm.w_shape
    torch.testing.assert_close(bsmm(x, w), 2 * x)
    sorted_otherwise = BlocksparseMatMul(np.ones((3, 3), dtype=int), block_size=4, z_order=True)
    torch.testing.assert_close(sorted_otherwise(x, sorted_otherwise.identity_init(2, torch.float64)), 2 * x)
    without_diagonal = BlocksparseMatMul([[0, 1], [1, 0]], block_size=4)
    assert (without_diagonal.identity_init() == 0).all()


def test_identity_init_goes_on_where_the_matrix_is_not_square():
    wide = BlocksparseMatMul(np.ones((1, 3), dtype=int), block_size=4)
    x = torch.randn(2, 4)
    torch.testing.assert_close(wide(x, wide.identity_init()), x.repeat(1, 3))
    tall = BlocksparseMatMul(np.ones((2, 1), dtype=int), block_size=4)
    x = torch.randn(2, 8)
    torch.testing.assert_close(tall(x, tall.identity_init()), x[:, :4] + x[:, 4:])


def test_pickle_and_repr():
    bsmm = BlocksparseMatMul(SPARSITY, block_size=8, feature_axis=0)
    again = pickle.loads(pickle.dumps(bsmm))
    assert (again.layout, again.feature_axis) == (bsmm.layout, 0)
    assert repr(bsmm) == "BlocksparseMatMul(16 -> 24, block_size=(8, 8), nnz=3, density=0.5, feature_axis=0)"
    again = pickle.loads(pickle.dumps(BlocksparseMatMul(SPARSITY, 8, z_order=True)))
    assert [again.block_coord(k) for k in range(3)] == spelled_out(SPARSITY)
    assert repr(again).endswith("feature_axis=1, z_order=True)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": [1, 0]}, "expected 2-D"),
        ({"layout": [[0.5, 1.0]]}, "expected bool"),
        ({"layout": [[2, 1]]}, "expected 0s and 1s"),
        ({"layout": [[1]], "block_size": 0}, "block_size: expected a positive int"),
        ({"layout": [[1]], "block_size": 8.0}, "block_size: expected a positive int"),
        ({"layout": [[1]], "feature_axis": 2}, "feature_axis: expected 0 or 1, got 2"),
        ({"layout": [[1]], "feature_axis": True}, "feature_axis: expected 0 or 1, got True"),
        ({"layout": [[1]], "feature_axis": np.ones(2)}, "feature_axis: expected 0 or 1, got array"),
        ({"layout": [[1]], "z_order": 1}, "z_order: expected True or False, got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_layouts(arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        BlocksparseMatMul(**arguments)


@pytest.mark.parametrize("block", [3, -1, 1.0, None])
def test_bad_block_numbers(block):
    with pytest.raises(bs.BlockSparseError, match="block: expected an int from 0 to 2, got"):
        BlocksparseMatMul(SPARSITY, block_size=8).block_coord(block)


@pytest.mark.parametrize("feature_axis", [0, 1])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x.T, w), "x: expected"),
        (lambda x, w: (x[:0, :0], w), "x: expected"),
        (lambda x, w: (x.sum(), w), "x: expected"),
        (lambda x, w: (x.numpy(), w), "x: expected"),
        (lambda x, w: (x, w.numpy()), "values: expected a torch.Tensor"),
        (lambda x, w: (x, w[1:]), r"values: expected \[3, 8, 8\]"),
        (lambda x, w: (x, w.double()), "values: expected the dtype of x"),
        (lambda x, w: (x, w.to("meta")), "values: expected the device of x"),
        (lambda x, w: (x.long(), w.long()), "linear: expected a dtype .* got torch.int64 on cpu"),
    ],
)
def test_bad_calls(feature_axis, change, message):
    bsmm = BlocksparseMatMul(SPARSITY, block_size=8, feature_axis=feature_axis)
    with pytest.raises(bs.BlockSparseError, match=message):
        bsmm(*change(torch.randn(bsmm.i_shape(5)), torch.randn(bsmm.w_shape)))
