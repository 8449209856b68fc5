"""bs.nn.Linear as a module: sizes, initial values, state dicts, copies, compilers, optimizers."""

import math
import re
from functools import partial

import pytest
import safetensors.torch
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import blocksparse as bs
from processes import run_script
from test_nn_conv import convolutions


def dense_twin(layer):
    """torch.nn.Linear of the same map; the activation is left out."""
    twin = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.values.dtype)
    weight = bs.to_dense(layer.values.detach(), layer.layout)
    with torch.no_grad():
        twin.weight.copy_(weight[: layer.out_features, : layer.in_features])
        if layer.bias is not None:
            twin.bias.copy_(layer.bias)
    return twin


def linear(in_features=48, out_features=64, density=0.5, block_size=16, **more):
    return bs.nn.Linear(in_features, out_features, density=density, block_size=block_size, **more)


# -- sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [16, (8, 32)], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (61, 96), (64, 83), (1, 1), (33, 97)])
def test_any_size_is_padded(in_features, out_features, block_size):
    layer = linear(in_features, out_features, density=None, block_size=block_size, dtype=torch.float64)
    for axis, features in enumerate((out_features, in_features)):
        assert 0 <= layer.layout.shape[axis] - features < layer.layout.block_shape[axis]
    x = torch.randn(2, 5, in_features, dtype=torch.float64, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    twin = dense_twin(layer)
    y, expected = layer(x), twin(again)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(x.grad, again.grad)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad)
    weight_grad = bs.to_dense(layer.values.grad, layer.layout)
    torch.testing.assert_close(weight_grad[:out_features, :in_features], twin.weight.grad)
    assert (weight_grad[out_features:] == 0).all(), "the padding gets no gradient"
    assert (weight_grad[:, in_features:] == 0).all(), "the padding gets no gradient"


def test_density_is_that_of_the_pattern():
    assert linear(640, 640, density=0.25).layout.nnz == 400
    assert linear(density=None).layout.density == 1


@pytest.mark.parametrize(
    ("in_features", "out_features", "density", "tolerance"),
    [(33, 33, 0.25, 0.2), (65, 70, 0.25, 0.02), (100, 300, 0.1, 0.01), (1000, 777, 0.06, 0.003), (65, 65, 1.0, 0)],
)
@pytest.mark.parametrize("kind", [bs.nn.Linear, partial(bs.nn.Conv1d, kernel_size=3)], ids=["linear", "conv"])
def test_density_is_that_of_real_features(kind, in_features, out_features, density, tolerance):
    found = []
    for seed in range(10):
        torch.manual_seed(seed)
        layer = kind(in_features, out_features, density=density)
        mask = bs.to_dense(torch.ones(layer.layout.values_shape), layer.layout)[:out_features, :in_features] > 0
        found.append(float(mask.float().mean()))
        if round(density * layer.layout.grid[0] * layer.layout.grid[1]) >= max(layer.layout.grid):
            assert mask.any(1).all(), "every output has inputs"
            assert mask.any(0).all(), "every input is used"
    assert max(abs(each - density) for each in found) <= tolerance
    assert max(found) - min(found) <= 0.1 * density, "whatever the seed"


@pytest.mark.parametrize("kind", [bs.nn.LSTM, bs.nn.GRU, bs.nn.RNN])
def test_density_is_that_of_real_features_of_each_gate(kind):
    for seed in range(5):
        torch.manual_seed(seed)
        layer = kind(70, 50, density=0.3, block_size=(8, 32))
        for name in ("weight_ih_l0", "weight_hh_l0"):
            weight = getattr(layer, name)
            out, in_ = weight.used
            mask = bs.to_dense(torch.ones(weight.layout.values_shape), weight.layout)[out][:, in_] > 0
            assert float(mask.float().mean()) == pytest.approx(0.3, rel=0.05)
            assert mask.any(0).all()
            rows = out.view(-1, 8).any(1)
            assert not bs.topology.degrees(weight.layout)[0][~rows].any(), "no block of padding alone"


@pytest.mark.parametrize("kind", [bs.nn.Linear, partial(bs.nn.Conv2d, kernel_size=3), bs.nn.LSTM])
def test_a_density_that_rounds_to_no_block_is_refused(kind):
    wanted = r"density: expected 0, or enough for one of the (1|4) blocks of \(32, 32\) in .*got 0.1"
    with pytest.raises(bs.BlockSparseError, match=wanted):
        kind(12, 8, density=0.1)
    assert not any(p.numel() for name, p in kind(12, 8, density=0).named_parameters() if name.endswith("values"))


