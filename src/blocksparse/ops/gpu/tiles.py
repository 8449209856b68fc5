"""The choice of a Triton kernel's tile: the nearest tuned tile of this GPU model, else a rule.

Tuned tiles are JSON, one file per GPU model. Files that `blocksparse tune` wrote on this machine override those in the
folder `tiles` next to this file. A call never tunes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ... import files
from ...checked import checked_block, integer, is_int, number
from ...errors import BlockSparseError

PASSES = ("forward", "dgrad", "wgrad")
DTYPES = ("float16", "bfloat16", "float32", "tf32", "float64")
# Up to this number of tokens, the bytes of the weights bound the time; above it, tensor cores and the L2 cache.
FEW_TOKENS = 64
# Tiles, splits and schedules depend on the token count rounded up to a power of two between these.
MIN_TOKENS, MAX_TOKENS = 16, 8192
# Limits of all kernels: sums along a side of a tile, and warps of a program.
MAX_SIZE, MAX_WARPS = 1 << 16, 32
# Bytes of shared memory for the barriers of asynchronous copies and tensor cores.
BARRIERS = 64


def tf32() -> bool:
    """Return whether PyTorch's own switch allows TF32 in products of float32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# Dynamo cannot trace it; graphs have a guard on the switch anyway.
tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Tile:
    """The tile of one program, and how Triton compiles it.

    `block_m` counts tokens, `block_n` outputs, `block_k` inputs. Forward and dgrad have `block_m` x `block_n` sums and
    steps of `block_k`; wgrad, which sums over tokens, has `block_k` x `block_n` sums and steps of `block_m`. `stages`
    is the depth of the software pipeline; loads that depend on a load of an index have about half of it in buffers.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 1  # consecutive token tiles of one task, which share its weights in the cache
    pairs: bool = False  # two rows per task, inputs that both need loaded once

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "warps"):
            size, most = getattr(self, name), MAX_WARPS if name == "warps" else MAX_SIZE
            if not is_int(size) or not 1 <= size <= most or size & (size - 1):
                raise BlockSparseError.expected(f"{name} of a tile", f"a power of two, at most {most}", repr(size))
        for name in ("stages", "group_m"):
            integer(f"{name} of a tile", getattr(self, name), 1, below=MAX_SIZE + 1)
        if not isinstance(self.pairs, bool):
            raise BlockSparseError.expected("pairs of a tile", "True or False", repr(self.pairs))


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU on which the choice of a tile depends."""

    name: str
    kind: str  # "sm80", "sm90", "gfx942": instruction set
    multiprocessors: int
    shared_memory: int  # bytes a program may use


@dataclass(frozen=True)
class Work:
    """The properties of a product on which the choice of its tile depends."""

    pass_: str
    dtype: torch.dtype
    block: tuple[int, int]
    tokens: int  # of a bucket
    density: float
    tf32: bool = field(default_factory=tf32)

    def __post_init__(self) -> None:
        if self.dtype != torch.float32:
            object.__setattr__(self, "tf32", False)

    @property
    def dtype_name(self) -> str:
        """The name of the dtype; "tf32" for float32 whose products are rounded to TF32."""
        return "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")


def bucket(tokens: int) -> int:
    """Return the token count rounded up to a power of two in range, by comparisons, which a traced size allows.

    >>> bucket(1), bucket(33), bucket(64), bucket(10**6)
    (16, 64, 64, 8192)
    """
    size = MIN_TOKENS
    while size < MAX_TOKENS and tokens > size:
        size *= 2
    return size


