"""The asynchronous phase: the master trains one network with the gradients of all workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from blocksparse.distributed.group import MASTER, receive, reraise_comm_errors
from blocksparse.distributed.wasap import retain_valid
from blocksparse.layout import BlockLayout
from blocksparse.sparsity.sparse_training.set import SET
from blocksparse.sparsity.sparse_training.sgd import SGD

from .flat import FlatModel, flat_topology

# A worker computes a gradient while its last push and the answer to that push are under way. Then processes of equal
# speed never wait for each other. A third gradient in flight would only make gradients older.
IN_FLIGHT = 2


class Message:
    """Two numbers and a tensor for each parameter, in one buffer that is sent and received without copies.

    A push has the head [samples, loss] and the gradients. An answer has the head [training continues, a topology
    follows] and the parameters. `present` marks the tensors that are not None.
    """

    def __init__(self, flat: FlatModel, wire: torch.dtype):
        sizes = [2 * torch.float64.itemsize, flat.numel * wire.itemsize, len(flat.parameters)]
        self.bytes = torch.empty(sum(sizes), dtype=torch.uint8)
        head, parts, self.present = self.bytes.split(sizes)
        self.head = head.view(torch.float64)
        self.parts = flat.split(parts.view(wire))

    def fill(self, head: tuple[float, float], tensors: Sequence[Tensor | None]) -> None:
        """Write the message, with zeros for a tensor that is None."""
        self.head[0], self.head[1] = head
        self.present.copy_(torch.tensor([tensor is not None for tensor in tensors]))
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.zero_() if tensor is None else part.copy_(tensor.detach())


class Transfer:
    """A message under way; its tensor must not be used until `wait` returns."""

    def __init__(self, tensor: Tensor, peer: int, is_send: bool):
        self.peer = peer
        with reraise_comm_errors(f"process {peer}"):
            self.work = dist.isend(tensor, peer) if is_send else dist.irecv(tensor, peer)

    def wait(self) -> None:
        with reraise_comm_errors(f"process {self.peer}"):
            if self.work is not None:
                self.work.wait()


class MasterConnection:
    """A worker's connection to the master: sends gradients, receives the newest network."""

    def __init__(self, flat: FlatModel, wire: torch.dtype):
        self.flat = flat
        self.pushes = cycle([Message(flat, wire) for _ in range(IN_FLIGHT)])
        self.sends: deque[Transfer] = deque()
        self.answer = Message(flat, wire)
        self._start_receive()

    def _start_receive(self) -> None:
        self.receiving = Transfer(self.answer.bytes, MASTER, is_send=False)

    def push(self, samples: int, loss: float) -> bool:
        """Send the parameters' gradients and load the answer to an earlier push; return whether training continues."""
        message = next(self.pushes)
        message.fill((samples, loss), [p.grad for p in self.flat.parameters])
        self.sends.append(Transfer(message.bytes, MASTER, is_send=True))
        if len(self.sends) < IN_FLIGHT:
            return True
        if self._pull():
            self._start_receive()
            return True
        while self.sends:  # the master answers every push
            self._start_receive()
            self._pull()
        return False

    def _pull(self) -> bool:
        """Wait for the master's answer, load its parameters and layouts, and return whether training continues."""
        self.receiving.wait()
        self.sends.popleft().wait()
        continues, topology_follows = self.answer.head.tolist()
        if topology_follows:
            topology = receive(torch.empty_like(self.flat.topology()), MASTER)
            self.flat.load_layouts(self.flat.layouts_of(topology))
        self.flat.load_values(self.answer.parts)
        return bool(continues)


@dataclass
class FinishedEpoch:
    """The network at the end of an epoch, and the epoch's results; `calls` is SET's count of evolutions."""

    epoch: int
    layouts: list[BlockLayout]
    values: Tensor
    momentum: Tensor
    calls: int
    loss: float
    samples: int
    seconds: float


