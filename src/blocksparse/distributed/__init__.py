"""Sparse training by several processes, over torch.distributed."""

from .balance import balanced_cuts
from .wasap.formulas import prune_to, retain_valid, union_average, warm_up
from .wasap.settings import Epoch, Settings
from .wasap.train import train

__all__ = ["Epoch", "Settings", "balanced_cuts", "prune_to", "retain_valid", "train", "union_average", "warm_up"]


def __dir__() -> list[str]:
    return __all__
