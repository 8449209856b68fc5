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
from blocksparse.state_indices import is_rounded_mean

OTHERS = "got others, written to this buffer"
SAID = f"(crow|col)_indices: expected those of .*, {OTHERS}.*sparsity.sync_ema.*DistributedDataParallel"


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
    assert "DistributedDataParallel, where layouts of the ranks differ" in second


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
    for array in (layout.row_start, layout.col_of_block, layout.T.row_start):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
    rows = layout.row_of_block
    if rows is layout.row_of_block:  # otherwise each call returns a copy, which no kernel reads
        with pytest.raises(ValueError, match="WRITEABLE"):
            rows.setflags(write=True)


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
    with pytest.raises(bs.BlockSparseError, match=r"a parameter of the module.*computed ones"):
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


# How running means go over a model, the index buffers included: `mean` becomes decay * mean + (1 - decay) * model.


def mean_of_states(mean, model, decay):  # timm's ModelEmaV2
    with torch.no_grad():
        for old, new in zip(mean.state_dict().values(), model.state_dict().values(), strict=True):
            old.copy_(decay * old + (1 - decay) * new)


def mean_of_lists(mean, model, decay):
    old, new = list(mean.state_dict().values()), list(model.state_dict().values())
    torch._foreach_copy_(old, torch._foreach_add(torch._foreach_mul(old, decay), torch._foreach_mul(new, 1 - decay)))


def mean_of_tensors(mean, model, decay):
    pairs = [zip(side.parameters(), side.buffers(), strict=False) for side in (mean, model)]
    for olds, news in zip(*pairs, strict=True):
        for old, new in zip(olds, news, strict=True):
            old.data = decay * old.data + (1 - decay) * new.data


def averaged_model(mean, model, decay):
    averaged = AveragedModel(nn.Identity(), multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
    averaged.module = mean
    averaged.n_averaged += 1
    averaged.update_parameters(model)


def loaded_mean(mean, model, decay):
    new = model.state_dict()
    mean.load_state_dict({name: decay * old + (1 - decay) * new[name] for name, old in mean.state_dict().items()})


MEANS = [mean_of_states, mean_of_lists, mean_of_tensors, averaged_model, loaded_mean]


def wide_net():
    torch.manual_seed(3)
    return nn.Sequential(
        bs.nn.Linear(130, 210, density=0.3, block_size=4), bs.nn.Linear(210, 48, density=0.2, block_size=(8, 2))
    )


@pytest.mark.parametrize("decay", [0.9, 0.9995, 0.9999])
@pytest.mark.parametrize("update", MEANS, ids=lambda update: update.__name__)
def test_a_running_mean_of_all_buffers_keeps_the_layout(update, decay):
    model, x = wide_net(), torch.randn(3, 130)
    mean = copy.deepcopy(model)
    for _ in range(40):
        update(mean, model, decay)
    torch.testing.assert_close(mean(x), model(x), rtol=1e-3, atol=1e-4)
    for name, tensor in mean.state_dict().items():
        if name.endswith("indices"):
            assert tensor.dtype == torch.int32
            assert torch.equal(tensor, model.state_dict()[name]), name
    for old, new in zip(mean, model, strict=True):
        assert old.layout == new.layout


@pytest.mark.parametrize("decay", [0.9, 0.9999])
@pytest.mark.parametrize("update", MEANS, ids=lambda update: update.__name__)
def test_a_running_mean_of_two_layouts_is_refused(update, decay):
    model = wide_net()
    mean = copy.deepcopy(model)
    for _ in range(3):
        update(mean, model, decay)
    bs.sparsity.SET(model, zeta=0.3).step()

    def update_and_save():
        update(mean, model, decay)
        mean.state_dict()

    with pytest.raises((bs.BlockSparseError, RuntimeError), match=r"sparsity\.sync_ema"):
        update_and_save()


def test_a_mean_that_is_synced_follows_with_all_its_buffers():
    model = wide_net()
    mean = copy.deepcopy(model)
    method = bs.sparsity.SET(model, zeta=0.3, on_layout_change=bs.sparsity.sync_ema(model, mean))
    for _ in range(3):
        mean_of_states(mean, model, 0.9999)
        method.step()
        mean_of_states(mean, model, 0.9999)
        assert [layer.layout for layer in mean] == [layer.layout for layer in model]


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999, 0.99999])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_rounding_is_told_from_other_indices_at_any_size(decay, dtype):
    index = torch.cat([torch.arange(2000), torch.arange(2**21, 2**27, 10_007)]).to(dtype)
    held, rng = index.clone(), np.random.default_rng(0)
    for _ in range(200):
        held = (decay * held + (1 - decay) * index).to(dtype)
    expected = index.long().numpy()
    assert is_rounded_mean(held.numpy(), expected)
    other = (decay * index + (1 - decay) * torch.from_numpy(rng.permutation(expected))).to(dtype)
    assert not is_rounded_mean(other.numpy(), expected)


def test_a_compiled_mean_of_an_evolving_model_runs():
    torch._dynamo.reset()
    model, x = wide_net(), torch.randn(3, 130)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    bs.sparsity.SET(model, zeta=0.3).step()
    compiled(x)
    mean = copy.deepcopy(model)
    compiled = torch.compile(mean, backend="aot_eager")
    for _ in range(2):
        mean_of_tensors(mean, model, 0.9999)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["load", "set"])
def test_another_layout_taken_over_in_inference_mode_can_be_trained(how):
    layer, other = bs.nn.Linear(40, 72, density=0.25, block_size=8), bs.nn.Linear(40, 72, density=0.5, block_size=8)
    with torch.inference_mode():
        if how == "load":
            layer.load_state_dict(other.state_dict())
        else:
            layer.set_layout(other.layout, other.values + 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.values.detach().clone()
    layer(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert layer.layout == other.layout
    assert not torch.equal(layer.values, before)


def test_codes_of_another_layout_loaded_in_inference_mode_can_be_loaded_again():
    small = [bs.quantize(bs.nn.Linear(40, 72, density=density, block_size=8)) for density in (0.25, 0.5)]
    with torch.inference_mode():
        small[0].load_state_dict(small[1].state_dict())
    small[0].load_state_dict(small[1].state_dict())
    assert torch.equal(small[0].values, small[1].values)
