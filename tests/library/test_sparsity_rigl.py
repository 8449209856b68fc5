"""RigL: its schedule, its choice compared with the dense gradient, and its memory."""

import copy
import math
import pickle
import tracemalloc

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity.selection import norms_over
from blocksparse.sparsity.sparse_training.dense_gradient import (
    TILE,
    GradientWatch,
    LinearPass,
    gradient_norms,
    largest_norms,
)
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


ACTIVATIONS = [None, "relu", "gelu", "silu"]


def dense_gradient(layer, passes):
    """The gradient of the whole (padded) weight, by autograd."""
    layout = layer.layout
    weight = bs.to_dense(layer.values.detach(), layout).requires_grad_()
    act = {None: lambda y: y, "relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu}
    for x, target in passes:
        y = nn.functional.linear(x, weight[: layer.out_features, : layer.in_features], layer.bias.detach())
        (act[layer.activation](y) - target).square().sum().backward()
    return weight.grad


def block_norms(weight, block, norm):
    blocks = weight.reshape(weight.shape[0] // block[0], block[0], -1, block[1])
    return blocks.square().sum((1, 3)).sqrt() if norm == "l2" else blocks.abs().mean((1, 3))


@pytest.mark.parametrize("norm", ["l2", "mean"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("sizes", "block"), [((20, 30), 1), ((61, 45), 8), ((96, 128), 32), ((24, 40), (4, 8))], ids=str
)
def test_blocks_grow_by_the_dense_gradient(sizes, block, activation, norm):
    torch.manual_seed(0)
    layer = bs.nn.Linear(*sizes, density=0.5, block_size=block, activation=activation, dtype=torch.float64)
    layout, block_shape = layer.layout, layer.layout.block_shape
    optimizer = torch.optim.Adam(layer.parameters())
    method = bs.sparsity.RigL(layer, optimizer, end=10, every=2, alpha=1.0, norm=norm, keep_lines=False)
    passes = [(torch.randn(3, 2, sizes[0]).double(), torch.randn(3, 2, sizes[1]).double()) for _ in range(4)]

    def backward(passes):
        optimizer.zero_grad()
        for x, target in passes:
            (layer(x) - target).square().sum().backward()

    backward(passes[:1])
    assert not method.step()
    optimizer.step()
    backward(passes[1:])  # of three passes the gradients add up
    grads = block_norms(dense_gradient(layer, passes[1:]), block_shape, norm)
    before = layer.values.detach().clone()
    magnitudes = block_norms(bs.to_dense(before, layout), block_shape, norm)
    with torch.no_grad():
        layer(torch.randn(2, sizes[0]).double())  # an evaluation does not count
    bias = layer.bias.detach().clone()
    assert method.step()
    optimizer.step()
    assert torch.equal(layer.bias, bias), "no weight moves in that iteration"

    count = int((1 + math.cos(math.pi * 2 / 10)) / 2 * layout.nnz)
    mask = layout.mask()
    dropped = magnitudes.where(mask, math.inf).flatten().argsort()[:count]
    kept = mask.clone()
    kept.view(-1)[dropped] = False
    grown = grads.where(~kept, -math.inf).flatten().argsort(descending=True)[:count]
    expected = kept.clone()
    expected.view(-1)[grown] = True
    assert torch.equal(layer.layout.mask(), expected)
    assert layer.layout.nnz == layout.nnz
    # New ones are 0; those that stay have not changed.
    was = bs.to_dense(before, layout)
    stayed = (mask & expected).repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)
    assert torch.equal(bs.to_dense(layer.values.detach(), layer.layout), was * stayed)
    average = bs.to_dense(optimizer.state[layer.values]["exp_avg_sq"], layer.layout)
    new = (~mask & expected).repeat_interleave(block_shape[0], 0).repeat_interleave(block_shape[1], 1)
    real = torch.zeros_like(stayed)
    real[: sizes[1], : sizes[0]] = True
    mean = average[stayed & real].mean()
    torch.testing.assert_close(average[new & real], mean.expand_as(average[new & real]))
    assert not layer._forward_hooks, "hooks are there in one of several iterations"


CONVOLUTIONS = {
    "plain": (bs.nn.Conv2d, (6, 10, 3), {}, (7, 6)),
    "strided": (bs.nn.Conv2d, (8, 8, (3, 2)), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}, (8, 7)),
    "same": (bs.nn.Conv2d, (8, 8, 2), {"padding": "same", "activation": "silu"}, (5, 5)),
    "circular": (bs.nn.Conv2d, (8, 8, 3), {"padding": 1, "padding_mode": "circular", "activation": "relu"}, (5, 6)),
    "1-d": (bs.nn.Conv1d, (8, 12, 3), {"activation": "gelu"}, (9,)),
    "3-d": (bs.nn.Conv3d, (4, 8, 2), {"padding": 1}, (3, 4, 3)),
    "transposed": (bs.nn.ConvTranspose2d, (6, 10, 3), {"stride": 2, "padding": 1, "output_padding": 1}, (4, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_norms_of_convolutions_are_those_of_the_dense_gradient(name):
    kind, arguments, options, size = CONVOLUTIONS[name]
    torch.manual_seed(0)
    layer = kind(*arguments, density=0.5, block_size=(2, 4), dtype=torch.float64, **options)
    layout = layer.layout
    # The same weights in a layout of all blocks, whose values have the dense gradient.
    dense = kind(*arguments, density=None, block_size=(2, 4), dtype=torch.float64, **options)
    stored = torch.from_numpy(layout.row_of_block * layout.grid[1] + layout.col_of_block)
    with torch.no_grad():
        dense.values.zero_()[stored] = layer.values
        dense.bias.copy_(layer.bias)
    watch = GradientWatch(layer)
    for x in (torch.randn(3, arguments[0], *size), torch.randn(arguments[0], *size)):  # the other without a batch
        x = x.double()
        weights = torch.randn_like(layer(x))
        for one in (layer, dense):
            (one(x) * weights).sum().backward()
    tiles = list(gradient_norms(watch.passes, layout, layer.kernel_size, tile=1))
    assert [first for first, _ in tiles] == list(range(layout.grid[0])), "a row of blocks at a time"
    found = torch.cat([norms for _, norms in tiles])
    torch.testing.assert_close(found.flatten(), dense.values.grad.flatten(1).norm(dim=1))
    assert found.min() > 0


@pytest.mark.parametrize("norm", ["l2", "mean", "max"])
@pytest.mark.parametrize("block", [1, 8, (2, 8), (8, 1)])
def test_norms_of_a_layer_wider_than_a_tile(block, norm):
    torch.manual_seed(0)
    layout = bs.patterns.random((24, 1280), block, density=0.1, seed=0)
    passes = [LinearPass(torch.randn(3, 1280).double(), torch.randn(3, 24).double(), layout.shape) for _ in range(2)]
    found = torch.cat([norms for _, norms in gradient_norms(passes, layout, norm=norm, tile=1 << 13)])
    dense = sum(one.grad.T @ one.x for one in passes)
    height, width = layout.block_shape
    torch.testing.assert_close(found, norms_over(dense.view(-1, height, 1280 // width, width), norm, (1, 3)))


def test_convolutions_grow_where_their_gradient_is():
    torch.manual_seed(0)
    model = nn.Sequential(bs.nn.Conv2d(3, 16, 3, density=None), bs.nn.Conv2d(16, 16, 3, density=0.25, block_size=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = bs.sparsity.RigL(model, optimizer, end=10, every=2, alpha=1.0, skip="0", keep_lines=False)
    layouts = {model[1].layout}
    for _ in range(6):
        update(optimizer, model(torch.randn(2, 3, 8, 8)).square().mean(), method)
        layouts.add(model[1].layout)
    assert len(layouts) == 4
    assert {layout.nnz for layout in layouts} == {4}


def rigged(layer, *, gradient=False, alpha=0.6, every=1, calls=1, seed=0, keep_lines=True):
    """Return the layouts after each change, without a gradient or with one of a quarter of inputs and outputs."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    method = bs.sparsity.RigL(layer, optimizer, end=50, every=every, alpha=alpha, seed=seed, keep_lines=keep_lines)
    layouts = []
    for _ in range(calls):
        x = torch.randn(5, layer.in_features, dtype=layer.values.dtype)
        x[:, layer.in_features // 4 :] = 0
        y = layer(x)[:, : layer.out_features // 4]
        (y.sum() if gradient else 0 * y.sum()).backward()
        optimizer.step()
        method.step()
        layouts.append(layer.layout)
    return layouts


@pytest.mark.parametrize("tile", [TILE, 50], ids=["one tile", "many tiles"])
@pytest.mark.parametrize(
    ("sizes", "block", "density"), [((90, 60), 1, 0.1), ((120, 77), 4, 0.25), ((64, 200), (8, 2), 0.2)], ids=str
)
def test_without_a_gradient_blocks_grow_at_random(sizes, block, density, tile, monkeypatch):
    monkeypatch.setattr("blocksparse.sparsity.sparse_training.gradient_growth.TILE", tile)
    torch.manual_seed(1)
    layer = bs.nn.Linear(*sizes, density=density, block_size=block)
    start = layer.layout
    before = [degree.max() for degree in bs.topology.degrees(start)]
    twin = copy.deepcopy(layer)
    (layout,) = rigged(layer)
    assert layout != start
    for degree, most in zip(bs.topology.degrees(layout), before, strict=True):
        assert degree.min() > 0, "every row and column has a block"
        assert degree.max() < 2 * most, "equal gradients do not fill the first rows"
    assert rigged(copy.deepcopy(twin)) == [layout], "the same seed, the same blocks"
    assert rigged(copy.deepcopy(twin), seed=1) != [layout]


@pytest.mark.parametrize("n", [16, 18, 24, 40])
def test_no_line_gets_empty_with_few_blocks(n):
    torch.manual_seed(2)
    layer = bs.nn.Linear(64, 64, density=n / 256, block_size=4)
    layer.values.data[layer.layout.row_of_block < 3] *= 1e-4  # these rows would go first
    for layout in rigged(layer, gradient=True, alpha=1.0, calls=6):
        assert layout.nnz == n
        assert all(degree.min() > 0 for degree in bs.topology.degrees(layout))
    rigged(layer, gradient=True, alpha=1.0, calls=6, keep_lines=False)
    assert any(degree.min() == 0 for degree in bs.topology.degrees(layer.layout)), "the gradient is of some lines only"


def test_empty_lines_fill_again():
    mask = torch.zeros(12, 10, dtype=torch.bool)
    mask[:4, :5] = True
    layer = bs.nn.Linear(40, 48, layout=bs.BlockLayout(mask, block_size=4))
    rigged(layer, gradient=True, alpha=1.0, calls=4)
    assert all(degree.min() > 0 for degree in bs.topology.degrees(layer.layout))


def test_schedule():
    layer = bs.nn.Linear(8, 8, density=0.5, block_size=1)
    method = bs.sparsity.RigL(layer, torch.optim.SGD(layer.parameters(), lr=0.1), end=30, every=10, alpha=0.3)
    assert method.fraction(0) == pytest.approx(0.3)
    assert method.fraction(10) == pytest.approx(0.15 * 1.5)
    assert method.fraction(15) == pytest.approx(0.15)
    assert method.fraction(30) == pytest.approx(0)
    due = []
    for t in range(1, 51):
        layer(torch.randn(2, 8)).sum().backward()
        if method.step():
            due.append(t)
    assert due == [10, 20]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_under_autocast(activation):
    torch.manual_seed(0)
    model = nn.Sequential(*(bs.nn.Linear(32, 32, density=0.5, block_size=8, activation=activation) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = bs.sparsity.RigL(model, optimizer, end=10, every=1, alpha=1.0)
    layouts = [layer.layout for layer in model]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, 32)).float().square().sum()
    loss.backward()
    assert method.step()
    assert all(layer.layout != layout for layer, layout in zip(model, layouts, strict=True))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that records the size of the largest tensor."""

    most = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.most = max(self.most, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def test_the_dense_gradient_is_never_more_than_a_tile():
    features, tile = 2048, 1 << 16
    layout = bs.patterns.random((features, features), 8, density=0.01, seed=0)
    x, grad = torch.randn(4, features), torch.randn(4, features)
    seen_once = LinearPass(x, grad, layout.shape)
    tracemalloc.start()
    with Largest() as seen:
        keys, _ = largest_norms(gradient_norms([seen_once], layout, tile=tile), torch.empty(0).long().numpy(), 256, 655)
    assert seen.most == tile
    assert features * features == 64 * tile
    # Numpy's peak memory: less than the norms of all blocks, 256 x 256, with their places would take.
    assert tracemalloc.get_traced_memory()[1] < 256 * 256 * 16
    tracemalloc.stop()
    expected = block_norms(grad.T @ x, (8, 8), "l2").flatten().argsort(descending=True)[:655].sort().values
    assert keys.tolist() == expected.tolist()


def test_a_step_allocates_no_more_than_a_tile(monkeypatch):
    features, tile = 2048, 1 << 16
    monkeypatch.setattr("blocksparse.sparsity.sparse_training.gradient_growth.TILE", tile)
    layer = bs.nn.Linear(features, features, layout=bs.patterns.random((features, features), 8, 0.01, seed=0))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method = bs.sparsity.RigL(layer, optimizer, end=10, every=1)
    layer(torch.randn(4, features)).square().sum().backward()
    with Largest() as seen:
        method.step()
    assert seen.most <= tile


@pytest.mark.parametrize(
    "call",
    [
        (bs.nn.Linear, (8, 8), {}, (8,), {}),
        (bs.nn.Linear, (8, 8), {"activation": "gelu"}, (8,), {"gate": torch.arange(4.0).double()}),
        (bs.nn.Conv2d, (8, 8, (2, 3)), {"activation": "silu"}, (8, 4, 5), {"margins": ((1, 0), (1, 1))}),
        (bs.nn.ConvTranspose1d, (8, 8, 2, 2), {"activation": "gelu"}, (8, 5), {"output_size": (11,)}),
    ],
    ids=["input", "gate", "margins", "output_size"],
)
def test_keyword_arguments_of_a_call_are_recorded(call):
    kind, arguments, options, size, keywords = call
    torch.manual_seed(0)
    layer = kind(*arguments, block_size=4, dtype=torch.float64, **options)
    watch = GradientWatch(layer)
    layer(input=torch.randn(3, *size).double(), **keywords).square().sum().backward()
    (_, norms), *_ = gradient_norms(watch.passes, layer.layout, getattr(layer, "kernel_size", ()))
    expected = layer.values.grad.flatten(1).norm(dim=1)
    gate = keywords.get("gate", torch.ones(4))
    torch.testing.assert_close(norms.flatten() * gate, expected)


def test_causal_convolutions_grow_blocks():
    layer = bs.nn.Causal2d(bs.nn.Conv2d(8, 8, (2, 3), block_size=2, density=0.5), "down")
    method = bs.sparsity.RigL(layer, torch.optim.SGD(layer.parameters(), lr=0.1), end=10, every=1)
    layer(torch.randn(2, 8, 4, 5)).square().sum().backward()
    assert method.step()


@pytest.mark.parametrize(
    ("method", "options"),
    [(bs.sparsity.RigL, {"end": 9}), (bs.sparsity.GradualBlockPruning, {"density": 0.2, "end": 9, "regrow": 0.5})],
    ids=["rigl", "gradual"],
)
def test_training_goes_on_after_a_failed_callback(method, options):
    def fail_once(*_):
        failed.append(1)
        if len(failed) == 1:
            raise KeyError("mine")

    failed = []
    layer = bs.nn.Linear(16, 16, density=0.5, block_size=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method = method(layer, optimizer, every=1, on_layout_change=fail_once, **options)
    with pytest.raises(KeyError):
        update(optimizer, layer(torch.randn(4, 16)).square().sum(), method)
    update(optimizer, layer(torch.randn(4, 16)).square().sum(), method)
    assert method.calls == 2


def test_a_step_without_a_gradient():
    layer = bs.nn.Linear(8, 8, density=0.5, block_size=1)
    method = bs.sparsity.RigL(layer, torch.optim.SGD(layer.parameters(), lr=0.1), end=10, every=1)
    with pytest.raises(bs.BlockSparseError, match="no gradient went through the layer since"):
        method.step()


def test_a_state_saved_between_both_steps_names_the_remedy():
    layer = bs.nn.Linear(8, 8, density=0.5, block_size=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method = bs.sparsity.RigL(layer, optimizer, end=10, every=1)
    layer(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    method.load_state_dict(method.state_dict())
    with pytest.raises(bs.BlockSparseError, match="After loading, run a whole iteration first"):
        method.step()
    update(optimizer, layer(torch.randn(4, 8)).square().sum(), method)
    assert method.calls == 2


def an_iteration(layer, optimizer):
    update(optimizer, layer(torch.randn(4, 8, generator=torch.Generator().manual_seed(0))).square().sum())


@pytest.mark.parametrize("has_closure", [False, True])
def test_no_weight_moves_when_the_layout_changes(has_closure):
    torch.manual_seed(0)
    layer = bs.nn.Linear(8, 8, density=0.5, block_size=2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, weight_decay=0.1)
    method = bs.sparsity.RigL(layer, optimizer, end=10, every=2)

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.randn(4, 8)).square().mean()
        loss.backward()
        return loss

    for moves in (True, False, True, False):
        before = [parameter.detach().clone() for parameter in layer.parameters()]
        optimizer.step(closure) if has_closure else an_iteration(layer, optimizer)
        after = [parameter.detach().clone() for parameter in layer.parameters()]
        assert all(torch.equal(a, b) != moves for a, b in zip(before, after, strict=True))
        assert method.step() != moves


@pytest.mark.parametrize("gone", [math.inf, math.nan])
def test_overflows_change_no_layout(gone):
    layer = bs.nn.Linear(16, 16, density=0.5, block_size=2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method = bs.sparsity.RigL(layer, optimizer, end=10, every=1)
    before = layer.layout
    (layer(torch.randn(4, 16)) * gone).sum().backward()
    optimizer.step()
    method.step()
    assert layer.layout == before


def test_a_watched_layer_can_become_dense():
    model = nn.Sequential(bs.nn.Linear(16, 16, density=0.5, block_size=4), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = bs.sparsity.RigL(model, optimizer, end=20, every=2)
    update(optimizer, model(torch.ones(3, 16)).sum())
    method.step()  # the next one grows blocks
    bs.densify(model, inplace=True, optimizer=optimizer)
    assert model(torch.ones(3, 16)).isfinite().all()


def test_an_optimizer_without_steps_of_the_method_raises():
    layer = bs.nn.Linear(8, 8, density=0.5, block_size=2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method = bs.sparsity.RigL(layer, optimizer, end=10, every=1)
    an_iteration(layer, optimizer)
    with pytest.raises(bs.BlockSparseError, match=r"optimizer.step\(\) called again before RigL's step"):
        an_iteration(layer, optimizer)
    del method  # given up: the weights move again
    before = layer.bias.detach().clone()
    an_iteration(layer, optimizer)
    assert not torch.equal(layer.bias, before)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "saved"]
)
def test_copies_record_nothing(copied, monkeypatch):
    layer = bs.nn.Linear(8, 8, density=0.5, block_size=2)
    method = bs.sparsity.RigL(layer, torch.optim.SGD(layer.parameters(), lr=0.1), end=10, every=1)
    other = copied(layer)
    x = torch.randn(4, 8)
    y = other(x)
    assert torch.equal(y, layer.forward(x))
    passes, kind = [], f"{LinearPass.__module__}.{LinearPass.__name__}"
    monkeypatch.setattr(kind, lambda *given: passes.append(given) or LinearPass(*given))
    y.sum().backward()
    assert not passes, "the copy's inputs are kept"
    with pytest.raises(bs.BlockSparseError, match="no gradient went through "):
        method.step()
    layer(x).sum().backward()
    assert len(passes) == 1


@pytest.mark.parametrize("tile", [1, TILE])
def test_rows_grow_where_their_own_gradients_are_largest(tile, monkeypatch):
    torch.manual_seed(0)
    layout = bs.patterns.constant_fan_in((64, 96), 8, density=0.4)
    layer = bs.nn.Linear(96, 64, layout=layout, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())
    method = bs.sparsity.RigL(layer, optimizer, end=10, every=2, alpha=0.8, constant_fan_in=True)
    monkeypatch.setattr("blocksparse.sparsity.sparse_training.gradient_growth.TILE", tile)
    x, target = torch.randn(32, 96), torch.randn(32, 64)
    update(optimizer, (layer(x) - target).square().sum(), method)
    gradient = 2 * (layer(x) - target).detach().T @ x
    norms = block_norms(gradient, (8, 8), "l2")
    mask, sizes = layout.mask(), block_norms(bs.to_dense(layer.values.detach(), layout), (8, 8), "l2")
    dropped = sizes.where(mask, math.inf).flatten().argsort()[: int(method.fraction(2) * layout.nnz)]
    stays = mask.flatten().index_fill(0, dropped, False).view(mask.shape)
    expected = stays.clone()
    for row, missing in enumerate((mask.sum(1) - stays.sum(1)).tolist()):
        best = norms[row].masked_fill(stays[row], -1).topk(missing).indices
        expected[row, best] = True
    update(optimizer, (layer(x) - target).square().sum(), method)
    assert torch.equal(layer.layout.mask(), expected)
    assert layer.layout.mask().sum(1).unique().numel() == 1


@pytest.mark.parametrize("method", ["SET", "RigL", "SMET", "CHTs"])
def test_a_schedule_without_any_change_is_warned_of(method):
    layer = bs.nn.Linear(16, 16, density=0.5, block_size=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.warns(bs.SparsityWarning, match=rf"^{method} will never change .* in step 10 \(every=10\), and end=10"):
        getattr(bs.sparsity, method)(layer, optimizer, end=10, every=10)
