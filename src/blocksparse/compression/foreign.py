"""Reads checkpoints of other sparse libraries: each sparse weight becomes a dense tensor with zeros."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..convert import to_dense
from ..errors import BlockSparseError, first_line
from ..files import path_of, read_json
from ..layout import BlockLayout
from ..state_indices import layout_of_indices

Checkpoint = str | Path | Mapping[str, Any]

FORMATS = "a state dict, a folder or a .safetensors, .pt, .pth or .bin file"
INDEX = "model.safetensors.index.json"

# The tensors of a weight by library, without the weight's name. Those of STK may also have a `size`.
BITMASK = ("compressed", "bitmask", "shape")
STK = ("data", "row_indices", "column_indices", "offsets")
TORCHAO = ("bsr_crow_indices", "bsr_col_indices", "bsr_values")

# Keys of tensors that cannot be read, with what to do instead.
UNREADABLE = {
    r"\.(weight_packed|scale_packed|meta)$": "its values are quantized: decompress it with compressed-tensors first",
    r"\.mask_scores$|\.mask_module\.": "nn_pruning is still training it: call compile_model of its patcher first",
}

# Lines that nn_pruning removes from BERT with heads and hidden units. Zeros in their place compute the same.
REMOVED = re.compile(r"(attention\.self\.(query|key|value)|intermediate\.dense|output\.dense)\.(weight|bias)$")


def read_foreign(checkpoint: Checkpoint, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the state dict of a checkpoint with dense tensors.

    Args:
        checkpoint: a state dict, a file, or a folder of transformers. It may contain the bitmasks of
            compressed-tensors (2:4 or unstructured), sparse tensors of PyTorch, `BlockSparseTensor`s of torchao, and
            STK matrices as objects or as `data`, `row_indices`, `column_indices` and `offsets`.
        shapes: the shapes of the model's tensors, for weights without a size. Weights of BERT that are smaller get
            zeros where nn_pruning removed heads and hidden units.

    Raises:
        BlockSparseError: another kind of file, tensors that are missing or do not fit together, or quantized values.
    """
    state = dict(checkpoint) if isinstance(checkpoint, Mapping) else _read_files(path_of("checkpoint", checkpoint))
    for key in state:
        for pattern, reason in UNREADABLE.items():
            if re.search(pattern, str(key)):
                raise BlockSparseError(f"checkpoint: {key} cannot be read: {reason}.")
    dense: dict[str, Tensor] = {}
    for prefix in _prefixes(state, BITMASK):
        parts = {part: state.pop(f"{prefix}.{part}") for part in BITMASK}
        state.pop(f"{prefix}.row_offsets", None)  # follow from the bitmask
        name = _weight_name(prefix, shapes)
        _check_size(name, parts["shape"], shapes)
        dense[name] = _checked_values(name, _from_bitmask(prefix, **parts))
    for prefix in _prefixes(state, STK):
        parts = {part: state.pop(f"{prefix}.{part}") for part in STK}
        for derived in ("column_indices_t", "offsets_t", "block_offsets_t"):
            state.pop(f"{prefix}.{derived}", None)
        name = _weight_name(prefix, shapes)
        size = state.pop(f"{prefix}.size", shapes.get(name))
        _check_size(name, size, shapes)
        dense[name] = _checked_values(name, _from_stk(prefix, size=size, **parts))
    for key, value in state.items():
        if not (isinstance(value, Tensor) and value.layout == torch.strided) or hasattr(value, TORCHAO[0]):
            _check_size(key, _size_of(key, value), shapes)
            dense[key] = _checked_values(key, _dense(key, value))
        else:
            dense[key] = _checked_dtype(key, value)
            if not value.is_meta and bool(value.isnan().any()):  # buffers may contain inf, such as masks
                raise BlockSparseError.expected(key, "values without nan", "nan")
    return {key: _fill_removed(key, value, shapes.get(key)) for key, value in dense.items()}


