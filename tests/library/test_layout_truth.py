"""A module has one layout: whatever else is written to its index buffers raises instead of computing another net."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import blocksparse as bs

OTHERS = "got others, written to this buffer"
SAID = f"(crow|col)_indices: expected those of .*, {OTHERS}.*DistributedDataParallel.*sparsity.sync_ema"


def linear(seed, **options):
    torch.manual_seed(seed)
    return bs.nn.Linear(48, 64, density=0.5, block_size=16, **options)


@pytest.fixture
def pair():
    """Two layers of as many blocks in other places."""
    one, other = linear(0), linear(1)
    assert one.layout != other.layout
    assert one.layout.nnz == other.layout.nnz
    return one, other


X = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))

# How others write to a module's buffers.


def copied(one, other):
    for mine, its in zip(one.buffers(), other.buffers(), strict=True):
        mine.detach().copy_(its.detach())


def assigned(one, other):
    one.crow_indices, one.col_indices = other.crow_indices.clone(), other.col_indices.clone()


def into_the_state(one, other):
    state = one.state_dict()
    for name, tensor in other.state_dict().items():
        state[name].copy_(tensor)


def nonsense(one, _):
    one.col_indices.fill_(3_000_000)


def in_inference_mode(one, other):
    with torch.inference_mode():
        copied(one, other)


def only_starts(one, other):
    one.crow_indices[1] += 1


def nothing(one, _):
    one.col_indices = None


def deleted(one, _):
    del one.crow_indices


def sparse(one, _):
    one.col_indices = one.col_indices.to_sparse()


def quantised(one, _):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the function is deprecated
        one.crow_indices = torch.quantize_per_tensor(one.crow_indices.float(), 1.0, 0, torch.qint32)


WRITERS = [
    copied,
    assigned,
    into_the_state,
    nonsense,
    in_inference_mode,
    only_starts,
    nothing,
    deleted,
    sparse,
    quantised,
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch copies quantised tensors by deprecated functions
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer(X),
        lambda layer: layer.layout,
        lambda layer: layer.state_dict(),
        lambda layer: nn.Sequential(layer).double(),
        lambda layer: bs.densify(layer),
        lambda layer: copy.deepcopy(layer)(X),
    ],
    ids=["call", "layout", "state_dict", "to", "densify", "deepcopy"],
)
def test_other_indices_in_the_buffers_raise(write, use, pair):
    one, other = pair
    write(one, other)
    with pytest.raises(bs.BlockSparseError, match=SAID):
        use(one)
    assert "Linear" in repr(one)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(X), other(X))


@pytest.mark.parametrize("write", [lambda b: b.data.fill_(1), lambda b: b.numpy().fill(1)], ids=["data", "numpy"])
def test_what_is_written_past_the_counters_is_not_saved(write):
    layer = linear(0)
    write(layer.col_indices)
    with pytest.raises(bs.BlockSparseError, match=SAID):
        layer.state_dict()


def test_the_same_indices_written_again_are_fine():
    layer = linear(0)
    expected = layer(X)
    for write in (copied, assigned, in_inference_mode):
        write(layer, copy.deepcopy(layer))
        assert torch.equal(layer(X), expected)
    layer.col_indices = layer.col_indices.long()
    assert torch.equal(layer(X), expected)


def test_buffers_made_in_inference_mode_do_not_stay():
    layer = linear(0)
    with torch.inference_mode():
        layer.type(torch.float64)
        moved = [buffer.is_inference() for buffer in layer.buffers()]
        assigned(layer, layer)
        layer(X.double())
    assert moved == [buffer.is_inference() for buffer in layer.buffers()] == [False, False]
    assert layer.col_indices.dtype == torch.int32, "a change of dtype is one of the values"
    assert torch.equal(layer.col_indices, layer.layout.col_indices())


def test_deferred_initialization_and_loading():
    source = linear(0)
    with torch.device("meta"):
        target = linear(1)
    assert target.state_dict()["col_indices"].is_meta
    target.load_state_dict(target.state_dict())
    target.to_empty(device="cpu")
    assert torch.equal(target.col_indices, target.layout.col_indices()), "memory that nobody wrote is no layout"
    state = target.state_dict()
    for name, tensor in source.state_dict().items():  # in place, as distributed checkpoints are loaded
        state[name].copy_(tensor)
    target.load_state_dict(state)
    assert target.layout == source.layout
    assert torch.equal(target(X), source(X))


def test_functional_call_takes_the_layout_only(pair):
    one, other = pair
    values = {"values": torch.randn_like(one.values)}
    own = torch.func.functional_call(one, values | dict(one.named_buffers()), (X,))
    torch.testing.assert_close(own, X @ bs.to_dense(values["values"], one.layout).T + one.bias)
    with pytest.raises(bs.BlockSparseError, match=SAID):
        torch.func.functional_call(one, other.state_dict(), (X,))
    one(X)


def test_an_ensemble_has_one_layout(pair):
    one, other = pair
    layers = [bs.nn.Linear(48, 64, layout=one.layout) for _ in range(3)]

    def together(layers):
        state = torch.func.stack_module_state(layers)
        return torch.func.vmap(lambda *state: torch.func.functional_call(one, state, (X,)))(*state)

    torch.testing.assert_close(together(layers), torch.stack([layer(X) for layer in layers]))
    with pytest.raises(bs.BlockSparseError, match=SAID):
        together([*layers, other])


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, {"use_buffers": True}],
    ids=["mean", "moving mean", "with buffers"],
)
def test_a_running_mean_of_an_evolving_model(options):
    model = nn.Sequential(linear(0))
    mean = AveragedModel(model, **options)
    method = bs.sparsity.SET(model, zeta=0.5)
    for _ in range(2):
        mean.update_parameters(model)
        mean(X)
    method.step()
    mean.update_parameters(model)
    with pytest.raises(bs.BlockSparseError, match=SAID):
        mean(X)
    with pytest.raises(bs.BlockSparseError, match=SAID):
        mean.state_dict()


def test_a_module_is_looked_at_when_it_is_compiled(pair):
    one, other = pair
    torch._dynamo.reset()
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), one(X))
    torch._dynamo.reset()
    copied(one, other)
    with pytest.raises((bs.BlockSparseError, torch._dynamo.exc.Unsupported), match=OTHERS):
        torch.compile(one, fullgraph=True, backend="aot_eager")(X)
    torch._dynamo.reset()


def ranks_of_data_parallel_training():
    rank = torch.distributed.get_rank()

    def wrapped(seed):
        torch.manual_seed(seed)
        return DistributedDataParallel(bs.nn.Linear(48, 64, density=0.5, block_size=16))

    model = wrapped(0)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(5, 48)).square().mean().backward()
    model.module.state_dict()
    model = wrapped(rank)
    try:
        model.module(torch.randn(5, 48))
    except bs.BlockSparseError as error:
        return str(error)
    return "runs"


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
def test_ranks_of_data_parallel_training_have_one_layout(processes):
    # Each has the values and indices of rank 0, and a layout of its own.
    first, second = processes(2)(ranks_of_data_parallel_training)
    assert first == "runs"
    assert "DistributedDataParallel, where the layouts of the ranks differ" in second


@pytest.mark.parametrize("blocks", [1000, 1 << 20], ids=["small", "large"])
def test_nobody_can_write_to_what_kernels_read(blocks):
    layout = bs.patterns.random((2 * blocks // 500, 500), block_size=1, density=0.5, seed=0)
    layout = bs.patterns.dense((blocks // 500 + 1, 500), block_size=1) if blocks > 1000 else layout
    x, values = torch.randn(3, layout.shape[1]), torch.randn(layout.values_shape)
    starts, cols, expected = np.array(layout.row_start), np.array(layout.col_of_block), bs.linear(x, values, layout)
    bsr = layout.to_torch_bsr(values)
    given = layout.crow_indices(), layout.col_indices(), bsr.crow_indices(), bsr.col_indices(), layout.mask()
    for tensor in given:
        tensor.fill_(1)
    layout.transpose_order.fill(0)
    assert np.array_equal(layout.crow_indices(), starts)
    assert np.array_equal(layout.col_indices(), cols)
    assert torch.equal(bs.linear(x, values, layout), expected)
    op = torch.ops.blocksparse.linear
    indices = [layout.crow_indices(), layout.col_indices()]
    assert torch.equal(op(x, values, None, indices, layout.grid[1], False, None), expected)
    with pytest.raises(bs.BlockSparseError, match="each block once"):
        op(x, values, None, [indices[0], given[1]], layout.grid[1], False, None)
    for array in (layout.row_start, layout.col_of_block, layout.row_of_block, layout.T.row_start):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)


@pytest.mark.parametrize("blocks", [8, 1024], ids=["few blocks", "2^20 blocks"])
def test_what_kernels_read_is_out_of_reach(blocks):
    layout = bs.patterns.dense((blocks, blocks), block_size=1)
    for array in (layout.row_start, layout.col_of_block, layout.row_of_block):
        base = array
        while isinstance(base, np.ndarray):
            assert not base.flags.writeable
            base = base.base
        assert base is None or isinstance(base, bytes)
    expected = layout.col_of_block.copy()
    for index in layout.indices_on("cpu"):
        index.fill_(10**6)
    np.testing.assert_array_equal(layout.col_of_block, expected)
    with pytest.raises(AttributeError, match="cannot be changed"):
        layout.__init__([[True]], 1)


def test_values_that_are_computed_are_not_replaced():
    layer = linear(0)
    prune.l1_unstructured(layer, "values", 0.5)
    with pytest.raises(bs.BlockSparseError, match=r"a parameter of the module.*ones computed from others"):
        layer.set_layout(layer.layout, layer.values.detach())


@pytest.mark.parametrize("values", ["a", None, torch.eye(2).to_sparse()], ids=["text", "nothing", "sparse"])
def test_only_dense_values_are_set(values):
    layer = linear(0)
    with pytest.raises(bs.BlockSparseError, match="values: expected a dense tensor"):
        layer.set_layout(layer.layout, values)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("grown", [False, True], ids=["fewer blocks", "more blocks"])
def test_an_optimizer_with_the_state_of_another_layout_does_not_step(fused, grown):
    few, many = (bs.nn.Linear(64, 64, density=density, block_size=8) for density in (0.1, 0.9))
    layer, other = (few, many) if grown else (many, few)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    layer.load_state_dict(other.state_dict())
    layer(torch.ones(1, 64)).sum().backward()
    with pytest.raises(bs.BlockSparseError, match="after a change of the layout"):
        optimizer.step()
    optimizer.state.clear()
    optimizer.step()
