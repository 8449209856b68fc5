"""sparsify(model, density, data=...): what is fitted, in which bounds, and what it says of data that it cannot use."""

import io
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import blocksparse as bs
from blocksparse.sparsity.calibration import calibrate, fitting, passes
from blocksparse.sparsity.calibration.inputs import pack_inputs, products
from blocksparse.surgery.prunable import prunable

SMALL = {"block_size": 4, "force": True}


@pytest.fixture(autouse=True)
def seeded(one_thread):
    torch.manual_seed(0)


def correlated(*shape, rank=5):
    """Return the inputs of the last axis, or of image channels, in float64."""
    axis = 1 if len(shape) > 3 else -1
    mixing = torch.randn(rank, shape[axis], dtype=torch.float64)
    rest = list(shape)
    rest[axis] = rank
    x = torch.randn(rest, dtype=torch.float64)
    x = (x.movedim(axis, -1) @ mixing).movedim(-1, axis)
    return x + 0.1 * torch.randn_like(x)


def mlp():
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)).double()


class Last(nn.Module):
    """An LSTM with a linear layer behind it."""

    def __init__(self, **options):
        super().__init__()
        self.lstm, self.head = nn.LSTM(12, 16, batch_first=True, **options), nn.Linear(16, 8)

    def forward(self, x, state=None):
        return self.head(self.lstm(x, state)[0])


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(*sizes, 3, padding=1, bias=False) for sizes in ((4, 16), (16, 16)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return self.head(x.mean((2, 3)))


def trained_norms(x):
    """With statistics that are those of the data."""
    model = Norms().double()
    for norm in model.norms:
        norm.momentum = None
    model(x)
    return model.eval()


def lost(sparse, dense, x):
    with torch.no_grad():
        y = dense(x)
        return ((sparse(x) - y).square().sum() / (y - y.mean(0)).square().sum()).item()


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lambda x: mlp(), (300, 24)), (trained_norms, (60, 4, 6, 6)), (lambda x: Last().double(), (40, 10, 12))],
    ids=["mlp", "convolutions", "lstm"],
)
@pytest.mark.parametrize("density", [0.25, 0.5])
def test_data_lower_the_error(make, shape, density):
    x = correlated(*shape)
    model = make(x)
    without = [bs.sparsify(model, density, scope=scope, **SMALL) for scope in ("layer", "global")]
    made = bs.sparsify(model, density, data=x.split(20), **SMALL)
    assert lost(made, model, x) < 0.3 * min(lost(each, model, x) for each in without)
    stored = [module for module in made.modules() if hasattr(module, "values")]
    kept = sum(module.values.numel() for module in stored)
    assert kept == pytest.approx(density * sum(weight.blocks.size * weight.grid[0] * weight.grid[1]
                                               for weight in prunable(model, 4)), abs=144)  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("size", [0, 3], ids=["plain", "projected"])
@pytest.mark.parametrize("form", ["batch", "batch first", "one", "packed", "packed unsorted"])
@pytest.mark.parametrize("stateful", [False, True], ids=["", "stateful"])
@torch.no_grad()
def test_inputs_of_lstm_weights(form, size, reverse, stateful):
    lstm = nn.LSTM(5, 6, 2, bidirectional=True, proj_size=size, batch_first=form == "batch first").double()
    out, batch = size or 6, () if form == "one" else (3,)
    lengths = [4, 2, 1] if form == "packed" else [1, 4, 2]
    x = torch.randn((3, 4, 5) if form == "batch first" else (4, *batch, 5), dtype=torch.float64)
    x = pack_padded_sequence(x, lengths, enforce_sorted=form == "packed") if "packed" in form else x
    state = [torch.randn(4, *batch, each, dtype=torch.float64) for each in (out, 6)] if stateful else None
    args = (x, *([tuple(state)] if stateful else []))
    sequences, initial = pack_inputs(lstm, args)
    sizes = sequences.batch_sizes.tolist()
    y = lstm(sequences, initial)[0].data.chunk(2, 1)[reverse].split(sizes)
    first = initial[0][2 + reverse] if stateful else torch.zeros(sizes[0], out, dtype=torch.float64)
    suffix = "_l1_reverse" if reverse else "_l1"
    found = {p.weights[-1].parameter: p for p in products(lstm, prunable(lstm, 1))}
    rows = found[f"weight_hh{suffix}"].rows(args)
    assert rows == sum(sizes)
    inputs, states = found[f"weight_hh{suffix}"].inputs(args, torch.arange(rows)).split([2 * out, out], 1)
    for t, here in enumerate(states.split(sizes)):
        before = y[t + 1] if reverse and t + 1 < len(y) else y[t - 1] if t and not reverse else first[:0]
        expected = torch.cat([before, first[len(before) :]])[: sizes[t]]
        torch.testing.assert_close(here, expected)
    lower = nn.LSTM(5, 6, bidirectional=True, proj_size=size).double()
    lower.load_state_dict({key: lstm.state_dict()[key] for key in lower.state_dict()})
    torch.testing.assert_close(inputs, lower(sequences, initial and tuple(each[:2] for each in initial))[0].data)


