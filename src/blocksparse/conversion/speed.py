"""Measures the speed-up of block-sparse modules and models on this machine, and keeps only those that are faster."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import integer
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..measure import Clock, alternate, cuda_clock, host_clock
from ..nn.cells import Cell
from ..nn.experts import Experts
from ..nn.linear import Linear
from ..nn.module import BlockSparseModule
from ..nn.multihead_attention import MultiheadAttention
from ..nn.recurrent import Recurrent
from ..ops.linear import LINEAR
from ..surgery.model_tools import copy_model, parameter_device, split_arguments, uncompiled
from ..surgery.prunable import Prunable
from ..surgery.replace import replace_modules, replace_with_sparse, sparse_module
from .densify import densify
from .selection import Layouts, Plan
from .sparser import dense_name, owner_of

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and keyword arguments of a call."""

# More tokens would take gigabytes for layers of a few thousand features.
MAX_TOKENS = 2**20

# Output positions of a convolution for each token: 64 tokens are an image of 32 x 32.
POSITIONS_PER_TOKEN = 16

# A module with a smaller measured speed-up stays dense: it might be slower the next time.
MIN_SPEEDUP = 1.05

# A layer of a lower density that was faster when it was chosen is not timed again after training.
MAX_UNTIMED_DENSITY = 0.5

# If the ratios of rounds differ by more than this factor, other programs seem to use the machine.
BUSY_SPREAD = 2.0

# Why a weight stays dense that has the layout of all blocks.
KEEPS_ALL = "keeps all of its blocks"

# The speed-ups of modules by all settings that they depend on.
_measured: dict[tuple[Any, ...], float] = {}


def keep_faster(model: nn.Module, plan: Plan, example: Example | None = None, tokens: int = 64) -> Plan:
    """Leave weights dense until every block-sparse module is faster than the dense one, and the model not slower.

    `sparsify` calls this unless forced. The result depends on the machine. If weights are slower, blocks are selected
    again for the others. Weights that keep all of their blocks stay dense too, and count towards the density.

    Args:
        model: the dense model, which is left as it is.
        plan: the layouts that its weights would get.
        example: inputs of the model to time with; the whole model is timed only with them.
        tokens: rows of the inputs to time modules with if there is no example.

    Returns:
        The plan with the layouts of weights that are better block-sparse, and the reasons why others stay dense.
    """
    speed = Speed(model, tokens, example)
    speed.record(plan.selection.weights[name].module for name in plan.layouts)
    while plan.layouts:
        full = {name: KEEPS_ALL for name, layout in plan.layouts.items() if layout.density == 1}
        slower = _slower_weights(plan.leave_dense(full), speed)
        if not slower:
            return plan.leave_dense(full)
        plan = plan.leave_dense(slower)
        if plan.layouts:
            plan = replace(plan, layouts=plan.selection.layouts(plan.layouts))
    return plan


def _slower_weights(plan: Plan, speed: Speed) -> dict[str, str]:
    """Return why some weights are better left dense; if each module is faster, why the model is slower with them."""
    by_module: dict[nn.Module, list[str]] = {}
    for name in plan.layouts:
        by_module.setdefault(plan.selection.weights[name].module, []).append(name)
    reasons: dict[str, str] = {}
    speedups: dict[str, float] = {}
    for names in by_module.values():
        try:
            speedup = speed.of_weights([(plan.selection.weights[name], plan.layouts[name]) for name in names])
        except BlockSparseError as error:
            reasons |= dict.fromkeys(names, f"does not run block-sparse here: {error}")
            continue
        speedups |= dict.fromkeys(names, speedup)
        for name in names if speedup < MIN_SPEEDUP else ():
            rows, columns = plan.layouts[name].block_shape
            details = (
                f"density {plan.layouts[name].density:.2g}, blocks of {rows} x {columns}, {speed.described_inputs}"
            )
            details += "; timings varied, is the machine busy?" if speed.is_busy else ""
            reasons[name] = f"{speedup:.3g} times as fast block-sparse ({details})"
    return reasons or _weights_that_slow_the_model(plan.layouts, speedups, speed)


def _weights_that_slow_the_model(layouts: Layouts, speedups: Mapping[str, float], speed: Speed) -> dict[str, str]:
    """If the model as a whole is slower, return the half of the weights that gain least; otherwise none.

    To leave half of them dense at once takes fewer timings than one at a time.
    """
    whole = speed.of_model(layouts) if layouts else None
    if whole is None or whole >= 1:
        return {}
    bound = statistics.median_low(set(speedups.values()))
    return {
        name: f"{speedup:.3g} times as fast block-sparse by itself, but the whole model only {whole:.2g} times as fast"
        for name, speedup in speedups.items()
        if speedup <= bound
    }


