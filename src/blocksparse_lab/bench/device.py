"""Devices to time on: clocks, preparation of calls, and the number of weight copies."""

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

# A graph has at least this many calls, so that gaps between replays do not count.
MIN_CALLS = 32
MAX_COPIES = 256


class Device:
    """The CPU as the place where calls run and are timed.

    There is one copy of a weight by default: inputs and outputs of ours and of the peers flush the caches.
    """

    def __init__(self, copies: int = 1):
        self.torch = torch.device("cpu")
        self._copies = copies
        self.clock: Callable[[Call, int], float] = host_clock

    def copies(self, size: int) -> int:
        """Return how many weights of `size` bytes must take turns so that none is found in a cache."""
        return self._copies

    def prepare(self, calls: Sequence[Call], repeats: int = 1) -> Call:
        """Return one call that runs all these calls, `repeats` times."""
        return calls[0] if len(calls) * repeats == 1 else Rotation(calls, repeats)

    def warm_up(self) -> None:
        """Bring the device to the clock speed that it keeps under load."""

    def wait(self) -> None:
        """Wait until the device has finished all its work."""


Host = Device


class Rotation:
    """Calls that run in turn as one call; `result` is the last one's."""

    def __init__(self, calls: Sequence[Call], repeats: int = 1):
        self.calls = list(calls) * repeats
        self.result: object = None

    def __call__(self) -> None:
        for call in self.calls:
            self.result = call()


class Cuda(Device):
    """A GPU, timed with CUDA graphs and CUDA events.

    Raises:
        BlockSparseError: PyTorch sees no GPU, or our kernels do not support it.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise BlockSparseError.expected("device", "a GPU that PyTorch sees", "none")
        if reason := triton_runtime.unavailable():
            raise BlockSparseError.expected("device", "a GPU that our kernels serve", reason)
        self.torch = torch.device("cuda", torch.cuda.current_device())
        self.clock: Callable[[Call, int], float] = cuda_clock
        self.cache = torch.cuda.get_device_properties(self.torch).L2_cache_size

    def copies(self, size: int) -> int:
        """Return at least four, and so many that together they fill the L2 cache twice."""
        return min(MAX_COPIES, max(4, math.ceil(2 * self.cache / max(size, 1))))

    def prepare(self, calls: Sequence[Call], repeats: int = 1) -> Call:
        return Replay(calls, repeats)

    def warm_up(self) -> None:
        a = torch.randn(4096, 4096, device=self.torch, dtype=torch.bfloat16)
        out = torch.empty_like(a)
        torch.cuda.synchronize()
        spent = 0.0
        while spent < 0.1:
            spent += 20 * self.clock(lambda: torch.mm(a, a, out=out), 20)

    def wait(self) -> None:
        torch.cuda.synchronize()


class Replay(Rotation):
    """Calls in turn, captured in one CUDA graph, so that the host's launch times do not count."""

    def __init__(self, calls: Sequence[Call], repeats: int = 1):
        super().__init__(calls, repeats)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:  # compile and plan before the capture
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, stream):
            super().__call__()

    def __call__(self) -> None:
        self.graph.replay()


DEVICES: dict[str, Callable[[], Device]] = {"cpu": Host, "cuda": Cuda}


def get_device(name: str | Device) -> Device:
    """Return the device of this name.

    Raises:
        BlockSparseError: the device cannot be timed, or is not present.
    """
    if not isinstance(name, str):
        return name
    if name not in DEVICES:
        raise BlockSparseError.expected("device", f"one that can be timed ({', '.join(DEVICES)})", repr(name))
    return DEVICES[name]()


def have_same_bits(found: Any, expected: Any) -> bool:
    """Return whether two results, tensors or tuples of tensors, are equal in every bit; NaN differs from everything."""
    if isinstance(found, Tensor):
        return torch.equal(found, expected)
    return all(have_same_bits(a, b) for a, b in zip(found, expected, strict=True))
