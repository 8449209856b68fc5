"""Small dense models and the methods that make them block-sparse, for the one contract of these methods."""

from __future__ import annotations

import torch
from torch import nn

import blocksparse as bs


class Recurrent(nn.Module):
    """Sizes that are no multiples of the block."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 10, num_layers=2, bidirectional=True), nn.Linear(20, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(0))


def mlp():
    return nn.Sequential(nn.Linear(21, 18), nn.ReLU(), nn.Linear(18, 3))


def convolutions():
    layers = nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(9, 5, 2), nn.Flatten(), nn.Linear(125, 3)
    return nn.Sequential(*layers)


MODELS = {
    "mlp": (mlp, lambda: torch.randn(32, 21, dtype=torch.float64)),
    "conv": (convolutions, lambda: torch.randn(16, 6, 4, 4, dtype=torch.float64)),
    "lstm": (Recurrent, lambda: torch.randn(4, 16, 6, dtype=torch.float64)),
}


def threshold(model, optimizer):
    q = bs.sparsity.percentiles(model, 60)
    steps = {"begin": 1, "ramp": 4, "end": 10, "every": 2}
    return bs.sparsity.ThresholdPruning(model, optimizer, q, **steps, block_size=(4, 2))


def gates(model, optimizer):
    """L0 gates, some closed from the start: the contract is not about what a few steps learn."""
    method = bs.sparsity.L0Gates(
        model, optimizer, 0.01, samples=50, weight_decay=0.1, closed=0.9, lr=0.01, block_size=4
    )
    for log_alpha in method.parameters():
        log_alpha.data.uniform_(-4, 2)
    return method


STEPS = 12
METHODS = {
    "gradual": lambda m, o: bs.sparsity.GradualPruning(m, o, 0.4, begin=1, end=10, every=2, block_size=4),
    "gradual-layer": lambda m, o: bs.sparsity.GradualPruning(
        m, o, 0.4, begin=1, end=10, every=2, block_size=(2, 4), norm="mean", scope="layer"
    ),
    "threshold": threshold,
    "proximal": lambda m, o: bs.sparsity.GroupLasso(m, o, 2.1, block_size=(2, 3)),
    "penalty": lambda m, o: bs.sparsity.GroupLasso(m, o, 0.0005, mode="penalty", threshold=0.16, block_size=2),
    "l0": gates,
    "movement": lambda m, o: bs.sparsity.MovementPruning(m, o, 0.4, begin=2, end=10, block_size=4),
}


def start(model: str, method: str):
    """A model in float64, its optimizer, a method, and inputs."""
    torch.manual_seed(0)
    make, inputs = MODELS[model]
    net = make().double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    return net, optimizer, METHODS[method](net, optimizer), inputs()


def train(model, optimizer, method, x, steps=STEPS, after=None):
    """Trains some steps towards the class of the first numbers; returns the losses."""
    labels = (x.transpose(0, 1) if isinstance(model, Recurrent) else x).flatten(1)[:, :3].argmax(1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), labels)
        if method is not None and hasattr(method, "penalty") and getattr(method, "mode", "") != "proximal":
            loss = loss + method.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if method is not None:
            method.step()
            if after is not None:
                after(method)
        losses.append(loss.item())
    return losses
