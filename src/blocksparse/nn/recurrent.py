"""The base of all recurrent modules: layers, directions, packed sequences, dense and block-sparse weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..checked import integer, number, shape_of
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.checks import autocast, check_rows_of_table
from ..ops.recurrent import Steps, Times, cpu
from ..ops.registry import can_bypass_dispatcher, in_transform
from .layout_module import LayoutModule
from .multi_weight import MultiWeightModule, Size
from .padding import padded_shape, padded_to

State = tuple[Tensor, Tensor]
Restore = Callable[[Tensor, Tensor, Tensor], tuple[Any, State]]


class SparseOptions(TypedDict, total=False):
    """The keyword options of all recurrent layers: layouts, and the device and dtype of the parameters."""

    layout: BlockLayout | None
    input_layout: BlockLayout | None
    layouts: Mapping[str, BlockLayout] | None
    density: float | None
    block_size: int | tuple[int, int]
    device: Any
    dtype: torch.dtype | None


class Recurrent(MultiWeightModule):
    """Recurrent layers with the interface of `torch.nn.LSTM`; subclasses define the cell."""

    gates = 4
    """The number of stacked parts of each weight."""
    proj_size = 0
    _kind: str
    """The name of the step in the compiled core: "lstm", "gru", "tanh" or "relu"."""
    _proj_layout: BlockLayout | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        layout: BlockLayout | None = None,
        input_layout: BlockLayout | None = None,
        layouts: Mapping[str, BlockLayout] | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layouts, density, block_size, device, dtype)
        self.input_size = integer("input_size", input_size, 1)
        self.hidden_size = integer("hidden_size", hidden_size, 1)
        self.num_layers = integer("num_layers", num_layers, 1)
        integer("proj_size", self.proj_size, 0, below=self.hidden_size, of="hidden_size")
        self._check_layouts(layout, input_layout, self._proj_layout)
        if self._proj_layout is not None and not self.proj_size:
            expected = "None without a projection (or pass proj_size)"
            raise BlockSparseError.expected("proj_layout", expected, repr(self._proj_layout))
        self.bias, self.batch_first, self.bidirectional = bool(bias), bool(batch_first), bool(bidirectional)
        self.dropout = number("dropout", dropout, 0, 1)
        # Block-sparse gates are padded to whole blocks, and with them everything that has a hidden size.
        blocks = [each.block_shape for each in (layout, *self._layouts.values()) if each is not None]
        blocks += [] if density is None else [BlockLayout([[True]], block_size).block_shape]
        block = math.lcm(*(size for block_shape in blocks for size in block_shape))
        rows_of_inputs = 1 if input_layout is None else input_layout.block_shape[0]
        of_outputs, of_hidden = (1, 1) if self._proj_layout is None else self._proj_layout.block_shape
        hidden = padded_to(self.hidden_size, math.lcm(block, rows_of_inputs, of_hidden))
        self._hidden = self._output = Size(self.hidden_size, hidden)
        if self.proj_size:
            self._output = Size(self.proj_size, padded_to(self.proj_size, math.lcm(block, of_outputs)))
        for layer in range(self.num_layers):
            for direction in range(self.directions):
                self._add_cell(layer, direction, layout, input_layout if layer == 0 else None)
        self._check_names()
        self.reset_parameters()

    # -- for subclasses ------------------------------------------------------------------------------------------

    def _cell(self, inputs: Size) -> dict[str, tuple[int, Size, Size | None]]:
        """Return for each parameter of a cell: number of parts, outputs per part, inputs (None for a vector)."""
        cell: dict[str, tuple[int, Size, Size | None]] = {
            "weight_ih": (self.gates, self._hidden, inputs),
            "weight_hh": (self.gates, self._hidden, self._output),
        }
        if self.bias:
            cell |= dict.fromkeys(("bias_ih", "bias_hh"), (self.gates, self._hidden, None))
        if self.proj_size:
            cell["weight_hr"] = 1, self._output, self._hidden
        return cell

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        """Run one cell over all steps and return y `[rows, output]`, h and c.

        Args:
            suffix: the end of the names of the cell's parameters, such as "_l0".
            x: the inputs `[rows, features]` of all steps, or a table of which `index` `[rows]` selects the inputs.
            h, c: the initial states.
            steps: the sizes of the steps and their order.
        """
        raise NotImplementedError

    @property
    def _input_units(self) -> Size:
        """The hidden units that have weights from the inputs."""
        return self._hidden

    # -- weights -------------------------------------------------------------------------------------------------

    def _add_cell(
        self, layer: int, direction: int, layout: BlockLayout | None, input_layout: BlockLayout | None
    ) -> None:
        """Add the parameters of one layer in one direction."""
        size = self._output.real * self.directions if layer else self.input_size
        inputs, suffix = Size(size, size), self._suffix(layer, direction)
        layout_of_inputs = input_layout or layout_if_fitting(layout, self._input_units, inputs, self.gates)
        for name, (parts, out, in_) in self._cell(inputs).items():
            if in_ is None:
                setattr(self, name + suffix, nn.Parameter(torch.empty(parts * out.padded, **self._options)))
            else:
                chosen = layout_of_inputs if in_ is inputs else self._proj_layout if name == "weight_hr" else layout
                self._add_weight(name + suffix, parts, out, in_, chosen)

    def _weights(self, suffix: str, *names: str) -> list[tuple[Tensor, BlockLayout | None]]:
        """Return the weights of one cell by name, each with its layout."""
        return [self._weight(f"weight_{name}{suffix}") for name in names]

    def size_of(self, name: str) -> tuple[Size, Size | None]:
        return super().size_of(name) or (self._hidden, None)

    def densified(self) -> Self:
        new = super().densified()
        new._hidden = Size(self._hidden.real, self._hidden.real)
        new._output = Size(self._output.real, self._output.real)
        return new

    def reset_parameters(self) -> None:
        """Draw new parameters: uniform within 1 / sqrt(fan_in), for dense weights within 1 / sqrt(hidden_size)."""
        bound = 1 / math.sqrt(self.hidden_size)
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if not parameter.is_meta:
                    self._reset(name, parameter, bound)
            self._draw_weights()

    def _reset(self, name: str, parameter: Tensor, bound: float) -> None:
        """Draw a parameter uniformly within `bound`, with zeros in the padding."""
        out, in_ = self.size_of(name)
        used = out.used(len(parameter)).to(parameter.device)
        parameter.uniform_(-bound, bound)
        if out.padded != out.real:
            parameter[~used] = 0
        if in_ is not None:
            parameter[:, in_.real :] = 0

    # -- sequences -----------------------------------------------------------------------------------------------

    @property
    def directions(self) -> int:
        """2 if the layer is bidirectional, otherwise 1."""
        return 2 if self.bidirectional else 1

    def _suffix(self, layer: int, direction: int) -> str:
        return f"_l{layer}" + ("_reverse" if direction else "")

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None, *, table: Tensor | None = None
    ) -> tuple[Any, State]:
        """Return the outputs and the final h and c, as torch.nn.LSTM does.

        With a `table` `[n, input_size]`, the inputs are rows of the table and `input` has their numbers: int64
        `[steps, batch]`, or batch first, or packed. The product with the input weight is then computed once per row.
        """
        check_states(hx)
        rows, times, restore = self._rows(input, table)
        data, index = (rows, None) if table is None else (table, rows.squeeze(1))
        hs, cs = self._initial_states(hx, times.batch, data, input)
        real, finals = self._output.real, []
        # In a graph the number of steps can be dynamic. The steps are unrolled for dense weights, which the compiler
        # multiplies itself, and within transforms, for which the op has no rules.
        is_sparse = any(isinstance(weight, LayoutModule) for weight in self.children())
        in_graph = torch.compiler.is_compiling() and is_sparse and not in_transform()
        for layer in range(self.num_layers):
            if layer and self.dropout:
                data = self._dropout_between_layers(data)
            outputs = []
            for direction in range(self.directions):
                cell = layer * self.directions + direction
                steps: Any = times._replace(reverse=bool(direction))
                y, h, c = self._run(
                    self._suffix(layer, direction), data, index, hs[cell], cs[cell],
                    steps if in_graph else steps.to_steps(),
                )  # fmt: skip
                outputs.append(_unpadded(y, real))
                finals.append((_unpadded(h, real), _unpadded(c, self.hidden_size)))
            data, index = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0], None
        if len(finals) == 1:
            h, c = (state.unsqueeze(0) for state in finals[0])
        else:
            h, c = (torch.stack(states) for states in zip(*finals, strict=True))
        return restore(data, h, to_dtype(c, data.dtype if hx is None else hx[1].dtype))

    def _fast_inference(self, x: Any, hx: State | None) -> tuple[Tensor, Tensor, Any] | None:
        """Return y, h and c (None without a c) in inference on the CPU; None if the call needs the general pass.

        For one step, the general pass takes longer than the products of a thousand units.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(x, Tensor) or x.dim() != 3:
            return None
        steps, batch = x.shape[1::-1] if self.batch_first else x.shape[:2]
        padded = self._hidden.padded != self.hidden_size
        if x.numel() == 0 or x.shape[2] != self.input_size or (self.batch_first and steps > 1):
            return None
        if padded or self.bidirectional or self.proj_size or (self.dropout and self.training):
            return None
        check_states(hx)
        tensors, layers = [x, *(hx or ())], []
        for layer in range(self.num_layers):
            suffix = self._suffix(layer, 0)
            (input_weight, input_layout), (weight, layout) = self._weights(suffix, "ih", "hh")
            if input_layout is None or layout is None:
                return None
            biases = [getattr(self, name + suffix) for name in ("bias_ih", "bias_hh")] if self.bias else []
            layers.append((input_weight, input_layout, biases, weight, layout))
            tensors += [input_weight, weight, *biases]
        if not can_bypass_dispatcher(*tensors, plain_call=True):
            return None
        h, c = self._initial_states(hx, batch, x, x)
        return cpu.recurrence_fast(self._kind, x, h, c if self._kind == "lstm" else None, layers)

    def _dropout_between_layers(self, y: Tensor) -> Tensor:
        """Return the outputs of a layer that is not the last, after dropout."""
        return F.dropout(y, self.dropout, self.training)

    def _rows(self, input: Any, table: Tensor | None) -> tuple[Tensor, Times, Restore]:
        """Check the input, and return (its rows in time order, its steps, a function that gives results its form).

        With a `table`, the input has int64 indices of rows of the table, and so have the returned rows.
        """
        data = input.data if isinstance(input, PackedSequence) else input
        if not isinstance(data, Tensor):
            raise BlockSparseError.expected("input", "a tensor or a PackedSequence", type(data).__name__)
        dims: tuple[int, ...] = (2,) if isinstance(input, PackedSequence) else (2, 3)
        size = self.input_size
        if table is not None:
            if not isinstance(table, Tensor) or table.dim() != 2 or table.shape[1] != self.input_size:
                raise BlockSparseError.expected("table", f"[n, {self.input_size}]", shape_of(table))
            if data.dtype != torch.int64:
                raise BlockSparseError.expected("input", "int64 rows of the table", data.dtype)
            if data.is_cpu and can_bypass_dispatcher(data):
                check_rows_of_table(data, len(table))
            data, size = data.unsqueeze(-1), 1
        elif not data.is_floating_point():
            raise BlockSparseError.expected("input", "floating point, or rows of a table", data.dtype)
        steps_axis = 1 if self.batch_first and data.dim() == 3 else 0
        if data.dim() not in dims or data.shape[-1] != size or data.shape[steps_axis] == 0:
            form = "batch, steps" if self.batch_first else "steps, batch"
            form = "rows" if isinstance(input, PackedSequence) else form
            form += "" if table is not None else f", {self.input_size}"
            raise BlockSparseError.expected("input", f"[{form}], at least one step", list(data.shape))
        if isinstance(input, PackedSequence):
            sizes = tuple(input.batch_sizes.tolist())
            return data, Times(len(sizes), sizes[0], sizes), partial(_packed, input)
        unbatched = data.dim() == 2
        data = data.unsqueeze(1) if unbatched else data.transpose(0, 1) if self.batch_first else data
        steps, batch = data.shape[:2]

        def restore(y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, State]:
            y = y.view(steps, batch, y.shape[1])
            if unbatched:
                return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
            return y.transpose(0, 1) if self.batch_first else y, (h, c)

        return data.reshape(steps * batch, size), Times(steps, batch), restore

    def _initial_states(self, hx: State | None, batch: int, rows: Tensor, input: Any) -> tuple[Tensor, Tensor]:
        """Return the initial states of all cells, padded; c in float32 or float64."""
        cells = self.num_layers * self.directions
        h_dtype = _dtype_of_products(rows)
        c_dtype = torch.float64 if h_dtype == torch.float64 else torch.float32
        if hx is None:
            h = rows.new_zeros(cells, batch, self._output.padded, dtype=h_dtype)
            return h, rows.new_zeros(cells, batch, self._hidden.padded, dtype=c_dtype)
        states = []
        for name, state, (real, padded), dtype in (
            ("h", hx[0], self._output, h_dtype),
            ("c", hx[1], self._hidden, c_dtype),
        ):
            # The states of a sequence without a batch have no batch axis.
            state = state.unsqueeze(1) if state.dim() == 2 and batch == 1 else state
            if tuple(state.shape) != (cells, batch, real):
                raise BlockSparseError.expected(f"the initial {name}", [cells, batch, real], list(state.shape))
            if isinstance(input, PackedSequence) and input.sorted_indices is not None:
                state = state.index_select(1, input.sorted_indices)
            states.append(to_dtype(F.pad(state, (0, padded - real)) if padded != real else state, dtype))
        return states[0], states[1]

    def extra_repr(self) -> str:
        usual = {"num_layers": 1, "nonlinearity": "tanh", "bias": True, "batch_first": False, "dropout": 0.0}
        usual |= {"bidirectional": False, "proj_size": 0, "weight_norm": True}
        own = {name: getattr(self, name) for name in usual if hasattr(self, name)}
        changed = [f"{name}={value!r}" for name, value in own.items() if value != usual[name]]
        return ", ".join([f"{self.input_size}, {self.hidden_size}", *changed])


