"""A gate per block: results, gradients, skipped blocks, pruning of gated blocks, refusals."""

import copy
import sys

import pytest
import torch

import blocksparse as bs
from blocksparse.matmul import BlocksparseMatMul
from blocksparse.ops import block_gate as gates
from linear_backends import BACKENDS, running
from op_cases import OPS

DEFAULT = [name for name in ("reference", "cpu-portable", "triton-small") if name in BACKENDS]
LAYOUT = bs.patterns.random((48, 80), block_size=16, density=0.6, seed=0)


def operands(name="linear", dtype=torch.float64, **options):
    gate = torch.randn(LAYOUT.nnz, dtype=dtype, **options)
    with torch.no_grad():
        gate[::3] = 0
    return *OPS[name].tensors(LAYOUT, n=5, dtype=dtype, **options), gate


def times(values, gate):
    return values * gate.reshape(-1, *[1] * (values.dim() - 1))


@pytest.mark.parametrize("name", OPS)
def test_is_the_product_with_scaled_blocks(name, any_backend):
    call = OPS[name].call
    x, values, bias, gate = operands(name, requires_grad=True)
    expected = call(x, times(values, gate), LAYOUT, bias, activation="silu")
    got = call(x, values, LAYOUT, bias, activation="silu", gate=gate)
    torch.testing.assert_close(got, expected)
    seed = torch.randn_like(got)
    inputs = (x, values, bias, gate)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, seed) for y in (got, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(call(x, values, LAYOUT, bias, activation="silu", gate=gate), expected)


@pytest.mark.parametrize("backend", DEFAULT)
def test_on_each_backend(backend):
    with running(backend):
        x, values, bias, gate = operands(dtype=torch.float32)
        weight = bs.to_dense(times(values, gate), LAYOUT)
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(bs.linear(x, values, LAYOUT, bias, gate=gate).double(), expected, atol=1e-4, rtol=0)
        gate.requires_grad_()
        y = bs.linear(x, values, LAYOUT, bias, gate=gate)
        torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=0)
        (grad,) = torch.autograd.grad(y.sum(), gate)
        dense = bs.from_dense(x.sum(0).expand(LAYOUT.shape).contiguous(), LAYOUT)
        torch.testing.assert_close(grad, (dense * values).sum((1, 2)), atol=1e-3, rtol=0)


