"""Measures speed and agreement of a model at several densities, before any training."""

from __future__ import annotations

import math
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..checked import positive_fraction
from ..conversion.selection import Plan, ScoredSelection
from ..conversion.sparsify import (
    Survey,
    no_weights_error,
    select_blocks,
    sparsify,
    survey_weights,
    warn_of_sparse_weights,
)
from ..conversion.speed import Example, keep_faster
from ..errors import BlockSparseError, SparsityWarning
from ..layout import BlockLayout
from ..sparsity.calibration.calibrate import Batches, batch_error, progress, sample_count, values_of
from ..sparsity.distillation import Distillation, Targets
from ..sparsity.selection import check_density, dense_norms, top_blocks
from ..surgery.blocks import mask_blocks_
from ..surgery.model_tools import copy_model, evaluation_mode, split_arguments, unwrapped_model
from ..surgery.prunable import Prunable, Skip, prunable, skip_by_name
from ..surgery.tied import untie_output_layers
from ..topology.drawings.style import COLORS, figure_and_axes, save
from .batches import BatchReader, Data
from .measures import (
    SpeedUps,
    calls_weights,
    check_finite_parameters,
    default_block_size,
    density_of,
    first_example,
    sparse_modules,
)
from .one_shot import fit_at_densities
from .result import Point, curve_table, draw_curve

# The recommendation lists layers until they take this fraction of the time.
MOST_TIME = 0.8

# A layer that takes less time than this fraction, and whose pruning leaves less agreement, is better dense.
LITTLE_TIME, FRAGILE = 0.05, 0.9

# Columns of the recommendation; layers in the table and the picture; names in a sentence; fragile layers;
# characters of a name in the picture.
COLUMNS, MAX_LAYERS, MAX_LISTED, MAX_FRAGILE, MAX_NAME = 79, 12, 6, 3, 24

# A loss of agreement up to this value needs no training.
SMALL_LOSS = 0.01

# Layers are pruned one at a time to this density.
LAYER_DENSITY = 0.25

# Samples are left out until all runs with single layers pruned, a run on the calibration data, and a call on the
# example take about this number of seconds.
LAYERS_SECONDS, PASS_SECONDS, EXAMPLE_SECONDS = 15.0, 3.0, 0.5

# Models are fitted as by `sparsify` if their runs for it take at most these seconds, and its cost is at most this one.
FIT_SECONDS, MAX_COST = 20.0, 3e10


