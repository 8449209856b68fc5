"""What all recurrent modules share: layers, directions, packed sequences, padding, weights dense or block-sparse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import patterns
from ..convert import block_coordinates
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout, is_int
from ..ops.checks import autocast
from ..ops.recurrent import Steps, linear_of
from .module import Weight, draw_values

State = tuple[Tensor, Tensor]


class Recurrent(nn.Module):
    """Layers of cells over sequences, with the interface of `torch.nn.LSTM`. What a cell is, subclasses say.

    Weights are plain parameters `[out, in]` where dense, modules with `values` and a layout where block-sparse; both
    are found by the names that torch.nn.LSTM gives them, so that state dicts of dense modules are the same.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        layout: BlockLayout | None = None,
        input_layout: BlockLayout | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, size in (("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)):
            if not is_int(size) or size <= 0:
                raise BlockSparseError.expected(name, "a positive int", repr(size))
        if not is_int(proj_size) or not 0 <= proj_size < hidden_size:
            raise BlockSparseError.expected("proj_size", f"an int from 0 to {hidden_size - 1}", repr(proj_size))
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise BlockSparseError.expected("dropout", "a probability", repr(dropout))
        for given in (layout, input_layout):
            if given is not None:
                check_layout(given)
        if density is not None and (layout is not None or input_layout is not None):
            raise BlockSparseError.expected("density", "None where a layout is given", density)
        self.input_size, self.hidden_size, self.num_layers = int(input_size), int(hidden_size), int(num_layers)
        self.batch_first, self.dropout, self.bidirectional = bool(batch_first), float(dropout), bool(bidirectional)
        self.proj_size = int(proj_size)
        self._density, self._block_size = density, block_size
        self._options = {"device": device, "dtype": dtype}
        # Block-sparse gates are padded to whole blocks, and with them all that has to do with the hidden units.
        block = None
        if layout is not None:
            block = math.lcm(*layout.block_shape)
        elif density is not None:
            block = math.lcm(*BlockLayout([[True]], block_size).block_shape)
        self._hidden = _up(self.hidden_size, block)
        self._output = _up(self.proj_size, block) if self.proj_size else self._hidden
        for layer in range(self.num_layers):
            for direction in range(self.directions):
                self._build(self._suffix(layer, direction), self._inputs_of(layer), layout, input_layout)
        self.reset_parameters()

    # -- what subclasses say -------------------------------------------------------------------------------------

    def _build(self, suffix: str, inputs: int, layout: BlockLayout | None, input_layout: BlockLayout | None) -> None:
        """Makes the parameters of one cell."""
        raise NotImplementedError

    def _run(self, suffix: str, x: Tensor, h: Tensor, c: Tensor, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
        """One cell over the rows x of all steps: outputs `[rows, output]`, final h and c."""
        raise NotImplementedError

    # -- weights -------------------------------------------------------------------------------------------------

    def _add_weight(self, name: str, gates: int, out: int, in_: int, layout: BlockLayout | None) -> None:
        """A weight of `gates` parts `[out, in_]`, one above the other: block-sparse by a layout or the density.

        The layout is that of one part, then of each, or that of all.
        """
        if layout is not None:
            padded = (_up(out, layout.block_shape[0]), _up(in_, layout.block_shape[1]))
            shapes = padded, (gates * padded[0], padded[1])
            if layout.shape not in shapes:
                either = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
                raise BlockSparseError.expected(f"the layout of {name}", f"shape {either}", repr(layout))
            layout = layout if layout.shape == shapes[1] else _stacked(layout, gates)
        elif self._density is not None:
            block = BlockLayout([[True]], self._block_size).block_shape
            seed = int(torch.randint(2**31, (), device="cpu"))
            shape = (gates * _up(out, block[0]), _up(in_, block[1]))
            layout = patterns.random(shape, block, density=self._density, seed=seed)
        if layout is None:
            setattr(self, name, nn.Parameter(torch.empty(gates * out, in_, **self._options)))
        else:
            setattr(self, name, Weight(layout, **self._options))

    def _weight(self, name: str) -> tuple[Tensor, BlockLayout | None]:
        """A weight in use, and its layout."""
        weight = getattr(self, name)
        return (weight.values, weight.layout) if isinstance(weight, Weight) else (weight, None)

    def _product(self, x: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias for all steps at once."""
        weight, layout = self._weight(name)
        if layout is not None and layout.shape[1] != x.shape[1]:
            x = F.pad(x, (0, layout.shape[1] - x.shape[1]))
        return linear_of(x, weight, layout, bias)

    def reset_parameters(self) -> None:
        """Draws all parameters anew: uniform within 1 / sqrt(fan_in), for dense weights 1 / sqrt(hidden_size)."""
        bound = 1 / math.sqrt(self.hidden_size)
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                self._reset(name, parameter, bound)
            for weight in self.children():
                if isinstance(weight, Weight):
                    out, in_ = weight.layout.shape
                    draw_values(weight, self._used(out, rows=True), self._used(in_, rows=False))

    def _reset(self, name: str, parameter: Tensor, bound: float) -> None:
        parameter.uniform_(-bound, bound)
        self._clear_padding(parameter)

    def _clear_padding(self, parameter: Tensor) -> None:
        used = self._used(parameter.shape[0], rows=True)
        if not bool(used.all()):
            parameter[(~used).to(parameter.device)] = 0

    def _used(self, size: int, rows: bool) -> Tensor:
        """Which of so many features, of gates one above the other or of inputs, are no padding."""
        index = torch.arange(size, device="cpu")
        for padded, real in ((self._hidden, self.hidden_size), (self._output, self.proj_size or self.hidden_size)):
            if size == padded or (rows and size % padded == 0 and padded != real):
                return index % padded < real
        return index >= 0

    # -- sequences -----------------------------------------------------------------------------------------------

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _suffix(self, layer: int, direction: int) -> str:
        return f"_l{layer}" + ("_reverse" if direction else "")

    def _inputs_of(self, layer: int) -> int:
        return (self.proj_size or self.hidden_size) * self.directions if layer else self.input_size

    def forward(self, input: Tensor | PackedSequence, hx: State | None = None) -> tuple[Tensor | PackedSequence, State]:
        data, sizes, unbatch = self._rows(input)
        order = input.sorted_indices if isinstance(input, PackedSequence) else None
        batch = sizes[0]
        hs, cs = self._initial(hx, batch, data, order, unbatched=isinstance(input, Tensor) and input.dim() == 2)
        finals: list[tuple[Tensor, Tensor]] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                data = F.dropout(data, self.dropout, self.training)
            outputs = []
            for direction in range(self.directions):
                cell = layer * self.directions + direction
                steps = Steps(sizes, reverse=bool(direction))
                y, h, c = self._run(self._suffix(layer, direction), data, hs[cell], cs[cell], steps)
                outputs.append(y[:, : self.proj_size or self.hidden_size])
                finals.append((h[:, : self.proj_size or self.hidden_size], c[:, : self.hidden_size]))
            data = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        h = torch.stack([h for h, _ in finals])
        c = torch.stack([c for _, c in finals])
        c = c.to(hx[1].dtype if hx is not None else data.dtype)
        return unbatch(data, h, c)

    def _rows(self, input: Tensor | PackedSequence):
        """The input as rows in time order, the rows of each step, and how the results get the input's form."""
        if isinstance(input, PackedSequence):
            self._check_input(input.data, (2,))
            sizes = tuple(int(size) for size in input.batch_sizes)
            back = input.unsorted_indices

            def packed(y: Tensor, h: Tensor, c: Tensor):
                if back is not None:
                    h, c = h.index_select(1, back), c.index_select(1, back)
                return PackedSequence(y, input.batch_sizes, input.sorted_indices, back), (h, c)

            return input.data, sizes, packed
        self._check_input(input, (2, 3))
        x = input.unsqueeze(1) if input.dim() == 2 else input.transpose(0, 1) if self.batch_first else input
        steps, batch = x.shape[:2]
        if steps == 0 or batch == 0:
            raise BlockSparseError.expected("input", "at least one step and one sequence", list(input.shape))

        def plain(y: Tensor, h: Tensor, c: Tensor):
            y = y.unflatten(0, (steps, batch))
            if input.dim() == 2:
                return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
            return y.transpose(0, 1) if self.batch_first else y, (h, c)

        return x.reshape(steps * batch, -1), (batch,) * steps, plain

    def _check_input(self, x: Any, dims: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor):
            raise BlockSparseError.expected("input", "a tensor or a PackedSequence", type(x).__name__)
        if x.dim() not in dims or x.shape[-1] != self.input_size:
            form = "[batch, steps" if self.batch_first else "[steps, batch"
            form = "[rows" if dims == (2,) else form
            raise BlockSparseError.expected("input", f"{form}, {self.input_size}]", list(x.shape))

    def _initial(
        self, hx: State | None, batch: int, like: Tensor, order: Tensor | None, unbatched: bool
    ) -> tuple[Tensor, Tensor]:
        """The initial states of all cells, padded; c in float32 or float64."""
        cells = self.num_layers * self.directions
        (x,) = autocast(like, like, None)[:1]
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        if hx is None:
            return x.new_zeros(cells, batch, self._output), x.new_zeros(cells, batch, self._hidden, dtype=wide)
        states = []
        for name, state, real, padded, dtype in (
            ("h", hx[0], self.proj_size or self.hidden_size, self._output, x.dtype),
            ("c", hx[1], self.hidden_size, self._hidden, wide),
        ):
            shape = (cells, real) if unbatched else (cells, batch, real)
            if tuple(state.shape) != shape:
                raise BlockSparseError.expected(f"the initial {name}", list(shape), list(state.shape))
            state = state.unsqueeze(1) if unbatched else state
            state = state if order is None else state.index_select(1, order)
            states.append(F.pad(state, (0, padded - real)).to(dtype) if padded != real else state.to(dtype))
        return states[0], states[1]

    def extra_repr(self) -> str:
        shown = [f"{self.input_size}, {self.hidden_size}"]
        for name, default in (
            ("num_layers", 1),
            ("batch_first", False),
            ("dropout", 0.0),
            ("bidirectional", False),
            ("proj_size", 0),
        ):
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)}")
        return ", ".join(shown)


def fitting(layout: BlockLayout | None, out: int, in_: int) -> BlockLayout | None:
    """The layout if it is one of `[out, in_]`, padded, or of several such, one above the other."""
    if layout is None:
        return None
    padded = (_up(out, layout.block_shape[0]), _up(in_, layout.block_shape[1]))
    return layout if layout.shape[1] == padded[1] and layout.shape[0] in (padded[0], 4 * padded[0]) else None


def cast(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that products with x have: under autocast another one than x's."""
    dtype = autocast(x, x, None)[0].dtype
    return tuple(tensor.to(dtype) for tensor in tensors)


def _stacked(layout: BlockLayout, times: int) -> BlockLayout:
    rows, cols = (index.numpy() for index in block_coordinates(layout, torch.device("cpu")))
    all_rows = (np.arange(times)[:, None] * layout.grid[0] + rows).ravel()
    grid = (times * layout.grid[0], layout.grid[1])
    return BlockLayout.from_indices(all_rows, np.tile(cols, times), grid, layout.block_shape)


def _up(size: int, block: int | None) -> int:
    return size if block is None else -(-size // block) * block
