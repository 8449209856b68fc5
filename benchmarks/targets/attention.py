"""Time attention on a layout against PyTorch's dense attention and FlexAttention; its time must fall with the density.

Results are checked against masked attention in float64 before anything is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from blocksparse import patterns
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call, Samples
from blocksparse.nn import attention
from blocksparse_lab.bench.case import OURS, backward, check_errors, forward, relative_error
from targets.rows import Row, RowIterator, race, timing_options

# Largest relative L2 error of outputs and gradients against float64.
BOUND = 1e-5
PASSES = ("forward", "forward + backward")
DENSITIES = (1.0, 0.5, 0.25, 0.1, 0.05)
# Up to density SPARSE, each pass must be at least LEAST times as fast as either peer.
SPARSE, LEAST = 0.5, 1.0

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """The sizes of a self-attention: batch, heads, tokens, features per head, tokens per block."""

    batch: int = 1
    heads: int = 4
    tokens: int = 2048
    d: int = 64
    block: int = 64


def rows(budget: float = 8.0, quick: bool = False) -> RowIterator:
    """Yield rows for each pass: whether time falls with the density, and speed-ups over dense; `quick` uses small
    sizes.

    Raises:
        BlockSparseError: outputs or gradients differ from those of masked attention.
    """
    spec = AttentionSpec(tokens=256, d=16, block=16) if quick else AttentionSpec()
    shape = (spec.tokens, spec.tokens)
    by_density = {f"density {d:g}": patterns.random(shape, spec.block, d) for d in DENSITIES}
    causal = {
        "strided": patterns.strided_attention(spec.tokens, spec.block),
        "fixed": patterns.fixed_attention(spec.tokens, spec.block),
        "small world": patterns.small_world_attention(spec.tokens, spec.block),
    }
    for problem in (AttentionProblem(spec, by_density, flex=not quick), AttentionProblem(spec, causal, causal=True)):
        errors = problem.check()
        for pass_ in PASSES:
            yield from _rows(problem, errors, pass_, **timing_options(budget, quick))


def _rows(
    problem: AttentionProblem, errors: Mapping[str, float], pass_: str, rounds: int, budget: float
) -> RowIterator:
    """Yield the rows of one pass."""
    timed, s = race(problem.calls(pass_), rounds, budget), problem.spec
    work = f"{'causal ' if problem.causal else ''}attention {pass_}, {s.heads} heads, {s.tokens:,} tokens, d {s.d}"
    if not problem.causal:  # the first layout is dense, which runs PyTorch's own kernel
        yield falls_row(work, list(problem.layouts)[1:], timed.samples)
    for name, layout in problem.layouts.items():
        seconds = {who: vars(timed.samples.time(key)) for who, key in ((OURS, name), ("dense", "dense"))}
        details = {**asdict(s), "layout": name, "density": layout.density, "error": errors[name], "seconds": seconds}
        known = f" of density {layout.density:.3g}" if problem.causal else ""
        least = LEAST if layout.density <= SPARSE else None
        yield timed.row(f"{work}, {name}{known}", "dense", name, "dense", details=details, least=least)
    for name in problem.layouts:
        if (peer := flex_name(name)) in timed.samples.names:
            yield timed.row(f"{work}, {name}, compiled", peer, name, "FlexAttention", least=LEAST)


def falls_row(work: str, names: list[str], samples: Samples) -> Row:
    """Return the row that says whether each layout takes less time than the one before it; the first is the densest."""
    seconds = [samples.time(name).median for name in names]
    parts = ", ".join(f"{t / seconds[0]:.2f}" for t in seconds)
    falls = all(later < earlier for earlier, later in pairwise(seconds))
    details = {"layouts": names, "seconds": seconds}
    return Row(f"{work}, {names[0]} to {names[-1]}", "time falls with density", f"{parts} of the first", falls, details)


class AttentionProblem:
    """Queries, keys and values with several layouts.

    Args:
        causal: whether queries ignore later keys.
        flex: whether to time the forward pass of FlexAttention too, if it compiles.
    """

    def __init__(
        self, spec: AttentionSpec, layouts: Mapping[str, BlockLayout], causal: bool = False, flex: bool = False,
        seed: int = 0,
    ):  # fmt: skip
        self.spec, self.layouts, self.causal, self.flex = spec, dict(layouts), causal, flex
        generator = torch.Generator().manual_seed(seed)
        shape = (spec.batch, spec.heads, spec.tokens, spec.d)
        self.qkv = [torch.randn(shape, generator=generator) for _ in range(3)]
        self.upstream = torch.randn(shape, generator=generator)

    def check(self) -> dict[str, float]:
        """Return the largest relative L2 error of output and gradients, by layout."""
        errors = {}
        for name, layout in self.layouts.items():
            block = layout.block_shape
            mask = layout.mask().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            mask = mask.tril() if self.causal else mask
            ours = self._results(self._ours(layout), torch.float32)
            exact = self._results(partial(F.scaled_dot_product_attention, attn_mask=mask), torch.float64)
            errors[name] = max(map(relative_error, ours, exact))
        check_errors(BOUND, errors, "attention")
        return errors

    def calls(self, pass_: str) -> dict[str, Call]:
        """Return the calls to time: dense attention, and attention on each layout."""
        dense = partial(F.scaled_dot_product_attention, is_causal=self.causal)
        functions = {"dense": dense} | {name: self._ours(layout) for name, layout in self.layouts.items()}
        if pass_ == "forward":
            if self.flex:
                functions |= {flex_name(name): peer for name, peer in self._flex().items()}
            return {name: forward(function, *self.qkv) for name, function in functions.items()}
        return {name: backward(function, self.qkv, self.upstream, 3) for name, function in functions.items()}

    def _ours(self, layout: BlockLayout) -> Attention:
        return partial(attention, layout=layout, causal=self.causal)

    def _flex(self) -> dict[str, Attention]:
        """Return FlexAttention on each layout that is not dense, or nothing if it does not compile."""
        compiled: Any = torch.compile(flex_attention)
        masks = {name: _block_mask(layout) for name, layout in self.layouts.items() if layout.density < 1}
        functions: dict[str, Attention] = {name: partial(compiled, block_mask=mask) for name, mask in masks.items()}
        try:
            errors = {
                name: relative_error(peer(*self.qkv), self._ours(self.layouts[name])(*self.qkv))
                for name, peer in functions.items()
            }
        except Exception as error:  # no compiler, or an error of it
            print(f"no FlexAttention here: {error!s:.200}", file=sys.stderr)
            return {}
        check_errors(BOUND, errors, "FlexAttention")
        return functions

    def _results(self, function: Attention, dtype: torch.dtype) -> list[Tensor]:
        """Return output and gradients in float64."""
        qkv = [tensor.to(dtype) for tensor in self.qkv]
        gradients: Any = backward(function, qkv, self.upstream.to(dtype), 3)()
        return [t.double() for t in (function(*qkv), *gradients)]


def flex_name(layout: str) -> str:
    """Return the name of FlexAttention's time on a layout."""
    return f"FlexAttention, {layout}"


def _block_mask(layout: BlockLayout) -> BlockMask:
    """Return the layout's blocks as full ones, which FlexAttention does not mask."""
    mask = layout.mask().int()[None, None]
    counts, cols = mask.sum(-1, dtype=torch.int32), torch.sort(mask, stable=True, descending=True).indices.int()
    none = torch.zeros_like(counts), torch.zeros_like(cols)
    return BlockMask.from_kv_blocks(*none, counts, cols, BLOCK_SIZE=layout.block_shape)
