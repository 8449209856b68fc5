"""Modules named as in torch.nn, with block-sparse weights."""

from .linear import Linear

__all__ = ["Linear"]
