"""Compile training steps for a GPU that need not be there, and print what the graphs call.

    python trace_kernels.py "conv, stride 2"                 one training step of this layer
    python trace_kernels.py conv:space conv:forced linear    several, some with one of the VARIANTS

This is a script because Triton must not interpret, and because its driver is replaced for the whole process. The
tensors are on the CPU; the graphs are those of a GPU, and are not run. The output is one JSON object: for each name,
the operations of all graphs, and the launches of the graphs and of the same step without a graph (kernel, grid,
numbers, shapes of index tensors).
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


VARIANTS = {
    "rows": "any number of rows or images in one graph",
    "space": "and images of any size",
    "forced": "then within `use_backend`",
    "vmap": "of a batch of inputs",
    "refused": "for a GPU that the kernels refuse",
    "exported": "by torch.export, for any number of images",
    "counted": "of as many rows or images as a mask leaves",
}


def cases() -> dict[str, tuple[nn.Module, tuple[int, ...], tuple[int, ...]]]:
    """Return, by name, a layer, the shape of its input, and another shape that the same graph has to serve."""
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


class Traced:
    """The operations and launches of one training step.

    Attributes:
        calls: the operations of all graphs, and a line for each call of a compiled function.
        launches: of the graphs, and of the step without a graph.
    """

    def __init__(self, name: str, launches: list[list]):
        self.calls: list[str] = []
        self.launches: dict[str, list[list]] = {}
        name, _, variant = name.partition(":")
        assert not variant or variant in VARIANTS, variant
        layer, *shapes = cases()[name]
        layer = layer.bfloat16()
        reason = "an old GPU" if variant == "refused" else None
        for each in (linear, conv):
            each.unsupported_reason = lambda device, dtype: reason
        if variant == "exported":
            x, rows = torch.randn(shapes[0], dtype=torch.bfloat16), {0: torch.export.Dim("rows")}
            self.note(torch.export.export(layer, (x,), dynamic_shapes={"input": rows}, strict=True))
            return
        torch._dynamo.reset()
        launches.clear()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=variant == "counted"):
            self.compile(layer, shapes, variant)
        self.launches["traced"] = [*launches]
        launches.clear()
        for each in (linear, conv):
            each.unsupported_reason = lambda device, dtype: None
        layer(torch.randn(shapes[0], dtype=torch.bfloat16, requires_grad=True)).float().square().mean().backward()
        self.launches["eager"] = [*launches]

    def note(self, graph, inputs=()):
        """Note the operations of a graph, and return a function in its place that does not run it."""
        self.calls += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return not_run

    def compile(self, layer, shapes, variant):
        function = torch.vmap(layer) if variant == "vmap" else layer
        compiled = torch.compile(
            lambda x: function(x[x.flatten(1)[:, 0] > 0] if variant == "counted" else x).float().square().mean(),
            fullgraph=True,
            backend=aot_autograd(fw_compiler=self.note, bw_compiler=self.note),
        )
        for shape in shapes:
            shape = (8, *shape) if variant == "vmap" else shape
            x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
            for axis in range(2, x.dim()) if variant == "space" else () if variant == "counted" else (0,):
                torch._dynamo.mark_dynamic(x, axis)
            self.run(compiled, x, f"compiled {shape}")
        if variant == "forced":
            with bs.use_backend("reference"):
                self.run(compiled, x, "forced")

    def run(self, compiled, x, line):
        """Call a compiled function, and note that it reached its graph."""
        try:
            compiled(x)
        except NotRun:
            self.calls.append(line)


def not_run(*_):
    raise NotRun


def main(*names: str) -> None:
    triton.runtime.driver.set_active(Driver())
    lower_to_triton.LOWERED_DEVICE = "cpu"
    registry._BACKEND_OF_DEVICE["cpu"] = "triton"
    launches = recorded()
    print(json.dumps({name: vars(Traced(name, launches)) for name in names}))


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


def _plain(argument):
    if isinstance(argument, torch.Tensor):
        return [_plain(size) for size in argument.shape]
    return str(argument.node.hint if isinstance(argument, torch.SymInt) else argument)


if __name__ == "__main__":
    main(*sys.argv[1:])
