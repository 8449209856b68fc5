"""Engines of several processes x methods: as one process on the same global batch.

`linear` has linear layers, `mixed` convolutions and an LSTM, of sizes that blocks pad, and parts without a block.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

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
from blocksparse.nn.module import BlockSparseModule
from blocksparse.surgery.sharding import is_dtensor, reshard
from blocksparse.surgery.weight_handle import handle_of


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


class Mixed(nn.Module):
    """Images, whose columns become a sequence."""

    def __init__(self, of, conv, linear, lstm, hidden):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.Sequential(
            of.Conv2d(3, 18, 3, padding=1, **conv),
            nn.ReLU(),
            of.ConvTranspose2d(18, 10, 2, **conv),
        )
        self.lstm = of.LSTM(10, hidden, batch_first=True, **lstm)
        self.last = nn.Sequential(of.Linear(hidden, 9, **linear))

    def forward(self, x):
        return self.last(self.lstm(self.convs(x).mean(2).transpose(1, 2).contiguous())[0])


def mixed():
    linear = {"density": 0.5, "block_size": (2, 4)}
    conv, lstm = {"density": 0.5, "block_size": 4}, {"density": 0.4, "block_size": (2, 4)}
    return Mixed(bs.nn, conv, linear, lstm, 22).double()


def dense_mixed():
    return Mixed(nn, {}, {}, {}, 24).double()


def q_of(model):
    """Thresholds that end within the range of the largest first weights of blocks."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {f"{name}.weight": 0.4 * module.in_features**-0.5 for name, module in found.items()}


@torch.no_grad()
def without_gradients(model):
    """Sets the last weight to 0, so that the first gradients of the others are 0, and all of their blocks equal."""
    last = [module for module in model.modules() if isinstance(module, bs.nn.Linear)][-1]
    last.values.zero_()
    return model


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
    "ties": lambda model, optimizer: bs.sparsity.RigL(
        without_gradients(model), optimizer, end=4, every=1, alpha=0.9, seed=3
    ),
}
METHODS_OF_MIXED = {
    "set": lambda model, optimizer: bs.sparsity.SET(model, optimizer, every=3),
    "rigl": lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=9, every=3, alpha=0.9, skip="lstm"),
    "blocks": lambda model, optimizer: bs.sparsity.GradualBlockPruning(model, optimizer, 0.2, begin=2, end=6, every=2),
    "gradual": lambda model, optimizer: bs.sparsity.GradualPruning(
        model, optimizer, 0.3, begin=2, end=6, every=2, block_size=(8, 4)
    ),
}
ROW, COL = RowwiseParallel(), ColwiseParallel()


class Task(NamedTuple):
    sparse: Callable[[], Any]
    dense: Callable[[], Any]
    x: torch.Tensor  # [steps + 1, batch, ...]
    target: Callable[[torch.Tensor], Any]
    methods: dict[str, Any]
    finish: int  # the call after which dense weights become block-sparse
    shards: Callable[[Any], list[Any]]  # what fully_shard is applied to besides the model
    plan: dict[str, Any]


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


TASKS = {
    "linear": Task(
        network, dense_network, drawn(51, 24, 30), lambda x: x[:, :10].sin(), METHODS, 40, lambda model: model[:2],
        {"0": COL, "1": ROW, "2": ColwiseParallel(output_layouts=Replicate())},
    ),
    "mixed": Task(
        mixed, dense_mixed, drawn(10, 8, 3, 4, 5), lambda x: 1, METHODS_OF_MIXED, 6,
        lambda model: [model.convs] + [model.lstm] * (not isinstance(model.lstm, nn.LSTM)),
        {"convs.0": COL, "convs.2": ROW, "lstm": COL, "last.0": ROW},
    ),
}  # fmt: skip


# Each wraps a model, and says which of how many parts of the batch this process takes.


def alone(model, task):
    return model, 0, 1


def ddp(model, task):
    return DistributedDataParallel(model), dist.get_rank(), dist.get_world_size()


