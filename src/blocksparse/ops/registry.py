"""Makes the operations: one `Op` each, of which come the choice of the backend, PyTorch's op, and its gradients.

A backend of an op is a module in the op's folder with the op's products as functions and a function
`refusal(device, dtype) -> str | None`: why it cannot serve such a call, or None when it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ..checked import checked_ints
from ..errors import BlockSparseError, Page
from ..layout import BlockLayout, layout_of_indices
from . import cpu_core
from .checks import check_devices, check_operands, check_tangents, refuse_onnx
from .gpu import runtime as gpu_runtime
from .operands import layout_of_operands

__all__ = ["BackendStatus", "LayoutOp", "Op", "backends", "use_backend"]

_BACKEND_OF_DEVICE = {"cpu": "cpu", "cuda": "triton"}
# For the whole process, since autograd runs backward passes in threads of its own; the last entry applies. Keyed, so
# that each `with` removes its own entry, in whatever order threads exit theirs.
_forced: dict[object, str] = {}


# -- backends ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendStatus:
    """One backend as seen from here: usable, or the reason why not."""

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
    """Every backend, usable or the reason why not.

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
    """Within it, every call of the process is served by the backend `name`, or refused with the reason.

    Raises:
        BlockSparseError: no backend of that name, or one that is off here.

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
    """Whether this is within `use_backend`."""
    return len(_forced) > 0  # whose truth torch.compile would not guard


class Op:
    """An operation and its backends.

    Args:
        name: of the operation.
        backends: the modules that serve it, named "triton", "cpu" and "reference".
        elsewhere: the module among them that serves what no other does; without one such calls are refused.
    """

    def __init__(self, name: str, *backends: ModuleType, elsewhere: ModuleType | None = None) -> None:
        self.name = name
        self.backends = {module.__name__.rpartition(".")[2]: module for module in backends}
        self._elsewhere = elsewhere

    def on(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The backend for tensors of this device and dtype."""
        # A copy of the values, looked at once: other threads change them.
        forced = [*_forced.values()] if _forced else None
        name = forced[-1] if forced else _BACKEND_OF_DEVICE.get(device.type)
        backend: Any = self.backends.get(name or "")
        refusal = f"there is no {name or device.type} backend of it yet"
        if backend is not None:
            refusal = backend.refusal(device, dtype)
            if refusal is None:
                return backend
            refusal = f"the {name} backend refuses: {refusal}"
        if self._elsewhere is not None:
            return self._elsewhere
        raise BlockSparseError.expected(
            self.name,
            "a dtype and a device that its backend serves",
            f"{dtype} on {device}: {refusal}. The plain PyTorch definition runs anywhere, slowly: "
            f'`with blocksparse.use_backend("reference"): ...`',
            Page.INSTALL,
        )


# -- the way of a call -------------------------------------------------------------------------------------------

Tensors = Sequence[Tensor | None]


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will record operations on these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


_PLAIN = (Tensor, torch.nn.Parameter)


def is_eager(*tensors: Tensor | None) -> bool:
    """Whether the numbers can be read: there is no tracer, mode, transform, subclass or lazy negation."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        # Lazily negated tensors, and zeros without memory, get their numbers in PyTorch's dispatcher only.
        if tensor is not None and (
            type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_neg() or tensor._is_zerotensor()
        ):
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_tracing_state() is None
    )


def only_autograd_active(*tensors: Tensor | None) -> bool:
    """Whether nothing but autograd, where it records, needs to see ops on these, which then may skip the dispatcher.

    PyTorch's dispatch of an op written in Python takes 6 microseconds, its autograd of one longer than a small product.
    """
    return is_eager(*tensors) and not torch.autograd._profiler_enabled()


def is_plain(*tensors: Any) -> bool:
    """Whether these are dense tensors or None to which nothing but autograd is to be done: no autocast, no tangent."""
    if not only_autograd_active(*tensors) or torch._C._is_any_autocast_enabled() or forward_ad._current_level >= 0:
        return False
    for tensor in tensors:
        if tensor is not None and (tensor.layout is not torch.strided or tensor.is_nested):
            return False
    return True


def is_bare(*tensors: Any) -> bool:
    """As `is_plain`, and nobody asks for a backend."""
    return not is_forced() and is_plain(*tensors)


class Pattern(NamedTuple):
    """A layout as a graph has it: the index tensors, perhaps with a GPU's schedule behind them, and the columns."""

    indices: Sequence[Tensor]
    in_blocks: int


class Geometry(NamedTuple):
    """The block of an operation's layout, and the shapes of its operands and of its result."""

    block: tuple[int, int]
    operands: list[tuple[int, ...]]
    result: tuple[int, ...]


