"""Calibration: runs a trained model over some batches and observes the inputs of its layers without keeping them."""

from __future__ import annotations

import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...errors import BlockSparseError, Page
from ...surgery.prunable import Prunable

Batches = Iterable[Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]]
See = Callable[[nn.Module, tuple[Any, ...]], None]

# What `keep` takes of an iterable: whole batches until there is this much.
MAX_SAMPLES = 1024
MAX_BYTES = 2**28


# Seconds without a word of progress.
AFTER = 2.0
T = TypeVar("T")


class Enough(Exception):
    """Raised by what observes a model, where the rest of the batch is of no use."""


def check_batches(batches: Any) -> None:
    """Raises a BlockSparseError unless it may be an iterable of batches: a single batch is none."""
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping | str):
        expected = "an iterable of batches: tensors, tuples or dicts of the model's arguments"
        raise BlockSparseError.expected("batches", expected, type(batches).__name__)


def keep(batches: Batches) -> list[Any]:
    """The first batches, until they have 1,024 samples (by the first axis) or 256 MiB; at least one."""
    check_batches(batches)
    kept, samples, size = [], 0, 0
    for batch in batches:
        tensors = [each for each in _values(batch) if isinstance(each, Tensor)]
        kept.append(batch)
        samples += max((len(each) for each in tensors if each.dim()), default=1)
        size += sum(each.numel() * each.element_size() for each in tensors)
        if samples >= MAX_SAMPLES or size >= MAX_BYTES:
            break
    if kept and not samples:
        raise BlockSparseError.expected("batches", "a sample or more", "none in any of them")
    return kept


@torch.no_grad()
def observe(model: nn.Module, batches: Batches, modules: Iterable[nn.Module], see: See) -> None:
    """Runs the model, without gradients and dropout, and calls `see` with each of these modules and its arguments.

    `see` may raise `Enough`, and the next batch follows. A tuple that is longer than the list of the model's arguments
    loses its end: labels.
    """
    check_batches(batches)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    most = _positional(model)
    hooks = [module.register_forward_pre_hook(_seen_by(see), with_kwargs=True) for module in modules]
    empty = True
    try:
        with _evaluating(model):
            for batch in batches:
                empty = False
                args, kwargs = _arguments(batch, most, device)
                try:
                    model(*args, **kwargs)
                except (Enough, BlockSparseError) as stop:
                    if isinstance(stop, BlockSparseError):
                        raise
                except Exception as error:
                    raise _failure(model, batch, error) from error
    finally:
        for hook in hooks:
            hook.remove()
    if empty:
        raise BlockSparseError.expected("batches", "one or more", "none")


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with PyTorch's fused encoder layers off: they run none of the modules inside of them."""
    training = {module: module.training for module in model.modules()}
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        model.eval()
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, mode in training.items():
            module.training = mode


def _values(batch: Any) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]


def _arguments(batch: Any, most: int | None, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    def there(each: Any) -> Any:
        return each.to(device) if hasattr(each, "to") else each

    if isinstance(batch, Mapping):
        return [], {name: there(each) for name, each in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "batch_sizes"):  # a PackedSequence
        batch = [batch]
    return [there(each) for each in _values(batch)][:most], {}


def _positional(model: nn.Module) -> int | None:
    """How many arguments the model takes by position; None for any number."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(
        kind is not inspect.Parameter.KEYWORD_ONLY and kind is not inspect.Parameter.VAR_KEYWORD for kind in kinds
    )


def _failure(model: nn.Module, batch: Any, error: Exception) -> BlockSparseError:
    names = {module: name for name, module in model.named_modules()}
    inside = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            inside = names.get(owner, inside)
    shapes = [str(list(each.shape)) if isinstance(each, Tensor) else type(each).__name__ for each in _values(batch)]
    got = f"a batch of {', '.join(shapes) or 'nothing'}, on which {inside or type(model).__name__} fails: {error}"
    return BlockSparseError.expected("batches", "the model's inputs, without labels", got, Page.CALIBRATE)


class Call(tuple[Any, ...]):
    """The arguments of a module in the order of its parameters, in whatever order they were named; and as given."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _seen_by(see: See) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()  # else the arguments by position end at the first that was left out
        call = Call((*bound.args, *bound.kwargs.values()))
        call.module, call.args, call.kwargs = module, args, kwargs
        see(module, call)

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


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """The items, with a line on stderr that counts them: on a terminal, if it takes more than two seconds."""
    total = len(items) if total is None and isinstance(items, Sized) else total
    begin, shown = time.monotonic(), False
    try:
        for done, item in enumerate(items):
            if sys.stderr.isatty() and time.monotonic() - begin > AFTER:
                print(f"\r{label} {done + 1}/{total}", end="", file=sys.stderr, flush=True)
                shown = True
            yield item
    finally:
        if shown:
            print(file=sys.stderr)
