"""Models and data of the tests of compression."""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from blocksparse.compression import stages
from blocksparse.nn.module import BlockSparseModule


def take_all_as_faster(monkeypatch):
    """Take all layers as faster than dense, and set the seed."""
    monkeypatch.setattr(stages, "keep_faster", lambda model, plan, example: plan)
    monkeypatch.setattr(stages, "densify_slower", lambda model, example, skip: (model, {}))
    torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(32, width), nn.BatchNorm1d(width), nn.Dropout(0.5)
        self.last = nn.Linear(width, 8)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu()))


def trained(model, batches, steps=60):
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for x, y in itertools.islice(itertools.cycle(batches), steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def labelled(count=512, size=32):
    x = torch.randn(count, 32)
    return list(zip(x.split(size), (x @ torch.randn(32, 8)).argmax(1).split(size), strict=True))


def weights_of(model):
    return [module for module in model.modules() if isinstance(module, BlockSparseModule)]


def options(**more):
    return {"density": 0.25, "block_size": 8, "steps": 40, **more}
