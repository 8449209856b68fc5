"""The protocol of all methods: a loop that calls each at the same place, one state, one name for the first step."""

import inspect

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.sparsity.training_method import TrainingMethod


def dense():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def sparse():
    return nn.Sequential(bs.nn.Linear(16, 32, density=0.5, block_size=4), nn.ReLU(), bs.nn.Linear(32, 16, block_size=4))


METHODS = {
    "GradualBlockPruning": (
        sparse,
        lambda m, o: bs.sparsity.GradualBlockPruning(m, o, 0.3, end=4, every=1),
    ),
    "GradualPruning": (dense, lambda m, o: bs.sparsity.GradualPruning(m, o, 0.5, end=4, every=1, block_size=4)),
    "GroupLasso": (dense, lambda m, o: bs.sparsity.GroupLasso(m, o, block_size=4)),
    "ImportancePruning": (sparse, lambda m, o: bs.sparsity.ImportancePruning(m, o, begin=1, every=2)),
    "L0Gates": (dense, lambda m, o: bs.sparsity.L0Gates(m, o, samples=10, block_size=4)),
    "MovementPruning": (dense, lambda m, o: bs.sparsity.MovementPruning(m, o, 0.5, end=4, block_size=4)),
    "RigL": (sparse, lambda m, o: bs.sparsity.RigL(m, o, end=8, every=2)),
    "SET": (sparse, lambda m, o: bs.sparsity.SET(m, o, every=2)),
    "SRSTE": (dense, lambda m, o: bs.sparsity.SRSTE(m)),
    "ThresholdPruning": (
        dense,
        lambda m, o: bs.sparsity.ThresholdPruning(m, o, 0.01, begin=1, ramp=2, end=4, every=1, block_size=4),
    ),
}


def test_these_are_all_methods():
    public = [getattr(bs.sparsity, name) for name in bs.sparsity.__all__]
    found = {each.__name__ for each in public if inspect.isclass(each) and hasattr(each, "step")}
    assert found - {"SGD"} == set(METHODS)
    assert all(issubclass(getattr(bs.sparsity, name), TrainingMethod) for name in METHODS)


def start(name):
    torch.manual_seed(0)
    model, method = METHODS[name]
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, method(model, optimizer)


def train(model, optimizer, method, first, last):
    """The loop of `TrainingMethod`'s docstring."""
    for t in range(first, last):
        torch.manual_seed(t)  # L0 draws its gates
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        loss = model(x).square().mean() + (method.penalty() if hasattr(method, "penalty") else 0)
        loss.backward()
        optimizer.step()
        assert isinstance(method.step(), bool)


@pytest.mark.parametrize("name", METHODS)
def test_one_loop_trains_and_resumes(name):
    whole, first, second = start(name), start(name), start(name)
    train(*whole, 0, 5)
    train(*first, 0, 3)
    for part, saved in zip(second, first, strict=True):
        part.load_state_dict(saved.state_dict())
    train(*second, 3, 5)
    assert second[2].calls == whole[2].calls == 5
    for key, tensor in whole[0].state_dict().items():
        assert torch.equal(second[0].state_dict()[key], tensor), key


@pytest.mark.parametrize("name", METHODS)
def test_steps_have_one_name(name):
    given = inspect.signature(getattr(bs.sparsity, name)).parameters
    assert not given.keys() & {"start", "stop", "t_end", "first", "last", "from_"}
