"""Reports on a model's weights: density, memory, FLOPs and measured speed-ups."""

from __future__ import annotations

import math
import textwrap
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule, Weight
from ..nn.multi_weight import MultiWeightModule
from ..nn.quantized import QuantizedModule
from ..surgery.carry import REASONS
from ..surgery.prunable import survey
from .sparser import dense_name, owner_of
from .speed import Example, Speed, checked_tokens

# The minimum width of the column of names.
MIN_NAME_WIDTH = 11


@dataclass(frozen=True)
class Row:
    """The report on one weight.

    Args:
        name: the weight's name in the dense model.
        kind: the class of its module.
        shape: `(out, in, *kernel)`, without padding.
        block: (rows, columns); None if it is dense.
        density, nnz: of its layout; 1 and None if it is dense.
        parameters, dense_parameters: stored parameters, with padding, and parameters of the dense weight; of a tied
            weight only in its first row.
        bytes, dense_bytes: their memory, with the indices of blocks.
        flops, dense_flops: two per stored parameter, for one token, or one output position of a convolution; 0 for
            embeddings.
        speed_up: dense time / block-sparse time of a forward call of the module; None if it is dense or cannot run.
        note: why it stays dense.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    block: tuple[int, int] | None
    density: float
    nnz: int | None
    parameters: int
    dense_parameters: int
    bytes: int
    dense_bytes: int
    flops: int
    dense_flops: int
    speed_up: float | None
    note: str


@dataclass(frozen=True)
class Report:
    """A report on the weights of a model; `report` makes it.

    Args:
        rows: the weights in the model's order.
        tokens: rows of the inputs that modules were timed with, unless there was an example.
        device: the device of the weights.
        other_parameters, other_bytes: of biases, norms and all else.
        speed_up: dense time / block-sparse time of the model on the example; None without one.
    """

    rows: tuple[Row, ...]
    tokens: int
    device: str
    other_parameters: int
    other_bytes: int
    speed_up: float | None = None

    @property
    def totals(self) -> dict[str, int]:
        """Parameters, bytes and FLOPs of the model, as it is and if all weights were dense.

        FLOPs of convolutions are those of one position each, so their sum means little; `table` leaves it out.
        """
        names = ("parameters", "dense_parameters", "bytes", "dense_bytes", "flops", "dense_flops")
        other = {"parameters": self.other_parameters, "bytes": self.other_bytes}
        return {
            name: sum(getattr(row, name) for row in self.rows) + other.get(name.removeprefix("dense_"), 0)
            for name in names
        }

    @property
    def dense(self) -> dict[str, str]:
        """The names of dense weights, with the reasons."""
        return {row.name: row.note for row in self.rows if row.block is None}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        content = asdict(self)
        return {**content, "rows": [asdict(row) for row in self.rows], "totals": self.totals}

    def table(self, width: int = 80) -> str:
        """Return the report as text, `width` columns wide unless the figures alone need more."""
        head = ("weight", "shape", "density", "blocks", "params", "memory", "FLOPs", "speed-up")
        body = [
            (
                row.name,
                "x".join(map(str, row.shape)),
                f"{row.density:.3g}",
                "" if row.nnz is None else _count(row.nnz),
                _count(row.parameters),
                _bytes(row.bytes),
                _count(row.flops),
                _ratio(row.speed_up),
            )
            for row in self.rows
        ]
        foot = []
        for title, which in (("the model", ""), ("if dense", "dense_")):
            parameters, size, work = (self.totals[f"{which}{name}"] for name in ("parameters", "bytes", "flops"))
            whole = "" if which else _ratio(self.speed_up)
            total = _count(work) if all(len(row.shape) == 2 for row in self.rows) else ""
            foot.append((title, "", "", "", _count(parameters), _bytes(size), total, whole))
        sizes = [max(map(len, column)) for column in zip(head, *body, *foot, strict=True)]
        right = sum(size + 2 for size in sizes[1:])
        sizes[0] = min(sizes[0], max(width - right, MIN_NAME_WIDTH))

        def line(cells: tuple[str, ...]) -> list[str]:
            # Long names wrap after a dot.
            name, *more = textwrap.wrap(cells[0].replace(".", ". "), sizes[0])
            cells = (name.replace(". ", ".").ljust(sizes[0]), *map(str.rjust, cells[1:], sizes[1:]))
            return ["  ".join(cells).rstrip(), *(f"  {part.replace('. ', '.')}" for part in more)]

        lines = [*line(head), "─" * (sizes[0] + right)]
        for row, cells in zip(self.rows, body, strict=True):
            lines += line(cells)
            if row.note:
                note = row.note if row.note.startswith(row.kind) else f"{row.kind}: {row.note}"
                lines += textwrap.wrap(note, sizes[0] + right, initial_indent="  ", subsequent_indent="  ")
        return "\n".join([*lines, "", *(wrapped for cells in foot for wrapped in line(cells))])

    def __str__(self) -> str:
        return self.table()


@torch.no_grad()
def report(model: nn.Module, tokens: int = 64, example: Example | None = None) -> Report:
    """Report the density, memory, FLOPs and measured speed-up of each weight, and why dense weights are dense.

    The speed-up is measured on one forward call of the module, alternating with the dense module; equal modules are
    timed once. All weights of a recurrent layer get the speed-up of the layer.

    Args:
        model: any module.
        tokens: rows of the inputs to time with (default 64), or steps of a recurrent layer; a convolution gets an image
            with 16 times as many output positions.
        example: inputs of the model to time with instead, as for `sparsify`; the whole model is then timed too.

    Raises:
        BlockSparseError: not a module, a model on the meta device, in 8 bits or not initialized, an invalid number of
            tokens, or an example that the model does not accept.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.Linear(256, 256, density=0.25), torch.nn.Linear(256, 10))
    >>> summary = bs.report(model)
    >>> [(row.name, row.density, row.parameters, row.flops) for row in summary.rows]
    [('0.weight', 0.25, 16384, 32768), ('1.weight', 1.0, 2560, 5120)]
    """
    checked_tokens(tokens)
    if isinstance(model, nn.Module) and any(isinstance(module, QuantizedModule) for module in model.modules()):
        raise BlockSparseError("model: layers in 8 bits have no report. Call bs.report before bs.quantize.")
    dense = {weight.name: (weight, reason) for weight, reason in survey(model)}
    if lazy := next((name for name, each in model.named_parameters() if is_lazy(each)), None):
        raise BlockSparseError.expected(
            "model", "parameters with values (call the model once first)", f"{lazy} without"
        )
    rows: list[Row] = []
    owners = dict(model.named_modules())
    called = {
        module: owner_of(name, module, owners)
        for name, module in owners.items()
        if isinstance(module, BlockSparseModule)
    }
    speed = Speed(model, tokens, example)
    speed.record(called.values())
    counted: set[Tensor] = set()

    def add(row: Row, tensor: Tensor) -> None:
        is_tied = tensor in counted
        counted.add(tensor)
        rows.append(replace(row, parameters=0, dense_parameters=0, bytes=0, dense_bytes=0) if is_tied else row)

    for name, module in owners.items():
        if isinstance(module, BlockSparseModule):
            add(_sparse_row(name, module, called[module], speed), module.values)
            continue
        for key, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            weight, reason = dense.get(f"{name}.{key}" if name else key, (None, None))
            if weight is not None:
                note = getattr(module, REASONS, {}).get(key) or reason or ""
                add(_dense_row(weight.name, module, weight.matrix(), note), weight.tensor)
    parameters = list(model.parameters())
    other = [p for p in parameters if p not in counted]
    speed_up = None
    with suppress(BlockSparseError):  # a layer without a dense counterpart: its row has the reason
        speed_up = speed.of_sparse_model() if called else None
    return Report(
        tuple(rows),
        tokens,
        str(parameters[0].device) if parameters else "cpu",
        sum(p.numel() for p in other),
        sum(_byte_size(p) for p in other),
        speed_up,
    )


def _sparse_row(name: str, module: BlockSparseModule, owner: nn.Module, speed: Speed) -> Row:
    """Return the row of a block-sparse weight of `owner`, the module that is called; timed if it runs here."""
    layout, values = module.layout, module.values
    kind, out, in_ = type(module).__name__, *layout.shape
    if isinstance(module, Weight):
        kind = type(owner).__name__
        if isinstance(owner, MultiWeightModule):
            out, in_ = owner.shape_of(name.rpartition(".")[2])
    else:
        out, in_ = module.weight_shape
        name = dense_name(name, module)
    shape = (out, in_, *values.shape[3:])
    size = _byte_size(values) + _byte_size(module.crow_indices) + _byte_size(module.col_indices)
    sizes = values.numel(), size, values.element_size()
    try:
        return _row(name, kind, shape, sizes, layout=layout, speed_up=speed.of_module(owner))
    except BlockSparseError as error:  # no backend can run it, or it has no dense counterpart
        return _row(name, kind, shape, sizes, layout=layout, note=str(error))


def _dense_row(name: str, module: nn.Module, matrix: Tensor, note: str) -> Row:
    """Return the row of a dense weight with the reason why it is dense."""
    sizes = matrix.numel(), _byte_size(matrix), matrix.element_size()
    flops = 0 if isinstance(module, nn.Embedding | nn.EmbeddingBag) else 2
    return _row(name, type(module).__name__, tuple(matrix.shape), sizes, flops, note=note)


def _row(
    name: str,
    kind: str,
    shape: tuple[int, ...],
    sizes: tuple[int, int, int],
    flops: int = 2,
    *,
    layout: BlockLayout | None = None,
    speed_up: float | None = None,
    note: str = "",
) -> Row:
    """Build a row; `sizes` are the stored parameters, their bytes with indices, and the bytes of one parameter."""
    (stored, size, itemsize), dense = sizes, math.prod(shape)
    blocks: tuple[Any, Any, Any] = (None, 1.0, None)
    if layout is not None:
        blocks = layout.block_shape, layout.density, layout.nnz
    numbers = stored, dense, size, dense * itemsize, flops * stored, flops * dense
    return Row(name, kind, shape, *blocks, *numbers, speed_up, note)


def _byte_size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _count(number: int) -> str:
    """Return a count in three digits with a unit.

    >>> _count(512), _count(16_384), _count(2_359_296)
    ('512', '16.4k', '2.36M')
    """
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}" if number < 999.5 * scale else f"{number / scale:.0f}{unit}"
    return str(number)


def _bytes(count: int) -> str:
    """Return a size of memory in three digits with a unit.

    >>> _bytes(512), _bytes(3 << 20)
    ('512 B', '3 MiB')
    >>> _bytes(1020 << 10)
    '1020 KiB'
    """
    for scale, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << scale:
            number = count / (1 << scale)
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"
    return f"{count} B"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2g}"