@pytest.mark.parametrize(
    ("shape", "density", "remedy"),
    [
        ((20, 30), 0.25, "pass block_size=8, or density=1"),
        ((30, 11), 0.25, "pass block_size=8, or density=1"),
        ((9, 7), 0.05, "pass block_size=2, or density=1"),
        ((1, 1), 0.25, "pass density=1"),
    ],
)
def test_a_layer_smaller_than_its_block_is_told_a_block_that_fits(shape, density, remedy):
    with pytest.raises(bs.BlockSparseError, match=rf"density: expected .*: {remedy}, got {density}"):
        bs.nn.Linear(*shape, density=density)
    if found := re.search(r"block_size=(\d+)", remedy):
        assert bs.nn.Linear(*shape, density=density, block_size=int(found[1])).layout.nnz > 0


def test_patterns_follow_the_seed_of_torch():
    layouts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        layouts.append(linear(640, 640, density=0.25).layout)
    assert layouts[0] == layouts[1] != layouts[2]


def test_a_layout_of_ones_own():
    layout = bs.BlockLayout([[True, False], [False, False]], block_size=16)
    layer = bs.nn.Linear(32, 32, layout=layout)
    assert layer.layout is layout
    y = layer(torch.randn(3, 32))
    assert (y[:, 16:] == layer.bias[16:]).all()
    assert (layer.bias[16:] == 0).all(), "outputs without inputs start at 0"


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_activation(activation):
    layer = linear(activation=activation, dtype=torch.float64)
    x = torch.randn(5, 48, dtype=torch.float64)
    after = getattr(nn.functional, activation) if activation else lambda y: y
    expected = after(dense_twin(layer)(x))
    torch.testing.assert_close(layer(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected)


def test_extra_repr():
    assert repr(linear(47, 64, density=0.5, activation="relu", bias=False)) == (
        "Linear(in_features=47, out_features=64, block_size=(16, 16), nnz=6, density=0.5, bias=False, "
        "activation='relu')"
    )


# -- initial values ----------------------------------------------------------------------------------------------


def test_variance_follows_the_real_fan_in():
    # Rows of 1, 2, .. 8 blocks; the last block column has 4 real inputs of 16.
    block, rows, in_features = 16, 8, 8 * 16 - 12
    mask = torch.ones(rows, 8).tril().flip(1) > 0  # each row ends in the last column
    layout = bs.BlockLayout(mask, block).T.T
    layer = bs.nn.Linear(in_features, rows * block, layout=layout)
    draws = 40
    weights, biases = [], []
    for _ in range(draws):
        layer.reset_parameters()
        weights.append(bs.to_dense(layer.values.detach(), layout).double().reshape(rows, block, -1))
        biases.append(layer.bias.detach().double().reshape(rows, block))
    weights, biases = torch.stack(weights, 1), torch.stack(biases, 1)
    assert (weights[..., in_features:] == 0).all(), "the padding is 0"
    for row in range(rows):
        fan_in = (row + 1) * block - 12
        for drawn, n in ((weights[row], draws * block * fan_in), (biases[row], draws * block)):
            # u uniform within +-b: E u^2 = b^2 / 3 and Var u^2 = b^4 (1/5 - 1/9). Six standard errors of the mean
            # square: 32 comparisons of fresh draws then fail by chance once in 10^7 runs.
            bound = 1 / math.sqrt(fan_in)
            standard_error = bound**2 * math.sqrt((1 / 5 - 1 / 9) / n)
            assert abs(drawn.square().sum() / n - bound**2 / 3) < 6 * standard_error
            assert drawn.abs().max() <= bound * (1 + 1e-6)


def test_outputs_have_the_variance_of_torch():
    # Of unit inputs, torch.nn.Linear makes outputs of variance 1/3 (+ the bias): so do layers of any density.
    torch.manual_seed(0)
    x = torch.randn(4096, 1024)
    for density in (1.0, 0.1):
        y = linear(1024, 1024, density=density, bias=False)(x)
        # 4096 * 1024 outputs; the variance of a row's sum of squared weights, 1024 rows of >= 16 inputs, dominates:
        # its relative standard deviation is sqrt(0.8 / 16 / 1024) = 0.7 %, and five of them 3.5 %.
        assert y.var().item() == pytest.approx(1 / 3, rel=0.035)


# -- state dicts and copies --------------------------------------------------------------------------------------


def test_safetensors_load_model(tmp_path):
    source, target = nn.Sequential(linear(), linear(64, 48)), nn.Sequential(linear(), linear(64, 48))
    safetensors.torch.save_model(source, tmp_path / "model.safetensors")
    safetensors.torch.load_model(target, tmp_path / "model.safetensors")
    x = torch.randn(5, 48)
    assert torch.equal(target(x), source(x))


def test_a_state_dict_of_other_modules_or_of_the_bias_alone_changes_no_layout():
    model = nn.Sequential(linear(), nn.Linear(64, 3))
    layout, bias = model[0].layout, torch.randn(64)
    model.load_state_dict({"0.bias": bias, "1.bias": torch.zeros(3)}, strict=False)
    assert model[0].layout is layout
    assert torch.equal(model[0].bias, bias)


def other_layout(state, values):
    """Return a state with the same number of blocks at other positions, and values that do not fit."""
    return state | {"col_indices": torch.tensor([0, 2, 0, 1, 0, 1], dtype=torch.int32), "values": values}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: linear(48, 128).state_dict(), r"crow_indices: expected \[5\].*got \[9\]"),
        (lambda s: linear(96, 64).state_dict(), "cols: expected indices from 0 to 2"),
        (
            lambda s: linear(48 * 2, 64 * 2, block_size=32).state_dict(),
            "values: expected blocks of 16 x 16, .* got 32 x 32",
        ),
        (lambda s: s | {"values": s["values"][1:]}, "values"),
        (lambda s: s | {"bias": s["bias"][1:]}, "bias"),
        (lambda s: s | {"crow_indices": s["crow_indices"].flip(0)}, "crow_indices: expected row starts that ascend"),
        (lambda s: s | {"crow_indices": s["crow_indices"] * 2}, "crow_indices: expected row starts that ascend"),
        (lambda s: s | {"crow_indices": s["crow_indices"].sum()}, "crow_indices: expected a vector of ints"),
        (lambda s: s | {"crow_indices": s["crow_indices"].double()}, "crow_indices: expected a vector of ints"),
        (lambda s: s | {"col_indices": s["col_indices"].sum()}, "col_indices: expected a vector of ints"),
        (lambda s: s | {"col_indices": s["col_indices"].double()}, "col_indices: expected a vector of ints"),
        (lambda s: s | {"col_indices": s["col_indices"] - 5}, "cols: expected indices"),
        (lambda s: s | {"col_indices": s["col_indices"] * 0}, "expected each block once"),
        (lambda s: {k: v for k, v in s.items() if k != "col_indices"}, "only crow_indices and values"),
        (lambda s: {k: v for k, v in s.items() if k != "crow_indices"}, "only col_indices and values"),
        (lambda s: {"values": s["values"]}, "expected crow_indices and col_indices, .* got only values"),
        (
            lambda s: other_layout(s, values=s["values"]) | {"col_indices": torch.tensor([1, 0, 0, 2, 1, 2])},
            "col_indices: expected ascending columns in each row",
        ),
        (lambda s: {k: v for k, v in linear(density=0.25).state_dict().items() if k != "values"}, "values: expected"),
        (lambda s: s | {"crow_indices": [0, 2]}, "crow_indices: expected a dense tensor, got list"),
        (lambda s: s | {"col_indices": "here"}, "col_indices: expected a dense tensor, got str"),
        (lambda s: s | {"col_indices": s["col_indices"].to_sparse()}, "col_indices: expected a dense .*sparse_coo"),
        (lambda s: s | {"crow_indices": s["crow_indices"].to("meta")}, "crow_indices: expected a vector of ints"),
        (lambda s: s | {"col_indices": s["col_indices"] * math.nan}, "col_indices: expected a vector of ints"),
        (lambda s: s | {"col_indices": s["col_indices"] * 1j}, "col_indices: expected a vector of ints"),
        (lambda s: s | {"col_indices": s["col_indices"] == 0}, "col_indices: expected a vector of ints"),
        (lambda s: s | {"col_indices": torch.full((6,), 2**64 - 1, dtype=torch.uint64)}, "cols: expected indices"),
        (lambda s: s | {"crow_indices": torch.tensor([0, 2**63 - 1, -2, 6, 6])}, "crow_indices: expected row starts"),
        (lambda s: s | {"crow_indices": torch.tensor([0, 5, 3, 6, 6], dtype=torch.uint64)}, "expected row starts"),
        (lambda s: other_layout(s, values=[1.0]), "values: expected a dense tensor, got list"),
        (lambda s: other_layout(s, values=torch.zeros(())), r"values: expected \[6, 16, 16\]"),
        (lambda s: other_layout(s, values=torch.zeros(6, 16, 16).to_sparse()), "values: expected a dense tensor"),
        (lambda s: other_layout(s, values=torch.zeros(6, 16, 16) * 1j), "values: expected real numbers"),
        (lambda s: other_layout(s, values=torch.zeros(6, 16, 16, device="meta")), "values: .* on the meta device"),
    ],
)
def test_state_dicts_that_do_not_fit_say_so_and_change_nothing(change, message):
    # Two blocks in the first three rows, none in the last.
    layout = bs.BlockLayout([[True, True, False], [True, False, True], [False, True, True], [False] * 3], 16)
    layer = bs.nn.Linear(48, 64, layout=layout)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    changed = {
        name: tensor for name, tensor in change(layer.state_dict()).items() if name != "bias" or "bias" in message
    }
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(changed, strict=strict)
    assert layer.layout is layout
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("change", [lambda layer: layer, bs.quantize], ids=["float", "8 bits"])
def test_states_of_other_blocks_are_refused_as_such(change):
    state = change(bs.nn.Linear(16, 16, block_size=4)).state_dict()
    with pytest.raises(RuntimeError, match="values: expected blocks of 8 x 8, as the module has them, got 4 x 4"):
        change(bs.nn.Linear(16, 16, block_size=8)).load_state_dict(state)


