"""Block-sparse matrices of torch and scipy, read as index arrays and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import BlockSparseError
from .indices import rows_from_starts
from .optional_torch import torch

# rows and columns of the blocks, the grid, the block, and the values in the order of the columns
Blocks = tuple[np.ndarray, np.ndarray, tuple[int, int], tuple[int, int], "torch.Tensor"]


def read_torch_bsr(tensor: Any) -> Blocks:
    """Return the blocks of a 2-D `torch.sparse_bsr` tensor; the values share its memory."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_bsr or tensor.dim() != 2:
        got = f"{tensor.dim()}-D {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise BlockSparseError.expected("tensor", "a 2-D torch.sparse_bsr tensor", got)
    values = tensor.values()
    block = (values.shape[-2], values.shape[-1])
    grid = (tensor.shape[0] // block[0], tensor.shape[1] // block[1])
    crow, cols = (index.cpu().numpy() for index in (tensor.crow_indices(), tensor.col_indices()))
    return rows_from_starts(crow, cols.size, grid[0]), cols, grid, block, values


def read_scipy_bsr(matrix: Any) -> Blocks:
    """Return the blocks of a `scipy.sparse` BSR matrix; the values share its memory."""
    if getattr(matrix, "format", None) != "bsr":
        raise BlockSparseError.expected("matrix", "a scipy.sparse BSR matrix", type(matrix).__name__)
    block = matrix.blocksize
    grid = (matrix.shape[0] // block[0], matrix.shape[1] // block[1])
    rows = rows_from_starts(matrix.indptr, matrix.indices.size, grid[0])
    try:
        values = torch.from_numpy(matrix.data)
    except (TypeError, ValueError) as error:
        raise BlockSparseError.expected("matrix", "data of a dtype and strides that torch has", error) from error
    return rows, matrix.indices, grid, block, values


def import_scipy_sparse() -> Any:
    """Import and return scipy.sparse, or raise a BlockSparseError with the command that installs scipy."""
    try:
        import scipy.sparse
    except ImportError as error:
        raise BlockSparseError("This needs scipy: pip install scipy.") from error
    return scipy.sparse
