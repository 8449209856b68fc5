"""Engines of several processes x methods: as one process on the same global batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse.surgery.stored import Stored

STEPS, BATCH = 50, 24


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        bs.nn.Linear(30, 48, density=0.4, block_size=4, activation="gelu"),
        bs.nn.Linear(48, 32, density=0.3, block_size=1, activation="relu"),
        bs.nn.Linear(32, 10, density=0.5, block_size=(2, 4)),
    ).double()


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model[:2]:
        fully_shard(layer)
    return fully_shard(model)


ENGINES = {"ddp": ddp, "fsdp": fsdp}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
METHODS = {
    "none": lambda model, optimizer: None,
    "set": lambda model, optimizer: bs.sparsity.SET(model, optimizer, zeta=0.3, every=7),
    "rigl": lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=45, every=6),
}


def train(model, wrap, optimizer, method, rank=0, ranks=1):
    wrapped = wrap(model)
    optimizer = OPTIMIZERS[optimizer](wrapped.parameters())
    method = METHODS[method](model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 30, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        y = wrapped(x.chunk(ranks)[rank])
        (y - x.chunk(ranks)[rank][:, :10].sin()).square().mean().backward()
        optimizer.step()
        if method:
            method.step()
    return wrapped


def compare(engine, optimizer, method):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    one, several = network(), network()
    before = [layer.layout for layer in one]
    train(one, lambda model: model, optimizer, method)
    train(several, ENGINES[engine], optimizer, method, rank, ranks)
    for mine, theirs, was in zip(one, several, before, strict=True):
        stored = Stored(theirs)
        assert stored.layout == mine.layout
        assert method == "none" or mine.layout != was
        here = torch.from_numpy(stored.here)
        torch.testing.assert_close(stored.local, mine.values.detach()[here], rtol=1e-6, atol=1e-9)
        assert engine == "ddp" or len(here) <= -(-stored.layout.nnz // ranks)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("count", [2, 4])
def test_as_one_process(processes, count, engine, method, optimizer):
    processes(count)(compare, engine, optimizer, method)
