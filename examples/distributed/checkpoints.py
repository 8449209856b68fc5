"""Write a checkpoint on two processes, and load it on any number of processes into a model with other layouts.

Run: torchrun --nproc-per-node 2 examples/distributed/checkpoints.py train FOLDER
     torchrun --nproc-per-node 4 examples/distributed/checkpoints.py resume FOLDER
     python examples/distributed/checkpoints.py resume FOLDER

`train` takes 50 steps with SET and saves. `resume` starts with other layouts, loads, and takes 10 more steps. Under
torchrun, FSDP2 shards the values. The loss after loading equals the loss at saving, on any number of processes.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import blocksparse as bs
from blocksparse.distributed import load_checkpoint, save_checkpoint

BATCH = 32


def network(density: float, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    sparse = {"density": density, "block_size": 8, "activation": "relu"}
    return nn.Sequential(bs.nn.Linear(64, 256, **sparse), bs.nn.Linear(256, 256, **sparse), nn.Linear(256, 8))


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    """Return the loss on this process's rows of a batch, whose size does not depend on the number of processes."""
    x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step % 4))
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = x[rank::count]
    return nn.functional.cross_entropy(net(mine), mine.view(len(mine), 8, 8).sum(2).argmax(1))


def mean_loss(net: nn.Module) -> float:
    with torch.no_grad():
        loss = loss_of(net, 0)
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("train", "resume"))
    parser.add_argument("folder")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    train = options.command == "train"
    net = network(0.25 if train else 0.1, seed=0 if train else 1)
    if dist.is_initialized():
        fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    begin = 0 if train else load_checkpoint(net, options.folder, optimizer=optimizer)["step"]
    first = mean_loss(net)
    # A new method starts with new random numbers: the step as seed keeps it from repeating those of the first run.
    method = bs.sparsity.SET(net, optimizer, zeta=0.1, every=5, seed=begin)
    end = begin + (50 if train else 10)
    for step in range(begin, end):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()
    last = mean_loss(net)
    if train:
        save_checkpoint(net, options.folder, optimizer=optimizer, about={"step": end})
    if not dist.is_initialized() or dist.get_rank() == 0:
        blocks = sum(layer.layout.nnz for layer in net[:2])
        print(f"{blocks} blocks, step {end}, loss {first:.4f} -> {last:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