class Master:
    """Takes a step with each gradient, evolves the topology after each epoch, and sends out the newest network.

    The master is a worker too. It answers the others between two steps of its own, in one thread. A thread for each
    worker waits for pushes and holds Python's lock for microseconds only. (When threads took the steps, they and the
    master's own worker competed for that lock, and two processes were no faster than one.)

    Args:
        flat, optimizer, method: of the network.
        first, last: the range of epochs, without `last`.
        steps: gradients of all workers in an epoch.
        workers: the number of workers, the master included.
        wire: the dtype of gradients and parameters in messages.
    """

    def __init__(
        self,
        flat: FlatModel,
        optimizer: SGD,
        method: SET,
        first: int,
        last: int,
        steps: int,
        workers: int = 1,
        wire: torch.dtype = torch.float32,
    ):
        self.flat, self.optimizer, self.method = flat, optimizer, method
        self.epoch, self.steps, self.steps_left = first, steps, (last - first) * steps
        self.layouts = flat.layouts()
        self.finished: deque[FinishedEpoch] = deque()
        self._begin_epoch()
        self.arrived: SimpleQueue[_Worker | Exception] = SimpleQueue()
        self.active_workers = workers - 1
        for rank in range(1, workers):
            _Worker(rank, Message(flat, wire), Message(flat, wire), self.layouts, self.arrived)

    def _begin_epoch(self) -> None:
        self.loss, self.samples, self.start = 0.0, 0, time.perf_counter()

    def step(self, samples: int, loss: float) -> None:
        """Take an optimizer step with the parameters' gradients, and add the loss to the epoch's mean.

        If this was the epoch's last step, end the epoch.
        """
        self.optimizer.step()
        self.loss += loss * samples
        self.samples += samples
        self.steps_left -= 1
        if self.steps_left % self.steps == 0:
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Change layouts, record the finished epoch, and begin the next one."""
        self.method.step()
        self.layouts = self.flat.layouts()
        self.epoch += 1
        self.finished.append(
            FinishedEpoch(
                self.epoch,
                self.layouts,
                self.flat.values(),
                self.flat.momentum(self.optimizer),
                self.method.calls,
                self.loss / max(self.samples, 1),
                self.samples,
                time.perf_counter() - self.start,
            )
        )
        self._begin_epoch()

    def serve(self) -> None:
        """Take steps with the gradients that have arrived, and answer them."""
        while self.active_workers and not self.arrived.empty():
            self._serve_one()

    def dismiss(self) -> None:
        """Wait for the last pushes, drop their gradients, and send the final network to the workers."""
        while self.active_workers:
            self._serve_one()

    def _serve_one(self) -> None:
        """Wait for a push of gradients, step with them if steps are left, and send the network to its worker.

        Raises:
            Exception: receiving from a worker failed.
        """
        worker = self.arrived.get()
        if isinstance(worker, Exception):
            raise worker
        layouts = worker.layouts.popleft()
        if self.steps_left > 0:
            samples, loss = worker.push.head.tolist()
            parts = list(worker.push.parts)
            for i, parameter in enumerate(self.flat.parameters):
                module = self.flat.module_of.get(parameter)
                if module is not None:
                    parts[i] = retain_valid(parts[i], layouts[module], self.layouts[module])
            self.flat.load_gradients(parts, worker.push.present.tolist())
            self.step(int(samples), loss)
        if worker.send(self.steps_left > 0, self.layouts, self.flat.parameters):
            self.active_workers -= 1


class _Worker:
    """The master's record of another process: its messages, and the layouts that its next gradients will be for."""

    def __init__(
        self,
        rank: int,
        push: Message,
        answer: Message,
        layouts: list[BlockLayout],
        arrived: SimpleQueue[_Worker | Exception],
    ):
        self.rank, self.push, self.answer, self.arrived = rank, push, answer, arrived
        self.layouts = deque([layouts] * IN_FLIGHT)  # of the next pushes, in their order
        self.final_answers = 0
        self.sends: list[Transfer] = []
        self.more_pushes: SimpleQueue[bool] = SimpleQueue()  # after each push, whether another one follows
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        """Receive the worker's pushes in this thread until there are no more; an error goes to the master's queue."""
        try:
            more = True
            while more:
                receive(self.push.bytes, self.rank)
                self.arrived.put(self)
                more = self.more_pushes.get()
        except Exception as error:  # the master's thread raises it
            self.arrived.put(error)

    def send(self, continues: bool, layouts: list[BlockLayout], parameters: Sequence[Tensor]) -> bool:
        """Answer the push; return whether it was the worker's last one."""
        if not continues:
            self.final_answers += 1
        last = self.final_answers == IN_FLIGHT
        self.more_pushes.put(not last)  # the thread may receive the next push
        for transfer in self.sends:
            transfer.wait()
        changed = layouts is not self.layouts[-1]
        self.answer.fill((continues, changed), parameters)
        self.sends = [Transfer(self.answer.bytes, self.rank, is_send=True)]
        if changed:
            self.topology = flat_topology(layouts)  # kept until it is sent
            self.sends.append(Transfer(self.topology, self.rank, is_send=True))
        if last:
            for transfer in self.sends:
                transfer.wait()
        self.layouts.append(layouts)
        return last
