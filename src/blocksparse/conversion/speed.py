"""Measures how many times faster modules and models are block-sparse than dense, on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

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
from ..surgery.model_tools import copy_model
from ..surgery.prunable import Prunable
from ..surgery.replace import replace_with_sparse, sparse_module
from .densify import densify

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module is called with."""

# With some thousand features what is made up has gigabytes then.
MAX_TOKENS = 2**20

# Modules that agree in all of this are assumed to be equally fast.
_measured: dict[tuple[Any, ...], float] = {}

# Where the ratios of rounds differ by more, something else keeps the machine busy.
BUSY = 2.0


class Speed:
    """The speed-ups of a model and its modules: time of the dense one / time of the block-sparse one, forward.

    Measured without gradients, in the mode that the modules are in; a model in its evaluation mode.

    Args:
        model: is not changed.
        tokens: rows of the inputs that modules get; of a convolution about this many positions of the output, of a
            recurrent layer steps of one sequence, and of several shorter ones, of which the slower counts.
        example: what the model is called with, as for `sparsify`: modules get the inputs that they get from it.
    """

    def __init__(self, model: nn.Module, tokens: int, example: Example | None = None):
        self.tokens, self.inputs = tokens, f"{tokens} tokens" if example is None else "the example"
        self._arguments = _arguments(example)
        self._model = None if example is None else twin(model).eval()
        self._names = {module: name for name, module in model.named_modules()}
        self._recorded: dict[str, Arguments] = {}
        self.is_busy = False
        """Whether the last measurement was undecided, and other programs seem to have run at the same time."""

    @torch.no_grad()
    def record(self, modules: Iterable[nn.Module]) -> None:
        """Runs the example, if there is one, and keeps what these modules of the model are first called with."""
        if self._model is None:
            return

        def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._recorded.setdefault(name, (args, kwargs))

        names = {self._names[module] for module in modules}
        hooks = [
            self._model.get_submodule(name).register_forward_pre_hook(partial(keep, name), with_kwargs=True)
            for name in names
        ]
        fused = torch.backends.mha.get_fastpath_enabled()
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it runs none of the modules inside of an encoder layer
            args, kwargs = self._arguments
            self._model(*args, **kwargs)
        except Exception as error:  # of any kind: it comes from the user's module
            raise BlockSparseError.expected("example", "what the model takes", _first_line(error)) from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for hook in hooks:
                hook.remove()

    def of_weights(self, chosen: Sequence[tuple[Prunable, BlockLayout]]) -> float:
        """The speed-up of a module that is still dense, with these layouts; it is left as it is."""
        module = chosen[0][0].module
        return self._of(module, lambda: module, lambda: sparse_module(chosen))

    def of_module(self, module: nn.Module) -> float:
        """The speed-up of a module that is block-sparse already."""
        return self._of(module, lambda: densify(module), lambda: module)

    def of_model(self, layouts: Mapping[str, BlockLayout]) -> float | None:
        if self._model is None:
            return None
        return self._whole(self._model, replace_with_sparse(twin(self._model), layouts))

    def of_sparse_model(self) -> float | None:
        """That of the whole model, which is block-sparse already, on the example; None without one."""
        return None if self._model is None else self._whole(densify(self._model), self._model)

    def _whole(self, dense: nn.Module, sparse: nn.Module) -> float:
        return self._measure(dense, sparse, [self._arguments], budget=2.0)

    @torch.no_grad()
    def _of(self, module: nn.Module, dense: Callable[[], nn.Module], sparse: Callable[[], nn.Module]) -> float:
        self.is_busy = False
        made = sparse()
        weights = [each for each in made.modules() if isinstance(each, BlockSparseModule)]
        values = weights[0].values
        backend = LINEAR.on(values.device, values.dtype).__name__
        recorded = self._recorded.get(self._names.get(module, ""))
        inputs = [recorded] if recorded is not None else made_up_inputs(made, self.tokens)
        key = backend, _key(made, weights), *(_shapes(each) for each in inputs)
        if key not in _measured:
            _measured[key] = self._measure(dense(), made, inputs)
        return _measured[key]

    @torch.no_grad()
    def _measure(self, dense: nn.Module, sparse: nn.Module, inputs: Sequence[Arguments], budget: float = 0.1) -> float:
        """How many times as long the dense module takes as the block-sparse one, in turn; the least of these inputs."""
        device = next((parameter.device for parameter in sparse.parameters()), torch.device("cpu"))
        ratios = []
        for args, kwargs in inputs:
            calls = {"sparse": partial(sparse, *args, **kwargs), "dense": partial(dense, *args, **kwargs)}
            spread = alternate(calls, rounds=7, budget=budget, clock=_clock(device)).ratio("dense", "sparse")
            ratio = spread.median
            if spread.low < 1 < spread.high:  # undecided
                samples = alternate(calls, rounds=35, budget=5 * budget, clock=_clock(device))
                spread, ratio = samples.ratio("dense", "sparse"), samples.least("dense") / samples.least("sparse")
                self.is_busy |= spread.high > BUSY * spread.low
            ratios.append(ratio)
        return min(ratios)


def _arguments(example: Example | None) -> Arguments:
    if isinstance(example, Mapping):
        return (), dict(example)
    several = isinstance(example, tuple | list) and not isinstance(example, PackedSequence)
    return (tuple(example) if several else (example,)), {}  # type: ignore[arg-type]


def checked_tokens(tokens: Any) -> int:
    return integer("tokens", tokens, 1, below=MAX_TOKENS + 1)


def twin(model: nn.Module) -> nn.Module:
    """A copy of a model with the same parameters, not copies of them."""
    return copy_model(model, {id(each): each for each in model.parameters()}, otherwise="force=True without example=")


def made_up_inputs(module: Any, tokens: int) -> list[Arguments]:
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
        made = [torch.randn(tokens // batch, batch, module.input_size, **like) for batch in batches]
        return [((x.transpose(0, 1).contiguous() if module.batch_first else x,), {}) for x in made]
    if isinstance(module, Linear):
        return [((torch.randn(tokens, module.in_features, **like),), {})]
    side = math.ceil(tokens ** (1 / module.axes))
    reach = [step * (taps - 1) + 1 for step, taps in zip(module.dilation, module.kernel_size, strict=True)]
    spans = [max(side * stride, least) for stride, least in zip(module.stride, reach, strict=True)]
    return [((torch.randn(1, module.in_channels, *spans, **like),), {})]


def _clock(device: torch.device) -> Clock:
    return cuda_clock if device.type == "cuda" else host_clock


def _key(module: nn.Module, weights: Sequence[BlockSparseModule]) -> tuple[Any, ...]:
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
    here = weights[0].values.dtype, weights[0].values.device, torch.get_num_threads()
    return type(module).__name__, repr(settings), repr(parameters), repr(layouts), here


def _shapes(value: Any) -> str:
    """What an input is, its numbers apart."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype} {value.stride()}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shapes, value))})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name}: {_shapes(each)}' for name, each in value.items())})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
