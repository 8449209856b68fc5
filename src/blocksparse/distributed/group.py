"""The process group of a run and its collectives; a process that does not answer becomes a BlockSparseError."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # its defaults keep the group that exists at import alive: import it before there is one
from torch import Tensor

from ..errors import BlockSparseError, first_line
from ..surgery.agreement import ROLL_CALL, device_of, missing

Result = TypeVar("Result")

MASTER = 0


# Counts the groups of this process: torchrun's store keeps the keys of earlier ones.
_groups = itertools.count()
# The store of a group that `process_group` made, in which processes report after a failure.
_store: dist.Store | None = None


@contextmanager
def process_group(timeout: float) -> Iterator[tuple[int, int]]:
    """Yield (rank, number of processes) of the existing group, of the group that `torchrun` asks for, or of none.

    A group for torchrun has gloo for CPU tensors and, with CUDA, nccl for those. It ends with the `with` block.

    Args:
        timeout: seconds to wait for a process.
    """
    global _store
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
    elif (workers := _variable("WORLD_SIZE", 1, 2**31, 1)) > 1:
        rank = _variable("RANK", 0, workers)
        _store = _within(timeout, lambda: _join(rank, workers, timeout))
        try:
            yield rank, workers
        finally:
            _store = None
        # gloo's threads need the interpreter's lock to free the last messages. A model in DistributedDataParallel joins
        # these threads at its end and holds the lock (PyTorch 2.13): without a pause both wait for ever.
        time.sleep(0.05)
        # Not after an error: threads may still wait for messages, and the process ends anyway.
        dist.destroy_process_group()
    else:
        yield MASTER, 1


def _variable(name: str, least: int, end: int, default: int | None = None) -> int:
    """Return an environment variable as an int in [least, end)."""
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or not least <= int(text) < end:
        got = repr(text) if text else "none: start the processes with torchrun"
        raise BlockSparseError.expected(f"environment variable {name}", f"an int from {least} to {end - 1}", got)
    return int(text)


def _within(seconds: float, work: Callable[[], Result]) -> Result:
    """Run `work` in a thread, because PyTorch itself waits longer than the timeout and ignores Ctrl-C."""
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds + 1)  # longer than the timeout of `work`, whose errors say more
    for error in failed:
        raise error
    if not done:
        raise BlockSparseError.expected(f"process 0 at {_address()}", f"an answer within {seconds:g} s", _NO_ANSWER)
    return done[0]


_NO_ANSWER = "none: it has not started, is out of reach, or another program has the port"


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _join(rank: int, workers: int, timeout: float) -> dist.Store:
    """Form the default process group once all processes have started and agree on its size; return its store.

    Raises:
        BlockSparseError: an environment variable of torchrun is missing or wrong; a process does not start in time, or
            has another size or the same rank.
    """
    deadline = time.monotonic() + timeout

    def left() -> timedelta:
        return timedelta(seconds=max(deadline - time.monotonic(), 0.001))

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise BlockSparseError.expected(f"environment variable {name}", "one, as torchrun sets it", "none")
    port = _variable("MASTER_PORT", 1, 2**16)
    # PyTorch's own "env://" does the same but does not name missing processes. torchrun may own the store.
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        tcp_store: dist.Store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            workers,
            rank == MASTER and not is_torchruns,
            left(),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            expected = "a free port: choose another with MASTER_PORT, in torchrun with --master-port"
            raise BlockSparseError.expected(_address(), expected, "one that another program has") from error
        expected = f"an answer within {timeout:g} s"
        raise BlockSparseError.expected(
            f"process 0 at {_address()}", expected, f"{_NO_ANSWER} ({_first_line(error)})"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"blocksparse/{attempt}/{next(_groups)}", tcp_store)
    with reraise_comm_errors(f"process 0 at {_address()}"):
        # A process with another size finds out before the master does: the store ends with the master.
        if rank == MASTER:
            store.set("workers", str(workers))
        store.wait(["workers"], left())
        expected_size = int(store.get("workers"))
        is_taken = store.add(f"count/{rank}", 1) > 1
        store.set(f"process/{rank}", str(workers))
    if is_taken:
        raise BlockSparseError.expected("environment variable RANK", "another one in each process", f"{rank} twice")
    _check_size(rank, workers, expected_size)
    for other in range(workers):
        try:
            store.wait([f"process/{other}"], left())
            size = int(store.get(f"process/{other}"))
        except (RuntimeError, ValueError) as error:
            absent = [k for k in range(workers) if not _has_key(store, f"process/{k}")]
            if not absent or rank in absent:  # the store itself is gone
                absent = [MASTER]
            raise BlockSparseError.expected(
                _process_names(absent), f"to have started within {timeout:g} s", "nothing from there"
            ) from error
        _check_size(other, size, expected_size)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    with reraise_comm_errors("all processes"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=timeout))
    return store


def _check_size(rank: int, size: int, expected: int) -> None:
    """Check that a process was started with the same number of processes as process 0."""
    if size != expected:
        raise BlockSparseError.expected(f"process {rank}", f"WORLD_SIZE {expected}, as in process 0", size)


def _has_key(store: dist.Store, key: str) -> bool:
    """Return whether a store has a key; it has none if its process is gone."""
    try:
        return store.check([key])
    except RuntimeError:  # the process that owns it is gone
        return False


def _process_names(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without gloo's place in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", first_line(error))  # the file and line in gloo


def _silent_ranks() -> list[int]:
    """Return the ranks that do not report within `ROLL_CALL` seconds after a failure that all running ranks notice."""
    store, rank, workers = _store, dist.get_rank(), dist.get_world_size()
    if store is None:
        return []

    def ask() -> list[int]:
        store.set(f"runs/{rank}", "")
        time.sleep(ROLL_CALL)
        silent = [k for k in range(workers) if not store.check([f"runs/{k}"])]
        store.set(f"asked/{rank}", "")
        if rank == MASTER:  # the store ends with the master, so it waits until the others have asked
            asked = [f"asked/{k}" for k in range(workers) if k not in silent]
            store.wait(asked, timedelta(seconds=ROLL_CALL))
        return silent

    try:
        return _within(4 * ROLL_CALL, ask)
    except (RuntimeError, ValueError):  # the master, which owns the store, is gone
        return [] if rank == MASTER else [MASTER]


@contextmanager
def reraise_comm_errors(peer: str | None = None) -> Iterator[None]:
    """Turn errors of torch.distributed into a BlockSparseError that names the silent peer; None finds out which."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        if isinstance(error, BlockSparseError):
            raise
        if peer is None:
            silent = _silent_ranks()
            peer = _process_names(silent) if silent else missing() if _store is None else "the other processes"
        raise BlockSparseError.expected(
            peer, "an answer in time", f"none: dead, or out of reach ({_first_line(error)})"
        ) from error


