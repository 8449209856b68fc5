"""Messages of the asynchronous phase: pushes to the master, its answers, and who waits for which."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import cycle

import torch
from torch import Tensor

from .. import group
from .flat import Flat

# A worker computes a gradient while the push of its last one and the answer to that are under way: with that, no
# process waits for another of its speed. One more would only make the gradients older.
IN_FLIGHT = 2
HEAD = 2  # numbers of a message besides those of the parameters' shapes


class Message:
    """Two numbers and a tensor of each parameter's shape, in one piece of memory that is sent and received as it is.

    A push holds [samples, loss] and the gradients; an answer [goes on, a topology follows] and the parameters.
    """

    def __init__(self, flat: Flat, wire: torch.dtype):
        head = HEAD * torch.float64.itemsize
        self.bytes = torch.empty(head + flat.numbers * wire.itemsize, dtype=torch.uint8)
        self.head = self.bytes[:head].view(torch.float64)
        self.parts = flat.split(self.bytes[head:].view(wire))

    def fill(self, head: tuple[float, float], tensors: Iterable[Tensor | None]) -> None:
        """Writes the message; a gradient that is None counts as 0."""
        self.head[0], self.head[1] = head
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
        message.fill((samples, loss), (p.grad for p in self.flat.parameters))
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
