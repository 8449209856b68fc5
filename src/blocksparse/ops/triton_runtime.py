"""What all Triton backends share: whether Triton can serve here, on a GPU or in its interpreter."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 and asynchronous copies


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU: slow, for tests and debugging."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable() -> str | None:
    """Why no Triton kernel can run here, or None. Does not import Triton."""
    if interpreting() and _installed():
        return None
    if torch.cuda.is_available():
        return _refusal_of_gpu(torch.cuda.current_device())
    if not _installed():
        return _MISSING
    return "PyTorch sees no GPU (with TRITON_INTERPRET=1 the kernels run on the CPU, slowly)"


def details() -> str:
    """What the kernels run on."""
    return "Triton's interpreter, on the CPU" if interpreting() else torch.cuda.get_device_name()


def refusal(device: torch.device) -> str | None:
    """Why tensors on this device cannot be served, or None."""
    if interpreting() and device.type != "cpu":
        return f"Triton interprets here (TRITON_INTERPRET=1), tensors on the CPU, not on {device}"
    if device.type == "cuda" and not interpreting():
        return _refusal_of_gpu(device.index)
    reason = unavailable()
    if reason is None and not interpreting():
        reason = f"it serves tensors on a GPU, not on {device}"
    return reason


_MISSING = "Triton is not installed; on Linux it comes with PyTorch for GPUs, or from `pip install triton`"


@lru_cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache
def _refusal_of_gpu(index: int | None) -> str | None:
    if not _installed():
        return _MISSING
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and capability < CAPABILITY:
        here, least = (".".join(map(str, version)) for version in (capability, CAPABILITY))
        return f"{torch.cuda.get_device_name(index)} has compute capability {here}, and the kernels need {least}"
    return None
