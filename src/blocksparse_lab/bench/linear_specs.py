"""Named shapes of the linear op for tests, benchmarks and tuning, with target speed-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blocksparse import patterns
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout

DTYPES = ("float32", "float64", "bfloat16", "float16")
PASSES = ("forward", "dgrad", "wgrad", "train")
PATTERNS = ("random", "barabasi-albert")


class ProductSpec:
    """Checks and properties that specs of linear products and convolutions share."""

    block: int
    density: float
    dtype: str
    pass_: str

    def _check(self, sizes: Sequence[str], features: Sequence[str], patterns: Sequence[str]) -> None:
        """Raise unless sizes are positive, features fit the blocks, and names are known."""
        for name in (*sizes, *features, "block"):
            if getattr(self, name) <= 0:
                raise BlockSparseError.expected(name, "a positive int", getattr(self, name))
        for name in features:
            if getattr(self, name) % self.block:
                raise BlockSparseError.expected(name, f"a multiple of the block size {self.block}", getattr(self, name))
        if not 0 <= self.density <= 1:
            raise BlockSparseError.expected("density", "a number from 0 to 1", self.density)
        for name, choices in (("dtype", DTYPES), ("pass_", PASSES), ("pattern", patterns)):
            if (value := getattr(self, name)) not in choices:
                raise BlockSparseError.expected(name.rstrip("_"), f"one of {', '.join(choices)}", repr(value))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def products(self) -> int:
        """The number of products of the size of the forward pass."""
        return 3 if self.pass_ == "train" else 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file, with `pass_` as "pass"."""
        return {name.rstrip("_"): value for name, value in vars(self).items()}


