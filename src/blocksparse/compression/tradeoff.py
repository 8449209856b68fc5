"""Measures speed and agreement of a model at several densities, before any training."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checked import number
from ..conversion.sparsify import sparsify
from ..conversion.speed import Example, call_arguments
from ..errors import BlockSparseError, Page, SparsityWarning
from ..sparsity.calibration.calibrate import Batches, progress
from ..sparsity.distillation import Distillation, agreement
from ..surgery.model_tools import copy_model, evaluation_mode
from ..surgery.prunable import Skip, prunable, skip_by_name
from .batches import BatchReader, Data
from .measures import density_of, first_example, sparse_modules, speedup_of
from .result import Point, curve_table, plot_curve

# The recommendation lists layers until they take this fraction of the time.
MOST_TIME = 0.8

# A loss of agreement up to this value needs no training.
SMALL_LOSS = 0.01

# Layers are pruned one at a time to this density.
LAYER_DENSITY = 0.25


@dataclass(frozen=True)
class LayerShare:
    """A layer whose weights can become block-sparse.

    Args:
        name: its name in the model.
        parameters: the parameters of these weights.
        time: its fraction of the time of a call of the dense model.
        agreement: agreement with the dense model if only this layer is pruned, to density 0.25, without fitting.
    """

    name: str
    parameters: int
    time: float
    agreement: float


@dataclass(frozen=True)
class Tradeoff:
    """The result of `tradeoff`.

    Args:
        points: the dense model and the model at each density, fitted to the data but not trained.
        layers: the layers, those that take most time first.
    """

    points: tuple[Point, ...]
    layers: tuple[LayerShare, ...]

    @property
    def recommendation(self) -> str:
        """A few sentences of advice: which layers take the time, and which density to use."""
        total = 0.0
        listed: list[str] = []
        for layer in self.layers:
            if total >= MOST_TIME * sum(each.time for each in self.layers):
                break
            total += layer.time
            listed.append(layer.name)
        sentences = [f"{len(listed)} of {len(self.layers)} layers take {total:.0%} of the time: {', '.join(listed)}."]
        sparse = [point for point in self.points if point.density < 1 and point.speedup > 1]
        if not sparse:
            return " ".join([*sentences, "Nothing gets faster at these densities. Keep the model dense."])
        ready = [point for point in sparse if point.agreement >= self.points[0].agreement - SMALL_LOSS]
        if ready:
            best = max(ready, key=lambda point: point.speedup)
            sentences.append(
                f"Without training, density {best.density:.2g} is {best.speedup:.2g} times as fast, with "
                f"{best.agreement:.1%} agreement with the dense model: "
                f"bs.sparsify(model, {best.density:.2g}, data=data)."
            )
        fast = max(sparse, key=lambda point: point.speedup)
        if fast not in ready:
            sentences.append(
                f"Density {fast.density:.2g} is {fast.speedup:.2g} times as fast, but has only {fast.agreement:.1%} "
                f"agreement: train it with bs.compress(model, data, {fast.density:.2g})."
            )
        fragile = [layer.name for layer in self.layers if layer.agreement < 0.9 and layer.time < 0.05]
        if fragile:
            sentences.append(f"Skip {', '.join(fragile[:4])}: little time, and a large loss when pruned.")
        return " ".join(sentences)

    def table(self) -> str:
        """Return densities and layers as text."""
        width = max([len(layer.name) for layer in self.layers] + [8])
        rows = [f"{layer.name:<{width}}{layer.parameters:>12,}{layer.time:>8.1%}{layer.agreement:>19.1%}"
                for layer in self.layers]  # fmt: skip
        head = f"{'layer':<{width}}{'parameters':>12}{'time':>8}{'agreement at 0.25':>19}"
        points = curve_table(self.points)
        return "\n".join([points, "", head, *rows, "", self.recommendation])

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw agreement and speed-up over density; see `CompressionResult.plot`."""
        return plot_curve(self.points, path)

    def __str__(self) -> str:
        return self.table()


