"""The gates of an LSTM step: one contract, on every backend that this machine has."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import blocksparse as bs
from blocksparse.ops import cpu_core, lstm_gates
from blocksparse.ops.checks import SUM_DTYPES
from blocksparse.ops.gpu import runtime as triton_runtime
from linear_backends import assert_same_bits

CPU = [f"cpu-{isa}" for isa, present in cpu_core.isas().items() if present] if cpu_core.unavailable() is None else []
TRITON = ["triton"] if triton_runtime.unavailable() is None else []
BACKENDS = ["reference", *CPU, *TRITON]
# Rows and features: none, one, odd ones, fewer features than a vector, more than a part of the CPU's work.
SHAPES = ((0, 8), (1, 1), (1, 4101), (7, 13), (7, 64), (33, 65))
# Relative L2 error against float64 on the same (rounded) inputs.
BOUNDS = {torch.float32: 1e-6, torch.float64: 2e-15, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# Divisions and exponentials of a GPU are approximate; its interpreter truncates to bfloat16.
GPU_BOUNDS = BOUNDS | {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3}

on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
on_every_cpu = pytest.mark.parametrize("backend", CPU)
in_every_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype)[6:])


@contextmanager
def running(backend):
    """Runs the gates on this backend. Tensors that tests make meanwhile are on its device."""
    name, _, isa = backend.partition("-")
    with bs.use_backend(name):
        if name == "cpu":
            with cpu_core.use_isa(isa):
                yield
        elif name == "triton" and not triton_runtime.interpreting():
            with torch.device("cuda"):
                yield
        else:
            yield


def shapes(backend):
    """The interpreter is slow: it gets fewer."""
    return SHAPES[:2] + SHAPES[3:4] if backend == "triton" and triton_runtime.interpreting() else SHAPES


def in_buffer(n, width, dtype, how="random"):
    """[n, width] with its rows in a larger buffer, or full of NaN."""
    buffer = torch.full((n, width + 5), torch.nan, dtype=dtype)
    part = buffer[:, 2 : 2 + width]
    return part.copy_(torch.randn(n, width)) if how == "random" else part


def output(n, width, dtype):
    return in_buffer(n, width, dtype, "NaN")


def untouched(tensor):
    """Whether what surrounds an output in its buffer is the NaN it was."""
    buffer = tensor._base
    return buffer[:, :2].isnan().all() and buffer[:, 2 + tensor.shape[1] :].isnan().all()


def assert_close(backend, what, got, expected):
    bound = (GPU_BOUNDS if backend == "triton" else BOUNDS)[got.dtype]
    # Of few numbers all may be the small difference of large ones, with the error of those.
    size = expected.norm().clamp(min=0.3 * expected.numel() ** 0.5)
    error = (got.double() - expected).norm()
    assert error <= bound * size, f"{what}: relative error {error / size:.2e}, bound {bound:.0e}"


def step(pre, c):
    """The formulas, in the dtype of the inputs: h, c and the gates."""
    i, f, g, o = pre.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * c + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], -1)


def before_gates(gates):
    """The inputs from which `step` computes these."""
    i, f, g, o = gates.chunk(4, -1)
    return torch.cat([i.logit(), f.logit(), g.atanh(), o.logit()], -1)


# -- forward -----------------------------------------------------------------------------------------------------


def operands(n, hidden, dtype, add, gain):
    z, c = 2 * in_buffer(n, 4 * hidden, dtype), in_buffer(n, hidden, SUM_DTYPES[dtype])
    added = {"rows": in_buffer(n, 4 * hidden, dtype), "one": torch.randn(4 * hidden).to(dtype), "no": None}[add]
    return z, added, torch.randn(4 * hidden).to(dtype) if gain else None, c


@on_every_backend
@in_every_dtype
@pytest.mark.parametrize(("add", "gain"), [("rows", False), ("one", True), ("no", False)])
def test_forward(backend, dtype, add, gain):
    with running(backend):
        for n, hidden in shapes(backend):
            z, added, factor, c = operands(n, hidden, dtype, add, gain)
            h, after = output(n, hidden, dtype), output(n, hidden, c.dtype)
            gates = output(n, 4 * hidden, dtype) if add != "no" else None
            lstm_gates.forward(z, added, factor, c, h_out=h, c_out=after, gates_out=gates)
            pre = z.double() * (1 if factor is None else factor.double()) + (0 if added is None else added.double())
            expected = step(pre, c.double())
            for what, got, right in zip(("h", "c", "gates"), (h, after, gates), expected, strict=True):
                if got is not None:
                    assert_close(backend, what, got, right)
                    assert untouched(got)


@on_every_backend
def test_forward_in_place(backend):
    with running(backend):
        z, _, _, c = operands(5, 19, torch.float32, "no", False)
        h, after, gates = torch.empty(5, 19), torch.empty(5, 19), torch.empty(5, 76)
        lstm_gates.forward(z, None, None, c, h_out=h, c_out=after, gates_out=gates)
        again = torch.full_like(h, torch.nan)
        lstm_gates.forward(z, None, None, c, h_out=again, c_out=c, gates_out=z)
    assert all(torch.equal(a, b) for a, b in ((h, again), (after, c), (gates, z)))


@on_every_backend
@in_every_dtype
def test_extreme_inputs(backend, dtype):
    with running(backend):
        extreme = torch.tensor([torch.inf, 100, 30, 0, -30, -100, -torch.inf, torch.nan, -0.0, 1e-4]).to(dtype)
        z = extreme.repeat(4)[None]
        c = torch.tensor([[1.0, 1, 1, 1, 1, 1, 1, 1, torch.inf, torch.nan]], dtype=SUM_DTYPES[dtype])
        h, after, gates = (torch.empty(1, k * 10, dtype=d) for k, d in ((1, dtype), (1, c.dtype), (4, dtype)))
        lstm_gates.forward(z, None, None, c, h_out=h, c_out=after, gates_out=gates)
    expected = step(z.double(), c.double())
    for got, right in zip((h, after, gates), expected, strict=True):
        torch.testing.assert_close(got, right.to(got.dtype), rtol=1e-2, atol=1e-37, equal_nan=True)
    assert gates[0, [0, 6, 20, 26]].tolist() == [1, 0, 1, -1]  # exactly


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_number_is_exact_near_zero_and_far(backend, dtype):
    """Relative to itself, not to the largest of them: 4 ulp, and what the GPU's approximate division adds."""
    with running(backend):
        size = torch.logspace(-12, 1.3, 50 if backend == "triton" else 2000, dtype=torch.float64)
        x = torch.cat([-size, size]).to(dtype)[None]
        h, after, gates = torch.empty_like(x), torch.empty_like(x), torch.empty(1, 4 * x.shape[1], dtype=dtype)
        lstm_gates.forward(x.repeat(1, 4), None, None, torch.zeros_like(x), h_out=h, c_out=after, gates_out=gates)
    ulp = torch.finfo(dtype).eps
    sigmoid, _, tanh, _ = gates.double().chunk(4, -1)
    tolerance = {"rtol": (16 if backend == "triton" else 4) * ulp, "atol": 0}
    torch.testing.assert_close(sigmoid, x.double().sigmoid(), **tolerance)
    torch.testing.assert_close(tanh, x.double().tanh(), **tolerance)


