"""Fixtures of the lab's tests."""

import pytest

from blocksparse_lab.experiments import queue
from processes import CONTEXT


@pytest.fixture(params=["forked", pytest.param("spawned", marks=pytest.mark.full)])
def at_work(request, monkeypatch):
    """The queue's processes are forked with PyTorch imported; or as users have them, which takes seconds for each."""
    if request.param == "forked":
        monkeypatch.setattr(queue, "get_context", lambda method: CONTEXT)
