"""Run a whole training step as one CUDA graph: one launch from the host instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from blocksparse.errors import first_line


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the work within it on `stream` into `graph`, and undo PyTorch's state if the capture fails.

    Otherwise PyTorch's generator would stay in capture mode, and its allocator would keep memory for the graph.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    before = generator.clone_state()
    cause: Exception | None = None
    try:
        with torch.cuda.graph(graph, stream=stream):
            try:
                yield
            except Exception as error:
                cause = error
                raise
    except Exception as error:
        generator.graphsafe_set_state(before)
        with suppress(RuntimeError):  # PyTorch may have ended it
            torch._C._cuda_endAllocateToPool(device, graph.pool())
        raise cause or error from None


class GraphedStep:
    """Calls `work(*inputs)`, the first `warmup` times directly and then as a captured graph.

    `work` reads inputs of fixed shapes and fixed tensors, changes only such tensors, and does not wait for the GPU. The
    first calls are ordinary steps; they fill caches. If the capture fails, `note` receives the reason, and all further
    calls run directly.
    """

    def __init__(self, work: Callable[..., None], note: Callable[[str], None], warmup: int = 3):
        self._work, self._note, self._left = work, note, warmup
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._failed = False

    def __call__(self, *inputs: Tensor) -> None:
        if self._graph is None and self._left == 0 and not self._failed:
            self._capture(inputs)
        if self._graph is None:
            self._left = max(0, self._left - 1)
            # A capture must not reuse objects that were made on the main stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._work(*inputs)
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        for static, given in zip(self._inputs, inputs, strict=True):
            static.copy_(given)
        self._graph.replay()

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        """Capture the work as a graph; note the reason if that fails."""
        graph = torch.cuda.CUDAGraph()
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        try:
            with capturing(graph, self._stream):
                self._work(*self._inputs)
        except Exception as error:
            self._failed = True
            self._note(f"training without a CUDA graph, which is slower: {first_line(error)}")
            return
        self._graph = graph