@torch.no_grad()
def tradeoff(
    model: nn.Module,
    data: Batches,
    example: Example | None = None,
    *,
    densities: Sequence[float] = (0.5, 0.25, 0.1),
    block_size: int | tuple[int, int] = 32,
    skip: Skip = (),
) -> Tradeoff:
    """Measure speed and agreement with the dense model at several densities, without training.

    Args:
        model: a trained model; it stays as it is.
        data: two batches of its inputs or more, as for `compress`; some hundred samples.
        example: inputs to measure speeds on, as for `sparsify`; by default the first held-out batch.
        densities: the densities to try, 0.5, 0.25 and 0.1 by default.
        block_size: an int or (rows, columns), 32 by default.
        skip: modules, names or shell patterns of weights that stay dense.

    Raises:
        BlockSparseError: densities out of range, fewer than two batches, data that the model does not accept, or no
            weight that can become block-sparse.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        >>> measured = bs.tradeoff(model, torch.randn(128, 512).split(32), densities=[0.25])
        >>> [layer.name for layer in measured.layers][0], measured.points[0].density
        ('0', 1.0)
    """
    if not isinstance(densities, Sequence):
        raise BlockSparseError.expected("densities", "a list of numbers, such as [0.25]", repr(densities))
    skip, model = skip_by_name(model, skip), copy_model(model)
    targets = [number("densities", density, 0, 1) for density in densities]
    read = Data.read(data)
    reader = BatchReader(model)
    example = first_example(reader, read) if example is None else example
    weights = prunable(model, block_size, skip)
    if not weights:
        expected = "dense weights that can become block-sparse"
        raise BlockSparseError.expected("model", expected, type(model).__name__, Page.SPARSIFY)
    measure_agreement = _Agreement(model, reader, read.held_out)
    weights_of: dict[nn.Module, list[Any]] = {}
    for weight in weights:
        weights_of.setdefault(weight.module, []).append(weight)
    times = _time_shares(model, example, list(weights_of))
    names = {module: name for name, module in model.named_modules()}
    layers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparsityWarning)
        for module, group in progress(weights_of.items(), "layers pruned:", len(weights_of)):
            density_by_name = {each.name: max(LAYER_DENSITY, 1 / math.prod(each.grid)) for each in group}
            pruned = sparsify(model, density_by_name, block_size, force=True)
            parameters = sum(each.tensor.numel() for each in group)
            layers.append(
                LayerShare(names[module] or type(model).__name__, parameters, times[module], measure_agreement(pruned))
            )
        points = [Point(1.0, 1.0, 1.0)]
        for density in progress(targets, "densities tried:"):
            sparse = sparsify(model, density, block_size, skip=skip, data=read.calibration(), example=example)
            speedup = speedup_of(sparse, model, example) if sparse_modules(sparse) else 1.0
            points.append(Point(density_of(sparse), speedup, measure_agreement(sparse)))
    return Tradeoff(tuple(points), tuple(sorted(layers, key=lambda layer: -layer.time)))


class _Agreement:
    """Callable that returns the mean agreement of a model with the dense one over batches."""

    def __init__(self, model: nn.Module, reader: BatchReader, batches: list[Any]):
        self.calls = [reader.arguments(batch) for batch in batches]
        with evaluation_mode(model):
            kind = "kl" if reader.predicts_classes(model, batches[0]) else "auto"
        self.distillation = Distillation(model, model, output=kind)
        self.targets = [self.distillation.run_teacher(*args, **kwargs) for args, kwargs in self.calls]

    def __call__(self, model: nn.Module) -> float:
        values = []
        self.distillation.student = model
        with evaluation_mode(model):
            for (args, kwargs), targets in zip(self.calls, self.targets, strict=True):
                name, target = next(iter(targets.tensors.items()))
                result = self.distillation.run_student(*args, **kwargs).tensors[name]
                values.append(agreement(result, target, self.distillation.kind_of(name, target)))
        return sum(values) / len(values)


def _time_shares(model: nn.Module, example: Example, modules: list[nn.Module]) -> dict[nn.Module, float]:
    """Return each module's fraction of the time of a model call on the example: the median of five calls."""
    args, kwargs = call_arguments(example)
    shares: dict[nn.Module, list[float]] = {module: [] for module in modules}
    for _ in range(5):
        with _timed(modules) as spent, evaluation_mode(model):
            begin = _now()
            model(*args, **kwargs)
            total = _now() - begin
        for module in modules:
            shares[module].append(spent.get(module, 0.0) / total)
    return {module: sorted(each)[len(each) // 2] for module, each in shares.items()}


@contextmanager
def _timed(modules: list[nn.Module]) -> Iterator[dict[nn.Module, float]]:
    """Yield a dict that collects the seconds spent in each module's calls inside the `with` block."""
    begin: dict[nn.Module, float] = {}
    spent: dict[nn.Module, float] = {}

    def before(module: nn.Module, *_: Any) -> None:
        begin[module] = _now()

    def after(module: nn.Module, *_: Any) -> None:
        spent[module] = spent.get(module, 0.0) + _now() - begin[module]

    hooks = [each for module in modules for each in (
        module.register_forward_pre_hook(before), module.register_forward_hook(after))]  # fmt: skip
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def _now() -> float:
    """Return the clock in seconds, after waiting for all work on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
