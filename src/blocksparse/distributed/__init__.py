"""Sparse training by several processes, over torch.distributed."""

from .formulas import prune_to, retain_valid, union_average, warm_up

__all__ = ["prune_to", "retain_valid", "union_average", "warm_up"]
