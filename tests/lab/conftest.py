"""Fixtures of the lab's tests."""

import pytest

from blocksparse_lab.experiments import queue
from processes import CONTEXT


@pytest.fixture(params=["forked", pytest.param("spawned", marks=pytest.mark.full)])
def at_work(request, monkeypatch):
    """Fork the queue's processes with PyTorch imported; or spawn them as users do, which takes seconds each."""
    if request.param == "forked":
        monkeypatch.setattr(queue, "get_context", lambda method: CONTEXT)
