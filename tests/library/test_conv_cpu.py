"""Promises of the CPU backend alone on convolutions: determinism, threads, no copies; and the plans."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import blocksparse as bs
from blocksparse.ops.conv.plan import Axis, axes_of, channel_plan, runs
from blocksparse.ops.linear import cpu as linear_cpu
from conv_backends import conv, wgrad
from linear_backends import CPU, assert_same_bits, running
from processes import run_script
from strategies import layouts

on_every_isa = pytest.mark.parametrize("backend", CPU)
STEPS = (1, 1), (1, 1), (1, 1)


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.05, 0.5])
def test_bit_identical_over_runs_and_thread_counts(backend, dtype, density):
    layout = bs.patterns.random((128, 128), 16, density=density, seed=0)
    x, grad = torch.randn(5, 9, 30, 128, dtype=dtype), torch.randn(5, 9, 30, 128, dtype=dtype)
    values = torch.randn(*layout.values_shape, 3, 3, dtype=dtype)

    def products():
        yield conv(x, values, layout, (9, 30), *STEPS)
        yield conv(grad, values, layout, (9, 30), *STEPS, transpose=True, transposed=True)
        yield wgrad(grad, x, layout, (3, 3), *STEPS)

    with running(backend):
        assert_same_bits(lambda: list(products()))


@on_every_isa
def test_results_of_an_image_do_not_depend_on_the_batch(backend):
    layout = bs.patterns.random((64, 64), 16, density=0.4, seed=0)
    x, values = torch.randn(20, 8, 9, 64), torch.randn(*layout.values_shape, 3, 3)
    with running(backend):
        together = conv(x, values, layout, (8, 9), *STEPS)
        alone = torch.cat([conv(x[i : i + 1], values, layout, (8, 9), *STEPS) for i in range(20)])
    assert torch.equal(alone, together)


@on_every_isa
@pytest.mark.parametrize("block", [8, 32])
def test_outputs_that_go_past_the_caches_are_as_the_others(backend, block):
    layout = bs.patterns.random((128, 64), block, density=0.3, seed=0)  # some rows have no block
    x, values = torch.randn(6, 53, 61, 64), torch.randn(*layout.values_shape, 3, 3)
    with running(backend):
        one_by_one = torch.cat([conv(x[i : i + 1], values, layout, (53, 61), *STEPS) for i in range(6)])
        together = assert_same_bits(lambda: conv(x, values, layout, (53, 61), *STEPS), (1, 2, 5))  # 10 MB
        assert torch.equal(together, one_by_one)


def test_a_kernel_of_one_is_the_linear_op(monkeypatch):
    layout = bs.patterns.random((64, 32), 16, density=0.5, seed=0)
    x, values = torch.randn(2, 32, 5, 6), torch.randn(*layout.values_shape, 1, 1)
    y = bs.conv2d(x, values, layout)
    flat = bs.linear(x.movedim(1, -1).reshape(-1, 32), values.reshape(layout.values_shape), layout)
    assert torch.equal(y, flat.reshape(2, 5, 6, 64).movedim(-1, 1))
    called = []
    monkeypatch.setattr(linear_cpu, "linear", lambda *a: called.append(a) or torch.zeros(60, 64))
    bs.conv2d(x, values, layout)
    assert called


MEMORY = """
import torch, blocksparse as bs
from pathlib import Path
def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024
layout = bs.patterns.random((64, 64), 16, density=0.5, seed=0)
values = torch.randn(*layout.values_shape, 7, 7)
bs.conv2d(torch.randn(1, 64, 9, 9), values, layout, padding=3)
x = torch.randn(1, 64, 512, 512).to(memory_format=torch.channels_last)
y = torch.empty_like(x)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
with torch.no_grad():
    bs.conv2d(x, values, layout, padding=3)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_image_is_never_unfolded(tmp_path):
    (tmp_path / "script.py").write_text(MEMORY)
    took = run_script(1, tmp_path / "script.py", folder=tmp_path)
    # The output takes 64 MiB; unfolded, the image would take 3136.
    assert float(took) < 64 + 24


