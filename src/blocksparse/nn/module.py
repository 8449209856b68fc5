"""The base of all block-sparse modules: a layout, its values as a plain parameter, and both in the state dict."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from .. import patterns
from ..checked import check_kept, is_int
from ..convert import block_coordinates, to_dense
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout, layout_of_indices
from ..ops.operands import OperandLayout, make_operands
from ..pages import Page
from .dense_weight import DenseWeight, not_assigned
from .parametrized import Parametrizations
from .part import Part

OTHERS = (
    "others, written to this buffer: by DistributedDataParallel, where the layouts of the ranks differ (draw them with "
    "one seed, or load one state first); by a running mean of a model whose layout has changed (take the mean along by "
    "blocksparse.sparsity.sync_ema); or by hand. The values may be mixed up: load values and indices again"
)


class BlockSparseModule(nn.Module):
    """A module whose weight is `values` on `layout`.

    The state dict holds `values` and the layout's `crow_indices` and `col_indices` (plain tensors, so that
    safetensors takes it). Loading one with another pattern of the same shape changes the module's layout to it.

    Other indices than the layout's in these buffers, written there by whomever, make the next use of the module raise a
    BlockSparseError: which blocks the values belong to is unknown then.
    """

    _transposed = False  # whether torch.nn has the inputs first
    values: nn.Parameter
    crow_indices: Tensor
    col_indices: Tensor
    # The buffers that were found to hold the layout, and PyTorch's counters of what was written to them until then:
    # comparing these costs half a microsecond. In-place functions count, through `detach()` too, as running means use
    # it, and so does the broadcast with which DistributedDataParallel wraps a model. Its broadcast before each forward
    # pass does not: while several processes train on CPUs the contents are compared in each call. What is written
    # through `.data` or numpy, or by that broadcast on a GPU, is found when the state is saved. Compiled code was
    # checked when it was compiled.
    _written: tuple[Tensor, int, Tensor, int] | None = None
    # Whether the layout, and with it perhaps the number of blocks, has changed since a graph was compiled for it.
    _evolves = _resized = False
    _grid = _block_shape = (0, 0)
    part: Part | None = None
    """Where several processes hold the weight together: which part of it this module is."""

    def __init__(self, layout: BlockLayout, kernel: tuple[int, ...], device: Any, dtype: torch.dtype | None):
        super().__init__()
        self._layout = layout
        self._number = _numbered(self)
        self._used: tuple[Tensor, Tensor] | None = None
        self.values = nn.Parameter(torch.empty(*layout.values_shape, *kernel, device=device, dtype=dtype))
        self.register_buffer("crow_indices", torch.empty(0, device=device))
        self.register_buffer("col_indices", torch.empty(0, device=device))
        self.reset_layout_buffers()

    def reset_layout_buffers(self, device: torch.device | None = None) -> None:
        """Gives the module other buffers, with the indices of its layout, on their device or on another one."""
        with torch.inference_mode(False):
            for name in ("crow_indices", "col_indices"):
                # Copies: tensors that two modules share cannot be saved as safetensors.
                there = device or getattr(self._buffers.get(name), "device", self.values.device)
                self.register_buffer(name, getattr(self._layout, name)().to(there))
        self._trust()

    def _trust(self) -> None:
        crow, col = self.crow_indices, self.col_indices
        self._written = crow, crow._version, col, col._version
        if self._evolves:
            make_operands(self._layout, crow, col)
            if self._resized:
                for tensor in (col, self.values):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)

    @property
    def layout(self) -> BlockLayout:
        """The blocks of the weight that `values` holds.

        Raises:
            BlockSparseError: other indices were written to the module's buffers.
        """
        if is_dynamo_compiling():
            if _others_traced(self._number):
                self._check_buffers()
            if self._evolves and not is_exporting():
                crow, col = self.crow_indices, self.col_indices
                return OperandLayout(crow, col, self._grid, self._block_shape)
            return self._layout
        mine = self.__dict__  # the way through Module is slow
        written, buffers = mine.get("_written"), mine["_buffers"]
        if (
            written is None
            or buffers.get("crow_indices") is not written[0]
            or buffers.get("col_indices") is not written[2]
            or written[0]._version != written[1]
            or written[2]._version != written[3]
            or (_several_processes() and written[0].device.type == "cpu")
        ):
            self._check_buffers()
        return self._layout

    def _become_operand(self, layout: BlockLayout) -> None:
        """Has graphs that are compiled from now on take the layout as an operand, as it has changed under one."""
        self._evolves, self._grid, self._block_shape = True, layout.grid, layout.block_shape
        if layout.nnz != self._layout.nnz:
            # PyTorch takes the sizes of parameters as constants otherwise, even those marked as dynamic.
            torch._dynamo.config.force_parameter_static_shapes = False
            self._resized = True

    def _check_buffers(self) -> None:
        """Raises a BlockSparseError unless the buffers hold the layout, as far as they hold anything."""
        if others := others_in_buffers(self):
            raise BlockSparseError.expected(others, f"those of {self._layout!r}", OTHERS)
        indices = self.crow_indices, self.col_indices
        if all(type(index) is Tensor and not _is_wrapped(index) for index in indices):
            if any(index.is_inference() for index in indices):  # these have no version counters
                self.reset_layout_buffers()
            else:
                self._trust()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = _numbered(self)  # a copy's is its own
        self._written = None  # a copy made in inference mode has buffers without counters

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving devices and `to_empty` make new buffers; casts to floating point must not change the indices.
        _, before = self.layout, self.crow_indices
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.crow_indices is not before and type(self.crow_indices) is Tensor:
            self.reset_layout_buffers()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._check_buffers()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    @property
    def used(self) -> tuple[Tensor, Tensor] | None:
        """Marks which outputs and inputs of the layout are not padding, bool on the CPU; None where all are real."""
        return self._used

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out, in) of the weight, without padding where the module knows it."""
        return self._layout.shape

    @property
    def weight(self) -> Tensor:
        """The dense weight as the module of torch.nn has it, without padding; read-only.

        Its dtype, device and shape cost nothing; each operation that reads the numbers makes them, differentiably. It
        is no parameter, and not in the state dict: trained, saved and written to are the `values`.

        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Conv2d(64, 32, 3, density=0.5)
        >>> layer.weight.shape, layer.weight.dtype
        (torch.Size([32, 64, 3, 3]), torch.float32)
        >>> x = torch.randn(1, 64, 5, 5)
        >>> torch.allclose(torch.nn.functional.conv2d(x, layer.weight, layer.bias), layer(x), atol=1e-5)
        True
        """
        if is_dynamo_compiling():  # which leaves out what is not used
            return self.dense_of(self.values)
        shape = (*self._dense_shape, *self.values.shape[3:])
        if self._transposed:
            shape = (shape[1], shape[0], *shape[2:])
        return DenseWeight.of(lambda: self.dense_of(self.values), shape, self.values, grad=self._dense_grad)

    @weight.setter
    def weight(self, weight: Any) -> None:
        raise not_assigned(weight)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name == "weight":
            raise not_assigned(param)
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Parametrizations() if name == "parametrizations" and not value else value)

    @property
    def _dense_shape(self) -> tuple[int, int]:
        return self.weight_shape

    def dense_of(self, values: Tensor) -> Tensor:
        """Values of the layout, or their gradient, as a dense weight without padding, newly made; differentiable."""
        out, in_ = self.weight_shape
        weight = to_dense(values, self.layout)[:out, :in_]
        return (weight.transpose(0, 1) if self._transposed else weight).contiguous()

    def _dense_grad(self) -> Tensor | None:
        grad = self.values.grad
        return None if grad is None else self.dense_of(grad)

    def set_layout(self, layout: BlockLayout, values: Tensor) -> None:
        """Sets another pattern and its values in place: the parameter stays the same object; its gradient is cleared.

        Args:
            layout: of the same block, of the module's sizes.
            values: `[nnz, block_out, block_in]`, with a convolution's `*kernel` behind. It is not copied.

        Raises:
            BlockSparseError: a layout of another block or of other sizes, values of another shape, dtype or device, or
                that the module computes from other parameters. Nothing is changed then.

        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(4, 2, block_size=2, density=1)
        >>> layer.set_layout(bs.BlockLayout([[False, True]], block_size=2), torch.ones(1, 2, 2))
        >>> layer.layout.nnz, layer.values.shape
        (1, torch.Size([1, 2, 2]))
        """
        check_layout(layout)
        mine = self._parameters.get("values")
        if mine is None:
            computed = "ones computed from others, as torch.nn.utils.prune and weight_norm do: remove these first"
            raise BlockSparseError.expected("values", "a parameter of the module", computed)
        if hasattr(mine, "device_mesh"):
            expected = "a parameter that this process has alone (blocksparse.sparsity.rewire changes others)"
            raise BlockSparseError.expected("values", expected, f"one sharded over {mine.device_mesh}")
        if not isinstance(values, Tensor) or values.layout != torch.strided:
            kind = values.layout if isinstance(values, Tensor) else type(values).__name__
            raise BlockSparseError.expected("values", "a dense tensor", kind)
        if layout.block_shape != self._layout.block_shape:
            raise BlockSparseError.expected("layout", f"blocks of {self._layout.block_shape}", repr(layout))
        check_shape(layout, self.weight_shape)
        shape = [layout.nnz, *mine.shape[1:]]
        if list(values.shape) != shape or values.dtype != mine.dtype or values.device != mine.device:
            got = f"{list(values.shape)}, {values.dtype}, {values.device}"
            raise BlockSparseError.expected("values", f"{shape}, {mine.dtype}, {mine.device}", got)
        replace_data(mine, values.detach())
        self.layout_changed(layout)

    def layout_changed(self, layout: BlockLayout) -> None:
        """Takes over a layout that `values` has already been changed to."""
        if self in _traced:
            self._become_operand(layout)
        if layout.grid != self._layout.grid:
            self._used = _padding_of(layout, self.weight_shape)
        self._layout = layout
        self.reset_layout_buffers()

    def draw_parameters(self, bias: Tensor | None) -> None:
        """Draws values and bias, uniform within 1 / sqrt(fan_in) with the fan-in of each output; the padding is 0.

        The fan-in counts the stored inputs, each with all taps of a kernel.
        """
        bound = self.draw_values(_padding_of(self._layout, self.weight_shape))
        if bias is not None and not bias.is_meta:
            with torch.no_grad():
                bias.uniform_(-1, 1).mul_(bound[: len(bias)])

    def draw_values(self, used: tuple[Tensor, Tensor] | None) -> Tensor:
        """Draws values, uniform within the bound of each output, 1 / sqrt(fan_in); returns the bounds `[out_features]`.

        Args:
            used: the property's new value.
        """
        self.reset_layout_buffers()
        self._used = used
        layout, values = self._layout, self.values
        height, width = layout.block_shape
        if values.is_meta:  # nothing to draw, and PyTorch would spend seconds importing its code for such tensors
            return values.new_empty(layout.shape[0])
        rows, cols = block_coordinates(layout, torch.device("cpu"))
        used_out, used_in = used or (torch.ones(size, dtype=torch.bool, device="cpu") for size in layout.shape)
        inputs = used_in.view(-1, width)
        fan_in = np.bincount(rows, weights=inputs.sum(1)[cols], minlength=layout.grid[0]) * math.prod(values.shape[3:])
        bound = torch.from_numpy(np.where(fan_in > 0, 1 / np.sqrt(np.maximum(fan_in, 1)), 0)).to(values)
        device = bound.device
        with torch.no_grad():
            values.uniform_(-1, 1).mul_(bound[rows.to(device)].reshape(-1, *[1] * (values.dim() - 1)))
            # The padding stays 0, as it gets no gradient.
            for padding, lines in ((~used_out.view(-1, height), rows), (~inputs, cols)):
                partly = padding.any(1)[lines].nonzero().squeeze(1)
                mask = padding[lines[partly]].to(device)
                mask = mask.unsqueeze(1) if lines is cols else mask.unsqueeze(2)
                partly = partly.to(device)
                values[partly] = values[partly].masked_fill(mask.reshape(*mask.shape, *[1] * (values.dim() - 3)), 0)
        return bound.repeat_interleave(height)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        try:
            self._adopt(*(state_dict.get(prefix + name) for name in ("crow_indices", "col_indices", "values")))
        except BlockSparseError as error:
            errors.append(f"{prefix or type(self).__name__}: {error}")
        else:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _adopt(self, crow: Any, col: Any, values: Any) -> None:
        """Takes over the layout of a state dict, after checking that all of it fits: a refusal changes nothing."""
        mine = self._layout
        given = {"crow_indices": crow, "col_indices": col, "values": values}
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                got = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
                raise BlockSparseError.expected(name, "a dense tensor", got)
        if not given:
            return
        if crow is None or col is None:
            expected = "crow_indices and col_indices, which say where the values belong (or load values by hand)"
            raise BlockSparseError.expected("layout", expected, f"only {' and '.join(given)}", Page.LAYOUTS)
        if crow.is_meta and getattr(self._buffers.get("crow_indices"), "is_meta", False):
            return  # nothing is loaded
        layout = layout_of_indices(crow, col, mine.grid, mine.block_shape)
        shape = [layout.nnz, *self.values.shape[1:]]
        if values is None and layout != mine:
            raise BlockSparseError.expected("values", f"{shape} for {layout!r}", values)
        if values is not None:
            if list(values.shape) != shape:
                raise BlockSparseError.expected("values", f"{shape} for {layout!r}", list(values.shape))
            if not values.is_floating_point() and not values.is_complex():
                raise BlockSparseError.expected("values", "real numbers, not those of a layer in 8 bits", values.dtype)
            if values.is_complex() and not self.values.is_complex():
                raise BlockSparseError.expected("values", "real numbers", values.dtype)
            if values.is_meta and not self.values.is_meta:
                raise BlockSparseError.expected("values", "a tensor with numbers", "one on the meta device")
        if layout != mine:
            self.set_layout(layout, self.values.new_empty(shape))
        elif others_in_buffers(self):
            self.reset_layout_buffers(self.values.device)