# -- compilers, autocast, optimizers -----------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compile_whole_with_any_number_of_tokens(fresh_compiler):
    model = nn.Sequential(linear(47, 64, activation="gelu"), linear(64, 33))
    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=frames)
    for tokens in (2, 3, 50):
        x = torch.randn(tokens, 47)
        model.zero_grad()
        expected = model(x)
        expected.square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        y = compiled(x)
        y.square().sum().backward()
        torch.testing.assert_close(y, expected)
        for p, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, grad)
    assert frames.frame_count == 1, "one graph for every number of tokens"


def test_compiled_module_in_inference_mode(fresh_compiler):
    layer = linear(density=0.5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 48)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).sum().backward()


LOADS_AND_RUNS = """
import sys, torch
import blocksparse
for name in sys.argv[1:]:
    program = torch.export.load(f"{name}.pt2")
    x, expected = torch.load(f"{name}.pt")
    torch.testing.assert_close(program.module()(x), expected)
"""


def test_exported_programs_run_in_a_fresh_process(tmp_path):
    model = nn.Sequential(linear(47, 64, activation="relu"), linear(64, 33))
    models = {
        "linear": (model, (torch.randn(4, 47), torch.randn(9, 47)), ({0: torch.export.Dim("tokens", min=2)},)),
        "conv": (convolutions(), (torch.randn(2, 3, 8, 8),) * 2, None),
    }
    for name, (model, (example, x), shapes) in models.items():
        program = torch.export.export(model.eval(), (example,), dynamic_shapes=shapes)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        torch.save((x, model(x).detach()), tmp_path / f"{name}.pt")
    (tmp_path / "program.py").write_text(LOADS_AND_RUNS)
    run_script(1, tmp_path / "program.py", *models, folder=tmp_path)