@pytest.mark.parametrize("together", [True, False], ids=["self", "cross"])
@torch.no_grad()
def test_inputs_of_attention_weights(together):
    attention = nn.MultiheadAttention(12, 3, batch_first=True).double()
    x, other = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 4, 12, dtype=torch.float64)
    call = calibrate.Call((x, x, x) if together else (x, other, other))
    call.module, call.args, call.kwargs = attention, call, {"need_weights": False}
    into, out = products(attention, prunable(attention, 4))
    rows = torch.arange(into.rows(call))
    assert len(rows) == (10 if together else 18)
    expected = x.flatten(0, 1) if together else torch.cat([x.flatten(0, 1), other.flatten(0, 1)])
    assert torch.equal(into.inputs(call, rows), expected)
    assert out.rows(call) == 10
    y = out.inputs(call, torch.arange(10)) @ attention.out_proj.weight.T + attention.out_proj.bias
    torch.testing.assert_close(y.view(2, 5, 12), attention(*call.args)[0])


class Named(nn.Module):
    """Names the arguments of a layer in this order; `extra` are those besides x."""

    def __init__(self, layer, order, **extra):
        super().__init__()
        self.layer, self.order, self.extra = layer, order, extra

    def forward(self, x):
        return self.layer(**{name: self.extra.get(name, x) for name in self.order})[0]


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_keyword_arguments_may_come_in_any_order(kind):
    x = torch.randn(3, 6, 8)
    if kind == "lstm":
        layer, extra = nn.LSTM(8, 8, batch_first=True), {"hx": (torch.randn(1, 3, 8), torch.randn(1, 3, 8))}
        orders = [("input", "hx"), ("hx", "input")]
    else:
        layer = nn.MultiheadAttention(8, 2, batch_first=True)
        extra = {"key_padding_mask": torch.zeros(3, 6, dtype=torch.bool).index_fill(1, torch.tensor([5]), True)}
        orders = [("query", "key", "value", *extra), ("query", *extra, "key", "value")]
    fitted = [bs.sparsify(Named(layer, order, **extra), 0.5, data=[x], **SMALL) for order in orders]
    torch.testing.assert_close(fitted[0](x), fitted[1](x), rtol=0, atol=0)
    scores = [bs.sparsity.activation_scores(Named(layer, order, **extra), [x], 4) for order in orders]
    torch.testing.assert_close(dict(scores[0]), dict(scores[1]), rtol=0, atol=0)


