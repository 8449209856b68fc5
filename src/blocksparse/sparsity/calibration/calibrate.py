"""Calibration: runs a trained model over some batches and observes the inputs of its layers without keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from ...surgery.prunable import Prunable

Batches = Iterable[Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]]
See = Callable[[nn.Module, tuple[Any, ...]], None]


def check_batches(batches: Any) -> None:
    """Raises a BlockSparseError unless it may be an iterable of batches: a single batch is none."""
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping | str):
        expected = "an iterable of batches: tensors, tuples or dicts of the model's arguments"
        raise BlockSparseError.expected("batches", expected, type(batches).__name__)


@torch.no_grad()
def observe(model: nn.Module, batches: Batches, modules: Iterable[nn.Module], see: See) -> None:
    """Runs the model over the batches, without gradients and dropout, and calls `see` before each of these modules.

    Args:
        model: as it is afterwards, in its mode and without a hook, also when something fails.
        batches: a tensor is the model's argument, a tuple or a list are its arguments, a dict those by name.
        modules: those to look at.
        see: called with the module and its arguments.

    Raises:
        BlockSparseError: no batch.
    """
    check_batches(batches)
    training = {module: module.training for module in model.modules()}
    hooks = [module.register_forward_pre_hook(_seen_by(see), with_kwargs=True) for module in modules]
    empty = True
    try:
        model.eval()
        for batch in batches:
            empty = False
            if isinstance(batch, Mapping):
                model(**batch)
            elif isinstance(batch, tuple | list):
                model(*batch)
            else:
                model(batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in training.items():
            module.training = mode
    if empty:
        raise BlockSparseError.expected("batches", "one or more", "none")


def _seen_by(see: See) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(module, (*args, *kwargs.values()))

    return hook


def as_rows(x: Tensor, axis: int = -1) -> Tensor:
    """Activations as `[tokens, features]`, of the features along this axis; float32 or float64."""
    x = x.detach().movedim(axis, -1).flatten(0, -2) if x.dim() > 1 else x.detach().unsqueeze(0)
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def channel_axis(weight: Prunable) -> int:
    """Where the features are in the inputs of a linear layer or a convolution."""
    return 1 - weight.matrix().dim()


def check_finite(name: str, sums: Tensor) -> None:
    """Raises a BlockSparseError unless the sums over a layer's inputs are finite."""
    if not sums.isfinite().all():
        raise BlockSparseError.expected(f"the inputs of {name}", "finite numbers", "inf or nan among them")
