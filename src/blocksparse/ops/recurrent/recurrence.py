"""The base class of recurrences, and the time steps that they run over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from ...layout import BlockLayout

Tensors = tuple[Tensor | None, ...]


class Recurrence:
    """A recurrence over whole sequences, written twice: as a definition, and as fast code with its own gradients.

    `tensors` are its inputs, initial states and weights, in an order that the subclass defines; some may be None.

        definition(*tensors)                    returns the outputs; slow, but autograd can differentiate it any number
                                                of times
        forward(*tensors, keep)                 returns the outputs, and with `keep` the tensors that backward needs
        backward(tensors, saved, grads, needed)  returns the gradients of the tensors from those of the outputs; those
                                                that are not needed may be None

    Args:
        steps: the time steps of the sequences.
        layouts: the layout of each weight, None for a dense one.
    """

    states: tuple[int, ...] = (2, 3)
    """Positions of the initial h and c (if any) among the tensors. The outputs are h of all steps, and final states."""

    def __init__(self, steps: Any, *layouts: BlockLayout | None) -> None:
        self.steps, self.layouts = steps, layouts

    def definition(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Return the outputs of the tensors, as plain differentiable PyTorch."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], Tensors]:
        """Return (outputs, tensors for `backward`); the latter are empty unless `keep`."""
        raise NotImplementedError

    def backward(self, tensors: Any, saved: Any, grads: tuple[Tensor, ...], needed: Sequence[bool]) -> Tensors:
        """Return the gradients of `tensors` from those of the outputs, through time from the last step to the first."""
        raise NotImplementedError


@dataclass(frozen=True)
class Steps:
    """How the rows of `[rows, features]` data are time steps: step t is the next `sizes[t]` rows.

    Args:
        sizes: rows of each step, never more than in the step before, as in a PackedSequence: shorter sequences end
            earlier, and row r of a step follows row r of the step before.
        reverse: True if time runs from the last step to the first.
    """

    sizes: tuple[int, ...]
    reverse: bool = False
    start: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The first row of each step, and at the end the number of all rows."""
    rows: int = field(init=False, repr=False, compare=False)
    """The number of rows of all steps."""
    batch: int = field(init=False, repr=False, compare=False)
    """The number of sequences."""
    aligned: bool = field(init=False, repr=False, compare=False)
    """Whether all sequences have the same length."""
    order: Sequence[int] = field(init=False, repr=False, compare=False)
    """The steps in the order of time."""

    def __post_init__(self) -> None:
        sizes = self.sizes
        order = range(len(sizes))
        # Stored instead of computed, because each step of each sequence reads them.
        for name, value in (
            ("start", (0, *accumulate(sizes))),
            ("rows", sum(sizes)),
            # Lengths, because torch.compile cannot evaluate the truth of a tuple of dynamic sizes.
            ("batch", sizes[0] if len(sizes) else 0),
            ("aligned", len(sizes) == 0 or sizes[-1] == sizes[0]),
            ("order", order[::-1] if self.reverse else order),
        ):
            object.__setattr__(self, name, value)


class Times(NamedTuple):
    """The time steps of a graph, in which their number may be dynamic.

    sizes: as in `Steps`, or None if each step has the whole batch.
    """

    number: int
    batch: int
    sizes: tuple[int, ...] | None = None
    reverse: bool = False

    def to_steps(self) -> Steps:
        """Return these as `Steps`."""
        return Steps(self.sizes or (self.batch,) * self.number, self.reverse)
