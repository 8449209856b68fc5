"""The gated pair of products: one contract for all backends, and the MLP made of it."""

import itertools

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.ops.gated_linear import gated_linear, reference
from linear_backends import BACKENDS, CPU, SLOW, assert_close, bound, cases, running

SHAPES = {
    "even": ((128, 96), 32, 0.5),
    "small blocks": ((40, 64), 8, 0.4),
    "odd blocks": ((48, 72), (16, 24), 0.5),
    "empty rows": ((256, 32), 16, 0.2),
    "nothing": ((64, 64), 32, 0.0),
    "all": ((64, 64), 32, 1.0),
}


def layouts_of(shape, block, density):
    return [bs.patterns.random(shape, block, density=density, seed=seed) for seed in (0, 1)]


def drawn(gate, up, tokens, dtype):
    sizes = (tokens, gate.shape[1]), gate.values_shape, up.values_shape, (gate.shape[0],), (gate.shape[0],)
    return [torch.randn(size, dtype=dtype) for size in sizes]


def in_float64(x, g, u, gb, ub, gate, up, activation):
    given = [None if tensor is None else tensor.double() for tensor in (x, g, u, gb, ub)]
    x, g, u, gb, ub = given
    return reference.gated_linear(x, g, gate, u, up, gb, ub, activation)


def products():
    """Interpreted, one shape for each way of cutting; the others are `full`."""
    interpreted = {"triton-tuned": "even", "triton-small": "odd blocks", "triton-pairs": "empty rows"}
    for case, shape in itertools.product(cases(), SHAPES):
        often = case.values[0] not in SLOW or interpreted[case.values[0]] == shape
        yield pytest.param(*case.values, shape, marks=case.marks if often else pytest.mark.full)


@pytest.mark.parametrize(("backend", "dtype", "shape"), list(products()))
def test_products(backend, dtype, shape):
    gate, up = layouts_of(*SHAPES[shape])
    with running(backend):
        for tokens, activation in ((1, "silu"), (70, "gelu")):
            x, g, u, gb, ub = drawn(gate, up, tokens, dtype)
            for gate_bias, up_bias in ((gb, ub), (None, None)):
                y = gated_linear(x, g, gate, u, up, gate_bias, up_bias, activation)
                expected = in_float64(x, g, u, gate_bias, up_bias, gate, up, activation)
                terms = in_float64(x.abs(), g.abs(), u.abs(), gb.abs(), ub.abs(), gate, up, None)
                assert y.dtype == dtype
                assert_close(y, expected, 3 * bound(backend, dtype), f"{tokens} tokens", terms / terms.numel() ** 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend):
    gate, up = layouts_of((64, 96), 16, 0.5)
    with running(backend):
        x, g, u, gb, ub = drawn(gate, up, 9, torch.float32)
        expected = gated_linear(x, g, gate, u, up, gb, ub)
        strided = [tensor.repeat_interleave(2, -1)[..., ::2] for tensor in (x, g, u, gb, ub)]
        x, g, u, gb, ub = strided
        torch.testing.assert_close(gated_linear(x, g, gate, u, up, gb, ub), expected)
        wide = x.unflatten(0, (3, 3)).transpose(0, 1)
        y = gated_linear(wide, g, gate, u, up, gb, ub)
        torch.testing.assert_close(y.transpose(0, 1).flatten(0, 1), expected)
        assert gated_linear(x[:0], g, gate, u, up).shape == (0, 64)


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.full), *CPU[-1:]])
def test_gradients(backend):
    gate, up = layouts_of((32, 48), 16, 0.5)
    with running(backend):
        tensors = [tensor.requires_grad_() for tensor in drawn(gate, up, 3, torch.float64)]
        call = lambda x, g, u, gb, ub: gated_linear(x, g, gate, u, up, gb, ub)  # noqa: E731
        assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


def test_what_does_not_fit():
    gate, up = layouts_of((32, 48), 16, 0.5)
    x, g, u, _, _ = drawn(gate, up, 3, torch.float32)
    for wrong, message in (
        (lambda: gated_linear(x[:, :40], g, gate, u, up), r"x: expected \[\.\.\., 48\]"),
        (lambda: gated_linear(x, g, gate, u, bs.patterns.dense((32, 48), 8)), "up_layout: expected one of the shape"),
        (lambda: gated_linear(x, g, gate, u[:1], up), "values: expected"),
        (lambda: gated_linear(x, g, gate, u.double(), up), "dtype of x"),
        (lambda: gated_linear(x, g, gate, u, up, activation="sigmoid"), "activation: expected"),
        (lambda: gated_linear(x, g, gate, u, "layout"), "layout: expected"),
        (lambda: gated_linear(x, g, gate, u, up, g), "bias: expected"),
    ):
        with pytest.raises(bs.BlockSparseError, match=message):
            wrong()


class Theirs(nn.Module):
    """The gated MLP of the library transformers."""

    def __init__(self, act, features=64, hidden=96):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(features, hidden, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(hidden, features, bias=False), act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Theirs):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Clamped(Theirs):
    def forward(self, x):
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(-5, 5))


class Dropped(Theirs):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Rolled(Theirs):
    def forward(self, x):
        return super().forward(x.roll(1, -2))


def with_child(mlp):
    mlp.dropout = nn.Dropout(0.5)
    return mlp


def without_outputs(mlp):
    nn.init.zeros_(mlp.down_proj.weight)
    return mlp


def hooked(mlp):
    mlp.register_forward_hook(lambda module, inputs, output: None)
    return mlp


