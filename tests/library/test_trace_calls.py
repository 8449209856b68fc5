"""The way of a call to the compiled kernel stays short enough to be read in one sitting."""

from __future__ import annotations

import pytest
import torch

import trace_calls
from blocksparse.ops import cpu_core

pytestmark = pytest.mark.skipif(cpu_core.unavailable() is not None, reason="the way is that to the compiled core")


@pytest.mark.parametrize("recorded", [False, True], ids=["inference", "recorded"])
@pytest.mark.parametrize(
    ("make", "files", "crossings"), [(trace_calls.linear, 6, 8), (trace_calls.lstm, 11, 30)], ids=["linear", "lstm"]
)
def test_a_call_crosses_few_files(make, files, crossings, recorded):
    with torch.set_grad_enabled(recorded):
        trace = trace_calls.traced(make())
    assert len(trace.files) <= files, sorted(trace.files)
    assert len(trace.crossings) <= crossings, trace.crossings
    assert "ops/cpu_core.py" in trace.files  # it got there
