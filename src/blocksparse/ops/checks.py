"""Checks of tensors that the public functions of all ops share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import BlockSparseError
from ..layout import check_layout


def always_supported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None: definitions in plain PyTorch serve every device and dtype."""
    return None


def check_kinds(layout: Any, **tensors: Any) -> None:
    """Check that these are a layout and plain dense tensors without forward-mode tangents.

    A `bias` and a `gate` may be None.
    """
    check_layout(layout)
    for name, tensor in tensors.items():
        if tensor is None and name in ("bias", "gate"):
            continue
        if not isinstance(tensor, Tensor):
            raise BlockSparseError.expected(name, "a torch.Tensor", type(tensor).__name__)
        if not torch.compiler.is_compiling() and torch.nn.parameter.is_lazy(tensor):
            raise BlockSparseError.expected(name, "a tensor with a shape", f"an uninitialized {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise BlockSparseError.expected(name, "a plain dense tensor", got)
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None:
        check_tangents(**tensors)


FORWARD_MODE = (
    "a forward-mode tangent: write torch.func.jacrev(f) in place of jacfwd or jvp, and "
    "torch.func.jacrev(torch.func.jacrev(f)) in place of hessian"
)


def check_tangents(**tensors: Tensor | None) -> None:
    """Refuse tensors with a forward-mode tangent: PyTorch would silently take the tangent of the result to be zero."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise BlockSparseError.expected(name, "reverse-mode differentiation", FORWARD_MODE)


def check_same(x: Tensor, values: Tensor, bias: Tensor | None) -> None:
    """Check that all tensors have the dtype and the device of x."""
    if values.is_floating_point() and not (x.is_floating_point() or x.is_complex()):
        raise BlockSparseError.expected("x", f"real numbers: x.to({values.dtype})", x.dtype)
    for name, tensor in (("values", values), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise BlockSparseError.expected(name, f"the dtype of x, {x.dtype}", tensor.dtype)
        if tensor.device != x.device:
            raise BlockSparseError.expected(name, f"the device of x, {x.device}", tensor.device)


def check_tensors(
    dtype: torch.dtype,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    **tensors: tuple[Tensor | None, tuple[int, ...]],
) -> None:
    """Check that each tensor has its shape and this device, and the dtype in `dtypes` or else this one.

    This keeps direct calls of PyTorch's ops inside the memory; public functions have checked already, with better
    messages.
    """
    for name, (tensor, shape) in tensors.items():
        own = dtypes.get(name, dtype)
        if tensor is not None and (
            tuple(tensor.shape) != shape
            or tensor.dtype != own
            or tensor.device != device
            or tensor.layout != torch.strided
        ):
            raise BlockSparseError.expected(name, f"{list(shape)}, dense, {own}, {device}", described(tensor))


def row_stride(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> int:
    """Return the stride between rows `[rows, features]`, or 0 for a vector `[features]`; check that kernels can use it.

    The features of a row must be contiguous. Rows of a tensor that is written to must not overlap; its name ends in
    `_out`.
    """
    if tensor.shape == shape and tensor.dtype is dtype and tensor.device == device and tensor.layout is torch.strided:
        *rows, step = tensor.stride()
        overlapping = name.endswith("_out") and rows[0] < shape[-1] and shape[0] > 1
        # PyTorch keeps arbitrary strides of a tensor without rows.
        if (step == 1 or shape[-1] == 1 or shape[0] == 0) and not overlapping and not tensor.is_neg():
            return rows[0] if rows else 0
    expected = f"{list(shape)}, features side by side, {dtype}, {device}"
    raise BlockSparseError.expected(name, expected, described(tensor))


def described(tensor: Tensor) -> str:
    """Return shape, strides, dtype and device, for an error."""
    strided = tensor.layout is torch.strided
    memory = f"with strides {list(tensor.stride())}" if strided else f"of layout {tensor.layout}"
    return f"{list(tensor.shape)} {memory}, {tensor.dtype}, {tensor.device}"


def check_devices(indices: Sequence[Tensor], **tensors: Tensor | None) -> None:
    """Check that all tensors are on the device of the first one; indices may be anywhere if that is the meta device.

    PyTorch calls an op's meta kernel if any tensor is a meta tensor, and would return memory that nobody wrote.
    """
    (first, reference), *others = tensors.items()
    if reference is None:
        return
    if not reference.is_meta:
        others += [("crow", indices[0]), ("col", indices[1])]
    for name, tensor in others:
        if tensor is not None and tensor.device != reference.device:
            raise BlockSparseError.expected(name, f"the device of {first}, {reference.device}", tensor.device)


def check_rows_of_table(index: Tensor, rows: int) -> None:
    """Check that the numbers of an index are rows of a table with this number of rows."""
    if index.numel():
        low, high = torch.aminmax(index)
        if low < 0 or high >= rows:
            raise BlockSparseError.expected("input", f"rows of a table that has {rows}", f"{low} to {high}")


def refuse_onnx(name: str) -> None:
    """Refuse calls while torch.onnx.export traces a model: ONNX has no block-sparse operations."""
    if (torch.compiler.is_exporting() or torch.jit.is_tracing()) and _is_in_onnx_export():
        expected = "blocksparse.export_onnx(model, args, file), which writes dense weights"
        raise BlockSparseError.expected("torch.onnx.export", expected, f"a model with blocksparse's {name}")


def refuse_jit_trace(name: str) -> None:
    """Refuse calls while torch.jit.trace records a model: it would fix the sizes of images, or fail inside PyTorch."""
    if torch.jit.is_tracing() and not _is_in_onnx_export():
        expected = "torch.export.export(model, args), or torch.compile(model)"
        raise BlockSparseError.expected("torch.jit.trace", expected, f"a model with blocksparse's {name}")


def _is_in_onnx_export() -> bool:
    return torch.onnx.is_in_onnx_export()


# Dynamo replaces PyTorch's function by False; it calls this one.
_is_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_activation(activation: Any, known: Any) -> None:
    """Check that the activation is a known one."""
    if not isinstance(activation, str | None) or activation not in known:
        raise BlockSparseError.expected("activation", f"one of {list(known)}", repr(activation))


def autocast(x: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tensors cast to the dtype of `torch.autocast` if it is on; float64 is not cast."""
    if not in_autocast(x):
        return x, values, bias
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(x), cast(values), None if bias is None else cast(bias)


def in_autocast(x: Tensor) -> bool:
    """Return whether `torch.autocast` is on for the device of x."""
    device = x.device.type
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context in which autocast is off for this device."""
    return torch.autocast(device.type if _has_autocast(device.type) else "cpu", enabled=False)


def _has_autocast(device: str) -> bool:
    # PyTorch 2.10 cannot trace the question for the meta device.
    return device in ("cpu", "cuda") or (device != "meta" and torch.amp.is_autocast_available(device))


def contiguous_features(x: Tensor) -> Tensor:
    """Return x, or a copy of it if its features are not contiguous; kernels need them contiguous."""
    return x if x.stride()[-1:] == (1,) else x.resolve_neg().contiguous()


# The dtypes that kernels serve, each with the dtype of its sums.
SUM_DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of numbers of this dtype are accumulated."""
    return SUM_DTYPES.get(dtype, dtype)
