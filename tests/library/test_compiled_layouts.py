"""Compiled modules whose layouts change: compiled once more, for any layout, and as right as the eager ones."""

import copy
import pickle

import pytest
import torch
import torch._dynamo

import blocksparse as bs

NETS = {
    "linear": (
        lambda: torch.nn.Sequential(
            bs.nn.Linear(32, 48, density=0.5, block_size=8),
            torch.nn.GELU(),
            bs.nn.Linear(48, 20, density=0.5, block_size=8),
        ),
        (5, 32),
    ),
    "conv": (lambda: bs.nn.Conv2d(32, 48, 3, density=0.5, block_size=8, activation="relu"), (2, 32, 6, 6)),
    "weight_norm": (lambda: bs.nn.WeightNorm(bs.nn.Linear(32, 16, density=0.5, block_size=8)), (5, 32)),
    "lstm": (lambda: bs.nn.LSTM(16, 24, density=0.5, block_size=8), (4, 2, 16)),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(force_parameter_static_shapes=True):
        yield
    torch._dynamo.reset()


def evolve(net, seed, density):
    for module in net.modules():
        if isinstance(module, bs.nn.module.BlockSparseModule):
            layout = bs.patterns.random(module.layout.shape, 8, density=density, seed=seed)
            module.set_layout(layout, 0.1 * torch.randn(layout.nnz, *module.values.shape[1:]))


def results(function, net, x):
    x = x.clone().requires_grad_()
    y = function(x)
    y = y if isinstance(y, torch.Tensor) else y[0]
    return y.detach(), *torch.autograd.grad(y.square().sum(), [x, *net.parameters()])


@pytest.mark.parametrize("layouts", [13, pytest.param(51, marks=pytest.mark.full)])
@pytest.mark.parametrize("densities", [(0.5, 0.5), (0.9, 0.2)], ids=["same nnz", "other nnz"])
@pytest.mark.parametrize("name", NETS)
def test_many_layouts_one_recompilation(name, densities, layouts):
    make, shape = NETS[name]
    net = make()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for step in range(layouts):
            x = torch.randn(shape)
            with torch._dynamo.config.patch(error_on_recompile=step >= 2):
                found = results(compiled, net, x)
            if step % 10 < 3:
                torch.testing.assert_close(found, results(net, net, x))
            evolve(net, step, densities[0] + (densities[1] - densities[0]) * step / (layouts - 1))


PARTS = {
    "crop": lambda layout, tokens: layout.crop(-(-tokens // 16) * 16, -(-tokens // 16) * 16),
    "slices": lambda layout, tokens: layout[: -(-tokens // 16), : -(-tokens // 16)],
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_layouts_within_a_compiled_function(name, fullgraph):
    layouts = [bs.patterns.sliding_window(256, window, block_size=16) for window in (64, 128)]

    def run(q, layout):
        return bs.nn.attention(q, q, q, PARTS[name](layout, q.shape[2]), causal=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=fullgraph)
    for layout, tokens in [(layouts[0], 128), (layouts[0], 200), (layouts[1], 200), (layouts[0], 128)]:
        q = torch.randn(1, 2, tokens, 8)
        torch.testing.assert_close(compiled(q, layout), run(q, layout))


@pytest.mark.parametrize("combine", [lambda layout, own: layout | own, lambda layout, own: layout[:, :6]])
def test_choices_cannot_be_combined_within_a_compiled_function(combine):
    own = bs.BlockLayout.from_indices([0], [5], (1, 6), (1, 16))

    def run(q, k):
        layouts = bs.nn.topk_blocks(q, k, None, 2, block_size=(1, 16))
        return bs.nn.attention(q, k, k, [combine(layout, own) for layout in layouts])

    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 90, 8)
    assert run(q, k).isfinite().all()
    for fullgraph in (False, True):
        with pytest.raises(Exception, match="combine or crop it outside"):
            torch.compile(run, backend="aot_eager", fullgraph=fullgraph)(q, k)


def test_a_graph_for_any_layout_notices_overwritten_buffers():
    net, x = bs.nn.Linear(32, 48, density=0.5, block_size=8), torch.randn(5, 32)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    compiled(x)
    evolve(net, 1, 0.5)
    compiled(x)
    before = net.col_indices.clone()
    net.col_indices.copy_(before)  # the same: as loading a state does
    torch.testing.assert_close(compiled(x), net(x))
    other = bs.patterns.random(net.layout.shape, 8, density=0.5, seed=2)
    net.crow_indices.copy_(other.crow_indices())
    net.col_indices.copy_(other.col_indices())
    with pytest.raises(bs.BlockSparseError, match="crow_indices and col_indices: expected those of"):
        compiled(x)


def test_copies_of_evolving_modules_have_layouts_of_their_own():
    net, x = bs.nn.Linear(32, 48, density=0.5, block_size=8), torch.randn(5, 32)
    torch.compile(net, backend="aot_eager", fullgraph=True)(x)
    evolve(net, 1, 0.5)
    copied = copy.deepcopy(net)
    compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))
    evolve(net, 2, 0.3)
    torch.testing.assert_close(compiled(x), copied(x))
    copied.load_state_dict(net.state_dict())
    torch.testing.assert_close(compiled(x), net(x))


def test_copies_are_checked_by_their_own_buffers():
    net, x = bs.nn.Linear(32, 48, density=0.5, block_size=8), torch.randn(5, 32)
    torch.compile(net, backend="eager", fullgraph=True)(x)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        torch.testing.assert_close(torch.compile(copied, backend="eager", fullgraph=True)(x), net(x))
        copied.col_indices.add_(1)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="col_indices: expected those of"):
            torch.compile(copied, backend="eager", fullgraph=True, dynamic=False)(x[:3])
    torch.testing.assert_close(torch.compile(net, backend="eager", fullgraph=True)(x), net(x))


@pytest.mark.parametrize("kind", [bs.nn.LSTM, bs.nn.MultiplicativeLSTM, bs.nn.SmallWorldLSTM])
def test_how_indices_get_to_a_device_is_not_traced(kind, monkeypatch):
    """PyTorch before 2.13 cannot trace it."""
    tag, found = bs.BlockLayout._tag, []

    def untraced(layout, *indices):
        assert not torch.compiler.is_dynamo_compiling()
        found.append(indices[0].device.type)
        return tag(layout, *indices)

    monkeypatch.setattr(bs.BlockLayout, "_tag", untraced)
    net = kind(16, 32, density=0.5, block_size=8).to("meta")
    y, _ = torch.compile(net, backend="eager", fullgraph=True)(torch.randn(2, 3, 16, device="meta"))
    assert y.shape == (2, 3, 32)
    assert "meta" in found


TRANSFORMED = {
    "linear": (lambda: bs.nn.Linear(32, 32, block_size=16, density=0.5), (5, 32)),
    "conv": (lambda: bs.nn.Conv2d(32, 32, 3, padding=1, block_size=16, density=0.5), (5, 32, 4, 4)),
    "gru": (lambda: bs.nn.GRU(16, 32, block_size=16, density=0.5), (4, 3, 16)),
    "lstm": (lambda: bs.nn.LSTM(16, 32, block_size=16, density=0.5), (4, 3, 16)),
}
BATCHED = [("linear", False), ("linear", True), ("conv", True), ("gru", False), ("lstm", False)]


@pytest.mark.parametrize(("name", "batched"), BATCHED)
def test_transforms_within_a_compiled_graph(name, batched):
    make, shape = TRANSFORMED[name]
    layer, x = make(), torch.randn(shape)

    def loss(v):
        y = layer(v[None] if batched else v)
        return (y[0] if isinstance(y, tuple) else y).square().mean()

    grad = torch.vmap(torch.func.grad(loss)) if batched else torch.func.grad(loss)
    torch._dynamo.reset()
    found = torch.compile(grad, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, grad(x), rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
