"""The examples of docstrings draw the same random numbers whatever ran before them."""

from __future__ import annotations

import zlib

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))
