"""Which tile a Triton kernel runs with: the nearest tuned one of this GPU model, else a rule.

Tuned tiles are JSON, one file per GPU model: those that `blocksparse tune` wrote on this machine come first, then those
in the folder `tiles` beside this file. Nothing is ever tuned in a call.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...errors import BlockSparseError

PASSES = ("forward", "dgrad", "wgrad")
# Up to so many tokens the weights' bytes are the bound, above it the tensor cores and the L2 cache.
FEW_TOKENS = 64
# Tiles, splits and schedules change with the token count at powers of two between these.
LEAST_TOKENS, MOST_TOKENS = 16, 8192


@dataclass(frozen=True)
class Tile:
    """The tile of one program, and how Triton compiles it.

    `tokens` x `outputs` sums, `lanes` of the inner dimension per step; of wgrad: `lanes` x `outputs` sums, `tokens` per
    step. `stages` is the depth of the software pipeline; loads behind an index load get about half of it in buffers.
    """

    tokens: int
    outputs: int
    lanes: int
    warps: int
    stages: int
    group: int = 1  # tiles of tokens that come to one task side by side, to share its weights in the cache
    pairs: bool = False  # two rows per task, inputs that both need loaded once


@dataclass(frozen=True)
class Gpu:
    """What of a GPU the choice depends on."""

    name: str
    kind: str  # "sm80", "sm90", "gfx942": instruction set
    multiprocessors: int
    shared_memory: int  # bytes a program may use


@dataclass(frozen=True)
class Work:
    """One product, as far as the choice of its tile goes."""

    pass_: str
    dtype: torch.dtype
    block: tuple[int, int]
    tokens: int  # of a bucket
    density: float


def bucket(tokens: int) -> int:
    """The power of two that stands for this many tokens, by comparisons only, so that a traced size keeps its freedom.

    >>> bucket(1), bucket(33), bucket(64), bucket(10**6)
    (16, 64, 64, 8192)
    """
    size = LEAST_TOKENS
    while size < MOST_TOKENS and tokens > size:
        size *= 2
    return size


def tile_for(work: Work, gpu: Gpu) -> Tile:
    """The tile to run this work with on this GPU."""
    return _tile_for(work, gpu, _forced.get(work.pass_))


@lru_cache(maxsize=4096)
def _tile_for(work: Work, gpu: Gpu, forced: Tile | None) -> Tile:
    return fit(forced or _nearest(work, _tuned(gpu.name)) or rule(work, gpu), work, gpu)


_forced: dict[str, Tile] = {}


@contextmanager
def use_tiles(**tiles: Tile) -> Iterator[None]:
    """Within it the given passes run with the given tiles: `use_tiles(forward=..., dgrad=..., wgrad=...)`."""
    before = dict(_forced)
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def forced() -> tuple[tuple[str, Tile], ...]:
    """The tiles that are forced now: schedules made for them are not those of other calls."""
    return tuple(_forced.items())


def rule(work: Work, gpu: Gpu) -> Tile:
    """A tile from the bounds alone (bytes of the weights, L2 traffic of the inputs, registers), for any GPU."""
    height, width = work.block[::-1] if work.pass_ == "dgrad" else work.block
    outputs = min(max(_power_of_two(height), 16), 128)
    inputs = max(_power_of_two(width), 16)
    wide = work.dtype in (torch.float32, torch.float64)
    amd = gpu.kind.startswith("gfx")
    if work.dtype == torch.float64 or (wide and torch.backends.cuda.matmul.fp32_precision != "tf32"):
        # No tensor cores: sums and operands share the registers of plain multiply-adds.
        tile = Tile(tokens=min(work.tokens, 32), outputs=min(outputs, 32), lanes=32, warps=4, stages=5)
        if work.pass_ == "wgrad":
            tile = replace(tile, lanes=min(max(inputs, 32), 64), tokens=16, stages=3)
    elif work.pass_ == "wgrad":
        lanes = max(128, min(inputs, 128))
        tile = Tile(tokens=32 if wide else 64, outputs=outputs, lanes=lanes, warps=8 if outputs > 64 else 4, stages=4)
    elif work.tokens <= FEW_TOKENS:
        lanes = 64 if wide else 128
        tile = Tile(tokens=work.tokens, outputs=min(outputs, 64), lanes=lanes, warps=4, stages=7)
    elif gpu.kind >= "sm90" and not amd:
        tile = Tile(tokens=min(work.tokens, 256), outputs=outputs, lanes=32 if wide else 64, warps=8, stages=5)
    else:
        tile = Tile(tokens=min(work.tokens, 128), outputs=outputs, lanes=32, warps=4, stages=5)
    return replace(tile, stages=min(tile.stages, 2)) if amd else tile


def fit(tile: Tile, work: Work, gpu: Gpu) -> Tile:
    """The tile made to fit the shared memory of a program: fewer stages, then smaller steps.

    Raises:
        BlockSparseError: not even the smallest fits.
    """
    while shared_memory(tile, work) > gpu.shared_memory:
        if tile.stages > 2:
            tile = replace(tile, stages=max(tile.stages - 2, 2))
        elif tile.lanes > 16 and work.pass_ != "wgrad":
            tile = replace(tile, lanes=tile.lanes // 2)
        elif tile.tokens > 16:
            tile = replace(tile, tokens=tile.tokens // 2)
        else:
            expected = f"at least {shared_memory(tile, work)} bytes of shared memory per program for this {work}"
            raise BlockSparseError.expected("GPU", expected, f"{gpu.shared_memory} on {gpu.name}")
    return tile


def shared_memory(tile: Tile, work: Work) -> int:
    """An upper estimate of the bytes of shared memory that the pipeline's buffers take."""
    itemsize = work.dtype.itemsize
    if work.pass_ == "wgrad":
        return max(tile.stages, 1) * (tile.lanes + tile.outputs) * tile.tokens * itemsize
    buffers = tile.stages // 2 + 1
    rows = tile.tokens + tile.outputs * (2 if tile.pairs else 1)
    return buffers * (rows * itemsize + 12) * tile.lanes


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU of this device; where kernels are interpreted, one to plan for."""
    if device.type != "cuda":
        return INTERPRETED
    facts = torch.cuda.get_device_properties(device)
    kind = facts.gcnArchName.split(":")[0] if torch.version.hip else f"sm{facts.major}{facts.minor}"
    memory = getattr(facts, "shared_memory_per_block_optin", None) or facts.shared_memory_per_block
    return Gpu(facts.name, kind, facts.multi_processor_count, memory)


INTERPRETED = Gpu("Triton's interpreter", "sm90", 132, 227 * 1024)


# -- tuned tiles ------------------------------------------------------------------------------------------------


def slug(name: str) -> str:
    """The file name of a GPU model.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def user_folder() -> Path:
    """Where `blocksparse tune` writes: $BLOCKSPARSE_TILES, or the user's cache folder."""
    given = os.environ.get("BLOCKSPARSE_TILES")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "blocksparse" / "tiles"