def features_of(grid: tuple[int, int], block: tuple[int, int], transpose: bool = False) -> tuple[int, int]:
    """(out, in) of a product with a weight of this grid and block, or with the transposed one."""
    out, in_ = grid[0] * block[0], grid[1] * block[1]
    return (in_, out) if transpose else (out, in_)


class LayoutOp(Op):
    """An operation on tensors and a layout, as PyTorch's op too: schema, meta kernel, autograd, vmap of one definition.

    The op takes the layout as its index tensors, `indices`: crow and col, so that a compiled or exported graph is
    self-contained. Its gradients are calls of such operations again, so they can be differentiated as often as one
    likes. Subclasses define what is computed.

    Args:
        name: of the operation, of its function in the backends, and of PyTorch's op in `torch.ops.blocksparse`.
        tensors, options: the schema before and behind `Tensor[] indices, SymInt in_blocks`. One of the tensors is `x`,
            whose device and dtype decide; if it is the first, its axes but the last are rows. A `bias` is the last.
        backends: as for `Op`.
    """

    torch_op: Any

    def __init__(self, name: str, tensors: str, options: str, *backends: ModuleType) -> None:
        super().__init__(name, *backends)
        self.operands = [argument.split()[-1] for argument in tensors.split(",")]
        schema = f"{name}({tensors}, Tensor[] indices, SymInt in_blocks{', ' if options else ''}{options}) -> Tensor"
        LIBRARY.define(schema)
        self.torch_op = getattr(torch.ops.blocksparse, name).default
        LIBRARY.impl(name, self._run, "CompositeExplicitAutograd")
        LIBRARY.impl(name, self._autograd, "Autograd", with_keyset=True)
        torch.library.register_fake(f"blocksparse::{name}", self._meta, lib=LIBRARY)
        rows = self.operands[0] == "x"
        torch.library.register_vmap(self.torch_op, each_entry(self.torch_op, rows), lib=LIBRARY)

    # What subclasses define; `tensors` are the operands, `options` the rest of the schema.

    def geometry(self, tensors: Any, nnz: int, grid: tuple[int, int], options: Sequence[Any]) -> Geometry:
        """Of a layout and the result, after a check that the operands have the axes they should have."""
        raise NotImplementedError

    def compute(self, tensors: Any, layout: BlockLayout, options: Sequence[Any]) -> Tensor:
        """The result, by the backend."""
        x = tensors[0]
        result: Tensor = getattr(self.on(x.device, x.dtype), self.name)(*tensors, layout, *options)
        return result

    def kept(self, tensors: Any, output: Tensor, options: Sequence[Any]) -> Tensors:
        """What `backward` needs: the operands, or x and values with what the gradient of an activation needs."""
        if self.operands[-1] != "bias":
            return tensors  # type: ignore[no-any-return]
        (x, values, bias), activation = tensors, options[-1]
        return x, values, None if activation in (None, "relu") else bias, output if activation == "relu" else None

    def backward(
        self, grad: Tensor, kept: Any, layout: BlockLayout | Pattern, options: Sequence[Any], needed: Sequence[bool]
    ) -> Tensors:
        """The gradients of the operands that are needed, by operations that can be differentiated."""
        raise NotImplementedError

    def indices(self, layout: BlockLayout, tensors: Any, options: Sequence[Any]) -> Sequence[Tensor]:
        """The index tensors that stand for the layout in this call."""
        return indices_of(layout, tensors[0].device)

    # The way of a call.

    def __call__(self, tensors: Tensors, layout: BlockLayout | Pattern, options: Sequence[Any] = ()) -> Tensor:
        """The result for checked operands: directly where only autograd needs to see it, else as PyTorch's op."""
        if isinstance(layout, BlockLayout):
            if only_autograd_active(*tensors):
                return self.direct(tensors, layout, options)
            refuse_onnx(self.name)
            layout = Pattern(self.indices(layout, tensors, options), layout.grid[1])
        result: Tensor = self.torch_op(*tensors, layout.indices, layout.in_blocks, *options)
        return result

    def direct(self, tensors: Tensors, layout: BlockLayout, options: Sequence[Any] = ()) -> Tensor:
        """The result by the backend itself, recorded where autograd is to see it."""
        if needs_grad(*tensors):
            return _recorded(self, None, layout, options, *tensors)
        return self.compute(tensors, layout, options)

    def _run(self, *arguments: Any) -> Tensor:
        tensors, (indices, in_blocks), options = self._split(arguments)
        grid, x = _grid_of(indices, in_blocks), tensors[0]
        block, shapes, _ = self.geometry(tensors, indices[1].shape[0], grid, options)
        layout = _layout_of(indices, grid, block)
        named = zip(self.operands, zip(tensors, shapes, strict=True), strict=True)
        check_operands(x.dtype, x.device, **dict(named))
        return self.compute(tensors, layout, options)

    def _meta(self, *arguments: Any) -> Tensor:
        tensors, (indices, in_blocks), options = self._split(arguments)
        grid = _grid_of(indices, in_blocks)
        *_, shape = self.geometry(tensors, indices[1].shape[0], grid, options)
        named = dict(zip(self.operands, tensors, strict=True))
        check_devices(indices, **{"x": named.pop("x"), **named})
        result: Tensor = tensors[0].new_empty(*shape)
        return result

    def _autograd(self, keys: Any, *arguments: Any) -> Tensor:
        tensors, (indices, in_blocks), options = self._split(arguments)
        # The public functions see those of no transform, or of the innermost one.
        check_tangents(**dict(zip(self.operands, tensors, strict=True)))
        if needs_grad(*tensors):
            recorded = _recorded if torch._C._functorch.maybe_current_level() is None else _recorded_inside
            return recorded(self, keys, in_blocks, options, *tensors, *indices)
        return self.below_autograd(keys, arguments)

    def below_autograd(self, keys: Any, arguments: Sequence[Any]) -> Tensor:
        """Dispatches PyTorch's op to what comes after autograd: compilers, fake tensors, `_run`."""
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = self.torch_op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)
        return result

    def _split(self, arguments: Sequence[Any]) -> tuple[Any, Pattern, Sequence[Any]]:
        count = len(self.operands)
        return arguments[:count], Pattern(*arguments[count : count + 2]), arguments[count + 2 :]


