"""Traces a training step for a GPU that need not be there, and prints what the graph calls, one node per line.

A script of its own: Triton must not interpret, and its driver is replaced for the whole process.
"""

from __future__ import annotations

from collections import Counter

import torch
import triton
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

import blocksparse as bs
from blocksparse.ops.linear import op
from blocksparse.ops.linear import triton as backend


class Driver:
    """As much of a GPU as tracing asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    layout = bs.patterns.random((256, 256), block_size=32, density=0.5, seed=0)
    indices = [layout.crow_indices(), layout.col_indices()]
    indices += backend.schedule(layout, torch.device("cpu"), torch.bfloat16, tokens=512)

    def step(x, values, *indices):
        return (op.linear_op(x, values, None, list(indices), layout.grid[1], False, "relu"),)

    with FakeTensorMode() as mode:
        inputs = [torch.empty(512, 256, dtype=torch.bfloat16), torch.empty(layout.values_shape, dtype=torch.bfloat16)]
        inputs = [tensor.requires_grad_() for tensor in inputs]
        fakes = [mode.from_tensor(index) for index in indices]
        graph = aot_export_joint_simple(step, (*inputs, *fakes), trace_joint=True)
    for name, count in Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function").items():
        print(count, name)


if __name__ == "__main__":
    main()
