"""Engines x methods with convolutions and an LSTM, of sizes that blocks pad, parts without a block; float32."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel
from blocksparse.nn.module import BlockSparseModule
from blocksparse.surgery.fsdp import is_dtensor, reshard
from blocksparse.surgery.stored import Stored

STEPS, BATCH = 9, 8
X = torch.randn(STEPS + 1, BATCH, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


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


def sparse():
    linear = {"density": 0.5, "block_size": (2, 4)}
    conv, lstm = {"density": 0.5, "block_size": 4}, {"density": 0.4, "block_size": (2, 4)}
    return Mixed(bs.nn, conv, linear, lstm, 22).double()


def dense():
    return Mixed(nn, {}, {}, {}, 24).double()


def ddp(model):
    return DistributedDataParallel(model), dist.get_rank(), dist.get_world_size()


def fsdp(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.convs, mesh=mesh)
    if not isinstance(model.lstm, nn.LSTM):
        fully_shard(model.lstm, mesh=mesh)
    return fully_shard(model, mesh=mesh), mesh.get_local_rank(), mesh.size()


def tp(model, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    row, col = RowwiseParallel(), ColwiseParallel()
    return parallelize_module(model, mesh, {"convs.0": col, "convs.2": row, "lstm": col, "last.0": row}), 0, 1


def tp_fsdp(model):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return fsdp(tp(model, mesh["tp"])[0], mesh["dp"])


def alone(model):
    return model, 0, 1


ENGINES = {"ddp": ddp, "fsdp": fsdp, "tp": tp, "tp_fsdp": tp_fsdp}
METHODS = {
    "set": lambda model, optimizer: bs.sparsity.SET(model, optimizer, every=3),
    "rigl": lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=9, every=3, alpha=0.9, skip="lstm"),
    "blocks": lambda model, optimizer: bs.sparsity.GradualBlockPruning(model, optimizer, 0.2, begin=2, end=6, every=2),
    "gradual": lambda model, optimizer: bs.sparsity.GradualPruning(
        model, optimizer, 0.3, begin=2, end=6, every=2, block_size=(8, 4)
    ),
}


def train(model, wrap, method):
    wrapped, rank, ranks = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    method = METHODS[method](model, optimizer)
    for x in X[:STEPS].chunk(ranks, 1)[rank]:
        optimizer.zero_grad()
        (wrapped(x) - 1).square().mean().backward()
        optimizer.step()
        if not method.finished:
            method.step()
            if isinstance(method, bs.sparsity.GradualPruning) and method.calls == 6:
                method.finish()
                wrapped = DistributedDataParallel(model) if wrap is ddp else wrapped
    return wrapped(X[-1])


def weights(model):
    return [module for module in model.modules() if isinstance(module, BlockSparseModule)]


def trained(engine, method):
    make = dense if method == "gradual" else sparse
    one, several = make(), make()
    before = [each.layout for each in weights(one)]
    y = train(one, alone, method)
    torch.testing.assert_close(train(several, ENGINES[engine], method), y, rtol=1e-6, atol=1e-9)
    reshard(several)
    changed = [mine.layout != old for mine, old in zip(weights(one), before, strict=False)]
    assert len(weights(one)) == 5
    assert sum(changed) >= {"gradual": 0, "rigl": 1}.get(method, 5)
    for mine, theirs in zip(weights(one), weights(several), strict=True):
        stored = Stored(theirs)
        assert stored.layout == mine.layout
        if mine.used is None:
            assert stored.used is None
        else:
            assert all(map(torch.equal, stored.used, mine.used))
        wanted = mine.values.detach()[torch.from_numpy(stored.here)]
        torch.testing.assert_close(stored.local, wanted, rtol=1e-6, atol=1e-9)


COUNTS = [("ddp", 2), ("fsdp", 4), ("tp", 4), ("tp_fsdp", 4)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("engine", "count"), COUNTS)
def test_as_one_process(processes, count, engine, method):
    if engine.startswith("tp") and method == "gradual":
        pytest.skip("layers that are block-sparse")
    if engine == "ddp" and method == "blocks":
        pytest.skip("the model is to be wrapped again")
    processes(count)(trained, engine, method)


def near(got, wanted):
    assert got.dtype == torch.float32
    assert got.shape == wanted.shape
    assert (got - wanted).double().norm() <= 1e-6 * wanted.double().norm()


def one_step(engine):
    one, several = sparse().float(), sparse().float()
    outputs = []
    for model, wrap in ((one, alone), (several, ENGINES[engine])):
        wrapped, rank, ranks = wrap(model)
        y = wrapped(X[0].float().chunk(ranks)[rank])
        (y - 1).square().mean().backward()
        outputs.append(y.detach())
    near(outputs[1], outputs[0].chunk(ranks)[rank])
    for mine, theirs in zip(one.modules(), several.modules(), strict=True):
        cut = getattr(theirs, "cut_parameters", {})
        for name, parameter in mine.named_parameters(recurse=False):
            wanted, got = parameter.grad, getattr(theirs, name).grad
            if name == "values":
                got = got.to_local() if is_dtensor(got) else got
                near(got, wanted[torch.from_numpy(Stored(theirs).here)])
            else:
                got = got.full_tensor() if is_dtensor(got) else got
                near(got, wanted[torch.from_numpy(cut[name].here)] if name in cut else wanted)


@pytest.mark.parametrize(("engine", "count"), COUNTS)
def test_one_step_in_float32(processes, count, engine):
    processes(count)(one_step, engine)
