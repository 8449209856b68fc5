"""What every public function of an op asks of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..errors import BlockSparseError
from ..layout import BlockLayout


def check_kinds(x: Any, values: Any, layout: Any, bias: Any) -> None:
    """Raises a BlockSparseError unless these are a layout and plain tensors without forward-mode tangents."""
    if not isinstance(layout, BlockLayout):
        raise BlockSparseError.expected("layout", "a BlockLayout", type(layout).__name__)
    tensors = {"x": x, "values": values} if bias is None else {"x": x, "values": values, "bias": bias}
    compiling = torch.compiler.is_compiling()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise BlockSparseError.expected(name, "a torch.Tensor", type(tensor).__name__)
        if tensor.layout != torch.strided or tensor.is_nested:
            raise BlockSparseError.expected(name, "a plain dense tensor", f"layout {tensor.layout}")
        # PyTorch would take the tangent of an op that has no forward-mode rule for zero.
        if not compiling and unpack_dual(tensor).tangent is not None:
            raise BlockSparseError.expected(name, "reverse-mode differentiation", "a forward-mode tangent")


def check_alike(x: Tensor, values: Tensor, bias: Tensor | None) -> None:
    """Raises a BlockSparseError unless all have the dtype and the device of x."""
    for name, tensor in (("values", values), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise BlockSparseError.expected(name, f"the dtype of x, {x.dtype}", tensor.dtype)
        if tensor.device != x.device:
            raise BlockSparseError.expected(name, f"the device of x, {x.device}", tensor.device)


def check_activation(activation: Any, known: Any) -> None:
    """Raises a BlockSparseError unless the activation is one of those known."""
    if not isinstance(activation, str | None) or activation not in known:
        raise BlockSparseError.expected("activation", f"one of {list(known)}", repr(activation))


def autocast(x: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors in the dtype of `torch.autocast` where that is on; float64 stays."""
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):  # not on "meta", say
        return x, values, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(x), cast(values), None if bias is None else cast(bias)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will record what is done with these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
