"""PyTorch, or a stand-in where it is not installed, so that layouts serve `blocksparse.jax` without it."""

from __future__ import annotations

from typing import Any

__all__ = ["has_torch", "is_tensor", "tensor_or_array", "torch"]


class _Missing:
    """A stand-in whose attributes raise a BlockSparseError."""

    def __getattr__(self, name: str) -> Any:
        from .errors import BlockSparseError  # not above: old Pythons, which are named first, lack what it imports

        raise BlockSparseError("This needs PyTorch: pip install torch.")


try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    torch = _Missing()  # type: ignore[assignment]

has_torch = not isinstance(torch, _Missing)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of PyTorch; False without PyTorch."""
    return has_torch and isinstance(value, torch.Tensor)


def tensor_or_array(array: Any) -> Any:
    """Return a numpy array as a tensor that shares its memory; the array itself without PyTorch."""
    return torch.from_numpy(array) if has_torch else array
