"""One safetensors file of tensors that several processes hold: the first writes it, piece by piece as they come."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import checkpoint
from ..errors import BlockSparseError
from ..files import path_of
from ..surgery.sharding import local_of
from ..surgery.weight_handle import handle_of
from .checkpoint import INDICES
from .group import MASTER, all_gather, is_single_process, on_all, receive, send
from .held import Held, box_of, rows_of
from .sharded_weight import places_of_part
from .storage import PIECE


def save_safetensors(module: nn.Module, path: str | Path, *, about: Mapping[str, Any] | None = None) -> None:
    """Writes a model that several processes hold to one safetensors file, which a plain model loads.

    The first process writes numbers as they come from those that store them, 32 MiB or a row of a tensor at a time, so
    that nobody has a whole tensor. At any moment the file is the one before or the new one, whole. It has the names and
    the layouts of the plain model: `model.load_state_dict(safetensors.torch.load_file(path))`.

    Args:
        module: plain, in DistributedDataParallel, or sharded by `fully_shard`; layers may be parts of a tensor-parallel
            model. All its processes call this.
        path: where the first process writes.
        about: what `blocksparse.checkpoint.load` gives back with the tensors, ready for JSON.

    Raises:
        BlockSparseError: it could not be written, in all processes; what was there is still there.

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
    held = on_all(lambda: Held(module))
    layouts = {name: handle_of(layer).layout for name, layer in held.layers.items() if layer.part is not None}
    write(path, on_all(lambda: {name: _here(name, held, layouts) for name in held.tensors}), about or {})