# -- backward ------------------------------------------------------------------------------------------------------


@on_every_backend
@in_every_dtype
@pytest.mark.parametrize("given", ["h y c", "h", "y c", ""], ids=lambda given: given or "none")
def test_backward(backend, dtype, given):
    with running(backend):
        for n, hidden in shapes(backend):
            state = SUM_DTYPES[dtype]
            saved = in_buffer(n, 4 * hidden, dtype)
            saved.copy_(step(saved.double().clamp(-2.5, 2.5), torch.zeros(n, hidden))[2])
            pre, before = before_gates(saved.double()).requires_grad_(), in_buffer(n, hidden, state)
            double_before = before.double().requires_grad_()
            h, c, _ = step(pre, double_before)
            grads = [
                in_buffer(n, hidden, state if name == "c" else dtype) if name in given.split() else None
                for name in "hyc"
            ]
            at_h = sum((g.double() for g in grads[:2] if g is not None), torch.zeros(n, hidden, dtype=torch.float64))
            at_c = torch.zeros_like(at_h) if grads[2] is None else grads[2].double()
            expected = torch.autograd.grad((h, c), (pre, double_before), (at_h, at_c))

            after = in_buffer(n, hidden, state).copy_(c.detach())
            grad_pre, grad_c = output(n, 4 * hidden, dtype), output(n, hidden, state)
            lstm_gates.backward(saved, before, after, *grads, grad_pre_out=grad_pre, grad_c_out=grad_c)
            for what, got, right in zip(("pre", "c"), (grad_pre, grad_c), expected, strict=True):
                assert_close(backend, what, got, right)
                assert untouched(got)


@on_every_backend
def test_backward_in_place(backend):
    with running(backend):
        gates, c_before, c, grad_h, grad_c = torch.rand(5, 76), *torch.randn(4, 5, 19)
        results = torch.empty(5, 76), torch.empty(5, 19)
        arguments = gates, c_before, c, grad_h, None, grad_c
        lstm_gates.backward(*arguments, grad_pre_out=results[0], grad_c_out=results[1])
        lstm_gates.backward(*arguments, grad_pre_out=gates, grad_c_out=grad_c)
    assert torch.equal(gates, results[0])
    assert torch.equal(grad_c, results[1])