class _Node(torch.autograd.Function):
    """The node of autograd's graph of every `LayoutOp`, on either way of a call.

    `torch.library.register_autograd` takes lists of tensors by flattening and rebuilding all arguments on every way in
    and out, which takes longer than the products of a small layer. Here the indices are arguments of their own.
    """

    @staticmethod
    def forward(ctx: Any, op: LayoutOp, keys: Any, layout: Any, options: Sequence[Any], *operands: Any) -> Tensor:
        tensors, indices = operands[: len(op.operands)], operands[len(op.operands) :]
        if keys is None:
            output = op.compute(tensors, layout, options)
        else:  # `layout` is but its number of columns
            # Without gradients here, but with those of the transforms outside of this one.
            outside = torch._C._functorch.maybe_current_level() is not None
            with torch.set_grad_enabled(outside), forward_ad._set_fwd_grad_enabled(outside):
                output = op.below_autograd(keys, (*tensors, indices, layout, *options))
        kept = op.kept(tensors, output, options)
        ctx.op, ctx.layout, ctx.options, ctx.count = op, layout, options, len(kept)
        ctx.save_for_backward(*kept, *indices)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op, layout, saved = ctx.op, ctx.layout, ctx.saved_tensors
        kept, indices = saved[: ctx.count], saved[ctx.count :]
        if indices:
            layout = Pattern(indices, layout)
        needed = ctx.needs_input_grad[4 : 4 + len(op.operands)]
        found = of_each(lambda grad: op.backward(grad, kept, layout, ctx.options, needed), grad)
        return None, None, None, None, *found, *[None] * len(indices)


def of_each(backward: Callable[..., Tensors], *grads: Tensor) -> Tensors:
    """What a node's `backward` gives for these gradients, or for each of those that `is_grads_batched` batches.

    Its batches are of a kind that knows no other operations than PyTorch's own.
    """
    is_batched = torch._C._functorch.is_legacy_batchedtensor
    if not any(map(is_batched, grads)):
        return backward(*grads)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    size = max(len(torch._remove_batch_dim(grad, level, 1, 0)) for grad in grads)
    none: list[bool] = []

    def tensors(*each: Tensor) -> tuple[Tensor, ...]:
        found = backward(*each)
        none[:] = [tensor is None for tensor in found]
        return tuple(tensor for tensor in found if tensor is not None)

    found = iter(torch.vmap(tensors)(*(torch._remove_batch_dim(grad, level, size, 0) for grad in grads)))
    return [None if nothing else torch._add_batch_dim(next(found), 0, level) for nothing in none]


_recorded: Callable[..., Tensor] = _Node.apply


class _NodeInside(torch.autograd.function._SingleLevelFunction):
    """The node within `torch.func.grad`: of one of its levels, on whose tensors it calls what is below.

    PyTorch would have a Function come as one step before its transforms; here they have taken the operation.
    """

    forward, backward = staticmethod(_Node.forward), staticmethod(_Node.backward)


@enable_single_level_autograd_function()
def _recorded_inside(*arguments: Any) -> Tensor:
    node: Tensor = _NodeInside.apply(*arguments)  # type: ignore[attr-defined]
    return node


