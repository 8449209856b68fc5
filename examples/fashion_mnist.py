"""Train a ResNet-18 with block-sparse convolutions on Fashion-MNIST.

Run: python examples/fashion_mnist.py FOLDER [--epochs 1] [--width 64] [--density 0.1] [--json FILE]

FOLDER holds the four idx files of https://github.com/zalandoresearch/fashion-mnist, as published.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F

from blocksparse_lab.data import idx
from blocksparse_lab.models.resnet import ResNet

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--epochs", type=float, default=1)
parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
parser.add_argument("--density", type=float, default=0.1, help="fraction of the blocks; 1 trains the dense network")
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--json", help="file for the results")
options = parser.parse_args()
torch.manual_seed(0)


data = idx.mnist(options.folder)


def batch(images, labels, rows):
    x = (images[rows].float() / 255 - 0.286) / 0.353
    return x.unsqueeze(1).to(memory_format=torch.channels_last), labels[rows]


density = None if options.density == 1 else options.density
model = ResNet(channels=1, width=options.width, density=density).to(memory_format=torch.channels_last)
weights = sum(p.numel() for p in model.parameters())
steps = max(1, int(options.epochs * len(data.train) / options.batch))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)
print(f"{weights:,} parameters, {steps} steps of {options.batch} images")

start = time.perf_counter()
order = torch.cat([torch.randperm(len(data.train)) for _ in range(int(options.epochs) + 1)])
losses = []
for step in range(steps):
    x, labels = batch(data.train, data.train_labels, order[step * options.batch : (step + 1) * options.batch])
    loss = F.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
seconds = time.perf_counter() - start

model.eval()
with torch.no_grad():
    parts = [batch(data.test, data.test_labels, part) for part in torch.arange(len(data.test)).split(500)]
    right = sum((model(x).argmax(1) == labels).sum().item() for x, labels in parts)
accuracy = right / len(data.test)
tail = max(1, min(20, steps // 2))
first, last = sum(losses[:tail]) / tail, sum(losses[-tail:]) / tail
print(f"loss {first:.4f} -> {last:.4f} in {steps} steps, {seconds:.0f} s; test accuracy {accuracy:.4f}")

if options.json:
    from blocksparse_lab.machine import machine

    settings = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
    result = {"parameters": weights, "steps": steps, "seconds": seconds, "loss": [first, last], "accuracy": accuracy}
    content = {"what": "ResNet-18 on Fashion-MNIST", "machine": machine(), "settings": settings, "result": result}
    with open(options.json, "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