@dataclass(frozen=True)
class LinearSpec(ProductSpec):
    """One pass of a block-sparse linear product.

    `pass_` is "forward" (x W^T), "dgrad" (grad W), "wgrad" (grad^T x on the layout) or "train" (all three through
    autograd). `pattern` is "random", or "barabasi-albert": square, with most blocks in few rows and columns.

    >>> LinearSpec(4096, 4096, tokens=64, density=0.1)
    LinearSpec(4096x4096, 64 tokens, block 32, density 0.1, float32 forward)
    >>> LinearSpec(64, 64, tokens=8, pass_="sideways")
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: pass: expected one of forward, dgrad, wgrad, train, got 'sideways'
    """

    out_features: int
    in_features: int
    tokens: int
    block: int = 32
    density: float = 0.1
    dtype: str = "float32"
    pass_: str = "forward"
    pattern: str = "random"

    def __post_init__(self) -> None:
        self._check(("tokens",), ("out_features", "in_features"), PATTERNS)

    def layout(self, seed: int = 0) -> BlockLayout:
        """Return a layout of the pattern with this density, or the nearest density that the pattern has."""
        shape = (self.out_features, self.in_features)
        if self.density == 1:
            return patterns.dense(shape, self.block)
        if self.pattern == "random":
            return patterns.random(shape, self.block, density=self.density, seed=seed)
        # The number of blocks as a function of m is that of `patterns.barabasi_albert`.
        blocks = self.in_features // self.block
        target = self.density * blocks**2
        m = min(range(1, blocks), key=lambda m: abs(2 * m * (blocks - m) + blocks + m * (m - 1) - target))
        return patterns.barabasi_albert(self.in_features, self.block, m=m, seed=seed)

    def shrunk(self, by: int) -> LinearSpec:
        """Return a smaller spec to try a program with: `by` times fewer features."""
        return replace(self, out_features=self.out_features // by, in_features=self.in_features // by)

    def __repr__(self) -> str:
        pattern = "" if self.pattern == "random" else f", {self.pattern}"
        return (
            f"LinearSpec({self.out_features}x{self.in_features}, {self.tokens} tokens, block {self.block}, "
            f"density {self.density:g}, {self.dtype} {self.pass_}{pattern})"
        )


@dataclass(frozen=True)
class Target:
    """A spec and the target speed-ups over its peers.

    `needs` is the CPU feature that the targets presume. `bandwidth` is the target fraction of a copy's bandwidth for
    values, inputs and outputs together. `others` are peers that are measured without a target.
    """

    spec: LinearSpec
    ratios: tuple[tuple[str, float], ...]
    needs: str | None = None
    bandwidth: float | None = None
    others: tuple[str, ...] = ()


# The two main shapes: the layer of a language model in training, and the wide one of the 2017 paper.
TRAINING = LinearSpec(4096, 4096, tokens=1024, density=0.1)
WIDE = LinearSpec(12288, 12288, tokens=32, density=0.03)

REACH: dict[str, Target] = {
    "fp32 forward": Target(TRAINING, (("dense", 8.5), ("onednn", 9), ("torch-bsr", 25), ("bsr-matmul", 4.5))),
    "fp32 forward, few tokens": Target(replace(TRAINING, tokens=64), (("dense", 12), ("onednn", 9))),
    "fp32 forward, wide": Target(WIDE, (("dense", 40),)),
    "fp32 dgrad": Target(replace(TRAINING, pass_="dgrad"), (("dense", 8),)),
    "fp32 wgrad": Target(replace(TRAINING, pass_="wgrad"), (("dense", 8),)),
    "bf16 forward": Target(replace(TRAINING, dtype="bfloat16"), (("dense", 7),), needs="amx"),
    "bf16 forward, wide": Target(replace(WIDE, dtype="bfloat16"), (("dense", 20),), needs="amx"),
    # Break-even: faster than dense at density 0.7, and at most 1.1 times the dense time at density 1.
    **{
        f"break-even {pass_}, density {density:g}": Target(
            replace(TRAINING, pass_=pass_, density=density), (("dense", ratio),)
        )
        for pass_ in ("forward", "dgrad", "wgrad")
        for density, ratio in ((0.7, 1.0), (1.0, 1 / 1.1))
    },
    **{
        f"bf16 {pass_}, all blocks": Target(
            replace(TRAINING, pass_=pass_, density=1.0, dtype="bfloat16"), (("dense", 0.95),)
        )
        for pass_ in ("forward", "dgrad", "wgrad")
    },
}

# Target speed of small blocks, as a fraction of the speed of blocks of 32 at the same shape and density.
SMALL_BLOCKS: dict[int, float] = {16: 0.75, 8: 0.5}

# For fixed tokens, time is linear in nnz; the intercept is at most this fraction of the dense time.
LINE_DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
LINE_INTERCEPT = 0.05

# On a GPU. Few tokens: the wide layer, bound by the bytes of its weight. Many tokens: training.
GPU_FEW = LinearSpec(12288, 12288, tokens=32, dtype="bfloat16")
GPU_MANY = LinearSpec(8192, 8192, tokens=8192, dtype="bfloat16")
GPU_BLOCKS = (32, 64, 128)

_few = ((0.5, 1.8), (0.25, 3.5), (0.1, 8), (0.05, 14), (0.03, 18))

GPU_REACH: dict[str, Target] = {
    **{
        f"few tokens, bf16, density {density:g}": Target(
            replace(GPU_FEW, density=density),
            (("dense", ratio),),
            bandwidth=0.75 if density >= 0.1 else None,
            others=("torch-bsr", "csr-matmul") if density == 0.1 else ("torch-bsr",),
        )
        for density, ratio in _few
    },
    **{
        f"many tokens, block {block}": Target(
            replace(GPU_MANY, block=block),
            (("dense", ratio), ("stk", 1.1)) if block == 128 else (("dense", ratio),),
            others=("torch-bsr", "csr-matmul") if block == 32 else ("torch-bsr",),
        )
        for block, ratio in zip(GPU_BLOCKS, (3, 5, 7.5), strict=True)
    },
    **{
        f"break-even, block {block}": Target(replace(GPU_MANY, block=block, density=density), (("dense", 1.0),))
        for block, density in zip(GPU_BLOCKS, (0.35, 0.5, 0.75), strict=True)
    },
    **{
        f"few tokens, fp32, density {density:g}": Target(
            replace(GPU_FEW, density=density, dtype="float32"),
            (("dense", ratio),),
            others=("bsr-matmul", "csr-matmul") if density == 0.1 else (),
        )
        for density, ratio in _few
    },
}

# Fraction of the forward pass' speed-up over dense that a training step must keep, for many tokens.
GPU_TRAINING_PART = 0.85
# Target geometric mean of the speed-ups over a peer, over all entries of GPU_REACH with this peer.
GPU_MEAN: dict[str, float] = {"torch-bsr": 1.5}
# A layout with hubs takes at most GPU_HUB_TIME times as long as a random layout with the same number of blocks.
GPU_HUBS: dict[str, LinearSpec] = {
    "few tokens": replace(GPU_FEW, pattern="barabasi-albert"),
    "many tokens": replace(GPU_MANY, pattern="barabasi-albert"),
}
GPU_HUB_TIME = 1.15
# Host seconds per call of a product that takes the GPU almost no time.
GPU_TINY = LinearSpec(256, 256, tokens=16, density=0.5, dtype="bfloat16")
GPU_HOST_TIME = 12e-6
# Training steps whose memory use is checked.
GPU_MEMORY = (replace(GPU_MANY, tokens=2048), LinearSpec(131072, 131072, tokens=64, density=0.001, dtype="bfloat16"))
