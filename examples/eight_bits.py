"""Measure the accuracy lost by 8 bits: train a convolutional net and an LSTM on Fashion-MNIST, then quantize them.

Run: python examples/eight_bits.py FOLDER [--epochs 1] [--json FILE]

FOLDER holds the four idx files of https://github.com/zalandoresearch/fashion-mnist, as published. The LSTM reads an
image as 28 rows. Prints the test accuracy before and after, and the fraction of equal predictions.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse_lab.data import idx

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--json", help="file for the results")
options = parser.parse_args()


class Rows(nn.Module):
    """LSTM that classifies images `[n, 1, 28, 28]` by their rows."""

    def __init__(self):
        super().__init__()
        self.lstm = bs.nn.LSTM(28, 256, density=0.25, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        bs.nn.Conv2d(32, 64, 3, padding=1, density=0.5, block_size=16, activation="relu"),
        bs.nn.Conv2d(64, 128, 3, stride=2, padding=1, density=0.25, block_size=16, activation="relu"),
        nn.Flatten(),
        bs.nn.Linear(128 * 7 * 7, 256, density=0.1, activation="relu"),
        nn.Linear(256, 10),
    )


data = idx.mnist(options.folder)


def scaled(images):
    return ((images.float() / 255 - 0.286) / 0.353).unsqueeze(1)


@torch.no_grad()
def choices(model):
    return torch.cat([model(scaled(part)).argmax(1) for part in data.test.split(1000)])


found = {}
for name, make in (("convolutional net", convolutional), ("LSTM", Rows)):
    torch.manual_seed(0)
    model = make()
    steps = max(1, int(options.epochs * len(data.train) / options.batch))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)
    order = torch.cat([torch.randperm(len(data.train)) for _ in range(int(options.epochs) + 1)])
    for rows in order.split(options.batch)[:steps]:
        loss = F.cross_entropy(model(scaled(data.train[rows])), data.train_labels[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    before, after = choices(model), choices(bs.quantize(model))
    before_right, after_right = ((chosen == data.test_labels).double().mean().item() for chosen in (before, after))
    same = (before == after).double().mean().item()
    print(
        f"{name}: test accuracy {before_right:.4f}, in 8 bits {after_right:.4f}, the same choices {same:.4f}",
        flush=True,
    )
    found[name] = {"test_accuracy": before_right, "in_8_bits": after_right, "same_choices": same}
if options.json:
    from blocksparse_lab.machine import machine

    settings = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
    content = {"what": "8 bits on Fashion-MNIST", "machine": machine(), "settings": settings, "results": found}
    with open(options.json, "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
