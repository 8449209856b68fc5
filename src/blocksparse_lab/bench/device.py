"""Devices to time on: their clocks, how work is prepared for them, and how much of it they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError
from blocksparse.measure import Call, cuda_clock, host_clock
from blocksparse.ops.gpu import runtime as triton_runtime

from ..training.cuda_graph import capturing

# Replays shorter than this many calls would be timed with the gaps between the replays.
MIN_CALLS = 32
MAX_COPIES = 256


class Device:
    """Where work runs and is timed; this one is the CPU.

    It has one copy of a weight by default: inputs and outputs flush its caches, and peers' as much.
    """

    def __init__(self, copies: int = 1):
        self.torch = torch.device("cpu")
        self._copies = copies
        self.clock: Callable[[Call, int], float] = host_clock

    def copies(self, size: int) -> int:
        """The number of copies of a weight of `size` bytes that take turns, so that none is found in a cache."""
        return self._copies

    def ready(self, calls: Sequence[Call], laps: int = 1) -> Call:
        """One call that makes all these calls, `laps` times."""
        return calls[0] if len(calls) * laps == 1 else Rotation(calls, laps)

    def settle(self) -> None:
        """Brings the device to the speed that it keeps under load."""

    def wait(self) -> None:
        """Waits until the device has finished all its work."""


Host = Device


class Rotation:
    """Calls in turn, as one call. `result` is what the last of them gave."""

    def __init__(self, calls: Sequence[Call], laps: int = 1):
        self.calls = list(calls) * laps
        self.result: object = None

    def __call__(self) -> None:
        for call in self.calls:
            self.result = call()


class Cuda(Device):
    """A GPU: CUDA graphs, timed by its own events; refused where PyTorch sees none, or one that we do not serve."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise BlockSparseError.expected("device", "a GPU that PyTorch sees", "none")
        if reason := triton_runtime.unavailable():
            raise BlockSparseError.expected("device", "a GPU that our kernels serve", reason)
        self.torch = torch.device("cuda", torch.cuda.current_device())
        self.clock: Callable[[Call, int], float] = cuda_clock
        self.cache = torch.cuda.get_device_properties(self.torch).L2_cache_size

    def copies(self, size: int) -> int:
        """At least four, and twice the L2 cache together."""
        return min(MAX_COPIES, max(4, math.ceil(2 * self.cache / max(size, 1))))

    def ready(self, calls: Sequence[Call], laps: int = 1) -> Call:
        return Replay(calls, laps)

    def settle(self) -> None:
        a = torch.randn(4096, 4096, device=self.torch, dtype=torch.bfloat16)
        out = torch.empty_like(a)
        torch.cuda.synchronize()
        spent = 0.0
        while spent < 0.1:
            spent += 20 * self.clock(lambda: torch.mm(a, a, out=out), 20)

    def wait(self) -> None:
        torch.cuda.synchronize()


class Replay(Rotation):
    """Calls in turn, captured in one CUDA graph, so that the host's time per launch is not what is measured."""

    def __init__(self, calls: Sequence[Call], laps: int = 1):
        super().__init__(calls, laps)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compiles and makes plans, which must not happen during capture
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, stream):
            super().__call__()

    def __call__(self) -> None:
        self.graph.replay()


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Host, "cuda": Cuda}


def device_of(name: str | Device) -> Device:
    """The device of this name; raises where it cannot be timed, or is not there."""
    if not isinstance(name, str):
        return name
    if name not in DEVICES:
        raise BlockSparseError.expected("device", f"one that can be timed ({', '.join(DEVICES)})", repr(name))
    return DEVICES[name]()


def same_bits(found: Any, expected: Any) -> bool:
    """Whether two results, tensors or tuples of them, are equal in every bit (NaN is equal to nothing)."""
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
