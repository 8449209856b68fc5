"""A tensor in all the ways in which it may lie in memory, with NaN wherever it is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def views(tensor: Tensor) -> dict[str, Tensor]:
    """Views of the tensor's numbers, by what is odd about them; those that are expanded repeat the first of an axis."""
    shape = tuple(tensor.shape)
    plain, axes = steps(shape), range(len(shape))
    found = {
        "unaligned": placed(tensor, plain, offset=1),
        "all axes turned": placed(tensor, steps(shape[::-1])[::-1]),
        "every other of the last": placed(tensor, [2 * step for step in plain]),
    }
    if len(shape) > 1:
        found["last two turned"] = placed(tensor.mT, steps(tensor.mT.shape)).mT
        found["rows apart"] = placed(tensor, [5 * step for step in plain[:-1]] + [1])
        found["every other of all"] = placed(tensor, [step << (len(shape) - axis) for axis, step in enumerate(plain)])
        found["one number for all"] = expanded(tensor, axes)
    for axis in axes:
        found[f"axis {axis} expanded"] = expanded(tensor, [axis])
    if 1 in shape:
        found["odd steps of one"] = placed(tensor, [7 if n == 1 else s for n, s in zip(shape, plain, strict=True)])
    if tensor.is_floating_point():
        found["negated when read"] = torch._neg_view(placed(-tensor, plain))
        found["turned and negated when read"] = torch._neg_view(placed(-tensor, steps(shape[::-1])[::-1]))
    with torch.inference_mode():
        found["made in inference mode"] = tensor.clone()
    return found


def expanded(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """The first of these axes, for all."""
    first = tensor
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    return placed(first, steps(first.shape)).expand(tensor.shape)


def placed(tensor: Tensor, strides: Sequence[int], offset: int = 64) -> Tensor:
    """The tensor with these strides and this offset, in memory that is NaN, or as large as can be, around it."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    outside = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    memory = torch.full((offset + last + 65,), outside, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, strides, offset).copy_(tensor)


def steps(shape: Sequence[int]) -> list[int]:
    """The strides of a tensor in one piece."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def check_every_operand(call: Callable[..., Any], operands: dict[str, Tensor], **close: float) -> None:
    """The call gives the same for each view of each operand as for a copy of it in one piece."""
    plainly = call(**operands)
    for name, operand in operands.items():
        for odd, view in views(operand).items():
            copy = view.resolve_neg().clone(memory_format=torch.contiguous_format)
            expected = plainly if torch.equal(copy, operand) else call(**{**operands, name: copy})

            def said(message: str, what: str = f"{name} {odd}") -> str:
                return f"{what}: {message}"

            torch.testing.assert_close(call(**{**operands, name: view}), expected, msg=said, **close)
