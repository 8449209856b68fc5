"""The layout of a weight: which of its blocks exist, as an immutable, hashable value independent of any device."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from .bsr import import_scipy_sparse, read_scipy_bsr, read_torch_bsr
from .checked import (
    checked_array,
    checked_block,
    checked_block_slices,
    checked_grid,
    checked_mask,
    checked_pairs,
    is_int,
)
from .errors import BlockSparseError
from .indices import (
    LARGE,
    PicklableRef,
    Replacement,
    check_unique,
    checked_replacement,
    compress,
    copy_to_read_only,
    copy_to_tensor,
    index_dtype,
    is_hypersparse,
    part_of_layout,
    replaced_indices,
)
from .optional_torch import has_torch, tensor_or_array, torch

__all__ = ["BlockLayout", "check_layout", "import_scipy_sparse"]

Made = TypeVar("Made")


class BlockLayout:
    """The positions of the blocks that a weight `[out_features, in_features]` stores.

    A weight is a layout and a tensor `values` `[nnz, block_out, block_in]`. The blocks in `values` are sorted by row,
    then by column, as in a `torch.sparse_bsr` tensor. Layouts compare and hash by content.

    Args:
        mask: bool `[out_blocks, in_blocks]` (tensor, array or nested lists), True where a block is stored. Integers
            are accepted if all are 0 or 1, floating-point numbers are not.
        block_size: a pair (rows, columns) of a block in features, or one int for both.

    Raises:
        BlockSparseError: the mask is not a 2-D 0/1 matrix, or the block size is not positive.

    Example:
        >>> import blocksparse as bs
        >>> layout = bs.BlockLayout([[True, False, True], [False, False, True]], block_size=(16, 32))
        >>> layout
        BlockLayout(shape=(32, 96), block_size=(16, 32), nnz=3, density=0.5)
        >>> layout.crow_indices(), layout.col_indices()
        (tensor([0, 2, 3], dtype=torch.int32), tensor([0, 2, 2], dtype=torch.int32))
        >>> layout.T.shape
        (96, 32)
    """

    grid: tuple[int, int]
    """(out_blocks, in_blocks)."""
    block_shape: tuple[int, int]
    """(rows, columns) of a block, in features."""
    nnz: int
    """The number of stored blocks."""
    # Attributes, not properties, because each product reads them.
    shape: tuple[int, int]
    """(out_features, in_features) of the weight."""
    values_shape: tuple[int, int, int]
    """(nnz, block_out, block_in): the shape of the values of a linear weight."""

    _col: np.ndarray
    _crow: np.ndarray | None  # row starts; a hypersparse layout makes them when they are read first
    _rows: np.ndarray | None  # the row of each block, made when it is read first
    _transposed: tuple[BlockLayout, np.ndarray] | None
    _hash: int | None
    _derived: dict[Hashable, Any]
    _indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, mask: Any, block_size: int | tuple[int, int] = 32):
        mask = checked_mask(mask)
        self._fill(*compress(np.flatnonzero(mask), mask.shape), mask.shape, checked_block(block_size))

    @classmethod
    def from_indices(
        cls, rows: Any, cols: Any, grid: tuple[int, int], block_size: int | tuple[int, int] = 32
    ) -> BlockLayout:
        """Make a layout from block coordinates, without a dense mask.

        Args:
            rows, cols: integer vectors of equal length, the row and column of each stored block, in any order.
            grid: (out_blocks, in_blocks).
            block_size: as for the class.

        Raises:
            BlockSparseError: an index is out of range, a block occurs twice, or the lengths differ.

        >>> import blocksparse as bs
        >>> bs.BlockLayout.from_indices([250_000 - 1, 0], [7, 9], grid=(250_000, 250_000), block_size=1)
        BlockLayout(shape=(250000, 250000), block_size=(1, 1), nnz=2, density=3.2e-11)
        """
        grid = checked_grid(grid)
        rows, cols = checked_pairs(rows, cols, grid)
        keys = rows * grid[1]
        keys += cols
        if np.any(keys[1:] <= keys[:-1]):
            keys.sort()
            check_unique(keys, grid)
        return cls._from_keys(keys, grid, checked_block(block_size))

    @classmethod
    def _from_keys(cls, keys: np.ndarray, grid: tuple[int, int], block: tuple[int, int]) -> BlockLayout:
        """Make a layout from sorted block numbers, row * in_blocks + column, int64 `[nnz]`."""
        layout = cls.__new__(cls)
        layout._fill(*compress(keys, grid), grid, block)
        return layout

    def _fill(self, lines: np.ndarray, col: np.ndarray, grid: tuple[int, int], block: tuple[int, int]) -> None:
        """Set all attributes; `lines` are the row starts or, if the layout is hypersparse, the row of each block."""
        if "grid" in self.__dict__:
            raise AttributeError("a layout cannot be changed: make a new one instead of calling __init__ again")
        if max(grid[0] * block[0], grid[1] * block[1]) >= 2**63:
            raise BlockSparseError.expected("shape", "fewer than 2^63 features", f"{grid} blocks of {block}")
        hypersparse = is_hypersparse(len(col), grid)
        # Bypasses __setattr__, which keeps a layout from being changed.
        self.__dict__.update(
            grid=(int(grid[0]), int(grid[1])),
            block_shape=block,
            shape=(int(grid[0]) * block[0], int(grid[1]) * block[1]),
            values_shape=(len(col), *block),
            nnz=len(col),  # an int of its own: torch.compile would make a tensor of the array `_col` to read its length
            _col=copy_to_read_only(col),
            _crow=None if hypersparse else copy_to_read_only(lines),
            _rows=copy_to_read_only(lines) if hypersparse else None,
            _transposed=None,
            _hash=None,
            _derived={},
            _indices={},
        )
        if has_torch and not hypersparse:
            self.indices_on("cpu")  # now, because torch.compile cannot trace how they are made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a layout cannot be changed: make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a layout cannot be changed: make a new one instead of deleting {name!r}")

    def _tag(self, crow: torch.Tensor, col: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Ops have index tensors as arguments, for self-contained graphs. This leads back to the layout and its plans.
        col._blocksparse_layout = PicklableRef(self)  # type: ignore[attr-defined]
        return crow, col

    @property
    def density(self) -> float:
        """Stored blocks / all blocks of the grid."""
        return self.nnz / (self.grid[0] * self.grid[1])

    def mask(self) -> torch.Tensor:
        """Return the dense bool mask `[out_blocks, in_blocks]`, a new tensor (a numpy array without PyTorch)."""
        mask = np.zeros(self.grid, dtype=bool)
        mask[self.row_of_block, self.col_of_block] = True
        return tensor_or_array(mask)  # type: ignore[no-any-return]

    def crow_indices(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return where each block row starts, `[out_blocks + 1]`, int32 (int64 from 2^31 blocks), a new tensor.

        Without PyTorch this and the other results that are tensors are numpy arrays.
        """
        if not has_torch:
            return self.row_start.copy()  # type: ignore[return-value]
        with torch.inference_mode(False):
            return self.indices_on(device)[0].clone()

    def col_indices(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the block column of each stored block, `[nnz]`, dtype as `crow_indices`, a new tensor."""
        if not has_torch:
            return self._col.copy()  # type: ignore[return-value]
        with torch.inference_mode(False):
            return self.indices_on(device)[1].clone()

    def indices_on(self, device: torch.device | str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both index tensors on a device, cached for the library's ops, which must not write to them."""
        device = torch.device("cpu" if device is None else device)
        if device.type == "cuda" and device.index is None:  # the current one may change
            device = torch.device("cuda", torch.cuda.current_device())
        indices = self._indices.get(device)
        if indices is None and device.type == "cpu":
            indices = self._tag(copy_to_tensor(self.row_start), copy_to_tensor(self._col))
            self._indices[device] = indices
        elif indices is None:
            crow, col = self.indices_on("cpu")
            with torch.inference_mode(False):  # inference tensors could not be used in training later
                indices = self._tag(crow.to(device), col.to(device))
            if type(indices[1]) is torch.Tensor:  # a fake tensor must not outlive its tracing mode
                self._indices[device] = indices
        return indices

    @property
    def row_start(self) -> np.ndarray:
        """Where each block row starts, `[out_blocks + 1]`, read-only."""
        if self._crow is None:
            crow = np.zeros(self.grid[0] + 1, dtype=self._col.dtype)
            rows, counts = np.unique(self.row_of_block, return_counts=True)
            crow[rows + 1] = counts
            self.__dict__["_crow"] = copy_to_read_only(np.cumsum(crow, dtype=crow.dtype, out=crow))
        return self._crow  # type: ignore[return-value]

    @property
    def col_of_block(self) -> np.ndarray:
        """The block column of each stored block, `[nnz]`, read-only."""
        return self._col

    @property
    def row_of_block(self) -> np.ndarray:
        """The block row of each stored block, int64 `[nnz]`, read-only; not cached for a large layout."""
        rows = self._rows
        if rows is None:
            rows = np.repeat(np.arange(self.grid[0], dtype=np.int64), np.diff(self.row_start))
            rows.flags.writeable = False
            if self.nnz < LARGE:
                self.__dict__["_rows"] = rows = copy_to_read_only(rows)
        return rows

    @property
    def T(self) -> BlockLayout:
        """The layout of the transposed weight."""
        return (self._transposed or self._transpose())[0]

    @property
    def transpose_order(self) -> np.ndarray:
        """For each block of `layout.T`, its position in this layout, int64 `[nnz]`, a new array."""
        return (self._transposed or self._transpose())[1].copy()

    def _transpose(self) -> tuple[BlockLayout, np.ndarray]:
        """Make the transposed layout and its order, and store them in both layouts."""
        if self.grid[1] * self.nnz < 2**63:  # sorting takes a tenth of the time of a stable argsort
            keys = np.multiply(self._col, self.nnz, dtype=np.int64)  # NumPy 1 would keep int32
            keys += np.arange(self.nnz)
            keys.sort()
            order = keys % max(self.nnz, 1)
        else:
            order = np.argsort(self._col, kind="stable")
        index = index_dtype(self.nnz, self.grid[0])
        if is_hypersparse(self.nnz, self.grid[::-1]):
            lines = self._col[order].astype(np.int64)
        else:
            lines = np.zeros(self.grid[1] + 1, dtype=index)
            np.cumsum(np.bincount(self._col, minlength=self.grid[1]), out=lines[1:])
        other = BlockLayout.__new__(BlockLayout)
        other._fill(lines, self.row_of_block[order].astype(index), self.grid[::-1], self.block_shape[::-1])
        inverse = np.empty_like(order)
        inverse[order] = np.arange(order.size)
        other.__dict__["_transposed"] = self, inverse
        self.__dict__["_transposed"] = other, order
        return other, order

    def select(self, keep: Any) -> BlockLayout:
        """Return the layout of some of the blocks; their values are `values[keep]`.

        Args:
            keep: bool `[nnz]` (tensor, array or list), True for the blocks to keep.

        Raises:
            BlockSparseError: `keep` has another length or dtype.

        >>> import torch, blocksparse as bs
        >>> layout = bs.BlockLayout([[True, False], [True, True]], block_size=1)
        >>> gate = torch.tensor([0.5, 0.0, 2.0])
        >>> layout.select(gate != 0).mask()
        tensor([[ True, False],
                [False,  True]])
        """
        keep = checked_array("keep", "a bool vector", keep)
        if keep.dtype != bool or keep.shape != (self.nnz,):
            got = f"{keep.dtype} {list(keep.shape)}"
            raise BlockSparseError.expected("keep", f"bool [{self.nnz}] for {self!r}", got)
        return BlockLayout._from_keys(self.keys_of_blocks()[keep], self.grid, self.block_shape)

    def crop(self, rows: int, columns: int) -> BlockLayout:
        """Return the layout of the first rows and columns, for example an attention mask for shorter inputs.

        Args:
            rows, columns: how many to keep, in features (for attention: queries and keys). They must be multiples of
                the block and not exceed `shape`.

        Raises:
            BlockSparseError: a size is below 1, exceeds the layout, or is not a multiple of the block.

        >>> import blocksparse as bs
        >>> layout = bs.patterns.butterfly((256, 256), block_size=32)
        >>> layout.crop(96, 128)
        BlockLayout(shape=(96, 128), block_size=(32, 32), nnz=9, density=0.75)
        """
        sizes = zip(("rows", "columns"), (rows, columns), self.block_shape, self.shape, strict=True)
        for name, size, block, most in sizes:
            if not is_int(size) or not 0 < size <= most or size % block:
                expected = f"a multiple of the block, {block}, up to the {most} of {self!r}"
                raise BlockSparseError.expected(name, expected, repr(size))
        return self[: int(rows) // self.block_shape[0], : int(columns) // self.block_shape[1]]

    __iter__ = None  # otherwise Python would count up the index of `__getitem__`

    def __getitem__(self, key: Any) -> BlockLayout:
        """Return the layout of some rows and columns of blocks, given as slices or ints.

        Raises:
            BlockSparseError: an index is no int and no slice with step 1, or no block row or column is left.

        >>> import blocksparse as bs
        >>> layout = bs.BlockLayout([[True, False, True], [False, True, True]], block_size=8)
        >>> layout[1, 1:].mask()
        tensor([[True, True]])
        """
        (top, bottom), (left, right) = checked_block_slices(key, self.grid)
        part: BlockLayout = part_of_layout(self, top, bottom, left, right)
        return part

    def __or__(self, other: object) -> BlockLayout:
        """Return the layout of the blocks of either layout; both must have one grid and block size."""
        return self._combine(other, "|", np.union1d)

    def __and__(self, other: object) -> BlockLayout:
        """Return the layout of the blocks of both layouts, which must have one grid and block size."""
        return self._combine(other, "&", np.intersect1d)

    def _combine(self, other: object, sign: str, combine: Callable[..., np.ndarray]) -> BlockLayout:
        if not isinstance(other, BlockLayout):
            return NotImplemented  # type: ignore[no-any-return]
        if (self.grid, self.block_shape) != (other.grid, other.block_shape):
            raise BlockSparseError.expected(f"layout {sign} layout", f"the grid and block size of {self!r}", other)
        return self._from_keys(combine(self.keys_of_blocks(), other.keys_of_blocks()), self.grid, self.block_shape)

    def replaced(self, drop: Any, rows: Any, cols: Any) -> tuple[BlockLayout, torch.Tensor]:
        """Return the layout without some blocks and with others, and where each of its blocks comes from.

        Args:
            drop: integer vector, the positions of the blocks to remove.
            rows, cols: integer vectors of equal length, the row and column of each block to add, in any order. A block
                that this call removes can be added again.

        Returns:
            The new layout, and int64 `[nnz]` on the CPU: the position in this layout of each block of the new one, -1
            for added blocks.

        Raises:
            BlockSparseError: a position or an index is out of range, or occurs twice; a block to add is in the layout
                and not removed.

        >>> import blocksparse as bs
        >>> layout = bs.BlockLayout([[True, False], [True, True]], block_size=1)
        >>> layout.replaced(drop=[1], rows=[0], cols=[1])
        (BlockLayout(shape=(2, 2), block_size=(1, 1), nnz=3, density=0.75), tensor([ 0, -1,  2]))
        """
        return self._replaced(checked_replacement(self.keys_of_blocks(), drop, rows, cols, self.grid))

    def _replaced(self, change: Replacement) -> tuple[BlockLayout, torch.Tensor]:
        """Return the layout after a change and the source of its blocks, as `replaced` does, without checks."""
        lines, col, source = replaced_indices(self, change)
        layout = BlockLayout.__new__(BlockLayout)
        layout._fill(lines, col, self.grid, self.block_shape)
        return layout, tensor_or_array(source)

    def keys_of_blocks(self) -> np.ndarray:
        """Return row * in_blocks + column of each stored block, int64 `[nnz]`, ascending, a new array."""
        if self._crow is None:
            keys = self.row_of_block * self.grid[1]
        else:  # without a vector of the rows, which needs as much memory
            keys = np.repeat(np.arange(self.grid[0], dtype=np.int64) * self.grid[1], np.diff(self._crow))
        keys += self._col
        return keys

    def derived(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """Return the result of `build()`, such as a plan, which is cached in the layout under `key`."""
        if key not in self._derived:
            self._derived[key] = build()
        return self._derived[key]  # type: ignore[no-any-return]

    @property
    def _lines(self) -> np.ndarray:
        """The rows of the blocks if the layout is hypersparse, else the row starts."""
        return self.row_of_block if is_hypersparse(self.nnz, self.grid) else self.row_start

    def __hash__(self) -> int:
        if self._hash is None:
            # A sample of a large layout's indices suffices, because equality compares all of them.
            sample = (array[:: array.size // LARGE + 1].tobytes() for array in (self._lines, self._col))
            self.__dict__["_hash"] = hash((self.grid, self.block_shape, self.nnz, *sample))
        return self._hash  # type: ignore[return-value]

    # torch.compile takes the hash as a constant, because it cannot trace the bytes of arrays.
    __hash__._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockLayout):
            return NotImplemented
        return self is other or (
            self.grid == other.grid
            and self.block_shape == other.block_shape
            and self.nnz == other.nnz
            and np.array_equal(self._lines, other._lines)
            and np.array_equal(self._col, other._col)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockLayout.from_indices, (self.row_of_block, np.array(self._col), self.grid, self.block_shape)

    def __copy__(self) -> BlockLayout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockLayout:
        return self

    def __repr__(self) -> str:
        blocks = f"nnz={self.nnz}, density={self.density:.4g}"
        return f"BlockLayout(shape={self.shape}, block_size={self.block_shape}, {blocks})"

    def to_torch_bsr(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weight as a `torch.sparse_bsr` tensor that shares the memory of `values`.

        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.dense((4, 8), block_size=4)
        >>> layout.to_torch_bsr(torch.ones(layout.values_shape)).to_dense().shape
        torch.Size([4, 8])
        """
        self._check_matrix_values(values)
        # Copies of the indices, because in-place methods of the tensor may write to them.
        crow, col = self.crow_indices(values.device), self.col_indices(values.device)
        # The invariants hold by construction. Without an explicit choice torch warns.
        return torch.sparse_bsr_tensor(crow, col, values, self.shape, check_invariants=False)

    @classmethod
    def from_torch_bsr(cls, tensor: torch.Tensor) -> tuple[BlockLayout, torch.Tensor]:
        """Return (layout, values) of a 2-D `torch.sparse_bsr` tensor; the values share its memory.

        Raises:
            BlockSparseError: the tensor has another layout or other than 2 dimensions.
        """
        return cls._with_sorted(*read_torch_bsr(tensor))

    def to_scipy_bsr(self, values: torch.Tensor) -> Any:
        """Return the weight as a `scipy.sparse.bsr_matrix` that shares the memory of `values`, a tensor on the CPU.

        Raises:
            BlockSparseError: `values` has another shape, or a device or dtype without a numpy array; scipy is missing.
        """
        self._check_matrix_values(values)
        if values.device.type != "cpu" or (values.is_floating_point() and values.dtype.itemsize < 4):
            got = f"{values.dtype} on {values.device}"
            raise BlockSparseError.expected("values", "on the CPU, of a dtype that scipy computes with", got)
        array = values.detach().resolve_conj().resolve_neg().numpy()
        # Copies of the indices, because scipy's in-place methods may write to them.
        indices = self._col.copy(), self.row_start.copy()
        return import_scipy_sparse().bsr_matrix((array, *indices), shape=self.shape, copy=False)

    @classmethod
    def from_scipy_bsr(cls, matrix: Any) -> tuple[BlockLayout, torch.Tensor]:
        """Return (layout, values) of a `scipy.sparse` BSR matrix; the values share its memory if it is sorted.

        Raises:
            BlockSparseError: the matrix has another format (call `.tobsr(blocksize=...)` first).
        """
        return cls._with_sorted(*read_scipy_bsr(matrix))

    @classmethod
    def _with_sorted(
        cls, rows: np.ndarray, cols: np.ndarray, grid: tuple[int, int], block: tuple[int, int], values: torch.Tensor
    ) -> tuple[BlockLayout, torch.Tensor]:
        """Make a layout from coordinates in any order, and sort the values as it does."""
        cols = cols.astype(np.int64)
        layout = cls.from_indices(rows, cols, grid, block)
        layout.check_values(values)
        if not np.array_equal(layout._col, cols):
            order = np.argsort(rows * grid[1] + cols, kind="stable")
            values = values[torch.from_numpy(order).to(values.device)]
        return layout, values

    def check_values(self, values: torch.Tensor) -> None:
        """Raise a BlockSparseError unless `values` is a tensor `[nnz, block_out, block_in, ...]` of this layout."""
        if not isinstance(values, torch.Tensor):
            raise BlockSparseError.expected("values", f"a tensor of shape {self.values_shape}", type(values).__name__)
        if values.layout != torch.strided:
            raise BlockSparseError.expected("values", "a dense tensor of the stored blocks", values.layout)
        if tuple(values.shape[:3]) != self.values_shape:
            raise BlockSparseError.expected("values", f"shape {self.values_shape} for {self!r}", tuple(values.shape))

    def _check_matrix_values(self, values: torch.Tensor) -> None:
        """Check that values fit the layout and have three axes."""
        self.check_values(values)
        if values.dim() != 3:
            raise BlockSparseError.expected("values", "3 dimensions, as a matrix has", f"shape {tuple(values.shape)}")


def check_layout(layout: Any) -> None:
    """Raise a BlockSparseError unless `layout` is a BlockLayout."""
    if not isinstance(layout, BlockLayout):
        got = f"{type(layout).__name__} (of a mask, write BlockLayout(mask, block_size))"
        raise BlockSparseError.expected("layout", "a BlockLayout", got)
