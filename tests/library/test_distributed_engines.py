"""Every method with every engine of several processes gives what one process gives on the same global batch.

The task `linear` has linear layers; `mixed` has convolutions and an LSTM, with padded sizes and parts without a block.
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
    # Rows of blocks lie across two processes, and are padded.
    first = nn.Sequential(nn.Linear(30, 44), nn.GELU(), nn.Linear(44, 32))
    return nn.Sequential(first, nn.Sequential(nn.ReLU(), nn.Linear(32, 18, bias=False)), nn.Linear(18, 10)).double()


class Mixed(nn.Module):
    """Convolutions on images, whose columns are the sequence of an LSTM."""

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


def thresholds(model):
    """Return thresholds that end among the largest initial weights of blocks."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {f"{name}.weight": 0.4 * module.in_features**-0.5 for name, module in layers.items()}


@torch.no_grad()
def without_gradients(model):
    """Zero the last weight, so that the first gradients of the others are 0 and all of their blocks tie."""
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
        model, optimizer, thresholds(model), begin=2, ramp=10, end=35, every=5, block_size=(8, 4)
    ),
    "blocks": lambda model, optimizer: bs.sparsity.GradualBlockPruning(
        model, optimizer, 0.1, begin=5, end=35, every=10
    ),
    "rigl": lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=45, every=6),
    "fan_in": lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=45, every=6, constant_fan_in=True),
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


# Each wraps a model; returns it with the rank and the number of ranks over which the batch is split.


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
    "clock": lambda parameters: bs.sparsity.BlockClock(torch.optim.AdamW(parameters, lr=0.01), warmup=5),
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
    single, several = make(), make()
    before = [each.layout for each in weights(single)]
    y = train(single, task, alone, optimizer, method)
    torch.testing.assert_close(train(several, task, ENGINES[engine], optimizer, method), y, rtol=1e-6, atol=1e-9)
    reshard(several)
    assert len(weights(single)) == {"linear": 3 + (method in DENSE), "mixed": 5}[name]
    changed = sum(each.layout != old for each, old in zip(weights(single), before, strict=False))
    least = {"none": 0, "rigl": 1, "fan_in": 1}.get(method, 1 if name == "linear" else 5)
    assert changed >= least or (before == [] and any(each.layout.density < 1 for each in weights(single)))
    for mine, theirs in zip(weights(single), weights(several), strict=True):
        handle = handle_of(theirs)
        assert handle.layout == mine.layout
        if mine.used is None:
            assert handle.used is None
        else:
            assert all(map(torch.equal, handle.used, mine.used))
        local = torch.from_numpy(handle.local_positions)
        torch.testing.assert_close(handle.local, mine.values.detach()[local], rtol=1e-6, atol=1e-9)
        if engine == "fsdp":
            assert len(local) <= -(-handle.layout.nnz // dist.get_world_size())


# The number of processes in tests that use one number for each engine.
COUNTS = {"ddp": 2, "fsdp": 4, "tp": 4, "tp_fsdp": 4}


# Cases that always run, with AdamW or with a clock; the others are `full`.
WITH_CLOCK = {("ddp", "set"), ("fsdp", "rigl"), ("tp", "set")}
USUAL = {
    "linear": {("ddp", "set"), ("ddp", "threshold"), ("fsdp", "gradual"), ("tp", "set"),
               ("tp", "fan_in"), ("ddp", "ties"), ("fsdp", "ties"), ("tp", "ties")},
    "mixed": {("ddp", "gradual"), ("fsdp", "set"), ("tp", "blocks"), ("tp_fsdp", "rigl")},
}  # fmt: skip


def cases():
    """Yield every method with every engine, optimizer and number of processes."""
    for name, task in TASKS.items():
        for count, engine, method, optimizer in itertools.product((2, 4), ENGINES, task.methods, OPTIMIZERS):
            if (engine == "tp_fsdp" and count == 2) or (engine.startswith("tp") and method in DENSE):
                continue  # it needs two dimensions; tensor parallelism needs block-sparse layers
            if engine == "ddp" and method == "blocks":
                continue  # the number of blocks changes, so the model would have to be wrapped again
            if name == "mixed" and (count != COUNTS[engine] or optimizer == "sgd"):
                continue
            of_optimizer = {"adamw": USUAL[name], "clock": WITH_CLOCK if name == "linear" else set()}
            usual = (engine, method) in of_optimizer.get(optimizer, ()) and (name == "mixed" or count == 2)
            yield pytest.param(name, count, engine, method, optimizer, marks=() if usual else pytest.mark.full)


@pytest.mark.parametrize(("name", "count", "engine", "method", "optimizer"), list(cases()))
def test_training_equals_one_process(processes, name, count, engine, method, optimizer):
    processes(count)(compare, name, engine, optimizer, method)


def near(actual, expected):
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    assert (actual - expected).double().norm() <= 1e-6 * expected.double().norm()


def one_step(engine):
    task = TASKS["mixed"]
    single, several = mixed().float(), mixed().float()
    outputs = []
    for model, wrap in ((single, alone), (several, ENGINES[engine])):
        wrapped, rank, ranks = wrap(model, task)
        y = wrapped(task.x[0].float().chunk(ranks)[rank])
        (y - 1).square().mean().backward()
        outputs.append(y.detach())
    near(outputs[1], outputs[0].chunk(ranks)[rank])
    for mine, theirs in zip(single.modules(), several.modules(), strict=True):
        shardings = getattr(theirs, "sharded_parameters", {})
        for name, parameter in mine.named_parameters(recurse=False):
            expected, actual = parameter.grad, getattr(theirs, name).grad
            if name == "values":
                actual = actual.to_local() if is_dtensor(actual) else actual
                near(actual, expected[torch.from_numpy(handle_of(theirs).local_positions)])
            else:
                actual = actual.full_tensor() if is_dtensor(actual) else actual
                near(
                    actual, expected[torch.from_numpy(shardings[name].local_indices)] if name in shardings else expected
                )


@pytest.mark.parametrize("engine", ENGINES)
def test_one_step_in_float32(processes, engine):
    processes(COUNTS[engine])(one_step, engine)
