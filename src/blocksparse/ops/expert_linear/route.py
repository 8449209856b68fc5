"""The routing of a mixture of experts: tokens sorted by expert, and the range of each expert on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ..registry import can_bypass_dispatcher
from ..torch_op import define_op


class Routes(NamedTuple):
    """The order of the index's entries when they are sorted by expert.

    order: int64 `[tokens * k]`, the entry at each sorted position.
    place: int64 `[tokens * k]`, the sorted position of each entry.
    starts: int64 `[experts + 1]` on the CPU: the first entry of each expert, and the end of the last one.
    """

    order: Tensor
    place: Tensor
    starts: Tensor


def route(top_k_index: Tensor, num_experts: int) -> Routes:
    """Sort the entries of an index by expert; the host waits for `starts` once.

    Args:
        top_k_index: integers `[tokens, k]`, the experts of each token; `num_experts` stands for none.
        num_experts: the number of experts.

    Raises:
        BlockSparseError: an index is below 0 or above `num_experts`.

    >>> import torch
    >>> order, place, starts = route(torch.tensor([[2, 0], [0, 3]]), 3)
    >>> order, starts
    (tensor([1, 2, 0, 3]), tensor([0, 2, 2, 3]))
    """
    run = _route if can_bypass_dispatcher(top_k_index) else torch.ops.blocksparse.route
    return Routes(*run(top_k_index, num_experts))


def _route(top_k_index: Tensor, num_experts: int) -> list[Tensor]:
    """Sort tokens by expert: return the order, its inverse, and where each expert's tokens start."""
    experts, order = top_k_index.detach().flatten().long().sort(stable=True)
    edges = torch.arange(num_experts + 2, device=experts.device)
    starts = torch.searchsorted(experts, edges).cpu()
    first, *_, last = starts.tolist()
    if first > 0 or last < len(order):
        expected = f"numbers from 0 to {num_experts - 1}, or {num_experts} for no expert"
        raise BlockSparseError.expected("top_k_index", expected, f"{int(experts[0])} to {int(experts[-1])}")
    return [order, order.argsort(), starts[:-1].clone()]


def _route_meta(top_k_index: Tensor, num_experts: int) -> list[Tensor]:
    order, place = (top_k_index.new_empty(top_k_index.numel(), dtype=torch.int64) for _ in range(2))
    return [order, place, torch.empty(num_experts + 1, dtype=torch.int64, device="cpu")]


define_op("route(Tensor top_k_index, int num_experts) -> Tensor[]", _route, _route_meta)
