"""Shared code of all recurrences over whole sequences: autograd, states along the time steps, products.

A recurrence is one autograd node, so each weight gets its gradient in one product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import patterns
from ...layout import BlockLayout
from .. import cpu_core, workspace
from ..checks import in_autocast
from ..linear import LINEAR, linear
from ..lstm_gates import LSTM_GATES
from ..registry import can_bypass_dispatcher
from ..torch_op import call_per_batched_grad
from .fused_gates import FusedGates, fused_gates_for
from .graph import in_graph
from .recurrence import Recurrence, Steps, Tensors, Times


def scan(recurrence: Recurrence, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return the outputs of a recurrence, differentiable any number of times.

    Transforms, modes and meta tensors see the operations of its definition. Graphs have one op for all steps, unless
    all weights are dense.
    """
    if isinstance(recurrence.steps, Times):
        return in_graph(recurrence, tensors)
    if not can_bypass_dispatcher(*tensors):
        return recurrence.definition(*tensors)
    resolved = [_resolved(tensor) for tensor in tensors]
    if not torch.is_grad_enabled():
        return recurrence.forward(*resolved, keep=False)[0]
    recorded: Callable[..., tuple[Tensor, ...]] = _Scan.apply
    return recorded(recurrence, *resolved)


def _resolved(tensor: Tensor | None) -> Tensor | None:
    """Resolve a lazy negation, and make vectors contiguous."""
    if tensor is None:
        return None
    tensor = tensor.resolve_neg()
    return tensor.contiguous() if tensor.dim() == 1 else tensor


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        keep = any(tensor is not None and tensor.requires_grad for tensor in tensors)
        outputs, saved = recurrence.forward(*tensors, keep=keep)
        ctx.recurrence, ctx.count = recurrence, len(tensors)
        ctx.save_for_backward(*tensors, *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensors:
        stored, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]  # read once, as activation checkpointing requires
        tensors, saved = stored[: ctx.count], stored[ctx.count :]

        def backward(*grads: Tensor) -> Any:
            if torch.is_grad_enabled() or not can_bypass_dispatcher(*grads):
                return _differentiable(ctx.recurrence, tensors, grads, needed)
            # Gradients may have any strides, but the gates need the features of a row to be contiguous.
            contiguous = tuple(grad.resolve_neg().contiguous() for grad in grads)
            return ctx.recurrence.backward(tensors, saved, contiguous, needed)

        return None, *call_per_batched_grad(backward, *grads)


