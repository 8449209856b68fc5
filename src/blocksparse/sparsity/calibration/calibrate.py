"""Runs of a trained model over calibration batches, which observe the inputs of its layers."""

from __future__ import annotations

import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...errors import BlockSparseError, Page, first_line, warn_user
from ...surgery.model_tools import evaluation_mode, parameter_device, split_arguments, uncompiled
from ...surgery.prunable import Prunable

Batches = Iterable[Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]]
Stop = Callable[[], bool]
Observer = Callable[[nn.Module, tuple[Any, ...]], None]

# Limits of `collect_batches`, which stops after the batch that reaches one of them.
MAX_SAMPLES = 1024
MAX_BYTES = 2**28

PROGRESS_DELAY = 2.0  # seconds before progress is shown on a terminal
LINE_SECONDS = 30.0  # seconds between lines of progress in a file or a notebook
COLUMNS = 79  # characters of a line of progress
T = TypeVar("T")


class SkipBatch(Exception):
    """Raised by an observer that does not need the rest of a batch."""


def never() -> bool:
    """Return False: the default of `stop` arguments."""
    return False


def check_batches(batches: Any, argument: str = "batches") -> None:
    """Raise a BlockSparseError that names the argument unless this may be an iterable of batches, not one batch."""
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping | str):
        expected = (
            "an iterable of batches, such as x.split(32) or DataLoader(dataset, batch_size=32): tensors, tuples or "
            "dicts of the model's arguments"
        )
        raise BlockSparseError.expected(argument, expected, type(batches).__name__)


def collect_batches(batches: Batches, argument: str = "batches") -> list[Any]:
    """Return the first batches, until they have 1,024 samples (by the first axis) or 256 MiB; at least one."""
    check_batches(batches, argument)
    collected, samples, size = [], 0, 0
    for batch in batches:
        collected.append(batch)
        samples += sample_count(batch)
        size += byte_count(batch)
        if samples >= MAX_SAMPLES or size >= MAX_BYTES:
            break
    if not collected:
        raise BlockSparseError.expected(argument, "one or more batches", "none")
    if not samples:
        raise BlockSparseError.expected(argument, "a sample or more", "only empty batches")
    return collected


@torch.no_grad()
def observe(model: nn.Module, batches: Batches, modules: Iterable[nn.Module], observer: Observer) -> None:
    """Run a model in evaluation mode, and call `observer` with the module and arguments of each call of these modules.

    The observer may raise `SkipBatch` to continue with the next batch. If a batch is a tuple with more values than the
    model has arguments, the last ones, such as labels, are ignored.
    """
    check_batches(batches)
    device, max_args = parameter_device(model), count_positional(model)
    hooks = [module.register_forward_pre_hook(_hook_of(observer), with_kwargs=True) for module in modules]
    empty = True
    try:
        with evaluation_mode(model), uncompiled():
            for batch in batches:
                if empty:
                    warn_of_label(model, batch)
                empty = False
                args, kwargs = arguments_of(batch, max_args, device)
                try:
                    model(*args, **kwargs)
                except (SkipBatch, BlockSparseError) as stop:
                    if isinstance(stop, BlockSparseError):
                        raise
                except Exception as error:
                    raise batch_error(model, batch, error) from error
    finally:
        for hook in hooks:
            hook.remove()
    if empty:
        raise BlockSparseError.expected("batches", "one or more batches", "none")


def sample_count(batch: Any) -> int:
    """Return the number of samples in a batch: the longest first axis of its tensors."""
    return max((len(each) for each in values_of(batch) if isinstance(each, Tensor) and each.dim()), default=1)


def parts_of(batches: Iterable[Any], samples: int) -> Iterator[Any]:
    """Yield parts of batches with at most this number of samples."""
    for batch in batches:
        count = sample_count(batch)
        for first in range(0, count, samples):
            chosen = slice(first, first + samples)
            yield tree_map_only(Tensor, lambda x: x[chosen] if x.dim() and len(x) == count else x, batch)  # noqa: B023


def byte_count(values: Any) -> int:
    """Return the bytes of all tensors in a batch, or in another nest of values."""
    return sum(each.numel() * each.element_size() for each in values_of(values) if isinstance(each, Tensor))


def values_of(batch: Any) -> Iterable[Any]:
    """Return the values of a mapping or sequence; a tensor is its only value."""
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]


