"""Which blocks of a weight exist: an immutable, hashable value that is independent of any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch

from .cached import cached_property
from .checked import (
    checked_array,
    checked_block,
    checked_grid,
    checked_indices,
    checked_ints,
    checked_mask,
    checked_pairs,
    is_int,
)
from .errors import BlockSparseError
from .indices import LARGE, compressed, few, index_type, is_rounded_mean, read_only, refuse_twice, rows_of, tensor_of

__all__ = ["BlockLayout", "check_layout", "import_scipy_sparse", "layout_of_indices"]

Made = TypeVar("Made")


class BlockLayout:
    """The blocks that a weight of shape `[out_features, in_features]` stores.

    Args:
        mask: bool `[out_blocks, in_blocks]` (tensor, array or nested lists); True where a block is stored.
            Integers are taken when they are all 0 or 1; floating-point masks are refused.
        block_size: an int, or a pair (rows, columns), of the block in units of features.

    A weight is this layout plus a tensor `values` of shape `[nnz, block_out, block_in]`, whose blocks are sorted
    by row, then by column: exactly the values of a `torch.sparse_bsr` tensor. Layouts compare and hash by content.

    Raises:
        BlockSparseError: a mask that is not a 2-D 0/1 matrix, or a block size that is not positive.

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
    # Stored, not computed, as each product reads these.
    shape: tuple[int, int]
    """(out_features, in_features) of the weight."""
    values_shape: tuple[int, int, int]
    """The shape of the values of a linear weight: (nnz, block_out, block_in)."""

    _col: np.ndarray
    _derived: dict[Hashable, Any]
    _indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, mask: Any, block_size: int | tuple[int, int] = 32):
        mask = checked_mask(mask)
        self._fill(*compressed(np.flatnonzero(mask), mask.shape), mask.shape, checked_block(block_size))

    @classmethod
    def from_indices(
        cls, rows: Any, cols: Any, grid: tuple[int, int], block_size: int | tuple[int, int] = 32
    ) -> BlockLayout:
        """Makes a layout from block coordinates in any order, without the dense mask.

        Args:
            rows, cols: integer vectors of equal length, the row and column of each stored block.
            grid: (out_blocks, in_blocks).
            block_size: as for the class.

        Raises:
            BlockSparseError: an index out of range, a block given twice, or lengths that differ.

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
            refuse_twice(keys, grid)
        return cls._from_keys(keys, grid, checked_block(block_size))

    @classmethod
    def _from_keys(cls, keys: np.ndarray, grid: tuple[int, int], block: tuple[int, int]) -> BlockLayout:
        """The layout of these rising block numbers, int64 `[nnz]`."""
        layout = cls.__new__(cls)
        layout._fill(*compressed(keys, grid), grid, block)
        return layout

    def _fill(self, lines: np.ndarray, col: np.ndarray, grid: tuple[int, int], block: tuple[int, int]) -> None:
        # `lines` is where each row starts; where most of very many rows are empty, the row of each block.
        if "grid" in self.__dict__:
            raise AttributeError("a layout cannot be changed: make a new one instead of calling __init__ again")
        if max(grid[0] * block[0], grid[1] * block[1]) >= 2**63:
            raise BlockSparseError.expected("shape", "fewer than 2^63 features", f"{grid} blocks of {block}")
        sparse = few(len(col), grid)
        # Bypasses __setattr__, which keeps a layout from being changed.
        self.__dict__.update(
            grid=(int(grid[0]), int(grid[1])),
            block_shape=block,
            shape=(int(grid[0]) * block[0], int(grid[1]) * block[1]),
            values_shape=(len(col), *block),
            nnz=len(col),  # not read off _col: torch.compile makes a tensor of any array that it meets
            _col=read_only(col),
            _derived={},
            _indices={},
            **{"_rows" if sparse else "_crow": read_only(lines)},
        )
        if not sparse:
            self.indices_on("cpu")  # made now: torch.compile cannot trace how they are made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a layout cannot be changed: make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a layout cannot be changed: make a new one instead of deleting {name!r}")

    def _tag(self, crow: torch.Tensor, col: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The ops take index tensors, so that a compiled or exported graph is self-contained; this maps them back.
        col._blocksparse_layout = _LayoutRef(self)  # type: ignore[attr-defined]
        return crow, col

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def density(self) -> float:
        """Stored blocks / all blocks of the grid."""
        return self.nnz / (self.grid[0] * self.grid[1])

    def mask(self) -> torch.Tensor:
        """The dense bool mask `[out_blocks, in_blocks]`, newly made."""
        mask = np.zeros(self.grid, dtype=bool)
        mask[self.row_of_block, self.col_of_block] = True
        return torch.from_numpy(mask)

    def crow_indices(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Where each block row starts, `[out_blocks + 1]`, int32 (int64 from 2^31 blocks on), newly made."""
        with torch.inference_mode(False):
            return self.indices_on(device)[0].clone()

    def col_indices(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The block column of each stored block, `[nnz]`, dtype as `crow_indices`, newly made."""
        with torch.inference_mode(False):
            return self.indices_on(device)[1].clone()

    def indices_on(self, device: torch.device | str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both on a device, for the library's own ops: made once, and never to be written to."""
        device = torch.device("cpu" if device is None else device)
        found = self._indices.get(device)
        if found is None and device.type == "cpu":
            found = self._indices[device] = self._tag(tensor_of(self._crow), tensor_of(self._col))
        elif found is None:
            crow, col = self.indices_on("cpu")
            with torch.inference_mode(False):  # a layout met there first can still be trained on
                found = self._tag(crow.to(device), col.to(device))
            if type(found[1]) is torch.Tensor:  # and not a fake one of some tracing mode, which must not outlive it
                self._indices[device] = found
        return found

    # For plans and kernels: read-only, so that changes of index tensors that were handed out cannot reach them.

    @cached_property
    def _crow(self) -> np.ndarray:
        crow = np.zeros(self.grid[0] + 1, dtype=self._col.dtype)
        rows, counts = np.unique(self.row_of_block, return_counts=True)
        crow[rows + 1] = counts
        return read_only(np.cumsum(crow, dtype=crow.dtype, out=crow))

    @property
    def row_start(self) -> np.ndarray:
        """Where each block row starts, `[out_blocks + 1]`, read-only."""
        return self._crow

    @property
    def col_of_block(self) -> np.ndarray:
        """The block column of each stored block, `[nnz]`, read-only."""
        return self._col

    @property
    def row_of_block(self) -> np.ndarray:
        """The block row of each stored block, int64 `[nnz]`, read-only; of a large layout newly made."""
        rows = self.__dict__.get("_rows")
        if rows is None:
            rows = read_only(np.repeat(np.arange(self.grid[0], dtype=np.int64), np.diff(self._crow)))
            if self.nnz < LARGE:
                self.__dict__["_rows"] = rows
        return rows

    @property
    def T(self) -> BlockLayout:
        """The layout of the transposed weight."""
        return self._transposed[0]

    @property
    def transpose_order(self) -> np.ndarray:
        """For each block of `layout.T`, its position in this layout, int64 `[nnz]`, newly made."""
        return self._transposed[1].copy()

    @cached_property
    def _transposed(self) -> tuple[BlockLayout, np.ndarray]:
        if self.grid[1] * self.nnz < 2**63:  # sorting takes a tenth of the time of a stable argsort
            keys = self._col * np.int64(self.nnz) + np.arange(self.nnz)
            keys.sort()
            order = keys % max(self.nnz, 1)
        else:
            order = np.argsort(self._col, kind="stable")
        index = index_type(self.nnz, self.grid[0])
        if few(self.nnz, self.grid[::-1]):
            lines = self._col[order].astype(np.int64)
        else:
            lines = np.zeros(self.grid[1] + 1, dtype=index)
            np.cumsum(np.bincount(self._col, minlength=self.grid[1]), out=lines[1:])
        other = BlockLayout.__new__(BlockLayout)
        other._fill(lines, self.row_of_block[order].astype(index), self.grid[::-1], self.block_shape[::-1])
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        other.__dict__["_transposed"] = (self, back)
        return other, order

    def select(self, keep: Any) -> BlockLayout:
        """The layout of some of these blocks; their values are `values[keep]`.

        Args:
            keep: bool `[nnz]` (tensor, array or list), True for the blocks that stay.

        Raises:
            BlockSparseError: another length, or numbers that are not bool.

        >>> import torch, blocksparse as bs
        >>> layout = bs.BlockLayout([[True, False], [True, True]], block_size=1)
        >>> gate = torch.tensor([0.5, 0.0, 2.0])
        >>> layout.select(gate != 0).mask()
        tensor([[ True, False],
                [False,  True]])
        """
        keep = checked_array("keep", "a bool vector", keep)
        if keep.dtype != bool or keep.shape != (self.nnz,):
            raise BlockSparseError.expected(
                "keep", f"bool [{self.nnz}] for {self!r}", f"{keep.dtype} {list(keep.shape)}"
            )
        return BlockLayout._from_keys(self.keys_of_blocks()[keep], self.grid, self.block_shape)

    def crop(self, rows: int, columns: int) -> BlockLayout:
        """Returns the layout of the first rows and columns: that of a mask of attention for shorter inputs, say.

        Args:
            rows, columns: in features (queries and keys, for attention), as in `shape`: multiples of the block, and no
                more than the layout has.

        Raises:
            BlockSparseError: sizes below 1, above those of the layout, or that are no multiples of the block.

        >>> import blocksparse as bs
        >>> layout = bs.patterns.butterfly((256, 256), block_size=32)
        >>> layout.crop(96, 128)
        BlockLayout(shape=(96, 128), block_size=(32, 32), nnz=9, density=0.75)
        """
        grid = []
        for name, size, block, most in zip(
            ("rows", "columns"), (rows, columns), self.block_shape, self.shape, strict=True
        ):
            if not is_int(size) or not 0 < size <= most or size % block:
                wanted = f"a multiple of the block, {block}, up to the {most} of {self!r}"
                raise BlockSparseError.expected(name, wanted, repr(size))
            grid.append(int(size) // block)
        row, col = self.row_of_block, self._col
        stays = (row < grid[0]) & (col < grid[1])
        return BlockLayout._from_keys(row[stays] * grid[1] + col[stays], (grid[0], grid[1]), self.block_shape)

    def replaced(self, drop: Any, rows: Any, cols: Any) -> tuple[BlockLayout, torch.Tensor]:
        """Drops some blocks and adds others; returns the new layout and where each of its blocks comes from.

        Args:
            drop: integer vector, the positions of blocks of this layout that go.
            rows, cols: integer vectors of equal length, the row and column of each block that comes, in any order:
                blocks that are not here, or are dropped in the same call.

        Returns:
            The new layout, and int64 `[nnz]` on the CPU: for each of its blocks the position in this layout, or -1
            for those that came, a block that was dropped and came back among them.

        Raises:
            BlockSparseError: positions or indices out of range, a position or a block given twice, a block that is
                here and stays.

        >>> import blocksparse as bs
        >>> layout = bs.BlockLayout([[True, False], [True, True]], block_size=1)
        >>> layout.replaced(drop=[1], rows=[0], cols=[1])
        (BlockLayout(shape=(2, 2), block_size=(1, 1), nnz=3, density=0.75), tensor([ 0, -1,  2]))
        """
        drop = checked_indices("drop", drop, self.nnz)
        rows, cols = checked_pairs(rows, cols, self.grid)
        stays = np.ones(self.nnz, dtype=bool)
        stays[drop] = False
        source = np.flatnonzero(stays)
        if source.size != self.nnz - drop.size:
            raise BlockSparseError.expected("drop", "each position once", "a position more than once")
        came = np.sort(rows * self.grid[1] + cols)
        refuse_twice(came, self.grid)
        kept = self.keys_of_blocks()[source]
        at = np.searchsorted(kept, came)
        here = kept[np.minimum(at, kept.size - 1)] == came if kept.size else np.zeros(0, dtype=bool)
        if here.any():
            block = divmod(int(came[np.argmax(here)]), self.grid[1])
            raise BlockSparseError.expected("rows and cols", "blocks that are not here", f"block {block}")
        # Both lists are sorted: the i-th block that comes stands behind i others and those kept before it.
        keys = np.insert(kept, at, came)
        del kept, came, stays, here  # of large layouts each takes as much memory as its values
        new = BlockLayout._from_keys(keys, self.grid, self.block_shape)
        del keys
        return new, torch.from_numpy(np.insert(source, at, -1))

    def keys_of_blocks(self) -> np.ndarray:
        """The number row * columns + column of each stored block in the grid, int64 `[nnz]`, rising; newly made."""
        keys = self.row_of_block * self.grid[1]
        keys += self._col
        return keys

    def derived(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """Returns what `build` makes (such as a plan), made once and kept with the layout."""
        if key not in self._derived:
            self._derived[key] = build()
        return self._derived[key]  # type: ignore[no-any-return]

    # -- as a value --------------------------------------------------------------------------------------------

    @cached_property
    def _hash(self) -> int:
        # For a large layout some of the columns suffice, as equality compares all.
        some = (array[:: array.size // LARGE + 1].tobytes() for array in (self._lines, self._col))
        return hash((self.grid, self.block_shape, self.nnz, *some))

    @property
    def _lines(self) -> np.ndarray:
        """Returns `_rows` or `_crow`, whichever the layout has."""
        return self.row_of_block if few(self.nnz, self.grid) else self._crow

    def __hash__(self) -> int:
        return self._hash

    # A constant to torch.compile, which cannot trace the bytes of arrays.
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

    # -- other formats, sharing the memory of the values -------------------------------------------------------

    def to_torch_bsr(self, values: torch.Tensor) -> torch.Tensor:
        """The `torch.sparse_bsr` tensor of this weight; it shares the memory of `values`.

        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.dense((4, 8), block_size=4)
        >>> layout.to_torch_bsr(torch.ones(layout.values_shape)).to_dense().shape
        torch.Size([4, 8])
        """
        self._check_matrix_values(values)
        return torch.sparse_bsr_tensor(
            # Copies, as in-place methods of the tensor, among others, may write to them.
            self.crow_indices(values.device),
            self.col_indices(values.device),
            values,
            self.shape,
            check_invariants=False,  # they hold by construction, and torch warns unless told
        )

    @classmethod
    def from_torch_bsr(cls, tensor: torch.Tensor) -> tuple[BlockLayout, torch.Tensor]:
        """(layout, values) of a 2-D `torch.sparse_bsr` tensor; the values share its memory.

        Raises:
            BlockSparseError: any other kind of tensor.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_bsr or tensor.dim() != 2:
            got = f"{tensor.dim()}-D {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise BlockSparseError.expected("tensor", "a 2-D torch.sparse_bsr tensor", got)
        values = tensor.values()
        block = (values.shape[-2], values.shape[-1])
        grid = (tensor.shape[0] // block[0], tensor.shape[1] // block[1])
        crow, cols = (index.cpu().numpy() for index in (tensor.crow_indices(), tensor.col_indices()))
        return cls._with_sorted(rows_of(crow, cols.size, grid[0]), cols, grid, block, values)

    def to_scipy_bsr(self, values: torch.Tensor) -> Any:
        """The `scipy.sparse.bsr_matrix` of this weight; it shares the memory of `values`, which must be on the CPU.

        Raises:
            BlockSparseError: values of another shape, or of a device or dtype that numpy lacks; scipy is missing.
        """
        self._check_matrix_values(values)
        if values.device.type != "cpu" or values.dtype in (torch.bfloat16, torch.float16):
            raise BlockSparseError.expected(
                "values", "on the CPU, of a dtype that scipy computes with", f"{values.dtype} on {values.device}"
            )
        array = values.detach().resolve_conj().resolve_neg().numpy()
        # The matrix owns its indices: scipy's in-place methods may write to them.
        return import_scipy_sparse().bsr_matrix(
            (array, self._col.copy(), self._crow.copy()), shape=self.shape, copy=False
        )

    @classmethod
    def from_scipy_bsr(cls, matrix: Any) -> tuple[BlockLayout, torch.Tensor]:
        """(layout, values) of a `scipy.sparse` BSR matrix; the values share its memory when its indices are sorted.

        Raises:
            BlockSparseError: any other format (use `.tobsr(blocksize=...)` first).
        """
        if getattr(matrix, "format", None) != "bsr":
            raise BlockSparseError.expected("matrix", "a scipy.sparse BSR matrix", type(matrix).__name__)
        block = matrix.blocksize
        grid = (matrix.shape[0] // block[0], matrix.shape[1] // block[1])
        rows = rows_of(matrix.indptr, matrix.indices.size, grid[0])
        try:
            values = torch.from_numpy(matrix.data)
        except (TypeError, ValueError) as error:
            raise BlockSparseError.expected("matrix", "data of a dtype and strides that torch has", error) from error
        return cls._with_sorted(rows, matrix.indices, grid, block, values)

    @classmethod
    def _with_sorted(
        cls, rows: np.ndarray, cols: np.ndarray, grid: tuple[int, int], block: tuple[int, int], values: torch.Tensor
    ) -> tuple[BlockLayout, torch.Tensor]:
        cols = cols.astype(np.int64)
        layout = cls.from_indices(rows, cols, grid, block)
        layout.check_values(values)
        if not np.array_equal(layout._col, cols):
            order = np.argsort(rows * grid[1] + cols, kind="stable")
            values = values[torch.from_numpy(order).to(values.device)]
        return layout, values

    def check_values(self, values: torch.Tensor) -> None:
        """Raises a BlockSparseError unless `values` is a tensor of this layout's values, kernel dims behind or not."""
        if not isinstance(values, torch.Tensor):
            raise BlockSparseError.expected("values", f"a tensor of shape {self.values_shape}", type(values).__name__)
        if values.layout != torch.strided:
            raise BlockSparseError.expected("values", "a dense tensor of the stored blocks", values.layout)
        if tuple(values.shape[:3]) != self.values_shape:
            raise BlockSparseError.expected("values", f"shape {self.values_shape} for {self!r}", tuple(values.shape))

    def _check_matrix_values(self, values: torch.Tensor) -> None:
        self.check_values(values)
        if values.dim() != 3:
            raise BlockSparseError.expected("values", "those of a matrix, 3-D", f"shape {tuple(values.shape)}")


def import_scipy_sparse() -> Any:
    """Returns the module scipy.sparse; where scipy, an optional dependency, is missing, an error says how to get it."""
    try:
        import scipy.sparse
    except ImportError as error:
        raise BlockSparseError.expected("scipy", 'it installed: pip install "blocksparse-torch[lab]"', error) from error
    return scipy.sparse


class _LayoutRef(weakref.ref[BlockLayout]):
    """A weak reference that index tensors can carry into pickles and `torch.save`, where it becomes an empty one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_layout, ()


def _no_layout() -> None:
    return None


def layout_of_indices(crow: Any, col: Any, grid: tuple[int, int], block: tuple[int, int]) -> BlockLayout:
    """The layout of index vectors from a file, say, whose order is that of the values.

    Raises:
        BlockSparseError: anything but ints, starts of rows that do not rise from 0 to the number of blocks, columns
            out of range, or not in rising order in each row.
    """
    starts, cols = checked_ints("crow_indices", crow), checked_ints("col_indices", col)
    layout = BlockLayout.from_indices(rows_of(starts, cols.size, grid[0]), cols, grid, block)
    if not np.array_equal(layout.col_of_block, cols):
        raise BlockSparseError.expected("col_indices", "those of each row in rising order", cols)
    return layout


def layout_of_state(crow: Any, col: Any, mine: BlockLayout) -> BlockLayout:
    """The layout of index vectors from a state dict: `mine` for those of an averaged state of this layout.

    Raises:
        BlockSparseError: as `layout_of_indices`.
    """
    try:
        return layout_of_indices(crow, col, mine.grid, mine.block_shape)
    except BlockSparseError:
        crow = checked_array("crow_indices", "a vector of ints", crow)
        col = checked_array("col_indices", "a vector of ints", col)
        if are_indices_of(mine, crow, col):
            return mine
        if crow.dtype.kind == col.dtype.kind == "f":
            wanted = f"ints, or a mean of states whose layout is {mine!r}"
            got = "a mean of other layouts (blocksparse.sparsity.sync_ema keeps those of a model and its mean the same)"
            raise BlockSparseError.expected("crow_indices and col_indices", wanted, got) from None
        raise


def are_indices_of(layout: BlockLayout, crow: np.ndarray, col: np.ndarray) -> bool:
    """Whether these arrays, or each of a batch `[..., n]`, hold the layout's indices or a rounded mean of them."""
    pairs = [(crow, layout.row_start), (col, layout.col_of_block)]
    if crow.dtype.kind != col.dtype.kind or any(held.shape[-1:] != own.shape for held, own in pairs):
        return False
    held = np.concatenate([held.ravel() for held, _ in pairs])
    own = np.concatenate([np.broadcast_to(own, held.shape).ravel() for held, own in pairs])
    return bool((held == own).all()) or is_rounded_mean(held, own)


def check_layout(layout: Any) -> None:
    """Raises a BlockSparseError unless it is a BlockLayout."""
    if not isinstance(layout, BlockLayout):
        raise BlockSparseError.expected("layout", "a BlockLayout", type(layout).__name__)
