"""The asynchronous phase: one network at the master, which all gradients train, and the messages between them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue

import torch
from torch import Tensor

from blocksparse.distributed import group
from blocksparse.distributed.wasap import retain_valid
from blocksparse.layout import BlockLayout
from blocksparse.sparsity.sparse_training.set import SET
from blocksparse.sparsity.sparse_training.sgd import SGD

from .flat import Flat, topology_of

# A worker computes a gradient while the push of its last one and the answer to that are under way: with that, no
# process waits for another of its speed. One more would only make the gradients older.
IN_FLIGHT = 2


class Message:
    """Two numbers and a tensor of each parameter's shape, in one piece of memory that is sent and received as it is.

    A push holds [samples, loss] and the gradients; an answer [goes on, a topology follows] and the parameters. Which of
    the tensors are there is said too.
    """

    def __init__(self, flat: Flat, wire: torch.dtype):
        sizes = [2 * torch.float64.itemsize, flat.numbers * wire.itemsize, len(flat.parameters)]
        self.bytes = torch.empty(sum(sizes), dtype=torch.uint8)
        head, parts, self.there = self.bytes.split(sizes)
        self.head = head.view(torch.float64)
        self.parts = flat.split(parts.view(wire))

    def fill(self, head: tuple[float, float], tensors: Sequence[Tensor | None]) -> None:
        """Writes the message; a gradient that is None takes the place of zeros."""
        self.head[0], self.head[1] = head
        self.there.copy_(torch.tensor([tensor is not None for tensor in tensors]))
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.zero_() if tensor is None else part.copy_(tensor.detach())


class ToMaster:
    """A worker's side: gives gradients, takes the newest network, and waits for neither where it need not."""

    def __init__(self, flat: Flat, wire: torch.dtype):
        self.flat = flat
        self.pushes = cycle([Message(flat, wire) for _ in range(IN_FLIGHT)])
        self.sent: deque[group.Pending] = deque()
        self.answer = Message(flat, wire)
        self.coming = group.start_receive(self.answer.bytes, group.MASTER)

    def push(self, samples: int, loss: float) -> bool:
        """Gives the parameters' gradients, takes the answer to an earlier push; returns whether there is more to do."""
        message = next(self.pushes)
        message.fill((samples, loss), [p.grad for p in self.flat.parameters])
        self.sent.append(group.start_send(message.bytes, group.MASTER))
        if len(self.sent) < IN_FLIGHT:
            return True
        if self._pull():
            self.coming = group.start_receive(self.answer.bytes, group.MASTER)
            return True
        while self.sent:  # the master answers every push
            self.coming = group.start_receive(self.answer.bytes, group.MASTER)
            self._pull()
        return False

    def _pull(self) -> bool:
        self.coming.wait()
        self.sent.popleft().wait()
        goes_on, topology_follows = self.answer.head.tolist()
        if topology_follows:
            topology = group.receive(torch.empty_like(self.flat.topology()), group.MASTER)
            self.flat.load_layouts(self.flat.layouts_of(topology))
        self.flat.load_values(self.answer.parts)
        return bool(goes_on)


@dataclass
class Finished:
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

    The process is a worker too, and answers the others between two steps of its own: one thread does all the work.
    What waits for the pushes of a worker is a thread that holds Python's lock for microseconds only. (Threads that took
    the steps fought for that lock with the process's own worker, and two processes were no faster than one.)

    Args:
        flat, optimizer, method: of the network.
        first, last: the epochs, `last` not among them.
        steps: gradients of all workers in an epoch.
        workers: with the master's own.
        wire: the dtype of gradients and parameters in messages.
    """

    def __init__(
        self,
        flat: Flat,
        optimizer: SGD,
        method: SET,
        first: int,
        last: int,
        steps: int,
        workers: int = 1,
        wire: torch.dtype = torch.float32,
    ):
        self.flat, self.optimizer, self.method = flat, optimizer, method
        self.epoch, self.steps, self.left = first, steps, (last - first) * steps
        self.layouts = flat.layouts()
        self.finished: deque[Finished] = deque()
        self._begin()
        self.arrived: SimpleQueue[_Worker | Exception] = SimpleQueue()
        self.unserved = workers - 1
        for rank in range(1, workers):
            _Worker(rank, Message(flat, wire), Message(flat, wire), self.layouts, self.arrived)

    def _begin(self) -> None:
        self.loss, self.samples, self.start = 0.0, 0, time.perf_counter()

    def step(self, samples: int, loss: float) -> None:
        """Takes a step with the gradients that the parameters have."""
        self.optimizer.step()
        self.loss, self.samples, self.left = self.loss + loss * samples, self.samples + samples, self.left - 1
        if self.left % self.steps == 0:
            self._end_of_epoch()

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

    def serve(self) -> None:
        """Takes steps with the gradients that have arrived, and answers them."""
        while self.unserved and not self.arrived.empty():
            self._serve_one()

    def dismiss(self) -> None:
        """Waits for the pushes that are still to come, drops their gradients, and gives the workers the end result."""
        while self.unserved:
            self._serve_one()

    def _serve_one(self) -> None:
        worker = self.arrived.get()
        if isinstance(worker, Exception):
            raise worker
        layouts = worker.layouts.popleft()
        if self.left > 0:
            samples, loss = worker.push.head.tolist()
            parts = list(worker.push.parts)
            for i, parameter in enumerate(self.flat.parameters):
                module = self.flat.module_of.get(parameter)
                if module is not None:
                    parts[i] = retain_valid(parts[i], layouts[module], self.layouts[module])
            self.flat.load_gradients(parts, worker.push.there.tolist())
            self.step(int(samples), loss)
        if worker.send(self.left > 0, self.layouts, self.flat.parameters):
            self.unserved -= 1


class _Worker:
    """What the master knows of another process: messages, and the layouts that its gradients will be for."""

    def __init__(
        self,
        rank: int,
        push: Message,
        answer: Message,
        layouts: list[BlockLayout],
        arrived: SimpleQueue[_Worker | Exception],
    ):
        self.rank, self.push, self.answer, self.arrived = rank, push, answer, arrived
        self.layouts = deque([layouts] * IN_FLIGHT)  # of the next pushes, in the order of their coming
        self.after_end = 0  # how many pushes were answered that training is over
        self.sent: list[group.Pending] = []
        self.taken: SimpleQueue[bool] = SimpleQueue()  # after each push, whether there are more
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            goes_on = True
            while goes_on:
                group.receive(self.push.bytes, self.rank)
                self.arrived.put(self)
                goes_on = self.taken.get()
        except Exception as error:  # the master's own thread raises it
            self.arrived.put(error)

    def send(self, goes_on: bool, layouts: list[BlockLayout], parameters: Sequence[Tensor]) -> bool:
        """Answers the push; returns whether it was the last one."""
        if not goes_on:
            self.after_end += 1
        last = self.after_end == IN_FLIGHT
        self.taken.put(not last)  # the next may come
        for pending in self.sent:
            pending.wait()
        changed = layouts is not self.layouts[-1]
        self.answer.fill((goes_on, changed), parameters)
        self.sent = [group.start_send(self.answer.bytes, self.rank)]
        if changed:
            self.topology = topology_of(layouts)
            self.sent.append(group.start_send(self.topology, self.rank))
        if last:
            for pending in self.sent:
                pending.wait()
        self.layouts.append(layouts)
        return last