def splits_of(programs: int, tokens: int, tile: Tile, gpu: Gpu) -> int:
    """Return into how many splits the tokens of wgrad are cut; few blocks alone would leave most of the GPU idle."""
    return max(1, min(2 * gpu.multiprocessors // programs, bucket(tokens) // (8 * tile.block_m)))


def tile_for(work: Work, gpu: Gpu) -> Tile:
    """Return the tile for this work on this GPU."""
    return _tile_for(work, gpu, _forced.get(work.pass_))


@lru_cache(maxsize=4096)
def _tile_for(work: Work, gpu: Gpu, forced: Tile | None) -> Tile:
    """Return the forced tile, else the nearest tuned one, else that of the rule; each cut to fit."""
    return fit(forced or nearest(work, _tuned(gpu.name)) or rule(work, gpu), work, gpu)


_forced: dict[str, Tile] = {}


@contextmanager
def use_tiles(**tiles: Tile) -> Iterator[None]:
    """Run passes with these tiles inside the `with`: `use_tiles(forward=..., dgrad=..., wgrad=...)`."""
    before = dict(_forced)
    _forced.update(tiles)
    _note_state()
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
        _note_state()


def forced_tile(pass_: str) -> Tile | None:
    """Return the tile that `use_tiles` sets for this pass, or None."""
    return _forced.get(pass_)


def forced(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the state on which tiles depend besides the work, as a key for caches of schedules and launches."""
    return (tf32(), *_state) if dtype == torch.float32 else _state


def _note_state() -> None:
    """Change the state on which cached tiles depend."""
    global _state
    _state = (_readings, *_forced.items())


def rule(work: Work, gpu: Gpu) -> Tile:
    """Return a tile for any GPU, from its bounds: bytes of the weights, L2 traffic of the inputs, registers.

    Sizes that the bounds do not determine are the fastest ones measured on an H100.
    """
    height, width = (power_of_two(side) for side in (work.block if work.pass_ != "dgrad" else work.block[::-1]))
    block_n = min(max(height, 16), 128)
    exact = work.dtype == torch.float32 and not work.tf32
    if work.dtype == torch.float64 or (exact and gpu.kind.startswith("gfx")):
        tile = _tile_of_multiply_adds(work, min(block_n, 64))
    elif exact:
        tile = _tile_of_three_tf32_products(work, block_n)
    elif work.pass_ == "wgrad":
        block_m = min(work.tokens, 32 if work.tf32 else 64)
        tile = Tile(block_m, block_n, block_k=128, warps=8 if block_n > 64 else 4, stages=4)
        if _reads_shared_memory(gpu) and not work.tf32 and work.tokens >= 128:
            tile = _WGRAD.get(block_n, tile)
    elif work.tokens <= FEW_TOKENS:
        tile = Tile(work.tokens, min(block_n, 64), block_k=64 if work.tf32 else 128, warps=4, stages=7)
    elif _reads_shared_memory(gpu):
        block_m = 256 if gpu.kind == "sm90" or not work.tf32 else 128
        tile = Tile(min(work.tokens, block_m), block_n, block_k=32 if work.tf32 else 64, warps=8, stages=5)
        if not work.tf32 and block_n == 32 and width == 32:  # whole blocks
            tile = replace(tile, block_k=32, warps=4, stages=7)
        elif not work.tf32 and block_n == 64 and width >= 64:
            # Half the loads of weights, if there are still tiles for all multiprocessors.
            many = gpu.kind == "sm90" and work.tokens >= 4096
            tile = replace(tile, block_m=512) if many else replace(tile, warps=4, stages=3)
    else:
        large = block_n > 64
        block_k = 16 if large and work.tf32 else 32
        tile = Tile(min(work.tokens, 128), block_n, block_k, warps=8 if large else 4, stages=5)
    # Triton's pipeline for AMD has one step in registers and one in shared memory.
    return replace(tile, stages=2) if gpu.kind.startswith("gfx") else tile


# Tiles of wgrad by outputs, if tensor cores read shared memory: the fastest ones measured on an H100. For small blocks,
# several programs per multiprocessor without a pipeline take half the time of one or two with a deep one.
_WGRAD = {
    32: Tile(block_m=128, block_n=32, block_k=128, warps=4, stages=2),
    64: Tile(block_m=64, block_n=64, block_k=256, warps=8, stages=4),
    128: Tile(block_m=64, block_n=128, block_k=128, warps=4, stages=3),
}


def _tile_of_multiply_adds(work: Work, block_n: int) -> Tile:
    """Return the tile of a product by plain multiply-adds or in float64."""
    # Plain multiply-adds, or products of 16 x 8 in float64: sums and operands share the registers.
    double = work.dtype == torch.float64
    if work.pass_ == "wgrad":
        return Tile(block_m=16, block_n=block_n, block_k=64 if double or block_n > 32 else 128, warps=4, stages=4)
    if work.tokens <= FEW_TOKENS:
        block_n = min(block_n, 32)
    block_k = 16 if double else 32 if work.tokens <= 32 else max(block_n // 2, 16)
    return Tile(min(work.tokens, 64), block_n, block_k, warps=4, stages=5)


def _tile_of_three_tf32_products(work: Work, block_n: int) -> Tile:
    """Return the tile of a float32 product that is computed as three products of TF32."""
    # Both halves of both operands are in registers at once.
    if work.pass_ == "wgrad":
        return Tile(
            block_m=min(work.tokens, 32),
            block_n=min(block_n, 64),
            block_k=64 if block_n > 32 else 128,
            warps=4,
            stages=3,
        )
    if work.tokens <= FEW_TOKENS:
        return Tile(work.tokens, min(block_n, 32), block_k=64, warps=2 if work.tokens <= 32 else 4, stages=7)
    block_m = min(work.tokens, 64 if block_n > 64 else 128)
    return Tile(block_m, block_n, block_k=32, warps=4, stages=5)


def tile_of_pairs(work: Work, gpu: Gpu) -> Tile | None:
    """Return a tile for two rows at a time if that may be faster than the rule's tile for one, else None.

    That needs `wgmma`, whose 64 outputs two rows fill, and inputs that bound the time.
    """
    tile = replace(rule(work, gpu), warps=4, stages=5, pairs=True)
    may = _reads_shared_memory(gpu) and work.tokens > FEW_TOKENS and work.dtype.itemsize == 2
    chosen = work.pass_ in _forced or nearest(work, _tuned(gpu.name)) is not None
    return fit(tile, work, gpu) if may and not chosen and tile.block_n == tile.block_k == 32 else None


def _reads_shared_memory(gpu: Gpu) -> bool:
    """Return whether tensor cores read shared memory (wgmma, tcgen05), which leaves registers for large tiles."""
    return gpu.kind.startswith("sm") and 90 <= int(gpu.kind[2:]) < 120


def fits_tensor_memory(sums: int, products: int, rows: int, columns: int, gpu: Gpu) -> bool:
    """Return whether a step's sums of `rows` x `columns`, each of `products` products, fit Blackwell's tensor memory.

    Triton 3.7 keeps 2 n - 2 copies of a sum of n products there. A kernel whose copies do not fit compiles to a trap,
    and Triton refuses to launch it.
    """
    if not (_reads_shared_memory(gpu) and int(gpu.kind[2:]) >= 100):
        return True
    # The memory has 128 rows by 512 columns; two sums of 64 rows are stacked.
    return sums * max(2 * products - 2, 1) * columns * rows <= 128 * 512


def fit(tile: Tile, work: Work, gpu: Gpu) -> Tile:
    """Return the tile reduced to the shared memory of a program: fewer stages, then smaller steps."""
    while shared_memory(tile, work) > gpu.shared_memory:
        if tile.stages > 2:
            tile = replace(tile, stages=max(tile.stages - 2, 2))
        elif tile.block_k > 16 and work.pass_ != "wgrad":
            tile = replace(tile, block_k=tile.block_k // 2)
        elif tile.block_m > 16:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            expected = f"at least {shared_memory(tile, work)} bytes of shared memory per program for this {work}"
            raise BlockSparseError.expected("GPU", expected, f"{gpu.shared_memory} on {gpu.name}")
    return tile


def shared_memory(tile: Tile, work: Work) -> int:
    """Return an upper estimate of the bytes of shared memory of a program."""
    itemsize = work.dtype.itemsize
    if work.pass_ == "wgrad":
        return max(tile.stages, 1) * (tile.block_k + tile.block_n) * tile.block_m * itemsize + BARRIERS
    buffers = tile.stages // 2 + 1
    outputs = tile.block_n * (2 if tile.pairs else 1)
    steps = buffers * ((tile.block_m + outputs) * itemsize + 12) * tile.block_k + BARRIERS
    return max(steps, tile.block_m * outputs * itemsize)  # results pass through shared memory


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the GPU of this device; for the interpreter, a GPU to plan for."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    kind = properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm{properties.major}{properties.minor}"
    memory = getattr(properties, "shared_memory_per_block_optin", None) or properties.shared_memory_per_block
    return Gpu(properties.name, kind, properties.multi_processor_count, memory)


INTERPRETED = Gpu("Triton's interpreter", "sm90", 132, 227 * 1024)


# -- tuned tiles ------------------------------------------------------------------------------------------------


def slug(name: str) -> str:
    """Return the file name of a GPU model.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def user_folder() -> Path:
    """Return the folder of `blocksparse tune`: $BLOCKSPARSE_TILES, or one in the user's cache folder."""
    folder = os.environ.get("BLOCKSPARSE_TILES")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(folder) if folder else cache / "blocksparse" / "tiles"


def shipped_folder() -> Path:
    return Path(__file__).parent / "tiles"


@lru_cache
def _tuned(name: str) -> dict[Work, Tile]:
    """Return the tuned tiles of a GPU model."""
    tiles: dict[Work, Tile] = {}
    for folder in (shipped_folder(), user_folder()):  # tiles of the user override shipped ones
        path = folder / f"{slug(name)}.json"
        if path.exists():
            tiles |= read(path)
    return tiles


def forget_tuned() -> None:
    """Let the next call read the files again."""
    global _readings
    _readings += 1
    _note_state()
    _tuned.cache_clear()
    _tile_for.cache_clear()


_readings = 0
_state: tuple[Any, ...] = (0,)


def read(path: Path) -> dict[Work, Tile]:
    """Read the tuned tiles of a file."""
    try:
        entries = files.read_json(path, "tuned tiles")["tiles"]
        return {_work(entry): Tile(**entry["tile"]) for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BlockSparseError.expected(
            "tuned tiles", "a file that `blocksparse tune` wrote", f"{path}: {error}"
        ) from error


def write(path: Path, gpu: Gpu, tiles: Mapping[Work, Tile], facts: Mapping[str, Any]) -> None:
    """Write tuned tiles as JSON, with the facts of the run that found them."""
    entries = [
        {
            "pass": work.pass_,
            "dtype": work.dtype_name,
            "block": list(work.block),
            "tokens": work.tokens,
            "density": work.density,
            "tile": asdict(tile),
        }
        for work, tile in tiles.items()
    ]
    text = json.dumps({"gpu": asdict(gpu), **facts, "tiles": entries}, indent=1) + "\n"
    # A temporary file first, so that a run that is killed while it writes leaves the file unchanged.
    temporary = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        raise BlockSparseError.expected(str(path), "a file to write to", error.strerror or error) from error


def _work(entry: Mapping[str, Any]) -> Work:
    """Return the `Work` of an entry in a file of tuned tiles."""
    pass_, name = entry["pass"], entry["dtype"]
    if pass_ not in PASSES or name not in DTYPES:
        raise BlockSparseError.expected("pass and dtype", f"of {', '.join(PASSES)} and {', '.join(DTYPES)}", "others")
    dtype = torch.float32 if name == "tf32" else getattr(torch, name)
    tokens, density = integer("tokens", entry["tokens"], 1, below=2**31), number("density", entry["density"], 0, 1)
    block = checked_block(entry["block"])
    integer("block", max(block), 1, below=2**31)
    return Work(pass_, dtype, block, tokens, density, name == "tf32")


def nearest(work: Work, tuned: Mapping[Work, Tile]) -> Tile | None:
    """Return the tile of the nearest tuned work in tokens and density, of the same pass, dtype and block; or None."""

    def same(other: Work) -> bool:
        return (other.pass_, other.dtype_name, other.block) == (work.pass_, work.dtype_name, work.block)

    def is_same_bound(other: Work) -> bool:
        return (other.tokens <= FEW_TOKENS) == (work.tokens <= FEW_TOKENS)

    def distance(other: Work) -> float:
        return abs(math.log2(other.tokens / work.tokens)) + abs(
            math.log(max(other.density, 1e-4) / max(work.density, 1e-4))
        )

    candidates: Iterable[Work] = [other for other in tuned if same(other) and is_same_bound(other)]
    nearest = min(candidates, key=distance, default=None)
    return None if nearest is None else tuned[nearest]


def power_of_two(size: int) -> int:
    """Return `size` rounded up to a power of two."""
    return 1 << (max(size, 1) - 1).bit_length()
