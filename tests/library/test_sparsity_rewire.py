"""Layout changes in place: values and optimizer state follow."""

import copy
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import blocksparse as bs
from blocksparse.sparsity.selection import mark_smallest
from blocksparse.sparsity.sparse_training.growth import _draw_in_rows, draw_unused
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.9),
    "published": lambda params: bs.sparsity.SGD(params),
}


def layers():
    torch.manual_seed(0)
    yield "linear-1", bs.nn.Linear(20, 30, density=0.2, block_size=1), torch.randn(4, 20)
    yield "linear-8", bs.nn.Linear(61, 37, density=0.3, block_size=8), torch.randn(4, 61)
    yield "linear-32", bs.nn.Linear(96, 128, density=0.5, block_size=32), torch.randn(4, 96)
    yield "conv", bs.nn.Conv2d(16, 24, 3, density=0.5, block_size=8), torch.randn(2, 16, 5, 5)
    yield "transposed", bs.nn.ConvTranspose1d(16, 24, 3, density=0.5, block_size=8), torch.randn(2, 16, 5)
    yield "lstm", bs.nn.LSTM(12, 16, density=0.5, block_size=4), torch.randn(3, 2, 12)


def trained(model, x, optimizer, steps=2):
    for _ in range(steps):
        y = model(x)
        update(optimizer, (y[0] if isinstance(y, tuple) else y).square().sum())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(("model", "x"), [pytest.param(m, x, id=name) for name, m, x in layers()])
def test_state_of_kept_and_new_blocks(model, x, make):
    module = next(m for m in model.modules() if hasattr(m, "values"))
    optimizer = make(model.parameters())
    trained(model, x, optimizer)
    parameter, layout = module.values, module.layout
    free = (~layout.mask()).nonzero()
    drop, (rows, cols) = [1, 0], free[[2, 0]].T
    values = bs.to_dense(parameter.detach(), layout)
    state = {name: kept.clone() for name, kept in optimizer.state[parameter].items() if isinstance(kept, torch.Tensor)}
    seen = []
    source = bs.sparsity.rewire(module, drop, rows, cols, optimizer, on_layout_change=lambda *given: seen.append(given))
    assert module.values is parameter
    assert parameter.grad is None
    assert seen[0][0] is module
    assert torch.equal(seen[0][1], source)
    # The dense weights say it without positions: the two dropped are 0 now, and so are the two new ones.
    mask = layout.mask()
    mask[tuple(mask.nonzero()[:2].T)] = False
    kept = mask.clone()
    mask[rows, cols] = True
    assert torch.equal(module.layout.mask(), mask)
    on = kept.repeat_interleave(layout.block_shape[0], 0).repeat_interleave(layout.block_shape[1], 1)
    on = on.reshape(*on.shape, *[1] * (values.dim() - 2))
    assert torch.equal(bs.to_dense(parameter.detach(), module.layout), values * on)
    after = optimizer.state[parameter]
    per_weight = [name for name in state if state[name].shape == parameter.shape]
    assert per_weight
    for name, before in state.items():
        if name in per_weight:
            new = (source < 0).reshape(-1, *[1] * (parameter.dim() - 1)) & torch.ones_like(parameter, dtype=torch.bool)
            expected = bs.to_dense(before, layout) * on
            if name.endswith(("_sq", "square_avg")):
                # At the mean over the real weights that stay: padding does not count.
                stays = module.dense_of(torch.where(new, 0, torch.ones_like(parameter))).bool()
                new = module.dense_of(torch.where(new, torch.ones_like(parameter), 0)).bool()
                expected = module.dense_of(bs.from_dense(expected, module.layout))
                expected[new] = expected[stays].double().mean().float()
                torch.testing.assert_close(module.dense_of(after[name]), expected, rtol=1e-6, atol=0)
            else:
                assert torch.equal(bs.to_dense(after[name], module.layout), expected), name
        else:
            assert torch.equal(after[name], before), name
    trained(model, x, optimizer)
    assert torch.isfinite(parameter).all()


