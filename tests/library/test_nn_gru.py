"""GRUs, plain recurrent layers and cells: as torch.nn's, dense and block-sparse, in all forms of their inputs."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import blocksparse as bs
from blocksparse.nn.module import Weight


@pytest.fixture(autouse=True)
def backend():
    with bs.use_backend("cpu" if bs.backends()["cpu"] else "reference"):
        yield


LAYERS = {
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
CELLS = {
    "gru": (nn.GRUCell, {}),
    "tanh": (nn.RNNCell, {}),
    "relu": (nn.RNNCell, {"nonlinearity": "relu"}),
    "lstm": (nn.LSTMCell, {}),
}


def tensors(found):
    if isinstance(found, PackedSequence):
        return [found.data]
    return [found] if isinstance(found, torch.Tensor) else [tensor for each in found for tensor in tensors(each)]


def agree(ours, theirs, *args):
    """Outputs and the gradients of everything: the parameters under the dense names, the arguments."""
    made = []
    for module in (ours, theirs):
        leaves = [each.data.detach().clone().requires_grad_() for each in args]
        given = [PackedSequence(leaf, *each[1:]) if isinstance(each, PackedSequence) else leaf
                 for leaf, each in zip(leaves, args, strict=True)]  # fmt: skip
        outputs = tensors(module(*given))
        generator = torch.Generator().manual_seed(0)
        loss = sum((y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum() for y in outputs)
        names = [name for name, _ in module.named_parameters()]
        grads = torch.autograd.grad(loss, [*leaves, *module.parameters()])
        made.append((outputs, grads[: len(leaves)], dict(zip(names, grads[len(leaves) :], strict=True))))
    torch.testing.assert_close(made[0][:2], made[1][:2], rtol=1e-9, atol=1e-10)
    for name, grad in made[1][2].items():
        found = made[0][2].get(name)
        if found is not None and found.shape == grad.shape:
            torch.testing.assert_close(found, grad, rtol=1e-9, atol=1e-10)
            continue
        # Of the stored blocks: those of the dense gradient, whose padding is 0.
        found, weight = made[0][2][f"{name}.values"], getattr(ours, name)
        out, in_ = ours.sizes[name]
        dense = bs.to_dense(found, weight.layout)[out.used(weight.layout.shape[0])][:, : in_.real]
        mask = bs.to_dense(torch.ones_like(found), weight.layout)[out.used(weight.layout.shape[0])][:, : in_.real]
        torch.testing.assert_close(dense, grad * mask, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("layers", "bias", "bidirectional"), list(itertools.product((1, 2), (True, False), (False, True)))
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_torchs(name, layers, bias, bidirectional, sparse):
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    options = options | {"bias": bias, "bidirectional": bidirectional, "dtype": torch.float64}
    theirs = kind(10, 8, layers, **options)
    if sparse:
        ours = bs.sparsify(theirs, 0.5, (4, 2), force=True)
        theirs = bs.densify(ours)
        assert type(theirs) is kind
    else:
        ours = getattr(bs.nn, kind.__name__)(10, 8, layers, **options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
    h = torch.randn(layers * (2 if bidirectional else 1), 3, 8, dtype=torch.float64)
    x = torch.randn(6, 3, 10, dtype=torch.float64)
    agree(ours, theirs, x)
    agree(ours, theirs, x, h)
    agree(ours, theirs, x[:, 0], h[:, 0])
    for lengths, ordered in (([6, 4, 1], True), ([4, 6, 1], False)):
        agree(ours, theirs, pack_padded_sequence(x, lengths, enforce_sorted=ordered), h)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_inference_in_one_call_returns_what_training_returns(name, bias, dtype, rtol):
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    options = options | {"bias": bias, "bidirectional": True, "density": 0.4, "block_size": 8, "dtype": dtype}
    layer = getattr(bs.nn, kind.__name__)(24, 44, 2, **options)  # 44 units are padded to 48
    x, h = torch.randn(7, 3, 24, dtype=dtype), torch.randn(4, 3, 44, dtype=dtype)
    table, rows = torch.randn(5, 24, dtype=dtype), torch.randint(5, (7, 3))
    packed = pack_padded_sequence(x, [4, 7, 1], enforce_sorted=False)
    for args, more in (((x,), {}), ((x, h), {}), ((packed, h), {}), ((rows,), {"table": table}), ((x[:1], h), {})):
        expected = tensors(layer(*args, **more))
        with torch.no_grad():
            found = tensors(layer(*args, **more))
            for before, after in zip(found, tensors(layer(*args, **more)), strict=True):
                assert torch.equal(before, after)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=rtol, atol=rtol)


# 10 units and 7 inputs are no multiples of the block.
@pytest.mark.parametrize("name", LAYERS)
def test_padded_layers_and_batches_first(name):
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    dense = kind(7, 10, 2, batch_first=True, bidirectional=True, **options, dtype=torch.float64)
    sparse = bs.sparsify(dense, {"weight_hh_l0": 0.5, "weight_ih_l1": 0.4}, (4, 8), force=True)
    assert isinstance(sparse.weight_hh_l0, Weight)
    assert isinstance(sparse.weight_ih_l0, nn.Parameter)
    x, theirs = torch.randn(3, 5, 7, dtype=torch.float64), bs.densify(sparse)
    torch.testing.assert_close(sparse(x), theirs(x), rtol=1e-9, atol=1e-10)
    more = bs.sparsify(theirs, 0.5, (4, 8), force=True)
    torch.testing.assert_close(more(x), bs.densify(more)(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_torchs(name, bias):
    torch.manual_seed(0)
    kind, options = CELLS[name]
    dense = kind(7, 10, bias, **options, dtype=torch.float64)
    ours = bs.sparsify(dense, 0.5, 4, force=True)
    theirs = bs.densify(ours)
    assert type(theirs) is kind
    assert list(theirs.state_dict()) == list(dense.state_dict())
    x, h, c = torch.randn(3, 7), torch.randn(3, 10), torch.randn(3, 10)
    x, h, c = (each.double() for each in (x, h, c))
    for given, state, cell in ((x, h, c), (x[0], h[0], c[0])):
        hx = (state, cell) if name == "lstm" else state
        torch.testing.assert_close(ours(given, hx), theirs(given, hx), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(ours(given), theirs(given), rtol=1e-9, atol=1e-10)
    sum(tensors(ours(x, (h, c) if name == "lstm" else h)), start=torch.zeros(())).square().sum().backward()
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in ours.parameters())


@pytest.mark.parametrize("name", ["GRU", "RNN", "GRUCell", "RNNCell", "LSTMCell"])
def test_random_layouts_and_those_of_each_gate(name):
    torch.manual_seed(0)
    made = getattr(bs.nn, name)(8, 16, density=0.5, block_size=8)
    gates = {"GRU": 3, "RNN": 1, "LST": 4}[name[:3]]
    suffix = "" if "Cell" in name else "_l0"
    assert getattr(made, f"weight_hh{suffix}").layout.shape == (gates * 16, 16)
    layout = bs.patterns.random((16, 16), 8, density=0.5, seed=0)
    given = getattr(bs.nn, name)(8, 16, layout=layout)
    assert torch.equal(getattr(given, f"weight_hh{suffix}").layout.mask(), layout.mask().repeat(gates, 1))


OPTIONS = [{}, {"bias": False, "num_layers": 2}, {"bidirectional": True, "batch_first": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "layers", "directions"])
@pytest.mark.parametrize("kind", [bs.nn.GRU, bs.nn.RNN, partial(bs.nn.RNN, nonlinearity="relu")], ids=str)
def test_a_graph_for_any_number_of_steps_and_sequences(kind, options):
    torch.compiler.reset()
    module = kind(16, 24, density=0.5, block_size=8, **options)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    dims = {axis: torch.export.Dim(name, min=2, max=99) for axis, name in ((0, "first"), (1, "second"))}
    exported = torch.export.export(module, (torch.randn(5, 6, 16),), dynamic_shapes=(dims,))
    ops = [node for node in exported.graph.nodes if "blocksparse.scan" in str(node.target)]
    assert len(ops) == module.num_layers * module.directions
    for sizes in ((4, 3), (6, 5), (9, 7)):
        x = torch.randn(*sizes, 16, requires_grad=True)
        leaves = [x, *module.parameters()]
        with torch._dynamo.config.patch(error_on_recompile=sizes == (9, 7)):
            y, h = compiled(x)
        wanted_y, wanted_h = module(x)
        torch.testing.assert_close((y, h), (wanted_y, wanted_h))
        torch.testing.assert_close(exported.module()(x)[0], wanted_y)
        grads = torch.autograd.grad(y.square().sum() + h.cos().sum(), leaves)
        wanted = torch.autograd.grad(wanted_y.square().sum() + wanted_h.cos().sum(), leaves)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [bs.nn.GRU, bs.nn.RNN])
def test_all_steps_are_one_node_of_autograd(kind):
    layer = kind(16, 32, density=0.5, block_size=8)

    def nodes(steps):
        seen, waiting = set(), [layer(torch.randn(steps, 3, 16))[0].grad_fn]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [each for each, _ in node.next_functions]
        return len(seen)

    assert nodes(2) == nodes(20)


def test_repr_names_the_settings_that_are_not_the_defaults():
    assert repr(bs.nn.RNN(8, 16, nonlinearity="relu", dropout=0.5)) == "RNN(8, 16, nonlinearity='relu', dropout=0.5)"
    assert repr(bs.nn.RNNCell(8, 16, False, "relu")) == "RNNCell(8, 16, nonlinearity='relu', bias=False)"
    assert repr(bs.nn.GRUCell(8, 16)) == "GRUCell(8, 16)"
    assert repr(bs.nn.LSTM(8, 16, 2, bias=False, proj_size=4)) == "LSTM(8, 16, num_layers=2, bias=False, proj_size=4)"
    assert repr(bs.nn.MultiplicativeLSTM(8, 16, weight_norm=False)) == "MultiplicativeLSTM(8, 16, weight_norm=False)"
