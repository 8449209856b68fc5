"""Calls of functions such as `view` that may need all features, and whether they still work without some of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Move:
    """A call of a function that moves features.

    Args:
        function, args, kwargs: the call.
        ids: the feature ids of the tensors among the arguments, by the tensor's id; see `Features`.
        reason: why features must stay if the function does not work without them.
    """

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, ids: Mapping[int, np.ndarray], reason: str
    ):
        self.function, self.args, self.kwargs = function, tuple(args), kwargs
        self.ids, self.reason = ids, reason
        self.touched = np.concatenate([each.ravel() for each in ids.values()])
        """All of these ids."""

    def works_without(self, is_removed: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Return whether the function moves the other features as before if some are removed.

        `view(2, -1)` does. `view(2, 16)` does not, and `chunk(2)` only if both halves lose the same number. Features
        that lie along several axes, such as heads, have to be whole lines of one.

        Args:
            is_removed: returns a bool for each id of an array.
        """
        whole, _ = self._call(None)
        try:
            reduced, removed = self._call(is_removed)
            expected = [_without(each, torch.isin(each, removed)) for each in whole]
        except (RuntimeError, IndexError, ValueError):
            return False
        return len(reduced) == len(whole) and all(map(torch.equal, expected, reduced))

    def _call(self, is_removed: Callable[[np.ndarray], np.ndarray] | None) -> tuple[list[Tensor], Tensor]:
        """Call the function on numbers of lines, without the removed ones; return the results and these lines."""
        first, removed = 0, [torch.zeros(0, dtype=torch.float64, device="cpu")]

        def lines_of(tensor: Tensor) -> Tensor:
            nonlocal first
            ids = self.ids.get(id(tensor))
            if ids is None:
                return tensor.new_full(tensor.shape, -1) if tensor.is_floating_point() else tensor
            lines = torch.arange(first, first + ids.size, dtype=torch.float64, device="cpu").view(ids.shape)
            first += ids.size
            if is_removed is not None:
                missing = torch.from_numpy(is_removed(ids))
                removed.append(lines[missing])
                lines = _without(lines, missing)
            sizes = [size if along == 1 else -1 for size, along in zip(tensor.shape, ids.shape, strict=True)]
            return lines.expand(sizes).contiguous()

        args, kwargs = tree_map_only(Tensor, lines_of, (self.args, self.kwargs))
        results = [leaf for leaf in tree_leaves(self.function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        return results, torch.cat(removed)


class Combination:
    """A call of a function of features and of a tensor that no layer computes, such as a rotation by places.

    Args:
        ids: the feature ids of a tensor; see `Features`.
        varies: for each axis, whether the other tensor has an entry for each line of it.
        reason: why features must stay if the function does not work without them.
    """

    def __init__(self, ids: np.ndarray, varies: list[bool], reason: str):
        self.ids, self.varies, self.reason = ids, varies, reason
        self.touched = ids.ravel()
        """All of these ids."""

    def works_without(self, is_removed: Callable[[np.ndarray], np.ndarray]) -> bool:
        """Return whether the other tensor fits the features that stay, if some are removed; see `Move`."""
        missing = is_removed(self.ids)
        along = tuple(axis for axis, varies in enumerate(self.varies) if varies)
        return np.array_equal(missing.any(along), missing.all(along))


def _without(lines: Tensor, missing: Tensor) -> Tensor:
    """Return lines without the missing ones, which have to be all along the other axes; else raise a ValueError."""
    if not missing.any():
        return lines
    for axis in range(lines.dim()):
        by_line = missing.movedim(axis, 0).flatten(1)
        if torch.equal(by_line.any(1), by_line.all(1)):
            return lines.index_select(axis, (~by_line.all(1)).nonzero().flatten())
    raise ValueError("some elements of several lines are missing")