def test_fewer_blocks_and_new_values():
    layer = bs.nn.Linear(3, 2, layout=bs.BlockLayout([[1, 1, 0], [0, 1, 1]], block_size=1))
    layer.values.data = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(4, 1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    trained(layer, torch.randn(4, 3), optimizer)
    before = layer.values.detach().flatten()
    # Given in another order than they are kept in; position 0 goes and comes back.
    new = torch.tensor([7.0, 5.0]).reshape(2, 1, 1)
    source = bs.sparsity.rewire(layer, [0, 1, 3], [1, 0], [0, 0], optimizer, new=new)
    assert source.tolist() == [-1, -1, 2]
    assert layer.values.flatten().tolist() == [5, 7, before[2].item()]
    assert optimizer.state[layer.values]["momentum_buffer"].flatten()[:2].tolist() == [0, 0]
    trained(layer, torch.randn(4, 3), optimizer)


def test_a_compiled_forward_follows():
    layer = bs.nn.Linear(16, 16, layout=bs.patterns.block_diagonal((16, 16), 4))
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, 16)
    compiled(x)
    bs.sparsity.rewire(layer, [0], [0], [3], new=torch.ones(1, 4, 4))
    torch.testing.assert_close(compiled(x), layer(x))
    torch._dynamo.reset()


def test_sync_ema_follows_the_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        bs.nn.Linear(40, 64, density=0.3, block_size=8), nn.LSTM(64, 8), bs.nn.Linear(64, 8, density=0.5, block_size=4)
    )
    decay, x = 0.9, torch.randn(16, 40)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    layer, twin, sources = model[0], mean.module[0], {}
    goes_along = bs.sparsity.sync_ema(model, mean)

    def on_layout_change(module, source):
        sources[module] = source
        goes_along(module, source)

    method = bs.sparsity.SET(model, optimizer, 0.4, every=2, on_layout_change=on_layout_change)
    expected, first = bs.to_dense(layer.values.detach(), layer.layout).double(), True
    for step in range(6):
        update(optimizer, model[2](layer(x)).square().mean())
        mean.update_parameters(model)
        dense = bs.to_dense(layer.values.detach(), layer.layout).double()
        expected = dense if first else decay * expected + (1 - decay) * dense
        first = False
        if method.step():
            assert step % 2 == 1
            # Those that went are 0 in the mean too, and those that came as they are in the model.
            came = (sources[layer] < 0)[:, None, None].expand_as(layer.values)
            assert came.any()
            kept = bs.from_dense(expected, layer.layout)
            expected = bs.to_dense(torch.where(came, layer.values.detach().double(), kept), layer.layout)
        assert twin.layout == layer.layout
        torch.testing.assert_close(bs.to_dense(twin.values.detach(), twin.layout).double(), expected, rtol=0, atol=1e-6)
    for other in (nn.Linear(2, 2), nn.Sequential(model[0])):
        with pytest.raises(bs.BlockSparseError, match="other: expected a copy of the model, with its 2 layouts"):
            bs.sparsity.sync_ema(model, other)
    with pytest.raises(bs.BlockSparseError, match="model: expected one with block-sparse weights, got Linear"):
        bs.sparsity.sync_ema(nn.Linear(2, 2), mean)
    with pytest.raises(bs.BlockSparseError, match="sync_ema: a layout changed outside of `model`"):
        bs.sparsity.SET(bs.nn.Linear(8, 8, density=0.5, block_size=1), on_layout_change=goes_along).step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda all: pickle.loads(pickle.dumps(all))], ids=["copy", "saved"])
def test_sync_ema_of_a_copy_follows_the_copy(copied):
    model = bs.nn.Linear(40, 64, density=0.3, block_size=8)
    mean = copy.deepcopy(model)
    method = bs.sparsity.SET(model, on_layout_change=bs.sparsity.sync_ema(model, mean))
    before = model.layout
    model_copy, mean_copy, method_copy = copied((model, mean, method))
    assert method_copy.step()
    assert mean_copy.layout == model_copy.layout != before
    assert model.layout == mean.layout == before


