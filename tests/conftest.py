"""Without a GPU the Triton kernels are tested in Triton's interpreter, which has to be asked for before they load."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def one_thread():
    """For steps that are so small that more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def any_backend():
    """The CPU's kernels, or the definition where they are not built."""
    import blocksparse as bs  # not before the interpreter was asked for

    with nullcontext() if bs.backends()["cpu"] else bs.use_backend("reference"):
        yield
