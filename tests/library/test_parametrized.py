"""What takes its parametrizations off a model leaves those of the model's copies."""

import copy

import pytest
import torch
from torch import nn

import blocksparse as bs

METHODS = {
    "sr_ste": bs.sparsity.SRSTE,
    "l0": lambda model: bs.sparsity.L0Gates(model, samples=1, block_size=8),
    "movement": lambda model: bs.sparsity.MovementPruning(model, density=0.5, begin=0, end=1, block_size=8),
}


@pytest.mark.parametrize("name", METHODS)
def test_copies_of_a_model_outlive_finish(name):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    made = METHODS[name](model)
    copied = copy.deepcopy(model).eval()
    x = torch.randn(2, 64)
    before = copied(x)
    model(x).sum().backward()
    if name == "movement":
        made.step()  # until the last of its schedule
    made.finish()
    assert torch.equal(copied(x), before)
    copied(x).sum().backward()
