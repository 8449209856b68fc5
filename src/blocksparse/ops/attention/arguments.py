"""Checks of the arguments of attention; they raise BlockSparseErrors that say what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...checked import is_int, shape_of
from ...errors import BlockSparseError
from ...layout import BlockLayout, check_layout
from ..checks import SUM_DTYPES
from ..graph_layout import DynamicLayout
from ..registry import in_transform


def check_operands(q: Any, k: Any, v: Any, layout: Any) -> tuple[list[BlockLayout], int]:
    """Check the tensors and layouts; return one layout if all are equal, else one per head, and the first query's row.

    The row is 0, or the number of keys before the queries if the layout is that of the whole sequence.
    """
    check_tensors(q, k, v)
    batch, heads, queries, _ = q.shape
    layouts = list(layout) if isinstance(layout, Sequence) else [layout]
    if isinstance(layout, Sequence) and len(layouts) != heads:
        expected = f"one for each of {heads} heads, or for each of {batch} x {heads} heads and sequences"
        raise BlockSparseError.expected("layout", expected, f"{len(layouts)} layouts")
    if not layouts:
        raise BlockSparseError.expected("layout", "a BlockLayout, since q has no heads", "an empty list")
    rows = set()
    for each in layouts:
        check_layout(each)
        rows.add(_first_row(each, queries, k.shape[2]))
    if len(rows) != 1:
        expected = f"layouts of {queries} queries, or all of {k.shape[2]} queries as of the keys"
        raise BlockSparseError.expected("layout", expected, [each.shape for each in layouts])
    if len(layouts) > 1 and not has_dynamic(layouts) and _all_equal(*layouts):
        layouts = layouts[:1]
    return layouts, rows.pop()


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise a BlockSparseError unless q, k and v have shapes, dtypes and devices that fit each other."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise BlockSparseError.expected(name, "a tensor [batch, heads, tokens, d]", shape_of(tensor))
        if tensor.dtype not in SUM_DTYPES:
            raise BlockSparseError.expected(name, "float32, float64, bfloat16 or float16", tensor.dtype)
        if tensor.dtype != q.dtype or tensor.device != q.device:
            expected = f"the dtype and the device of q, {q.dtype} and {q.device}"
            raise BlockSparseError.expected(name, expected, f"{tensor.dtype} and {tensor.device}")
    batch, heads, _, d = q.shape
    if k.shape[0] != batch or k.shape[3] != d:
        raise BlockSparseError.expected("k", f"[{batch}, heads, keys, {d}], as of q", list(k.shape))
    if k.shape[1] != heads and (k.shape[1] == 0 or heads % k.shape[1]):
        expected = f"[{batch}, {heads}, keys, {d}], as of q, or fewer heads that divide {heads}"
        raise BlockSparseError.expected("k", expected, list(k.shape))
    # Separate comparisons, because a graph with dynamic sizes has a node for each.
    if v.shape[0] != batch or v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
        raise BlockSparseError.expected("v", f"[{batch}, {k.shape[1]}, {k.shape[2]}, d_v], as of k", list(v.shape))


def _first_row(layout: BlockLayout, queries: int, keys: int) -> int:
    """Return the layout's row of the first query; raise a BlockSparseError if the layout has another shape."""
    height, width = layout.block_shape
    rows, columns = layout.shape
    if columns - width < keys <= columns:
        if queries < keys and rows - height < keys <= rows:
            return keys - queries
        if rows - height < queries <= rows:
            return 0
    raise _other_shape(layout, queries, keys)


def has_dynamic(layouts: Sequence[BlockLayout]) -> bool:
    """Return whether a layout is an input of a compiled graph, whose blocks are not known."""
    return any(isinstance(layout, DynamicLayout) for layout in layouts)


def _all_equal(*layouts: BlockLayout) -> bool:
    return len(set(layouts)) == 1


