"""The compiled CPU core, shared by all ops: availability, instruction set, threads, and addresses of tensors."""

from __future__ import annotations

import ctypes
import math
import os
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from .. import compiled_core
from ..compiled_core import ISA_VARIABLE as ISA_VARIABLE
from ..compiled_core import isa as isa
from ..compiled_core import isas as isas
from ..compiled_core import use_isa as use_isa
from ..errors import BlockSparseError
from . import workspace
from .checks import described, row_stride


class _Dtypes(dict[torch.dtype, str]):
    def __missing__(self, dtype: torch.dtype) -> str:
        raise BlockSparseError.expected("dtype", f"one of {', '.join(map(str, self))}", dtype)


# The core's names of the dtypes that it serves.
DTYPES = _Dtypes(
    {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}
)
_CPU = torch.device("cpu")
_OMP_PAUSE_HARD = 2


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    """Import the compiled core and share PyTorch's threads with it; return it, or None and the reason."""
    module, reason = compiled_core.load()
    if module is None:
        return None, reason
    # The core runs PyTorch's own parallel loop: one pool of threads serves both, sized by torch.set_num_threads.
    torch_cpu = _torch_cpu()
    try:
        loop, count = torch_cpu.torch_parallel_for, torch_cpu.torch_get_num_threads
    except AttributeError:
        return None, f"PyTorch {torch.__version__} does not share its threads: install 2.10 or newer"
    module.share_threads(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (loop, count)))
    return module, None


@cache
def _torch_cpu() -> ctypes.CDLL:
    (library,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
    return ctypes.CDLL(str(library))


def _end_idle_threads() -> None:
    """End OpenMP's idle threads before a fork: the child would wait forever for threads that it does not have.

    With GNU's OpenMP, PyTorch's own products hang too. The next loop starts the pool again, in both processes.
    """
    pause = getattr(_torch_cpu(), "omp_pause_resource_all", None)  # since OpenMP 5.0
    if pause is not None:
        pause(_OMP_PAUSE_HARD)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_idle_threads)


@cache
def unavailable() -> str | None:
    """Return the reason why the compiled core cannot be used, or None if it can."""
    reason = _load()[1]
    if reason is None:
        try:
            isa()
        except BlockSparseError as error:
            reason = str(error)
    return reason


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the core cannot serve these tensors, or None if it can. All CPU backends share this."""
    if device.type != "cpu":
        return f"it serves tensors on the CPU, not on {device}"
    if dtype not in DTYPES:
        return f"it serves {', '.join(str(each) for each in DTYPES)}"
    return unavailable()


def core() -> ModuleType:
    """Return the compiled module; if it is missing, raise a BlockSparseError that says how to build it."""
    module, reason = _load()
    if module is None:
        raise BlockSparseError(reason)
    return module


# -- addresses ---------------------------------------------------------------------------------------------------
# The core trusts addresses. These functions compare each tensor with the memory that kernels touch, and are the only
# way to get an address. (The core checks the lengths of index arrays itself.)


def address(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the address of a contiguous tensor of this shape and dtype on the CPU, or 0 for None."""
    if tensor is None:
        return 0
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_neg()  # its numbers are not what lies in its memory
    ):
        raise BlockSparseError.expected(name, f"{list(shape)}, contiguous, {dtype}, on the CPU", described(tensor))
    return _pointer(name, tensor)


def row_addresses(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return the address of a matrix and the stride between its rows, whose features must be contiguous.

    >>> import torch
    >>> row_addresses("x", torch.ones(4, 6)[:, :5], (4, 5), torch.float32)[1]
    6
    """
    if tensor is None:
        return 0, 0
    strides = tensor.stride()
    usual = len(strides) == 2 and strides[1] == 1 and strides[0] >= shape[-1]
    if usual and tensor.shape == shape and tensor.dtype is dtype and tensor.is_cpu and not tensor.is_neg():
        return _pointer(name, tensor), strides[0]
    stride = row_stride(name, tensor, shape, dtype, _CPU)
    return _pointer(name, tensor), stride


def strided_address(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, list[int]]:
    """Return the address of a tensor whose last axis is contiguous, and the strides of the other axes."""
    *strides, step = tensor.stride()
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        or not tensor.is_cpu
        or (step != 1 and shape[-1] > 1)
        or tensor.is_neg()
    ):
        raise BlockSparseError.expected(
            name, f"{list(shape)}, features side by side, {dtype}, on the CPU", described(tensor)
        )
    return _pointer(name, tensor), strides


def address_or_zero(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the address of a tensor that is not lazily negated; 0 if `address` would refuse it, or if it is empty."""
    if tensor.dtype is not dtype or tensor.shape != shape or not (tensor.is_cpu and tensor.is_contiguous()):
        return 0
    pointer = tensor.data_ptr()
    return 0 if pointer == tensor.storage_offset() * tensor.element_size() else pointer


def _pointer(name: str, tensor: Tensor) -> int:
    """Return the address of a tensor's first element; refuse a freed storage."""
    pointer = tensor.data_ptr()
    # PyTorch's address of a freed storage is 0, and that of a view of it the view's offset.
    if pointer == tensor.storage_offset() * tensor.element_size() and tensor.numel():
        raise BlockSparseError.expected(name, "a tensor with memory", "a tensor whose storage was freed")
    return pointer


CoreTensor = tuple[str, Tensor | None, tuple[int, ...], torch.dtype]


def arguments(*tensors: CoreTensor) -> tuple[ModuleType, str, list[tuple[int, int]]]:
    """Return the core, the instruction set, and for each tensor its address and the stride between its rows.

    Rows of a matrix may be anywhere, as for `row_addresses`; any other tensor must be contiguous, and its stride is 0.
    """
    addresses = []
    for name, tensor, shape, dtype in tensors:
        if len(shape) == 2:
            addresses.append(row_addresses(name, tensor, shape, dtype))
        else:
            addresses.append((address(name, tensor, shape, dtype), 0))
    return core(), isa(), addresses


def allocate(shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, int]:
    """Return an empty tensor on the CPU with the dtype of another one, and its address."""
    size = math.prod(shape) * like.element_size()  # the C library reuses small allocations itself
    small = size < workspace.MIN_BYTES and like.is_cpu
    if not small:
        output = workspace.empty(shape, like.dtype, _CPU)
    elif len(shape) == 2:  # as `new_empty`, which takes half as long again where a large product has emptied the caches
        output = torch.empty_strided(shape, (shape[1], 1), dtype=like.dtype, device=_CPU)
    else:
        output = like.new_empty(shape)
    return output, output.data_ptr()


def row_count(x: Tensor) -> int:
    """Return x.shape[0]; refuse 0-D tensors."""
    if x.dim() == 0:
        raise BlockSparseError.expected("x", "rows of features", "a 0-D tensor")
    return x.shape[0]