class Cells(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(12, 16)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Layer(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(12, 16, batch_first=True, **options)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 3, 32, batch_first=True)

    def forward(self, x):
        return self.layer(x)


MORE = {
    "gru": lambda: Layer(nn.GRU),
    "rnn": lambda: Layer(nn.RNN, num_layers=2, nonlinearity="relu"),
    "lstm cell": lambda: Cells(nn.LSTMCell),
    "gru cell": lambda: Cells(nn.GRUCell),
    "rnn cell": lambda: Cells(nn.RNNCell),
    "transformer": Attention,
}


@pytest.mark.parametrize("kind", MORE)
def test_other_layers_are_fitted_too(kind):
    model, x = MORE[kind]().double().eval(), correlated(50, 6, 12)
    made = bs.sparsity.reconstruct(model, [x], 0.4, 4)
    without = bs.sparsify(model, 0.4, scope="layer", **SMALL)
    assert made.by_magnitude == bs.sparsity.activation_scores(model, [x], 4).by_magnitude == {}
    assert lost(made.model, model, x) < 0.6 * lost(without, model, x)


# -- batch norms --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_order(monkeypatch):
    """Let features stay in their order, so that channels can be compared one by one."""
    monkeypatch.setattr(sys.modules[bs.sparsify.__module__], "reorder_features", lambda model, *_: model)


@torch.no_grad()
def test_batch_norms_keep_their_outputs(in_order):
    x = correlated(60, 4, 6, 6)
    model = trained_norms(x)
    made = bs.sparsify(model, 0.6, data=[x], **SMALL)
    for norms in ((model, made),):
        outputs = []
        for each in norms:
            seen = []
            hook = each.norms[1].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
            each(x)
            hook.remove()
            outputs.append(seen[0].transpose(0, 1).flatten(1))
        torch.testing.assert_close(outputs[1].mean(1), outputs[0].mean(1), rtol=0, atol=1e-6)
        alive = outputs[1].std(1) > 0
        assert alive.sum() >= 4
        torch.testing.assert_close(outputs[1].std(1)[alive], outputs[0].std(1)[alive], rtol=1e-4, atol=0)
    assert not torch.allclose(made.norms[1].running_var, model.norms[1].running_var, rtol=0.01)


def test_batch_norms_before_pruned_layers_stay(in_order):
    x = correlated(60, 4, 6, 6)
    model = trained_norms(x)
    made = bs.sparsify(model, 0.5, skip=["convs", "head"][:1], data=[x[:5]], **SMALL)
    for mine, other in zip(model.norms, made.norms, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.buffers(), other.buffers(), strict=True))


@pytest.mark.parametrize("frozen", ["bias", "all"])
def test_a_bias_that_is_frozen_alone_stays(frozen):
    model, x = mlp(), correlated(60, 24)
    (model[0].bias if frozen == "bias" else model).requires_grad_(False)
    made = bs.sparsify(model, 0.5, data=[x], **SMALL)
    assert torch.equal(made[0].bias, model[0].bias) == (frozen == "bias")
    assert not torch.equal(made[2].bias, model[2].bias)


# -- bounds -------------------------------------------------------------------------------------------------------


def problem(rows=300, inputs=48, outputs=16, rank=6):
    weight = torch.randn(outputs, inputs, dtype=torch.float64)
    x = correlated(rows, inputs, rank=rank)
    return fitting.Problem(weight, x, x @ weight.T, (4, 4), 0.01)


def test_the_solver_for_many_inputs_gives_the_same_values(monkeypatch):
    exact, wide = problem(), None
    mask = torch.rand(4, 12) < 0.4
    expected = exact.values(mask)
    wide = fitting.Problem(exact.dense, exact.x, exact.y, exact.block, 0.01)
    monkeypatch.setattr(fitting, "MAX_INPUTS", 8)
    monkeypatch.setattr(wide, "_normal_equations", None)  # would form the matrix
    torch.testing.assert_close(wide.values(mask), expected, rtol=1e-5, atol=1e-7)
    # And blocks that lose little more than the best.
    chosen = wide.choose(12)
    assert chosen.sum() == 12
    error = wide.error(wide.values(chosen))
    magnitude = exact.dense.square().view(4, 4, 12, 4).sum((1, 3)).flatten().topk(12).indices
    largest = torch.zeros(48, dtype=torch.bool).index_fill(0, magnitude, True).view(4, 12)
    naive = wide.error(wide.values(largest))
    monkeypatch.undo()
    best = exact.error(exact.values(exact.choose(12)))
    assert error < 0.5 * naive
    assert error < 2 * best


def test_fewer_rows_than_inputs_are_not_fitted_exactly(monkeypatch):
    """Noise that the inputs do not explain would otherwise become weights."""
    weight, x, new = torch.randn(8, 96), torch.randn(64, 96), torch.randn(200, 96)
    y = x @ weight.T + 8 * torch.randn(64, 8)
    mask = torch.ones(2, 24, dtype=torch.bool)

    def error() -> float:
        fitted = fitting.Problem(weight, x, y, (4, 4), 0.01).values(mask)
        return float((new @ (fitted - weight).T).square().mean())

    held_out = error()
    monkeypatch.setattr(fitting, "FACTORS", (1.0,))
    assert held_out < 0.5 * error()


