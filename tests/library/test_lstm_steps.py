"""An LSTM's steps by kernels that compute the four gates together: the definition, and where there are none."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.ops import recurrent
from blocksparse.ops.gpu import runtime
from blocksparse.ops.recurrent import Steps, fused_gates, scan
from blocksparse.ops.recurrent.fused_gates import FusedGates
from linear_backends import BOUNDS, assert_close, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(runtime.unavailable() is not None, reason="Triton is not installed"),
]

BLOCKS = {"8": 8, "16": 16, "24x40": (24, 40), "64": 64}


def stacked(gate):
    """The layout of four gates that all have this one."""
    return bs.BlockLayout(gate.mask().repeat(4, 1), gate.block_shape)


def hub(blocks):
    """A layout with one full row and one full column."""
    mask = np.eye(blocks, dtype=bool)
    mask[0] = mask[:, 1] = True
    return mask


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels' launches."""
    seen, prepared = [], FusedGates._prepared

    def note(self, pass_, *tensors):
        launch, numbers = prepared(self, pass_, *tensors)
        seen.append((pass_, launch.slots > 0))
        return launch, numbers

    monkeypatch.setattr(FusedGates, "_prepared", note)
    return seen


def tensors_of(steps, gate, dtype, indexed=False):
    """x, index, h, c, V, b, W of an LSTM in this dtype, c in float32."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cpu").to(dtype)

    rows, (hidden, taken) = 6 if indexed else steps.rows, gate.shape
    index = torch.randint(rows, (steps.rows,), generator=generator, device="cpu") if indexed else None
    w = randn(4 * gate.nnz, *gate.block_shape) * taken**-0.5
    x, h, c = randn(rows, 16), randn(steps.batch, taken), randn(steps.batch, hidden).float()
    return [x, index, h, c, randn(4 * hidden, 16) / 4, randn(4 * hidden), w]


def results(run, tensors):
    leaves = [t if t is None or not t.is_floating_point() else t.clone().requires_grad_() for t in tensors]
    outputs = run(*leaves)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator, device="cpu").to(y) for y in outputs]
    found = [*outputs, *torch.autograd.grad(outputs, [t for t in leaves if t is not None and t.requires_grad], grads)]
    return [each.detach().cpu() for each in found]


def check(recurrence, tensors, dtype):
    with bs.use_backend("reference"):
        exact = [t if t is None or not t.is_floating_point() else t.double() for t in tensors]
        expected = results(recurrence.definition, exact)
    with running("triton-tuned"):
        device = torch.empty(0).device
        found = results(lambda *leaves: scan(recurrence, *leaves), [t if t is None else t.to(device) for t in tensors])
    for i, (got, right) in enumerate(zip(found, expected, strict=True)):
        assert_close(got, right, 2 * BOUNDS[dtype], f"{i}")


def of_blocks():
    """In turns float16 by rows and bfloat16 by a table; the others are `full`."""
    for nth, block in enumerate(BLOCKS):
        for indexed, dtype in itertools.product((False, True), (torch.float16, torch.bfloat16)):
            marks = () if indexed == (dtype == torch.bfloat16) == nth % 2 else pytest.mark.full
            name = "table" if indexed else "rows"
            yield pytest.param(block, indexed, dtype, id=f"{block}-{name}-{dtype}", marks=marks)


@pytest.mark.parametrize(("block", "indexed", "dtype"), list(of_blocks()))
def test_steps_are_the_definition(block, indexed, dtype, calls):
    width = 5 if BLOCKS[block] == (24, 40) else 3
    gate = bs.BlockLayout(np.eye(5 if width == 5 else 3, 3, dtype=bool) | hub(5)[:width, :3], BLOCKS[block])
    steps = Steps((2,) * 3, reverse=indexed)
    check(recurrent.LSTM(steps, None, stacked(gate)), tensors_of(steps, gate, dtype, indexed), dtype)
    assert [pass_ for pass_, _ in calls] == ["forward"] * 3


def test_sequences_of_several_lengths(calls):
    gate, steps = bs.BlockLayout(hub(3), 16), Steps((4, 2, 1))
    check(recurrent.LSTM(steps, None, stacked(gate)), tensors_of(steps, gate, torch.float16), torch.float16)
    assert [pass_ for pass_, _ in calls] == ["forward"] * 3


def test_block_rows_that_come_in_parts(calls):
    """Also in steps of more rows than the one before, which have larger tiles."""
    gate, steps = bs.BlockLayout(hub(18), 16), Steps((20, 3, 3), reverse=True)
    check(recurrent.LSTM(steps, None, stacked(gate)), tensors_of(steps, gate, torch.float16), torch.float16)
    assert calls == [("forward", True)] * 3


def test_the_weight_gradient_of_all_gates_together(calls, monkeypatch):
    gpu_of = fused_gates.gpu_of
    monkeypatch.setattr(fused_gates, "gpu_of", lambda device: replace(gpu_of(device), multiprocessors=1))
    gate, steps = bs.BlockLayout(hub(5), 16), Steps((33,) * 2)  # more rows than a step of the kernel takes
    check(recurrent.LSTM(steps, None, stacked(gate)), tensors_of(steps, gate, torch.float16), torch.float16)
    assert calls[-1] == ("wgrad", False)


def test_a_multiplicative_lstm_has_such_steps(calls):
    gate, steps = bs.BlockLayout(hub(3), 16), Steps((2,) * 2)
    x, index, h, c, v, b, w = tensors_of(steps, gate, torch.float16)
    u, m = torch.randn(48, 16).half() / 4, torch.randn(gate.values_shape).half() / 7
    recurrence = recurrent.MultiplicativeLSTM(steps, None, None, stacked(gate), gate)
    check(recurrence, [x, index, h, c, v, b, u, w, m], torch.float16)
    assert calls == [("forward", False)] * 2


def test_without_gradients_nothing_else_comes_out():
    gate, steps = bs.BlockLayout(hub(3), 16), Steps((2,) * 2)
    tensors = tensors_of(steps, gate, torch.bfloat16)
    with running("triton-tuned"):
        device = torch.empty(0).device
        tensors = [t if t is None else t.to(device) for t in tensors]
        recurrence = recurrent.LSTM(steps, None, stacked(gate))
        with torch.no_grad():
            silent = scan(recurrence, *tensors)
        loud = scan(recurrence, *tensors[:-1], tensors[-1].requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(silent, loud, strict=True))


def test_an_empty_batch():
    gate, steps = bs.BlockLayout(hub(3), 16), Steps((0,) * 2)
    with running("triton-tuned"):
        device = torch.empty(0).device
        tensors = [t if t is None else t.to(device) for t in tensors_of(steps, gate, torch.float16)]
        y, h, c = scan(recurrent.LSTM(steps, None, stacked(gate)), *tensors)
    assert (y.shape, h.shape, c.shape) == ((0, 48), (0, 48), (0, 48))


def test_gates_with_different_layouts_are_not_fused(monkeypatch):
    mask = np.ones((8, 2), dtype=bool)
    equal = bs.BlockLayout(mask, 8)
    with running("triton-tuned"):
        assert fused_gates.fused_gates_for(torch.empty(equal.values_shape, dtype=torch.float16), equal) is not None
        assert fused_gates.fused_gates_for(torch.empty(equal.values_shape), equal) is None  # float32
        mask[3, 1] = False
        for other in (mask, mask[:7], np.zeros((8, 2), dtype=bool)):
            layout = bs.BlockLayout(other, 8)
            assert fused_gates.fused_gates_for(torch.empty(layout.values_shape, dtype=torch.float16), layout) is None
    with bs.use_backend("reference"):
        assert fused_gates.fused_gates_for(torch.empty(equal.values_shape, dtype=torch.float16), equal) is None


def test_more_rows_than_kernels_count(monkeypatch):
    gate, steps = bs.BlockLayout(hub(3), 8), Steps((20,))
    with running("triton-tuned"):
        device = torch.empty(0).device
        tensors = [t if t is None else t.to(device) for t in tensors_of(steps, gate, torch.float16)]
        monkeypatch.setattr(runtime, "MAX_COUNTED", 19)
        weight = fused_gates.fused_gates_for(tensors[-1], stacked(gate))
        with pytest.raises(bs.BlockSparseError, match="x: expected at most 19 rows on a GPU, got 20"):
            weight.forward(tensors[0], tensors[0], None, tensors[3], h_out=None, c_out=None, gates_out=None)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("inputs", [64, 128], ids=["dense inputs", "sparse inputs"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [bs.nn.LSTM, bs.nn.MultiplicativeLSTM, bs.nn.SmallWorldLSTM])
def test_a_training_step_is_captured(kind, autocast, inputs):
    """After a first step nothing waits for the host, or comes from it; what is replayed learns the same."""
    layout = bs.patterns.barabasi_albert(128, block_size=16, m=2, seed=0)
    with bs.use_backend("reference"):
        model = kind(inputs, 128, layout=layout)
    model, x = model.cuda(), torch.randn(4, 8, inputs, device="cuda")

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = model(x)[0]
        y.float().square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)
