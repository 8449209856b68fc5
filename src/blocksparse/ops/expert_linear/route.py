"""The routing of a mixture of experts: rows sorted by expert, the range of each expert, and sums by token again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import BlockSparseError
from .. import workspace
from ..checks import check_tangents
from ..registry import can_bypass_dispatcher, in_transform
from ..torch_op import LIBRARY, define_op


class Routes(NamedTuple):
    """The order of the index's entries when they are sorted by expert.

    order: int64 `[tokens * k]`, the entry at each sorted position.
    token: int64 `[tokens * k]`, the token of this entry.
    place: int64 `[tokens, k]`, the sorted position of each entry.
    starts: int64 `[experts + 1]` on the CPU: the first entry of each expert, and the end of the last one.
    """

    order: Tensor
    token: Tensor
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
    >>> routes = route(torch.tensor([[2, 0], [0, 3]]), 3)
    >>> routes.order, routes.starts
    (tensor([1, 2, 0, 3]), tensor([0, 2, 2, 3]))
    """
    run = _route if can_bypass_dispatcher(top_k_index) else torch.ops.blocksparse.route
    return Routes(*run(top_k_index, num_experts))


def _route(top_k_index: Tensor, num_experts: int) -> list[Tensor]:
    """Sort entries by expert; return order, token, place and starts, as in `Routes`."""
    experts, order = top_k_index.detach().flatten().long().sort(stable=True)
    edges = torch.arange(num_experts + 2, device=experts.device)
    starts = torch.searchsorted(experts, edges).cpu()
    first, *_, last = starts.tolist()
    if first > 0 or last < len(order):
        expected = f"numbers from 0 to {num_experts - 1}, or {num_experts} for no expert"
        raise BlockSparseError.expected("top_k_index", expected, f"{int(experts[0])} to {int(experts[-1])}")
    token = order // max(top_k_index.shape[1], 1)
    return [order, token, order.argsort().view(top_k_index.shape), starts[:-1].clone()]


def _route_meta(top_k_index: Tensor, num_experts: int) -> list[Tensor]:
    order, token = (top_k_index.new_empty(top_k_index.numel(), dtype=torch.int64) for _ in range(2))
    return [
        order,
        token,
        top_k_index.new_empty(top_k_index.shape, dtype=torch.int64),
        torch.empty(num_experts + 1, dtype=torch.int64, device="cpu"),
    ]


define_op("route(Tensor top_k_index, int num_experts) -> Tensor[]", _route, _route_meta)


# -- rows of tokens and of experts -------------------------------------------------------------------------------


def spread(x: Tensor, routes: Routes) -> Tensor:
    """Return the row of x `[tokens, features]` for each sorted entry, `[tokens * k, features]`.

    >>> import torch
    >>> routes = route(torch.tensor([[2, 0], [0, 1]]), 3)
    >>> spread(torch.tensor([[1.0], [2.0]]), routes).T
    tensor([[1., 2., 2., 1.]])
    """
    check_tangents(hidden_states=x)
    if in_transform():
        return F.embedding(routes.token, x)
    y: Tensor = torch.ops.blocksparse.spread(x, routes.token, routes.place)
    return y


def collect(y: Tensor, routes: Routes) -> Tensor:
    """Return for each token the sum of its k rows of y, `[tokens, features]`; sums have a fixed order on all devices.

    >>> import torch
    >>> routes = route(torch.tensor([[2, 0], [0, 1]]), 3)
    >>> collect(torch.tensor([[1.0], [2.0], [4.0], [8.0]]), routes).T
    tensor([[9., 6.]])
    """
    if in_transform():
        return F.embedding(routes.place, y).sum(1)
    x: Tensor = torch.ops.blocksparse.collect(y, routes.token, routes.place)
    return x


def _spread(x: Tensor, token: Tensor, place: Tensor) -> Tensor:
    out = workspace.empty((len(token), x.shape[1]), x.dtype, x.device)
    return torch.index_select(x, 0, token, out=out)


def _spread_meta(x: Tensor, token: Tensor, place: Tensor) -> Tensor:
    return x.new_empty(token.shape[0], x.shape[1])


def _collect(y: Tensor, token: Tensor, place: Tensor) -> Tensor:
    if y.dtype is torch.float64 or not place.shape[1]:  # the sum of bags is slow in float64
        return F.embedding(place, y).sum(1)
    return F.embedding_bag(place, y, mode="sum")


def _collect_meta(y: Tensor, token: Tensor, place: Tensor) -> Tensor:
    return y.new_empty(place.shape[0], y.shape[1])


def _save_places(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


_OF_ROWS = "Tensor rows, Tensor token, Tensor place"
for _name, _adjoint, _run_op, _meta in (
    ("spread", "collect", _spread, _spread_meta),
    ("collect", "spread", _collect, _collect_meta),
):
    define_op(f"{_name}({_OF_ROWS}) -> Tensor", _run_op, _meta)

    def _backward(ctx: Any, grad: Tensor, adjoint: str = _adjoint) -> tuple[Tensor, None, None]:
        return getattr(torch.ops.blocksparse, adjoint)(grad, *ctx.saved_tensors), None, None

    torch.library.register_autograd(f"blocksparse::{_name}", _backward, setup_context=_save_places, lib=LIBRARY)
