"""Measure the memory of processes from within."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocksparse import patterns
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.ops.linear import linear


def process_bytes(name: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise BlockSparseError.expected("/proc/self/status", f"a line {name}", "none")


def reset_peak() -> None:
    """Reset the high-water mark to the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def run_in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own; arguments and result go through JSON.

    Raises:
        BlockSparseError: the process failed; the message has the last line of its stderr.
    """
    module, name = function.__module__, function.__name__
    program = f"import json, sys; from {module} import {name}; print(json.dumps({name}(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", program, json.dumps(arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise BlockSparseError.expected(name, "a run to its end", last_line)
    return json.loads(done.stdout.splitlines()[-1])


def train_step(layout: BlockLayout, x: Tensor, values: Tensor, grad: Tensor) -> None:
    """Run forward and backward of the linear product."""
    x, values = x.requires_grad_(), values.requires_grad_()
    torch.autograd.grad(linear(x, values, layout), (x, values), grad)


def measure_step_memory(
    layout: BlockLayout, tokens: int, before: Callable[[], int], after: Callable[[], int], **kind: Any
) -> dict[str, int]:
    """Return how far the peak of a forward and backward exceeds the bytes before it, including plans and indices.

    `before()` resets the peak and returns the bytes in use; `after()` returns the peak.
    """
    block = layout.block_shape[0]
    sides = (4, block), (1, block, block), (4, block)
    train_step(BlockLayout([[True]], block), *(torch.randn(side, **kind) for side in sides))  # to load libraries
    x = torch.randn(tokens, layout.shape[1], **kind)
    values, grad = torch.randn(layout.values_shape, **kind), torch.randn(tokens, layout.shape[0], **kind)
    there = before()
    train_step(layout, x, values, grad)
    return {
        "nnz": layout.nnz,
        "peak": after() - there,
        "gradient": values.numel() * values.itemsize,
        "activations": (x.numel() + grad.numel()) * x.itemsize,
    }


def measure_linear_memory(hidden: int, tokens: int, density: float) -> dict[str, int]:
    """Measure the memory of a forward and backward on the CPU; runs in its own process."""

    def before() -> int:
        reset_peak()
        return process_bytes("VmRSS")

    layout = patterns.random((hidden, hidden), 32, density=density, seed=0)
    return measure_step_memory(layout, tokens, before, lambda: process_bytes("VmHWM"))
