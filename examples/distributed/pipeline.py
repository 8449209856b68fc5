"""A pipeline of block-sparse stages with about equally many blocks, whose layouts evolve.

Run: torchrun --nproc-per-node 2 examples/distributed/pipeline.py [--steps 50] [--schedule 1f1b]

Each process builds and stores its own layers only. The losses are those of one process.
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
    """Return the layouts of all layers: they are small, so each process can draw them all."""
    shapes = zip(FEATURES[1:], FEATURES[:-1], strict=True)
    return [
        bs.patterns.random(shape, block_size=16, density=density, seed=layer)
        for layer, (shape, density) in enumerate(zip(shapes, DENSITY, strict=True))
    ]


def stage(first: int, last: int) -> nn.Sequential:
    """Build the layers [first, last). Each has its own seed, so its values do not depend on the cuts."""
    layers = []
    for index, layout in list(enumerate(layouts()))[first:last]:
        torch.manual_seed(index)
        out_features, in_features = layout.shape
        activation = "relu" if index < len(DENSITY) - 1 else None
        layer = bs.nn.Linear(in_features, out_features, layout=layout, activation=activation)
        layer.values.data *= 6**0.5  # He et al.'s range: with PyTorch's, activations vanish in eight layers
        layers.append(layer)
    return nn.Sequential(*layers)


def evolution(part: nn.Sequential, first: int, optimizer: torch.optim.Optimizer) -> list[bs.sparsity.SET]:
    """Return a method for each layer, seeded by its place in the net, so that draws do not depend on the cuts."""
    return [bs.sparsity.SET(layer, optimizer, zeta=0.1, every=5, seed=first + i) for i, layer in enumerate(part)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one of four batches `[BATCH, 64]` and its classes: the index of the largest sum of four features."""
    x = torch.randn(BATCH, FEATURES[0], generator=torch.Generator().manual_seed(step % 4))
    return x, x.view(BATCH, FEATURES[-1], -1).sum(2).argmax(1)


def train(steps: int, schedule: str = "1f1b") -> tuple[nn.Sequential, list[float]]:
    """Train; return this process's stage and, on the last stage, the loss of each step."""
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
        microbatch_losses: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        run.step(*inputs, target=target if rank == stages - 1 else None, losses=microbatch_losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        for method in methods:
            method.step()
        if microbatch_losses:
            losses.append(torch.stack(microbatch_losses).mean().item())
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