# Speed-ups contradict each other if a denser model is faster by more than this factor.
UNLIKELY = 1.7


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
        samples: how many held-out samples the agreement was measured on.
        options: the other arguments of the calls that `recommendation` shows, such as ", block_size=16".
    """

    points: tuple[Point, ...]
    layers: tuple[LayerShare, ...]
    samples: int = 0
    options: str = ""

    @property
    def recommendation(self) -> str:
        """A few sentences of advice: which layers take the time, and which density to use."""
        return "\n".join(textwrap.fill(each, COLUMNS, break_on_hyphens=False) for each in self._sentences())

    def _sentences(self) -> Iterator[str]:
        """Yield the sentences of the recommendation; each command is one of its own, to be copied."""
        if _contradict_each_other(self.points):
            yield "The timings contradict each other: measure again when the machine is idle."
        total, names = 0.0, list[str]()
        for layer in self.layers:
            if total >= MOST_TIME * sum(each.time for each in self.layers):
                break
            total += layer.time
            names.append(layer.name)
        take = "takes" if len(names) == 1 else "take"
        yield f"{len(names)} of {len(self.layers)} layers {take} {total:.0%} of the time: {_listed(names)}."
        sparse = [point for point in self.points if point.density < 1 and point.speedup > 1]
        if not sparse:
            yield "No density makes the model faster on this machine. Keep it dense."
            return
        ready = [point for point in sparse if point.agreement >= self.points[0].agreement - SMALL_LOSS]
        if ready:
            best = max(ready, key=lambda point: point.speedup)
            result = f"{best.speedup:.1f} times the speed at {best.agreement:.1%} agreement"
            yield f"Density {best.density:.2g} gives {result}, without training:"
            yield f"    bs.sparsify(model, {best.density:.2g}, data=data{self.options})"
        fast = max(sparse, key=lambda point: point.speedup)
        if fast not in ready:
            reached = max(0.0, fast.agreement)
            result = f"{fast.speedup:.1f} times the speed at {reached:.1%} agreement"
            yield f"Density {fast.density:.2g} gives {result}, and needs training:"
            yield f"    bs.compress(model, data, {fast.density:.2g}{self.options})"
        fragile = [layer for layer in self.layers if layer.agreement < FRAGILE and layer.time < LITTLE_TIME]
        fragile = sorted(fragile, key=lambda layer: layer.agreement)[:MAX_FRAGILE]
        if fragile:
            names = [layer.name for layer in fragile]
            yield f"Keep dense, by skip=: {_listed(names)}. Little time, and a large loss when pruned without fitting."

    def table(self) -> str:
        """Return densities, layers and the recommendation as text; its tables have at most 80 columns."""
        shown = self.layers[:MAX_LAYERS]
        names = [_shortened(layer.name, COLUMNS - 40) for layer in shown]
        width = max([*map(len, names), 8])
        head = f"{'layer':<{width}}{'parameters':>13}{'time':>8}{'agreement at 0.25':>19}"
        rows = [
            f"{name:<{width}}{layer.parameters:>13,}{layer.time:>8.1%}{max(0.0, layer.agreement):>19.1%}"
            for name, layer in zip(names, shown, strict=True)
        ]
        if others := self.layers[MAX_LAYERS:]:
            numbers = f"{sum(layer.parameters for layer in others):>13,}{sum(layer.time for layer in others):>8.1%}"
            rows.append(f"{f'{len(others)} more':<{width}}{numbers}")
        note = f"agreement on {self.samples:,} held-out samples; layers are pruned alone and not fitted\n"
        return "\n".join([curve_table(self.points, minutes=False), note, head, *rows, "", self.recommendation])

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw agreement and speed-up over density, and the time of each layer; see `CompressionResult.plot`."""
        figure, (agreements, speeds, times) = figure_and_axes((10.8, 3.4), columns=3)
        draw_curve(agreements, speeds, self.points)
        shown = self.layers[:MAX_LAYERS][::-1]
        times.barh(range(len(shown)), [100 * layer.time for layer in shown], color=COLORS[2])
        times.set_yticks(range(len(shown)), [_shortened(layer.name) for layer in shown], fontsize=8)
        times.set_xlabel("time of each layer, %")
        if path is not None:
            save(figure, path)
        return figure

    def __str__(self) -> str:
        return self.table()


def _contradict_each_other(points: Sequence[Point]) -> bool:
    """Return whether a model is far faster than a sparser one, or than its density can explain."""
    pairs = [(denser, other) for denser in points for other in points if denser.density > other.density]
    is_rising = all(denser.speedup <= UNLIKELY * other.speedup for denser, other in pairs)
    return not is_rising or any(point.speedup * point.density > UNLIKELY**2 for point in points)


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    others = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + others


def _shortened(name: str, length: int = MAX_NAME) -> str:
    """Return the end of a long name."""
    return name if len(name) <= length else f"...{name[3 - length :]}"