# -- another pattern in place ------------------------------------------------------------------------------------


def test_a_loss_that_is_still_held_does_not_keep_another_number_of_blocks_from_training():
    layer = linear(32, 32, density=None, dtype=torch.float64)
    loss = layer(torch.randn(3, 32, dtype=torch.float64)).square().sum()
    loss.backward()
    layout = bs.BlockLayout([[True, False], [False, False]], block_size=16)
    layer.set_layout(layout, torch.randn(layout.values_shape, dtype=torch.float64))
    layer(torch.randn(3, 32, dtype=torch.float64)).square().sum().backward()
    assert layer.values.grad.shape == layout.values_shape
    assert layer.values.dtype == torch.float64
    assert loss.item() > 0


def test_set_layout_keeps_the_parameter():
    layer = linear(47, 64, density=0.5)
    parameter, x = layer.values, torch.randn(5, 47)
    layer(x).sum().backward()
    layout = bs.patterns.random((64, 48), 16, density=0.25, seed=1)
    values = torch.randn(layout.values_shape)
    layer.set_layout(layout, values)
    assert layer.values is parameter
    assert parameter.grad is None
    assert torch.equal(layer.col_indices, layout.col_indices())
    assert layer.used[1].sum() == 47, "the padding is where it was"
    weight = bs.to_dense(values, layout)[:, :47]
    torch.testing.assert_close(layer(x), x @ weight.T + layer.bias)


@pytest.mark.parametrize(
    ("layout", "values", "message"),
    [
        (bs.patterns.dense((16, 32), 16).mask(), torch.ones(2, 16, 16), "layout: expected a BlockLayout, got Tensor"),
        (bs.patterns.dense((64, 48), 8), torch.ones(48, 8, 8), r"layout: expected blocks of \(16, 16\)"),
        (bs.patterns.dense((64, 48), 16), torch.ones(2, 16, 16), r"values: expected \[12, 16, 16\]"),
        (bs.patterns.dense((64, 48), 16), torch.ones(12, 16, 16).double(), "got .*float64"),
        (bs.patterns.dense((64, 32), 16), torch.ones(8, 16, 16), r"layout: expected shape \(64, 48\) for"),
        (bs.patterns.dense((80, 48), 16), torch.ones(15, 16, 16), r"layout: expected shape \(64, 48\) for"),
    ],
)
def test_a_layout_that_does_not_fit_changes_nothing(layout, values, message):
    layer = linear()
    before = layer.layout
    with pytest.raises(bs.BlockSparseError, match=message):
        layer.set_layout(layout, values)
    assert layer.layout is before
