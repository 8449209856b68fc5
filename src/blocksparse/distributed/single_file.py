"""One safetensors file of a distributed model: rank 0 writes pieces of tensors as the other ranks send them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import checkpoint
from ..errors import BlockSparseError
from ..files import path_of
from ..surgery.agreement import device_of
from ..surgery.weight_handle import handle_of
from .checkpoint import INDICES
from .group import MASTER, all_gather, is_single_process, on_all, receive, send, text_of
from .sharded_weight import positions_of_part
from .state import DistributedState, LocalChunk
from .storage import PIECE_BYTES


def save_safetensors(module: nn.Module, path: str | Path, *, about: Mapping[str, Any] | None = None) -> None:
    """Write a distributed model to one safetensors file, which a plain model loads. All processes call it.

    Rank 0 writes each piece as the rank that stores it sends it: 32 MiB, or one row of a tensor if that is larger. No
    process ever has a whole tensor of another's. The file is the old one or the whole new one at any moment. It has the
    names and the layouts of the plain model: `model.load_state_dict(safetensors.torch.load_file(path))`.

    Args:
        module: plain, in DistributedDataParallel, or sharded by `fully_shard`; layers may be tensor-parallel.
        path: the file that rank 0 writes.
        about: further facts that JSON can express; `blocksparse.checkpoint.load` returns them with the tensors.

    Raises:
        BlockSparseError: in all processes, if the file cannot be written. The old one remains.

    >>> import tempfile, blocksparse as bs
    >>> from safetensors.torch import load_file
    >>> layer, other = (bs.nn.Linear(64, 64, density=density, block_size=8) for density in (0.5, 0.25))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bs.distributed.save_safetensors(layer, f"{folder}/model.safetensors")
    ...     other.load_state_dict(load_file(f"{folder}/model.safetensors"))
    <All keys matched successfully>
    >>> other.layout == layer.layout, other.values.equal(layer.values)
    (True, True)
    """
    state = on_all(lambda: DistributedState(module))
    layouts = {name: handle_of(layer).layout for name, layer in state.layers.items() if layer.part is not None}
    write(path, on_all(lambda: {name: _chunk(name, state, layouts) for name in state.tensors}), about or {})


def _chunk(name: str, state: DistributedState, layouts: Mapping[str, Any]) -> LocalChunk:
    """Return the local chunk of a tensor of the plain model; `layouts` are those of tensor-parallel layers."""
    tensor = state.tensors[name]
    layer, _, last = name.rpartition(".")
    if layer in layouts and last in INDICES:
        return LocalChunk.from_tensor(name, getattr(layouts[layer], last)())
    if layer in layouts and last == "values":
        layout = layouts[layer]
        return LocalChunk.from_rows(tensor, positions_of_part(state.layers[layer], layout), layout.nnz)
    if (sharding := state.shardings.get(name)) is not None:
        return LocalChunk.from_rows(tensor, sharding.local_indices, sharding.size)
    return LocalChunk.from_tensor(name, tensor)


def write(path: str | Path, tensors: Mapping[str, Tensor | LocalChunk], about: Mapping[str, Any]) -> None:
    """Write the file of `blocksparse.checkpoint.save`, with tensors that all processes have or that are sharded."""
    file = on_all(lambda: path_of("path", path))
    chunks = on_all(
        lambda: {
            name: each if isinstance(each, LocalChunk) else LocalChunk.from_tensor(name, each)
            for name, each in tensors.items()
        }
    )
    exchange = _PieceExchange(chunks)
    streams = {
        name: checkpoint.TensorStream(chunk.shape, chunk.local.dtype, exchange.pieces(name))
        for name, chunk in sorted(chunks.items())
    }
    failure: Exception | None = None
    try:
        if exchange.rank == MASTER:
            checkpoint.save(file, streams, about)
        else:
            for name in checkpoint.in_order(streams):
                for _ in streams[name].pieces:
                    pass
    except Exception as error:
        failure = error
    if exchange.stopped is not None:
        raise BlockSparseError(str(exchange.stopped)) from failure
    try:
        exchange.agree(0 if failure is None else text_of(failure))
    except BlockSparseError as error:
        raise error from failure


class _PieceExchange:
    """Sends pieces of tensors to rank 0. All ranks iterate over `pieces` in the same order.

    Attributes:
        stopped: the error that ended the exchange on all ranks; None if there was none.
    """

    def __init__(self, chunks: Mapping[str, LocalChunk]):
        self.chunks = chunks
        self.stopped: BlockSparseError | None = None
        self.rank = MASTER if is_single_process() else dist.get_rank()
        self.by_rank = all_gather({name: _summary(chunk) for name, chunk in chunks.items()})
        self.senders: dict[str, list[int]] = {}
        for name in sorted({name for summaries in self.by_rank for name in summaries}):
            wholes = [summaries[name][0] if name in summaries else "none" for summaries in self.by_rank]
            for rank, whole in enumerate(wholes):
                if whole != wholes[0]:
                    raise BlockSparseError.expected(f"process {rank}, {name}", f"{wholes[0]}, as in process 0", whole)
            first: dict[Any, int] = {}  # of the ranks that have the same chunk
            for rank, summaries in enumerate(self.by_rank):
                if summaries[name][1]:
                    first.setdefault(summaries[name][2], rank)
            self.senders[name] = list(first.values())
            known, size = sum(self.by_rank[rank][name][1] for rank in first.values()), math.prod(wholes[0][0])
            if known != size:
                raise BlockSparseError.expected(name, f"{size:,} numbers, each in one process", f"{known:,}")

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield, on rank 0, the pieces of a tensor in order; on other ranks, what they sent."""
        chunk = self.chunks[name]
        shape = chunk.shape or (1,)
        width = math.prod(shape[1:]) * chunk.local.dtype.itemsize
        step = max(1, PIECE_BYTES // max(1, width))
        for begin in range(0, shape[0], step) if width else ():
            size = min(step, shape[0] - begin)
            try:
                piece = self._exchange_piece(name, chunk, begin, torch.Size([size, *shape[1:]]))
            except BlockSparseError as error:
                self.stopped = error
                raise
            yield piece

    def _exchange_piece(self, name: str, chunk: LocalChunk, begin: int, shape: torch.Size) -> Tensor:
        """Return the whole piece on rank 0, from its own rows and those of other ranks, which return what they send."""
        rows, mine, failure = np.arange(0), torch.empty(0, device="cpu"), ""
        if self.senders[name] == [MASTER]:  # no messages: the next `agree` reports a failure of rank 0
            return chunk.between(begin, begin + shape[0])[1] if self.rank == MASTER else mine
        if self.rank in self.senders[name]:
            try:
                rows, mine = chunk.between(begin, begin + shape[0])
            except Exception as error:
                failure = f"{name}: {text_of(error)}"
        counts = self.agree(failure or len(rows))
        if self.rank != MASTER:
            if len(rows):
                send(torch.from_numpy(rows).to(device_of()), MASTER)
                # As bytes: gloo does not send all dtypes.
                send(mine.contiguous().view(-1).view(torch.uint8).to(device_of()), MASTER)
            return mine
        if mine.shape == shape:
            return mine
        piece = torch.empty(shape, dtype=chunk.local.dtype, device="cpu")
        if len(rows):
            _put(piece, rows, chunk.ranges, mine)
        for rank, count in enumerate(counts):
            if rank != MASTER and count:
                ranges = [slice(*each) for each in self.by_rank[rank][name][2][0]]
                size = [count, *(each.stop - each.start for each in ranges)]
                index = receive(torch.empty(count, dtype=torch.int64, device=device_of()), rank)
                length = math.prod(size) * piece.dtype.itemsize
                received = receive(torch.empty(length, dtype=torch.uint8, device=device_of()), rank)
                _put(piece, index.cpu().numpy(), ranges, received.cpu().view(piece.dtype).view(size))
        return piece

    def agree(self, mine: int | str) -> list[int]:
        """Return every rank's count of rows; raise on all ranks if one of them passes an error text instead."""
        by_rank = all_gather(mine)
        for rank, each in enumerate(by_rank):
            if isinstance(each, str):
                raise BlockSparseError(f"process {rank}: {each}" if rank else each)
        return by_rank


def _summary(chunk: LocalChunk) -> tuple[Any, int, Any]:
    """Return the shape and dtype on which all ranks must agree, the count of local numbers, and their place."""
    ranges = tuple((each.start, each.stop) for each in chunk.ranges)
    rows = chunk.rows if isinstance(chunk.rows, range) else hashlib.sha256(chunk.rows.tobytes()).hexdigest()
    return (chunk.shape, str(chunk.local.dtype)), chunk.local.numel(), (ranges, rows)


def _put(piece: Tensor, rows: np.ndarray, ranges: Sequence[slice], numbers: Tensor) -> None:
    """Write local numbers to their rows and ranges of a piece."""
    place: Any = (torch.from_numpy(rows), *ranges)
    piece[place] = numbers