def send(tensor: Tensor, to: int) -> None:
    """Send a tensor to a rank, and wait until it is sent."""
    with reraise_comm_errors(f"process {to}"):
        dist.send(tensor, to)


def receive(tensor: Tensor, source: int) -> Tensor:
    """Fill a tensor with the next one that a rank sends; return it."""
    with reraise_comm_errors(f"process {source}"):
        dist.recv(tensor, source)
    return tensor


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    if is_single_process():
        return tensor
    with reraise_comm_errors():
        dist.all_reduce(tensor)
    return tensor


def broadcast(tensor: Tensor) -> Tensor:
    """Overwrite a tensor with the master's."""
    if is_single_process():
        return tensor
    with reraise_comm_errors():
        dist.broadcast(tensor, MASTER)
    return tensor


def all_max(*numbers: int) -> list[int]:
    """Return the maximum of each number over all processes."""
    if is_single_process():
        return list(numbers)
    maxima = torch.tensor(numbers, device=device_of())
    with reraise_comm_errors():
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima.tolist()


def all_gather(mine: Any) -> list[Any]:
    """Return the objects of all processes by rank; they must be picklable."""
    if is_single_process():
        return [mine]
    by_rank: list[Any] = [None] * dist.get_world_size()
    with reraise_comm_errors():
        dist.all_gather_object(by_rank, mine)
    return by_rank


def on_all(work: Callable[[], Result]) -> Result:
    """Run `work`, which sends no messages; if it fails on any process, raise the first one's error on all of them."""
    if is_single_process():
        return work()
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    texts = all_gather(None if failure is None else text_of(failure))
    first = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if first is None:
        return result  # type: ignore[return-value]
    same = all(text == texts[first] for text in texts)
    raise BlockSparseError(texts[first] if same else f"process {first}: {texts[first]}") from failure


def text_of(error: BaseException) -> str:
    """Describe an error for the other ranks."""
    return str(error) if isinstance(error, BlockSparseError) else f"{type(error).__name__}: {error}"


def is_single_process() -> bool:
    """Return whether there is no group, or one of a single process."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
