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


FROM_VALUES = lambda values: bs.to_dense(values, LAYOUT), LAYOUT.to_torch_bsr, LAYOUT.to_scipy_bsr
REFUSED = [
    *(
        (lambda shape=shape: bs.from_dense(torch.zeros(shape), LAYOUT), r"weight: expected shape \(4, 9\) for .*, got")
        for shape in ((4, 8), (9, 4), (4,), (2, 2, 9), ())
    ),
    *(
        (lambda f=f, v=values: f(v), message)
        for f in FROM_VALUES
        for values, message in (
            *(
                (torch.zeros(shape), r"values: expected shape \(3, 2, 3\) for BlockLayout.*, got")
                for shape in ((2, 2, 3), (3, 3, 2), (3, 2), (3, 6), ())
            ),
            (torch.ones(LAYOUT.values_shape).to_sparse(), "values: expected a dense tensor .* got torch.sparse_coo"),
            (np.zeros(LAYOUT.values_shape), "a tensor of shape"),
        )
    ),
    *(
        (lambda f=f: f(torch.zeros(*LAYOUT.values_shape, 5, 5)), r"3 dimensions, as a matrix has, got .*2, 3, 5, 5\)")
        for f in FROM_VALUES[1:]
    ),
    (lambda: bs.from_dense(np.zeros((4, 9)), LAYOUT), "a tensor of shape"),
    (lambda: bs.from_dense(torch.ones(4, 9).to_sparse(), LAYOUT), "weight: expected a dense .* got torch.sparse_coo"),
    (lambda: bs.from_dense(torch.ones(4, 9), LAYOUT.mask()), "layout: expected a BlockLayout, got Tensor"),
    (lambda: bs.to_dense(torch.ones(3, 2, 3), LAYOUT.mask()), "layout: expected a BlockLayout, got Tensor"),
    *(
        (lambda t=tensor: BlockLayout.from_torch_bsr(t), "tensor: expected a 2-D torch.sparse_bsr tensor, got")
        for tensor in (
            torch.eye(4),
            torch.eye(4).to_sparse_csr(),
            torch.eye(4).expand(2, 4, 4).contiguous().to_sparse_bsr((2, 2)),
            np.eye(4),
        )
    ),
    *(
        (lambda c=crow: BlockLayout.from_torch_bsr(torch_bsr(c, [0, 1])), "crow_indices: .* that ascend from 0 to 2")
        for crow in ([0, 3, 2], [1, 1, 2], [0, 1, 1])
    ),
    *(
        (lambda m=matrix: BlockLayout.from_scipy_bsr(m), "matrix: expected a scipy.sparse BSR matrix, got")
        for matrix in (scipy.sparse.eye(4, format="csr"), np.eye(4), None)
    ),
    (lambda: BlockLayout.from_scipy_bsr(scipy_bsr(data=np.ones((1, 2, 2)))), "values: expected shape"),
    (lambda: BlockLayout.from_scipy_bsr(scipy_bsr(indptr=np.array([0, 3, 2]))), "crow_indices: expected row starts"),
    *(
        (lambda d=data: BlockLayout.from_scipy_bsr(scipy_bsr(data=d)), "data of a dtype and strides that torch has")
        for data in (np.ones((2, 2, 2), dtype=np.longdouble), np.ones((2, 2, 2))[:, ::-1])
    ),
    *(
        (lambda o=options: LAYOUT.to_scipy_bsr(torch.zeros(3, 2, 3, **o)), "values: expected on the CPU, of a dtype")
        for options in ({"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"device": "meta"})
    ),
]


def torch_bsr(crow, col, blocks=None, shape=(4, 4)):
    return torch.sparse_bsr_tensor(crow, col, torch.ones(2, 2, 2) if blocks is None else blocks, shape,
                                   check_invariants=False)  # fmt: skip


def scipy_bsr(**changed):
    matrix = scipy.sparse.bsr_matrix((np.ones((2, 2, 2)), [0, 1], [0, 1, 2]), shape=(4, 4))
    for name, value in changed.items():
        setattr(matrix, name, value)
    return matrix


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_input_is_refused(call, message):
    with pytest.raises(BlockSparseError, match=message):
        call()


# -- BSR of torch and of scipy -----------------------------------------------------------------------------------

TO = {"torch": BlockLayout.to_torch_bsr, "scipy": BlockLayout.to_scipy_bsr}
FROM = {"torch": BlockLayout.from_torch_bsr, "scipy": BlockLayout.from_scipy_bsr}
libraries = pytest.mark.parametrize("library", TO)


@libraries
@given(layouts())
def test_bsr_round_trip(library, layout):
    values = torch.randn(layout.values_shape)
    matrix = TO[library](layout, values)
    assert matrix.shape == layout.shape
    assert library == "torch" or matrix.has_canonical_format
    dense = matrix.to_dense() if library == "torch" else torch.from_numpy(matrix.toarray())
    assert torch.equal(dense, bs.to_dense(values, layout))
    back, same = FROM[library](matrix)
    assert back == layout
    assert torch.equal(same, values)
    assert same.data_ptr() == values.data_ptr() or not layout.nnz, "nothing is copied"


@libraries
@given(layouts())
def test_the_library_makes_the_same_bsr(library, layout):
    weight = torch.where(dense_mask(layout), torch.rand(layout.shape) + 1, 0.0)
    if library == "torch":
        matrix = weight.to_sparse_bsr(layout.block_shape)
    else:
        matrix = scipy.sparse.csr_array(weight.numpy()).tobsr(blocksize=layout.block_shape)
    back, values = FROM[library](matrix)
    assert back == layout
    assert torch.equal(values, bs.from_dense(weight, layout))


@libraries
def test_bsr_with_unsorted_columns(library):
    blocks = torch.randn(2, 2, 2)
    matrix = torch_bsr([0, 2], [1, 0], blocks, (2, 4))
    if library == "scipy":
        matrix = scipy.sparse.bsr_matrix((blocks.numpy(), [1, 0], [0, 2]), shape=(2, 4))
    layout, values = FROM[library](matrix)
    assert torch.equal(values, blocks.flip(0))
    assert torch.equal(bs.to_dense(values, layout), torch.cat([blocks[1], blocks[0]], 1))


def test_torch_bsr_is_differentiable():
    values = torch.randn(LAYOUT.values_shape, requires_grad=True)
    LAYOUT.to_torch_bsr(values).to_dense().sum().backward()
    assert torch.equal(values.grad, torch.ones(LAYOUT.values_shape))


def test_scipy_may_write_to_its_matrix():
    values = torch.ones(LAYOUT.values_shape)
    values[1] = 0
    matrix = LAYOUT.to_scipy_bsr(values)
    matrix.eliminate_zeros()
    assert matrix.nnz == 12
    assert LAYOUT.nnz == 3
    assert LAYOUT.col_indices().tolist() == [0, 2, 2]


def test_missing_scipy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(BlockSparseError, match=r"pip install scipy"):
        LAYOUT.to_scipy_bsr(torch.zeros(LAYOUT.values_shape))