LIBRARY = torch.library.Library("blocksparse", "DEF")


def each_entry(op: Any, rows: bool = False) -> Callable[..., tuple[Any, Any]]:
    """The rule by which `torch.vmap` calls an op once for each entry of the batch; gradients pass to the whole.

    One layout serves them all, so that its index tensors have no batch. With `rows` the first axis of the first operand
    and of the result are rows that have nothing to do with each other: where only it has a batch, one call serves all.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        def entry(i: int) -> Callable[[Any, Any], Any]:
            def of(argument: Any, dim: Any) -> Any:
                if isinstance(dim, int):
                    return argument.select(dim, i)
                return [*map(of, argument, dim)] if isinstance(dim, list | tuple) else argument

            return of

        if rows and isinstance(in_dims[0], int) and not any(isinstance(dim, int) for dim in in_dims[1:]):
            x = arguments[0].movedim(in_dims[0], 0)
            # Without the schedule of a graph, which is for the rows of one entry.
            rest = [each[:2] if _is_indices(each) else each for each in arguments[1:]]
            return op(x.flatten(0, 1), *rest).unflatten(0, x.shape[:2]), 0
        outputs = [op(*map(entry(i), arguments, in_dims)) for i in range(info.batch_size)]
        if isinstance(outputs[0], Tensor):
            return torch.stack(outputs), 0
        stacked = [torch.stack(each) for each in zip(*outputs, strict=True)]
        return stacked, [0] * len(stacked)

    return rule


def _is_indices(argument: Any) -> bool:
    return isinstance(argument, list | tuple) and len(argument) > 0 and isinstance(argument[0], Tensor)


# -- layouts of graphs -------------------------------------------------------------------------------------------


def _grid_of(indices: Sequence[Tensor], in_blocks: int) -> tuple[int, int]:
    """Returns (out_blocks, in_blocks) from the sizes of index tensors, which may be traced."""
    # Behind these two comes the schedule of a graph for a GPU.
    vectors = len(indices) >= 2 and indices[0].dim() == indices[1].dim() == 1
    if not vectors or indices[0].shape[0] < 2 or in_blocks < 1:
        got = f"{[list(index.shape) for index in indices]}, {in_blocks}"
        raise BlockSparseError.expected(
            "indices, in_blocks", "crow [out_blocks + 1], col [nnz] of at least one block row, a positive int", got
        )
    return indices[0].shape[0] - 1, in_blocks


def indices_of(layout: BlockLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """The index tensors of a layout on a device, on which a graph that is being traced may meet it first."""
    if torch.compiler.is_dynamo_compiling() and type(layout) is BlockLayout:  # others are made of operands
        _indices_while_tracing(layout, device)
    return layout.indices_on(device)


def _indices_while_tracing(layout: BlockLayout, device: torch.device) -> bool:
    layout.indices_on(device)
    return True


# Dynamo runs it as it is: before PyTorch 2.13 it cannot trace how they are made. See `ops/linear/triton.py`.
torch.utils._pytree.register_constant(BlockLayout)
_indices_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def layout_of(indices: Sequence[Tensor], in_blocks: int, block: tuple[int, int]) -> BlockLayout:
    """The layout that an operation of a graph got as index tensors, a number of columns, and its block."""
    return _layout_of(indices, _grid_of(indices, in_blocks), block)


def _layout_of(indices: Sequence[Tensor], grid: tuple[int, int], block: tuple[int, int]) -> BlockLayout:
    """Returns the layout of these index tensors, or makes one of them (as in a graph loaded from a file)."""
    crow, col = indices[:2]
    known = getattr(col, "_blocksparse_layout", None)
    layout: BlockLayout | None = known() if known is not None else None
    if layout is not None and layout.block_shape == block and layout.grid == grid:
        # Others, such as a copy that was written to, are compared.
        own_crow, own_col = layout.indices_on(col.device)
        if own_crow is crow and own_col is col:
            return layout
    layout = layout_of_operands(crow, col)
    if layout is not None and layout.block_shape == block and layout.grid == grid:
        return layout
    starts, cols = checked_ints("crow_indices", crow), checked_ints("col_indices", col)
    return _layout_from_bytes((starts.tobytes(), starts.dtype), (cols.tobytes(), cols.dtype), grid, block)


@lru_cache(maxsize=64)
def _layout_from_bytes(
    crow: tuple[bytes, Any], col: tuple[bytes, Any], grid: tuple[int, int], block: tuple[int, int]
) -> BlockLayout:
    return layout_of_indices(np.frombuffer(*crow), np.frombuffer(*col), grid, block)