def shipped_folder() -> Path:
    return Path(__file__).parent / "tiles"


@lru_cache
def _tuned(name: str) -> dict[Work, Tile]:
    for folder in (user_folder(), shipped_folder()):
        path = folder / f"{slug(name)}.json"
        if path.exists():
            return read(path)
    return {}


def forget_tuned() -> None:
    """Reads the files anew at the next call."""
    _tuned.cache_clear()
    _tile_for.cache_clear()


def read(path: Path) -> dict[Work, Tile]:
    """The tuned tiles in a file.

    Raises:
        BlockSparseError: no such file, or not one that `write` wrote.
    """
    try:
        entries = json.loads(path.read_text())["tiles"]
        return {_work(entry): Tile(**entry["tile"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BlockSparseError.expected(
            "tuned tiles", "a file that `blocksparse tune` wrote", f"{path}: {error}"
        ) from error


def write(path: Path, gpu: Gpu, tiles: Mapping[Work, Tile], facts: Mapping[str, Any]) -> None:
    """Tuned tiles as JSON, with the facts of the run that found them."""
    entries = [
        {
            "pass": work.pass_,
            "dtype": str(work.dtype).removeprefix("torch."),
            "block": list(work.block),
            "tokens": work.tokens,
            "density": work.density,
            "tile": asdict(tile),
        }
        for work, tile in tiles.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": asdict(gpu), **facts, "tiles": entries}, indent=1) + "\n")


def _work(entry: Mapping[str, Any]) -> Work:
    block = entry["block"]
    return Work(entry["pass"], getattr(torch, entry["dtype"]), (block[0], block[1]), entry["tokens"], entry["density"])


def _nearest(work: Work, tuned: Mapping[Work, Tile]) -> Tile | None:
    """The tile of the tuned work of the same pass, dtype and block that is nearest in tokens, then density."""

    def same(other: Work) -> bool:
        return (other.pass_, other.dtype, other.block) == (work.pass_, work.dtype, work.block)

    def few(other: Work) -> bool:
        return (other.tokens <= FEW_TOKENS) == (work.tokens <= FEW_TOKENS)

    def distance(other: Work) -> float:
        return abs(math.log2(other.tokens / work.tokens)) + abs(
            math.log(max(other.density, 1e-4) / max(work.density, 1e-4))
        )

    known: Iterable[Work] = [other for other in tuned if same(other) and few(other)]
    nearest = min(known, key=distance, default=None)
    return None if nearest is None else tuned[nearest]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
