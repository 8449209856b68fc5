"""Engines of several processes x methods: as one process on the same global batch."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel
from blocksparse.surgery.fsdp import reshard
from blocksparse.surgery.stored import Stored

STEPS, BATCH = 50, 24


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        bs.nn.Linear(30, 48, density=0.4, block_size=4, activation="gelu"),
        bs.nn.Linear(48, 32, density=0.3, block_size=1, activation="relu"),
        bs.nn.Linear(32, 10, density=0.5, block_size=(2, 4)),
    ).double()


def dense_network():
    torch.manual_seed(0)
    # Rows of blocks lie on two processes, and are padded.
    first = nn.Sequential(nn.Linear(30, 44), nn.GELU(), nn.Linear(44, 32))
    return nn.Sequential(first, nn.Sequential(nn.ReLU(), nn.Linear(32, 18, bias=False)), nn.Linear(18, 10)).double()


def ddp(model):
    return DistributedDataParallel(model), dist.get_rank(), dist.get_world_size()


def fsdp(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[:2]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), mesh.get_local_rank(), mesh.size()


def tp(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, mesh, plan), 0, 1


def tp_fsdp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return fsdp(tp(model, mesh["tp"])[0], mesh["dp"])


def q_of(model):
    """Thresholds that end within the range of the largest first weights of blocks."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {f"{name}.weight": 0.4 * module.in_features**-0.5 for name, module in found.items()}


# Each wraps a model, and says which of how many parts of the batch this process takes.
ENGINES = {"ddp": ddp, "fsdp": fsdp, "tp": tp, "tp_fsdp": tp_fsdp}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
METHODS = {
    "none": lambda model, optimizer: None,
    "set": lambda model, optimizer: bs.sparsity.SET(model, optimizer, zeta=0.3, every=7),
    "gradual": lambda model, optimizer: bs.sparsity.GradualPruning(
        model, optimizer, 0.3, begin=5, end=35, every=10, block_size=(8, 4)
    ),
    "threshold": lambda model, optimizer: bs.sparsity.ThresholdPruning(
        model, optimizer, q_of(model), begin=2, ramp=10, end=35, every=5, block_size=(8, 4)
    ),
    "blocks": lambda model, optimizer: bs.sparsity.GradualBlockPruning(
        model, optimizer, 0.1, begin=5, end=35, every=10
    ),
    "rigl": lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=45, every=6),
}


DENSE = {"gradual", "threshold"}


def layers(model):
    return [module for module in model.modules() if isinstance(module, bs.nn.Linear)]


def train(model, wrap, optimizer, method):
    wrapped, rank, ranks = wrap(model)
    optimizer = OPTIMIZERS[optimizer](wrapped.parameters())
    method = METHODS[method](model, optimizer)
    pruning = isinstance(method, bs.sparsity.GradualPruning | bs.sparsity.ThresholdPruning)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(BATCH, 30, generator=generator, dtype=torch.float64).chunk(ranks)[rank]
        optimizer.zero_grad()
        (wrapped(x) - x[:, :10].sin()).square().mean().backward()
        optimizer.step()
        if method and not (pruning and method.finished):
            method.step()
            if pruning and method.calls == 40:
                method.finish()
                if isinstance(wrapped, DistributedDataParallel):
                    wrapped = DistributedDataParallel(model)
    return wrapped(torch.ones(1, 30, dtype=torch.float64))


def compare(engine, optimizer, method):
    make = dense_network if method in DENSE else network
    one, several = make(), make()
    before = [layer.layout for layer in layers(one)]
    y = train(one, lambda model: (model, 0, 1), optimizer, method)
    torch.testing.assert_close(train(several, ENGINES[engine], optimizer, method), y, rtol=1e-6, atol=1e-9)
    reshard(several)
    before = before or [bs.patterns.dense(layer.layout.shape, (8, 4)) for layer in layers(one)]
    assert method == "none" or [layer.layout for layer in layers(one)] != before
    for mine, theirs in zip(layers(one), layers(several), strict=True):
        stored = Stored(theirs)
        assert stored.layout == mine.layout
        here = torch.from_numpy(stored.here)
        torch.testing.assert_close(stored.local, mine.values.detach()[here], rtol=1e-6, atol=1e-9)
        if engine == "fsdp":
            assert len(here) <= -(-stored.layout.nnz // dist.get_world_size())


def cases():
    """Every method by every engine, in each run with one optimizer and number of processes."""
    for count, engine, method, optimizer in itertools.product((2, 4), ENGINES, METHODS, OPTIMIZERS):
        if (engine == "tp_fsdp" and count == 2) or (engine.startswith("tp") and method in DENSE):
            continue  # two dimensions; layers that are block-sparse
        if engine == "ddp" and method == "blocks":
            continue  # the model is to be wrapped again
        often = optimizer == "adamw" and count == (4 if engine == "tp_fsdp" or method in ("set", "threshold") else 2)
        yield pytest.param(count, engine, method, optimizer, marks=() if often else pytest.mark.full)


@pytest.mark.parametrize(("count", "engine", "method", "optimizer"), list(cases()))
def test_as_one_process(processes, count, engine, method, optimizer):
    processes(count)(compare, engine, optimizer, method)