def test_a_gate_of_one_block_with_any_stride():
    layout = bs.patterns.block_diagonal((16, 16), block_size=16)
    gate, x, values = torch.arange(8.0)[3:8:4][:1], torch.randn(5, 16), torch.randn(1, 16, 16)
    torch.testing.assert_close(bs.linear(x, values, layout, gate=gate), bs.linear(x, 3 * values, layout))


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_first_and_second_gradients(name, any_backend):
    call = OPS[name].call
    layout = bs.BlockLayout([[True, False, True], [False, True, True]], block_size=2)
    x, values, bias = OPS[name].tensors(layout, dtype=torch.float64, requires_grad=True)
    gate = torch.tensor([1.0, 0.0, -0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def run(x, values, bias, gate):
        return call(x, values, layout, bias, gate=gate)

    assert torch.autograd.gradcheck(run, (x, values, bias, gate))
    assert torch.autograd.gradgradcheck(run, (x, values, bias, gate), fast_mode=True)


def test_blocks_with_gate_0_are_skipped_in_inference(monkeypatch, any_backend):
    x, values, _, gate = operands()
    seen = []

    def watched(*arguments):
        seen.append(gates.apply_gate(*arguments))
        return seen[-1]

    # `bs.ops.linear` is the function, not the package.
    monkeypatch.setattr(sys.modules["blocksparse.ops.linear"], "apply_gate", watched)
    values[gate == 0] = torch.nan  # never read
    with torch.inference_mode():
        y = bs.linear(x, values, LAYOUT, gate=gate)
    assert y.isfinite().all()
    kept, layout = seen[-1]
    assert layout == LAYOUT.select(gate != 0)
    assert layout.nnz == len(kept) < LAYOUT.nnz
    assert torch.equal(y, bs.linear(x, times(values, gate)[gate != 0], layout)), "bit for bit"
    bs.linear(x, values, LAYOUT, gate=gate.clone())
    assert seen[-1][1] is layout, "an equal gate does not plan again"
    gate.mul_(2)
    bs.linear(x, values, LAYOUT, gate=gate)
    assert seen[-1][1] is layout, "nor do other scales of the same blocks"
    # Gradients of the inputs do not change this.
    x.requires_grad_()
    bs.linear(x, values, LAYOUT, gate=gate).sum().backward()
    assert x.grad.isfinite().all()
    assert seen[-1][1] is layout


def test_every_change_of_gates_and_values_counts(any_backend):
    x, values, _, gate = operands()
    values = torch.nn.Parameter(values)
    steps = [
        lambda: None,
        lambda: gate.data.mul_(2),
        lambda: gate.data.copy_(gate.roll(1)),
        lambda: gate.zero_(),
        lambda: gate.fill_(1),
        lambda: values.data.neg_(),
        lambda: gate.numpy().__setitem__(0, 0.0),
    ] + [lambda: gate.copy_(torch.randn_like(gate) * (torch.rand_like(gate) < 0.5)) for _ in range(20)]
    with torch.no_grad():
        for step in steps:
            step()
            expected = x @ bs.to_dense(times(values, gate), LAYOUT).T
            torch.testing.assert_close(bs.linear(x, values, LAYOUT, gate=gate), expected)
    assert len(LAYOUT.derived("gates", dict)) <= gates.MAX_CACHED_GATES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_autocast(dtype, any_backend):
    x, values, _, gate = operands(dtype=dtype)
    expected = bs.linear(x, times(values, gate), LAYOUT)
    bound = {"rtol": 0.02, "atol": 0.1}
    torch.testing.assert_close(bs.linear(x, values, LAYOUT, gate=gate), expected, **bound)
    with torch.autocast("cpu", torch.bfloat16):
        assert bs.linear(x.float(), values.float(), LAYOUT, gate=gate.float()).dtype == torch.bfloat16


def test_traced_graphs_hold_the_multiplication(any_backend):
    x, values, bias, gate = operands(dtype=torch.float32)
    expected = bs.linear(x, values, LAYOUT, bias, gate=gate)

    class Gated(torch.nn.Module):
        def forward(self, x, gate):
            return bs.linear(x, values, LAYOUT, bias, gate=gate)

    exported = torch.export.export(Gated(), (x, gate)).module()
    torch.testing.assert_close(exported(x, gate), expected)
    compiled = torch.compile(Gated(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, gate), expected)
    meta = bs.linear(x.to("meta"), values.to("meta"), LAYOUT, gate=gate.to("meta"))
    assert meta.shape == expected.shape


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_refuses(name, grad):
    call = OPS[name].call
    x, values, bias, gate = operands(name)
    values.requires_grad_(grad)
    poisoned = gate.clone()
    poisoned[2] = torch.nan
    wrong = {
        rf"gate: expected \[{LAYOUT.nnz}\] for BlockLayout.*, got \[3\]": gate[:3],
        rf"gate: expected \[{LAYOUT.nnz}\] for BlockLayout.*, got \[{LAYOUT.nnz}, 1\]": gate[:, None],
        "gate: expected the dtype of values, torch.float64, got torch.float32": gate.float(),
        "gate: expected the device of values, cpu, got meta": gate.to("meta"),
        "gate: expected a torch.Tensor, got list": [1.0] * LAYOUT.nnz,
        "gate: expected finite numbers, got nan for block 2": poisoned,
    }
    for message, given in wrong.items():
        with pytest.raises(bs.BlockSparseError, match=message):
            call(x, values, LAYOUT, bias, gate=given)
    with pytest.raises(bs.BlockSparseError, match="values: expected shape"):
        call(x, values[1:], LAYOUT, bias, gate=gate)


def test_select_refuses():
    for keep in ([True], torch.ones(LAYOUT.nnz), [[True] * LAYOUT.nnz], list(range(LAYOUT.nnz))):
        with pytest.raises(bs.BlockSparseError, match=rf"keep: expected bool \[{LAYOUT.nnz}\]"):
            LAYOUT.select(keep)
    assert LAYOUT.select([True] * LAYOUT.nnz) == LAYOUT
    assert LAYOUT.select(torch.zeros(LAYOUT.nnz, dtype=torch.bool)).nnz == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_the_interface_of_2017(axis, any_backend):
    bsmm = BlocksparseMatMul(LAYOUT.mask(), block_size=16, feature_axis=axis)
    w, gate = torch.randn(bsmm.w_shape, requires_grad=True), torch.randn(LAYOUT.nnz)
    gate[::2] = 0
    x = torch.randn(bsmm.i_shape(7))
    expected = bsmm(x, times(w, gate))
    torch.testing.assert_close(bsmm(x, w, gate=gate), expected)
    torch.testing.assert_close(bsmm(x, w.detach(), gate=gate), expected)


# -- pruning of gated blocks ------------------------------------------------------------------------------------------

MODULES = {
    "linear": (lambda: bs.nn.Linear(61, 37, density=0.6, block_size=8), (5, 61), bs.linear),
    "conv": (lambda: bs.nn.Conv2d(16, 24, 3, density=0.6, block_size=8), (2, 16, 5, 4), bs.conv2d),
}
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


def trained(layer, gate, x, function, optimizer, steps):
    """Train, and keep gates of 0 at 0, as if their blocks were gone."""
    closed = gate.detach() == 0
    for _ in range(steps):
        x = torch.cat([x, x.new_zeros(len(x), layer.layout.shape[1] - x.shape[1], *x.shape[2:])], 1)
        optimizer.zero_grad()
        function(x, layer.values, layer.layout, gate=gate).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            gate[closed] = 0


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("name", MODULES)
def test_pruning_gated_blocks_changes_nothing_else(name, make, any_backend):
    build, shape, function = MODULES[name]
    layer = build().double()
    x = torch.randn(shape, dtype=torch.float64)
    gate = torch.nn.Parameter(torch.randn(layer.layout.nnz, dtype=torch.float64))
    with torch.no_grad():
        gate[1::2] = 0
    optimizer = make([gate, *layer.parameters()])
    trained(layer, gate, x, function, optimizer, steps=2)
    other, other_gate = copy.deepcopy((layer, gate))
    other_optimizer = make([other_gate, *other.parameters()])
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    keep = gate.detach() != 0
    expected, values, seen = layer.layout.select(keep), layer.values, []
    source = bs.sparsity.prune_gated_blocks(layer, gate, optimizer, on_layout_change=lambda *given: seen.append(given))
    assert layer.values is values
    assert layer.layout == expected
    assert torch.equal(source, keep.nonzero().squeeze(1))
    assert torch.equal(seen[0][1], source)
    assert torch.equal(gate, other_gate[keep])
    for mine, theirs in ((layer.values, other.values), (gate, other_gate)):
        kept = {key: each for key, each in optimizer.state[mine].items() if each.shape == mine.shape}
        assert kept
        for key, each in kept.items():
            assert torch.equal(each, other_optimizer.state[theirs][key][keep]), key
    trained(layer, gate, x, function, optimizer, steps=3)
    trained(other, other_gate, x, function, other_optimizer, steps=3)
    torch.testing.assert_close(layer.values, other.values[keep])
    torch.testing.assert_close(gate, other_gate[keep])


def test_refused_pruning_changes_nothing():
    layer = bs.nn.Linear(8, 8, block_size=4)
    gate = torch.nn.Parameter(torch.tensor([1.0, 0.0, 2.0, 0.0]))
    alone = torch.optim.Adam([gate])
    before = layer.values.detach().clone()
    wrong = {
        "gate: expected .4. for BlockLayout.*, got .3.": (layer, gate.detach()[:3], None),
        "gate: expected a leaf": (layer, gate * 2, None),
        "gate: expected finite numbers, not all of them 0": (layer, torch.zeros(4), None),
        "gate: expected finite numbers, not all": (layer, torch.tensor([1.0, torch.nan, 0, 0]), None),
        "optimizer: expected an optimizer with the parameter module.values": (layer, gate, alone),
        "optimizer: expected a torch.optim.Optimizer, got str": (layer, gate, "adam"),
        "module: expected one with a block-sparse weight": (torch.nn.Linear(8, 8), gate, None),
    }
    for message, given in wrong.items():
        with pytest.raises(bs.BlockSparseError, match=message):
            bs.sparsity.prune_gated_blocks(*given)
    assert layer.layout.nnz == len(gate) == 4
    assert torch.equal(layer.values, before)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (bs.nn.Linear(61, 37, density=0.6, block_size=8, activation="relu"), (5, 61)),
        (bs.nn.Conv2d(16, 12, 3, padding="same", density=0.6, block_size=8), (2, 16, 5, 4)),
        (bs.nn.ConvTranspose1d(12, 16, 3, stride=2, density=0.6, block_size=8), (2, 12, 5)),
    ],
    ids=["linear", "conv", "transposed"],
)
def test_modules_accept_a_gate(layer, shape, any_backend):
    gate, x = torch.rand(layer.layout.nnz), torch.randn(shape)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.values.copy_(times(other.values, gate))
        torch.testing.assert_close(layer(x, gate=gate), other(x))
    torch.testing.assert_close(layer(x, gate=gate), other(x))
