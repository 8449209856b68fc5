"""PyTorch's side of an op: its schema, its kernel, its meta kernel, and its rules for batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("blocksparse", "DEF")


def define_op(schema: str, kernel: Callable[..., Any], meta: Callable[..., Any], rows: bool = False) -> Any:
    """Define an op in `torch.ops.blocksparse` and return it.

    Args:
        schema: the op's signature, without the namespace.
        kernel: computes the op on every device.
        meta: returns empty tensors of the shapes and dtypes of the op's outputs.
        rows: as in `vmap_rule`.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"blocksparse::{name}", meta, lib=LIBRARY)
    op = getattr(torch.ops.blocksparse, name).default
    torch.library.register_vmap(op, vmap_rule(op, rows), lib=LIBRARY)
    return op


def vmap_rule(op: Any, rows: bool = False) -> Callable[..., tuple[Any, Any]]:
    """Return the rule by which `torch.vmap` calls an op once per entry of the batch.

    All entries share one layout, so its index tensors have no batch. With `rows`, the first axis of the first tensor
    and of the result are independent rows: if only this tensor has a batch, one call serves all entries.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        def entry(i: int) -> Callable[[Any, Any], Any]:
            def select(argument: Any, dim: Any) -> Any:
                if isinstance(dim, int):
                    entries = argument.movedim(dim, 0)
                    # An empty batch has zeros, for the shapes of the outputs.
                    return entries[i] if info.batch_size else entries.new_zeros(entries.shape[1:])
                return [*map(select, argument, dim)] if isinstance(dim, list | tuple) else argument

            return select

        if rows and isinstance(in_dims[0], int) and not any(isinstance(dim, int) for dim in in_dims[1:]):
            x = arguments[0].movedim(in_dims[0], 0)
            # The schedule behind the layout's own two index tensors fits the rows of one entry only.
            rest = [each[:2] if _is_tensor_list(each) else each for each in arguments[1:]]
            return op(x.flatten(0, 1), *rest).unflatten(0, x.shape[:2]), 0
        outputs = [op(*map(entry(i), arguments, in_dims)) for i in range(max(info.batch_size, 1))]
        if isinstance(outputs[0], Tensor):
            return torch.stack(outputs)[: info.batch_size], 0
        stacked = [torch.stack(each)[: info.batch_size] for each in zip(*outputs, strict=True)]
        return stacked, [0] * len(stacked)

    return rule


def _is_tensor_list(argument: Any) -> bool:
    """Return whether the argument is a non-empty list of tensors."""
    return isinstance(argument, list | tuple) and len(argument) > 0 and isinstance(argument[0], Tensor)


def call_per_batched_grad(backward: Callable[..., Sequence[Tensor | None]], *grads: Tensor) -> Sequence[Tensor | None]:
    """Call `backward` with these gradients, through `torch.vmap` if `is_grads_batched` made them batches.

    The batched tensors of `is_grads_batched` support PyTorch's own operations only.
    """
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    if not any(map(is_batched, grads)):
        return backward(*grads)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    size = max(len(torch._remove_batch_dim(grad, level, 1, 0)) for grad in grads)
    is_none: list[bool] = []

    def without_none(*each: Tensor) -> tuple[Tensor, ...]:
        results = backward(*each)
        is_none[:] = [tensor is None for tensor in results]
        return tuple(tensor for tensor in results if tensor is not None)

    results = iter(torch.vmap(without_none)(*(torch._remove_batch_dim(grad, level, size, 0) for grad in grads)))
    return [None if none else torch._add_batch_dim(next(results), 0, level) for none in is_none]
