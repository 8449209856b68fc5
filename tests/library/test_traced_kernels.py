"""Graphs compiled for a GPU hold launches of kernels, the same ones as without a graph."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from blocksparse.ops.gpu import runtime

pytestmark = pytest.mark.skipif(not runtime._installed(), reason="Triton is not installed")
lowered = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.12",
    reason="PyTorch 2.10 and 2.11 cannot compile a training step with launches: their graphs keep the ops",
)
# Of each work the kernels of a training step, forward, dgrad and wgrad.
PRODUCTS = ["linear_kernel"] * 2 + ["linear_wgrad_kernel"]
WGRAD = ["conv_wgrad_kernel", "sum_kernel"]
CONVOLUTION = ["conv_kernel"] * 2 + WGRAD
# With a stride 2 outputs along each axis meet different taps, and have a launch each.
KERNELS = {
    "linear": PRODUCTS,
    "conv": CONVOLUTION,
    "conv, 1x1": PRODUCTS,
    "conv, stride 2": ["conv_kernel"] * 5 + WGRAD,
    "conv, transposed": ["conv_kernel"] * 5 + WGRAD,
    "conv1d": CONVOLUTION,
    "conv, stride 3": ["conv_kernel", *WGRAD],
}


# These check the same of another op.
REPEATED = ["conv, transposed", "conv1d", "conv:refused", "conv:forced", "conv:counted", "conv, 1x1:exported"]
USUAL = [name for name in KERNELS if name not in REPEATED]
USUAL += ["conv:space", "linear:vmap", "linear:refused", "linear:forced"]
USUAL += ["linear:counted", "conv, 1x1:counted", "linear:exported", "conv:exported"]


@cache
def all_traced(*names):
    """Trace these in one process, as importing PyTorch and Triton takes longer than a trace."""
    script = Path(__file__).parent / "trace_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def traced(name, variant=""):
    name = f"{name}:{variant}" if variant else name
    found = all_traced(*(REPEATED if name in REPEATED else USUAL))[name]
    return found["calls"], found["launches"]


def on_ops(variant, *names):
    """Parametrize over ops; those in REPEATED are `full`."""
    suffix = f":{variant}" if variant else ""
    marks = {name: pytest.mark.full if f"{name}{suffix}" in REPEATED else () for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


@lowered
@on_ops("", *KERNELS)
def test_a_compiled_graph_is_lowered_to_the_kernels(name):
    calls, _ = traced(name)
    assert calls.count("triton_kernel_wrapper_functional") == len(KERNELS[name])
    ops = [call for call in calls if "blocksparse" in call]
    assert ops == (["blocksparse.conv.default"] if name == "conv, stride 3" else []), "nine phases have a table"
    shapes = [call for call in calls if call.startswith("compiled")]
    assert len(shapes) == 2
    # One graph serves both sizes: the calls of the second time are none.
    assert calls.index(shapes[1]) == calls.index(shapes[0]) + 1


@lowered
@on_ops("", *KERNELS)
def test_launches_of_a_graph_equal_eager_ones(name):
    _, launches = traced(name)
    of_graph, eager = launches["traced"], launches["eager"]
    if name == "conv, stride 3":
        eager = [each for each in eager if each[0] != "conv_kernel" or each[2][3] == "None"]
    assert sorted({each[0] for each in eager}) == sorted(set(KERNELS[name]))
    assert all(each in of_graph for each in eager)
    assert all(each in eager for each in of_graph)


def test_convolutions_of_images_of_any_size_keep_the_op():
    assert_ops(traced("conv", "space")[0], "conv")


@on_ops("refused", "linear", "conv")
def test_a_gpu_that_the_kernels_refuse_keeps_the_op(name):
    assert_ops(traced(name, "refused")[0], name)


def test_a_batch_of_vmap_keeps_the_op():
    assert_ops(traced("linear", "vmap")[0], "linear")


@on_ops("counted", "linear", "conv", "conv, 1x1")
def test_a_number_of_rows_known_at_run_time_keeps_the_op(name):
    assert_ops(traced(name, "counted")[0], "conv" if "conv" in name else name)


@on_ops("exported", "linear", "conv", "conv, 1x1")
def test_exported_graphs_keep_the_op_for_any_number_of_rows(name):
    calls, _ = traced(name, "exported")
    ops = [call for call in calls if "blocksparse" in call or "triton" in call]
    assert ops == [f"blocksparse.{'conv' if 'conv' in name else name}.default"]


@lowered
@on_ops("forced", "linear", "conv")
def test_use_backend_recompiles_with_the_op(name):
    calls, _ = traced(name, "forced")
    second = len(calls) - calls[::-1].index(next(call for call in calls[::-1] if call.startswith("compiled")))
    assert "triton_kernel_wrapper_functional" in calls[:second]
    assert calls[-1] == "forced"
    assert_ops(calls[second:], name)


def assert_ops(calls, name):
    assert "triton_kernel_wrapper_functional" not in calls
    ops = {call for call in calls if "blocksparse" in call}
    assert ops == {f"blocksparse.{name}.default", f"blocksparse.{name}_wgrad.default"}
