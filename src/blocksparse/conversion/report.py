"""Reports on a model's weights, dense and block-sparse: numbers, bytes, work, speed."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..checked import integer
from ..nn.module import BlockSparseModule, Weight
from ..nn.recurrent import Recurrent
from ..surgery.prunable import survey
from .sparsify import REASONS
from .speed import speed_up_of_module

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One weight.

    Args:
        name: of the weight as it is called where it is dense.
        kind: of the module that has it.
        shape: `(out, in, *kernel)`, without padding.
        block: (rows, columns), None where it is dense.
        density, nnz: of its layout; of a dense weight 1 and None.
        parameters, dense_parameters: numbers stored (with the padding of blocks), and numbers of the dense weight.
        bytes, dense_bytes: of these, with the indices of the blocks.
        flops, dense_flops: for one token, two for each stored number; of a convolution for one position of the output;
            of a table that is looked up none.
        speed_up: time of the dense layer / time of this one, forward; None where it is dense.
        note: why it was left dense.
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
    """The weights of a model, as `report` makes it.

    Args:
        rows: of the weights, in the model's order.
        tokens: rows of the inputs that speed was measured with.
        device: of the weights.
        other_parameters, other_bytes: of biases, norms and whatever else is no weight.
    """

    rows: tuple[Row, ...]
    tokens: int
    device: str
    other_parameters: int
    other_bytes: int

    @property
    def totals(self) -> dict[str, int]:
        """Totals of the model: parameters, bytes and flops, as they are and if all weights were dense."""
        names = ("parameters", "dense_parameters", "bytes", "dense_bytes", "flops", "dense_flops")
        other = {"parameters": self.other_parameters, "bytes": self.other_bytes}
        return {
            name: sum(getattr(row, name) for row in self.rows) + other.get(name.removeprefix("dense_"), 0)
            for name in names
        }

    @property
    def dense(self) -> dict[str, str]:
        """The weights that are dense, with the reason."""
        return {row.name: row.note for row in self.rows if row.block is None}

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        content = asdict(self)
        return {**content, "rows": [asdict(row) for row in self.rows], "totals": self.totals}

    def table(self) -> Table:
        """For the console of the library rich."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, header_style="dim", pad_edge=False, show_edge=False)
        names = (
            "weight",
            "module",
            "shape",
            "density",
            "blocks",
            "parameters",
            "memory",
            "FLOPs per token",
            "speed-up",
        )
        for name in (*names, "note"):
            words = name in ("weight", "module", "note")
            table.add_column(name, justify="left" if words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(
                row.name,
                row.kind,
                " x ".join(map(str, row.shape)),
                f"{row.density:.3g}",
                "" if row.nnz is None else f"{row.nnz:,}",
                f"{row.parameters:,}",
                _bytes(row.bytes),
                f"{row.flops:,}",
                "" if row.speed_up is None else f"{row.speed_up:.2g}",
                row.note,
            )
        table.add_section()
        for title, which in (("the model", ""), ("if it were dense", "dense_")):
            numbers, size, work = (self.totals[f"{which}{name}"] for name in ("parameters", "bytes", "flops"))
            table.add_row(title, "", "", "", "", f"{numbers:,}", _bytes(size), f"{work:,}", "", "")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=240).print(self.table())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@torch.no_grad()
def report(model: nn.Module, tokens: int = 64) -> Report:
    """Reports on each weight of a model: density, memory, work, measured speed-up, and why it is dense if it is.

    The speed-up of a layer is that of one forward call, alternating with the dense layer; equal layers are measured
    once. That of a weight of a recurrent layer is of the product in one step.

    Args:
        model: any module.
        tokens: rows of the inputs to measure with; positions of the output of a convolution.

    Raises:
        BlockSparseError: no module, one on the meta device, or no positive number of tokens.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.Linear(256, 256, density=0.25), torch.nn.Linear(256, 10))
    >>> made = bs.report(model)
    >>> [(row.name, row.density, row.parameters, row.flops) for row in made.rows]
    [('0.weight', 0.25, 16384, 32768), ('1.weight', 1.0, 2560, 5120)]
    """
    integer("tokens", tokens, 1)
    dense = {weight.name: (weight, reason) for weight, reason in survey(model)}
    rows = []
    owners = dict(model.named_modules())
    for name, module in owners.items():
        if isinstance(module, BlockSparseModule):
            rows.append(_sparse_row(name, module, owners, tokens))
            continue
        for key, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            weight, reason = dense.get(f"{name}.{key}" if name else key, (None, None))
            if weight is not None:
                note = getattr(module, REASONS, {}).get(key) or reason or ""
                rows.append(_dense_row(weight.name, module, weight.matrix(), note))
    parameters = list(model.parameters())
    stored: set[Tensor] = {module.values for module in owners.values() if isinstance(module, BlockSparseModule)}
    stored |= {weight.tensor for weight, _ in dense.values()}
    other = [p for p in parameters if p not in stored]
    return Report(
        tuple(rows),
        tokens,
        str(parameters[0].device) if parameters else "cpu",
        sum(p.numel() for p in other),
        sum(_size(p) for p in other),
    )


def _sparse_row(name: str, module: BlockSparseModule, owners: dict[str, nn.Module], tokens: int) -> Row:
    layout, values = module.layout, module.values
    kernel = tuple(values.shape[3:])
    kind, out, in_ = type(module).__name__, *layout.shape
    if isinstance(module, Weight):
        parent, _, key = name.rpartition(".")
        owner = owners[parent]
        kind = type(owner).__name__
        if isinstance(owner, Recurrent):
            out, in_ = owner.shape_of(key)
        shown = name
    else:
        out, in_ = module.weight_shape
        shown = f"{name}.weight" if name else "weight"
    dense = out * in_ * math.prod(kernel)
    size = _size(values) + _size(module.crow_indices) + _size(module.col_indices)
    return Row(
        shown,
        kind,
        (out, in_, *kernel),
        layout.block_shape,
        layout.density,
        layout.nnz,
        values.numel(),
        dense,
        size,
        dense * values.element_size(),
        2 * values.numel(),
        2 * dense,
        speed_up_of_module(module, tokens) or None,
        "",
    )


def _dense_row(name: str, module: nn.Module, matrix: Tensor, note: str) -> Row:
    count, size = matrix.numel(), _size(matrix)
    flops = 0 if isinstance(module, nn.Embedding | nn.EmbeddingBag) else 2 * count
    return Row(
        name,
        type(module).__name__,
        tuple(matrix.shape),
        None,
        1.0,
        None,
        count,
        count,
        size,
        size,
        flops,
        flops,
        None,
        note,
    )


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(count: int) -> str:
    """
    >>> _bytes(512), _bytes(3 << 20)
    ('512 B', '3 MiB')
    """
    for scale, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << scale:
            return f"{count / (1 << scale):.3g} {unit}"
    return f"{count} B"