def sparse(mlp):
    return bs.sparsify(mlp, 0.5, 16, force=True)


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.ReLU(), nn.Identity()], ids=lambda act: type(act).__name__)
def test_of_a_users_mlp(act, any_backend):
    mlp = sparse(Theirs(act))
    fused, x = bs.nn.GatedMLP.of(mlp), torch.randn(2, 5, 64)
    torch.testing.assert_close(fused(x), mlp(x))
    with torch.no_grad():
        torch.testing.assert_close(fused(x), mlp(x))
    assert fused.state_dict().keys() == mlp.state_dict().keys()
    fused(x).sum().backward()
    assert mlp.gate_proj.values.grad is not None


OTHERS = {
    "tanh": lambda: Theirs(nn.Tanh()),
    "gelu tanh": lambda: Theirs(nn.GELU("tanh")),
    "relu6": lambda: Theirs(nn.ReLU6()),
    "hardtanh": lambda: Theirs(nn.Hardtanh(-6, 6)),
    "parameters": lambda: Theirs(nn.PReLU()),
    "tuple": lambda: Theirs(lambda v: (v, v)),
    "swapped": lambda: Swapped(nn.SiLU()),
    "clamped": lambda: Clamped(nn.SiLU()),
    "dropped": lambda: Dropped(nn.SiLU()),
    "rolled": lambda: Rolled(nn.SiLU()),
    "child": lambda: with_child(Theirs(nn.SiLU())),
    "zeros": lambda: without_outputs(Theirs(nn.SiLU())),
    "hooked": lambda: hooked(Theirs(nn.SiLU())),
    "no mlp": lambda: nn.Linear(3, 3),
}


@pytest.mark.parametrize("mlp", OTHERS.values(), ids=OTHERS)
def test_others_are_refused(mlp, any_backend):
    mlp = mlp()
    with pytest.raises(bs.BlockSparseError, match="mlp: expected"):
        bs.nn.GatedMLP.of(sparse(mlp) if isinstance(mlp, Theirs) else mlp)


def test_refusals_say_what_came():
    with pytest.raises(bs.BlockSparseError, match="got gate_proj torch's Linear, up_proj torch's Linear"):
        bs.nn.GatedMLP.of(Theirs(nn.SiLU()))
    activated = sparse(Theirs(nn.SiLU()))
    activated.up_proj.activation = "relu"
    with pytest.raises(bs.BlockSparseError, match=r"got .*, up_proj blocksparse's Linear with relu, down_proj"):
        bs.nn.GatedMLP.of(activated)
    with pytest.raises(bs.BlockSparseError, match=r"mlp: expected weights with data.*, got meta tensors"):
        bs.nn.GatedMLP.of(sparse(Theirs(nn.SiLU())).to("meta"))


def test_hooks_of_its_layers_see_their_calls(any_backend):
    mlp, x, seen = bs.nn.GatedMLP(64, 96, density=0.5, block_size=16), torch.randn(3, 64), []
    with torch.no_grad():
        expected = mlp(x)
        mlp.up_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
        torch.testing.assert_close(mlp(x), expected)
    assert seen == [(3, 96)]


def test_hooks_of_all_modules_see_their_calls(any_backend):
    mlp, seen = bs.nn.GatedMLP(64, 96, density=0.5, block_size=16), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    with torch.no_grad():
        mlp(torch.randn(3, 64))
    handle.remove()
    assert seen == [mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp]


@pytest.mark.parametrize(
    ("sizes", "activated"), [((64, 96), "gate_proj"), ((64, 96), "up_proj"), ((50, 70), None)], ids=str
)
def test_padding_and_activations_of_its_layers_count(sizes, activated, any_backend):
    mlp, x = bs.nn.GatedMLP(*sizes, density=0.5, block_size=16, bias=True), torch.randn(3, sizes[0])
    if activated:
        mlp.get_submodule(activated).activation = "relu"
    expected = mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected)


def test_two_block_sizes(any_backend):
    mlp = sparse(Theirs(nn.SiLU()))
    mlp.up_proj = bs.nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, block_size=4, bias=False)
    x = torch.randn(3, mlp.up_proj.in_features)
    with torch.no_grad():
        torch.testing.assert_close(bs.nn.GatedMLP.of(mlp)(x), mlp(x))


def test_compiles(any_backend):
    mlp, x = bs.nn.GatedMLP(64, 96, density=0.5, block_size=16), torch.randn(3, 64)
    torch.testing.assert_close(torch.compile(mlp, backend="aot_eager", fullgraph=True)(x), mlp(x))


def test_looking_changes_nothing(any_backend):
    mlp = sparse(Theirs(nn.SiLU()))
    mlp.down_proj.eval()
    before = torch.get_rng_state()
    assert bs.nn.GatedMLP.of(mlp).training
    assert torch.equal(torch.get_rng_state(), before)
    assert [each.training for each in (mlp, mlp.gate_proj, mlp.down_proj)] == [True, True, False]


@pytest.mark.parametrize("change", [bs.quantize, bs.densify], ids=["quantize", "densify"])
def test_with_other_layers_in_it(change, any_backend):
    mlp, x = bs.nn.GatedMLP(64, 96, density=0.5, block_size=16), torch.randn(3, 64)
    other = change(mlp)
    with torch.no_grad():
        assert (other(x) - mlp(x)).norm() < 0.05 * mlp(x).norm()


def test_forwards_of_instances_are_called(any_backend):
    """The library accelerate replaces `forward` of instances."""
    mlp, x, called = bs.nn.GatedMLP(64, 96, density=0.5, block_size=16), torch.randn(3, 64), []
    own = mlp.up_proj.forward
    mlp.up_proj.forward = lambda *args: called.append(1) or own(*args)
    with torch.no_grad():
        mlp(x)
    assert called