def fsdp(model, task, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in task.shards(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), mesh.get_local_rank(), mesh.size()


def tp(model, task, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, task.plan), 0, 1


def tp_fsdp(model, task):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return fsdp(tp(model, task, mesh["tp"])[0], task, mesh["dp"])


ENGINES = {"ddp": ddp, "fsdp": fsdp, "tp": tp, "tp_fsdp": tp_fsdp}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
DENSE = {"gradual", "threshold"}


def weights(model):
    return [module for module in model.modules() if isinstance(module, BlockSparseModule)]


def train(model, task, wrap, optimizer, method):
    wrapped, rank, ranks = wrap(model, task)
    optimizer = OPTIMIZERS[optimizer](wrapped.parameters())
    method = task.methods[method](model, optimizer)
    for x in task.x[:-1].chunk(ranks, 1)[rank]:
        optimizer.zero_grad()
        (wrapped(x) - task.target(x)).square().mean().backward()
        optimizer.step()
        if method and not method.finished:
            method.step()
            if hasattr(method, "finish") and method.calls == task.finish:
                method.finish()
                wrapped = DistributedDataParallel(model) if wrap is ddp else wrapped
    return wrapped(task.x[-1])


def compare(name, engine, optimizer, method):
    task = TASKS[name]
    make = task.dense if method in DENSE else task.sparse
    one, several = make(), make()
    before = [each.layout for each in weights(one)]
    y = train(one, task, alone, optimizer, method)
    torch.testing.assert_close(train(several, task, ENGINES[engine], optimizer, method), y, rtol=1e-6, atol=1e-9)
    reshard(several)
    assert len(weights(one)) == {"linear": 3 + (method in DENSE), "mixed": 5}[name]
    changed = sum(each.layout != old for each, old in zip(weights(one), before, strict=False))
    least = {"none": 0, "rigl": 1}.get(method, 1 if name == "linear" else 5)
    assert changed >= least or (before == [] and any(each.layout.density < 1 for each in weights(one)))
    for mine, theirs in zip(weights(one), weights(several), strict=True):
        stored = handle_of(theirs)
        assert stored.layout == mine.layout
        if mine.used is None:
            assert stored.used is None
        else:
            assert all(map(torch.equal, stored.used, mine.used))
        here = torch.from_numpy(stored.local_positions)
        torch.testing.assert_close(stored.local, mine.values.detach()[here], rtol=1e-6, atol=1e-9)
        if engine == "fsdp":
            assert len(here) <= -(-stored.layout.nnz // dist.get_world_size())


COUNTS = {"ddp": 2, "fsdp": 4, "tp": 4, "tp_fsdp": 4}


OFTEN = {
    "linear": {("ddp", "set"), ("ddp", "threshold"), ("fsdp", "gradual"), ("tp", "set"),
               ("ddp", "ties"), ("fsdp", "ties"), ("tp", "ties")},
    "mixed": {("ddp", "gradual"), ("fsdp", "set"), ("tp", "blocks"), ("tp_fsdp", "rigl")},
}  # fmt: skip


def cases():
    """Every method by every engine, optimizer and number of processes; each method, and each engine, often."""
    for name, task in TASKS.items():
        for count, engine, method, optimizer in itertools.product((2, 4), ENGINES, task.methods, OPTIMIZERS):
            if (engine == "tp_fsdp" and count == 2) or (engine.startswith("tp") and method in DENSE):
                continue  # two dimensions; layers that are block-sparse
            if engine == "ddp" and method == "blocks":
                continue  # the model is to be wrapped again
            if name == "mixed" and (count != COUNTS[engine] or optimizer == "sgd"):
                continue
            often = (engine, method) in OFTEN[name] and optimizer == "adamw"
            often = often and count in (4 if engine == "tp_fsdp" else 2, COUNTS[engine] if name == "mixed" else 0)
            yield pytest.param(name, count, engine, method, optimizer, marks=() if often else pytest.mark.full)


@pytest.mark.parametrize(("name", "count", "engine", "method", "optimizer"), list(cases()))
def test_as_one_process(processes, name, count, engine, method, optimizer):
    processes(count)(compare, name, engine, optimizer, method)


def near(got, wanted):
    assert got.dtype == torch.float32
    assert got.shape == wanted.shape
    assert (got - wanted).double().norm() <= 1e-6 * wanted.double().norm()


def one_step(engine):
    task = TASKS["mixed"]
    one, several = mixed().float(), mixed().float()
    outputs = []
    for model, wrap in ((one, alone), (several, ENGINES[engine])):
        wrapped, rank, ranks = wrap(model, task)
        y = wrapped(task.x[0].float().chunk(ranks)[rank])
        (y - 1).square().mean().backward()
        outputs.append(y.detach())
    near(outputs[1], outputs[0].chunk(ranks)[rank])
    for mine, theirs in zip(one.modules(), several.modules(), strict=True):
        cut = getattr(theirs, "sharded_parameters", {})
        for name, parameter in mine.named_parameters(recurse=False):
            wanted, got = parameter.grad, getattr(theirs, name).grad
            if name == "values":
                got = got.to_local() if is_dtensor(got) else got
                near(got, wanted[torch.from_numpy(handle_of(theirs).local_positions)])
            else:
                got = got.full_tensor() if is_dtensor(got) else got
                near(got, wanted[torch.from_numpy(cut[name].local_indices)] if name in cut else wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_step_in_float32(processes, engine):
    processes(COUNTS[engine])(one_step, engine)
