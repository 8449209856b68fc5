"""Time attention in a sliding window, the decoding of one token with a cache, and blocks chosen from the data.

The baselines are PyTorch's attention, dense or with a mask, compiled FlexAttention, and reading the visible keys and
values.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from blocksparse import BlockSparseError, patterns
from blocksparse.measure import ROUNDS
from blocksparse.nn import attention, topk_blocks
from blocksparse.ops.attention.flex import TILE, block_mask
from blocksparse.ops.attention.gathered import Place
from blocksparse_lab.bench.case import OURS, check_errors, error_bound, forward, relative_error
from targets.memory import process_bytes, reset_peak, run_in_process
from targets.rows import Row, RowIterator, format_mib, race, unmeasured_row

# Largest relative L2 error against float32 attention with a mask.
BOUND = 1e-5
# Least speed-ups over attention with a mask, over FlexAttention, and of the rate at which keys and values are read.
OVER_MASKED, OVER_FLEX, OF_READING = 3.0, 1.2, 0.9
# Decoding uses several caches in turn, whose windows have more bytes than the CPU's own caches.
CACHED_BYTES = 2**27
# Most memory of forward and backward of a long sequence, besides q, k, v and their gradients.
LONG_BYTES = int(1.2 * 2**30)
# Least speed-up over dense attention if this fraction of the blocks is chosen from the data.
OVER_DENSE, CHOSEN = 4.0, 1 / 8


@dataclass(frozen=True)
class WindowSpec:
    """The sizes of causal attention in a window: batch, heads, heads of keys, tokens, keys per query, features."""

    batch: int = 1
    heads: int = 8
    kv_heads: int = 1
    tokens: int = 16384
    window: int = 4096
    d: int = 64
    block: int = 64

    def operands(self, queries: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = (self.heads, queries), (self.kv_heads, self.tokens), (self.kv_heads, self.tokens)
        return [torch.randn(self.batch, *shape, self.d, generator=generator) for shape in shapes]

    def ours(self) -> Callable[..., Tensor]:
        layout = patterns.sliding_window(self.tokens, self.window, self.block)
        return partial(attention, layout=layout, causal=True, window_size=(self.window - 1, 0))

    def __str__(self) -> str:
        heads = f"{self.heads} heads on {self.kv_heads}, d {self.d}"
        return f"window {self.window:,} of {self.tokens:,} tokens, {heads}, batch {self.batch}"


def rows(budget: float = 8.0, quick: bool = False) -> RowIterator:
    """Yield a row per baseline, and one of memory; `quick` uses small sizes.

    Raises:
        BlockSparseError: outputs differ from those of attention with a mask.
    """
    sizes = WindowSpec(tokens=256, window=64, block=16, d=16) if quick else WindowSpec()
    yield from _forward_rows(sizes, 3, budget, flex=not quick)
    long = WindowSpec(1, 2, 2, 512, 64, 16, 16) if quick else WindowSpec(1, 8, 8, 96_000, 512)
    yield _memory_row(long)
    if not quick:
        yield from _long_rows(long, 3, 3 * budget)
    yield _chosen_row(WindowSpec(1, 2, 2, 512, 512, 16, 16) if quick else WindowSpec(1, 4, 4, 8192, 8192), 5, budget)


def _forward_rows(spec: WindowSpec, rounds: int, budget: float, flex: bool) -> RowIterator:
    q, k, v = spec.operands(spec.tokens)
    seen = torch.ones(spec.tokens, spec.tokens, dtype=torch.bool).tril_().triu_(1 - spec.window)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.expand(-1, spec.heads, -1, -1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    functions = {OURS: spec.ours(), "masked": masked}
    if flex:
        functions["flex"] = _flex(spec)
    calls = {name: forward(function, q, k, v) for name, function in functions.items()}
    exact: Any = calls["masked"]()
    results: dict[str, Any] = {name: call() for name, call in calls.items() if name != "masked"}
    errors = {name: relative_error(result, exact) for name, result in results.items()}
    check_errors(BOUND, errors, "attention in a window")
    timed = race(calls, rounds, budget)
    details: Mapping[str, Any] = {**asdict(spec), "errors": errors}
    work = f"attention forward, {spec}"
    yield timed.row(work, "masked", OURS, "PyTorch with a mask", details=details, least=OVER_MASKED)
    if flex:
        yield timed.row(f"{work}, compiled", "flex", OURS, "FlexAttention", details=details, least=OVER_FLEX)


def _flex(spec: WindowSpec) -> Callable[..., Tensor]:
    place = Place(0, spec.tokens, spec.tokens, spec.window - 1, 0)
    # create_block_mask would make int64 matrices of all tokens.
    tiles, _ = block_mask([patterns.dense((spec.tokens, spec.tokens), spec.block)], place, torch.device("cpu"), TILE)
    counts = tiles.kv_num_blocks, tiles.kv_indices, tiles.full_kv_num_blocks, tiles.full_kv_indices
    mask = BlockMask.from_kv_blocks(
        *counts, BLOCK_SIZE=TILE, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < spec.window)
    )
    compiled: Any = torch.compile(flex_attention)
    print("compiling FlexAttention", file=sys.stderr)
    return partial(compiled, block_mask=mask, enable_gqa=True)


# -- decoding ---------------------------------------------------------------------------------------------------


def decoding_rows(budget: float = 4.0, quick: bool = False) -> RowIterator:
    """Yield the rows of decoding one token, by heads, batch and dtype; `quick` uses small sizes.

    Raises:
        BlockSparseError: outputs differ from those of PyTorch's attention in float64.
    """
    for batch, heads, kv_heads in ((1, 32, 32), (1, 32, 4), (8, 32, 4)):
        decoding = WindowSpec(batch, heads, kv_heads, 16384, 1024, 128)
        if quick:
            decoding = WindowSpec(batch, 4, 4 if heads == kv_heads else 2, 256, 32, 16, 16)
        for dtype in (torch.float32, torch.bfloat16):
            yield _decoding_row(decoding, dtype, 3 if quick else ROUNDS, budget)


def _decoding_row(spec: WindowSpec, dtype: torch.dtype, rounds: int, budget: float) -> Row:
    """Time one token with caches in turn, as the layers of a model have them, so that keys come from the memory."""
    q, *window = (x.to(dtype) for x in replace(spec, tokens=spec.window).operands(1))
    cached = [spec.batch, spec.kv_heads, spec.tokens, spec.d]
    count = min(math.ceil(CACHED_BYTES / (2 * window[0].nbytes)), 64)
    caches = [[torch.empty(cached, dtype=dtype) for _ in window] for _ in range(count)]
    for of_keys_and_values in caches:  # memory before the window is never touched
        for cache, visible in zip(of_keys_and_values, window, strict=True):
            cache[:, :, -spec.window :] = visible
    ours, turn = spec.ours(), itertools.cycle(caches)

    def decode() -> Tensor:
        return ours(q, *next(turn))

    def read() -> list[Tensor]:
        return [cache[:, :, -spec.window :].view(torch.float32).sum() for cache in next(turn)]

    k, v = (x.double() for x in window)
    error = relative_error(decode(), F.scaled_dot_product_attention(q.double(), k, v, enable_gqa=True))
    check_errors(error_bound(str(dtype)[6:], q.device) * 10, {OURS: error}, "decoding")
    timed = race({OURS: forward(decode), "read": forward(read)}, rounds, budget)
    details = {**asdict(spec), "dtype": str(dtype), "caches": count, "error": error}
    work = f"decode one token, {spec}, {str(dtype)[6:]}"
    return timed.row(work, "read", OURS, "the rate of reading", details=details, least=OF_READING)


# -- a long sequence ---------------------------------------------------------------------------------------------


def _long_rows(spec: WindowSpec, rounds: int, budget: float) -> RowIterator:
    """Yield the row of a forward pass; compiled FlexAttention has no backward pass on a CPU."""
    calls = {OURS: forward(spec.ours(), *spec.operands(spec.tokens))}
    calls["flex"] = forward(_flex(spec), *spec.operands(spec.tokens))
    ours, flex = (call() for call in calls.values())
    error = relative_error(ours, flex)  # type: ignore[arg-type]
    check_errors(BOUND, {OURS: error}, "attention in a window", against="FlexAttention")
    del ours, flex
    details = {**asdict(spec), "error": error}
    work = f"attention forward, {spec}, compiled"
    yield race(calls, rounds, budget).row(work, "flex", OURS, "FlexAttention", details=details, least=1.0)


def _memory_row(spec: WindowSpec) -> Row:
    work, target = f"memory of attention forward + backward, {spec}", f"<= {format_mib(LONG_BYTES)} MiB"
    try:
        peak = run_in_process(measure_memory, asdict(spec))
    except BlockSparseError as error:
        return unmeasured_row(work, target, error)
    text = f"{format_mib(peak)} MiB besides q, k, v and their gradients"
    return Row(work, target, text, peak <= LONG_BYTES, {**asdict(spec), "peak": peak})


def measure_memory(spec: dict[str, int]) -> int:
    """Return the peak memory of forward and backward besides q, k, v and their gradients; runs in its own process."""
    sizes = WindowSpec(**spec)
    qkv = [each.requires_grad_() for each in sizes.operands(sizes.tokens)]
    upstream = torch.ones(qkv[0].shape)
    run = sizes.ours()
    reset_peak()
    before = process_bytes("VmRSS")
    torch.autograd.grad(run(*qkv), qkv, upstream)
    return process_bytes("VmHWM") - before - sum(each.nbytes for each in qkv)


# -- blocks chosen from the data ---------------------------------------------------------------------------------


def _chosen_row(spec: WindowSpec, rounds: int, budget: float) -> Row:
    q, k, v = spec.operands(spec.tokens)
    candidates = patterns.dense((spec.tokens, spec.tokens), spec.block)
    blocks = round(CHOSEN * candidates.grid[1])

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, topk_blocks(q, k, candidates, blocks))

    calls = {OURS: forward(ours, q, k, v), "dense": forward(F.scaled_dot_product_attention, q, k, v)}
    sizes = f"{spec.tokens:,} tokens, {spec.heads} heads, d {spec.d}"
    work = f"choose {blocks} of {candidates.grid[1]} blocks, and attention forward, {sizes}"
    return race(calls, rounds, budget).row(work, "dense", OURS, "dense", details=asdict(spec), least=OVER_DENSE)
