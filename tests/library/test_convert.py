"""Values to and from dense weights, torch BSR and scipy BSR."""

import sys

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse import BlockLayout, BlockSparseError
from strategies import layouts

LAYOUT = BlockLayout([[True, False, True], [False, False, True]], block_size=(2, 3))
KERNELS = st.sampled_from([(), (3,), (3, 2)])


def dense_mask(layout, kernel=()):
    """The layout's mask in features: each block filled."""
    mask = np.kron(layout.mask().numpy(), np.ones(layout.block_shape, dtype=bool))
    return torch.from_numpy(mask).reshape(*layout.shape, *[1] * len(kernel)).expand(*layout.shape, *kernel)


@given(layouts(), KERNELS)
def test_dense_round_trip(layout, kernel):
    weight = torch.randn(*layout.shape, *kernel)
    values = bs.from_dense(weight, layout)
    assert values.shape == (*layout.values_shape, *kernel)
    assert torch.equal(bs.to_dense(values, layout), torch.where(dense_mask(layout, kernel), weight, 0.0))
    assert torch.equal(bs.from_dense(bs.to_dense(values, layout), layout), values)


@given(layouts(max_grid=4, blocks=(1, 2, 3)), KERNELS)
def test_gradients(layout, kernel):
    weight = torch.randn(*layout.shape, *kernel, requires_grad=True)
    bs.from_dense(weight, layout).sum().backward()
    assert torch.equal(weight.grad, dense_mask(layout, kernel).float())
    values = torch.randn(*layout.values_shape, *kernel, requires_grad=True)
    upstream = torch.randn(*layout.shape, *kernel)
    bs.to_dense(values, layout).backward(upstream)
    assert torch.equal(values.grad, bs.from_dense(upstream, layout))


def test_gradgradcheck():
    values = torch.randn(LAYOUT.values_shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(LAYOUT.shape, dtype=torch.float64, requires_grad=True)
    for function, x in ((bs.to_dense, values), (bs.from_dense, weight)):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x, LAYOUT).sin(), x)
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x, LAYOUT).sin(), x)


def test_vmap():
    values = torch.randn(5, *LAYOUT.values_shape)
    weights = torch.vmap(lambda v: bs.to_dense(v, LAYOUT))(values)
    assert torch.equal(weights[3], bs.to_dense(values[3], LAYOUT))
    assert torch.equal(torch.vmap(lambda w: bs.from_dense(w, LAYOUT))(weights), values)


def test_compiles_into_one_graph():
    weight = torch.randn(LAYOUT.shape, requires_grad=True)
    there_and_back = torch.compile(
        lambda w: bs.to_dense(bs.from_dense(w, LAYOUT), LAYOUT), backend="aot_eager", fullgraph=True
    )(weight)
    assert torch.equal(there_and_back, torch.where(dense_mask(LAYOUT), weight, 0.0))
    there_and_back.sum().backward()
    assert torch.equal(weight.grad, dense_mask(LAYOUT).float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool], ids=str)
def test_dtype_is_kept(dtype):
    weight = torch.ones(LAYOUT.shape, dtype=dtype)
    values = bs.from_dense(weight, LAYOUT)
    assert values.dtype == dtype
    assert bs.to_dense(values, LAYOUT).dtype == dtype


@pytest.mark.parametrize("kind", ["transposed", "channels last"])
def test_values_are_contiguous(kind):
    weight = torch.randn(9, 4).t() if kind == "transposed" else torch.randn(4, 9, 2, 2)
    if kind == "channels last":
        weight = weight.to(memory_format=torch.channels_last)
    values = bs.from_dense(weight, LAYOUT)
    assert values.is_contiguous()
    assert torch.equal(values, bs.from_dense(weight.contiguous(), LAYOUT))


@pytest.mark.parametrize("shape", [(4, 8), (9, 4), (4,), (2, 2, 9), ()], ids=str)
def test_from_dense_refuses_shapes(shape):
    with pytest.raises(BlockSparseError, match=r"weight: expected shape \(4, 9\) for BlockLayout.*, got"):
        bs.from_dense(torch.zeros(shape), LAYOUT)


