"""Sorts the tokens of a mixture by expert, and tells the host where each expert's begin."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ..registry import can_bypass_dispatcher
from ..torch_op import define_op


class Routes(NamedTuple):
    """Which entry of the index goes where among the entries sorted by expert.

    order: int64 `[tokens * k]`, the entry of each sorted place.
    place: int64 `[tokens * k]`, the sorted place of each entry.
    starts: int64 `[experts + 1]` on the CPU, where the entries of each expert begin, and where the last one ends.
    """

    order: Tensor
    place: Tensor
    starts: Tensor


def route(top_k_index: Tensor, num_experts: int) -> Routes:
    """Sorts the entries of an index by expert; the host waits for `starts` once.

    Args:
        top_k_index: integers `[tokens, k]`, the experts of each token, with `num_experts` for none.
        num_experts: the number of experts.

    Raises:
        BlockSparseError: numbers below 0 or above `num_experts`.

    >>> import torch
    >>> order, place, starts = route(torch.tensor([[2, 0], [0, 3]]), 3)
    >>> order, starts
    (tensor([1, 2, 0, 3]), tensor([0, 2, 2, 3]))
    """
    run = _route if can_bypass_dispatcher(top_k_index) else torch.ops.blocksparse.route
    return Routes(*run(top_k_index, num_experts))


def _route(top_k_index: Tensor, num_experts: int) -> list[Tensor]:
    experts, order = top_k_index.detach().flatten().long().sort(stable=True)
    edges = torch.arange(num_experts + 2, device=experts.device)
    starts = torch.searchsorted(experts, edges).cpu()
    first, *_, last = starts.tolist()
    if first > 0 or last < len(order):
        wanted = f"numbers from 0 to {num_experts - 1}, or {num_experts} for no expert"
        raise BlockSparseError.expected("top_k_index", wanted, f"{int(experts[0])} to {int(experts[-1])}")
    return [order, order.argsort(), starts[:-1].clone()]


def _route_meta(top_k_index: Tensor, num_experts: int) -> list[Tensor]:
    order, place = (top_k_index.new_empty(top_k_index.numel(), dtype=torch.int64) for _ in range(2))
    return [order, place, torch.empty(num_experts + 1, dtype=torch.int64, device="cpu")]


define_op("route(Tensor top_k_index, int num_experts) -> Tensor[]", _route, _route_meta)
