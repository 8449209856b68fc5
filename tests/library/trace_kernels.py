"""Compiles training steps for a GPU that need not be there, and prints what the graphs call.

    python trace_kernels.py "conv, stride 2"           any number of images in one graph
    python trace_kernels.py conv space                 and of any size
    python trace_kernels.py conv forced                then within `use_backend`
    python trace_kernels.py linear vmap                of a batch of them
    python trace_kernels.py conv refused               for a GPU that the kernels refuse
    python trace_kernels.py conv exported              by torch.export, for any number of images
    python trace_kernels.py conv counted               of as many images as a mask leaves

A script of its own: Triton must not interpret, and its driver is replaced for the whole process. The tensors are on the
CPU; the graphs are those of a GPU, and are not run. The last line has, as JSON, the launches of the graphs and those of
the same step without a graph: kernels, grids, numbers, and shapes of index tensors.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from triton.backends.compiler import GPUTarget

import blocksparse as bs
from blocksparse.ops import lower_to_triton, registry
from blocksparse.ops.conv import triton as conv
from blocksparse.ops.gpu import runtime
from blocksparse.ops.linear import triton as linear

LAYOUT = bs.patterns.random((256, 256), block_size=32, density=0.5, seed=0)
CONV = {"layout": LAYOUT, "padding": 1}


# Of each the layer, the input, and other sizes that one graph is to serve.
def cases() -> dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, ...]]]:
    image, other = (24, 256, 12, 12), (23, 256, 12, 12)
    return {
        "linear": (bs.nn.Linear(256, 256, layout=LAYOUT, activation="relu"), (512, 256), (500, 256)),
        "conv": (bs.nn.Conv2d(256, 256, 3, **CONV, activation="relu"), image, other),
        "conv, stride 2": (bs.nn.Conv2d(256, 256, 3, stride=2, **CONV), image, other),
        "conv, 1x1": (bs.nn.Conv2d(256, 256, 1, layout=LAYOUT), image, other),
        "conv, transposed": (bs.nn.ConvTranspose2d(256, 256, 4, stride=2, **CONV), image, other),
        "conv1d": (bs.nn.Conv1d(256, 256, 3, **CONV), (20, 256, 99), (19, 256, 99)),
        # Nine phases come in one launch, with a table: the graph keeps the op.
        "conv, stride 3": (bs.nn.ConvTranspose2d(256, 256, 3, stride=3, layout=LAYOUT), image, other),
    }


class Driver:
    """The parts of a GPU that tracing needs."""

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


def main(name: str, open_: str = "rows") -> None:
    triton.runtime.driver.set_active(Driver())
    lower_to_triton.LOWERED_DEVICE = "cpu"
    layer, *shapes = cases()[name]
    layer = layer.bfloat16()
    of_batch = torch.vmap(layer) if open_ == "vmap" else layer
    launches = recorded()
    refused = [None if open_ != "refused" else "an old GPU"]
    for each in (linear, conv):
        each.refusal = lambda device, dtype: refused[0]
    registry._BACKEND_OF_DEVICE["cpu"] = "triton"
    if open_ == "exported":
        x, rows = torch.randn(shapes[0], dtype=torch.bfloat16), {0: torch.export.Dim("rows")}
        show(torch.export.export(layer, (x,), dynamic_shapes={"input": rows}, strict=True), ())
        print("{}")
        return
    torch._dynamo.config.capture_dynamic_output_shape_ops = open_ == "counted"
    compiled = torch.compile(
        lambda x: of_batch(x[x.flatten(1)[:, 0] > 0] if open_ == "counted" else x).float().square().mean(),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=show, bw_compiler=show),
    )
    for shape in shapes:
        shape = (8, *shape) if open_ == "vmap" else shape
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        for axis in range(2, x.dim()) if open_ == "space" else () if open_ == "counted" else (0,):
            torch._dynamo.mark_dynamic(x, axis)
        try:
            compiled(x)
        except NotRun:
            print("compiled", *shape)
    if open_ == "forced":
        with bs.use_backend("reference"):
            try:
                compiled(x)
            except NotRun:
                print("forced")
    refused[0] = None
    traced_ones, launches[:] = [*launches], []
    print(json.dumps({"traced": traced_ones, "eager": eager(layer, shapes[0], launches)}))


def recorded() -> list[list]:
    """The launches from now on, each time one is prepared."""
    made = []

    class Recorded(runtime.Launch):
        def __init__(self, kernel, grid, *rest, **options):
            super().__init__(kernel, grid, *rest, **options)
            made.append([kernel.__name__, [_plain(size) for size in grid], [_plain(each) for each in self.arguments]])

        def _launch(self, *tensors):
            """Runs nothing."""

    for each in (linear, conv):
        each.Launch = Recorded
    return made


def eager(layer, shape, launches):
    layer(torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)).float().square().mean().backward()
    return launches


def _plain(argument):
    if isinstance(argument, torch.Tensor):
        return [_plain(size) for size in argument.shape]
    return str(argument.node.hint if isinstance(argument, torch.SymInt) else argument)


if __name__ == "__main__":
    main(*sys.argv[1:])
