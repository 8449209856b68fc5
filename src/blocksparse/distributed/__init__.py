"""Block-sparse models on several processes, over torch.distributed."""

from typing import Any

from ..surgery.agreement import check_layouts
from .balance import balanced_cuts
from .checkpoint import load_checkpoint, save_checkpoint
from .single_file import save_safetensors
from .tensor_parallel import ColwiseParallel, Cut, RowwiseParallel, clip_grad_norm_, parallelize_module
from .wasap import prune_to, retain_valid, union_average, warm_up

__all__ = [
    "ColwiseParallel",
    "Cut",
    "Epoch",
    "RowwiseParallel",
    "Settings",
    "balanced_cuts",
    "check_layouts",
    "clip_grad_norm_",
    "load_checkpoint",
    "parallelize_module",
    "prune_to",
    "retain_valid",
    "save_checkpoint",
    "save_safetensors",
    "train",
    "union_average",
    "warm_up",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import WASAP's trainer, a program of the lab, under the names that it has had here."""
    if name not in ("Epoch", "Settings", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from blocksparse_lab import wasap

    return globals().setdefault(name, getattr(wasap, name))
