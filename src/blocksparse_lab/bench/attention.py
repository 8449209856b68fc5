"""The time of attention on a layout, against PyTorch's dense one: it falls with the density.

On one thread, in this process' CPU time, so that other load on the machine matters little. What is timed is
checked first, against masked attention in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from time import process_time

import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse import patterns
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call, Samples, alternate
from blocksparse.nn import attention

from .case import OURS
from .rows import Row, judged

# Relative L2 error of outputs and gradients against float64, at most.
BOUND = 1e-5
PASSES = ("forward", "forward + backward")
DENSITIES = (1.0, 0.5, 0.25, 0.1, 0.05)

# Of queries, keys and values.
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class AttentionSpec:
    """The sizes of a self-attention.

    Args:
        batch, heads, tokens, d: of queries, keys and values.
        block: tokens of a block.
    """

    batch: int = 1
    heads: int = 4
    tokens: int = 2048
    d: int = 64
    block: int = 64


def rows(budget: float = 8.0, quick: bool = False) -> Iterator[Row]:
    """Measures each pass: whether time falls with the density, and the speed-ups over dense; `quick` uses small sizes.

    Raises:
        BlockSparseError: outputs or gradients differ from those of masked attention.
    """
    spec = AttentionSpec(tokens=256, d=16, block=16) if quick else AttentionSpec()
    rounds = 3 if quick else 21
    shape = (spec.tokens, spec.tokens)
    by_density = {f"density {d:g}": patterns.random(shape, spec.block, d) for d in DENSITIES}
    causal = {
        "strided": patterns.strided_attention(spec.tokens, spec.block),
        "fixed": patterns.fixed_attention(spec.tokens, spec.block),
        "small world": patterns.small_world_attention(spec.tokens, spec.block),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for pass_ in PASSES:
            yield from _rows(AttentionProblem(spec, by_density), pass_, budget, rounds, falls=True)
        for pass_ in PASSES:
            yield from _rows(AttentionProblem(spec, causal, causal=True), pass_, budget, rounds, falls=False)
    finally:
        torch.set_num_threads(before)


def _rows(problem: AttentionProblem, pass_: str, budget: float, rounds: int, falls: bool) -> Iterator[Row]:
    errors = problem.check()
    samples = alternate(problem.calls(pass_), rounds=rounds, budget=budget, clock=_cpu_clock)
    s = problem.spec
    work = f"{'causal ' if problem.causal else ''}attention {pass_}, {s.heads} heads, {s.tokens:,} tokens, d {s.d}"
    if falls:  # the first is dense: PyTorch's own kernel
        yield falls_row(work, list(problem.layouts)[1:], samples)
    for name, layout in problem.layouts.items():
        speedup = samples.ratio("dense", name)
        details = {
            **asdict(s),
            "layout": name,
            "density": layout.density,
            "error": errors[name],
            "seconds": {who: vars(samples.time(key)) for who, key in ((OURS, name), ("dense", "dense"))},
            "ratio": vars(speedup),
        }
        known = "" if falls else f" of density {layout.density:.3g}"
        yield judged(f"{work}, {name}{known}", speedup, "dense", details=details)


def falls_row(work: str, names: list[str], samples: Samples) -> Row:
    """Whether each layout, of those from the densest on, takes less time than the one before."""
    seconds = [samples.time(name).median for name in names]
    parts = ", ".join(f"{t / seconds[0]:.2f}" for t in seconds)
    falls = all(later < earlier for earlier, later in pairwise(seconds))
    details = {"layouts": names, "seconds": seconds}
    return Row(f"{work}, {names[0]} to {names[-1]}", "time falls with density", f"{parts} of the first", falls, details)


def _cpu_clock(call: Call, repeat: int) -> float:
    start = process_time()
    for _ in range(repeat):
        call()
    return (process_time() - start) / repeat


class AttentionProblem:
    """Queries, keys and values, and layouts for them.

    Args:
        spec: the sizes.
        layouts: by name.
        causal: whether no key behind a query is seen, by layouts and dense.
    """

    def __init__(self, spec: AttentionSpec, layouts: Mapping[str, BlockLayout], causal: bool = False, seed: int = 0):
        self.spec, self.layouts, self.causal = spec, dict(layouts), causal
        generator = torch.Generator().manual_seed(seed)
        shape = (spec.batch, spec.heads, spec.tokens, spec.d)
        self.qkv = [torch.randn(shape, generator=generator) for _ in range(3)]
        self.upstream = torch.randn(shape, generator=generator)

    def check(self) -> dict[str, float]:
        """The largest relative L2 error of output and gradients, by layout.

        Raises:
            BlockSparseError: more than `BOUND`.
        """
        found = {}
        for name, layout in self.layouts.items():
            block = layout.block_shape
            mask = layout.mask().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            mask = mask.tril() if self.causal else mask
            ours = self._results(self._ours(layout), torch.float32)
            exact = self._results(partial(F.scaled_dot_product_attention, attn_mask=mask), torch.float64)
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))
            if not error <= BOUND:
                raise BlockSparseError.expected(f"attention, {name}", f"an error of at most {BOUND:g}", error)
            found[name] = error
        return found

    def calls(self, pass_: str) -> dict[str, Call]:
        """The calls to time: dense attention, and attention on each layout."""
        dense = partial(F.scaled_dot_product_attention, is_causal=self.causal)
        functions = {"dense": dense} | {name: self._ours(layout) for name, layout in self.layouts.items()}
        return {name: self._call(function, pass_) for name, function in functions.items()}

    def _ours(self, layout: BlockLayout) -> Attention:
        return partial(attention, layout=layout, causal=self.causal)

    def _call(self, function: Attention, pass_: str) -> Call:
        qkv = [tensor.clone().requires_grad_(pass_ != "forward") for tensor in self.qkv]

        def forward() -> Tensor:
            with torch.no_grad():
                return function(*qkv)

        def both() -> object:
            return torch.autograd.grad(function(*qkv), qkv, self.upstream)

        return forward if pass_ == "forward" else both

    def _results(self, function: Attention, dtype: torch.dtype) -> list[Tensor]:
        qkv = [tensor.to(dtype, copy=True).requires_grad_() for tensor in self.qkv]
        y = function(*qkv)
        return [t.double() for t in (y.detach(), *torch.autograd.grad(y, qkv, self.upstream.to(dtype)))]
