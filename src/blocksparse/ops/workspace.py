"""Large buffers on the CPU that are reused, to avoid the page faults of new allocations.

The C library returns freed allocations above 32 MiB to the system. The next allocation of that size costs a page fault
per 4 KiB, which takes several times as long as writing the memory. (On a GPU, PyTorch has its own cache.)

Threads and forked processes may call these functions; see `docs/understand/threads.md`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The C library reuses smaller allocations itself.
MIN_BYTES = 1 << 20
# Limit of the size of one buffer, and of all idle buffers together.
MAX_BYTES = 2 << 30
# An idle buffer is freed once this multiple of its size was requested since it was last taken: the many small buffers
# of a sequence's steps must not drive out a large one.
MAX_IDLE_FACTOR = 64
# The number of buffers that were taken last and are searched first.
LATEST = 8


@dataclass(eq=False)
class _Buffer:
    storage: torch.UntypedStorage
    size: int  # of the storage when it was made
    last_taken: int = 0  # total bytes of all requests until then
    latest: Tensor | None = None  # of the last shape and dtype; its copies cost less than tensors made from the storage

    @property
    def is_free(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) == (1 if self.latest is None else 2)

    def as_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape in the storage."""
        latest, inference = self.latest, torch.is_inference_mode_enabled()
        if latest is None or latest.shape != shape or latest.dtype != dtype or latest.is_inference() != inference:
            latest = torch.empty(0, dtype=dtype, device="cpu").set_(self.storage, 0, shape, _strides(shape))
            if type(latest) is not Tensor:  # a mode that wraps results is active
                return latest
            self.latest = latest
        # `data` has a count of changes of its own, but refuses `unsqueeze_` and the like.
        return Tensor._make_subclass(Tensor, latest.data)


_lock = threading.Lock()
_requested = 0
_buffers: list[_Buffer] = []


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `torch.empty`, on the CPU in memory that is reused once no tensor, view or array refers to it."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not MIN_BYTES <= size <= MAX_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    # Do not wait: a signal handler or finalizer may have interrupted this very thread while it held the lock.
    lock = _lock  # a forked child replaces the global one
    if not lock.acquire(blocking=False):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        # The tensor must refer to the storage before another thread looks for a free one.
        return _take_buffer(size).as_tensor(tuple(shape), dtype)
    finally:
        lock.release()


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def empty_like(tensor: Tensor) -> Tensor:
    """Return `empty` with the shape, dtype and device of a tensor."""
    return empty(tensor.shape, tensor.dtype, tensor.device)


def clear() -> None:
    """Free all idle buffers."""
    with _lock:
        _buffers[:] = [buffer for buffer in _buffers if not buffer.is_free]


def _renew_lock() -> None:
    """Replace the lock in the child of a fork, which lacks the thread that may hold it.

    The list is consistent, because Python forks between two of its instructions, and each process has its own memory.
    """
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _take_buffer(size: int) -> _Buffer:
    """Return an idle buffer of one to two times this size; if there is none, free old ones and allocate another."""
    global _requested
    _requested += size
    at = _smallest_fit(size)
    if at is None:
        # Another process may be using a storage that was moved to shared memory.
        _buffers[:] = [buffer for buffer in _buffers if not buffer.storage.is_shared()]
        _free_idle(MAX_BYTES - size)
        buffer = _Buffer(torch.UntypedStorage(size), size)
    else:
        buffer = _buffers.pop(at)
    _buffers.append(buffer)
    buffer.last_taken = _requested
    return buffer


def _smallest_fit(size: int) -> int | None:
    """Return the index of the smallest idle buffer of one to two times this size, or None.

    The list is in the order of last use. The latest are searched first, as they may be in the CPU's caches. A forward
    pass of training frees nothing, so its idle buffers are at the front. The search ends at the first of this size.
    """
    best, best_size = None, 2 * size + 1
    older = max(len(_buffers) - LATEST, 0)
    for at in (*range(len(_buffers) - 1, older - 1, -1), *range(older)):
        buffer = _buffers[at]
        if not size <= buffer.size < best_size or not buffer.is_free:
            continue
        # A user may have resized it, or moved it to memory that another process uses.
        if buffer.storage.nbytes() == buffer.size and not buffer.storage.is_shared():
            best, best_size = at, buffer.size
            if best_size == size:
                break
    return best


def _free_idle(most: int) -> None:
    """Free buffers that were idle for long, and the oldest ones until idle buffers have at most `most` bytes."""
    idle = sorted((buffer for buffer in _buffers if buffer.is_free), key=lambda buffer: buffer.last_taken)
    size = sum(buffer.storage.nbytes() for buffer in idle)
    for buffer in idle:
        own = buffer.storage.nbytes()
        if size > most or _requested - buffer.last_taken > MAX_IDLE_FACTOR * own:
            size -= own
            _buffers.remove(buffer)
