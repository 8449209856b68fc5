"""FSDP2: each process stores a part of the blocks and of the optimizer's state; SET moves blocks between processes.

Run: torchrun --nproc-per-node 2 examples/distributed/fsdp2.py [--steps 300]
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import blocksparse as bs
from blocksparse.distributed import check_layouts

CLASSES, FEATURES, BATCH = 10, 64, 128


def network() -> nn.Sequential:
    """Build the net, which is the same on each process: PyTorch's generator draws layouts and values."""
    torch.manual_seed(0)
    return nn.Sequential(
        bs.nn.Linear(FEATURES, 512, density=0.1, block_size=16, activation="relu"),
        bs.nn.Linear(512, 512, density=0.1, block_size=16, activation="relu"),
        nn.Linear(512, CLASSES),
    )


def batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's part of a batch of noisy points around ten centers."""
    centers = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + step)
    target = torch.randint(CLASSES, (BATCH,), generator=generator)
    x = centers[target] + 1.5 * torch.randn(BATCH, FEATURES, generator=generator)
    return x.chunk(ranks)[rank], target.chunk(ranks)[rank]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")  # "nccl" on GPUs
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))  # "cuda" on GPUs
    model = network()
    check_layouts(model)
    for layer in model[:2]:  # each layer is gathered by itself
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    method = bs.sparsity.SET(model, optimizer, zeta=0.3, every=50, seed=0)
    for step in range(steps):
        x, target = batch(step, rank, ranks)
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        method.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    x, target = batch(steps, rank, ranks)
    with torch.no_grad():
        correct = (model(x).argmax(1) == target).sum()
    model.reshard()  # the root keeps its gathered parameters after a forward pass without a backward pass
    dist.all_reduce(correct)
    if rank == 0:
        local, total = len(model[1].values.to_local()), model[1].layout.nnz
        print(f"accuracy {correct.item() / BATCH:.2f}, {local} of {total} blocks in this process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