def _differentiable(
    recurrence: Recurrence, tensors: Tensors, grads: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Return the gradients of the definition, which autograd can differentiate again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        outputs = recurrence.definition(*tensors)
    inputs = [tensor for tensor, need in zip(tensors, needed, strict=True) if tensor is not None and need]
    results = iter(torch.autograd.grad(outputs, inputs, grads, create_graph=create_graph, allow_unused=True))
    return [next(results) if need else None for need in needed]


# -- states and rows --------------------------------------------------------------------------------------------------


class StateTrajectory:
    """A state along the time steps: `before[t]` is the state before step t, `after[t]` the state behind it.

    Sequences begin with `initial` and end with `final`, `[batch, features]`. A step writes `after[t]`, then calls
    `advance(t)`, unless the steps are aligned: then `after` of a step and `before` of the next one share memory.
    """

    def __init__(self, steps: Steps, initial: Tensor) -> None:
        self.steps = steps
        rows, batch, features = steps.rows, *initial.shape
        if len(steps.sizes) == 1:
            self.all_before = initial.contiguous()
            self.all_after = self.final = empty(rows, features, initial)
        elif steps.aligned:
            memory = empty(rows + batch, features, initial)
            first, last = memory[:rows], memory[batch:]
            self.all_before, self.all_after = (last, first) if steps.reverse else (first, last)
            (memory[rows:] if steps.reverse else memory[:batch])[:] = initial
            self.final = memory[:batch] if steps.reverse else memory[rows:]
        else:
            self.all_before, self.all_after = (empty(rows, features, initial) for _ in range(2))
            self.final = initial.clone(memory_format=torch.contiguous_format)
            size = steps.sizes[steps.order[0]]
            self.all_before[steps.start[steps.order[0]] :][:size] = initial[:size]

    @cached_property
    def before(self) -> Sequence[Tensor]:
        return torch.split(self.all_before, list(self.steps.sizes))

    @cached_property
    def after(self) -> Sequence[Tensor]:
        return torch.split(self.all_after, list(self.steps.sizes))

    def advance(self, t: int) -> None:
        """Copy the state behind step t to the next step, for sequences of several lengths."""
        size = self.steps.sizes[t]
        # Sequences that have ended keep their final state; those that have not begun, their initial state.
        self.final[:size] = self.after[t]
        following = t - 1 if self.steps.reverse else t + 1
        if 0 <= following < len(self.steps.sizes):
            self.before[following].copy_(self.final[: self.steps.sizes[following]])


class StateGradient:
    """The gradient at a state `[batch, features]`, as the steps run backward; it begins with `final`."""

    def __init__(self, steps: Steps, final: Tensor) -> None:
        self._aligned = steps.aligned
        self._sizes = steps.sizes
        self._grad = final.contiguous() if steps.aligned else final.clone()

    def at(self, t: int) -> Tensor:
        """Return the gradient at the state behind step t."""
        return self._grad if self._aligned else self._grad[: self._sizes[t]]

    def set(self, t: int, grad: Tensor) -> None:
        """Set the gradient at the state before step t."""
        if self._aligned:
            self._grad = grad
        else:
            self._grad[: self._sizes[t]] = grad

    @property
    def initial(self) -> Tensor:
        """`[batch, features]`, the gradient at the initial state."""
        return self._grad


class StepInputs:
    """The inputs of each step: rows of data `[rows, features]`, or of a table `[n, features]` by an index `[rows]`."""

    def __init__(self, steps: Steps, data: Tensor, index: Tensor | None) -> None:
        self._data = data
        self._cut = (data if index is None else index).split(steps.sizes)
        self._indexed = index is not None

    def __getitem__(self, t: int) -> Tensor:
        return self._data.index_select(0, self._cut[t]) if self._indexed else self._cut[t]

    def at(self, t: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows of step t as data and an index into it, or None for all of it."""
        return (self._data, self._cut[t]) if self._indexed else (self._cut[t], None)


def gather_rows(data: Tensor, index: Tensor | None) -> Tensor:
    """Return the rows of data in the index, differentiable; all rows without an index."""
    return data if index is None else data.index_select(0, index)


def scatter_add_rows(grad: Tensor, data: Tensor, index: Tensor | None) -> Tensor:
    """Return the gradient of data `[n, ...]` from that of `gather_rows`."""
    if index is None:
        return grad
    # Unlike index_add, this op has a fixed order of sums and runs in parallel.
    summed: Tensor = torch.ops.aten.embedding_dense_backward(grad, index, len(data), -1, False)
    return summed


def empty(rows: int, features: int, like: Tensor) -> Tensor:
    """Return an empty `[rows, features]` with dtype and device of another tensor; large buffers are reused."""
    small = rows * features * like.element_size() < workspace.MIN_BYTES
    return like.new_empty(rows, features) if small else workspace.empty((rows, features), like.dtype, like.device)


# -- products ------------------------------------------------------------------------------------------------------


# dgrad by the rows of a dense weight adds to the whole output for each row. From COPY_FEATURES features on, the output
# exceeds the L1 cache, and products with a transposed copy take half the time. The copy costs as much as the products
# of COPY_TOKENS tokens.
COPY_FEATURES, COPY_TOKENS = 1024, 128
# At this number of tokens a BLAS has reached its full speed.
BLAS_TOKENS = 256


class WeightProduct:
    """Products with one weight, without autograd: x W^T and grad W per step, and the weight's gradient of all steps.

    The weight is `[nnz, block_out, block_in]` with a layout, `[out, in]` without one; each x has about `tokens` rows.
    """

    def __init__(self, weight: Tensor, layout: BlockLayout | None, tokens: int) -> None:
        self.shape = weight.shape
        self.layout = as_blocks(weight, tokens) if layout is None else layout
        self.weight = weight.contiguous()
        copies = layout is None and self.layout is not None and weight.shape[1] >= COPY_FEATURES
        self._transposed_layout = _rows_of(*weight.T.shape) if copies else None
        self._transposed: Tensor | None = None
        self._seen = 0
        if self.layout is not None:
            self.weight = self.weight.view(self.layout.values_shape)
            backend = LINEAR.on(weight.device, weight.dtype)
            self._linear: Callable[..., Tensor] = backend.linear
            self._linear_wgrad: Callable[..., Tensor] = backend.linear_wgrad
            self._on_cpu = backend is LINEAR.backends["cpu"]
        fused = self.layout is None or not self._on_cpu
        self.fused_gates: FusedGates | None = fused_gates_for(self.weight, self.layout) if fused else None

    @property
    def core_weight(self) -> tuple[Tensor, BlockLayout] | None:
        """The weight and its layout, or None if the compiled core cannot run all steps in one call."""
        # Layouts of 1x1 blocks have other kernels, and a transposed copy is faster for the backward pass. If the core
        # serves one op, it serves all.
        if self.layout is None or self.layout.block_shape == (1, 1) or self._transposed_layout is not None:
            return None
        return (self.weight, self.layout) if self._on_cpu else None

    def forward(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return x W^T + bias, `[tokens, in] -> [tokens, out]`; writes `out` if given."""
        if self.layout is not None:
            return self._linear(x, self.weight, bias, self.layout, False, None, out)
        if bias is None:
            return torch.mm(x, self.weight.T, out=out)
        return torch.addmm(bias, x, self.weight.T, out=out)

    def backward(
        self, grad: Tensor, x: Tensor, needs_x: bool, needs_bias: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the gradients of x, the weight and the bias."""
        return self.dgrad(grad) if needs_x else None, self.wgrad(grad, x), grad.sum(0) if needs_bias else None

    def dgrad(self, grad: Tensor) -> Tensor:
        """Return grad W, `[tokens, out] -> [tokens, in]`."""
        if self.layout is None:
            return grad @ self.weight
        self._seen += len(grad)
        if self._transposed_layout is not None and self._seen > COPY_TOKENS:
            return self._linear(grad, self._copy(self._transposed_layout), None, self._transposed_layout, False, None)
        return self._linear(grad, self.weight, None, self.layout, True, None)

    def _copy(self, layout: BlockLayout) -> Tensor:
        """Return a copy of the transposed weight, as values of the layout."""
        if self._transposed is None:
            copy = workspace.empty(layout.shape, self.weight.dtype, self.weight.device)
            self._transposed = copy.copy_(self.weight.view(self.shape).T).view(layout.values_shape)
        return self._transposed

    def wgrad(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the weight from grad `[tokens, out]` and x `[tokens, in]`."""
        if self.layout is None:
            return grad.T @ x
        fused = None if self.fused_gates is None else self.fused_gates.wgrad(grad, x)
        return (self._linear_wgrad(grad, x, self.layout) if fused is None else fused).view(self.shape)


def core_weights(products: Sequence[WeightProduct]) -> list[tuple[Tensor, BlockLayout]] | None:
    """Return the weights and their layouts, or None if the compiled core cannot run all steps with these products."""
    weights = [weight for product in products if (weight := product.core_weight) is not None]
    return weights if len(weights) == len(products) else None


def forward_step(product: WeightProduct, inputs: StepInputs, c: Tensor) -> Callable[..., None]:
    """Return `step(t, x, c, *, h_out, c_out, gates_out)`, a step of an LSTM with the gates of x W^T + inputs.

    The argument c of this function is the initial one.
    """
    fused, weight = product.fused_gates, product.weight
    if fused is not None:
        return lambda t, x, c, **out: fused.forward(x, *inputs.at(t), c, **out)
    z = weight.new_empty(c.shape[0], 4 * c.shape[1])  # reused by all steps
    run = LSTM_GATES.on(weight.device, weight.dtype).forward
    return lambda t, x, c, **out: run(product.forward(x, out=z[: len(x)]), inputs[t], None, c, **out)


def linear_of(x: Tensor, weight: Tensor, layout: BlockLayout | None, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, differentiable. The weight is block-sparse if there is a layout, else dense.

    Graphs have PyTorch's product with a dense weight, for any number of tokens.
    """
    if layout is None and can_bypass_dispatcher(x, weight) and not in_autocast(x):
        layout = as_blocks(weight, len(x))
        weight = weight if layout is None else weight.view(layout.values_shape)
    return F.linear(x, weight, bias) if layout is None else linear(x, weight, layout, bias)


def as_blocks(weight: Tensor, tokens: int) -> BlockLayout | None:
    """Return a layout whose values are the memory of a dense weight, with blocks as wide as the weight.

    Return None if PyTorch's dense product is faster. Our kernels beat a BLAS that does not use all of the CPU, but not
    for few tokens, nor in 16 bits, nor for many tokens with AVX2, which the BLAS uses fully.
    """
    if tokens > BLAS_TOKENS and cpu_core.unavailable() is None and cpu_core.isa() == "avx2":
        return None
    if tokens < 8 or weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    return _rows_of(*weight.shape)


@lru_cache(maxsize=64)
def _rows_of(out: int, in_: int) -> BlockLayout | None:
    """Return the dense layout with blocks of 32 whole rows, or None if these do not fit."""
    return None if out % 32 or cpu_core.unavailable() else patterns.dense((out, in_), (32, in_))
