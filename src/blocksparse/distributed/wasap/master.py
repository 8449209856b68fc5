"""The master of the asynchronous phase: the one network that all workers' gradients train."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...layout import BlockLayout
from ...sparsity.sparse_training.set import SET
from ...sparsity.sparse_training.sgd import SGD
from .. import group
from .flat import Flat, topology_of
from .formulas import retain_valid

# A push is [samples, loss] and the gradients; its answer [goes on, topology follows], that topology, the parameters.
HEAD = torch.float64


@dataclass
class Finished:
    """The network as it was at the end of an epoch."""

    epoch: int
    layouts: list[BlockLayout]
    values: Tensor
    momentum: Tensor
    calls: int
    loss: float
    samples: int
    seconds: float


class Master:
    """Applies gradients one by one, evolves the topology after each epoch, hands out what is newest.

    Args:
        flat, optimizer, method: of the network.
        first, last: the epochs, `last` not among them.
        steps: gradients of all workers in an epoch.

    Every worker other than the master's own has a thread here, `serve`.
    """

    def __init__(self, flat: Flat, optimizer: SGD, method: SET, first: int, last: int, steps: int):
        self.flat, self.optimizer, self.method = flat, optimizer, method
        self.epoch, self.steps, self.left = first, steps, (last - first) * steps
        self.lock = threading.Lock()
        self.begun = self.layouts = flat.layouts()
        self.finished: deque[Finished] = deque()
        self.failure: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        self.loss, self.samples, self.start = 0.0, 0, time.perf_counter()

    def push(self, gradients: Tensor, layouts: Sequence[BlockLayout], samples: int, loss: float) -> bool:
        """Takes a step with a gradient that was computed on these layouts; returns whether there are more to come.

        A gradient after the last step is dropped.
        """
        with self.lock:
            self.check()
            if self.left == 0:
                return False
            for parameter, part in zip(self.flat.parameters, self._parts(gradients, layouts), strict=True):
                parameter.grad = part.to(parameter)
            self.optimizer.step()
            self.loss, self.samples, self.left = self.loss + loss * samples, self.samples + samples, self.left - 1
            if self.left % self.steps == 0:
                self._end_of_epoch()
            return self.left > 0

    def _parts(self, gradients: Tensor, layouts: Sequence[BlockLayout]) -> list[Tensor]:
        parts = self.flat.split(gradients)
        for i, parameter in enumerate(self.flat.parameters):
            module = self.flat.module_of.get(parameter)
            if module is not None:
                parts[i] = retain_valid(parts[i], layouts[module], self.layouts[module])
        return parts

    def _end_of_epoch(self) -> None:
        self.method.step()
        self.layouts = self.flat.layouts()
        self.epoch += 1
        seconds = time.perf_counter() - self.start
        values, momentum = self.flat.values(), self.flat.momentum(self.optimizer)
        mean = self.loss / max(self.samples, 1)
        calls = self.method.calls
        self.finished.append(Finished(self.epoch, self.layouts, values, momentum, calls, mean, self.samples, seconds))
        self._begin()

    def newest(self) -> tuple[list[BlockLayout], Tensor]:
        """The topology, and a copy of the parameters."""
        with self.lock:
            return self.layouts, self.flat.values()

    def check(self) -> None:
        """Raises what ended a worker's thread."""
        if self.failure is not None:
            raise self.failure

    def serve(self, worker: int) -> None:
        """Answers one worker until there are no more steps."""
        try:
            self._serve(worker)
        except Exception as error:  # the master's own thread raises it
            self.failure = error

    def _serve(self, worker: int) -> None:
        had = self.begun  # and not what the first steps of others may have made of it
        head, gradients = torch.empty(2, dtype=HEAD), self.flat.empty()
        goes_on = True
        while goes_on:
            samples, loss = group.receive(head, worker).tolist()
            group.receive(gradients, worker)
            goes_on = self.push(gradients.to(self.flat.parameters[0].device), had, int(samples), loss)
            layouts, values = self.newest()
            changed = layouts is not had
            group.send(torch.tensor([goes_on, changed], dtype=HEAD), worker)
            if changed:
                group.send(topology_of(layouts), worker)
            group.send(values.cpu(), worker)
            had = layouts


def push_to_master(flat: Flat, samples: int, loss: float) -> bool:
    """A worker's side of it: gives its gradients, takes the newest network; returns whether there is more to do."""
    group.send(torch.tensor([samples, loss], dtype=HEAD), group.MASTER)
    group.send(flat.gradients().cpu(), group.MASTER)
    goes_on, changed = group.receive(torch.empty(2, dtype=HEAD), group.MASTER).tolist()
    if changed:
        topology = group.receive(torch.empty_like(flat.topology()), group.MASTER)
        flat.load_layouts(flat.layouts_of(topology))
    flat.load_values(group.receive(flat.empty(), group.MASTER))
    return bool(goes_on)
