"""Triton on this machine, for all Triton backends: availability on a GPU or in the interpreter, and launches."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...errors import BlockSparseError
from ..checks import SUM_DTYPES
from .tiles import Tile, power_of_two, tf32

if TYPE_CHECKING:
    from ...layout import BlockLayout

CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 and asynchronous copies


@lru_cache
def interpreting() -> bool:
    """Return whether kernels run in Triton's interpreter on the CPU: slow, for tests and debugging."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    """Return why no Triton kernel can run on this machine, or None. Does not import Triton."""
    if interpreting() and _installed():
        return None
    if torch.cuda.is_available():
        return _unsupported_gpu_reason(torch.cuda.current_device())
    if not _installed():
        return _MISSING
    return "PyTorch sees no GPU (with TRITON_INTERPRET=1 the kernels run on the CPU, slowly)"


def details() -> str:
    """Return the name of the device that runs the kernels."""
    return "Triton's interpreter, on the CPU" if interpreting() else torch.cuda.get_device_name()


@lru_cache(maxsize=256)  # every call needs it
def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why Triton kernels cannot serve these tensors, or None if they can. All Triton backends share this."""
    if dtype not in SUM_DTYPES:
        return f"it serves {', '.join(str(known) for known in SUM_DTYPES)}"
    if interpreting() and device.type != "cpu":
        return f"Triton interprets here (TRITON_INTERPRET=1), tensors on the CPU, not on {device}"
    if device.type == "cuda" and not interpreting():
        return _unsupported_gpu_reason(device.index)
    reason = unavailable()
    if reason is None and not interpreting():
        reason = f"it serves tensors on a GPU, not on {device}"
    return reason


_MISSING = "Triton is not installed; on Linux it comes with PyTorch for GPUs, or from `pip install triton`"


@lru_cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def _unsupported_gpu_reason(index: int | None) -> str | None:
    """Return why Triton's kernels cannot run on this GPU, or None."""
    if not _installed():
        return _MISSING
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and capability < CAPABILITY:
        own, minimum = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        return f"{torch.cuda.get_device_name(index)} has compute capability {own}, and the kernels need {minimum}"
    return None


# -- launches ---------------------------------------------------------------------------------------------------

MAX_PROGRAMS = 2**31 - 1
MAX_SLICES = 2**16 - 1  # along the other two axes of a grid
# Kernels count in int32, up to one tile beyond the last number, which they mask; addresses are int64.
MAX_COUNTED = 2**31 - 2**16


def check_fits(name: str, what: str, count: int) -> None:
    """Refuse a count above the range of the kernels."""
    if count > MAX_COUNTED:
        raise BlockSparseError.expected(name, f"at most {MAX_COUNTED} {what} on a GPU", f"{count}")


def check_layout_fits(layout: BlockLayout) -> None:
    """Refuse a layout with more blocks or features than kernels can count."""
    check_fits("layout", "blocks", layout.nnz)
    for blocks, size in zip(layout.grid, layout.block_shape, strict=True):
        # Lanes belong to blocks rounded up.
        check_fits("layout", "features, in blocks of a power of two,", blocks * power_of_two(size))
    check_fits("layout", "numbers in a block", layout.block_shape[0] * layout.block_shape[1])


def stream_of(x: Tensor) -> int | None:
    """Return the current stream of x's GPU, as a number; None on the CPU."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else None


def keep_for_stream(device: torch.device, *tensors: Any) -> None:
    """Let freed memory of these tensors be reused only after the work that the current stream has queued by then.

    A layout caches index tensors. If it is freed while another stream still reads them, their memory must not be
    reused.
    """
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        for each in tensors:
            if isinstance(each, Tensor):
                each.record_stream(stream)


class Launch:
    """A kernel, its grid, and all of its arguments except the tensors of a call.

    In each launch, Triton looks up the compiled kernel and queries the driver for each tensor's address, which costs as
    much as a small product. This class keeps the compiled kernel, and passes addresses.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: int,
        arguments: dict[str, Any],
        tile: Tile,
        slots: int = 0,
        splits: int = 1,
    ) -> None:
        for count, most in zip(grid, (MAX_PROGRAMS, MAX_SLICES, MAX_SLICES), strict=True):
            if count > most:
                raise BlockSparseError.expected(
                    "x", "fewer tokens in one call on a GPU, or smaller blocks", f"{grid} tiles of work"
                )
        self.kernel, self.grid, self.slots, self.splits = kernel, grid, slots, splits
        self.arguments = tuple(arguments[name] for name in kernel.arg_names[tensors:])
        self.options = {"num_warps": tile.warps, "num_stages": tile.stages}
        self.compiled: Any = None
        self.numbers: tuple[Any, ...] = ()  # the arguments, with addresses in place of tensors

    def __call__(self, *tensors: Tensor | None) -> None:
        x: Any = tensors[0]
        if isinstance(x, FunctionalTensor):  # traced: the graph will launch the kernel
            torch.library.wrap_triton(self.kernel)[self.grid](*tensors, *self.arguments, **self.options)
        elif x.is_cuda and x.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(x.device):
                self._launch(*tensors)
        else:
            self._launch(*tensors)

    def _launch(self, *tensors: Tensor | None) -> None:
        """Launch the kernel: by the compiled one if there is one, else by Triton, which compiles it."""
        if self.compiled is not None:
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            self.compiled(*addresses, *self.numbers, stream=stream)
            return
        try:
            compiled = self.kernel[self.grid](*tensors, *self.arguments, **self.options)
        except Exception as error:
            if type(error).__name__ == "OutOfResources":  # Triton's class, by name because Triton may be missing
                expected = "enough shared memory and registers for its tile; `blocksparse tune` finds others"
                raise BlockSparseError.expected("GPU", expected, error) from error
            raise
        if compiled is not None:  # the interpreter compiles nothing
            self.numbers = tuple(each.data_ptr() if isinstance(each, Tensor) else each for each in self.arguments)
            self.compiled = compiled[self.grid]


def common(dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    """Return the arguments that all products have, for a dtype and a tile."""
    from .device import DTYPES

    return {
        "PRECISION": precision(dtype),
        "SUM_DTYPE": DTYPES[SUM_DTYPES[dtype]],
        "WIDEN": interpreting(),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products: float32 is rounded to TF32 if PyTorch's own switch allows it.

    Otherwise NVIDIA's tensor cores compute float32 as three products of TF32: see `device.dot`.
    """
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if tf32() else "ieee" if torch.version.hip else "tf32x3"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