@pytest.mark.parametrize("shape", [(2, 2, 3), (3, 3, 2), (3, 2), (3, 6), ()], ids=str)
def test_values_of_wrong_shapes_are_refused(shape):
    values = torch.zeros(shape)
    for convert in (lambda v: bs.to_dense(v, LAYOUT), LAYOUT.to_torch_bsr, LAYOUT.to_scipy_bsr):
        with pytest.raises(BlockSparseError, match=r"values: expected shape \(3, 2, 3\) for BlockLayout.*, got"):
            convert(values)


def test_what_is_no_tensor_is_refused():
    for convert in (lambda v: bs.to_dense(v, LAYOUT), lambda v: bs.from_dense(v, LAYOUT), LAYOUT.to_torch_bsr):
        with pytest.raises(BlockSparseError, match="a tensor of shape"):
            convert(np.zeros(LAYOUT.values_shape))


# -- torch BSR ---------------------------------------------------------------------------------------------------


def test_what_is_no_layout_is_refused():
    for convert, tensor in ((bs.from_dense, torch.ones(4, 9)), (bs.to_dense, torch.ones(LAYOUT.values_shape))):
        with pytest.raises(BlockSparseError, match="layout: expected a BlockLayout, got Tensor"):
            convert(tensor, LAYOUT.mask())


def test_sparse_tensors_are_refused():
    with pytest.raises(BlockSparseError, match=r"weight: expected a dense tensor .* got torch.sparse_coo"):
        bs.from_dense(torch.ones(LAYOUT.shape).to_sparse(), LAYOUT)
    for takes_values in (lambda values: bs.to_dense(values, LAYOUT), LAYOUT.to_torch_bsr, LAYOUT.to_scipy_bsr):
        with pytest.raises(BlockSparseError, match=r"values: expected a dense tensor .* got torch.sparse_coo"):
            takes_values(torch.ones(LAYOUT.values_shape).to_sparse())


@given(layouts())
def test_torch_bsr_round_trip(layout):
    values = torch.randn(layout.values_shape)
    tensor = layout.to_torch_bsr(values)
    assert tensor.shape == layout.shape
    assert tensor.values().data_ptr() == values.data_ptr()
    assert torch.equal(tensor.to_dense(), bs.to_dense(values, layout))
    back, same = BlockLayout.from_torch_bsr(tensor)
    assert back == layout
    assert torch.equal(same, values)
    assert same.data_ptr() == values.data_ptr()


@given(layouts())
def test_torch_makes_the_same_bsr(layout):
    weight = torch.where(dense_mask(layout), torch.rand(layout.shape) + 1, 0.0)
    tensor = weight.to_sparse_bsr(layout.block_shape)
    back, values = BlockLayout.from_torch_bsr(tensor)
    assert back == layout
    assert torch.equal(values, bs.from_dense(weight, layout))


def test_torch_bsr_with_unsorted_columns():
    blocks = torch.randn(2, 2, 2)
    crow, col = torch.tensor([0, 2]), torch.tensor([1, 0])
    tensor = torch.sparse_bsr_tensor(crow, col, blocks, (2, 4), check_invariants=False)
    layout, values = BlockLayout.from_torch_bsr(tensor)
    assert torch.equal(values, blocks.flip(0))
    assert torch.equal(bs.to_dense(values, layout), torch.cat([blocks[1], blocks[0]], 1))


def test_torch_bsr_is_differentiable():
    values = torch.randn(LAYOUT.values_shape, requires_grad=True)
    LAYOUT.to_torch_bsr(values).to_dense().sum().backward()
    assert torch.equal(values.grad, torch.ones(LAYOUT.values_shape))


@pytest.mark.parametrize("kind", ["strided", "csr", "batched", "numpy"])
def test_other_tensors_are_refused(kind):
    other = {
        "strided": torch.eye(4),
        "csr": torch.eye(4).to_sparse_csr(),
        "batched": torch.eye(4).expand(2, 4, 4).contiguous().to_sparse_bsr((2, 2)),
        "numpy": np.eye(4),
    }[kind]
    with pytest.raises(BlockSparseError, match=r"tensor: expected a 2-D torch.sparse_bsr tensor, got"):
        BlockLayout.from_torch_bsr(other)


@pytest.mark.parametrize("crow", [[0, 3, 2], [1, 1, 2], [0, 1, 1]], ids=["falls", "starts late", "ends early"])
def test_torch_bsr_with_broken_indices_is_refused(crow):
    broken = torch.sparse_bsr_tensor(crow, [0, 1], torch.ones(2, 2, 2), (4, 4), check_invariants=False)
    with pytest.raises(BlockSparseError, match="crow_indices: expected row starts that ascend from 0 to 2"):
        BlockLayout.from_torch_bsr(broken)


