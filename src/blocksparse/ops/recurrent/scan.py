"""Autograd for recurrences: one node for a whole sequence, so that weights get their gradients in one product."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]


class Recurrence(Protocol):
    """A recurrence over a whole sequence, written twice: as a definition, and by hand.

    `tensors` are its inputs, initial states and weights in an order of its own, some may be None; so are the gradients.

        definition(*tensors)                    the outputs, in operations that autograd differentiates as often as one
                                                likes; slow
        forward(*tensors, keep)                 the outputs, and what backward needs besides the tensors if it is to be
                                                kept
        backward(tensors, kept, grads, needed)  the gradients of the tensors from those of the outputs; None at will
                                                for what is not needed
    """

    def definition(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]: ...

    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]: ...

    def backward(
        self, tensors: Tensors, kept: tuple[Tensor, ...], grads: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> Tensors: ...


def scan(recurrence: Recurrence, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the outputs of a recurrence, differentiable any number of times."""
    if torch.compiler.is_compiling():
        return recurrence.definition(*tensors)
    return _Scan.apply(recurrence, torch.is_grad_enabled(), *map(_resolved, tensors))


def _resolved(tensor: Tensor | None) -> Tensor | None:
    """The tensor as it lies in memory, where PyTorch had put off a change of sign; vectors in one piece."""
    if tensor is None:
        return None
    tensor = tensor.resolve_neg()
    return tensor.contiguous() if tensor.dim() == 1 else tensor


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, grad_enabled: bool, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        keep = grad_enabled and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        outputs, kept = recurrence.forward(*tensors, keep=keep)
        ctx.recurrence, ctx.count = recurrence, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        tensors, kept, needed = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :], ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            return None, None, *_differentiable(ctx.recurrence, tensors, grads, needed)
        # Users may pass gradients of any strides, but the gates need the features of a row to be contiguous.
        grads = tuple(grad.resolve_neg().contiguous() for grad in grads)
        return None, None, *ctx.recurrence.backward(tensors, kept, grads, needed)


def _differentiable(
    recurrence: Recurrence, tensors: Tensors, grads: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients as a function that autograd can differentiate again: those of the definition."""
    outputs = recurrence.definition(*tensors)
    wanted = [tensor for tensor, need in zip(tensors, needed, strict=True) if tensor is not None and need]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]
