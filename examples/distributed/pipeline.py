"""A pipeline of block-sparse stages, cut so that each stores about as many blocks, whose layouts evolve.

Run: torchrun --nproc-per-node 2 examples/distributed/pipeline.py [--steps 50] [--schedule 1f1b]

Each process builds and stores its own layers only. The numbers are those of one process.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import blocksparse as bs
from blocksparse.distributed import balanced_cuts

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
FEATURES = [64, 256, 256, 256, 256, 256, 1024, 256, 16]
DENSITY = [0.5, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.5]
BATCH, MICROBATCHES, LEARNING_RATE = 64, 8, 1e-3


def layouts() -> list[bs.BlockLayout]:
    """Of every layer: a few numbers for each block, which all processes can draw."""
    shapes = zip(FEATURES[1:], FEATURES[:-1], strict=True)
    return [
        bs.patterns.random(shape, block_size=16, density=density, seed=layer)
        for layer, (shape, density) in enumerate(zip(shapes, DENSITY, strict=True))
    ]


def stage(first: int, last: int) -> nn.Sequential:
    """The layers from `first` to before `last`. Each is drawn by its own seed, whatever process it lies in."""
    layers = []
    for index, layout in list(enumerate(layouts()))[first:last]:
        torch.manual_seed(index)
        out_features, in_features = layout.shape
        activation = "relu" if index < len(DENSITY) - 1 else None
        layer = bs.nn.Linear(in_features, out_features, layout=layout, activation=activation)
        layer.values.data *= 6**0.5  # as He et al. draw them: else little gets through eight layers
        layers.append(layer)
    return nn.Sequential(*layers)


def evolution(part: nn.Sequential, first: int, optimizer: torch.optim.Optimizer) -> list[bs.sparsity.SET]:
    """A method for each layer, seeded by its place in the net: one for all would number the layers of its process."""
    return [bs.sparsity.SET(layer, optimizer, zeta=0.1, every=5, seed=first + i) for i, layer in enumerate(part)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of four batches of inputs, `[BATCH, 64]`, and their classes: which sum of four features is the largest."""
    x = torch.randn(BATCH, FEATURES[0], generator=torch.Generator().manual_seed(step % 4))
    return x, x.view(BATCH, FEATURES[-1], -1).sum(2).argmax(1)


def train(steps: int, schedule: str = "1f1b") -> tuple[nn.Sequential, list[float]]:
    """This process's stage after `steps` steps, and, on the last one, the loss of each step."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    cuts = balanced_cuts([layout.nnz for layout in layouts()], stages)
    part = stage(cuts[rank], cuts[rank + 1])
    optimizer = torch.optim.Adam(part.parameters(), lr=LEARNING_RATE)
    methods = evolution(part, cuts[rank], optimizer)
    run = SCHEDULES[schedule](
        PipelineStage(part, rank, stages, torch.device("cpu")), MICROBATCHES, loss_fn=F.cross_entropy
    )
    losses = []
    for step in range(steps):
        x, target = batch(step)
        of_microbatches: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        run.step(*inputs, target=target if rank == stages - 1 else None, losses=of_microbatches, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        for method in methods:
            method.step()
        if of_microbatches:
            losses.append(torch.stack(of_microbatches).mean().item())
    return part, losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    part, losses = train(options.steps, options.schedule)
    stored = sum(layer.layout.nnz for layer in part)
    print(f"stage {dist.get_rank()}: {len(part)} layers, {stored} blocks", flush=True)
    dist.barrier()
    if losses:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
