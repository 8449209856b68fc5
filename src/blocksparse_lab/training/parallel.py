"""A run of several processes, as torchrun starts them: each takes its part of every batch, the first one writes."""

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
    """How the processes of torchrun work together."""

    timeout: float = option(300.0, "Under torchrun: seconds after which a process that does not answer has stopped.")
    shard: bool = option(
        False, "Under torchrun: each process stores a piece of the model and of the optimizer, by FSDP2."
    )

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return here()[0] == 0

    def joined(self) -> Any:
        """The processes' group, for a `with`: that of torchrun, or this process alone."""
        return group.process_group(self.timeout)


def here() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    return (0, 1) if group.is_single_process() else (dist.get_rank(), dist.get_world_size())


class Loss(nn.Module):
    """The loss of a task, whose model has its parameters."""

    def __init__(self, task: Task):
        super().__init__()
        self.model, self.task = task.model, task
        # Without one, find_unused_parameters warns that there is none.
        self.unused = nn.Parameter(next(task.model.parameters()).new_zeros(()))

    def forward(self, *inputs: Any) -> Tensor:
        return self.task.loss(*inputs)


class Averaged:
    """The loss on this process's part of a batch, for gradients of the mean over all of it; the model may change."""

    def __init__(self, task: Task, processes: int):
        self.task, self.processes = task, processes
        self._made: tuple[list[tuple[int, torch.Size]], nn.Module] | None = None

    def __call__(self, step: int) -> Tensor:
        # DistributedDataParallel has buffers of the gradients' sizes.
        parameters = [(id(p), p.shape) for p in self.task.model.parameters()]
        if self._made is None or self._made[0] != parameters:
            # With find_unused_parameters it does not group the gradients otherwise after the first step: a run that
            # was restarted then sums in the same order. What batch norm counts is the first process's.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has another name since PyTorch 2.13
                wrapped = DistributedDataParallel(
                    Loss(self.task), broadcast_buffers=False, find_unused_parameters=True, init_sync=False
                )
            self._made = parameters, wrapped
        return self._made[1](step)


# In the errors of gloo and NCCL, which are plain RuntimeErrors where they come out of a backward pass.
_OF_MESSAGES = ("gloo", "nccl", "c10d", "timeout", "timed out", "connection", "socket")


@contextmanager
def comm_errors() -> Iterator[None]:
    """Names the process that does not answer, where a message fails within it; other errors stay as they are."""
    try:
        yield
    except RuntimeError as error:
        of_messages = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _OF_MESSAGES)
        if group.is_single_process() or not of_messages:
            raise
        with group.reraise_comm_errors():
            raise


def agreed(value: int) -> int:
    """The first process's number, on all."""
    return int(group.broadcast(torch.tensor(value)))


def rng_states(device: torch.device) -> dict[str, Tensor]:
    """The states of PyTorch's generators of all processes, by the names in a checkpoint."""
    mine = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        mine["cuda"] = torch.cuda.get_rng_state(device)
    states = group.all_gather(mine)
    return {_name(kind, rank): state for rank, one in enumerate(states) for kind, state in one.items()}


def take_rng_states(tensors: Mapping[str, Tensor], device: torch.device, seed: int, step: int, rank: int) -> None:
    """Takes this process's states of a checkpoint; or, where it has fewer processes, draws its own."""
    if _name("cpu", rank) not in tensors:
        seed_process(seed, step, rank)
        return
    torch.set_rng_state(tensors[_name("cpu", rank)])
    if device.type == "cuda" and (name := _name("cuda", rank)) in tensors:
        torch.cuda.set_rng_state(tensors[name], device)


def seed_process(seed: int, step: int, rank: int) -> None:
    """Seeds PyTorch's generators: what is drawn for parts of a batch differs from process to process."""
    drawn = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(drawn >> np.uint64(1)) if rank else seed)


def _name(kind: str, rank: int) -> str:
    return f"rng.{kind}.{rank}" if rank else f"rng.{kind}"