def test_kernels_are_no_matrix():
    for convert in (LAYOUT.to_torch_bsr, LAYOUT.to_scipy_bsr):
        with pytest.raises(BlockSparseError, match=r"3 dimensions, as a matrix has, got shape \(3, 2, 3, 5, 5\)"):
            convert(torch.zeros(*LAYOUT.values_shape, 5, 5))


# -- scipy BSR ---------------------------------------------------------------------------------------------------


@given(layouts())
def test_scipy_bsr_round_trip(layout):
    values = torch.randn(layout.values_shape)
    matrix = layout.to_scipy_bsr(values)
    assert matrix.has_canonical_format
    assert torch.equal(torch.from_numpy(matrix.toarray()), bs.to_dense(values, layout))
    back, same = BlockLayout.from_scipy_bsr(matrix)
    assert back == layout
    assert torch.equal(same, values)
    if layout.nnz:
        assert matrix.data.__array_interface__["data"][0] == values.data_ptr() == same.data_ptr()


def test_scipy_makes_the_same_bsr():
    weight = torch.where(dense_mask(LAYOUT), torch.rand(LAYOUT.shape) + 1, 0.0)
    layout, values = BlockLayout.from_scipy_bsr(scipy.sparse.csr_array(weight.numpy()).tobsr(blocksize=(2, 3)))
    assert layout == LAYOUT
    assert torch.equal(values, bs.from_dense(weight, LAYOUT))


def test_scipy_bsr_with_unsorted_columns():
    blocks = np.random.default_rng(0).random((2, 2, 2))
    matrix = scipy.sparse.bsr_matrix((blocks, [1, 0], [0, 2]), shape=(2, 4))
    layout, values = BlockLayout.from_scipy_bsr(matrix)
    assert np.array_equal(bs.to_dense(values, layout), matrix.toarray())


def test_scipy_may_write_to_its_matrix():
    values = torch.ones(LAYOUT.values_shape)
    values[1] = 0
    matrix = LAYOUT.to_scipy_bsr(values)
    matrix.eliminate_zeros()
    assert matrix.nnz == 12
    assert LAYOUT.nnz == 3
    assert LAYOUT.col_indices().tolist() == [0, 2, 2]


@pytest.mark.parametrize("matrix", [scipy.sparse.eye(4, format="csr"), np.eye(4), None], ids=["csr", "numpy", "none"])
def test_other_matrices_are_refused(matrix):
    with pytest.raises(BlockSparseError, match=r"matrix: expected a scipy.sparse BSR matrix, got"):
        BlockLayout.from_scipy_bsr(matrix)


def test_broken_matrices_are_refused():
    def matrix(data):
        return scipy.sparse.bsr_matrix((data, [0, 1], [0, 1, 2]), shape=(4, 4))

    few, falling = matrix(np.ones((2, 2, 2))), matrix(np.ones((2, 2, 2)))
    few.data, falling.indptr = few.data[:1], np.array([0, 3, 2])
    with pytest.raises(BlockSparseError, match="values: expected shape"):
        BlockLayout.from_scipy_bsr(few)
    with pytest.raises(BlockSparseError, match="crow_indices: expected row starts"):
        BlockLayout.from_scipy_bsr(falling)
    for data in (np.ones((2, 2, 2), dtype=np.longdouble), np.ones((2, 2, 2))[:, ::-1]):
        with pytest.raises(BlockSparseError, match="matrix: expected data of a dtype and strides that torch has"):
            BlockLayout.from_scipy_bsr(matrix(data))


@pytest.mark.parametrize(
    "options", [{"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"device": "meta"}], ids=["bf16", "fp16", "meta"]
)
def test_what_scipy_cannot_hold_is_refused(options):
    with pytest.raises(BlockSparseError, match="values: expected on the CPU, of a dtype that scipy"):
        LAYOUT.to_scipy_bsr(torch.zeros(LAYOUT.values_shape, **options))


def test_missing_scipy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(BlockSparseError, match=r'pip install "blocksparse-torch\[lab\]"'):
        LAYOUT.to_scipy_bsr(torch.zeros(LAYOUT.values_shape))
