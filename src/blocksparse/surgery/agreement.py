"""Checks that the processes of a group have the same layouts, by one all-gather of a few digests."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checked import check_model
from ..checkpoint import bytes_of
from ..errors import BlockSparseError, first_line
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule
from ..nn.tensor_parallel_part import TensorParallelPart

# How many seconds other processes have to report after a failure.
ROLL_CALL = 2.0
_calls = itertools.count()


def check_layouts(model: nn.Module | Mapping[str, nn.Module], group: Any = None) -> None:
    """Raise a BlockSparseError on every process, naming ranks and layers, unless all have the same layouts.

    Call it on all processes of the group once the model is wrapped, by DistributedDataParallel or `fully_shard` say.
    The methods of `blocksparse.sparsity` and the styles of tensor parallelism call it themselves. Processes with
    different parts of a tensor-parallel weight are not compared. Without torch.distributed, or with one process, there
    is nothing to compare.

    Args:
        model: any module, or a dict of modules by name.
        group: a `torch.distributed.ProcessGroup` (default: all processes). For pipeline stages, whose layers differ,
            the processes of the same stage.

    Raises:
        BlockSparseError: layouts or block-sparse layers that differ, or a process that does not call this within the
            group's timeout.

    >>> import blocksparse as bs
    >>> from blocksparse.distributed import check_layouts
    >>> check_layouts(bs.nn.Linear(64, 64, density=0.5))
    """
    if not isinstance(model, Mapping):
        check_model(model)
    if not is_one_of_several(group):
        return
    roots: Iterable[tuple[str, nn.Module]] = [("", model)] if isinstance(model, nn.Module) else model.items()
    with agreed(group) as facts:
        for root, module in roots:
            for name, each in module.named_modules(prefix=root):
                if isinstance(each, BlockSparseModule):
                    try:
                        facts[name] = fact_of(each)
                    except BlockSparseError as error:
                        raise BlockSparseError(f"{name}.{error}") from error


@contextmanager
def agreed(group: Any = None, what: str = "layouts") -> Iterator[dict[str, Fact]]:
    """Yield a dict to fill in; then raise on all processes unless all filled in the same and none has failed."""
    facts: dict[str, Fact] = {}
    failed = None
    try:
        yield facts
    except BlockSparseError as error:
        failed = error
    if is_one_of_several(group):
        agree(facts, group, None if failed is None else str(failed), what)
    if failed is not None:
        raise failed


def is_one_of_several(group: Any = None) -> bool:
    """Return whether torch.distributed runs several processes in the group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


Fact = tuple[int, int]
"""The part of a weight (0 for all of it) and the digest of its layout."""


def fact_of(module: BlockSparseModule) -> Fact:
    """Return what must be equal on processes with the same part of this weight."""
    part: TensorParallelPart | None = module.part
    key = 0 if part is None else digest(part.grid, part.axis, part.lines.tobytes())
    return key, digest_of(module.layout)


def digest_of(layout: BlockLayout) -> int:
    """Return the digest of a layout, which the layout caches."""

    def make() -> int:
        rows, cols = layout.row_of_block.astype("int64"), layout.col_of_block.astype("int64")
        return digest(layout.grid, layout.block_shape, rows.tobytes(), cols.tobytes())

    return layout.derived("digest", make)


def digest(*facts: object) -> int:
    """Return 63 bits that are equal for equal facts: tensors, bytes, or objects with a `repr`."""
    hashed = hashlib.sha256()
    for fact in facts:
        if isinstance(fact, Tensor):
            hashed.update(f"{fact.dtype}, {list(fact.shape)}".encode())
            fact = bytes_of(fact)
        hashed.update(fact if isinstance(fact, bytes | memoryview) else repr(fact).encode())
    return int.from_bytes(hashed.digest()[:8], "little") >> 1


def agree(facts: Mapping[str, Fact], group: Any = None, problem: str | None = None, what: str = "layouts") -> None:
    """Raise a BlockSparseError on every process unless facts agree and no process has a problem.

    Args:
        facts: a key and a digest by name; processes with the same key must have the same digest.
        group: the processes (default all).
        problem: an error of this process, or None.
        what: the noun for the facts in the message.
    """
    whole = [(name, fact) for name, fact in facts.items() if fact[0] == 0]
    cut = [(name, fact) for name, fact in facts.items() if fact[0] != 0]
    keys = [(name, fact[0]) for name, fact in facts.items()]
    mine = [digest(list(facts)), digest(whole), digest(keys), digest(cut), problem is not None]
    try:
        rows = _all_gather(torch.tensor(mine, dtype=torch.int64), group)
        some_differ = len({tuple(row[:2]) for row in rows}) > 1 or len({tuple(row[2:4]) for row in rows}) > len(
            {row[2] for row in rows}
        )
        if not some_differ and not any(row[4] for row in rows):
            return
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (dict(facts), problem), group)
    except (RuntimeError, ValueError) as error:
        raise BlockSparseError.expected(
            missing(group), "an answer in time", f"none: dead, late, or out of reach ({first_line(error)})"
        ) from error
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    problems = {rank: text for rank, (_, text) in zip(ranks, gathered, strict=True) if text is not None}
    if problems:
        same = sorted(set(problems.values()))
        if len(problems) == len(ranks) and len(same) == 1:
            raise BlockSparseError(same[0])
        raise BlockSparseError("; ".join(f"rank {rank}: {text}" for rank, text in problems.items()))
    raise BlockSparseError.expected(
        "block-sparse layers",
        f"the same {what} on all ranks (use the same seed, or load the same checkpoint)",
        _differences(ranks, [facts for facts, _ in gathered]),
    )


def _differences(ranks: Sequence[int], facts: Sequence[Mapping[str, Fact]]) -> str:
    """Return a text that names the ranks that differ from most others, and the layers."""
    by_name: defaultdict[tuple[str, int], list[tuple[int, int | None]]] = defaultdict(list)
    for name in dict.fromkeys(name for each in facts for name in each):
        for rank, each in zip(ranks, facts, strict=True):
            key, digest = each.get(name, (0, None))
            by_name[name, key].append((rank, digest))
    layers: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for (name, _), having in by_name.items():
        usual = Counter(digest for _, digest in having).most_common(1)[0][0]
        others = tuple(rank for rank, digest in having if digest != usual)
        if others:
            layers[others].append(name or "the model itself")
    lines = []
    for others, names in layers.items():
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        lines.append(f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} with another one of {listed}")
    return "; ".join(lines)


def _all_gather(mine: Tensor, group: Any) -> list[list[int]]:
    """Gather a row of integers from each process of the group."""
    mine = mine.to(device_of(group))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


def device_of(group: Any = None) -> torch.device:
    """Return the device on which the group exchanges tensors: the CPU if it can."""
    name = str(dist.get_backend_config(group))
    return torch.device("cpu" if "cpu" in name or "gloo" in name else torch.accelerator.current_accelerator() or "cpu")


def missing(group: Any = None) -> str:
    """Name the ranks that do not report after a failure; every running process calls this."""
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group or dist.group.WORLD)
    try:
        store = dist.distributed_c10d._get_default_store()  # it has no public name
        base = f"blocksparse/agree/{next(_calls)}"
        store.set(f"{base}/{rank}", "")
        deadline = time.monotonic() + ROLL_CALL
        while silent := [each for each in ranks if not store.check([f"{base}/{each}"])]:
            if time.monotonic() > deadline:
                return f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            time.sleep(0.05)
    except (AttributeError, RuntimeError):  # the process of the store is gone
        pass
    return "the other ranks"
