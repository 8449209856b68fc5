"""Recurrent modules: as torch.nn.LSTM where both exist; block-sparse as dense with zeros; padding, packing, states."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import blocksparse as bs
from blocksparse.nn.module import Weight

MODULES = {"lstm": bs.nn.LSTM, "mlstm": bs.nn.MultiplicativeLSTM, "smallworld": bs.nn.SmallWorldLSTM}
HIDDEN = 32


def close(a, b, bound=1e-6):
    assert a.shape == b.shape
    assert (a.double() - b.double()).norm() <= bound * max(float(b.double().norm()), 1e-30)


def results(module, x, hx, generator_seed=0):
    """Outputs and all gradients: of the input, the states, the parameters."""
    leaf = x.data.clone().requires_grad_() if isinstance(x, PackedSequence) else x.clone().requires_grad_()
    fed = PackedSequence(leaf, *x[1:]) if isinstance(x, PackedSequence) else leaf
    hx = None if hx is None else tuple(state.clone().requires_grad_() for state in hx)
    y, (h, c) = module(fed, hx)
    y = y.data if isinstance(y, PackedSequence) else y
    generator = torch.Generator().manual_seed(generator_seed)
    loss = sum((each * torch.randn(each.shape, generator=generator).to(each)).sum() for each in (y, h, c))
    wanted = [leaf, *(hx or ()), *module.parameters()]
    return [each.detach() for each in (y, h, c)], list(torch.autograd.grad(loss, wanted))


def states(module, batch):
    cells = module.num_layers * (2 if module.bidirectional else 1)
    return torch.randn(cells, batch, module.proj_size or module.hidden_size), torch.randn(
        cells, batch, module.hidden_size
    )


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("density", [None, 0.5])
@pytest.mark.parametrize("kind", [bs.nn.LSTM, bs.nn.GRU, bs.nn.MultiplicativeLSTM, bs.nn.SmallWorldLSTM])
def test_inputs_of_another_dtype_are_refused(kind, density, train):
    module = kind(4, 8, density=density, block_size=4).double()
    with torch.set_grad_enabled(train), pytest.raises(bs.BlockSparseError, match=r"expected the dtype of"):
        module(torch.randn(3, 2, 4))
    with torch.set_grad_enabled(train):
        assert module(torch.randn(3, 2, 4).double())[0].dtype == torch.float64


# -- as torch.nn.LSTM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "bias", "bidirectional", "proj_size"),
    list(itertools.product((1, 2), (True, False), (False, True), (0, 12))),
)
def test_dense_is_torchs(layers, bias, bidirectional, proj_size):
    torch.manual_seed(0)
    options = {"bias": bias, "bidirectional": bidirectional, "proj_size": proj_size}
    ours = bs.nn.LSTM(20, HIDDEN, layers, **options)
    theirs = nn.LSTM(20, HIDDEN, layers, **options, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(7, 5, 20)
    for hx in (None, states(ours, 5)):
        double = None if hx is None else tuple(state.double() for state in hx)
        got, expected = results(ours, x, hx), results(theirs, x.double(), double)
        for a, b in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
            close(a, b)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
            y, (h, c) = ours(x, hx)
        for a, b in zip((y, h, c), expected[0], strict=True):
            close(a, b)


@pytest.mark.parametrize("enforce_sorted", [True, False])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences(bidirectional, enforce_sorted):
    torch.manual_seed(0)
    ours = bs.nn.LSTM(20, HIDDEN, 2, bidirectional=bidirectional)
    theirs = nn.LSTM(20, HIDDEN, 2, bidirectional=bidirectional)
    theirs.load_state_dict(ours.state_dict())
    lengths = [6, 4, 4, 1] if enforce_sorted else [4, 1, 6, 4]
    packed = pack_padded_sequence(torch.randn(6, 4, 20), lengths, enforce_sorted=enforce_sorted)
    for hx in (None, states(ours, 4)):
        got, expected = results(ours, packed, hx), results(theirs, packed, hx)
        for a, b in zip(itertools.chain(*got), itertools.chain(*expected), strict=True):
            close(a, b)
        with torch.no_grad():
            y, _ = ours(packed, hx)
            assert torch.equal(pad_packed_sequence(y)[1], torch.tensor(lengths))
            close(y.data, expected[0][0])


def test_batch_first_and_no_batch():
    torch.manual_seed(0)
    ours, theirs = bs.nn.LSTM(20, HIDDEN, batch_first=True), nn.LSTM(20, HIDDEN, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    x, (h, c) = torch.randn(5, 7, 20), states(ours, 5)
    for given, hx in ((x, (h, c)), (x, None), (x[0], (h[:, 0], c[:, 0])), (x[0], None)):
        for training in (True, False):
            with torch.set_grad_enabled(training):
                (y, (h1, c1)), (y2, (h2, c2)) = ours(given, hx), theirs(given, hx)
            for a, b in ((y, y2), (h1, h2), (c1, c2)):
                close(a.detach(), b.detach())


def test_dropout_is_between_layers():
    torch.manual_seed(0)
    module = bs.nn.LSTM(20, HIDDEN, 2, dropout=1.0)
    x = torch.randn(3, 2, 20)
    upper = bs.nn.LSTM(HIDDEN, HIDDEN)
    upper.load_state_dict({k.replace("l1", "l0"): v for k, v in module.state_dict().items() if "l1" in k})
    close(module(x)[0].detach(), upper(torch.zeros(3, 2, HIDDEN))[0].detach())


# -- block-sparse as dense with zeros ------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("hidden", [HIDDEN, 27])
@pytest.mark.parametrize("cell", MODULES)
def test_block_sparse_is_dense_with_zeros(cell, hidden, layers, bidirectional):
    if cell == "smallworld" and hidden % 8:
        pytest.skip("refused, see below")
    torch.manual_seed(0)
    sparse = MODULES[cell](20, hidden, layers, bidirectional=bidirectional, density=0.5, block_size=8)
    dense = bs.densify(sparse)
    x, hx = torch.randn(7, 5, 20), states(sparse, 5)
    got, plain = results(sparse, x, hx), results(dense, x, hx)
    expected = results(dense.double(), x.double(), tuple(state.double() for state in hx))
    # Layer norm and 14 steps enlarge what is rounded: PyTorch's float32 of the same net says how much.
    for a, rounded, b in zip(*(each[0] + each[1][:3] for each in (got, plain, expected)), strict=True):
        close(a, b, max(2e-6, 2 * float((rounded.double() - b).norm() / b.norm())))


@pytest.mark.parametrize("options", [{"bias": False}, {"proj_size": 10}], ids=["no bias", "odd projection"])
def test_other_block_sparse_lstms_are_dense_with_zeros(options):
    torch.manual_seed(0)
    sparse = bs.nn.LSTM(20, 27, 2, density=0.5, block_size=8, **options)
    x, hx = torch.randn(7, 5, 20), states(sparse, 5)
    got, expected = results(sparse, x, hx), results(bs.densify(sparse), x, hx)
    for a, b in zip(got[0] + got[1][:3], expected[0] + expected[1][:3], strict=True):
        close(a, b, 2e-6)


@pytest.mark.parametrize("cell", ["lstm", "mlstm"])
def test_padding_stays_zero(cell):
    torch.manual_seed(0)
    module = MODULES[cell](20, 27, density=0.5, block_size=8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        module(torch.randn(3, 2, 20))[0].square().sum().backward()
        optimizer.step()
    used = torch.arange(4 * 32) % 32 < 27
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.shape[0] == 128 and name.startswith("bias"):
            assert not parameter[~used].any()
    for weight in module.children():
        dense = bs.to_dense(weight.values, weight.layout)
        assert not dense[~used[: len(dense)]].any()


@pytest.mark.parametrize("cell", MODULES)
def test_one_layout_for_all_weights_that_it_fits(cell):
    layout = bs.patterns.barabasi_albert(HIDDEN * 8, block_size=32, m=2, seed=0)
    module = MODULES[cell](20, HIDDEN * 8, 2, layout=layout)
    for name, parameter in module.named_parameters():
        sparse = name.endswith(".values")
        square = parameter.dim() == 2 and parameter.shape[1] == HIDDEN * 8
        assert sparse or not square, name
    weights = [weight for weight in module.children() if isinstance(weight, Weight)]
    assert {weight.layout.nnz for weight in weights} <= {layout.nnz, 4 * layout.nnz}
    # The pattern is that of each gate.
    for weight in weights:
        mask = weight.layout.mask()
        assert all(torch.equal(part, layout.mask()) for part in mask.split(layout.grid[0]))
    y, _ = module(torch.randn(3, 2, 20))
    y.sum().backward()


def test_layouts_of_inputs_and_projections():
    inputs = bs.patterns.random((64, 32), 8, density=0.5, seed=0)
    projection = bs.patterns.random((16, 64), 8, density=0.5, seed=0)
    recurrent = bs.patterns.random((256, 16), 8, density=0.5, seed=0)
    module = bs.nn.LSTM(32, 64, proj_size=16, layout=recurrent, input_layout=inputs, proj_layout=projection)
    assert module.weight_ih_l0.layout.shape == (256, 32)
    assert module.weight_hh_l0.layout == recurrent
    assert module.weight_hr_l0.layout == projection
    assert module(torch.randn(3, 2, 32))[0].shape == (3, 2, 16)


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("lstm", {"input_layout": bs.patterns.dense((32, 20), (8, 4))}),
        ("gru", {"input_layout": bs.patterns.dense((96, 20), (32, 4))}),
        ("mlstm", {"input_layout": bs.patterns.dense((32, 20), (8, 4))}),
        ("lstm", {"proj_size": 10, "proj_layout": bs.patterns.dense((12, 32), (4, 16))}),
    ],
    ids=["lstm", "gru", "mlstm", "projection"],
)
def test_layouts_of_inputs_and_projections_alone_pad_the_units(cell, options):
    kind = {"lstm": bs.nn.LSTM, "gru": bs.nn.GRU, "mlstm": bs.nn.MultiplicativeLSTM}[cell]
    torch.manual_seed(0)
    module = kind(20, 27, 2, **options)
    x = torch.randn(7, 5, 20)
    close(module(x)[0].detach(), bs.densify(module)(x)[0].detach(), 2e-6)


def test_layouts_that_fit_no_common_padding_are_refused():
    layout, inputs = bs.patterns.dense((40, 40), 8), bs.patterns.dense((64, 64), 32)
    with pytest.raises(bs.BlockSparseError, match="the layout of weight_hh_l0: expected shape"):
        bs.nn.LSTM(64, 40, layout=layout, input_layout=inputs)
    projection = bs.patterns.dense((16, 64), 8)
    with pytest.raises(bs.BlockSparseError, match="proj_layout: expected None without a projection"):
        bs.nn.LSTM(64, 64, proj_layout=projection)
    with pytest.raises(bs.BlockSparseError, match="density: expected None if a layout is given"):
        bs.nn.LSTM(64, 64, proj_size=16, density=0.5, proj_layout=projection)
    with pytest.raises(bs.BlockSparseError, match="layout: expected a BlockLayout, got list"):
        bs.nn.LSTM(64, 64, proj_size=16, proj_layout=[[1]])


# -- the other cells, written down once more -----------------------------------------------------------------------


def test_multiplicative_lstm_by_its_formulas():
    torch.manual_seed(0)
    module = bs.nn.MultiplicativeLSTM(20, HIDDEN).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("gain"):
                parameter.mul_(torch.rand_like(parameter) + 0.5)

    def normed(name):
        weight, gain = getattr(module, f"weight_{name}_l0"), getattr(module, f"gain_{name}_l0")
        return F.normalize(weight, dim=1) * gain[:, None]

    x, h, c = torch.randn(4, 3, 20).double(), torch.zeros(3, HIDDEN).double(), torch.zeros(3, HIDDEN).double()
    ys = []
    for step in x:
        m = (step @ normed("im").T) * (h @ normed("hm").T)
        i, f, g, o = (step @ normed("ih").T + m @ normed("mh").T + module.bias_l0).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        ys.append(h)
    y, (last, cell) = module(x)
    close(y.detach(), torch.stack(ys).detach(), 1e-12)
    close(last[0].detach(), h.detach(), 1e-12)
    close(cell[0].detach(), c.detach(), 1e-12)


@pytest.mark.parametrize(("depth", "stride"), [(2, 1), (4, 1), (4, 2), (2, HIDDEN // 2)])
def test_small_world_lstm_by_its_formulas(depth, stride):
    torch.manual_seed(0)
    module = bs.nn.SmallWorldLSTM(20, HIDDEN, depth=depth, stride=stride).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(("gain", "bias")):
                parameter.add_(torch.randn_like(parameter) / 3)

    def lin(x, name):
        y = x @ getattr(module, f"weight_{name}_l0").T
        gain, bias = getattr(module, f"gain_{name}_l0"), getattr(module, f"bias_{name}_l0")
        size = HIDDEN // stride if name.startswith("input") else HIDDEN
        parts = [F.layer_norm(part, (size,)) for part in y.split(size, 1)]
        return torch.cat(parts, 1) * gain + bias

    def reached(y, others):
        """Units 0, stride, 2 stride and so on have the numbers of y."""
        units = torch.full((len(y), HIDDEN), float(others), dtype=y.dtype)
        units[:, ::stride] = y
        return units

    x, h, c = torch.randn(4, 3, 20).double(), torch.zeros(3, HIDDEN).double(), torch.zeros(3, HIDDEN).double()
    ys = []
    for step in x:
        s = reached(lin(step, "input1"), 1) * lin(h, "step1")
        for k in range(2, depth + 1):
            s = lin(s, f"step{k}") + (reached(lin(step, "input2"), 0) if k == 2 else 0)
            s = s.relu()
        i, f, g, o = lin(s, "gates").chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        ys.append(h)
    y, (_, cell) = module(x)
    close(y.detach(), torch.stack(ys).detach(), 1e-12)
    close(cell[0].detach(), c.detach(), 1e-12)


# -- use -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", MODULES)
def test_inputs_from_a_table(cell):
    torch.manual_seed(0)
    module = MODULES[cell](20, HIDDEN, 2, density=0.5, block_size=8)
    table, numbers = torch.randn(10, 20), torch.randint(10, (7, 5))
    y, (h, c) = module(numbers, table=table)
    for a, b in zip((y, h, c), (lambda y, s: (y, *s))(*module(table[numbers])), strict=True):
        close(a.detach(), b.detach())
    packed = pack_sequence([numbers[:4, 0], numbers[:2, 1]])
    y, _ = module(packed, table=table)
    rows = PackedSequence(table[packed.data], *packed[1:])
    close(y.data.detach(), module(rows)[0].data.detach())


@pytest.mark.parametrize("cell", MODULES)
def test_a_state_in_float32_stays_so_under_autocast(cell):
    module, x = MODULES[cell](20, HIDDEN, density=0.5, block_size=8), torch.randn(7, 5, 20)
    with torch.autocast("cpu", torch.bfloat16):
        _, (h, c) = module(x)
        _, (_, c) = module(x, (h, c.float()))
    assert c.dtype == torch.float32


@pytest.mark.parametrize("cell", MODULES)
def test_meta_device_and_initial_size_of_weights(cell):
    module = MODULES[cell](20, HIDDEN * 4, density=0.25, block_size=8, device="meta")
    module.to_empty(device="cpu").reset_parameters()
    for name, weight in module.named_children():
        fan_in = weight.layout.crow_indices().diff() * 8
        assert weight.values.abs().max() <= fan_in.min() ** -0.5, name
    y, _ = module(torch.randn(20, 4, 20))
    assert torch.isfinite(y).all()
    assert 0.01 < y.std() < 1


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"density": 0.5, "block_size": 8}], ids=["dense", "sparse"])
def test_a_folded_multiplicative_lstm_has_its_weights_as_they_count(options):
    sizes: dict = {"num_layers": 2, "bidirectional": True, **options}
    normed = bs.nn.MultiplicativeLSTM(16, 24, **sizes)
    for name, parameter in normed.named_parameters():
        if "gain" in name:
            parameter.mul_(1.5)
    folded = bs.nn.fold(normed)
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(folded(x)[0], normed(x)[0])
    plain = bs.nn.MultiplicativeLSTM(16, 24, weight_norm=False, **sizes)
    plain.load_state_dict(folded.state_dict())
    assert torch.equal(plain(x)[0], folded(x)[0])
    assert any("gain" in name for name in normed.state_dict())


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights:UserWarning")  # PyTorch's own
@pytest.mark.parametrize("batch", [4, 300])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_graphs_of_densified_layers_need_no_ops_of_ours(kind, batch):
    dense = bs.densify(bs.sparsify(kind(16, 64), 0.5, 8, force=True)).requires_grad_(False)
    x = torch.randn(5, batch, 16)
    for dynamic in (None, ({1: torch.export.Dim("batch")},)):
        exported = torch.export.export(dense, (x,), dynamic_shapes=dynamic)
        assert not any("blocksparse" in str(node.target) for node in exported.graph.nodes)
        close(exported.module()(x)[0], dense(x)[0])
    x = torch.randn(5, 7, 16)
    close(exported.module()(x)[0], dense(x)[0])


@pytest.mark.parametrize("cell", MODULES)
def test_graphs_for_any_number_of_steps(cell):
    module = MODULES[cell](16, 24, density=0.5, block_size=8)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    steps = torch.export.Dim("steps", min=2, max=100)
    exported = torch.export.export(module, (torch.randn(5, 2, 16),), dynamic_shapes=({0: steps},)).module()
    for number in (6, 9):
        x = torch.randn(number, 2, 16, requires_grad=True)
        leaves = [x, next(module.parameters())]
        with torch._dynamo.config.patch(error_on_recompile=number == 9):
            y, (h, c) = compiled(x)
        expected, (h2, c2) = module(x)
        close(y.detach(), expected.detach())
        close(exported(x)[0].detach(), expected.detach())
        grads = torch.autograd.grad(y.square().sum() + h.sum() + c.cos().sum(), leaves)
        wanted = torch.autograd.grad(expected.square().sum() + h2.sum() + c2.cos().sum(), leaves)
        for a, b in zip(grads, wanted, strict=True):
            close(a, b, 2e-6)
