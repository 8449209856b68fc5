"""Use PyTorch's training tools on block-sparse modules whose layouts evolve.

Adam with weight decay, gradient clipping, layer norm, dropout, a learning rate schedule and a running mean of the
parameters come from torch. This library adds the layers, weight norm, the evolution, and the two lines that update the
running mean.

Run: python examples/training_helpers.py [steps]
"""

import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import blocksparse as bs

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
torch.manual_seed(0)

hidden = bs.nn.Linear(512, 512, density=0.1, block_size=16)
model = nn.Sequential(
    bs.nn.Linear(64, 512, density=0.25, block_size=16, activation="relu"),
    nn.LayerNorm(512),
    nn.Dropout(0.1),
    bs.nn.WeightNorm(hidden),  # L2 norm over the inputs of each output
    nn.ReLU(),
    nn.Linear(512, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
# SET replaces a fifth of the blocks; Adam's moments and the running mean follow.
evolve = bs.sparsity.SET(
    model,
    optimizer,
    zeta=0.2,
    every=max(1, steps // 10),
    norm="max",
    on_layout_change=bs.sparsity.sync_ema(model, mean),
)

direction = torch.randn(64, 1) / 8  # of the function to learn


def batch(size=256):
    x = torch.randn(size, 64)
    return x, torch.sin(x @ direction)


def error(network):
    network.eval()
    x, y = held_out
    with torch.no_grad():
        found = nn.functional.mse_loss(network(x), y).item()
    network.train()
    return found


held_out = batch(2048)
before, layout = error(model), hidden.layout
for step in range(steps):
    x, y = batch()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    mean.update_parameters(model)
    if step < 3 * steps // 4:
        evolve.step()

stayed = (layout.mask() & hidden.layout.mask()).sum().item()
strongest = bs.sparsity.block_norms(hidden.values.detach(), "max").max()
print(f"{stayed} of {layout.nnz} blocks are where they were, the largest weight is {strongest:.2f}")
print(f"error {before:.4f} -> {error(model):.4f}, of the running mean {error(mean):.4f} in {steps} steps")
