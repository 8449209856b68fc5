"""Compiles training steps and inference for a GPU that need not be there, and prints what the graphs call.

A script of its own: Triton must not interpret, and its driver is replaced for the whole process. The tensors are on the
CPU; the graphs are those of a GPU, and are not run.
"""

from __future__ import annotations

import torch
import triton
from torch._dynamo.backends.common import aot_autograd
from triton.backends.compiler import GPUTarget

import blocksparse as bs
from blocksparse.ops.linear import op


class Driver:
    """As much of a GPU as tracing needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


class NotRun(Exception):
    pass


def show(graph, inputs):
    for node in graph.graph.nodes:
        if node.op == "call_function":
            print(node.target)

    def run(*_):
        raise NotRun

    return run


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    op.SEEN_THROUGH = "cpu"
    layout = bs.patterns.random((256, 256), block_size=32, density=0.5, seed=0)
    layer = bs.nn.Linear(256, 256, layout=layout, activation="relu").bfloat16()
    compiled = torch.compile(
        lambda x: layer(x).float().square().mean(),
        fullgraph=True,
        dynamic=True,
        backend=aot_autograd(fw_compiler=show, bw_compiler=show),
    )
    for tokens in (512, 500):  # one graph for both
        try:
            compiled(torch.randn(tokens, 256, dtype=torch.bfloat16, requires_grad=True))
        except NotRun:
            print("compiled", tokens)


if __name__ == "__main__":
    main()
