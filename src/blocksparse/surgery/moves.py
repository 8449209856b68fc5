"""Calls of functions that move features, such as `view`, and whether they still work without some of them."""

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

        `view(2, -1)` does. `view(2, 16)` does not, and `chunk(2)` only if both halves lose the same number.

        Args:
            is_removed: returns a bool for each of several ids.
        """
        if any(each.size != max(each.shape, default=0) for each in self.ids.values()):
            return False  # they depend on several axes
        whole, removed = self._call(None)
        try:
            reduced, removed = self._call(is_removed)
        except (RuntimeError, IndexError, ValueError):
            return False
        expected = [each[~torch.isin(each, removed)] for each in whole]
        return len(reduced) == len(whole) and all(map(torch.equal, expected, map(Tensor.flatten, reduced)))

    def _call(self, is_removed: Callable[[np.ndarray], np.ndarray] | None) -> tuple[list[Tensor], Tensor]:
        """Call the function on numbers of lines, without the removed ones; return the results and these lines."""
        first, removed = 0, [torch.zeros(0, dtype=torch.float64)]

        def lines_of(tensor: Tensor) -> Tensor:
            nonlocal first
            ids = self.ids.get(id(tensor))
            if ids is None:
                return tensor.new_full(tensor.shape, -1) if tensor.is_floating_point() else tensor
            axis = int(np.argmax(ids.shape))
            lines = torch.arange(first, first + ids.size, dtype=torch.float64)
            first += ids.size
            if is_removed is not None:
                missing = torch.from_numpy(is_removed(ids.ravel()))
                removed.append(lines[missing])
                lines = lines[~missing]
            shape = [-1 if dim == axis else 1 for dim in range(tensor.dim())]
            sizes = [len(lines) if dim == axis else size for dim, size in enumerate(tensor.shape)]
            return lines.view(shape).expand(sizes).contiguous()

        args, kwargs = tree_map_only(Tensor, lines_of, (self.args, self.kwargs))
        results = [leaf for leaf in tree_leaves(self.function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        return results, torch.cat(removed)
