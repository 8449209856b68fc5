"""The processes of a run and their messages; a process that does not answer becomes a BlockSparseError."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: its defaults hold the group that there is, whose threads would outlive its end
from torch import Tensor

from ..errors import BlockSparseError
from ..surgery.agreement import ROLL_CALL, digest, missing

Made = TypeVar("Made")

MASTER = 0


# How often this process has joined a group: torchrun's store keeps the keys of earlier groups.
_joined = itertools.count()
# The store of a group that was made here, by which the processes report when messages fail.
_store: dist.Store | None = None


@contextmanager
def process_group(timeout: float) -> Iterator[tuple[int, int]]:
    """(rank, number of processes): of the group there is, of the one that `torchrun` asks for, or of this one alone.

    A group that is made here has gloo for CPU tensors and, where there is CUDA, nccl for those; it ends with the block.
    """
    global _store
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
    elif (workers := _variable("WORLD_SIZE", 1, 2**31, 1)) > 1:
        rank = _variable("RANK", 0, workers)
        _store = _within(timeout, lambda: _meet(rank, workers, timeout))
        try:
            yield rank, workers
        finally:
            _store = None
        # gloo's threads drop the tensors of the last messages, for which they need the interpreter's lock. A model in
        # DistributedDataParallel that ends later joins them while it holds that lock (PyTorch 2.13), for ever.
        time.sleep(0.05)
        # Not after an error: threads may still wait for messages, and the process ends anyway.
        dist.destroy_process_group()
    else:
        yield MASTER, 1


def _variable(name: str, least: int, end: int, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default)).strip()
    if not text.isdecimal() or not least <= int(text) < end:
        got = repr(text) if text else "none: start the processes with torchrun"
        raise BlockSparseError.expected(f"environment variable {name}", f"an int from {least} to {end - 1}", got)
    return int(text)


def _within(seconds: float, work: Callable[[], Made]) -> Made:
    """Runs `work` in a thread of its own, as PyTorch waits longer than the timeout and ignores Ctrl-C."""
    done: list[Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds + 1)  # whose own errors say more
    for error in failed:
        raise error
    if not done:
        raise BlockSparseError.expected(f"process 0 at {_place()}", f"an answer within {seconds:g} s", _NO_ANSWER)
    return done[0]


_NO_ANSWER = "none: it has not started, is out of reach, or another program has the port"


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _meet(rank: int, workers: int, timeout: float) -> dist.Store:
    """Makes the group, once all processes are there and say the same of its size."""
    deadline = time.monotonic() + timeout

    def left() -> timedelta:
        return timedelta(seconds=max(deadline - time.monotonic(), 0.001))

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise BlockSparseError.expected(f"environment variable {name}", "one, as torchrun sets it", "none")
    port = _variable("MASTER_PORT", 1, 2**16)
    # Like PyTorch's own "env://", which does not tell who is missing: torchrun may keep the store, for all attempts.
    torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        whole: dist.Store = dist.TCPStore(
            os.environ["MASTER_ADDR"], port, workers, rank == MASTER and not torchruns, left(), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            expected = "a free port: choose another with MASTER_PORT, in torchrun with --master-port"
            raise BlockSparseError.expected(_place(), expected, "one that another program has") from error
        expected = f"an answer within {timeout:g} s"
        raise BlockSparseError.expected(
            f"process 0 at {_place()}", expected, f"{_NO_ANSWER} ({_first_line(error)})"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"blocksparse/{attempt}/{next(_joined)}", whole)
    with reraise_comm_errors(f"process 0 at {_place()}"):
        # Processes that differ learn it before the master does, as the master ends and takes the store with it.
        if rank == MASTER:
            store.set("workers", str(workers))
        store.wait(["workers"], left())
        masters = int(store.get("workers"))
        twice = store.add(f"count/{rank}", 1) > 1
        store.set(f"process/{rank}", str(workers))
    if twice:
        raise BlockSparseError.expected("environment variable RANK", "another one in each process", f"{rank} twice")
    _refuse_size(rank, workers, masters)
    for other in range(workers):
        try:
            store.wait([f"process/{other}"], left())
            size = int(store.get(f"process/{other}"))
        except (RuntimeError, ValueError) as error:
            missing = [k for k in range(workers) if not _is_there(store, f"process/{k}")]
            if not missing or rank in missing:  # the store itself is gone
                missing = [MASTER]
            raise BlockSparseError.expected(
                _named(missing), f"to have started within {timeout:g} s", "nothing from there"
            ) from error
        _refuse_size(other, size, masters)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    with reraise_comm_errors("all processes"):
        dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=timeout))
    return store


def _refuse_size(rank: int, size: int, masters: int) -> None:
    if size != masters:
        raise BlockSparseError.expected(f"process {rank}", f"WORLD_SIZE {masters}, as in process 0", size)


def _is_there(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:  # the process that keeps it is gone
        return False


def _named(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line)  # gloo's own place in its sources


def _silent() -> list[int]:
    """Those of the group that do not report after a failure, which every process that runs sees."""
    store, rank, workers = _store, dist.get_rank(), dist.get_world_size()
    if store is None:
        return []

    def ask() -> list[int]:
        store.set(f"runs/{rank}", "")
        time.sleep(ROLL_CALL)
        silent = [k for k in range(workers) if not store.check([f"runs/{k}"])]
        store.set(f"asked/{rank}", "")
        if rank == MASTER:  # whose end is that of the store
            asked = [f"asked/{k}" for k in range(workers) if k not in silent]
            store.wait(asked, timedelta(seconds=ROLL_CALL))
        return silent

    try:
        return _within(4 * ROLL_CALL, ask)
    except (RuntimeError, ValueError):  # it is the master that keeps the store
        return [] if rank == MASTER else [MASTER]


@contextmanager
def reraise_comm_errors(whose: str | None = None) -> Iterator[None]:
    """Turns the errors of torch.distributed into a BlockSparseError that says who did not answer: None asks around."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        if isinstance(error, BlockSparseError):
            raise
        if whose is None:
            silent = _silent()
            whose = _named(silent) if silent else missing() if _store is None else "the other processes"
        raise BlockSparseError.expected(
            whose, "an answer in time", f"none: dead, or out of reach ({_first_line(error)})"
        ) from error