def arguments_of(batch: Any, max_args: int | None, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Return copies of the positional and keyword arguments that a batch holds, as models may change them."""

    def move(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.to(device, copy=True)
        return each.to(device) if hasattr(each, "to") else each

    args, kwargs = split_arguments(batch)
    return [move(each) for each in args[:max_args]], {name: move(each) for name, each in kwargs.items()}


def warn_of_label(model: nn.Module, batch: Any) -> None:
    """Warn if the last value of a tuple has one number per sample, as labels have, and fills an optional argument."""
    args, _ = split_arguments(batch)
    parameters = _positional(model)
    if not 1 < len(args) <= len(parameters):
        return
    last, parameter = args[-1], parameters[len(args) - 1]
    looks_like_labels = isinstance(last, Tensor) and last.shape == (sample_count(batch),)
    if looks_like_labels and parameter.default is not parameter.empty:
        warn_user(
            f"a batch has {len(args)} values, so the last one, with one number per sample, is the model's argument "
            f"{parameter.name!r}. If it is a label, pass batches without it."
        )


def count_positional(model: nn.Module) -> int | None:
    """Return the number of positional arguments that the model accepts; None for any number."""
    positional = _positional(model)
    return None if any(each.kind is each.VAR_POSITIONAL for each in positional) else len(positional)


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [each for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]


def batch_error(model: nn.Module, batch: Any, error: Exception, *, with_label: bool = False) -> BlockSparseError:
    """Return the error that names the batch's shapes and the innermost module that failed.

    Args:
        model: the model that failed.
        batch: the batch that it failed on.
        error: what it raised.
        with_label: whether the batch is of the data of `compress` or `tradeoff`, which may have a label.
    """
    names = {module: name for name, module in model.named_modules()}
    inside = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            inside = names.get(owner, inside)
    if any(isinstance(each, np.ndarray) for each in values_of(batch)):
        why = "it has NumPy arrays (pass torch.from_numpy(x) instead)"
    else:
        why = first_line(error)
    got = f"a batch of {describe(batch)}, on which {inside or type(model).__name__} fails: {why}"
    if with_label:
        expected = "batches of the model's arguments, and at most one label after them"
        return BlockSparseError.expected("data", expected, got, Page.COMPRESS)
    return BlockSparseError.expected("batches", "the model's inputs, without labels", got, Page.CALIBRATE)


def describe(batch: Any) -> str:
    """Return the shapes of a batch's tensors, and the types of its other values."""
    shapes = [str(list(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in values_of(batch)]
    return ", ".join(shapes) or "nothing"


class Call(tuple[Any, ...]):
    """The arguments of a call in the order of the module's signature, and as the caller wrote them."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _hook_of(observer: Observer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Return a forward pre-hook that calls the observer with a `Call`."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()  # otherwise positional arguments end at the first one that the caller omitted
        call = Call((*bound.args, *bound.kwargs.values()))
        call.module, call.args, call.kwargs = module, args, kwargs
        observer(module, call)

    return hook


def as_rows(x: Tensor, axis: int = -1) -> Tensor:
    """Reshape activations to `[tokens, features]`, in float32 or float64; `axis` is that of the features."""
    x = x.detach().movedim(axis, -1).flatten(0, -2) if x.dim() > 1 else x.detach().unsqueeze(0)
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def channel_axis(weight: Prunable) -> int:
    """Return the axis of the features in the inputs of a linear layer or a convolution."""
    return 1 - weight.matrix().dim()


def check_finite(name: str, sums: Tensor) -> None:
    """Raise a BlockSparseError unless sums over a layer's inputs are finite."""
    if not sums.isfinite().all():
        raise BlockSparseError.expected(f"the inputs of {name}", "finite numbers", "inf or nan among them")


def progress(items: Iterable[T], label: str) -> Iterator[T]:
    """Yield the items and count them on stderr: in a line of the terminal, or else in a new line every 30 seconds."""
    total = len(items) if isinstance(items, Sized) else "?"
    begin, shown = time.monotonic(), False
    try:
        for done, item in enumerate(items):
            if sys.stderr.isatty() and time.monotonic() - begin > PROGRESS_DELAY:
                print(f"\r{f'{label} {done + 1}/{total}':<{COLUMNS}}", end="", file=sys.stderr, flush=True)
                shown = True
            elif not sys.stderr.isatty() and time.monotonic() - begin > LINE_SECONDS:
                print(f"{label} {done + 1}/{total}", file=sys.stderr, flush=True)
                begin = time.monotonic()
            yield item
    finally:
        if shown:
            print(file=sys.stderr)
