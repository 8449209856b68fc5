"""The base of block-sparse modules: a layout, its values as a parameter, and both in the state dict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from .. import patterns
from ..checked import integer
from ..convert import block_coordinates, to_dense
from ..errors import BlockSparseError, Page
from ..layout import BlockLayout, check_layout
from ..patterns.random_layouts import random_of_features
from ..state_indices import layout_from_state
from .dense_weight import DenseWeight, not_assigned, refuse_weight
from .layout_module import INDICES_REQUIRED, LayoutModule, name_of_changed_buffer, was_compiled
from .optimizer_watch import mark_resized, mark_state_stale
from .padding import padded_shape
from .tensor_parallel_part import TensorParallelPart


class BlockSparseModule(LayoutModule):
    """A module whose weight is the parameter `values` on `layout`.

    `load_state_dict` with another layout of the same shape changes the module's layout.
    """

    _transposed = False  # whether torch.nn's weight is [in, out]
    values: nn.Parameter
    part: TensorParallelPart | None = None
    """The part of the weight in this module, if several processes hold the weight together."""

    def __init__(self, layout: BlockLayout, kernel: tuple[int, ...], device: Any, dtype: torch.dtype | None):
        super().__init__(layout)
        self._used_rows_and_columns: tuple[Tensor, Tensor] | None = None
        self.values = nn.Parameter(torch.empty(*layout.values_shape, *kernel, device=device, dtype=dtype))
        self.reset_layout_buffers()

    @property
    def used(self) -> tuple[Tensor, Tensor] | None:
        """Two bool tensors on the CPU, True for outputs and inputs that are not padding; None without padding."""
        return self._used_rows_and_columns

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(out, in) of the weight; without padding if the module knows its size."""
        return self._layout.shape

    @property
    def weight(self) -> Tensor:
        """The dense weight in the shape of torch.nn's module, without padding; read-only.

        Its dtype, device and shape cost nothing. Each operation that reads its elements makes them from `values`,
        differentiably. It is neither a parameter nor in the state dict: train, save and write `values`.

        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Conv2d(64, 32, 3, density=0.5)
        >>> layer.weight.shape, layer.weight.dtype
        (torch.Size([32, 64, 3, 3]), torch.float32)
        >>> x = torch.randn(1, 64, 5, 5)
        >>> torch.allclose(torch.nn.functional.conv2d(x, layer.weight, layer.bias), layer(x), atol=1e-5)
        True
        """
        if is_dynamo_compiling():  # the compiler removes it if it is not used
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
        refuse_weight(name, param)
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Parametrizations() if name == "parametrizations" and not value else value)

    @property
    def _dense_shape(self) -> tuple[int, int]:
        """The features (out, in) without padding."""
        return self.weight_shape

    def dense_of(self, values: Tensor) -> Tensor:
        """Return values of the layout, or their gradient, as a new dense weight without padding; differentiable."""
        out, in_ = self.weight_shape
        weight = to_dense(values, self.layout)[:out, :in_]
        return (weight.transpose(0, 1) if self._transposed else weight).contiguous()

    def _dense_grad(self) -> Tensor | None:
        grad = self.values.grad
        return None if grad is None else self.dense_of(grad)

    def set_layout(self, layout: BlockLayout, values: Tensor) -> None:
        """Set another layout and its values in place: the parameter stays the same object; its gradient is cleared.

        Args:
            layout: a layout with the module's size and block.
            values: `[nnz, block_out, block_in]`, or for a convolution `[nnz, block_out, block_in, *kernel]`. The
                tensor is not copied.

        Raises:
            BlockSparseError: the layout has another size or block, the values have another shape, dtype or device, or
                the module computes its values from other parameters. Nothing is changed then.

        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.Linear(4, 2, block_size=2, density=1)
        >>> layer.set_layout(bs.BlockLayout([[False, True]], block_size=2), torch.ones(1, 2, 2))
        >>> layer.layout.nnz, layer.values.shape
        (1, torch.Size([1, 2, 2]))
        """
        self.change_layout(layout, values, state_follows=False)

    def change_layout(self, layout: BlockLayout, values: Tensor, *, state_follows: bool = True) -> None:
        """Set another layout like `set_layout`, for callers that also convert the optimizers' state."""
        check_layout(layout)
        own = self._parameters.get("values")
        if own is None:
            computed = "computed ones, as of torch.nn.utils.prune and weight_norm: remove these first"
            raise BlockSparseError.expected("values", "a parameter of the module", computed)
        if hasattr(own, "device_mesh"):
            expected = "a parameter of this process alone (use blocksparse.sparsity.rewire for sharded ones)"
            raise BlockSparseError.expected("values", expected, f"one sharded over {own.device_mesh}")
        if not isinstance(values, Tensor) or values.layout != torch.strided:
            kind = values.layout if isinstance(values, Tensor) else type(values).__name__
            raise BlockSparseError.expected("values", "a dense tensor", kind)
        if layout.block_shape != self._layout.block_shape:
            raise BlockSparseError.expected("layout", f"blocks of {self._layout.block_shape}", repr(layout))
        check_shape(layout, self.weight_shape)
        shape = [layout.nnz, *own.shape[1:]]
        if list(values.shape) != shape or values.dtype != own.dtype or values.device != own.device:
            got = f"{list(values.shape)}, {values.dtype}, {values.device}"
            raise BlockSparseError.expected("values", f"{shape}, {own.dtype}, {own.device}", got)
        if not state_follows and layout != self._layout:
            mark_state_stale(own)
        replace_data(own, values.detach())
        self.layout_changed(layout)

    def layout_changed(self, layout: BlockLayout) -> None:
        """Set the layout after `values` have been changed to it."""
        if was_compiled(self):
            self._make_layout_dynamic(layout)
        if layout.grid != self._layout.grid:
            self._used_rows_and_columns = _masks_without_padding(layout.shape, self.weight_shape)
        self._layout = layout
        self.reset_layout_buffers()

    def draw_parameters(self, bias: Tensor | None) -> None:
        """Draw values and bias uniformly within 1 / sqrt(fan_in) of each output; the padding is 0.

        fan_in counts the stored inputs, times the taps of a convolution's kernel.
        """
        bound = self.draw_values(_masks_without_padding(self._layout.shape, self.weight_shape))
        if bias is not None and not bias.is_meta:
            with torch.no_grad():
                bias.uniform_(-1, 1).mul_(bound[: len(bias)])

    def draw_values(self, used: tuple[Tensor, Tensor] | None) -> Tensor:
        """Draw values uniformly within 1 / sqrt(fan_in) of each output; return these bounds, `[out_features]`.

        Args:
            used: the new value of the property `used`.
        """
        self.reset_layout_buffers()
        self._used_rows_and_columns = used
        layout, values = self._layout, self.values
        height, width = layout.block_shape
        if values.is_meta:  # drawing meta tensors makes PyTorch import code for seconds
            return values.new_empty(layout.shape[0])
        rows, cols = block_coordinates(layout, torch.device("cpu"))
        used_out, used_in = used or (torch.ones(size, dtype=torch.bool, device="cpu") for size in layout.shape)
        inputs = used_in.view(-1, width)
        fan_in = np.bincount(rows, weights=inputs.sum(1)[cols], minlength=layout.grid[0]) * math.prod(values.shape[3:])
        bound = torch.from_numpy(np.where(fan_in > 0, 1 / np.sqrt(np.maximum(fan_in, 1)), 0)).to(values)
        device = bound.device
        with torch.no_grad():
            values.uniform_(-1, 1).mul_(bound[rows.to(device)].reshape(-1, *[1] * (values.dim() - 1)))
            # Set the padding to 0. It stays 0, because it gets no gradient.
            for padding, lines in ((~used_out.view(-1, height), rows), (~inputs, cols)):
                blocks = padding.any(1)[lines].nonzero().squeeze(1)
                mask = padding[lines[blocks]].to(device)
                mask = mask.unsqueeze(1) if lines is cols else mask.unsqueeze(2)
                blocks = blocks.to(device)
                values[blocks] = values[blocks].masked_fill(mask.reshape(*mask.shape, *[1] * (values.dim() - 3)), 0)
        return bound.repeat_interleave(height)

    def _load_layout(self, loaded: dict[str, Any]) -> None:
        """Take over the layout of a state dict, and check that its values fit; `loaded` has this module's entries."""
        own, (crow, col, values) = self._layout, map(loaded.get, ("crow_indices", "col_indices", "values"))
        if not loaded:
            return
        if crow is None or col is None:
            raise BlockSparseError.expected("layout", INDICES_REQUIRED, f"only {' and '.join(loaded)}", Page.LAYOUTS)
        if crow.is_meta and getattr(self._buffers.get("crow_indices"), "is_meta", False):
            return  # there is no data to load
        self._check_blocks(values)
        layout = layout_from_state(crow, col, own)
        shape = [layout.nnz, *self.values.shape[1:]]
        if values is None and layout != own:
            raise BlockSparseError.expected("values", f"{shape} for {layout!r}", values)
        if values is not None:
            self._check_values(values, shape, layout)
        if layout != own:
            with torch.inference_mode(False):
                self.set_layout(layout, self.values.new_empty(shape))
        elif name_of_changed_buffer(self):
            self.reset_layout_buffers(self.values.device)

    def _check_values(self, values: Tensor, shape: list[int], layout: BlockLayout) -> None:
        """Raise a BlockSparseError unless the values of a state dict can be copied to the module's."""
        if list(values.shape) != shape:
            raise BlockSparseError.expected("values", f"{shape} for {layout!r}", list(values.shape))
        if not values.is_floating_point() and not values.is_complex():
            raise BlockSparseError.expected("values", "real numbers, not those of an int8 layer", values.dtype)
        if values.is_complex() and not self.values.is_complex():
            raise BlockSparseError.expected("values", "real numbers", values.dtype)
        if values.is_meta and not self.values.is_meta:
            raise BlockSparseError.expected("values", "a tensor with data", "one on the meta device")


