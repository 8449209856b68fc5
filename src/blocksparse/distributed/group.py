"""The processes of a run and their messages; one that is gone becomes a BlockSparseError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: its defaults hold the group that there is, whose threads would outlive its end
from torch import Tensor

from ..errors import BlockSparseError

MASTER = 0


@contextmanager
def joined(timeout: float) -> Iterator[tuple[int, int]]:
    """(rank, number of processes): of the group there is, of the one that `torchrun` asks for, or of this one alone.

    A group that is made here has gloo for CPU tensors and, where there is CUDA, nccl for those; it ends with the block.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
    elif int(os.environ.get("WORLD_SIZE", 1)) > 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        with answers("all processes"):
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        yield dist.get_rank(), dist.get_world_size()
        # Not after an error: threads may still wait for messages, and the process ends anyway.
        dist.destroy_process_group()
    else:
        yield MASTER, 1


@contextmanager
def answers(whose: str) -> Iterator[None]:
    """Turns the errors of torch.distributed into a BlockSparseError that says who did not answer."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # dist.DistError is a RuntimeError
        if isinstance(error, BlockSparseError):
            raise
        reason = str(error).splitlines()[0]
        raise BlockSparseError.expected(
            whose, "an answer in time", f"none: dead, or out of reach ({reason})"
        ) from error


def send(tensor: Tensor, to: int) -> None:
    with answers(f"process {to}"):
        dist.send(tensor, to)


def receive(tensor: Tensor, source: int) -> Tensor:
    """Fills the tensor with the next one that the process sent."""
    with answers(f"process {source}"):
        dist.recv(tensor, source)
    return tensor


def add_up(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if alone():
        return tensor
    with answers("the other processes"):
        dist.all_reduce(tensor)
    return tensor


def spread(tensor: Tensor) -> Tensor:
    """The master's tensor, in place."""
    if alone():
        return tensor
    with answers("the other processes"):
        dist.broadcast(tensor, MASTER)
    return tensor


def collect(tensor: Tensor) -> list[Tensor]:
    """The tensors of all processes, on the master; none elsewhere."""
    if alone():
        return [tensor]
    mine = dist.get_rank() == MASTER
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if mine else []
    with answers("the other processes"):
        dist.gather(tensor, found if mine else None, MASTER)
    return found


def alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
