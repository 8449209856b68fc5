"""Promises of the convolutions' Triton backend alone: shared inputs, switches, launches, captures."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import blocksparse as bs
from blocksparse.ops.conv import triton as backend
from blocksparse.ops.conv.plan import Axis
from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse.ops.gpu.tiles import Gpu, Work
from blocksparse.ops.linear import triton as linear
from conv_backends import dense, sparse
from linear_backends import assert_close, running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton_runtime.unavailable() is not None, reason=str(triton_runtime.unavailable())),
]


@contextmanager
def tf32(convolutions: str, products: str = "ieee"):
    switches = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch, precision in zip(switches, (convolutions, products), strict=True):
            switch.fp32_precision = precision
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def launches(layout) -> list:
    """All that were prepared for this layout."""
    return [launch for some in layout.derived("triton launches", dict).values() for launch in some]


def argument(launch, name: str):
    names = launch.kernel.arg_names
    return launch.arguments[names.index(name) - len(names)]


# -- inputs that positions share --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transposed", "space", "kernel", "steps", "together"),
    [
        pytest.param(False, (6, 8), (3, 3), {"padding": 1}, (4, 4, 4), marks=pytest.mark.full),
        (False, (6, 9), (3, 3), {}, (4, 2, 1)),  # 7 outputs, 9 inputs
        pytest.param(False, (40,), (2,), {"dilation": 2, "padding": 1}, (4, 4, 4), marks=pytest.mark.full),
        (False, (8, 9), (3, 4), {"stride": (1, 2), "padding": 1}, (4, 4, 4)),  # the gradient of the input in phases
        (True, (3, 3, 8), (1, 2, 3), {"padding": (0, 0, 1)}, (4, 4, 4)),
        (False, (6, 10), (3, 3), {"padding": 1}, (2, 2, 2)),  # four at a time would waste more than an eighth
        pytest.param(
            False, (7, 20), (3, 5), {"padding": 2}, (1, 1, 1), marks=pytest.mark.full
        ),  # too many taps for one step
    ],
    ids=["same", "valid", "dilated", "strided", "transposed", "pairs", "alone"],
)
def test_positions_that_share_inputs_agree_with_float64(transposed, space, kernel, steps, together):
    with running("triton-tuned"), tf32("tf32"):
        torch.manual_seed(0)
        layout = bs.BlockLayout([[True, False, True], [False, False, False], [True, True, True]], block_size=16)
        x = torch.randn(3, layout.shape[1], *space, requires_grad=True)
        values = torch.randn(*layout.values_shape, *kernel, requires_grad=True)
        dims = len(space)
        y = sparse(dims, transposed, x, values, layout, **steps)
        grad = torch.randn_like(y)
        found = y, *torch.autograd.grad(y, (x, values), grad)
        wide = x.detach().double().requires_grad_(), values.detach().double().requires_grad_()
        expected = dense(dims, transposed, *wide, layout, **steps)
        expected = expected, *torch.autograd.grad(expected, wide, grad.double())
        most = 1e-6 if triton_runtime.interpreting() else 2e-3
        for each, right, name in zip(found, expected, ("forward", "dgrad", "wgrad"), strict=True):
            assert_close(each.detach(), right.detach(), most, name)
        forward, dgrad, wgrad = (
            {argument(launch, "POSITIONS") for launch in launches(layout) if matches(launch)}
            for matches in (
                lambda launch: launch.kernel is backend._kernels().conv_kernel and not argument(launch, "TRANSPOSE"),
                lambda launch: launch.kernel is backend._kernels().conv_kernel and argument(launch, "TRANSPOSE"),
                lambda launch: launch.kernel is backend._kernels().conv_wgrad_kernel,
            )
        )
        assert (max(forward), max(dgrad), max(wgrad)) == together


@pytest.mark.parametrize(("kind", "together"), [("sm90", (4, 4, 4, 4, 4)), ("sm100", (4, 1, 1, 4, 1))])
def test_positions_share_inputs_if_tensor_memory_fits_their_sums(kind, together):
    gpu = Gpu("", kind, 132, 227 * 1024)

    def of(pass_: str, block: int, taps: int) -> int:
        work = Work(pass_, torch.bfloat16, (block, block), 8192, 0.1)
        if pass_ == "wgrad":
            return backend._wgrad_tile(work, Axis(28, 28, taps, 1, 1, 1), gpu)[1].positions
        return backend._tile(work, 8192, 28, taps, (1, 1), gpu)[1].positions

    assert (*(of("wgrad", block, 3) for block in (16, 32, 64)), *(of("forward", 64, n) for n in (3, 4))) == together


def test_nan_does_not_reach_outputs_beyond_the_border():
    # Groups of positions end beyond the axis: what is read for those that do not exist must reach no sum.
    with running("triton-tuned"), tf32("tf32"):
        layout = bs.patterns.dense((16, 16), 16)
        x, values = torch.randn(1, 16, 3, 7), torch.randn(1, 16, 16, 3, 3, requires_grad=True)
        x[0, :, :, 6] = torch.nan
        y = bs.conv2d(x, values, layout, padding=1)
        (grad,) = torch.autograd.grad(y.sum(), values)
        assert not y[..., :5].isnan().any()
        assert not grad[..., 0].isnan().any()
        assert grad[..., 1:].isnan().all()


def test_many_phases_come_in_one_launch():
    with running("triton-tuned"):
        layout = bs.BlockLayout([[True, False], [False, False], [True, True]], block_size=8)
        x, values = torch.randn(1, 16, 3, 4), torch.randn(*layout.values_shape, 4, 5)
        bias = torch.randn(24)
        y = bs.conv_transpose2d(x, values, layout, bias, stride=(3, 4), padding=1)
        expected = dense(2, True, x.double(), values.double(), layout, bias.double(), stride=(3, 4), padding=1)
        assert_close(y, expected, 1e-5, "forward")
        (launch,) = launches(layout)
        assert launch.grid[1] == 12


# -- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("convolutions", ["tf32", "ieee"])
def test_convolutions_follow_their_own_switch_of_tf32(kernel, convolutions):
    layout = bs.patterns.dense((16, 16), 16)
    with running("triton-tuned"), tf32(convolutions, "ieee" if convolutions == "tf32" else "tf32"):
        x = torch.randn(1, 16, 4, 4, requires_grad=True)
        values = torch.randn(1, 16, 16, kernel, kernel, requires_grad=True)
        bs.conv2d(x, values, layout, padding=kernel // 2).sum().backward()
        found = [launch for launch in launches(layout) if "PRECISION" in launch.kernel.arg_names]
        assert len(found) == 3
        assert {argument(launch, "PRECISION") == "tf32" for launch in found} == {convolutions == "tf32"}


def test_launches_are_prepared_once(monkeypatch):
    layout = bs.patterns.random((32, 48), block_size=16, density=0.5, seed=0)
    with running("triton-tuned"):
        x, values = torch.randn(1, 48, 5, 6, requires_grad=True), torch.randn(*layout.values_shape, 3, 3)
        for _ in range(2):
            y = bs.conv2d(x, values, layout, stride=2, padding=1)
            torch.autograd.grad(y.sum(), x)
            known = launches(layout)
            monkeypatch.setattr(backend, "Launch", None)  # a second would be an error
        assert len(known) == 1 + 4  # forward, and the four phases of its gradient


def test_weights_with_their_taps_first_are_used_as_they_are(monkeypatch):
    layout = bs.patterns.dense((16, 16), 16)
    used = []
    launch = triton_runtime.Launch.__call__
    monkeypatch.setattr(
        triton_runtime.Launch, "__call__", lambda self, *tensors: (used.append(tensors[1]), launch(self, *tensors))
    )
    with running("triton-tuned"):
        x, stored = torch.randn(1, 16, 5, 5), torch.randn(1, 3, 3, 16, 16)
        values = stored.movedim((1, 2), (-2, -1))
        y = bs.conv2d(x, values, layout)
        assert used[-1].data_ptr() == stored.data_ptr()
        again = bs.conv2d(x, values.contiguous(), layout)
        assert used[-1].data_ptr() != stored.data_ptr()
        assert torch.equal(y, again)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_warm_call_copies_nothing_from_the_host_on_another_stream(transposed, monkeypatch):
    """A capture has a stream of its own, and keeps the addresses of everything that it read."""
    stream, tables = [1], []
    monkeypatch.setattr(linear, "stream_of", lambda x: stream[0])
    monkeypatch.setattr(linear, "keep_for_stream", lambda *of: None)
    layout = bs.patterns.random((32, 32), block_size=16, density=0.5, seed=0)
    conv = bs.conv_transpose2d if transposed else bs.conv2d

    def step():
        y = conv(x, values, layout, stride=3, padding=1)
        torch.autograd.grad(y.square().sum(), (x, values))
        tables.append({argument(launch, "phase_ptr").data_ptr() for launch in launches(layout) if phases(launch)})

    def phases(launch):
        return "phase_ptr" in launch.kernel.arg_names and argument(launch, "phase_ptr") is not None

    with running("triton-tuned"):
        x = torch.randn(1, 32, 7, 7, requires_grad=True)
        values = torch.randn(*layout.values_shape, 3, 3, requires_grad=True)
        step()
        for name in ("tensor", "from_numpy", "as_tensor"):
            monkeypatch.setattr(torch, name, pytest.fail)
        stream[0] = 2
        step()
    layout.derived("triton launches", dict).clear()
    assert len(tables[0]) == 1
    assert tables[0] == tables[1] == {each.data_ptr() for key, each in layout._derived.items() if "phases" in key[0]}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_training_step_is_captured_in_a_graph(stride):
    layout = bs.patterns.random((64, 96), block_size=32, density=0.5, seed=0)
    x = torch.randn(2, 96, 9, 12, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    values = torch.randn(*layout.values_shape, 3, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        y = bs.conv2d(x, values, layout, stride=stride, padding=1)
        return y, *torch.autograd.grad(y.float().square().sum(), (x, values))

    warm, stream, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(warm):
        expected = [tensor.detach().clone() for tensor in step()]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    layout.derived("triton launches", dict).clear()
    graph.replay()
    torch.cuda.synchronize()
    for each, right in zip(found, expected, strict=True):
        assert torch.equal(each, right)
