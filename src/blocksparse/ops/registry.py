"""The base classes of all operations: they choose the backend, make PyTorch's op, and define its gradients.

A backend of an op is a module in the op's folder. It has a function per product, and
`unsupported_reason(device, dtype) -> str | None`, which returns why it cannot serve a call, or None if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ..errors import BlockSparseError, Page
from ..layout import BlockLayout
from . import cpu_core
from .activations import ACTIVATIONS
from .checks import check_devices, check_tangents, check_tensors, refuse_onnx
from .gpu import runtime as gpu_runtime
from .graph_layout import AnyLayout, GraphLayout, grid_from, index_tensors, layout_from
from .torch_op import LIBRARY, call_per_batched_grad, define_op

__all__ = ["BackendStatus", "LayoutOp", "Op", "backends", "use_backend"]

_BACKEND_OF_DEVICE = {"cpu": "cpu", "cuda": "triton"}
# One dict for the whole process, because autograd runs backward passes in threads of its own; the last entry applies.
# Each `with` has a key of its own, so it removes its own entry in whatever order threads exit.
_forced: dict[object, str] = {}


# -- backends ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend is usable on this machine, and the reason if it is not."""

    name: str
    reason: str | None = None
    details: str = ""

    @property
    def usable(self) -> bool:
        return self.reason is None

    def __bool__(self) -> bool:
        return self.usable

    def __str__(self) -> str:
        return f"off: {self.reason}" if self.reason else f"usable{': ' + self.details if self.details else ''}"


def backends() -> dict[str, BackendStatus]:
    """Return the status of every backend, with the reason if it is off on this machine.

    - "triton" serves NVIDIA GPUs from compute capability 8.0 on. It needs a PyTorch with Triton.
    - "cpu" serves CPUs by the compiled C++ core, which `pip install .` builds.
    - "reference" is plain PyTorch, slow, on any device; `use_backend("reference")` chooses it.

    The first two serve float32, float64, bfloat16 and float16.

    >>> import blocksparse as bs
    >>> list(bs.backends())
    ['triton', 'cpu', 'reference']
    >>> bs.backends()["reference"].usable
    True
    """
    no_gpu, no_core = gpu_runtime.unavailable(), cpu_core.unavailable()
    return {
        "triton": BackendStatus("triton", no_gpu, "" if no_gpu else gpu_runtime.details()),
        "cpu": BackendStatus("cpu", no_core, "" if no_core else f"instruction set {cpu_core.isa()}"),
        "reference": BackendStatus("reference", details="plain PyTorch on any device, the definition; slow"),
    }


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every call of the process on the backend `name` inside the `with`; refuse calls that it cannot serve.

    Raises:
        BlockSparseError: there is no such backend, or it is not usable on this machine.

    >>> import torch, blocksparse as bs
    >>> layout = bs.patterns.dense((4, 4), block_size=2)
    >>> with bs.use_backend("reference"):
    ...     bs.linear(torch.ones(1, 4), torch.ones(layout.values_shape), layout)
    tensor([[4., 4., 4., 4.]])
    """
    known = backends()
    if not isinstance(name, str) or name not in known:
        raise BlockSparseError.expected("backend", f"one of {', '.join(known)}", repr(name))
    if not known[name]:
        raise BlockSparseError.expected("backend", "a usable one", f"{name!r}, which is off here: {known[name].reason}")
    key = object()
    _forced[key] = name
    try:
        yield
    finally:
        del _forced[key]


def is_forced() -> bool:
    """Return whether `use_backend` is active."""
    return len(_forced) > 0  # torch.compile would not guard the dict's truth


class Op:
    """An operation and its backends.

    Args:
        name: the operation's name.
        backends: the modules that serve it, named "triton", "cpu" and "reference".
        fallback: the module that serves devices and dtypes that no other backend serves; without one, such calls raise
            BlockSparseError.
    """

    def __init__(self, name: str, *backends: ModuleType, fallback: ModuleType | None = None) -> None:
        self.name = name
        self.backends: dict[str, Any] = {module.__name__.rpartition(".")[2]: module for module in backends}
        self._fallback = fallback

    def on(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the backend for tensors of this device and dtype."""
        forced = [*_forced.values()] if _forced else None  # a copy, because other threads change the dict
        name = forced[-1] if forced else _BACKEND_OF_DEVICE.get(device.type)
        backend = self.backends.get(name or "")
        reason = f"there is no {name or device.type} backend of it yet"
        if backend is not None:
            reason = backend.unsupported_reason(device, dtype)
            if reason is None:
                return backend
            reason = f"the {name} backend refuses: {reason}"
        if self._fallback is not None:
            return self._fallback
        got = f"{dtype} on {device}: {reason}"
        if dtype != torch.bool and not (dtype.is_floating_point and dtype.itemsize == 1):  # PyTorch cannot either
            got += (
                '. The plain PyTorch definition runs anywhere, slowly: `with blocksparse.use_backend("reference"): ...`'
            )
        raise BlockSparseError.expected(self.name, "a dtype and a device that its backend serves", got, Page.BACKENDS)


