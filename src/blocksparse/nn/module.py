"""The base of all block-sparse modules: a layout, its values as a plain parameter, and both in the state dict."""

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
from .layout_module import INDICES_WANTED, LayoutModule, others_in_buffers, was_traced
from .optimizer_watch import note_left_behind, note_resized
from .tensor_parallel_part import TensorParallelPart


class BlockSparseModule(LayoutModule):
    """A module whose weight is the parameter `values` on `layout`.

    Loading a state dict with another pattern of the same shape changes the module's layout to it.
    """

    _transposed = False  # whether torch.nn has the inputs first
    values: nn.Parameter
    part: TensorParallelPart | None = None
    """Where several processes hold the weight together: which part of it this module is."""

    def __init__(self, layout: BlockLayout, kernel: tuple[int, ...], device: Any, dtype: torch.dtype | None):
        super().__init__(layout)
        self._used: tuple[Tensor, Tensor] | None = None
        self.values = nn.Parameter(torch.empty(*layout.values_shape, *kernel, device=device, dtype=dtype))
        self.reset_layout_buffers()

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
        refuse_weight(name, param)
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
        self.change_layout(layout, values, state_follows=False)

    def change_layout(self, layout: BlockLayout, values: Tensor, *, state_follows: bool = True) -> None:
        """Does what `set_layout` does, for callers that move the state of optimizers along."""
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
        if not state_follows and layout != self._layout:
            note_left_behind(mine)
        replace_data(mine, values.detach())
        self.layout_changed(layout)

    def layout_changed(self, layout: BlockLayout) -> None:
        """Takes over a layout that `values` has already been changed to."""
        if was_traced(self):
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

    def _adopt(self, given: dict[str, Any]) -> None:
        mine, (crow, col, values) = self._layout, map(given.get, ("crow_indices", "col_indices", "values"))
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                got = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
                raise BlockSparseError.expected(name, "a dense tensor", got)
        if not given:
            return
        if crow is None or col is None:
            raise BlockSparseError.expected("layout", INDICES_WANTED, f"only {' and '.join(given)}", Page.LAYOUTS)
        if crow.is_meta and getattr(self._buffers.get("crow_indices"), "is_meta", False):
            return  # nothing is loaded
        self._check_blocks(values)
        layout = layout_from_state(crow, col, mine)
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
            with torch.inference_mode(False):
                self.set_layout(layout, self.values.new_empty(shape))
        elif others_in_buffers(self):
            self.reset_layout_buffers(self.values.device)


class Parametrizations(nn.ModuleDict):
    """A module's parametrizations by name, in which `values` is such a name and not the method of dictionaries."""

    def __getattribute__(self, name: str) -> Any:
        if name == "values":
            mine = self.__dict__["_modules"].get(name)
            if mine is not None:
                return mine
        return super().__getattribute__(name)

    def __setitem__(self, key: str, module: nn.Module) -> None:
        self._modules[key] = module


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
        return f"{self._layout.shape}, {self._stored}"


def check_parameters(layer: nn.Module, name: str = "layer") -> None:
    """Raises a BlockSparseError where other parameters than its values and bias make these in each call."""
    stored = layer._parameters.keys() | layer._buffers.keys()
    computed = [key for key in ("values", "bias") if key not in stored and getattr(layer, key, None) is not None]
    if computed:
        wanted = "`values` that are a parameter: remove what makes them of others (torch.nn.utils.prune.remove, say)"
        raise BlockSparseError.expected(name, wanted, f"{' and '.join(computed)} computed in each call")


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """Gives a parameter data of any shape and clears its gradient; a backward pass that needs the old data raises.

    Data made in inference mode is copied, so that the parameter can still be trained.
    """
    parameter.grad = None
    if not parameter.is_inference():
        increment_version(parameter)
        if data.is_inference():
            with torch.inference_mode(False):
                data = data.clone()
    if data.shape != parameter.shape:
        # A graph that is still held, that of the last loss say, has a node for the gradient in the old shape. PyTorch
        # makes a new one only where the dtype changes.
        other = torch.float32 if parameter.dtype == torch.float64 else torch.float64
        with torch.inference_mode(False):
            parameter.data = data.new_empty(0, dtype=other)
        note_resized(parameter)
    parameter.data = data


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
        integer(name, size, 1)
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
    return random_layout(padded, probe.block_shape, density, _used_of(padded, shape))


def random_layout(
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    density: float,
    used: tuple[Tensor, Tensor] | None = None,
) -> BlockLayout:
    """A pattern drawn with PyTorch's generator as the seed; a density above 0 that rounds to no block is refused.

    Of the outputs and inputs of `shape` those in `used` are real and not padding, bool; None where all are. The density
    is that of real numbers.
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
    """The error for a density too low for one block of a weight, whose shape without padding is `real`."""
    stored = f"one of the {layout.grid[0] * layout.grid[1]} blocks of {layout.block_shape} in {layout.shape}"
    size = _smaller_block(real, max(layout.block_shape), density)
    remedy = "density=1" if size is None else f"block_size={size}, or density=1"
    return BlockSparseError.expected("density", f"0, or enough for {stored}: pass {remedy}", density)


def _smaller_block(shape: tuple[int, int], below: int, density: float) -> int | None:
    """The largest power of two whose blocks the density has enough of for each row or each column, or else for one."""
    some = None
    for power in reversed(range((below - 1).bit_length())):
        grid = [math.ceil(size / 2**power) for size in shape]
        stored = round(density * grid[0] * grid[1])
        if stored and stored >= min(grid):
            return int(2**power)
        some = some or (2**power if stored else None)
    return some


def check_shape(layout: BlockLayout, shape: tuple[int, int], what: str = "") -> None:
    """Raises a BlockSparseError unless the layout is that of a weight of `shape` (out, in), padded to whole blocks."""
    padded = _padded(shape, layout.block_shape)
    if layout.shape != padded:
        raise BlockSparseError.expected("layout", f"shape {padded} for {shape}{what}", repr(layout), Page.LAYOUTS)


def _padding_of(layout: BlockLayout, shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """Which outputs and inputs of the layout are within `shape`: bool on the CPU; None where all are."""
    return _used_of(layout.shape, shape)


def _used_of(padded: tuple[int, int], shape: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    if padded == shape:
        return None
    out, in_ = (torch.arange(more, device="cpu") < size for more, size in zip(padded, shape, strict=True))
    return out, in_


def _padded(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]) * block[0], math.ceil(shape[1] / block[1]) * block[1]