@torch.no_grad()
def tradeoff(
    model: nn.Module,
    data: Batches,
    example: Example | None = None,
    *,
    densities: Sequence[float] = (0.5, 0.25, 0.1),
    block_size: int | tuple[int, int] | None = None,
    skip: Skip = (),
) -> Tradeoff:
    """Measure speed and agreement with the dense model at several densities, without training.

    This takes half a minute for the smallest models, and a few minutes for others: samples are left out then, and
    layers are fitted one by one, so that `sparsify` with the same data may agree better than measured here. Densities
    that leave a weight without a block are left out. Output layers that share an embedding's weight count as untied.

    Args:
        model: a trained model; it stays as it is.
        data: two batches of its inputs or more, as for `compress`; some hundred samples.
        example: inputs to measure speeds on, as for `sparsify`; by default the first held-out batch, or as many of its
            samples as run in half a second.
        densities: the densities to try, 0.5, 0.25 and 0.1 by default.
        block_size: an int or (rows, columns); by default 16 for float32 on CPUs, and 32 otherwise.
        skip: modules, names or shell patterns of weights that stay dense.

    Raises:
        BlockSparseError: densities out of range, fewer than two batches, parameters that are not finite, data that the
            model does not accept, or no weight that can become block-sparse.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        >>> measured = bs.tradeoff(model, torch.randn(128, 512).split(32), densities=[0.25])
        >>> [layer.name for layer in measured.layers][0], measured.points[0].density
        ('0', 1.0)
    """
    if not isinstance(densities, Sequence) or not densities:
        raise BlockSparseError.expected("densities", "a list of numbers, such as [0.25]", repr(densities))
    targets = [positive_fraction("densities", density) for density in densities]
    begin = time.monotonic()
    model = unwrapped_model(model)
    check_finite_parameters(model)
    block_size = default_block_size(model) if block_size is None else block_size
    options = f", block_size={block_size}" + (", skip=skip" if skip != () else "")
    skip, model = skip_by_name(model, skip), copy_model(model)
    untie_output_layers(model)
    read = Data.read(data)
    reader = BatchReader(model)
    candidates = survey_weights(model, block_size, skip)
    if not candidates.weights:
        raise no_weights_error(model, candidates)
    warn_of_sparse_weights("tradeoff", candidates)
    weights_of: dict[nn.Module, list[Prunable]] = {}
    for weight in candidates.weights.values():
        weights_of.setdefault(weight.module, []).append(weight)
    targets = _possible(targets, candidates)
    held_out = _limit(reader, read.held_out, LAYERS_SECONDS / len(weights_of))
    calibration = _limit(reader, read.calibration(), PASS_SECONDS)
    if example is None:
        example = first_example(reader, _limit(reader, read.held_out[:1], EXAMPLE_SECONDS))
    measure_agreement = _Agreement(model, reader, held_out)
    times = _time_shares(model, example, list(weights_of))
    names = {module: name for name, module in model.named_modules()}
    layers = [
        LayerShare(
            names[module] or type(model).__name__,
            sum(weight.tensor.numel() for weight in group),
            times[module],
            _agreement_without(model, group, measure_agreement),
        )
        for module, group in progress(weights_of.items(), "layers pruned:")
    ]
    is_observed = calls_weights(model, candidates.weights.values(), reader.arguments(calibration[0]))
    chosen = [
        _layouts(model, candidates, target, calibration if is_observed else None, example)
        for target in progress(targets, "densities timed:")
    ]
    points, speedups, before = [Point(1.0, 1.0, 1.0)], SpeedUps(model, example), sparse_modules(model)
    seconds = FIT_SECONDS / (len(weights_of) * len(targets))
    is_fast = is_observed and _limit(reader, calibration, seconds)[-1] is calibration[-1]
    to_sparsify = [{name: layout for name, layout in each.items() if layout.density < 1} for each in chosen]
    models = _fitted_models(model, candidates, to_sparsify, block_size, calibration, is_fast=is_fast)
    for asked, sparse, layouts in zip(targets, models, chosen, strict=True):
        full = sum(candidates.weights[name].tensor.numel() for name, each in layouts.items() if each.density == 1)
        speedup = speedups.measure(sparse) if sparse_modules(sparse) - before else 1.0
        minutes = (time.monotonic() - begin) / 60
        density, agreed = density_of(sparse, before, full), measure_agreement(sparse)
        points.append(Point(density, speedup, agreed, minutes=minutes, asked=asked))
    samples = sum(map(sample_count, held_out))
    return Tradeoff(tuple(points), tuple(sorted(layers, key=lambda layer: -layer.time)), samples, options)


def _possible(densities: list[float], candidates: Survey) -> list[float]:
    """Return the densities that leave each weight a block; raise a BlockSparseError if there is none."""
    blocks = {name: weight.blocks for name, weight in candidates.weights.items()}
    possible = []
    for density in densities:
        try:
            check_density(density, blocks, "global")
        except BlockSparseError:
            continue
        possible.append(density)
    if not possible:
        check_density(max(densities), blocks, "global")
    return possible


def _layouts(
    model: nn.Module, candidates: Survey, density: float, batches: list[Any] | None, example: Example
) -> dict[str, BlockLayout]:
    """Return the layouts at a density of the weights that are faster block-sparse on the example.

    Weights are timed with equal densities, so that layers of equal shapes are timed once.
    """
    plan = select_blocks(model, candidates, density, None, "careful", None, batches, limit_loss=False)
    equal = ScoredSelection(candidates.weights, density, cast(ScoredSelection, plan.selection).scores, "layer")
    faster = keep_faster(model, Plan(equal, equal.layouts(candidates.weights)), example).layouts
    return plan.selection.layouts(faster) if faster else {}


