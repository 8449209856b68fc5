"""Runs of several processes under torchrun: each computes a shard of every batch, and rank 0 writes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blocksparse.distributed import group

from ..option import option
from .callback import Task


@dataclass(frozen=True)
class Parallel:
    """Options of a run of several processes."""

    timeout: float = option(300.0, "Under torchrun: seconds without an answer after which a process counts as dead.")
    shard: bool = option(False, "Under torchrun: shard the model and the optimizer by FSDP2.")

    @property
    def first(self) -> bool:
        """Whether this process prints and writes."""
        return rank_and_size()[0] == 0

    def join(self) -> Any:
        """Return a context with torchrun's process group, or with this process alone."""
        return group.process_group(self.timeout)


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    return (0, 1) if group.is_single_process() else (dist.get_rank(), dist.get_world_size())


class LossModule(nn.Module):
    """A task's loss as a module with the parameters of the task's model."""

    def __init__(self, task: Task):
        super().__init__()
        self.model, self.task = task.model, task
        # find_unused_parameters warns if there is no unused parameter.
        self.unused = nn.Parameter(next(task.model.parameters()).new_zeros(()))

    def forward(self, *inputs: Any) -> Tensor:
        return self.task.loss(*inputs)


class DistributedLoss:
    """The loss on this process's shard of a batch, whose gradients DDP averages. The task may change its model."""

    def __init__(self, task: Task, processes: int):
        self.task, self.processes = task, processes
        self._made: tuple[list[tuple[int, torch.Size]], nn.Module] | None = None

    def __call__(self, step: int) -> Tensor:
        # DistributedDataParallel has buffers of the sizes of the gradients.
        parameters = [(id(p), p.shape) for p in self.task.model.parameters()]
        if self._made is None or self._made[0] != parameters:
            # With find_unused_parameters, DDP does not regroup gradients after the first step, so a resumed run sums
            # in the same order. Rank 0 counts the statistics of batch norm.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has another name since PyTorch 2.13
                wrapped = DistributedDataParallel(
                    LossModule(self.task), broadcast_buffers=False, find_unused_parameters=True, init_sync=False
                )
            self._made = parameters, wrapped
        return self._made[1](step)


# Words in errors of gloo and NCCL, which a backward pass raises as plain RuntimeErrors.
_MESSAGE_WORDS = ("gloo", "nccl", "c10d", "timeout", "timed out", "connection", "socket")


@contextmanager
def comm_errors() -> Iterator[None]:
    """Report failed messages with the process that does not answer; other errors pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        is_message = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _MESSAGE_WORDS)
        if group.is_single_process() or not is_message:
            raise
        with group.reraise_comm_errors():
            raise


def broadcast(value: int) -> int:
    """Return rank 0's value on all ranks."""
    return int(group.all_gather(value)[0])


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of PyTorch's generators of all ranks, by their names in a checkpoint."""
    mine = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    states = group.all_gather(mine)
    return {_name(kind, rank): state for rank, one in enumerate(states) for kind, state in one.items()}


def restore_rng_states(tensors: Mapping[str, Tensor], device: torch.device, seed: int, step: int, rank: int) -> None:
    """Restore this rank's generator states; if the checkpoint had fewer ranks, seed the generators."""
    if _name("cpu", rank) not in tensors:
        seed_process(seed, step, rank)
        return
    torch.set_rng_state(tensors[_name("cpu", rank)])
    if device.type == "cuda" and (name := _name("cuda", rank)) in tensors:
        torch.cuda.set_rng_state(tensors[name], device)


def seed_process(seed: int, step: int, rank: int) -> None:
    """Seed PyTorch's generators; ranks draw different numbers for their shards of a batch."""
    drawn = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(drawn >> np.uint64(1)) if rank else seed)


def _name(kind: str, rank: int) -> str:
    return f"rng.{kind}.{rank}" if rank else f"rng.{kind}"