# Dynamo calls this function, because it cannot trace how layouts are compared.
_all_equal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _other_shape(layout: BlockLayout, queries: int, keys: int) -> BlockSparseError:
    """Return the error for a layout of a wrong shape, with the best remedy."""
    if not queries or not keys:
        return BlockSparseError.expected("k" if queries else "q", "1 or more tokens", 0)
    height, width = layout.block_shape
    rows, columns = -(-queries // height) * height, -(-keys // width) * width
    expected = f"the shape (queries, keys) = ({queries}, {keys})"
    if (rows, columns) != (queries, keys):
        expected += f" in whole blocks, ({rows}, {columns})"
    whole = -(-keys // height) * height
    if rows <= layout.shape[0] and columns <= layout.shape[1]:
        remedy = f"pass layout.crop({rows}, {columns})"
        if rows < whole <= layout.shape[0]:
            remedy = f"pass layout.crop({whole}, {columns}) if the queries are the last ones, else layout.crop({rows}, "
            remedy += f"{columns})"
    else:
        remedy = "make a layout for the longest inputs, and use layout.crop(queries, keys) for others"
    if block := _fitting_block(layout, queries, keys):
        remedy += f"; if block_size was forgotten, {layout.grid[0]} x {layout.grid[1]} blocks need block_size={block}"
    return BlockSparseError.expected("layout", f"{expected}: {remedy}", repr(layout))


def _fitting_block(layout: BlockLayout, queries: int, keys: int) -> int | None:
    """Return the size of square blocks with which the layout's grid fits, a power of two if one does; else None."""
    rows, columns = layout.grid
    if columns < 2:
        return None
    low, high = -(-keys // columns), (keys - 1) // (columns - 1)
    power = 1 << max(high.bit_length() - 1, 0)
    block = power if power >= low else low
    fits = low <= high and rows in (-(-queries // block), -(-keys // block))
    return block if fits else None


def check_window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """Return the keys that a query sees before and after its position, None for all."""
    pair = (-1, -1) if window_size is None else window_size
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(is_int(n) and n >= -1 for n in pair):
        expected = "a pair (left, right) of ints from -1 on; -1 stands for all keys on that side"
        raise BlockSparseError.expected("window_size", expected, repr(window_size))
    left, right = (None if n < 0 else int(n) for n in pair)
    return left, 0 if causal else right


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Check the scores of sinks."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or list(sinks.shape) != [q.shape[1]] or not sinks.is_floating_point():
        raise BlockSparseError.expected("sinks", f"a tensor [{q.shape[1]}], one score per head", shape_of(sinks))
    if sinks.device != q.device:
        raise BlockSparseError.expected("sinks", f"on the device of q, {q.device}", sinks.device)


def check_documents(cu_seqlens: Any, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return the borders of documents as a tensor on the device."""
    if cu_seqlens is None:
        return None
    borders = _ints("cu_seqlens", cu_seqlens, "[documents + 1]", device)
    if len(borders) < 2 or queries > keys:
        got = f"{len(borders)} borders for {queries} queries and {keys} keys"
        raise BlockSparseError.expected("cu_seqlens", "2 or more borders, and a key for each query", got)
    if _can_read(borders):
        first, last = int(borders[0]), int(borders[-1])
        if first != 0 or last != keys or (borders.diff() < 0).any():
            expected = f"ascending ints from 0 to the {keys} keys (add a last document for padding)"
            raise BlockSparseError.expected("cu_seqlens", expected, borders.tolist())
    return borders


def check_lengths(lengths: Any, q: Tensor, keys: int) -> Tensor | None:
    """Return the lengths of padded sequences as a tensor on the device of q."""
    if lengths is None:
        return None
    numbers = _ints("lengths", lengths, f"[{q.shape[0]}], one for each sequence of the batch", q.device)
    if len(numbers) != q.shape[0]:
        expected = f"[{q.shape[0]}], one for each sequence of the batch (for packed documents, use cu_seqlens)"
        raise BlockSparseError.expected("lengths", expected, list(numbers.shape))
    if _can_read(numbers) and ((numbers < 0) | (numbers > keys)).any():
        raise BlockSparseError.expected("lengths", f"ints from 0 to the {keys} keys", numbers.tolist())
    return numbers


def _ints(name: str, value: Any, expected: str, device: torch.device) -> Tensor:
    """Return a vector of ints as a tensor on the device."""
    if isinstance(value, list | tuple) and all(map(is_int, value)):
        return torch.tensor(value, dtype=torch.int32, device=device)
    is_tensor = isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 1
    if not is_tensor or value.device != device:
        got = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise BlockSparseError.expected(name, f"ints {expected}, a list or a tensor on {device}", got)
    return value  # type: ignore[no-any-return]


def _can_read(tensor: Tensor) -> bool:
    """Return whether the host can read the tensor's numbers without waiting for a device."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not in_transform()
