"""The base of modules with several weights, dense or block-sparse, which can be stacks of parts such as gates."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .. import ops
from ..convert import block_coordinates, to_dense
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from .dense_weight import refuse_weight
from .module import Weight, random_layout
from .padding import padded_shape


class Size(NamedTuple):
    """A number of features, without padding (`real`) and with padding (`padded`)."""

    real: int
    padded: int

    def used(self, size: int, parts: bool = True) -> Tensor:
        """Return a bool mask `[size]` on the CPU, False for padding.

        With `parts=True`, `size` is the size of a stack of parts, each padded to `padded`.
        """
        index = torch.arange(size, device="cpu")
        return (index % self.padded if parts else index) < self.real


class MultiWeightModule(nn.Module):
    """A module with several weights: dense ones are parameters, block-sparse ones are `Weight` modules.

    The names are those of torch.nn's module, so that state dicts of dense modules are the same. A weight is a stack of
    one or more parts, such as the gates of an LSTM. Each part is padded separately.
    """

    def __init__(
        self,
        layouts: Mapping[str, BlockLayout] | None,
        density: float | None,
        block_size: int | tuple[int, int],
        device: Any,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        if not isinstance(layouts, Mapping | None):
            raise BlockSparseError.expected("layouts", "a dict of layouts by the names of weights", repr(layouts))
        self._layouts = dict(layouts or {})
        self._density, self._block_size = density, block_size
        self._options = {"device": device, "dtype": dtype}
        self.sizes: dict[str, tuple[Size, Size]] = {}  # (outputs of one part, inputs) of each weight

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        refuse_weight(name, param)
        super().register_parameter(name, param)

    def _check_layouts(self, *layouts_of_arguments: BlockLayout | None) -> None:
        """Raise a BlockSparseError if a layout is of another type, or if there are layouts and a density."""
        layouts = [each for each in (*layouts_of_arguments, *self._layouts.values()) if each is not None]
        for each in layouts:
            check_layout(each)
        if self._density is not None and layouts:
            raise BlockSparseError.expected("density", "None if a layout is given", self._density)

    def _add_weight(
        self, name: str, parts: int, out: Size, in_: Size, layout: BlockLayout | None, draw_parts: bool = False
    ) -> None:
        """Add a weight, a stack of `parts` parts `[out, in_]`: block-sparse if it has a layout or there is a density.

        The layout is that of every part, or of the whole stack. An entry of this name in `layouts` takes precedence.
        With `draw_parts`, each part gets a random layout of its own, so that all have equally many blocks.
        """
        layout = self._layouts.pop(name, layout)
        if layout is not None:
            padded = padded_shape((out.padded, in_.padded), layout.block_shape)
            shapes = padded, (parts * padded[0], padded[1])
            if layout.shape not in shapes:
                either = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
                raise BlockSparseError.expected(f"the layout of {name}", f"shape {either}", repr(layout))
            layout = layout if layout.shape == shapes[1] else _stack([layout] * parts)
        elif self._density is not None:
            block = BlockLayout([[True]], self._block_size).block_shape
            rows, columns = padded_shape((out.padded, in_.padded), block)
            draws = parts if draw_parts else 1
            shape = parts // draws * rows, columns
            real = Size(out.real, rows).used(shape[0]), in_.used(shape[1], parts=False)
            used = None if all(map(torch.all, real)) else real
            layout = _stack([random_layout(shape, block, self._density, used) for _ in range(draws)])
        if layout is None:
            self.sizes[name] = (out, in_)
            setattr(self, name, nn.Parameter(torch.empty(parts * out.padded, in_.padded, **self._options)))
        else:
            self.sizes[name] = (Size(out.real, layout.shape[0] // parts), in_)
            setattr(self, name, Weight(layout, **self._options))

    def _check_names(self) -> None:
        """Raise a BlockSparseError if `layouts` has a name that no weight has."""
        if self._layouts:
            raise BlockSparseError.expected("layouts", f"names out of {list(self.sizes)}", sorted(self._layouts))

    def _weight(self, name: str) -> tuple[Tensor, BlockLayout | None]:
        """Return a weight's tensor and its layout, None if it is dense."""
        weight = self._modules.get(name)  # read directly, because Module's attribute access is slow
        return (weight.values, weight.layout) if isinstance(weight, Weight) else (getattr(self, name), None)

    def _product_with(self, x: Tensor, name: str, parts: slice, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + bias for some parts of a weight, without padding: `[..., in] -> [..., parts * out]`."""
        out, _ = self.sizes[name]
        weight, layout = self._weight(name)
        rows = slice(parts.start * out.padded, parts.stop * out.padded)
        if layout is None:
            dense: Tensor = F.linear(x, weight[rows], bias)
            return dense
        if (rows.start, rows.stop) != (0, layout.shape[0]):
            if is_dynamo_compiling():  # a dynamic layout has no known parts, so compute all of them
                all_parts = self._product_with(x, name, slice(0, layout.shape[0] // out.padded))
                y: Tensor = all_parts[..., parts.start * out.real : parts.stop * out.real]
                return y if bias is None else y + bias
            begin, layout = _layout_of_rows(getattr(self, name), rows.start, rows.stop)
            weight = weight[begin : begin + layout.nnz]
        if layout.shape[1] != x.shape[-1]:
            x = F.pad(x, (0, layout.shape[1] - x.shape[-1]))
        if out.padded == out.real:
            return ops.linear(x, weight, layout, bias)
        y = ops.linear(x, weight, layout).unflatten(-1, (-1, out.padded))[..., : out.real].flatten(-2)
        return y if bias is None else y + bias

    def size_of(self, name: str) -> tuple[Size, Size | None] | None:
        """Return (outputs of one part, inputs) of a weight, (outputs, None) of a vector, None of another name."""
        return self.sizes.get(name)

    def shape_of(self, name: str) -> tuple[int, int]:
        """Return (out, in) of a weight, without padding."""
        weight, (out, in_) = getattr(self, name), self.sizes[name]
        rows = weight.layout.shape[0] if isinstance(weight, Weight) else len(weight)
        return rows // out.padded * out.real, in_.real

    def with_weights(self, weights: Mapping[str, nn.Parameter | Weight]) -> Self:
        """Return a module with these weights and biases, which shares everything else with this one."""
        new = copy.copy(self)
        new._parameters, new._modules = dict(self._parameters), dict(self._modules)
        for name, weight in weights.items():
            delattr(new, name)
            setattr(new, name, weight)
        return new

    def densified(self) -> Self:
        """Return the module with dense weights, without padding; unchanged parameters are shared."""
        changed: dict[str, nn.Parameter | Weight] = {}
        sizes: dict[str, tuple[Size, Size]] = {}
        for name, old in (*self.named_parameters(recurse=False), *self.named_children()):
            values, size = old.values if isinstance(old, Weight) else old, self.size_of(name)
            if not isinstance(values, nn.Parameter) or size is None:
                continue
            tensor = to_dense(old.values.detach(), old.layout) if isinstance(old, Weight) else values.detach()
            out, in_ = size
            tensor = tensor[out.used(len(tensor)).to(tensor.device)]
            if in_ is not None:
                tensor = tensor[:, : in_.real]
                sizes[name] = Size(out.real, out.real), Size(in_.real, in_.real)
            if isinstance(old, Weight) or values.shape != tensor.shape:
                changed[name] = nn.Parameter(tensor.contiguous(), requires_grad=values.requires_grad)
        new = self.with_weights(changed)
        new.sizes = sizes
        return new

    def _draw_weights(self) -> None:
        """Draw new block-sparse weights, uniform within 1 / sqrt(fan_in)."""
        for name, weight in self.named_children():
            if isinstance(weight, Weight):
                weight.draw_values(self._used_rows_and_columns(name, weight.layout))

    def _used_rows_and_columns(self, name: str, layout: BlockLayout) -> tuple[Tensor, Tensor] | None:
        """Return two bool masks, False for padded outputs and inputs of a weight's layout; None without padding."""
        out, in_ = self.sizes[name]
        used = out.used(layout.shape[0]), in_.used(layout.shape[1], parts=False)
        return None if all(bool(side.all()) for side in used) else used


def _layout_of_rows(weight: Weight, start: int, stop: int) -> tuple[int, BlockLayout]:
    """Return the number of blocks before row `start` of the dense weight, and the layout of rows `start` to `stop`."""
    layout = weight.layout
    first, last = (row // layout.block_shape[0] for row in (start, stop))
    stored = slice(int(layout.row_start[first]), int(layout.row_start[last]))

    def make() -> BlockLayout:
        rows, cols = layout.row_of_block[stored] - first, layout.col_of_block[stored]
        return BlockLayout.from_indices(rows, cols, (last - first, layout.grid[1]), layout.block_shape)

    return stored.start, layout.derived((_layout_of_rows, first, last), make)


def _stack(layouts: Sequence[BlockLayout]) -> BlockLayout:
    """Return the layout of several weights of one size, stacked by rows."""
    if len(layouts) == 1:
        return layouts[0]
    rows, cols = zip(*(block_coordinates(layout, torch.device("cpu")) for layout in layouts), strict=True)
    height, width = layouts[0].grid
    all_rows = torch.cat([nth * height + part for nth, part in enumerate(rows)])
    grid = len(layouts) * height, width
    return BlockLayout.from_indices(all_rows.numpy(), torch.cat(cols).numpy(), grid, layouts[0].block_shape)
