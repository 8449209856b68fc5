"""Train a small network with block-sparse hidden layers, with torch.optim.

Run: python examples/linear_layer.py [steps]
"""

import sys

import torch
from torch import nn

import blocksparse as bs

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
torch.manual_seed(0)

# Store a quarter of the blocks, except in the small last layer.
model = nn.Sequential(
    bs.nn.Linear(64, 512, density=0.25, block_size=16, activation="relu"),
    bs.nn.Linear(512, 512, density=0.25, block_size=16, activation="relu"),
    nn.Linear(512, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
print(model)

direction = torch.randn(64, 1) / 8
for step in range(steps):
    x = torch.randn(256, 64)
    loss = nn.functional.mse_loss(model(x), torch.sin(x @ direction))
    if step == 0:
        first = loss.item()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

print(f"loss {first:.4f} -> {loss.item():.4f} in {steps} steps")