def _read_files(path: Path) -> dict[str, Any]:
    """Return the tensors of a file, or of the safetensors files of a folder."""
    if path.is_dir():
        index = path / INDEX
        single = [name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).is_file()][:1]
        names = sorted(set(_weight_map(index).values())) if index.is_file() else single
        if not names:
            expected = f"a folder with model.safetensors, {INDEX} or pytorch_model.bin"
            raise BlockSparseError.expected("checkpoint", expected, path)
        return {key: tensor for name in names for key, tensor in _read_files(path / name).items()}
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix in (".pt", ".pth", ".bin"):
            with torch.sparse.check_sparse_tensor_invariants():
                state = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(state, Mapping):
                return dict(state)
            raise BlockSparseError.expected("checkpoint", "a file with a state dict", type(state).__name__)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        if isinstance(error, BlockSparseError):
            raise
        hint = (
            ". Load it where its library is installed, and pass the state dict" if "weights_only" in str(error) else ""
        )
        raise BlockSparseError.expected("checkpoint", FORMATS, f"{path}: {first_line(error)}{hint}") from error
    raise BlockSparseError.expected("checkpoint", FORMATS, path)


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor in a folder; files outside of it are refused."""
    content = read_json(index, "checkpoint")
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) and Path(name).name == name
                                              for name in names.values()):  # fmt: skip
        raise BlockSparseError.expected(str(index), "a weight_map of file names in the folder", names)
    return names


def _prefixes(state: Mapping[str, Any], parts: Iterable[str]) -> list[str]:
    """Return the prefixes that have a tensor for each part, in their order."""
    first, *others = parts
    prefixes = [key.removesuffix(f".{first}") for key in state if str(key).endswith(f".{first}")]
    return [prefix for prefix in prefixes if all(f"{prefix}.{other}" in state for other in others)]


def _weight_name(prefix: str, shapes: Mapping[str, Any]) -> str:
    """Return the name of the weight whose parts have this prefix."""
    return prefix if prefix in shapes or prefix.endswith("weight") else f"{prefix}.weight"


def _from_bitmask(name: str, compressed: Any, bitmask: Any, shape: Any) -> Tensor:
    """Return the dense weight of compressed-tensors: its values by rows, and a bit for each element, lowest first."""
    size = _size(f"{name}.shape", shape)
    if not isinstance(compressed, Tensor) or not compressed.dtype.is_floating_point or compressed.itemsize == 1:
        got = compressed.dtype if isinstance(compressed, Tensor) else type(compressed).__name__
        raise BlockSparseError.expected(f"{name}.compressed", "values that are not quantized", got)
    width = -(-size[1] // 8)
    if not isinstance(bitmask, Tensor) or bitmask.dtype != torch.uint8 or tuple(bitmask.shape) != (size[0], width):
        got = f"{bitmask.dtype} {list(bitmask.shape)}" if isinstance(bitmask, Tensor) else type(bitmask).__name__
        raise BlockSparseError.expected(f"{name}.bitmask", f"uint8 [{size[0]}, {width}] for the shape {size}", got)
    _check_stored(f"{name}.compressed", compressed)
    _check_stored(f"{name}.bitmask", bitmask)
    bits = np.unpackbits(bitmask.cpu().numpy(), axis=1, count=size[1], bitorder="little")
    mask = torch.from_numpy(bits).to(compressed.device, torch.bool)
    if int(mask.sum()) != compressed.numel():
        raise BlockSparseError.expected(f"{name}.compressed", f"{int(mask.sum())} values", compressed.numel())
    return compressed.new_zeros(size).masked_scatter_(mask, compressed)


def _from_stk(name: str, data: Any, row_indices: Any, column_indices: Any, offsets: Any, size: Any) -> Tensor:
    """Return the dense weight of an STK matrix: blocks in the order of their rows, with the start of each row."""
    shape = _size(f"{name}.size", size)
    block = _block(f"{name}.data", data, shape)
    grid = shape[0] // block[0], shape[1] // block[1]
    order = np.argsort(_integers(f"{name}.row_indices", row_indices) * grid[1]
                       + _integers(f"{name}.column_indices", column_indices), kind="stable")  # fmt: skip
    columns = _integers(f"{name}.column_indices", column_indices)
    if order.size != len(data):
        raise BlockSparseError.expected(f"{name}.row_indices", f"{len(data)} rows", order.size)
    layout = layout_of_indices(_integers(f"{name}.offsets", offsets), columns[order], grid, block)
    if not np.array_equal(layout.row_of_block, _integers(f"{name}.row_indices", row_indices)[order]):
        raise BlockSparseError.expected(f"{name}.row_indices", f"the rows of {name}.offsets", "others")
    return to_dense(data[torch.from_numpy(order)], layout)


def _dense(name: str, value: Any) -> Tensor:
    """Return a value of a state dict as a dense tensor."""
    if all(hasattr(value, part) for part in TORCHAO):
        shape = _size(f"the size of {name}", _size_of(name, value))
        block = _block(name, value.bsr_values, shape)
        grid = shape[0] // block[0], shape[1] // block[1]
        crow, col = (_integers(f"{name}.{part}", getattr(value, part)) for part in TORCHAO[:2])
        layout = layout_of_indices(crow, col, grid, block)
        return to_dense(value.bsr_values.detach(), layout)
    if all(hasattr(value, part) for part in STK) and not isinstance(value, Tensor):
        return _from_stk(name, **{part: getattr(value, part) for part in STK}, size=_size_of(name, value))
    for part in _parts(value):
        _check_stored(name, part)
    if value.layout == torch.sparse_bsr:
        layout, values = BlockLayout.from_torch_bsr(value.detach())
        return to_dense(values, layout)
    try:
        with torch.sparse.check_sparse_tensor_invariants():
            return _checked(value.detach()).to_dense()
    except (RuntimeError, NotImplementedError) as error:
        raise BlockSparseError.expected(name, "a valid sparse tensor", first_line(error)) from error


def _parts(value: Tensor) -> tuple[Tensor, ...]:
    """Return the indices and values of a sparse tensor."""
    if value.layout == torch.sparse_coo:
        return value._indices(), value._values()
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return value.crow_indices(), value.col_indices(), value.values()
    return ()


def _check_stored(name: str, value: Tensor) -> None:
    """Raise a BlockSparseError unless all elements of a tensor are in memory, so that a copy is as small."""
    is_dense = value.layout == torch.strided and not value.is_meta
    if not is_dense or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        got = f"{value.layout} {list(value.shape)} on {value.device}"
        raise BlockSparseError.expected(name, "a dense tensor with all its elements in memory", got)


def _checked_dtype(name: str, value: Tensor) -> Tensor:
    """Return a tensor that is not complex; a model's weights would keep its real part only."""
    if value.is_complex():
        raise BlockSparseError.expected(name, "real values", value.dtype)
    return value


