"""The time steps of a batch of sequences, and the states that pass through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...cached import cached_property
from .. import workspace


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

    @classmethod
    def equal(cls, steps: int, batch: int, reverse: bool = False) -> Steps:
        """Steps of sequences that all have the same length."""
        return cls((batch,) * steps, reverse)

    @property
    def rows(self) -> int:
        """Of all steps."""
        return self.start[-1]

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.sizes[0] if self.sizes else 0

    @property
    def aligned(self) -> bool:
        """Whether all sequences have the same length."""
        return not self.sizes or self.sizes[-1] == self.sizes[0]

    @cached_property
    def start(self) -> tuple[int, ...]:
        """The first row of each step, and the number of rows."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size)
        return tuple(starts)

    @property
    def order(self) -> Sequence[int]:
        """The steps as time runs."""
        steps = range(len(self.sizes))
        return steps[::-1] if self.reverse else steps

    def cut(self, data: Tensor) -> Sequence[Tensor]:
        """`[rows, features]` as one view per step."""
        return data.split(self.sizes)


class Trajectory:
    """A state on its way through the steps: what each step takes (`before`) and what it leaves (`after`).

    The step itself writes `after[t]`, and then calls `advance(t)`. Where all sequences have the same length, what one
    step leaves is what the next one takes, in the same memory.

    Args:
        steps: which.
        initial: `[batch, features]`, what the first step of each sequence takes.
        x: `[rows, input]`, or None. With it `rows_before` are the rows [x, what the step takes], one after the other in
            memory.
    """

    def __init__(self, steps: Steps, initial: Tensor, x: Tensor | None = None):
        self.steps = steps
        rows, batch = steps.rows, len(initial)
        at = 0 if x is None else x.shape[1]
        if steps.aligned:
            memory = self._empty(rows + batch, at, initial)
            first, last = memory[:rows], memory[batch:]
            self.rows_before, after = (last, first) if steps.reverse else (first, last)
            (memory[rows:] if steps.reverse else memory[:batch])[:, at:] = initial
            self._final = (memory[:batch] if steps.reverse else memory[rows:])[:, at:]
        else:
            self.rows_before, after = self._empty(rows, at, initial), self._empty(rows, at, initial)
            self._final = initial.clone()
            size = steps.sizes[steps.order[0]]
            self.rows_before[steps.start[steps.order[0]] :][:size, at:] = initial[:size]
        if x is not None:
            self.rows_before[:, :at] = x
        self.all_before, self.all_after = self.rows_before[:, at:], after[:, at:]
        self.before, self.after = steps.cut(self.all_before), steps.cut(self.all_after)

    @staticmethod
    def _empty(rows: int, more: int, like: Tensor) -> Tensor:
        return workspace.empty((rows, more + like.shape[1]), like.dtype, like.device)

    def advance(self, t: int) -> None:
        """Passes on the state that step t left."""
        if self.steps.aligned:
            return
        size = self.steps.sizes[t]
        # Sequences that are over keep their final state; those that have not begun, their initial one.
        self._final[:size] = self.after[t]
        following = t - 1 if self.steps.reverse else t + 1
        if 0 <= following < len(self.steps.sizes):
            self.before[following].copy_(self._final[: self.steps.sizes[following]])

    @property
    def final(self) -> Tensor:
        """`[batch, features]`, what the last step of each sequence left."""
        return self._final


class StateGradient:
    """The gradient at a state on its way back through the steps.

    Args:
        steps: which.
        final: `[batch, features]`, the gradient at the final state.
    """

    def __init__(self, steps: Steps, final: Tensor):
        self._aligned = steps.aligned
        self._sizes = steps.sizes
        self._grad = final.contiguous() if steps.aligned else final.clone()

    def at(self, t: int) -> Tensor:
        """The gradient at what step t left."""
        return self._grad if self._aligned else self._grad[: self._sizes[t]]

    def set(self, t: int, grad: Tensor) -> None:
        """The gradient at what step t took."""
        if self._aligned:
            self._grad = grad
        else:
            self._grad[: self._sizes[t]] = grad

    @property
    def initial(self) -> Tensor:
        """`[batch, features]`, the gradient at the initial state."""
        return self._grad
