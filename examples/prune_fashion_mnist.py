"""Prune a dense MLP to block-sparse layers during training on Fashion-MNIST, by one method or several.

Run: python examples/prune_fashion_mnist.py FOLDER --method gradual l0 [--density 0.1] [--epochs 10] [--json FILE]

FOLDER holds the four idx files of https://github.com/zalandoresearch/fashion-mnist, as published. Methods: dense,
oneshot, gradual, threshold, group_lasso, l0, movement. The first two thirds of the steps search the pattern with
dense weights; the others train the blocks that are left. --density sets their fraction, or --strength for threshold,
group_lasso and l0. With --inputs the blocks are input features: the network finds the pixels that it needs.
"""

import argparse
import copy
import json
import time

import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse.measure import alternate
from blocksparse_lab.data import idx

METHODS = ("dense", "oneshot", "gradual", "threshold", "group_lasso", "l0", "movement")
STRENGTHS = {"threshold": 0.9, "group_lasso": 4.0, "l0": 0.3}

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--method", choices=METHODS, nargs="+", default=["gradual"])
parser.add_argument("--density", type=float, default=0.1, help="fraction of the blocks at the end")
parser.add_argument("--strength", type=float, help="strength of threshold, group_lasso and l0, instead of a density")
parser.add_argument("--inputs", action="store_true", help="prune inputs instead of blocks of all layers")
parser.add_argument("--block", type=int, default=32)
parser.add_argument("--hidden", type=int, default=1024, help="neurons of each of two layers")
parser.add_argument("--epochs", type=float, default=10)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", help="file for the results")
options = parser.parse_args()


def flat(pixels):
    return (pixels.flatten(1).float() / 255 - 0.286) / 0.353


data = idx.mnist(options.folder)
x, labels = flat(data.train), data.train_labels
test, test_labels = flat(data.test), data.test_labels
inputs, hidden = x.shape[1], options.hidden
steps = max(6, int(options.epochs * len(x) / options.batch))
search = 2 * steps // 3
every = max(1, search // 40)


def make_method(name, model, optimizer):
    """Return the method, whose `step` follows each step of the optimizer; None for dense."""
    blocks = {"block_size": options.block, "skip": "4"}
    if options.inputs:
        blocks = {"block_size": (hidden, 1), "skip": ("2", "4")}
    usual = 0.07 if options.inputs and name == "l0" else STRENGTHS.get(name)
    strength = usual if options.strength is None else options.strength
    slowly = {"begin": search // 4, "end": search, "every": every}
    if name == "oneshot":
        return bs.sparsity.GradualPruning(model, optimizer, options.density, begin=search - 1, end=search, **blocks)
    if name == "gradual":
        return bs.sparsity.GradualPruning(model, optimizer, options.density, **slowly, **blocks)
    if name == "threshold":
        # The paper computes q from a trained dense model; here the strength scales that of the untrained one.
        q = {weight: strength * most for weight, most in bs.sparsity.percentiles(model).items()}
        ramp = {"begin": search // 10, "ramp": search // 2, "end": search, "every": every}
        return bs.sparsity.ThresholdPruning(model, optimizer, q, **ramp, **blocks)
    if name == "group_lasso":
        return bs.sparsity.GroupLasso(model, optimizer, strength, **blocks)
    if name == "l0":
        return bs.sparsity.L0Gates(model, optimizer, strength, samples=len(x), lr=10 * options.lr, **blocks)
    if name == "movement":
        return bs.sparsity.MovementPruning(model, optimizer, options.density, lr=10 * options.lr, **slowly, **blocks)
    return None


def train(name):
    """Train a model by the named method, and return its accuracy, density and speed."""
    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )
    dense = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    method = make_method(name, model, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps + 1, pct_start=0.05)
    order = torch.cat([torch.randperm(len(x)) for _ in range(steps * options.batch // len(x) + 1)])
    start = time.perf_counter()
    for step, rows in enumerate(order.split(options.batch)[:steps]):
        loss = F.cross_entropy(model(x[rows]), labels[rows])
        if name == "l0" and step < search:
            loss = loss + method.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if method is not None and step < search:
            method.step()
            if step == search - 1:
                model = method.finish()
        if step % 200 == 0:
            density = f", density {method.density:.3f}" if method is not None else ""
            print(f"step {step}: loss {loss.item():.3f}{density}, {time.perf_counter() - start:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        right = (model(test).argmax(1) == test_labels).sum().item()
        times = alternate({"this": lambda: model(x[:64]), "dense": lambda: dense(x[:64])}, budget=0.5)
    result = {
        "accuracy": right / len(test),
        "density": 1.0 if method is None else method.density,
        "speed_up": times.ratio("dense", "this").median,
        "seconds": seconds,
    }
    if options.inputs and method is not None:
        result["inputs"] = method.layouts()["0.weight"].nnz
    return result


results = {}
for name in options.method:
    results[name] = found = train(name)
    used = f"{found['inputs']} of {inputs} inputs" if "inputs" in found else f"density {found['density']:.4f}"
    print(
        f"{name}: test accuracy {found['accuracy']:.4f}, {used}, {found['speed_up']:.2f} times as fast as dense "
        f"(64 images), trained in {found['seconds']:.0f} s",
        flush=True,
    )

if options.json:
    from blocksparse_lab.machine import machine

    settings = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
    content = {"what": "MLP on Fashion-MNIST, made sparse", "machine": machine(), "settings": settings}
    with open(options.json, "w") as file:
        file.write(json.dumps(content | {"results": results}, indent=1) + "\n")