# -- what is promised besides numbers -------------------------------------------------------------------------------


@on_every_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical_for_any_number_of_threads_and_rows(backend, dtype):
    n, hidden = 37, 517
    z, add, _, c = operands(n, hidden, dtype, "rows", False)
    grads = torch.randn(n, hidden).to(dtype), None, torch.randn(n, hidden)
    wide = torch.randn(1, 4 * 20011).to(dtype), torch.randn(1, 20011)

    def everything(rows):
        h, after, gates = torch.empty(n, hidden, dtype=dtype), torch.empty(n, hidden), torch.empty_like(add)
        grad_pre, grad_c = torch.empty_like(gates), torch.empty_like(c)
        for row in range(0, n, rows):
            at = slice(row, row + rows)
            lstm_gates.forward(z[at], add[at], None, c[at], h_out=h[at], c_out=after[at], gates_out=gates[at])
            lstm_gates.backward(
                gates[at], c[at], after[at], *(None if g is None else g[at] for g in grads),
                grad_pre_out=grad_pre[at], grad_c_out=grad_c[at],
            )  # fmt: skip
        h_wide, c_wide = torch.empty(1, 20011, dtype=dtype), torch.empty(1, 20011)
        lstm_gates.forward(wide[0], None, None, wide[1], h_out=h_wide, c_out=c_wide)
        return h, after, gates, grad_pre, grad_c, h_wide, c_wide

    with running(backend):
        together = assert_same_bits(lambda: everything(n))
        assert all(torch.equal(a, b) for a, b in zip(everything(1), together, strict=True))


@pytest.mark.skipif(not TRITON, reason="no Triton here")
def test_launches_are_kept_for_rows_of_equal_starts():
    from blocksparse.ops.lstm_gates.triton import _plan_launch

    def run(first):
        part = steps[first : first + 64].view(4, 16)
        lstm_gates.forward(part, None, None, c, h_out=h, c_out=c)
        return _plan_launch.cache_info().misses

    with running("triton"):
        steps, c, h = torch.zeros(256), torch.zeros(4, 4), torch.empty(4, 4)
        _plan_launch.cache_clear()
        assert [run(first) for first in (0, 64, 1, 5, 128)] == [1, 1, 2, 2, 2]


@pytest.mark.parametrize("backend", CPU[-1:] + TRITON)
def test_rows_more_than_two_to_the_31_numbers_apart(backend):
    with running(backend):
        # The memory between the two rows is never touched, and so never allocated.
        memory = torch.empty(2**31 + 2**10, dtype=torch.bfloat16)
        z = memory.as_strided((2, 16), (2**31 + 64, 1)).copy_(torch.randn(2, 16))
        h, c = torch.empty(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4)
        lstm_gates.forward(z, None, None, c, h_out=h, c_out=c)
        assert_close(backend, "h", h, step(z.double(), torch.zeros(2, 4))[0])


@pytest.mark.parametrize("backend", CPU[-1:] + TRITON)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("z", torch.randn(3, 15)),
        ("z", torch.randn(16, 3).T),
        ("add", torch.randn(2, 16)),
        ("add", torch.randn(15)),
        ("gain", torch.randn(16).double()),
        ("c", torch.randn(3, 4).double()),
        ("h_out", torch.randn(2, 4)),
        ("c_out", torch.randn(3, 4, 1)),
        ("gates_out", torch.empty(3, 16, device="meta")),
    ],
)
def test_tensors_of_wrong_sizes_are_refused(backend, name, wrong):
    with running(backend):
        good = {"z": (3, 16), "add": (16,), "gain": (16,), "c": (3, 4), "h_out": (3, 4), "c_out": (3, 4)}
        operands = {key: torch.randn(shape) for key, shape in good.items()}
        wrong = wrong if wrong.is_meta else wrong.to(operands["z"].device)
        with pytest.raises(bs.BlockSparseError, match=f"^{name}: expected"):
            lstm_gates.forward(**(operands | {name: wrong}))


def test_the_device_determines_the_backend():
    module = lstm_gates.LSTM_GATES.on(torch.device("cpu"), torch.float32)
    assert module.__name__.endswith("lstm_gates.cpu")
    with pytest.raises(bs.BlockSparseError, match=r"lstm_gates.*int32"):
        lstm_gates.LSTM_GATES.on(torch.device("cpu"), torch.int32)


@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [(1, 2048, torch.float32), (32, 2048, torch.float32), (128, 512, torch.float32), (128, 512, torch.bfloat16)],
)
def test_shapes_of_real_models(rows, hidden, dtype):
    z, c = torch.randn(rows, 4 * hidden).to(dtype), torch.randn(rows, hidden)
    h = torch.full_like(c, torch.nan).to(dtype)
    lstm_gates.forward(z, None, None, c, h_out=h, c_out=c)
    assert h.isfinite().all()