def _fitted_models(
    model: nn.Module,
    candidates: Survey,
    layouts: Sequence[dict[str, BlockLayout]],
    block_size: int | tuple[int, int],
    batches: list[Any],
    *,
    is_fast: bool,
) -> Iterator[nn.Module]:
    """Yield a model for each of these layouts, fitted to the batches.

    `sparsify` fits them, and chooses blocks again, if this takes seconds: if runs of the model are fast, and the cost
    of its choice, (inputs) (inputs that are kept)^2 for each row of blocks, is small. Otherwise each layer is fitted by
    itself.
    """
    cost = 0.0
    for each in layouts:
        for name, layout in each.items():
            weight = candidates.weights[name]
            cost += weight.grid[0] * layout.density**2 * (weight.shape[1] * weight.blocks.taps) ** 3
    if not is_fast or cost > MAX_COST:
        yield from fit_at_densities(model, batches, layouts)
        return
    for each in layouts:
        skip = [weight.name for weight in prunable(model, 1) if weight.name not in each]
        wanted = {name: layout.density for name, layout in each.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SparsityWarning)
            yield (
                sparsify(model, wanted, block_size, skip=skip, data=batches, force=True) if each else copy_model(model)
            )


def _agreement_without(model: nn.Module, weights: list[Prunable], measure: Callable[[nn.Module], float]) -> float:
    """Return the agreement if only these weights are pruned, to `LAYER_DENSITY`; they are restored."""
    values = [weight.tensor.clone() for weight in weights]
    try:
        for weight in weights:
            density = max(LAYER_DENSITY, 1 / math.prod(weight.grid))
            norms = {weight.name: dense_norms(weight.blocks, weight.tensor)}
            mask = top_blocks(norms, {weight.name: weight.blocks}, density, "layer")[weight.name]
            mask_blocks_(weight.blocks, weight.tensor, mask)
        return measure(model)
    finally:
        for weight, value in zip(weights, values, strict=True):
            weight.tensor.copy_(value)


def _limit(reader: BatchReader, batches: list[Any], seconds: float) -> list[Any]:
    """Return the first batches, which the model runs in about these seconds; if one takes longer, a part of it."""
    with evaluation_mode(reader.model):
        begin = _now()
        reader.run(reader.model, batches[0])
        once = _now() - begin
    if once <= seconds:
        return batches[: math.ceil(seconds / max(once, 1e-9))]
    return [_first_samples(batches[0], seconds / once)]


def _first_samples(batch: Any, fraction: float) -> Any:
    """Return a fraction of the samples of a batch; all of them if its tensors have several lengths."""
    values = list(values_of(batch))
    lengths = {len(value) if isinstance(value, Tensor) and value.dim() else 0 for value in values}
    if len(lengths) > 1 or isinstance(batch, PackedSequence):
        return batch
    count = max(1, int(fraction * lengths.pop()))
    if isinstance(batch, Mapping):
        return {name: value[:count] for name, value in batch.items()}
    return batch[:count] if isinstance(batch, Tensor) else [value[:count] for value in batch]


class _Agreement:
    """Callable that returns the mean agreement of a model with the dense one over batches."""

    def __init__(self, model: nn.Module, reader: BatchReader, batches: list[Any]):
        self.calls = [reader.arguments(batch) for batch in batches]
        with evaluation_mode(model):
            kind = reader.output_kind(model, batches[0])
        self.distillation = Distillation(model, model, output=kind)
        self.targets = [self._targets(reader, batch) for batch in batches]

    def _targets(self, reader: BatchReader, batch: Any) -> Targets:
        """Run the dense model on a batch and return its outputs, which must be finite."""
        args, kwargs = reader.arguments(batch)
        try:
            targets = self.distillation.run_teacher(*args, **kwargs)
        except Exception as error:  # the user's module may raise anything
            raise batch_error(self.distillation.teacher, batch, error, with_label=True) from error
        if not all(bool(each.isfinite().all()) for each in targets.tensors.values()):
            expected = "batches for which the model returns finite numbers"
            raise BlockSparseError.expected("data", expected, "inf or nan in its outputs")
        if not targets.tensors:
            raise BlockSparseError.expected("model", "floating-point tensors among its outputs", "none")
        return targets

    def __call__(self, model: nn.Module) -> float:
        values = []
        self.distillation.student = model
        with evaluation_mode(model):
            for (args, kwargs), targets in zip(self.calls, self.targets, strict=True):
                result = self.distillation.run_student(*args, **kwargs)
                values.append(self.distillation.agreement(result, targets))
        return sum(values) / len(values)


def _time_shares(model: nn.Module, example: Example, modules: list[nn.Module]) -> dict[nn.Module, float]:
    """Return each module's fraction of the time of a model call on the example: the median of five calls."""
    args, kwargs = split_arguments(example)
    try:
        with evaluation_mode(model):
            model(*args, **kwargs)
    except Exception as error:  # the user's module may raise anything
        got = f"{type(error).__name__}: {error}"
        raise BlockSparseError.expected("example", "arguments that the model accepts", got) from error
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