class Parametrizations(nn.ModuleDict):
    """The parametrizations of a module, where the attribute `values` is the one of that parameter, not dict.values."""

    def __getattribute__(self, name: str) -> Any:
        if name == "values":
            own = self.__dict__["_modules"].get(name)
            if own is not None:
                return own
        return super().__getattribute__(name)

    def __setitem__(self, key: str, module: nn.Module) -> None:
        self._modules[key] = module


class Weight(BlockSparseModule):
    """A block-sparse weight of a module that has several; it has no forward pass of its own."""

    def __init__(self, layout: BlockLayout, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__(layout, (), device, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    @property
    def shape(self) -> torch.Size:
        """The shape of the dense weight, without padding."""
        return torch.Size(self._dense_shape)

    @property
    def _dense_shape(self) -> tuple[int, int]:
        """The features (out, in) without padding."""
        if self._used_rows_and_columns is None:
            return self._layout.shape
        out, in_ = self._used_rows_and_columns
        return int(out.sum()), int(in_.sum())

    def dense_of(self, values: Tensor) -> Tensor:
        """Return the dense weight `[out, in]` that stores `values`, without padded rows and columns."""
        weight = to_dense(values, self.layout)
        if self._used_rows_and_columns is None:
            return weight
        out, in_ = (used.to(weight.device) for used in self._used_rows_and_columns)
        return weight[out][:, in_]

    def extra_repr(self) -> str:
        return f"{self._layout.shape}, {self._layout_repr}"


def check_parameters(layer: nn.Module, name: str = "layer") -> None:
    """Raise a BlockSparseError if the layer's values or bias are computed from other parameters in each call."""
    stored = layer._parameters.keys() | layer._buffers.keys()
    computed = [key for key in ("values", "bias") if key not in stored and getattr(layer, key, None) is not None]
    if computed:
        expected = "`values` that are a parameter: remove the parametrization (such as torch.nn.utils.prune.remove)"
        raise BlockSparseError.expected(name, expected, f"{' and '.join(computed)} computed in each call")


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """Set a parameter's data to a tensor of any shape and clear its gradient.

    A backward pass that needs the old data raises. Inference tensors are copied, so that the parameter can be trained.
    """
    parameter.grad = None
    if not parameter.is_inference():
        increment_version(parameter)
        if data.is_inference():
            with torch.inference_mode(False):
                data = data.clone()
    if data.shape != parameter.shape:
        # A graph that still exists, such as the last loss's, has a gradient node with the old shape. PyTorch makes a
        # new node only when the dtype changes, so change it twice.
        other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
        with torch.inference_mode(False):
            parameter.data = data.new_empty(0, dtype=other)
        mark_resized(parameter)
    parameter.data = data


def layout_for(
    shape: tuple[int, int],
    layout: BlockLayout | None,
    density: float | None,
    block_size: int | tuple[int, int],
    what: str = "features",
) -> BlockLayout:
    """Return the layout of a module of `shape` (out, in), padded to whole blocks.

    It is `layout` if that is given, else a random one of the density, else the dense one. Random layouts get their seed
    from PyTorch's generator.
    """
    for name, size in zip((f"out_{what}", f"in_{what}"), shape, strict=True):
        integer(name, size, 1)
    if layout is not None:
        check_layout(layout)
        if density is not None:
            raise BlockSparseError.expected("density", "None if a layout is given", density)
        check_shape(layout, shape, f" {what}")
        return layout
    probe = BlockLayout([[True]], block_size)  # checks the block size
    padded = padded_shape(shape, probe.block_shape)
    if density is None:
        return patterns.dense(padded, probe.block_shape)
    return random_layout(padded, probe.block_shape, density, _masks_without_padding(padded, shape))


def random_layout(
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    density: float,
    used: tuple[Tensor, Tensor] | None = None,
) -> BlockLayout:
    """Draw a random layout with a seed from PyTorch's generator; refuse a density above 0 that stores no block.

    Args:
        shape: (out, in) with padding, in features.
        block_shape: (rows, columns) of a block.
        density: fraction of the weights, without padding, to store.
        used: two bool tensors, True for outputs and inputs that are not padding; None without padding.
    """
    seed = int(torch.randint(2**31, (), device="cpu"))
    if used is None:
        layout = patterns.random(shape, block_shape, density, seed)
    else:
        layout = random_of_features((used[0].numpy(), used[1].numpy()), block_shape, density, seed)
    if not layout.nnz and density:
        real = shape if used is None else (int(used[0].sum()), int(used[1].sum()))
        raise _no_block(layout, density, real)
    return layout


def _no_block(layout: BlockLayout, density: float, real: tuple[int, int]) -> BlockSparseError:
    """Make the error for a density that stores no block; `real` is the weight's shape without padding."""
    stored = f"one of the {layout.grid[0] * layout.grid[1]} blocks of {layout.block_shape} in {layout.shape}"
    size = _smaller_block(real, max(layout.block_shape), density)
    remedy = "density=1" if size is None else f"block_size={size}, or density=1"
    return BlockSparseError.expected("density", f"0, or enough for {stored}: pass {remedy}", density)


def _smaller_block(shape: tuple[int, int], below: int, density: float) -> int | None:
    """Return the largest block size, a power of two, that gives each row or column a block, or else any block."""
    fallback = None
    for power in reversed(range((below - 1).bit_length())):
        grid = [math.ceil(size / 2**power) for size in shape]
        stored = round(density * grid[0] * grid[1])
        if stored and stored >= min(grid):
            return int(2**power)
        fallback = fallback or (2**power if stored else None)
    return fallback


def check_shape(layout: BlockLayout, shape: tuple[int, int], what: str = "") -> None:
    """Raise a BlockSparseError unless the layout has `shape` (out, in) padded to whole blocks."""
    padded = padded_shape(shape, layout.block_shape)
    if layout.shape != padded:
        raise BlockSparseError.expected("layout", f"shape {padded} for {shape}{what}", repr(layout), Page.LAYOUTS)


def _masks_without_padding(padded: tuple[int, int], shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """Return which rows and columns of a padded weight are real: bool on the CPU, or None if nothing is padded."""
    if padded == shape:
        return None
    out, in_ = (torch.arange(more, device="cpu") < size for more, size in zip(padded, shape, strict=True))
    return out, in_