# -- the way of a call -------------------------------------------------------------------------------------------

Tensors = Sequence[Tensor | None]
Options = Sequence[Any]
"""The arguments of an op that are not tensors."""


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd will record operations on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


_PLAIN = (Tensor, torch.nn.Parameter)


def can_bypass_dispatcher(*tensors: Any, plain_call: bool = False) -> bool:
    """Return whether a call on these tensors may read their memory directly, without PyTorch's dispatcher.

    That holds for dense tensors, while no compiler, tracer, mode, transform or forward-mode differentiation is active:
    only autograd needs to see the call then.

    PyTorch's dispatch of an op written in Python takes 6 microseconds, longer than a small product.

    Args:
        tensors: the tensors of the call; None stands for one that is not there.
        plain_call: require also that neither autocast, a profiler nor `use_backend` changes how the call runs.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    if plain_call and (_forced or torch._C._is_any_autocast_enabled() or torch.autograd._profiler_enabled()):
        return False
    for tensor in tensors:
        # Lazily negated tensors, and zeros without memory, get their numbers in PyTorch's dispatcher only.
        if tensor is not None and (
            type(tensor) not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.is_meta
            or tensor.is_neg()
            or tensor.is_nested
            or tensor._is_zerotensor()
        ):
            return False
    return torch._C._len_torch_dispatch_stack() == 0 and not in_transform() and torch._C._get_tracing_state() is None


def in_transform() -> bool:
    """Return whether a transform of `torch.func` watches, which needs PyTorch's own operations."""
    return torch._C._functorch.maybe_current_level() is not None


# torch.compile takes the answer as a constant: transforms within a graph are known when it is traced.
in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def can_call_core(*tensors: Tensor | None) -> bool:
    """Return whether the compiled core may read these tensors, for functions that PyTorch's operations compute too."""
    forced = [*_forced.values()] if _forced else ["cpu"]
    return (
        forced[-1] == "cpu"
        and can_bypass_dispatcher(*tensors)
        and not torch._C._is_any_autocast_enabled()
        and all(tensor is None or tensor.device.type == "cpu" for tensor in tensors)
        and cpu_core.unavailable() is None
    )


def can_call_directly(layout: AnyLayout, *tensors: Tensor | None) -> TypeGuard[BlockLayout]:
    """Return whether a call may be one of `LayoutOp.direct`; a profiler sees only calls of PyTorch's op."""
    direct = isinstance(layout, BlockLayout) and can_bypass_dispatcher(*tensors)
    return direct and not torch.autograd._profiler_enabled()


class Geometry(NamedTuple):
    """The block of an op's layout, and the shapes of the op's tensors and of its result."""

    block: tuple[int, int]
    shapes: list[tuple[int, ...]]
    result: tuple[int, ...]


def features_of(grid: tuple[int, int], block: tuple[int, int], transpose: bool = False) -> tuple[int, int]:
    """Return (out, in) of a product with a weight of this grid and block, or with the transposed weight."""
    out, in_ = grid[0] * block[0], grid[1] * block[1]
    return (in_, out) if transpose else (out, in_)


def image_block(x: Tensor, values: Tensor, size: Sequence[Any], activation: Any) -> tuple[int, int]:
    """Return the block of a convolution, after a check of the number of axes."""
    axes = len(size)
    if axes < 1 or x.dim() != axes + 2 or values.dim() != axes + 3 or activation not in ACTIVATIONS:
        got = f"{list(x.shape)}, {list(values.shape)}, {list(size)}, {activation!r}"
        expected = "[n, *space, channels], [nnz, block_out, block_in, *kernel], a size of each axis, one of "
        raise BlockSparseError.expected("x, values, size, activation", f"{expected}{list(ACTIVATIONS)}", got)
    return values.shape[1], values.shape[2]