def send(tensor: Tensor, to: int) -> None:
    with reraise_comm_errors(f"process {to}"):
        dist.send(tensor, to)


def receive(tensor: Tensor, source: int) -> Tensor:
    with reraise_comm_errors(f"process {source}"):
        dist.recv(tensor, source)
    return tensor


class Pending:
    def __init__(self, work: dist.Work | None, other: int):
        self.work, self.other = work, other

    def wait(self) -> None:
        with reraise_comm_errors(f"process {self.other}"):
            if self.work is not None:
                self.work.wait()


def start_send(tensor: Tensor, to: int) -> Pending:
    """Sends a tensor, which must stay as it is until then."""
    with reraise_comm_errors(f"process {to}"):
        return Pending(dist.isend(tensor, to), to)


def start_receive(tensor: Tensor, source: int) -> Pending:
    """Fills the tensor with the next one that the process sends, while this one does something else."""
    with reraise_comm_errors(f"process {source}"):
        return Pending(dist.irecv(tensor, source), source)


def all_reduce(tensor: Tensor) -> Tensor:
    """Sums the tensor over all processes, in place."""
    if is_single_process():
        return tensor
    with reraise_comm_errors():
        dist.all_reduce(tensor)
    return tensor


def broadcast(tensor: Tensor) -> Tensor:
    """Overwrites the tensor with the master's."""
    if is_single_process():
        return tensor
    with reraise_comm_errors():
        dist.broadcast(tensor, MASTER)
    return tensor


def gather(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors of all processes on the master, and none elsewhere."""
    if is_single_process():
        return [tensor]
    mine = dist.get_rank() == MASTER
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if mine else []
    with reraise_comm_errors():
        dist.gather(tensor, found if mine else None, MASTER)
    return found


def differing(facts: Mapping[str, object]) -> list[tuple[int, str]]:
    """A process that differs from the majority (in a tie, from the master's side) with the first such name, of each."""
    rows = all_gather([digest(fact) for fact in facts.values()])
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*rows, strict=True)]
    found = []
    for rank, row in enumerate(rows):
        if names := [name for name, one, most in zip(facts, row, usual, strict=True) if one != most]:
            found.append((rank, names[0]))
    return found


def all_max(*numbers: int) -> list[int]:
    if is_single_process():
        return list(numbers)
    found = torch.tensor(numbers)
    with reraise_comm_errors():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def all_gather(mine: Any) -> list[Any]:
    """What each process has, by rank: anything that can be pickled."""
    if is_single_process():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    with reraise_comm_errors():
        dist.all_gather_object(everyone, mine)
    return everyone


def on_all(work: Callable[[], Made]) -> Made:
    """Runs `work`, without messages, in all processes; where one fails, all raise its error, or that of the first."""
    result, failed = None, None
    try:
        result = work()
    except BlockSparseError as error:
        failed = error
    texts = all_gather(None if failed is None else str(failed))
    first = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if first is None:
        return result  # type: ignore[return-value]
    same = all(text == texts[first] for text in texts)
    raise BlockSparseError(texts[first] if same else f"process {first}: {texts[first]}") from failed


def is_single_process() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