@pytest.mark.parametrize("kernel", [(), (2, 3)], ids=["matrix", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_block_norms(dtype, kernel):
    values = torch.randn(5, 4, 3, *kernel, dtype=dtype)
    values[1] = 0
    flat = values.to(torch.float64).flatten(1)
    expected = {"l2": flat.square().sum(1).sqrt(), "max": flat.abs().amax(1), "mean": flat.abs().mean(1)}
    for norm, wanted in expected.items():
        got = bs.sparsity.block_norms(values, norm)
        assert got.dtype == (dtype if dtype != torch.bfloat16 else torch.float32)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-6)
    values.requires_grad_()
    bs.sparsity.block_norms(values).sum().backward()  # the group lasso
    assert values.grad[1].eq(0).all()
    torch.testing.assert_close(values.grad[0].double().norm(), torch.ones((), dtype=torch.float64), rtol=0.01, atol=0)
    for given in (torch.ones(3, 2), [1.0]):
        with pytest.raises(bs.BlockSparseError, match="values: expected blocks"):
            bs.sparsity.block_norms(given)
    with pytest.raises(bs.BlockSparseError, match="norm: expected one of l2, mean, max, got 'l1'"):
        bs.sparsity.block_norms(values, "l1")


class Odd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for w in self.param_groups[0]["params"]:
            self.state[w]["rows"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"module": nn.Linear(2, 2)}, "module: expected one with a block-sparse weight, got Linear"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "optimizer: expected an optimizer with "),
        ({"optimizer": "sgd"}, "optimizer: expected a torch.optim.Optimizer, got str"),
        ({"new": torch.ones(2, 1, 1)}, r"new: expected a tensor \[1, 1, 1\], got \[2, 1, 1\]"),
        ({"new": [[[1.0]]]}, r"new: expected a tensor \[1, 1, 1\], got list"),
        ({"new": torch.ones(1, 1, 1, dtype=torch.complex64)}, "new: expected real numbers with data, got torch.comp"),
        ({"new": torch.ones(1, 1, 1, device="meta")}, "new: expected real numbers with data, got .* on meta"),
        ({"new": lambda positions: torch.ones(3, 1, 1)}, r"what the function `new` returns: expected a tensor \[1, "),
        ({"on_layout_change": 3}, "on_layout_change: expected None or a function"),
        ({"drop": [9]}, "drop: expected"),
        ({"rows": [0], "cols": [1]}, "rows and cols: expected blocks that the layout does not have"),
        ({"rows": [0, 1], "cols": [2, 2]}, None),
    ],
)
def test_bad_arguments_change_nothing(change, message):
    layer = bs.nn.Linear(3, 2, layout=bs.BlockLayout([[1, 1, 0], [0, 1, 0]], block_size=1))
    layout, values = layer.layout, layer.values.detach().clone()
    arguments = {"module": layer, "drop": [0], "rows": [0], "cols": [2]} | change
    if message is None:
        bs.sparsity.rewire(**arguments)
        assert layer.layout.nnz == 4
        return
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.sparsity.rewire(**arguments)
    assert layer.layout is layout
    assert torch.equal(layer.values, values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], torch.tensor([0])), "tensor: expected a tensor"),
        ((torch.ones(3), [0, 1]), "source: expected an int64 vector"),
        ((torch.ones(3), torch.tensor([0.5])), "source: expected an int64 vector"),
        ((torch.ones(3), torch.tensor([3])), "source: expected positions below 3 of blocks, or -1 for new ones, got 3"),
        ((torch.ones(3), torch.tensor([2**32 + 2])), "source: expected positions below 3"),
        ((torch.ones(3), torch.tensor([0, -1]), torch.ones(2)), r"new: expected a tensor \[1\]"),
    ],
)
def test_blocks_are_remapped_only_from_positions_that_exist(arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.sparsity.remap_blocks(*arguments)


@pytest.mark.full  # 2 GB
def test_blocks_are_remapped_from_positions_above_int32():
    blocks = torch.zeros(2**31 + 8, dtype=torch.int8)
    blocks[-1] = 7
    assert bs.sparsity.remap_blocks(blocks, torch.tensor([0, 2**31 + 7])).tolist() == [0, 7]


def test_a_state_that_cannot_follow_is_refused():
    layer = bs.nn.Linear(3, 2, layout=bs.BlockLayout([[1, 1, 0], [0, 1, 0]], block_size=1))
    optimizer = Odd(layer.parameters(), lr=0.1)
    trained(layer, torch.randn(4, 3), optimizer)
    with pytest.raises(bs.BlockSparseError, match=r"rows in the .*: expected the shape of module.values, .* got \[7\]"):
        bs.sparsity.rewire(layer, [0], [], [], optimizer)


# -- the parts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_mark_smallest(count):
    magnitudes = np.random.default_rng().integers(0, 6, 40).astype(float)
    chosen = mark_smallest(magnitudes, count)
    assert sorted(magnitudes[chosen]) == sorted(magnitudes)[:count]
    assert (chosen == mark_smallest(magnitudes, count)).all()


@pytest.mark.parametrize("count", [1, 4, 6, 8])
def test_mark_smallest_takes_nan_for_the_largest(count):
    scores = np.array([3, np.nan, 1, np.inf, 2, np.nan, np.nan, 0])
    chosen = np.flatnonzero(mark_smallest(scores, count))
    assert len(chosen) == count
    assert np.isnan(scores[chosen]).sum() == max(0, count - 5)


def test_unused_places_are_uniform():
    rng = np.random.default_rng(0)
    taken = np.array([1, 4, 5, 11])
    counts = np.zeros(12)
    for _ in range(4000):
        keys = draw_unused(taken, (3, 4), 3, rng)
        assert (np.diff(keys) > 0).all()
        counts[keys] += 1
    assert (counts[taken] == 0).all()
    # 3 of 8 each time: 1500 expected, standard deviation sqrt(4000 * 3/8 * 5/8) = 31; five of them.
    assert (abs(np.delete(counts, taken) - 1500) < 155).all()


def test_unused_places_in_some_lines():
    rng = np.random.default_rng(0)
    lines = np.array([0, 2]), np.array([1, 3])
    keys = draw_unused(np.array([1, 4]), (3, 4), 3, rng, lines)
    assert keys.tolist() == [3, 9, 11]
    keys = draw_unused(np.array([1, 4]), (3, 4), 10, rng, lines)
    assert len(np.unique(keys)) == 10


def test_unused_places_of_a_grid_too_large_to_list():
    taken = np.arange(0, 10**12, 10**7)
    keys = draw_unused(taken, (10**6, 10**6), 50_000, np.random.default_rng(0))
    assert len(np.unique(keys)) == 50_000
    assert not np.isin(keys, taken).any()


def test_places_in_rows_are_equally_likely():
    """The first row has 4 free places and gets 1 block; the second has 3 and gets 2."""
    rng, counts = np.random.default_rng(0), Counter()
    for _ in range(6000):
        counts[tuple(_draw_in_rows(np.array([1, 5, 6]), np.array([0, 1, 1]), (2, 5), np.arange(5), rng).tolist())] += 1
    assert set(counts) == {(first, *pair) for first in (0, 2, 3, 4) for pair in ((7, 8), (7, 9), (8, 9))}
    assert min(counts.values()) > 400  # of 500 expected


def test_rows_get_the_requested_number_of_places_outside_of_padding():
    rng = np.random.default_rng(0)
    for _ in range(100):
        grid = rows, columns = tuple(rng.integers(1, 9, 2).tolist())
        free = rng.random(grid) < rng.random()
        inner = np.flatnonzero(rng.random(columns) < 0.7)
        wanted = rng.integers(0, free.sum(1) + 1)
        drawn = _draw_in_rows(np.flatnonzero(~free), np.repeat(np.arange(rows), wanted), grid, inner, rng)
        mask = np.zeros(grid, dtype=bool)
        mask.flat[drawn] = True
        assert (np.diff(drawn) > 0).all()
        assert (mask.sum(1) == wanted).all()
        assert not (mask & ~free).any()
        fits = wanted <= free[:, inner].sum(1)
        assert (mask[:, inner].sum(1) == wanted)[fits].all()