def matrix_block(x: Tensor, values: Tensor, activation: Any) -> tuple[int, int]:
    """Return the block of a linear product, after a check of the number of axes."""
    if x.dim() != 2 or values.dim() != 3 or activation not in ACTIVATIONS:
        expected = f"2-D, 3-D, one of {list(ACTIVATIONS)}"
        got = f"{x.dim()}-D, {values.dim()}-D, {activation!r}"
        raise BlockSparseError.expected("x, values, activation", expected, got)
    return values.shape[1], values.shape[2]


class LayoutOp(Op):
    """An operation on tensors and a layout, and the PyTorch op of the same name.

    A subclass defines shapes, computation and gradients once; they make PyTorch's schema, meta kernel, autograd and
    vmap. PyTorch's op takes the layout as its index tensors, `indices`: crow and col, so that compiled and exported
    graphs are self-contained. The gradients are calls of such operations again, so they can be differentiated any
    number of times.

    Args:
        name: the name of the operation, of its function in the backends, and of the op in `torch.ops.blocksparse`.
        tensors, options: the parts of the schema before and behind `Tensor[] indices, SymInt in_blocks`. One of the
            tensors is `x`; the backend is chosen by its device and dtype. If `x` is first, its axes but the last are
            rows. A `bias` is the last.
        backends, fallback: as in `Op`.
    """

    torch_op: Any
    dtypes: Mapping[str, torch.dtype] = {}  # of tensors, by name, whose dtype is not that of x

    def __init__(
        self, name: str, tensors: str, options: str, *backends: ModuleType, fallback: ModuleType | None = None
    ) -> None:
        super().__init__(name, *backends, fallback=fallback)
        self.tensor_names = [argument.split()[-1] for argument in tensors.split(",")]
        schema = f"{name}({tensors}, Tensor[] indices, SymInt in_blocks{', ' if options else ''}{options}) -> Tensor"
        self.torch_op = define_op(schema, self._run, self._meta, rows=self.tensor_names[0] == "x")
        LIBRARY.impl(name, self._autograd, "Autograd", with_keyset=True)

    # Subclasses define these; `tensors` are the op's tensors, `options` the rest of its arguments.

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Options) -> Geometry:
        """Check the number of axes of each tensor, and return the block, the tensors' shapes and the result's."""
        raise NotImplementedError

    def compute(self, tensors: Any, layout: BlockLayout, options: Options) -> Tensor:
        """Return the backend's result."""
        x = tensors[self.tensor_names.index("x")]
        result: Tensor = getattr(self.on(x.device, x.dtype), self.name)(*tensors, layout, *options)
        return result

    def tensors_to_save(self, tensors: Any, output: Tensor, options: Options) -> Tensors:
        """Return the tensors that `backward` needs.

        These are the op's tensors; for a product with a bias, x, values, and what the activation's gradient needs.
        """
        if self.tensor_names[-1] != "bias":
            return tensors  # type: ignore[no-any-return]
        (x, values, bias), activation = tensors, options[-1]
        return x, values, None if activation in (None, "relu") else bias, output if activation == "relu" else None

    def backward(
        self, grad: Tensor, saved: Any, layout: AnyLayout, options: Options, needed: Sequence[bool]
    ) -> Tensors:
        """Return the needed gradients of the op's tensors, computed by operations that can be differentiated."""
        raise BlockSparseError.expected(self.name, "tensors without gradients", "requires_grad")

    def indices(self, layout: BlockLayout, tensors: Any, options: Options) -> Sequence[Tensor]:
        """Return the index tensors that stand for the layout in a graph with this call."""
        return index_tensors(layout, tensors[0].device)

    # Ways of a call: `direct` for eager calls, PyTorch's op (`_autograd`, then `_run` or `_meta`) for all others.

    def __call__(self, tensors: Tensors, layout: AnyLayout, options: Options = ()) -> Tensor:
        """Return the result for checked tensors. Bypasses PyTorch's dispatcher, except for a profiler to see the op."""
        if can_call_directly(layout, *tensors):
            return self.direct(tensors, layout, options)
        if isinstance(layout, BlockLayout):
            refuse_onnx(self.name)
            layout = GraphLayout(self.indices(layout, tensors, options), layout.grid[1])
        result: Tensor = self.torch_op(*tensors, layout.indices, layout.in_blocks, *options)
        return result

    def direct(self, tensors: Tensors, layout: BlockLayout, options: Options = ()) -> Tensor:
        """Return the backend's result, recorded by autograd if a tensor needs a gradient."""
        if needs_grad(*tensors):
            return _apply_node(self, None, layout, options, *tensors)
        return self.compute(tensors, layout, options)

    def _run(self, *arguments: Any) -> Tensor:
        """Compute the op from the arguments of PyTorch's op."""
        tensors, (indices, in_blocks), options = self._split(arguments)
        grid, x = grid_from(indices, in_blocks), tensors[self.tensor_names.index("x")]
        block, shapes, _ = self.geometry(tensors, indices[1].shape[0], grid, options)
        layout = layout_from(indices, grid, block)
        named = zip(self.tensor_names, zip(tensors, shapes, strict=True), strict=True)
        check_tensors(x.dtype, x.device, self.dtypes, **dict(named))
        return self.compute(tensors, layout, options).contiguous()  # compilers expect the strides of `_meta`

    def _meta(self, *arguments: Any) -> Tensor:
        """Return an empty tensor of the result's shape."""
        tensors, (indices, in_blocks), options = self._split(arguments)
        grid = grid_from(indices, in_blocks)
        *_, shape = self.geometry(tensors, indices[1].shape[0], grid, options)
        named = dict(zip(self.tensor_names, tensors, strict=True))
        check_devices(indices, **{"x": named.pop("x"), **named})
        result: Tensor = tensors[0].new_empty(*shape)
        return result

    def _autograd(self, keys: Any, *arguments: Any) -> Tensor:
        """Return the op's result; record it for autograd if a tensor needs a gradient."""
        tensors, (indices, in_blocks), options = self._split(arguments)
        # The checks of the public functions see tangents outside of transforms, or those of the innermost one.
        check_tangents(**dict(zip(self.tensor_names, tensors, strict=True)))
        if needs_grad(*tensors):
            apply = _apply_node if torch._C._functorch.maybe_current_level() is None else _apply_inner_node
            return apply(self, keys, in_blocks, options, *tensors, *indices)
        return self.below_autograd(keys, arguments)

    def below_autograd(self, keys: Any, arguments: Sequence[Any]) -> Tensor:
        """Return the result of PyTorch's op from below autograd: compilers, fake tensors, or `_run`."""
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = self.torch_op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)
        return result

    def _split(self, arguments: Sequence[Any]) -> tuple[Any, GraphLayout, Options]:
        """Return tensors, layout and options from the arguments of PyTorch's op."""
        count = len(self.tensor_names)
        return arguments[:count], GraphLayout(*arguments[count : count + 2]), arguments[count + 2 :]


