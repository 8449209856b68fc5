"""Supports `torch.vmap` of an op by one call per entry of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register(op: torch._ops.OpOverload, library: torch.library.Library) -> None:
    """Lets `torch.vmap` call the op once for each entry of the batch; gradients pass through to the whole.

    One layout serves them all, so that its index tensors have no batch.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        def entry(i: int) -> Callable[[Any, Any], Any]:
            return lambda argument, dim: argument.select(dim, i) if isinstance(dim, int) else argument

        outputs = [op(*map(entry(i), arguments, in_dims)) for i in range(info.batch_size)]
        return torch.stack(outputs), 0

    torch.library.register_vmap(op, rule, lib=library)