def _checked_values(name: str, value: Tensor) -> Tensor:
    """Return a weight of finite, real values."""
    if not bool(_checked_dtype(name, value).isfinite().all()):
        raise BlockSparseError.expected(name, "finite values", "inf or nan")
    return value


def _checked(value: Tensor) -> Tensor:
    """Return a sparse tensor again, with checked indices."""
    if value.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(value._indices(), value._values(), value.shape)
    if value.layout == torch.sparse_csr:
        return torch.sparse_csr_tensor(value.crow_indices(), value.col_indices(), value.values(), value.shape)
    raise RuntimeError(f"{value.layout}: call to_dense() first")


def _size_of(name: str, value: Any) -> Any:
    """Return the size of a tensor or of an STK matrix."""
    if not hasattr(value, "size") or isinstance(value, np.ndarray):
        raise BlockSparseError.expected(f"checkpoint[{name!r}]", "a tensor", type(value).__name__)
    return value.size() if callable(value.size) else value.size


def _check_size(name: str, size: Any, shapes: Mapping[str, torch.Size]) -> None:
    """Raise a BlockSparseError unless the model has a weight of this name and size, so that it is safe to make dense.

    A weight from which nn_pruning removed lines is smaller.
    """
    if name not in shapes:
        raise BlockSparseError.expected("checkpoint", "weights of the model", name)
    rows_and_columns = tuple(_size(f"the size of {name}", size))
    full = tuple(shapes[name])
    if rows_and_columns != full and not (REMOVED.search(name) and all(map(le, rows_and_columns, full))):
        raise BlockSparseError.expected(f"the size of {name}", f"{full}", rows_and_columns)


def _fill_removed(name: str, value: Tensor, shape: torch.Size | None) -> Tensor:
    """Add zeros in place of the heads and hidden units that nn_pruning removed; they compute nothing."""
    if shape is None or value.shape == shape or value.dim() != len(shape) or not REMOVED.search(name):
        return value
    if any(size > full for size, full in zip(value.shape, shape, strict=True)):
        return value
    added = [(0, full - size) for size, full in zip(value.shape, shape, strict=True)]
    return F.pad(value, [count for pair in reversed(added) for count in pair])


def _size(name: str, value: Any) -> tuple[int, int]:
    """Return (rows, columns) of a weight from a tensor or sequence."""
    numbers = value
    if isinstance(value, Tensor):
        numbers = (
            value.flatten().tolist() if value.numel() < 9 and not value.is_meta else f"{list(value.shape)} numbers"
        )
    try:
        rows, columns = (int(number) for number in numbers)
    except (TypeError, ValueError, OverflowError):
        rows = columns = 0
    if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
        raise BlockSparseError.expected(name, "two positive ints", numbers)
    return rows, columns


def _block(name: str, values: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the block size of values `[nnz, rows, columns]` that divides a shape."""
    is_valid = isinstance(values, Tensor) and values.dim() == 3 and len(shape) == 2 and 0 not in values.shape[1:]
    if not is_valid or shape[0] % values.shape[1] or shape[1] % values.shape[2]:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BlockSparseError.expected(name, f"blocks [nnz, rows, columns] that divide {tuple(shape)}", got)
    _check_stored(name, values)
    return values.shape[1], values.shape[2]


def _integers(name: str, value: Any) -> np.ndarray:
    """Return a vector of ints from a tensor."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.is_floating_point() or value.dtype == torch.bool:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BlockSparseError.expected(name, "a vector of ints", got)
    _check_stored(name, value)
    return value.cpu().numpy().astype(np.int64)