def check_states(hx: Any) -> None:
    """Raise a BlockSparseError unless `hx` is None or a pair of tensors (h, c)."""
    if hx is not None and not (isinstance(hx, tuple | list) and [isinstance(s, Tensor) for s in hx] == [True, True]):
        raise BlockSparseError.expected("hx", "None or two tensors (h, c)", type(hx).__name__)


def layout_if_fitting(layout: BlockLayout | None, out: Size, in_: Size, parts: int = 4) -> BlockLayout | None:
    """Return the layout if it has the shape `[out, in_]`, or that of `parts` such weights stacked; else None."""
    if layout is None:
        return None
    padded = padded_shape((out.padded, in_.padded), layout.block_shape)
    return layout if layout.shape[1] == padded[1] and layout.shape[0] in (padded[0], parts * padded[0]) else None


def check_dtypes(x: Tensor, *tensors: Tensor | None) -> None:
    """Raise a BlockSparseError unless the tensors have the dtype of x; autocast allows any."""
    for tensor in () if torch._C._is_any_autocast_enabled() else tensors:
        if tensor is not None and tensor.dtype != x.dtype:
            raise BlockSparseError.expected("input", f"the dtype of the weights, {tensor.dtype}", x.dtype)


def cast(x: Tensor, *tensors: Tensor | None) -> list[Any]:
    """Return x and the tensors in the dtype of products with x: its own, or autocast's."""
    check_dtypes(x, *tensors)
    dtype = _dtype_of_products(x)
    return [None if tensor is None else to_dtype(tensor, dtype) for tensor in (x, *tensors)]


def to_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype; if it has that already, this saves the two microseconds of PyTorch's check."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _unpadded(rows: Tensor, features: int) -> Tensor:
    """Return the first `features` columns."""
    return rows if rows.shape[1] == features else rows[:, :features]


def _dtype_of_products(x: Tensor) -> torch.dtype:
    """Return the dtype of products with x: autocast's, or x's own."""
    return autocast(x, x, None)[0].dtype if torch._C._is_any_autocast_enabled() else x.dtype


def _packed(input: PackedSequence, y: Tensor, h: Tensor, c: Tensor) -> tuple[PackedSequence, State]:
    """Return outputs and states in the form and order of a packed input."""
    back = input.unsorted_indices
    if back is not None:
        h, c = h.index_select(1, back), c.index_select(1, back)
    return PackedSequence(y, input.batch_sizes, input.sorted_indices, back), (h, c)