# -- plans -----------------------------------------------------------------------------------------------------------

axes = st.builds(
    Axis,
    input=st.integers(1, 12),
    output=st.integers(1, 12),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    padding=st.integers(-3, 6),
    dilation=st.integers(1, 3),
)


@given(axis=axes, transposed=st.booleans(), cut=st.booleans())
def test_runs_hold_each_meeting_once(axis, transposed, cut):
    """Against the definition: output position j meets input position j * stride - padding + tap * dilation."""
    meetings = {
        (j, b, t)
        for j in range(axis.output)
        for t in range(axis.kernel)
        if 0 <= (b := j * axis.stride - axis.padding + t * axis.dilation) < axis.input
    }
    found = runs(axis, transposed, cut)
    outputs, seen = [], []
    for i, (first, count) in enumerate(zip(found.first, found.count, strict=True)):
        outputs += [first + found.out_step * n for n in range(count)]
        for k in range(found.tap_start[i], found.tap_start[i + 1]):
            assert 0 <= found.begin[k] < found.end[k] <= count
            assert not cut or (found.begin[k], found.end[k]) == (0, count)
            for n in range(found.begin[k], found.end[k]):
                pair = first + found.out_step * n, found.at[k] + found.in_step * n
                seen.append((*(pair[::-1] if transposed else pair), found.tap[k]))
    assert sorted(outputs) == list(range(axis.input if transposed else axis.output))
    assert len(seen) == len(set(seen))
    assert set(seen) == meetings


@given(axis=axes)
def test_taps_hold_each_meeting(axis):
    for t in range(axis.kernel):
        count, output, input = axis.tap(t)
        inside = [j for j in range(axis.output) if 0 <= j * axis.stride - axis.padding + t * axis.dilation < axis.input]
        assert list(range(output, output + count)) == inside
        if inside:
            assert input == inside[0] * axis.stride - axis.padding + t * axis.dilation


@given(layout=layouts(), transpose=st.booleans())
def test_channel_plans_hold_each_block_once(layout, transpose):
    plan = channel_plan(layout, transpose)
    rows = np.repeat(np.arange(len(plan.start) - 1), np.diff(plan.start))
    pairs = (plan.col, rows) if transpose else (rows, plan.col)
    assert np.array_equal(pairs[0], layout.row_of_block[plan.block])
    assert np.array_equal(pairs[1], layout.col_of_block[plan.block])
    assert sorted(plan.order) == list(range(len(plan.start) - 1))
    assert (np.diff(np.diff(plan.start)[plan.order]) <= 0).all()


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(bs.BlockSparseError, match="one number per axis each"):
        axes_of((5, 5), (5,), (3, 3), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_one_tap_is_a_linear_product(dims, activation):
    """Eager channels-last images take a shorter way than the op of `torch.ops`, with equal bits."""
    layout = bs.patterns.random((48, 32), 16, density=0.5, seed=0)
    convolve = {1: bs.conv1d, 2: bs.conv2d, 3: bs.conv3d}[dims]
    values = torch.randn(*layout.values_shape, *(1,) * dims, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    x = torch.randn(2, *range(3, 3 + dims), 32).movedim(-1, 1).requires_grad_()
    results = []
    for way in (contextlib.nullcontext(), torch.profiler.profile()):  # under a profiler the op is called
        with way:
            y = convolve(x, values, layout, bias, activation=activation)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, values, bias))))
    assert results[0][0].stride() == results[1][0].stride()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    y = convolve(x, values, layout).mul_(2)
    y.sum().backward()
    turned = values.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(convolve(x, turned, layout), convolve(x, values, layout))
    with pytest.raises(bs.BlockSparseError, match=r"stride: expected an int, 1 or more"):
        convolve(x, values, layout, stride=0)
    with pytest.raises(bs.BlockSparseError, match="values"):
        convolve(x, values.double(), layout)
    with pytest.raises(bs.BlockSparseError, match=r"x: expected \[n, 32"):
        convolve(x[:, :16], values, layout)
    with pytest.raises(bs.BlockSparseError, match="activation"):
        convolve(x, values, layout, activation="tanh")
