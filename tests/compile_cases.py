"""The products, convolutions and other calls that `compile_kernels.py` compiles for GPUs that are not here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from blocksparse.ops.checks import SUM_DTYPES
from blocksparse.ops.gpu import tiles
from blocksparse.ops.gpu.tiles import Gpu, Tile, Work

GPUS = {
    "sm80": Gpu("A100", "sm80", 108, 163 * 1024),
    "sm89": Gpu("RTX 4090", "sm89", 128, 99 * 1024),
    "sm90": Gpu("H200", "sm90", 132, 227 * 1024),
    "sm100": Gpu("B200", "sm100", 148, 227 * 1024),
    "gfx942": Gpu("MI300X", "gfx942", 304, 64 * 1024),
}
DTYPES = ("float32", "tf32", "float64", "float16", "bfloat16")
BLOCKS = ((8, 8), (16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (24, 40))
TOKENS = (16, 64, 8192)
# Rows and features of the gates: of a recurrence, and odd.
GATES = ((32, 2048), (7, 13))
# Rows of a step whose gates end its product.
STEPS = (128, 16)


@dataclass(frozen=True)
class Case:
    """One product to compile all kernels of."""

    pass_: str
    dtype: str  # "tf32" is float32 with that switch on
    block: tuple[int, int]
    tokens: int
    split: bool = False  # with rows so long that they are cut
    activation: str | None = None  # with it, and a bias
    tile: Tile | None = None  # not the rule's

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "tf32" else getattr(torch, self.dtype)

    @property
    def work(self) -> Work:
        return Work(self.pass_, self.torch_dtype, self.block, tiles.bucket(self.tokens), 0.1)


def cases(gpu: Gpu, extent: str) -> list[Case]:
    """The cases to compile for this GPU."""
    if extent == "few":
        return [
            *(Case(pass_, "bfloat16", (32, 32), 8192) for pass_ in tiles.PASSES),
            Case("forward", "tf32", (16, 16), 8192),
            Case("forward", "float16", (24, 40), 64),
            Case("dgrad", "float64", (32, 32), 64),
            Case("forward", "float32", (8, 8), 16),
            Case("wgrad", "float16", (128, 128), 16),
            Case("forward", "bfloat16", (32, 32), 16, split=True, activation="gelu"),
            _paired("bfloat16", (32, 32), gpu),
        ]
    if extent == "all":
        grid = itertools.product(tiles.PASSES, DTYPES, BLOCKS, TOKENS)
        found = [Case(*point, activation="gelu" if point[0] == "forward" else None) for point in grid]
        found += [replace(case, split=True) for case in found if case.pass_ != "wgrad" and case.block == (32, 32)]
    else:
        grid = itertools.product(tiles.PASSES, ("tf32", "bfloat16"), BLOCKS[:5], (16, 8192))
        found = [Case(*point) for point in grid]
        found += [Case(pass_, dtype, (32, 32), n) for pass_ in tiles.PASSES for dtype in DTYPES for n in (64, 8192)]
        found += [Case(pass_, "bfloat16", block, 8192) for pass_ in tiles.PASSES for block in BLOCKS[5:]]
        long_rows = Case("forward", "bfloat16", (32, 32), 16, split=True, activation="gelu")
        found += [long_rows, replace(long_rows, dtype="float64")]
    found += [Case("forward", "bfloat16", (128, 128), 8192, activation=name) for name in ("relu", "gelu", "silu")]
    found += [_paired(*which, gpu) for which in itertools.product(("bfloat16", "tf32"), ((16, 16), (32, 32)))]
    for work, tile in shipped(gpu):
        found.append(Case(work.pass_, str(work.dtype).removeprefix("torch."), work.block, work.tokens, tile=tile))
    return list(dict.fromkeys(found))


def _paired(dtype: str, block: tuple[int, int], gpu: Gpu) -> Case:
    """Two rows in one task."""
    case = Case("forward", dtype, block, 8192)
    with chosen(case, gpu):
        return replace(case, tile=tiles.fit(replace(tiles.rule(case.work, gpu), pairs=True), case.work, gpu))


@dataclass(frozen=True)
class GatesCase:
    """One step of an LSTM to compile the gates of, with or without what may be left out."""

    dtype: str
    rows: int
    hidden: int
    everything: bool


def gates_cases(extent: str) -> list[GatesCase]:
    if extent == "few":
        return [GatesCase("bfloat16", *GATES[0], True)]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in SUM_DTYPES]
    return [GatesCase(*point[:1], *point[1], point[2]) for point in itertools.product(dtypes, GATES, (True, False))]


@dataclass(frozen=True)
class StepCase:
    """One step of an LSTM to compile with its gates, and the weight's gradient."""

    dtype: str
    block: tuple[int, int]
    rows: int
    split: bool  # with rows so long that they are cut


