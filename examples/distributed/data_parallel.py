"""Data parallel: each process has the whole net and a part of each batch; SET changes all layouts in the same way.

Run: torchrun --nproc-per-node 2 examples/distributed/data_parallel.py [--steps 300]
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def train(steps: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    check_layouts(model)
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
    correct = (model(x).argmax(1) == target).sum()
    dist.all_reduce(correct)
    if rank == 0:
        layer = model.module[1]
        print(f"accuracy {correct.item() / BATCH:.2f}, {layer.layout.nnz} blocks, all of them in each process")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")  # "nccl" on GPUs
    train(steps)
    # A model in DistributedDataParallel that outlives the group may wait for it for ever, so `train` owns the model.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