class Weight(BlockSparseModule):
    """A block-sparse weight without a call of its own: one of several that a module has."""

    def __init__(self, layout: BlockLayout, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__(layout, (), device, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Of the values."""
        return self.values.device

    @property
    def shape(self) -> torch.Size:
        """Of the dense weight, without padding."""
        return torch.Size(self._dense_shape)

    @property
    def _dense_shape(self) -> tuple[int, int]:
        if self._used is None:
            return self._layout.shape
        out, in_ = self._used
        return int(out.sum()), int(in_.sum())

    def dense_of(self, values: Tensor) -> Tensor:
        weight = to_dense(values, self.layout)
        if self._used is None:
            return weight
        out, in_ = (used.to(weight.device) for used in self._used)
        return weight[out][:, in_]

    def extra_repr(self) -> str:
        layout = self._layout
        return f"{layout.shape}, block_size={layout.block_shape}, nnz={layout.nnz}, density={layout.density:.4g}"


def _several_processes() -> bool:
    distributed = torch.distributed
    return _may_be_several and distributed.is_initialized() and distributed.get_world_size() > 1


_may_be_several = torch.distributed.is_available()


def others_in_buffers(module: Any) -> str | None:
    """The name of a buffer that holds other indices than the layout's; meta and fake tensors hold none."""
    layout = module._layout
    for name, expected in (("crow_indices", layout.row_start), ("col_indices", layout.col_of_block)):
        index: Any = module._buffers.get(name)
        if not isinstance(index, Tensor):
            return name
        batched = _is_wrapped(index)
        while _is_wrapped(index):
            index = torch._C._functorch.get_unwrapped(index)
        if type(index) is not Tensor or index.is_meta:
            continue
        if index.is_quantized or index.layout != torch.strided:
            return name
        with torch._C._DisableTorchDispatch():  # also inside of tracing or fake modes
            held = index.cpu().numpy()
        if (held.shape[-1:] if batched else held.shape) != expected.shape or not (held == expected).all():
            return name
    return None


# Modules that graphs were compiled for.
_traced: weakref.WeakSet[BlockSparseModule] = weakref.WeakSet()
# Every module by its number: before PyTorch 2.13 functions that run while a graph is traced take no modules.
_by_number: weakref.WeakValueDictionary[int, BlockSparseModule] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _numbered(module: BlockSparseModule) -> int:
    number = next(_numbers)
    _by_number[number] = module
    return number


def _others_traced(number: int) -> str | None:
    """`others_in_buffers` of the module of this number, while a graph is compiled, which is noted."""
    module = _by_number[number]
    _traced.add(module)
    others = others_in_buffers(module)
    if module._evolves and others is None:
        module._check_buffers()  # whose operands are not known yet where it is a copy
    return others


# What torch.compiler.assume_constant_result sets, for which it would load the whole compiler.
others_in_buffers._dynamo_marked_constant = _others_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_wrapped(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """Gives a parameter data of any shape and clears its gradient; a backward pass that needs the old data raises."""
    parameter.grad = None
    if not parameter.is_inference():
        increment_version(parameter)
    if data.shape != parameter.shape:
        # A graph that is still held, that of the last loss say, has a node for the gradient in the old shape. PyTorch
        # makes a new one only where the dtype changes.
        other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
        parameter.data = data.new_empty(0, dtype=other)
        _watch_optimizers()
        _resized[parameter] = True
    parameter.data = data


# Parameters whose shape has changed since an optimizer last stepped on them.
_resized: Any = WeakIdKeyDictionary()


@cache
def _watch_optimizers() -> None:
    """Has every optimizer compare what it keeps for a resized parameter: fused ones would write past its end."""
    register_optimizer_step_pre_hook(_refuse_stale_state)


def _refuse_stale_state(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups if _resized else ():
        for parameter in group["params"]:
            if parameter not in _resized:
                continue
            check_kept(optimizer.state.get(parameter, {}), parameter, "its parameter")
            del _resized[parameter]


def layout_for(
    shape: tuple[int, int],
    layout: BlockLayout | None,
    density: float | None,
    block_size: int | tuple[int, int],
    what: str = "features",
) -> BlockLayout:
    """Returns the layout of a module of `shape` (out, in), padded to whole blocks: the one given, or a random one.

    Without a density every block is stored. The random pattern is drawn with PyTorch's generator as the seed.
    """
    for name, size in zip((f"out_{what}", f"in_{what}"), shape, strict=True):
        if not is_int(size) or size <= 0:
            raise BlockSparseError.expected(name, "a positive int", repr(size))
    if layout is not None:
        check_layout(layout)
        if density is not None:
            raise BlockSparseError.expected("density", "None where a layout is given", density)
        check_shape(layout, shape, f" {what}")
        return layout
    probe = BlockLayout([[True]], block_size)  # checks the block size
    padded = _padded(shape, probe.block_shape)
    if density is None:
        return patterns.dense(padded, probe.block_shape)
    seed = int(torch.randint(2**31, (), device="cpu"))
    return patterns.random(padded, probe.block_shape, density=density, seed=seed)


def check_shape(layout: BlockLayout, shape: tuple[int, int], what: str = "") -> None:
    """Raises a BlockSparseError unless the layout is that of a weight of `shape` (out, in), padded to whole blocks."""
    padded = _padded(shape, layout.block_shape)
    if layout.shape != padded:
        raise BlockSparseError.expected("layout", f"shape {padded} for {shape}{what}", repr(layout), Page.LAYOUTS)


def _padding_of(layout: BlockLayout, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """Which outputs and inputs of the layout are within `shape`: bool on the CPU; None where all are."""
    if layout.shape == shape:
        return None
    out, in_ = (torch.arange(padded, device="cpu") < size for padded, size in zip(layout.shape, shape, strict=True))
    return out, in_


def _padded(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]) * block[0], math.ceil(shape[1] / block[1]) * block[1]
