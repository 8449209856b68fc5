"""Warnings of the library are shown at the line of the user's program, however deep they arise."""

import pytest
import torch
from torch import nn

import blocksparse as bs


def compress():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    bs.compress(model, torch.randn(64, 64).split(8), density=0.02, block_size=8, steps=2)


def sparsify():
    bs.sparsify(nn.Linear(8, 8), 0.5, 4)


def step_with_a_frozen_weight():
    model = nn.Sequential(*(bs.nn.Linear(16, 16, density=0.5, block_size=8) for _ in range(2)))
    method = bs.sparsity.SET(model)
    model[0].requires_grad_(False)
    method.step()


def step_without_a_clock():
    layer = bs.nn.Linear(16, 16, density=0.5, block_size=8)
    optimizer = bs.sparsity.BlockClock(torch.optim.AdamW(layer.parameters()))
    method = bs.sparsity.SET(layer, optimizer, every=2)
    for _ in range(3):
        layer(torch.randn(2, 16)).sum().backward()
        optimizer.step()
        method.step()
    other = torch.optim.AdamW(layer.parameters())
    other.load_state_dict(optimizer.state_dict())
    other.step()


def test_a_program_without_a_name_is_warned_too():
    with pytest.warns(bs.SparsityWarning):
        exec("call()", {"call": sparsify, "__name__": None})


@pytest.mark.parametrize("call", [compress, sparsify, step_with_a_frozen_weight, step_without_a_clock])
def test_a_warning_is_shown_at_the_users_line(call):
    with pytest.warns(bs.SparsityWarning) as caught:
        call()
    assert {warning.filename for warning in caught} == {__file__}