def densify_slower(model: nn.Module, example: Example, skip: Collection[str] = ()) -> tuple[nn.Module, dict[str, str]]:
    """Make layers dense again that have a weight of a density above 0.5 and are slower block-sparse.

    Args:
        model: the model, which is changed.
        example: its inputs to time with.
        skip: names of block-sparse modules that stay.

    Returns:
        The model, and the reasons by name of the weight.
    """
    owners = dict(model.named_modules())
    dense_names: dict[nn.Module, list[str]] = {}
    for name, module in owners.items():
        if isinstance(module, BlockSparseModule) and name not in skip and module.layout.density > MAX_UNTIMED_DENSITY:
            owner = owner_of(name, module, owners)
            dense_names.setdefault(owner, []).append(dense_name(name, module))
    speed = Speed(model, 64, example)
    speed.record(dense_names)
    speedups = {owner: speed.of_module(owner) for owner in dense_names}
    slower = {owner: speedup for owner, speedup in speedups.items() if speedup < 1}
    reasons = {
        name: f"{speedup:.3g} times as fast block-sparse, as it kept most blocks"
        for owner, speedup in slower.items()
        for name in dense_names[owner]
    }
    return replace_modules(model, {owner: densify(owner) for owner in slower}), reasons


class Speed:
    """The speed-ups of a model and its modules: dense time / block-sparse time of a forward call.

    Modules are timed without gradients in their own mode, models in evaluation mode.

    Args:
        model: the model, which is left as it is.
        tokens: rows of the inputs of modules; a convolution gets one image with about 16 times as many output
            positions. A recurrent layer is timed on one sequence of this length and on 16 shorter ones, and the smaller
            speed-up counts.
        example: inputs of the model, as for `sparsify`; modules are then timed on the inputs that they get.
    """

    def __init__(self, model: nn.Module, tokens: int, example: Example | None = None):
        self.tokens, self.described_inputs = tokens, f"{tokens} tokens" if example is None else "the example"
        self._arguments = split_arguments(example)
        self._model = None if example is None else share_parameters(model).eval()
        self._names = {module: name for name, module in model.named_modules()}
        self._recorded: dict[str, Arguments] = {}
        self._doubtful: dict[tuple[Any, ...], float] = {}  # speed-ups that another call measures again
        self.is_busy = False
        """Whether the last timing was undecided and other programs seemed to run at the same time."""

    @torch.no_grad()
    def record(self, modules: Iterable[nn.Module]) -> None:
        """Run the example, if there is one, and record the first arguments of these modules of the model."""
        if self._model is None:
            return

        def save_arguments(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._recorded.setdefault(name, (args, kwargs))

        names = {self._names[module] for module in modules}
        hooks = [
            self._model.get_submodule(name).register_forward_pre_hook(partial(save_arguments, name), with_kwargs=True)
            for name in names
        ]
        args, kwargs = self._arguments
        try:
            with uncompiled():
                self._model(*args, **kwargs)
        except Exception as error:  # the user's module may raise anything
            raise BlockSparseError.expected(
                "example", "arguments that the model accepts", _first_line(error)
            ) from error
        finally:
            for hook in hooks:
                hook.remove()

    def of_weights(self, chosen: Sequence[tuple[Prunable, BlockLayout]]) -> float:
        """Return the speed-up of a dense module on these layouts; it is left as it is."""
        module = chosen[0][0].module
        return self._time_module(module, lambda: module, lambda: sparse_module(chosen))

    def of_module(self, module: nn.Module) -> float:
        """Return the speed-up of a block-sparse module."""
        return self._time_module(module, lambda: densify(module), lambda: module)

    def of_model(self, layouts: Mapping[str, BlockLayout]) -> float | None:
        """Return the speed-up of the dense model on these layouts and the example; None without an example."""
        if self._model is None:
            return None
        return self._time_model(self._model, replace_with_sparse(share_parameters(self._model), layouts))

    def of_sparse_model(self) -> float | None:
        """Return the speed-up of the block-sparse model on the example; None without an example."""
        return None if self._model is None else self._time_model(densify(self._model), self._model)

    def _time_model(self, dense: nn.Module, sparse: nn.Module) -> float:
        """Return the speed-up of the whole model on the example."""
        return self._measure(dense, sparse, [self._arguments], budget=2.0)

    @torch.no_grad()
    def _time_module(self, module: nn.Module, dense: Callable[[], nn.Module], sparse: Callable[[], nn.Module]) -> float:
        """Return the speed-up of a module, timed once for all modules with the same settings and inputs."""
        self.is_busy = False
        timed = sparse()
        weights = [each for each in timed.modules() if isinstance(each, BlockSparseModule)]
        values = weights[0].values
        backend = LINEAR.on(values.device, values.dtype).__name__
        recorded = self._recorded.get(self._names.get(module, ""))
        inputs = [recorded] if recorded is not None else random_inputs(timed, self.tokens)
        key = backend, _settings_key(timed, weights), *(_shapes(each) for each in inputs)
        for known in (_measured, self._doubtful):
            if key in known:
                return known[key]
        speedup = self._measure(dense(), timed, inputs)
        (self._doubtful if self.is_busy else _measured)[key] = speedup
        return speedup

    @torch.no_grad()
    def _measure(self, dense: nn.Module, sparse: nn.Module, inputs: Sequence[Arguments], budget: float = 0.1) -> float:
        """Time both modules in turn; return the smallest speed-up over these inputs."""
        device = parameter_device(sparse)
        ratios = []
        for args, kwargs in inputs:
            calls = {"sparse": partial(sparse, *args, **kwargs), "dense": partial(dense, *args, **kwargs)}
            spread = alternate(calls, rounds=7, budget=budget, clock=clock_of(device)).ratio("dense", "sparse")
            ratio = spread.median
            if spread.low < 1 or spread.high > BUSY_SPREAD * spread.low:
                # Undecided, or slower, maybe because other programs ran: then the fastest calls count.
                samples = alternate(calls, rounds=35, budget=5 * budget, clock=clock_of(device))
                spread, ratio = samples.ratio("dense", "sparse"), samples.least("dense") / samples.least("sparse")
                self.is_busy |= spread.high > BUSY_SPREAD * spread.low
            ratios.append(ratio)
        return min(ratios)


def checked_tokens(tokens: Any) -> int:
    """Return `tokens` after a check of its type and range."""
    return integer("tokens", tokens, 1, below=MAX_TOKENS + 1)


def share_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters."""
    return copy_model(model, {id(each): each for each in model.parameters()}, otherwise="force=True without example=")


def random_inputs(module: Any, tokens: int) -> list[Arguments]:
    """Return random arguments for a call of a block-sparse module with about `tokens` tokens.

    For a recurrent module, the list has one call at batch size 1, and one at batch size 16 (at most `tokens`).
    """
    values = next(each.values for each in module.modules() if isinstance(each, BlockSparseModule))
    like: dict[str, Any] = {"device": values.device, "dtype": values.dtype}
    if isinstance(module, Cell):
        return [((torch.randn(tokens, module.input_size, **like),), {})]
    if isinstance(module, Experts):
        index = torch.arange(2 * tokens, device=values.device).view(tokens, 2) % module.num_experts
        return [((torch.randn(tokens, module.hidden_dim, **like), index, torch.rand(tokens, 2, **like)), {})]
    if isinstance(module, MultiheadAttention):
        sizes = module.embed_dim, module.kdim, module.vdim
        x = torch.randn(tokens, module.embed_dim, **like)
        return [(tuple(x if size == module.embed_dim else torch.randn(tokens, size, **like) for size in sizes), {})]
    if isinstance(module, Recurrent):
        batches = sorted({1, min(16, tokens)})
        inputs = [torch.randn(tokens // batch, batch, module.input_size, **like) for batch in batches]
        return [((x.transpose(0, 1).contiguous() if module.batch_first else x,), {}) for x in inputs]
    if isinstance(module, Linear):
        return [((torch.randn(tokens, module.in_features, **like),), {})]
    side = math.ceil(min(POSITIONS_PER_TOKEN * tokens, MAX_TOKENS) ** (1 / module.axes))
    reach = [step * (taps - 1) + 1 for step, taps in zip(module.dilation, module.kernel_size, strict=True)]
    spans = [max(side * stride, smallest) for stride, smallest in zip(module.stride, reach, strict=True)]
    return [((torch.randn(1, module.in_channels, *spans, **like),), {})]


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times calls on a device."""
    return cuda_clock if device.type == "cuda" else host_clock


def _settings_key(module: nn.Module, weights: Sequence[BlockSparseModule]) -> tuple[Any, ...]:
    """Return what the speed of a module depends on, besides the shapes of its inputs."""
    settings = [
        (name, value)
        for name, value in vars(module).items()
        if name[0] != "_" and isinstance(value, int | float | str | tuple)
    ]
    parameters = [tuple(p.shape) for name, p in module.named_parameters() if not name.endswith("values")]
    layouts = [
        (each.layout.shape, each.layout.block_shape, round(math.log(max(each.layout.density, 1e-9), 1.1)))
        for each in weights
    ]
    machine = weights[0].values.dtype, weights[0].values.device, torch.get_num_threads()
    return type(module).__name__, repr(settings), repr(parameters), repr(layouts), machine


def _shapes(value: Any) -> str:
    """Describe an input without its values: types, shapes, dtypes, strides."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} {value.stride()}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shapes, value))})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name}: {_shapes(each)}' for name, each in value.items())})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _first_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
