"""Every operand of every op in every kind of memory: as a copy of it in one piece, on every backend."""

from __future__ import annotations

import pytest
import torch

import blocksparse as bs
from blocksparse.ops import dropout, lstm_gates, momentum
from blocksparse.ops.linear.op import LINEAR, linear_op, linear_wgrad_op
from blocksparse.ops.recurrent import Steps, scan
from conv_backends import conv
from conv_backends import wgrad as conv_wgrad
from linear_backends import FAST, MAIN, dgrad, forward, running, wgrad
from strided import check_every_operand, views
from test_dropout import on_every_backend as on_every_cpu_backend
from test_recurrent import case

LAYOUTS = {
    "blocks": bs.BlockLayout([[True, False, True], [False, True, True]], (4, 8)),
    "single numbers": bs.patterns.random((12, 20), block_size=1, density=0.4, seed=0),
    "a column": bs.BlockLayout([[True], [True]], (4, 1)),
    "a block": bs.BlockLayout([[True]], (2, 3)),
}
# Instruction sets share the code that strides are handed to; one and few tokens, where interpreted one small case.
BACKENDS = [backend for backend in (*FAST, *MAIN) if backend in MAIN or backend == "cpu-portable"]
BACKENDS = list(dict.fromkeys(BACKENDS))
SHAPES = ("blocks", 3), ("single numbers", 1), ("a column", 3)
CASES = [(backend, *case) for backend in BACKENDS for case in (SHAPES if backend in FAST else [("a block", 2)])]
SHAPES = ("blocks", 3), ("a column", 3), ("blocks", 1)
CONV_CASES = [(backend, *case) for backend in BACKENDS for case in (SHAPES if backend in FAST else [("a block", 3)])]


def leaf(operand):
    """The operand as a leaf of autograd, copied if it was made in inference mode."""
    operand = operand.clone() if operand.is_inference() else operand.detach()
    return operand.requires_grad_(operand.is_floating_point())


def gradients(function, upstream, **operands):
    leaves = {name: leaf(operand) for name, operand in operands.items()}
    return torch.autograd.grad(function(**leaves), tuple(leaves.values()), upstream)


@pytest.mark.parametrize(("backend", "name", "tokens"), CASES)
def test_linear(backend, name, tokens):
    layout = LAYOUTS[name]
    with running(backend):
        x, grad = (torch.randn(tokens, size) for size in layout.shape[::-1])
        values, bias, gate = torch.randn(layout.values_shape), torch.randn(layout.shape[0]), torch.randn(layout.nnz)
        given = {"x": x, "values": values, "bias": bias}
        check_every_operand(lambda **given: forward(layout=layout, **given), given)
        check_every_operand(lambda **given: dgrad(layout=layout, **given), {"grad": grad, "values": values})
        check_every_operand(lambda **given: wgrad(layout=layout, **given), {"grad": grad, "x": x})
        if backend in FAST:
            given["gate"] = gate.relu()
            check_every_operand(lambda **given: bs.linear(layout=layout, **given), given)
            given["upstream"] = grad
            check_every_operand(
                lambda **given: gradients(lambda **leaves: bs.linear(layout=layout, **leaves), **given), given
            )


@pytest.mark.parametrize(("backend", "name", "tokens"), CASES)
def test_outputs_of_linear(backend, name, tokens):
    layout = LAYOUTS[name]
    with running(backend):
        x, values = torch.randn(tokens, layout.shape[1]), torch.randn(layout.values_shape)
        run = LINEAR.on(x.device, x.dtype).linear
        expected = run(x, values, None, layout, False, None)
        for odd, out in views(torch.zeros_like(expected)).items():
            if "expanded" in odd or "one number" in odd or "negated" in odd or out.is_inference():
                continue
            around = out._base.isnan().sum()
            assert run(x, values, None, layout, False, None, out) is out
            torch.testing.assert_close(out, expected, msg=odd)
            assert out._base.isnan().sum() == around, odd


