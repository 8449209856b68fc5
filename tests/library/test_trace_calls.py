"""The way of a call to the compiled kernel stays short enough to be read in one sitting."""

from __future__ import annotations

import pytest
import torch

import trace_calls
from blocksparse.ops import cpu_core

pytestmark = pytest.mark.skipif(cpu_core.unavailable() is not None, reason="the way is that to the compiled core")


# Two of the files, `compiled_core.py` and `ops/cpu_plan.py`, are shared with JAX.
@pytest.mark.parametrize(
    ("make", "recorded", "files", "crossings"),
    [
        pytest.param(trace_calls.linear, False, 7, 9, id="linear-inference"),
        pytest.param(trace_calls.linear, True, 8, 10, id="linear-recorded"),
        pytest.param(trace_calls.lstm, False, 13, 32, id="lstm-inference"),
        pytest.param(trace_calls.lstm, True, 14, 35, id="lstm-recorded"),
        pytest.param(trace_calls.lstm_step, False, 9, 26, id="lstm-step-inference"),
    ],
)
def test_a_call_crosses_few_files(make, files, crossings, recorded):
    with torch.set_grad_enabled(recorded):
        trace = trace_calls.traced(make())
    assert len(trace.files) <= files, sorted(trace.files)
    assert len(trace.crossings) <= crossings, trace.crossings
    assert "ops/cpu_core.py" in trace.files  # it got there
