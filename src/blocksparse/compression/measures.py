"""Prepares a model for compression, and measures density and speed of one that is partly block-sparse."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..conversion.speed import Example, clock_of
from ..errors import BlockSparseError
from ..measure import alternate
from ..nn.module import BlockSparseModule
from ..sparsity.calibration.inputs import by_called_module, products
from ..surgery.model_tools import evaluation_mode, parameter_device, split_arguments
from ..surgery.prunable import Prunable
from .batches import BatchReader

# Seconds of a timing.
SECONDS = 2.0

# The machine counts as busy if times of the dense model differ by more than this factor, or the processes that run or
# wait exceed the cores by more than it.
BUSY_FACTOR = 1.5


def check_finite_parameters(model: nn.Module, argument: str = "model") -> None:
    """Raise a BlockSparseError that names a parameter of a model without values, or with inf or NaN."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise BlockSparseError.expected(argument, "parameters with values", f"{name} without any")
        if not parameter.detach().isfinite().all():
            expected = "finite parameters (make a mask with -inf a buffer)"
            raise BlockSparseError.expected(argument, expected, f"inf or nan in {name}")


def default_block_size(model: nn.Module) -> int:
    """Return 16 for float32 parameters on a CPU, where it keeps more accuracy at nearly the same speed, and else 32."""
    parameters = model.parameters()
    return 16 if any(each.dtype == torch.float32 and each.device.type == "cpu" for each in parameters) else 32


def first_example(reader: BatchReader, batches: Sequence[Any]) -> Example:
    """Return the model's arguments from the first of some batches, to time calls with."""
    args, kwargs = reader.arguments(batches[0])
    return kwargs or tuple(args)


@torch.no_grad()
def calls_weights(model: nn.Module, weights: Iterable[Prunable], arguments: tuple[list[Any], dict[str, Any]]) -> bool:
    """Return whether a model calls the module of any of these weights, and its inputs can be observed."""
    called = list[nn.Module]()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.append(module))
        for module, group in by_called_module(model, weights).items()
        if products(module, group)
    ]
    try:
        with evaluation_mode(model):
            model(*arguments[0], **arguments[1])
    finally:
        for hook in hooks:
            hook.remove()
    return bool(called)


def sparse_modules(model: nn.Module) -> set[str]:
    """Return the names of the block-sparse modules."""
    return {name for name, module in model.named_modules() if isinstance(module, BlockSparseModule)}


def density_of(model: nn.Module, without: Collection[str] = (), full: int = 0) -> float:
    """Return the density of all block-sparse weights taken together; 1 if there is none.

    Args:
        model: the model.
        without: names of modules that do not count.
        full: parameters of dense weights that count too, because they keep all of their blocks.
    """
    weights = _stored_weights(model, without)
    dense = dense_size(model, without) + full
    return (sum(module.values.numel() for module in weights) + full) / dense if weights else 1.0


def dense_size(model: nn.Module, without: Collection[str] = ()) -> float:
    """Return the parameters that all block-sparse weights would have if they were dense, padding included."""
    return sum(module.values.numel() / module.layout.density for module in _stored_weights(model, without))


def _stored_weights(model: nn.Module, without: Collection[str]) -> list[BlockSparseModule]:
    """Return the block-sparse weights that store blocks, except for those of the modules named in `without`."""
    modules = (module for name, module in model.named_modules() if name not in without)
    return [module for module in modules if isinstance(module, BlockSparseModule) and module.layout.nnz]


class SpeedUps:
    """Measures how many times as fast as a dense model others are, in evaluation mode.

    Args:
        dense: the dense model.
        example: the inputs of the calls.
    """

    def __init__(self, dense: nn.Module, example: Example):
        self.dense, self.example = dense, example
        self._dense_seconds = list[float]()
        self._is_loaded = False

    @torch.no_grad()
    def measure(self, sparse: nn.Module) -> float:
        """Return dense time / block-sparse time of a call on the example."""
        args, kwargs = split_arguments(self.example)
        clock = clock_of(parameter_device(sparse))
        with evaluation_mode(sparse), evaluation_mode(self.dense):
            calls = {"sparse": lambda: sparse(*args, **kwargs), "dense": lambda: self.dense(*args, **kwargs)}
            samples = alternate(calls, rounds=9, budget=SECONDS, clock=clock)
        self._dense_seconds.append(samples.time("dense").median)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has no load average
        self._is_loaded |= load > BUSY_FACTOR * (os.cpu_count() or 1)
        return samples.ratio("dense", "sparse").median

    @property
    def is_busy(self) -> bool:
        """Whether other programs seemed to use the machine during the timings."""
        return self._is_loaded or max(self._dense_seconds, default=0) > BUSY_FACTOR * min(
            self._dense_seconds, default=0
        )