class _Node(torch.autograd.Function):
    """The autograd node of every `LayoutOp`, on either way of a call.

    `torch.library.register_autograd` flattens and rebuilds all arguments of an op that takes a list of tensors, on
    every way in and out; that takes longer than the products of a small layer. Here each index tensor is an argument.
    """

    @staticmethod
    def forward(ctx: Any, op: LayoutOp, keys: Any, layout: Any, options: Options, *arguments: Any) -> Tensor:
        tensors, indices = arguments[: len(op.tensor_names)], arguments[len(op.tensor_names) :]
        if keys is None:
            output = op.compute(tensors, layout, options)
        else:  # `layout` is its number of block columns only
            # Without gradients at this level, but with those of the transforms outside of it.
            outside = torch._C._functorch.maybe_current_level() is not None
            with torch.set_grad_enabled(outside), forward_ad._set_fwd_grad_enabled(outside):
                output = op.below_autograd(keys, (*tensors, indices, layout, *options))
        saved = op.tensors_to_save(tensors, output, options)
        ctx.op, ctx.layout, ctx.options, ctx.count = op, layout, options, len(saved)
        ctx.save_for_backward(*saved, *indices)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, layout, stored = ctx.op, ctx.layout, ctx.saved_tensors
        saved, indices = stored[: ctx.count], stored[ctx.count :]
        if indices:
            layout = GraphLayout(indices, layout)
        needed = ctx.needs_input_grad[4 : 4 + len(op.tensor_names)]
        grads = call_per_batched_grad(lambda grad: op.backward(grad, saved, layout, ctx.options, needed), grad)
        return None, None, None, None, *grads, *[None] * len(indices)


_apply_node: Callable[..., Tensor] = _Node.apply


class _InnerNode(torch.autograd.function._SingleLevelFunction):
    """The autograd node for one level of `torch.func.grad`, on tensors of that level.

    PyTorch would apply a Function before its transforms; here the transforms have taken the op already.
    """

    forward, backward = staticmethod(_Node.forward), staticmethod(_Node.backward)


@enable_single_level_autograd_function()
def _apply_inner_node(*arguments: Any) -> Tensor:
    result: Tensor = _InnerNode.apply(*arguments)  # type: ignore[attr-defined]
    return result