@dataclass(frozen=True, eq=False)
class Here:
    """What this process has of a tensor: some rows, rising, and of these a range of each further axis."""

    local: Tensor
    rows: np.ndarray | range
    shape: tuple[int, ...]
    rest: tuple[slice, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Here:
        if tensor.is_meta:
            raise BlockSparseError.expected(name, "a tensor with numbers", "one on the meta device")
        offset, size = box_of(name, tensor)
        local = local_of(tensor.detach())
        if not tensor.dim():
            return cls(local.reshape(1), range(1), (), ())
        first, *others = (slice(begin, begin + length) for begin, length in zip(offset, size, strict=True))
        return cls(local, range(first.start, first.stop), tuple(tensor.shape), tuple(others))

    @property
    def about(self) -> tuple[Any, ...]:
        """The whole, which all processes have to agree on, and the place of what is here."""
        rest = tuple((each.start, each.stop) for each in self.rest)
        rows = self.rows if isinstance(self.rows, range) else hashlib.sha256(self.rows.tobytes()).hexdigest()
        return (self.shape, str(self.local.dtype)), self.local.numel(), (rest, rows)

    def within(self, begin: int, end: int) -> tuple[np.ndarray, Tensor]:
        """The rows from one to another, counted from the first of them, and what is here of them, on the CPU."""
        if isinstance(self.rows, range):
            first = self.rows.start
            mine = slice(*(min(max(at - first, 0), len(self.rows)) for at in (begin, end)))
        else:
            mine = slice(*np.searchsorted(self.rows, (begin, end)).tolist())
        return np.asarray(self.rows[mine], dtype=np.int64) - begin, self.local[mine].cpu()


def _here(name: str, held: Held, layouts: Mapping[str, Any]) -> Here:
    """What is here of a tensor of the plain model, which parts of layers have in their own places."""
    tensor = held.tensors[name]
    layer, _, last = name.rpartition(".")
    if layer in layouts and last in INDICES:
        return Here.of(name, getattr(layouts[layer], last)())
    if layer in layouts and last == "values":
        places, total = places_of_part(held.layers[layer], layouts[layer]), layouts[layer].nnz
    elif name in held.cuts:
        places, total = held.cuts[name].here, sum(held.cuts[name].sizes)
    else:
        return Here.of(name, tensor)
    mine = rows_of(tensor)
    rest = tuple(slice(0, size) for size in mine.local.shape[1:])
    return Here(mine.local.detach(), places[mine.first : mine.end], (total, *mine.local.shape[1:]), rest)


def write(path: str | Path, tensors: Mapping[str, Tensor | Here], about: Mapping[str, Any]) -> None:
    """Writes the file of `blocksparse.checkpoint.save`, of tensors that are in all processes or sharded over them."""
    file = on_all(lambda: path_of("path", path))
    here = on_all(lambda: {name: one if isinstance(one, Here) else Here.of(name, one) for name, one in tensors.items()})
    pieces = _Pieces(here)
    coming = {
        name: checkpoint.TensorStream(one.shape, one.local.dtype, pieces.of(name)) for name, one in sorted(here.items())
    }
    failed: Exception | None = None
    try:
        if pieces.rank == MASTER:
            checkpoint.save(file, coming, about)
        else:
            for name in checkpoint.in_order(coming):
                for _ in coming[name].pieces:
                    pass
    except Exception as error:
        failed = error
    if pieces.stopped is not None:
        raise BlockSparseError(str(pieces.stopped)) from failed
    try:
        pieces.agree(0 if failed is None else _text(failed))
    except BlockSparseError as error:
        raise error from failed


class _Pieces:
    """The pieces of tensors, as they come to the first process; `stopped` is why all stopped before the end."""

    def __init__(self, here: Mapping[str, Here]):
        self.here = here
        self.stopped: BlockSparseError | None = None
        self.rank = MASTER if is_single_process() else dist.get_rank()
        self.everyone = all_gather({name: one.about for name, one in here.items()})
        self.senders: dict[str, list[int]] = {}
        for name in sorted({name for one in self.everyone for name in one}):
            wholes = [one[name][0] if name in one else "none" for one in self.everyone]
            for rank, whole in enumerate(wholes):
                if whole != wholes[0]:
                    raise BlockSparseError.expected(f"process {rank}, {name}", f"{wholes[0]}, as in process 0", whole)
            first: dict[Any, int] = {}  # of those that have the same
            for rank, one in enumerate(self.everyone):
                if one[name][1]:
                    first.setdefault(one[name][2], rank)
            self.senders[name] = list(first.values())
            known, size = sum(self.everyone[rank][name][1] for rank in first.values()), math.prod(wholes[0][0])
            if known != size:
                raise BlockSparseError.expected(name, f"{size:,} numbers, each in one process", f"{known:,}")

    def of(self, name: str) -> Iterator[Tensor]:
        here = self.here[name]
        shape = here.shape or (1,)
        width = math.prod(shape[1:]) * here.local.dtype.itemsize
        step = max(1, PIECE // max(1, width))
        for begin in range(0, shape[0], step) if width else ():
            size = min(step, shape[0] - begin)
            try:
                piece = self._piece(name, here, begin, torch.Size([size, *shape[1:]]))
            except BlockSparseError as error:
                self.stopped = error
                raise
            yield piece

    def _piece(self, name: str, here: Here, begin: int, shape: torch.Size) -> Tensor:
        rows, mine, said = np.arange(0), torch.empty(0), ""
        if self.senders[name] == [MASTER]:  # nothing to send: what fails there is told when all agree next
            return here.within(begin, begin + shape[0])[1] if self.rank == MASTER else mine
        if self.rank in self.senders[name]:
            try:
                rows, mine = here.within(begin, begin + shape[0])
            except Exception as error:
                said = f"{name}: {_text(error)}"
        counts = self.agree(said or len(rows))
        if self.rank != MASTER:
            if len(rows):
                send(torch.from_numpy(rows).to(_wire()), MASTER)
                send(_bytes(mine).to(_wire()), MASTER)
            return mine
        if mine.shape == shape:
            return mine
        piece = torch.empty(shape, dtype=here.local.dtype)
        if len(rows):
            _put(piece, rows, here.rest, mine)
        for rank, count in enumerate(counts):
            if rank != MASTER and count:
                rest = self.everyone[rank][name][2][0]
                size = [count, *(end - at for at, end in rest)]
                index = receive(torch.empty(count, dtype=torch.int64, device=_wire()), rank)
                width = math.prod(size) * piece.dtype.itemsize
                numbers = receive(torch.empty(width, dtype=torch.uint8, device=_wire()), rank)
                _put(
                    piece,
                    index.cpu().numpy(),
                    [slice(*each) for each in rest],
                    numbers.cpu().view(piece.dtype).view(size),
                )
        return piece

    def agree(self, mine: int | str) -> list[int]:
        """How many rows each process sends."""
        said = all_gather(mine)
        for rank, text in enumerate(said):
            if isinstance(text, str):
                raise BlockSparseError(f"process {rank}: {text}" if rank else text)
        return said


def _put(piece: Tensor, rows: np.ndarray, rest: Sequence[slice], numbers: Tensor) -> None:
    place: Any = (torch.from_numpy(rows), *rest)
    piece[place] = numbers


def _bytes(tensor: Tensor) -> Tensor:
    """As gloo does not know all dtypes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _wire() -> torch.device:
    """Where messages are."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, BlockSparseError) else f"{type(error).__name__}: {error}"
