"""Products of other libraries: block-sparse ones on a GPU, and oneDNN's dense one on a CPU.

Errors of these libraries are passed on unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from blocksparse.convert import block_coordinates
from blocksparse.layout import BlockLayout

LinearFunction = Callable[[Tensor], Tensor]


def onednn(weight: Tensor, tokens: int) -> LinearFunction:
    """Return oneDNN's dense product in PyTorch, with the weight packed for this number of tokens."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def csr(layout: BlockLayout, values: Tensor) -> Tensor:
    """Return a block-sparse weight as a `torch.sparse_csr` tensor with int32 indices; zeros within blocks are stored.

    >>> import blocksparse as bs
    >>> layout = bs.BlockLayout([[True, False], [True, True]], block_size=2)
    >>> csr(layout, torch.arange(12.0).reshape(3, 2, 2)).to_dense().int()
    tensor([[ 0,  1,  0,  0],
            [ 2,  3,  0,  0],
            [ 4,  5,  8,  9],
            [ 6,  7, 10, 11]], dtype=torch.int32)
    """
    height, width = layout.block_shape
    rows, cols = (places[:, None, None] for places in block_coordinates(layout, values.device))
    i, j = torch.arange(height, device=values.device)[:, None], torch.arange(width, device=values.device)
    row = (rows * height + i).expand_as(values).reshape(-1)
    col = (cols * width + j).expand_as(values).reshape(-1)
    order = row.argsort(stable=True)  # the blocks of a row, and their columns, are in order
    starts = torch.zeros(layout.shape[0] + 1, dtype=torch.int32, device=values.device)
    starts[1:] = row.bincount(minlength=layout.shape[0]).cumsum(0)
    ordered = values.reshape(-1)[order]
    return torch.sparse_csr_tensor(starts, col[order].int(), ordered, layout.shape, check_invariants=False)


def torch_bsr(weight: Tensor, meta: dict[str, int]) -> LinearFunction:
    """Return PyTorch's Triton kernel for BSR weights, with the parameters that `tuned` found."""
    from torch.sparse._triton_ops import bsr_dense_addmm

    def product(x: Tensor) -> Tensor:
        unread = x.new_empty(()).expand(weight.shape[0], x.shape[0])  # as beta is 0
        return bsr_dense_addmm(unread, weight, x.t(), beta=0, meta=meta or None).t()

    return product


def tuned(weight: Tensor, x: Tensor, seconds: float) -> dict[str, int]:
    """Run PyTorch's tuner for `torch_bsr` for a limited time and return the parameters.

    The search starts from parameters that suit recent GPUs. PyTorch's own start (1 stage, a tile as narrow as a block)
    would spend all the time before it finds good ones.
    """
    from torch.sparse import _triton_ops_meta as ops_meta

    (rows, cols), tokens = weight.shape, x.shape[0]
    height, width = weight.values().shape[1:]
    split = max(1, tokens // 128) if tokens % 128 == 0 or tokens < 128 else max(1, tokens // height)
    sparsity = round(1 - weight._nnz() * height * width / (rows * cols), 2)  # as PyTorch looks it up
    key = (rows, cols, tokens, height, width, True, False, True)  # beta is 0, beta is not 1, alpha is 1
    start = (4, split, 3, 4)  # GROUP_SIZE_ROW, SPLIT_N, num_stages, num_warps
    ops_meta.update("bsr_dense_addmm", torch.cuda.get_device_name(), (0, x.dtype, sparsity), key, start)
    unread = x.new_empty(()).expand(rows, tokens)
    with _tuning_for(seconds):
        return ops_meta.tune_bsr_dense_addmm(unread, weight, x.t(), beta=0, store=True, force=True)


@contextmanager
def _tuning_for(seconds: float) -> Iterator[None]:
    """Shorten the measurements of `triton.testing.do_bench`, and let it raise after some seconds, which ends PyTorch's
    tuner.

    By default it measures each candidate for 0.6 seconds, and there are dozens for each shape.
    """
    import triton.testing

    before, end = triton.testing.do_bench, time.monotonic() + seconds

    def brief(call: Callable[[], Any], warmup: int = 0, rep: int = 0, **options: Any) -> Any:
        if time.monotonic() > end:
            raise RuntimeError("out of time")
        return before(call, warmup=10, rep=30, return_mode="median")

    triton.testing.do_bench = brief
    try:
        yield
    finally:
        triton.testing.do_bench = before


def stk(layout: BlockLayout, values: Tensor) -> LinearFunction:
    """Return the product x W^T of STK as dense, dense, sparse (Gale et al., MegaBlocks, 2022)."""
    try:
        import stk
    except ImportError as error:
        raise NotImplementedError(f"STK is not installed here ({error}): pip install stanford-stk") from error
    if layout.block_shape != (128, 128):
        # STK's kernels run with other block sizes too, but give wrong results.
        raise NotImplementedError(f"its blocks are 128 x 128, not {layout.block_shape[0]} x {layout.block_shape[1]}")
    rows, cols = block_coordinates(layout, values.device)
    starts = layout.crow_indices(values.device).int()
    weight = stk.Matrix(layout.shape, values, rows.to(torch.int16), cols.to(torch.int16), starts)
    transposed = weight.t()
    return lambda x: stk.ops.dds(x, transposed)