@pytest.mark.parametrize(("backend", "name", "kernel"), CONV_CASES)
def test_conv(backend, name, kernel):
    layout = LAYOUTS[name]
    steps = {"stride": (1,), "padding": (kernel // 2,), "dilation": (1,)}
    with running(backend):
        x, grad = (torch.randn(2, 3, size) for size in layout.shape[::-1])
        values, bias = torch.randn(*layout.values_shape, kernel), torch.randn(layout.shape[0])
        given = {"x": x, "values": values, "bias": bias}
        check_every_operand(lambda **given: conv(layout=layout, size=(3,), **steps, **given), given)
        check_every_operand(lambda grad, x: conv_wgrad(grad, x, layout, (kernel,), **steps), {"grad": grad, "x": x})
        if backend in FAST:
            turned = {"transpose": True, "transposed": True}
            check_every_operand(
                lambda grad, values: conv(grad, values, layout, (3,), **steps, **turned),
                {"grad": grad, "values": values},
            )
            given |= {"x": x.mT.contiguous(), "gate": torch.randn(layout.nnz).relu()}
            check_every_operand(lambda **given: bs.conv1d(layout=layout, padding=kernel // 2, **given), given)
            given["upstream"] = grad.mT.contiguous()

            def run(**leaves):
                return bs.conv1d(layout=layout, padding=kernel // 2, **leaves)

            check_every_operand(lambda **given: gradients(run, **given), given)
            images = {
                "x": torch.randn(2, layout.shape[1], 4, 3),
                "values": torch.randn(*layout.values_shape, kernel, 2),
            }
            check_every_operand(lambda **given: bs.conv2d(layout=layout, padding=kernel // 2, **given), images)


# -- the gates: served where their features lie side by side, refused where not -----------------------------------

GATES = {"z": (2, 12), "add": (2, 12), "gain": (12,), "c": (2, 3)}
GRADS = {"gates": (2, 12), "c_before": (2, 3), "c": (2, 3), "grad_h": (2, 3), "grad_y": (2, 3), "grad_c": (2, 3)}


def gates_forward(**given):
    out = {name: torch.zeros(2, size) for name, size in (("h_out", 3), ("c_out", 3), ("gates_out", 12))}
    lstm_gates.forward(**given, **out)
    return tuple(out.values())


def gates_backward(**given):
    out = {"grad_pre_out": torch.zeros(2, 12), "grad_c_out": torch.zeros(2, 3)}
    lstm_gates.backward(**given, **out)
    return tuple(out.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("call", "shapes"), [(gates_forward, GATES), (gates_backward, GRADS)], ids=["forward", "back"])
def test_gates(backend, call, shapes):
    with running(backend):
        operands = {name: torch.rand(shape) for name, shape in shapes.items()}

        def served(**given):
            try:
                return call(**given)
            except bs.BlockSparseError as error:
                (name,) = [name for name in given if str(error).startswith(f"{name}: expected")]
                assert backend != "reference"
                assert given[name].stride(-1) != 1 or given[name].is_neg()
                return served(**given | {name: given[name].resolve_neg().clone().contiguous()})

        check_every_operand(served, operands)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["h_out", "c_out", "gates_out"])
def test_outputs_of_gates(backend, name):
    with running(backend):
        operands = {name: torch.rand(shape) for name, shape in GATES.items()}
        shapes = {"h_out": (2, 3), "c_out": (2, 3), "gates_out": (2, 12)}
        expected = dict(zip(shapes, gates_forward(**operands), strict=True))
        for odd, out in views(torch.zeros(shapes[name])).items():
            if backend == "reference" or out.is_inference():
                continue
            given = operands | {other: torch.zeros(shape) for other, shape in shapes.items()} | {name: out}
            if out.stride(-1) == 1 and "expanded" not in odd and not out.is_neg():
                lstm_gates.forward(**given)
                torch.testing.assert_close(out, expected[name], msg=odd)
            else:
                with pytest.raises(bs.BlockSparseError, match=f"^{name}: expected"):
                    lstm_gates.forward(**given)


# -- recurrences --------------------------------------------------------------------------------------------------

CELLS = ["lstm", "lstm-projected", "mlstm", "smallworld-2"]


@pytest.mark.parametrize("cell", CELLS)
def test_recurrences(cell, any_backend):
    recurrence, tensors = case(cell, Steps((2, 1)), True, indexed=cell == "mlstm", hidden=16)
    given = {f"tensor {i}": tensor for i, tensor in enumerate(tensors) if tensor is not None}

    def run(**given):
        leaves = {name: leaf(each) for name, each in given.items()}
        outputs = scan(recurrence, *(leaves.get(f"tensor {i}") for i in range(len(tensors))))
        wanted = [each for each in leaves.values() if each.requires_grad]
        upstream = [torch.ones_like(y) for y in outputs]
        return *outputs, *torch.autograd.grad(outputs, wanted, upstream, allow_unused=True, materialize_grads=True)

    check_every_operand(run, given)


@pytest.mark.parametrize("cell", CELLS)
def test_upstream_gradients_of_recurrences(cell, any_backend):
    recurrence, tensors = case(cell, Steps((2, 1)), True, hidden=16)
    leaves = [None if each is None else each.requires_grad_(each.is_floating_point()) for each in tensors]
    outputs = scan(recurrence, *leaves)
    wanted = [each for each in leaves if each is not None and each.requires_grad]

    def run(**upstream):
        return torch.autograd.grad(
            outputs, wanted, tuple(upstream.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )

    check_every_operand(run, {name: torch.randn_like(y) for name, y in zip("yhc", outputs, strict=True)})


# -- attention, dropout, momentum ----------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.5, 1])
def test_attention(density):
    layout = bs.patterns.random((6, 8), block_size=(2, 4), density=density, seed=0)
    given = {"q": torch.randn(1, 2, 6, 3), "k": torch.randn(1, 2, 8, 3), "v": torch.randn(1, 2, 8, 5)}
    check_every_operand(lambda **given: bs.nn.attention(layout=layout, **given), given)


@on_every_cpu_backend
def test_dropout(backend):
    factors = dropout.factors_of(2**14, 0.5)
    with running(backend):
        check_every_operand(lambda x: dropout.forward(x, factors, 1, 2**14), {"x": torch.randn(5, 7)})
        code = torch.randint(3, (5, 7), dtype=torch.uint8)
        check_every_operand(
            lambda grad, code: dropout.backward(grad, code, factors), {"grad": torch.randn(5, 7), "code": code}
        )


@on_every_cpu_backend
def test_momentum(backend):
    rates = {"momentum": 0.5, "rate": 0.25, "keep": 0.75}
    w, v, g = torch.randn(3, 5, 7)

    def fresh():
        return {"w": w.clone(), "v": v.clone(), "g": g.clone()}

    with running(backend):
        expected = fresh()
        momentum.step(*([each] for each in expected.values()), **rates)
        for name, tensor in fresh().items():
            for odd, view in views(tensor).items():
                if view.is_neg() and name != "g":
                    with pytest.raises(bs.BlockSparseError, match="expected tensors without lazy negation"):
                        momentum.step(*([each] for each in (fresh() | {name: view}).values()), **rates)
                elif torch.equal(view, tensor):
                    given = fresh() | {name: view}
                    with torch.inference_mode(view.is_inference()):
                        momentum.step(*([each] for each in given.values()), **rates)
                    for got, want in zip(given.values(), expected.values(), strict=True):
                        torch.testing.assert_close(got, want, msg=f"{name} {odd}")


# -- memory of fake tensors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", MAIN)
def test_fake_outputs_have_the_strides_of_real_ones(backend):
    layout = LAYOUTS["a block"]
    with running(backend):
        x, grad, values = torch.randn(3, 2).T, torch.randn(2, 2).T, torch.randn(1, 3, 2).mT
        images, grads = (each.unsqueeze(1).expand(2, 4, -1) for each in (x, grad))
        kernels = torch.randn(2, 1, 2, 3).permute(1, 2, 3, 0)
        steps = (1,), (0,), (1,)
        calls = {
            "linear": (forward, (x, values, layout)),
            "dgrad": (dgrad, (grad, values, layout)),
            "wgrad": (wgrad, (grad, x, layout)),
            "conv": (conv, (images, kernels, layout, (3,), *steps)),
            "conv_wgrad": (conv_wgrad, (grads[:, :3], images, layout, (2,), *steps)),
        }
        for name, (call, arguments) in calls.items():
            real = call(*arguments)
            fake = call(*(each.to("meta") if isinstance(each, torch.Tensor) else each for each in arguments))
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype), name


def test_opcheck_of_strided_operands():
    layout = LAYOUTS["a block"]
    indices = layout.indices_on("cpu"), layout.grid[1]
    x, grad = torch.randn(3, 2).T.requires_grad_(), torch.randn(1, 2).expand(2, 2)
    values, bias = torch.randn(1, 3, 2).mT.requires_grad_(), torch.randn(1).expand(2)
    torch.library.opcheck(linear_op, (x, values, bias, *indices, False, "relu"))
    torch.library.opcheck(linear_wgrad_op, (grad, x, *indices))


def test_zeros_without_memory():
    layout = LAYOUTS["blocks"]
    x, values = torch._efficientzerotensor((3, 24)), torch.randn(layout.values_shape)
    assert torch.equal(bs.linear(x, values, layout), torch.zeros(3, 8))
