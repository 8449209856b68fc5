"""Reuses large buffers on the CPU, to avoid a page fault for every page of a new allocation.

The C library returns allocations above 32 MiB to the system when they are freed. The next one of that size then costs
a page fault for every 4 KiB, which takes several times as long as writing it. (On a GPU PyTorch has its own cache.)

Threads and forked processes may all call it: `docs/understand/threads.md` says what holds for the library as a whole.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The C library reuses smaller ones itself.
MIN_BYTES = 1 << 20
# Larger buffers are not kept, nor more than this in total.
MAX_BYTES = 2 << 30
# A buffer is freed when this many times its size was requested since it was last taken, so that the many small buffers
# of a sequence's steps do not drive out a large one.
MAX_IDLE_FACTOR = 64


@dataclass(eq=False)
class _Buffer:
    storage: torch.UntypedStorage
    taken: int = 0  # last, by the bytes that all requests had asked for by then

    @property
    def is_free(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) == 1


_lock = threading.Lock()
_asked = 0
_kept: list[_Buffer] = []


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, on the CPU in memory that is used again once no tensor refers to it.

    The memory is not used again while a tensor, a view or an array refers to it.
    `clear` gives back what is not in use.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not MIN_BYTES <= size <= MAX_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    # Without waiting: this very thread may hold the lock, below a signal handler or a finalizer that came here.
    lock = _lock  # a child that was forked from here has another one
    if not lock.acquire(blocking=False):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        # The tensor refers to the storage before another thread can look.
        return torch.empty(0, dtype=dtype, device=device).set_(_take(size), 0, tuple(shape), _strides(shape))
    finally:
        lock.release()


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def empty_like(tensor: Tensor) -> Tensor:
    """`torch.empty_like`, contiguous, as `empty`."""
    return empty(tensor.shape, tensor.dtype, tensor.device)


def clear() -> None:
    """Gives the memory that is not in use back to the system."""
    with _lock:
        _kept[:] = [buffer for buffer in _kept if not buffer.is_free]


def _renew_lock() -> None:
    """In the child of a fork: the thread that held the lock is not there. The list is whole, as Python forks between
    two of its instructions, and so is the memory, each process having its own copy."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _take(size: int) -> torch.UntypedStorage:
    global _asked
    _asked += size
    # Another process may be using what was moved to shared memory, so it cannot be reused.
    _kept[:] = [buffer for buffer in _kept if not buffer.storage.is_shared()]
    fitting = [buffer for buffer in _kept if size <= buffer.storage.nbytes() <= 2 * size and buffer.is_free]
    if fitting:
        buffer = min(fitting, key=lambda buffer: buffer.storage.nbytes())
    else:
        _give_back(MAX_BYTES - size)
        buffer = _Buffer(torch.UntypedStorage(size))
        _kept.append(buffer)
    buffer.taken = _asked
    return buffer.storage


def _give_back(most: int) -> None:
    """Buffers that have not been of use for long, and the oldest until those that lie idle are `most` bytes."""
    idle = sorted((buffer for buffer in _kept if buffer.is_free), key=lambda buffer: buffer.taken)
    size = sum(buffer.storage.nbytes() for buffer in idle)
    for buffer in idle:
        own = buffer.storage.nbytes()
        if size > most or _asked - buffer.taken > MAX_IDLE_FACTOR * own:
            size -= own
            _kept.remove(buffer)