def test_the_cache_keeps_the_outputs_that_cost_most(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    monkeypatch.setattr(passes, "MAX_CACHED_BYTES", 10 * 8 * 4)
    cache = passes.OutputCache(model, ["0", "1"])
    with cache.used(["0", "1"]):
        for batch in range(3):
            cache.begin(batch)
            model(torch.randn(5, 4))
    assert set(cache.outputs) == {("0", 0, 0), ("1", 0, 0), ("1", 1, 0), ("1", 2, 0)}
    assert cache.bytes == 5 * 8 * 4 + 3 * 5 * 2 * 4


def test_cached_outputs_of_layers_change_nothing(monkeypatch):
    """Also where the model changes outputs in place, and calls a layer twice."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.twice, self.last = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            x = self.first(x).relu_()
            return self.last(self.twice(self.twice(x).relu_()).relu_())

    model, x = Model().double(), correlated(30, 4, 6, 6)
    states = []
    for inputs in (1, 10**9):
        monkeypatch.setattr(passes, "MIN_CACHED_INPUTS", inputs)
        states.append(bs.sparsify(model, 0.5, data=x.split(10), **SMALL).state_dict())
    assert all(torch.equal(each, states[1][name]) for name, each in states[0].items())
    assert not any("forward" in vars(module) for module in model.modules())


MEMORY = """
import resource, torch, blocksparse as bs
torch.set_num_threads(1)
conv, x = torch.nn.Conv2d(1024, 32, 3, padding=1), torch.randn(4, 1024, 8, 8)
bs.sparsify(torch.nn.Conv2d(64, 32, 3), 0.5, force=True, data=[torch.randn(4, 64, 8, 8)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = bs.sparsify(conv, 0.25, force=True, data=[x])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.full
def test_a_wide_convolution_needs_no_matrix_of_its_inputs():
    """That would be 9,216 x 9,216 in float64, 680 MB."""
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 250


def test_rows_are_a_bounded_sample(monkeypatch):
    layer = nn.Linear(64, 32)
    (product,) = products(layer, prunable(layer, 4))
    few, many = (passes.Passes._positions(product, rows) for rows in (7, 10**9))
    assert few.tolist() == list(range(7))
    assert 0.99 * passes.MAX_ROWS < len(many) <= passes.MAX_ROWS
    assert (many.diff() > 0).all()
    assert many[-1] < 10**9
    monkeypatch.setattr(passes, "MAX_BYTES", 4 * 64 * 100)
    assert 90 < len(passes.Passes._positions(product, 10**6)) <= 100


def test_batches_are_kept_up_to_a_bound(monkeypatch):
    taken = []

    def endless():
        while True:
            taken.append(torch.randn(200, 24, dtype=torch.float64))
            yield taken[-1]

    bs.sparsify(mlp(), 0.5, data=endless(), **SMALL)
    assert len(taken) == 6  # 1,024 samples
    monkeypatch.setattr(calibrate, "MAX_BYTES", 2 * 200 * 24 * 8)
    assert len(calibrate.collect_batches(endless())) == 2


def test_later_batches_are_skipped_after_enough_rows(monkeypatch):
    monkeypatch.setattr(passes, "MAX_ROWS", 50)
    model = mlp()
    found = {name: products(model[int(name)], prunable(model[int(name)], 4)) for name in "024"}
    seen = passes.Passes(model, list(correlated(200, 24).split(20)), found, {})
    assert len(seen.batches) == 3
    assert seen.reached["4"].rows == {"weight": [20, 20, 20]}


# -- the same again, and as it was --------------------------------------------------------------------------------


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, state):
    found = model.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_two_runs_give_the_same_bits():
    x = correlated(40, 10, 12)
    model = Last().double()
    state = state_of(model)
    first, second = (bs.sparsify(model, 0.3, data=x.split(8), **SMALL) for _ in range(2))
    assert same(first, state_of(second))
    assert same(model, state)


def test_in_place_with_an_optimizer():
    model, x = mlp(), correlated(60, 24)
    expected = bs.sparsify(model, 0.5, data=[x], **SMALL)
    optimizer = torch.optim.Adam(model.parameters())
    made = bs.sparsify(model, 0.5, data=[x], inplace=True, optimizer=optimizer, **SMALL)
    assert made is model
    assert same(model, state_of(expected))
    assert {id(p) for p in model.parameters()} == {id(p) for p in optimizer.param_groups[0]["params"]}


def test_an_optimizer_of_another_model_is_refused_before_anything_changes():
    model, x = mlp(), correlated(60, 24)
    state, optimizer = state_of(model), torch.optim.SGD(mlp().parameters(), 0.1)
    with pytest.raises(bs.BlockSparseError, match="optimizer"):
        bs.sparsify(model, 0.5, data=[x], inplace=True, optimizer=optimizer, **SMALL)
    assert same(model, state)


def test_a_compiled_model_is_observed():
    model, x = mlp(), correlated(60, 24)
    expected = bs.sparsify(model, 0.5, data=[x], **SMALL)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert torch.equal(bs.sparsify(compiled, 0.5, data=[x], **SMALL)._orig_mod(x), expected(x))


def test_given_layouts_are_used():
    layer, x = nn.Linear(24, 16).double(), correlated(60, 24)
    layout = bs.patterns.random((16, 24), block_size=4, density=0.5, seed=0)
    made = bs.sparsify(layer, layouts={"weight": layout}, data=[x], force=True)
    plain = bs.sparsify(layer, layouts={"weight": layout}, force=True)
    assert made.layout == layout
    assert lost(made, layer, x) < 0.5 * lost(plain, layer, x)


class Odd(nn.Module):
    """One layer is used twice, one never."""

    def __init__(self):
        super().__init__()
        self.twice, self.never = nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.twice(self.twice(x).relu())


def test_a_layer_used_twice_and_one_that_is_not_reached():
    model, x = Odd().double(), correlated(100, 24)
    with pytest.warns(bs.SparsityWarning, match="do not reach never.weight"):
        made = bs.sparsify(model, 0.5, data=x.split(50), **SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        without = bs.sparsify(model, 0.5, scope="layer", **SMALL)
    assert made.never.layout.nnz == 6
    assert lost(made, model, x) < 0.6 * lost(without, model, x)


def test_fused_encoder_layers_are_seen_through():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval().requires_grad_(False)
    made = bs.sparsity.reconstruct(layer, [torch.randn(8, 5, 16)], 0.5, 4, skip="self_attn")
    assert list(made.errors) == ["linear1.weight", "linear2.weight"]


# -- progress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terminal", "after"), [(True, 0), (True, 60), (False, 0)], ids=["slow", "fast", "no terminal"]
)
def test_progress_is_shown_on_terminals_when_it_takes_long(monkeypatch, terminal, after):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(calibrate, "PROGRESS_DELAY", after)
    bs.sparsify(mlp(), 0.5, data=[correlated(60, 24)], **SMALL)
    shown = terminal and not after
    assert ("layers fitted to the data: 3/3" in stream.getvalue()) == shown
    assert stream.getvalue().endswith("\n") == shown


class Masked(nn.Module):
    """Takes a mask that may be left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))

    def forward(self, x, mask=None):
        return self.layers(x if mask is None else x * mask.view(-1, 1))


@pytest.mark.parametrize("call", [bs.sparsify, bs.compress])
def test_labels_that_fill_an_optional_argument_are_named(call):
    x, labels = torch.randn(64, 16), torch.randint(4, (64,))
    options = {"density": 0.3, **({"steps": 2} if call is bs.compress else {"force": True})}
    pairs = list(zip(x.split(8), labels.split(8), strict=True))
    with pytest.warns(bs.SparsityWarning, match="with one number per sample, is the model's argument 'mask'"):
        call(Masked(), data=pairs, block_size=4, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one number per sample")
        call(Masked(), data=list(x.split(8)), block_size=4, **options)
        call(Masked(), data=[{"x": part, "mask": torch.ones(8)} for part in x.split(8)], block_size=4, **options)
