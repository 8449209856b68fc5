"""FSDP2: uneven shards, mixed precision, accumulation, frozen layers, averages, replicas, memory and refusals."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import blocksparse as bs
from blocksparse.surgery.sharding import is_dtensor, reshard
from blocksparse.surgery.weight_handle import handle_of


def network(density=0.4, features=32):
    torch.manual_seed(0)
    return nn.Sequential(
        bs.nn.Linear(16, features, density=density, block_size=4), nn.ReLU(), bs.nn.Linear(features, 16, block_size=8)
    ).double()


def mesh(*shape, names=None):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def train(model, x, method=None, optimizer=None, accumulate=1, steps=6):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        for i, part in enumerate(x.chunk(accumulate)):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == accumulate - 1)
            model(part).square().mean().div(accumulate).backward()
        optimizer.step()
        if method:
            method.step()


def mine(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def check_same(single, several):
    """Check that the layers of a sharded model have the layouts and values of those of a plain one."""
    for a, b in zip(single, several, strict=True):
        if isinstance(a, bs.nn.Linear):
            handle = handle_of(b)
            assert handle.layout == a.layout
            local = torch.from_numpy(handle.local_positions)
            torch.testing.assert_close(handle.local, a.values.detach()[local], rtol=1e-6, atol=1e-9)


X = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pair(mesh=None):
    """Return a plain and a sharded model, each with its part of the batch and an optimizer."""
    single, several = network(), fully_shard(network(), mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)))
    return [
        (model, x, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True))
        for model, x in ((single, X), (several, mine(X)))
    ]


def uneven():
    """Drop blocks until there are fewer than processes; no number on the way divides evenly. Then grow all again."""
    (single, *_), (several, *_) = models = pair()
    while (nnz := single[0].layout.nnz) > 1:
        for model, x, optimizer in models:
            bs.sparsity.rewire(model[0], range(0, nnz, 2), [], [], optimizer)
            train(model, x, optimizer=optimizer, steps=2)
        check_same(single, several)
    for model, x, optimizer in models:
        rows, cols = np.nonzero(~model[0].layout.mask().numpy())
        new = torch.arange(len(rows) * 16.0).view(-1, 4, 4).double()
        bs.sparsity.rewire(model[0], [], rows, cols, optimizer, new=new / 1e3)
        train(model, x, optimizer=optimizer, steps=2)
    check_same(single, several)


def state_of_new_blocks():
    """Second moments of new blocks start at the mean over all shards, so Adam moves them as one process does."""
    (single, _, optimizer), (several, _, sharded) = models = pair()
    for model, x, own in models:
        train(model, x, bs.sparsity.SET(model, own, init="zeros", skip="2"), own)
        train(model, x, bs.sparsity.RigL(model, own, end=9, every=2, skip="2"), own)
    local = torch.from_numpy(handle_of(several[0]).local_positions)
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        expected, actual = optimizer.state[single[0].values][name], sharded.state[several[0].values][name]
        torch.testing.assert_close(actual.to_local(), expected[local], rtol=1e-6, atol=1e-12)
    check_same(single, several)


def accumulation(method):
    single, several = network(), network()
    single[2].requires_grad_(False)
    several[2].requires_grad_(False)
    fully_shard(several[0], mesh=mesh(), reshard_after_forward=False)
    fully_shard(several, mesh=mesh())
    for model, x in ((single, X), (several, torch.cat([mine(half) for half in X.chunk(2)]))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"end": 9} if method == "RigL" else {}
        evolution = getattr(bs.sparsity, method)(model, optimizer, every=2, skip="2", **settings)
        train(model, x, evolution, optimizer, accumulate=2)
        with torch.no_grad():
            model(x)  # the root keeps its gathered parameters
        for _ in range(2 if method == "SET" else 1):
            evolution.step()
    reshard(several)
    check_same(single, several)


def bf16():
    several = network().float()
    fully_shard(several, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(several.parameters(), lr=0.01)
    for method in (bs.sparsity.SET(several, optimizer, skip="2"), bs.sparsity.RigL(several, optimizer, end=9, every=2)):
        before = several[0].layout
        train(several, mine(X).float(), method, optimizer)
        assert several[0].layout != before
        assert several[0].values.dtype == torch.float32
    return several[0].layout


def replicas():
    """Hybrid sharding: two pairs of processes that each store the weight."""
    (single, *_), (several, *_) = models = pair(mesh(2, 2, names=("replicate", "shard")))
    for model, x, optimizer in models:
        train(model, x, bs.sparsity.RigL(model, optimizer, end=9, every=2, skip="2"), optimizer)
        train(model, x, bs.sparsity.SET(model, optimizer, skip="2"), optimizer)
    check_same(single, several)


def average():
    single, several = network(), network()
    averages = []
    for model, x in ((single, X), (several, mine(X))):
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if model is several:
            fully_shard(model, mesh=mesh())
            fully_shard(ema, mesh=mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = bs.sparsity.sync_ema(model, ema)
        method = bs.sparsity.SET(model, optimizer, skip="2", on_layout_change=sync)
        for _ in range(4):
            train(model, x, method, optimizer, steps=1)
            ema.update_parameters(model)
        averages.append(ema.module)
    check_same(single, several)
    check_same(*averages)
    with pytest.raises(bs.BlockSparseError, match="sharded as the model is"):
        bs.sparsity.sync_ema(single, several)(single[0], torch.arange(single[0].layout.nnz))


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation on plain tensors returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and not is_dtensor(each) and not each.is_meta:
                self.numel = max(self.numel, each.numel())
        return result


def memory():
    """No process has all values, or those of a whole dense weight, while methods work."""
    size, share = 512, 1 / dist.get_world_size() + 0.05
    sparse = fully_shard(nn.Sequential(bs.nn.Linear(size, size, density=0.5, block_size=16)), mesh=mesh())
    dense = fully_shard(nn.Sequential(nn.Linear(size, size)), mesh=mesh())
    for model, make in (
        (sparse, lambda model, optimizer: bs.sparsity.SET(model, optimizer, zeta=0.2)),
        (sparse, lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=9, every=1)),
        (dense, lambda *of: bs.sparsity.GradualPruning(*of, 0.25, begin=0, end=1, every=1, block_size=16)),
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        method, numel = make(model, optimizer), next(model.parameters()).numel()
        train(model, torch.randn(4, size), optimizer=optimizer, steps=1)
        with Largest() as largest:
            assert method.step()
            if model is dense:
                method.finish()
        assert largest.numel <= numel * share
    return dense[0].values.to_local().numel() / (size * size)


def refused():
    dense = fully_shard(nn.Sequential(nn.Linear(16, 16)), mesh=mesh())
    with pytest.raises(bs.BlockSparseError, match=r"0\.weight, which FSDP2 has sharded: use GradualPruning"):
        bs.sparsity.MovementPruning(dense, torch.optim.SGD(dense.parameters()), begin=0, end=9, block_size=4)
    alone = fully_shard(nn.Sequential(fully_shard(nn.Linear(16, 16), mesh=mesh())), mesh=mesh())
    with pytest.raises(bs.BlockSparseError, match=r"0.weight: expected a layer in a module that fully_shard"):
        bs.sparsity.GradualPruning(alone, end=9, block_size=4)
    lstm = fully_shard(nn.Sequential(nn.LSTM(16, 14)), mesh=mesh())
    with pytest.raises(bs.BlockSparseError, match=r"0.bias_ih_l0 would be padded from \[56\] to \[64\]"):
        bs.sparsity.GradualPruning(lstm, end=9, block_size=4)
    bs.sparsity.GradualPruning(lstm, end=9, block_size=2)
    several = network()
    fully_shard(several, mesh=mesh())
    with pytest.raises(bs.BlockSparseError, match="a parameter of this process alone"):
        several[0].set_layout(several[0].layout, torch.zeros(several[0].values.shape, dtype=torch.float64))
    with torch.no_grad():
        several(X)
    with pytest.raises(bs.BlockSparseError, match=r"call `reshard\(\)`"):
        bs.sparsity.rewire(several[0], [0], [], [])
    several.reshard()
    bs.sparsity.rewire(several[0], [0], [], [])


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", [uneven, state_of_new_blocks, bf16, average, refused], ids=lambda case: case.__name__)
def test_fsdp2(processes, count, case):
    results = processes(count)(case)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("count", [2, 4])
def test_no_process_has_a_whole_weight(processes, count):
    assert max(processes(count)(memory)) <= 0.25 * (1 / count + 0.05)


@pytest.mark.parametrize("method", ["SET", "RigL"])
def test_accumulation_frozen_layers_and_gathered_roots(processes, method):
    processes(2)(accumulation, method)


def test_replicas_of_shards(processes):
    processes(4)(replicas)
