"""Named shapes of the linear op, shared by tests, benchmarks and tuning, and the ratios the project holds itself to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...errors import BlockSparseError

DTYPES = ("float32", "float64", "bfloat16", "float16")
PASSES = ("forward", "dgrad", "wgrad", "train")


@dataclass(frozen=True)
class LinearSpec:
    """One piece of work: the shape of a block-sparse linear product, and which of its passes.

    `pass_` is "forward" (x W^T), "dgrad" (grad W), "wgrad" (grad^T x on the layout) or "train" (all three through
    autograd).

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

    def __post_init__(self) -> None:
        for name in ("out_features", "in_features", "tokens", "block"):
            if getattr(self, name) <= 0:
                raise BlockSparseError.expected(name, "a positive int", getattr(self, name))
        for name in ("out_features", "in_features"):
            if getattr(self, name) % self.block:
                raise BlockSparseError.expected(name, f"a multiple of the block size {self.block}", getattr(self, name))
        if not 0 <= self.density <= 1:
            raise BlockSparseError.expected("density", "a number from 0 to 1", self.density)
        if self.dtype not in DTYPES:
            raise BlockSparseError.expected("dtype", f"one of {', '.join(DTYPES)}", repr(self.dtype))
        if self.pass_ not in PASSES:
            raise BlockSparseError.expected("pass", f"one of {', '.join(PASSES)}", repr(self.pass_))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def products(self) -> int:
        """How many products of the size of the forward one the pass takes."""
        return 3 if self.pass_ == "train" else 1

    def as_dict(self) -> dict[str, Any]:
        """The fields as they go into a JSON file, where `pass_` is "pass"."""
        fields = asdict(self)
        return {name.rstrip("_"): value for name, value in fields.items()}

    def __repr__(self) -> str:
        return (
            f"LinearSpec({self.out_features}x{self.in_features}, {self.tokens} tokens, block {self.block}, "
            f"density {self.density:g}, {self.dtype} {self.pass_})"
        )


@dataclass(frozen=True)
class Target:
    """A spec and the speed-ups over its peers that we want at least; `needs` is a CPU feature it presumes."""

    spec: LinearSpec
    ratios: tuple[tuple[str, float], ...]
    needs: str | None = None


# The two shapes all of it turns on: the layer of a language model in training, and the wide one of the 2017 paper.
TRAINING = LinearSpec(4096, 4096, tokens=1024, density=0.1)
WIDE = LinearSpec(12288, 12288, tokens=32, density=0.03)

REACH: dict[str, Target] = {
    "fp32 forward": Target(TRAINING, (("dense", 8.5), ("torch-bsr", 25), ("bsr-matmul", 4.5))),
    "fp32 forward, few tokens": Target(replace(TRAINING, tokens=64), (("dense", 12),)),
    "fp32 forward, wide": Target(WIDE, (("dense", 40),)),
    "fp32 dgrad": Target(replace(TRAINING, pass_="dgrad"), (("dense", 8),)),
    "fp32 wgrad": Target(replace(TRAINING, pass_="wgrad"), (("dense", 8),)),
    "bf16 forward": Target(replace(TRAINING, dtype="bfloat16"), (("dense", 7),), needs="amx"),
    "bf16 forward, wide": Target(replace(WIDE, dtype="bfloat16"), (("dense", 20),), needs="amx"),
    # Faster than dense at density 0.7; at 1 its time is at most 1.1 of dense.
    **{
        f"break-even {pass_}, density {density:g}": Target(
            replace(TRAINING, pass_=pass_, density=density), (("dense", ratio),)
        )
        for pass_ in ("forward", "dgrad", "wgrad")
        for density, ratio in ((0.7, 1.0), (1.0, 1 / 1.1))
    },
}

# Small blocks, as parts of the speed of blocks of 32 at the same shape and density.
SMALL_BLOCKS: dict[int, float] = {16: 0.75, 8: 0.5}

# Time against nnz at fixed tokens is a line through nearly nothing: its intercept as a part of the dense time.
LINE_DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
LINE_INTERCEPT = 0.05
