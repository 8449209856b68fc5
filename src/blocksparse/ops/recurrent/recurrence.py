"""What a recurrence is, and the time steps that it runs over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from ...layout import BlockLayout

Tensors = tuple[Tensor | None, ...]


class Recurrence:
    """A recurrence over a whole sequence, written twice: as a definition, and by hand.

    `tensors` are its inputs, initial states and weights in an order of its own, some may be None; so are the gradients.

        definition(*tensors)                    the outputs, in operations that autograd differentiates as often as one
                                                likes; slow
        forward(*tensors, keep)                 the outputs, and what backward needs besides the tensors if it is to be
                                                kept
        backward(tensors, kept, grads, needed)  the gradients of the tensors from those of the outputs; None at will
                                                for what is not needed

    Args:
        steps: of the sequences.
        layouts: of the weights; None where one is dense.
    """

    states = 2, 3
    """The positions of the initial h and c among the tensors; the outputs are h of all steps, the final h and c."""

    def __init__(self, steps: Any, *layouts: BlockLayout | None) -> None:
        self.steps, self.layouts = steps, layouts

    def definition(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        raise NotImplementedError

    def backward(
        self, tensors: Any, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: Sequence[bool]
    ) -> Tensors:
        raise NotImplementedError


@dataclass(frozen=True)
class Steps:
    """How the rows of `[rows, features]` data are time steps: step t is the next `sizes[t]` rows.

    Args:
        sizes: rows of each step, never more than of the step before, as in a PackedSequence: shorter sequences end
            earlier, and row r of a step belongs to row r of the step before.
        reverse: whether time runs from the last step to the first.
    """

    sizes: tuple[int, ...]
    reverse: bool = False
    start: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The first row of each step, and the number of rows."""
    rows: int = field(init=False, repr=False, compare=False)
    """Of all steps."""
    batch: int = field(init=False, repr=False, compare=False)
    """The number of sequences."""
    aligned: bool = field(init=False, repr=False, compare=False)
    """Whether all sequences have the same length."""
    order: Sequence[int] = field(init=False, repr=False, compare=False)
    """The steps as time runs."""

    @classmethod
    def equal(cls, steps: int, batch: int, reverse: bool = False) -> Steps:
        """Steps of sequences that all have the same length."""
        return cls((batch,) * steps, reverse)

    def __post_init__(self) -> None:
        sizes = self.sizes
        order = range(len(sizes))
        # Stored, not computed, as each step of each sequence reads these.
        for name, value in (
            ("start", (0, *accumulate(sizes))),
            ("rows", sum(sizes)),
            # By lengths: torch.compile knows no truth of sizes that are left open.
            ("batch", sizes[0] if len(sizes) else 0),
            ("aligned", len(sizes) == 0 or sizes[-1] == sizes[0]),
            ("order", order[::-1] if self.reverse else order),
        ):
            object.__setattr__(self, name, value)


class Times(NamedTuple):
    """The steps of sequences before they are spelled out: in a graph their number may be open.

    sizes: as of `Steps`, or None where each step has the whole batch.
    """

    number: int
    batch: int
    sizes: tuple[int, ...] | None = None
    reverse: bool = False

    def spelled(self) -> Steps:
        """The same as `Steps`."""
        return Steps(self.sizes or (self.batch,) * self.number, self.reverse)