def step_cases(extent: str) -> list[StepCase]:
    if extent == "few":
        return [StepCase("bfloat16", (32, 32), STEPS[0], True)]
    found = [StepCase("bfloat16", block, rows, False) for block in BLOCKS for rows in STEPS]
    return [*found, *(StepCase(dtype, (32, 32), rows, True) for dtype in ("float16", "bfloat16") for rows in STEPS)]


@dataclass(frozen=True)
class GatedCase:
    """A gated pair of products to compile."""

    dtype: str
    block: tuple[int, int]
    tokens: int
    activation: str | None = "silu"  # with it, biases

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "tf32" else getattr(torch, self.dtype)


def gated_cases(extent: str) -> list[GatedCase]:
    if extent == "few":
        return [GatedCase("bfloat16", (32, 32), TOKENS[0]), GatedCase("bfloat16", (128, 128), TOKENS[-1])]
    blocks = BLOCKS if extent == "all" else BLOCKS[1:]
    found = [GatedCase("bfloat16", block, tokens) for block in blocks for tokens in (TOKENS[0], TOKENS[-1])]
    found += [GatedCase(dtype, (32, 32), tokens) for dtype in DTYPES for tokens in TOKENS]
    return [*dict.fromkeys(found), GatedCase("bfloat16", (128, 128), TOKENS[-1], None)]


@dataclass(frozen=True)
class ConvCase:
    """One pass of a convolution of 64 images of 28x28, padded, with or without what its positions may share."""

    pass_: str
    dtype: str
    block: tuple[int, int]
    kernel: int = 3
    stride: int = 1
    activation: str | None = None


def conv_cases(extent: str) -> list[ConvCase]:
    if extent == "few":
        found = [ConvCase(pass_, "bfloat16", (32, 32)) for pass_ in tiles.PASSES]
        return [*found, ConvCase("forward", "float32", (16, 16))]
    dtypes = ("tf32", "bfloat16") if extent == "cover" else DTYPES
    found = [ConvCase(*point) for point in itertools.product(tiles.PASSES, dtypes, BLOCKS)]
    found += [ConvCase(pass_, dtype, (32, 32)) for pass_ in tiles.PASSES for dtype in DTYPES]
    found += [ConvCase(pass_, "bfloat16", (32, 32), *of) for pass_ in tiles.PASSES for of in ((3, 2), (4, 2), (5, 1))]
    found += [ConvCase(pass_, "bfloat16", (64, 64), 4, stride) for pass_ in tiles.PASSES for stride in (1, 2)]
    found.append(ConvCase("forward", "bfloat16", (32, 32), activation="gelu"))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class AttentionCase:
    """The three passes of attention on blocks of one size, with a causal window or a softcap or without both."""

    dtype: str
    block: int
    features: int
    heads: int = 1  # that share keys
    window: bool = False
    softcap: float = 0.0
    per_head: bool = False  # a layout per head


def attention_cases(extent: str) -> list[AttentionCase]:
    if extent == "few":
        return [AttentionCase("bfloat16", 32, 64, heads=4, window=True)]
    blocks, features = (16, 32, 64, 128), (16, 64, 128, 256)
    found = [AttentionCase("bfloat16", block, 64) for block in blocks]
    found += [AttentionCase("bfloat16", block, size) for block in (16, 64) for size in features]
    found += [AttentionCase("float32", block, size) for block in (16, 64) for size in features[1:]]
    found += [AttentionCase("bfloat16", 16, 128, 8, True), AttentionCase("bfloat16", 64, 64, 1, True, 30.0, True)]
    found += [AttentionCase("tf32", 32, 64), AttentionCase("float16", 32, 64)]
    if extent == "all":
        points = itertools.product(("tf32", "float32", "float16", "bfloat16"), blocks, features, (1, 8), (False, True))
        found += [AttentionCase(*point) for point in points]
    return list(dict.fromkeys(found))


def shipped(gpu: Gpu) -> Iterator[tuple[Work, Tile]]:
    """The tuned tiles in the package for GPUs of this kind."""
    for path in sorted(tiles.shipped_folder().glob("*.json")):
        if json.loads(path.read_text())["gpu"]["kind"] == gpu.kind:
            yield from tiles.read(path).items()


@contextmanager
def chosen(case: Case, gpu: Gpu) -> Iterator[None]:
    """Sets the case's tile, or else the rule's, and PyTorch's TF32 switch as the case needs it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if case.dtype == "tf32" else "ieee"
    try:
        with tiles.use_tiles(**{case.pass_: case.tile or tiles.tile_for(case.work, gpu)}):
            yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
