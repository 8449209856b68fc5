"""Parts of transformers in inference on a GPU: the gated MLP, attention on a layout, a linear layer with 2:4 weights.

The peers:
    dense       the same part with dense weights; PyTorch's dense attention.
    three       for the gated MLP, its three products one by one, with the same block-sparse weights.
    flex        for attention, PyTorch's FlexAttention with a mask of the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import patterns, sparsity
from blocksparse.convert import to_dense
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call
from blocksparse.nn import GatedMLP, attention
from blocksparse.ops.linear import linear
from blocksparse_lab.bench.case import OURS, Bench, Case, check_errors, forward, relative_error


@dataclass(frozen=True)
class PartSpec:
    """The sizes that all parts have; dtype bfloat16, forward pass."""

    tokens: int
    density: float
    block: int
    features: int

    products = 0  # operations are not counted: a part does more than its products
    dtype = "bfloat16"
    torch_dtype = torch.bfloat16
    small: ClassVar[dict[str, int]] = {"tokens": 128, "features": 256}

    def shrunk(self) -> Any:
        """Return a small spec, to try the program."""
        tokens, block = min(self.tokens, self.small["tokens"]), min(self.block, 32)
        return replace(self, **self.small | {"tokens": tokens, "block": block})

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {**asdict(self), "dtype": self.dtype, "pass": "forward"}

    def _describe(self, what: str) -> str:
        return f"{what}, {self.tokens} tokens, block {self.block}, density {self.density:g}"


@dataclass(frozen=True)
class MlpSpec(PartSpec):
    """A gated MLP, `features -> hidden -> features`.

    >>> print(MlpSpec(32, 0.05, 32, 4096, hidden=14336))
    gated MLP 4096-14336-4096, 32 tokens, block 32, density 0.05
    """

    hidden: int

    small: ClassVar = {**PartSpec.small, "hidden": 512}

    def __str__(self) -> str:
        return self._describe(f"gated MLP {self.features}-{self.hidden}-{self.features}")


@dataclass(frozen=True)
class AttentionSpec(PartSpec):
    """Self-attention on one text; `features` are per head.

    >>> print(AttentionSpec(4096, 0.1, 128, 64, heads=16))
    attention of 16 heads of 64, 4096 tokens, block 128, density 0.1
    """

    heads: int

    small: ClassVar = {"tokens": 256, "features": 16, "heads": 2}

    def __str__(self) -> str:
        return self._describe(f"attention of {self.heads} heads of {self.features}")


@dataclass(frozen=True)
class SemiStructuredSpec(PartSpec):
    """A square linear layer with 2:4 weights.

    >>> print(SemiStructuredSpec(8192, 0.5, 1, 8192))
    2:4 weights (to_semi_structured), hidden 8192, 8192 tokens
    """

    def __str__(self) -> str:
        return f"2:4 weights (to_semi_structured), hidden {self.features}, {self.tokens} tokens"


class PartCase(Case):
    """The tensors of a part; each copy of a contender has its own weights."""

    def __init__(self, spec: Any, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        self.bound *= 2
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def randn(self, *shape: int, gain: float = 1.0) -> Tensor:
        kind: dict[str, Any] = {"device": self.device, "generator": self.generator}
        return (gain * torch.randn(shape, **kind)).to(self.spec.torch_dtype)

    def exact(self) -> Tensor:
        """Return the correct result in float64."""
        raise NotImplementedError

    def check(self, seed: int) -> dict[str, float]:
        errors = {"y": relative_error(self.call(OURS)(), self.exact())}  # type: ignore[arg-type]
        check_errors(self.bound, errors, self.spec)
        return errors

    def find_fault(self, name: str, call: Call) -> str | None:
        if name == "dense":
            return None
        error = relative_error(call(), self.exact())  # type: ignore[arg-type]
        return None if error <= 10 * self.bound else f"wrong: {name}'s y has a relative L2 error of {error:g}"


class MlpCase(PartCase):
    """A gated MLP and its peers."""

    peers = ("dense", "three")
    rotates = True

    def __init__(self, spec: MlpSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        self.x = self.randn(spec.tokens, spec.features)
        self.copies: list[GatedMLP] = []
        self.layout = self.mlp(0).gate_proj.layout

    def mlp(self, copy: int) -> GatedMLP:
        spec = self.spec
        while len(self.copies) <= copy:
            torch.manual_seed(self.seed)  # all copies have the same layouts
            mlp = GatedMLP(spec.features, spec.hidden, density=spec.density, block_size=spec.block)
            mlp = mlp.requires_grad_(False).to(self.device, spec.torch_dtype)
            for weight in mlp.parameters():
                weight.copy_(self.randn(*weight.shape, gain=(spec.density * spec.features) ** -0.5))
            self.copies.append(mlp)
        return self.copies[copy]

    def weight_bytes(self, name: str) -> int:
        weights = 3 * self.spec.hidden * self.spec.features * self.spec.torch_dtype.itemsize
        return weights if name == "dense" else round(weights * self.spec.density)

    def call(self, name: str, copy: int = 0) -> Call:
        if name == "dense":
            sizes = (self.spec.hidden, self.spec.features)
            weights = [self.randn(*size, gain=0.02) for size in (sizes, sizes, sizes[::-1])]
            return forward(lambda x: _gated_mlp(F.linear, x, weights), self.x)
        mlp = self.mlp(copy)
        if name == OURS:
            return forward(mlp, self.x)
        layers = [(layer.values, layer.layout) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        return forward(lambda x: _gated_mlp(lambda x, weight: linear(x, *weight), x, layers), self.x)

    def exact(self) -> Tensor:
        mlp = self.mlp(0)
        layers = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        weights = [to_dense(layer.values.double(), layer.layout) for layer in layers]
        return _gated_mlp(F.linear, self.x.double(), weights)


def _gated_mlp(product: Callable[..., Tensor], x: Tensor, weights: list[Any]) -> Tensor:
    gate, up, down = weights
    return product(F.silu(product(x, gate)) * product(x, up), down)


class AttentionCase(PartCase):
    """Attention on a layout and its peers."""

    peers = ("dense", "flex")
    layout: BlockLayout

    def __init__(self, spec: AttentionSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        self.layout = patterns.random((spec.tokens, spec.tokens), spec.block, density=spec.density, seed=seed)
        self.qkv = [self.randn(1, spec.heads, spec.tokens, spec.features) for _ in range(3)]

    def call(self, name: str, copy: int = 0) -> Call:
        if name == "dense":
            return forward(F.scaled_dot_product_attention, *self.qkv)
        if name == OURS:
            return forward(lambda q, k, v: attention(q, k, v, self.layout), *self.qkv)
        return forward(_flex_attention(self.layout, self.device), *self.qkv)

    def exact(self) -> Tensor:
        mask = self.layout.mask().repeat_interleave(self.spec.block, 0).repeat_interleave(self.spec.block, 1)
        mask = mask.to(self.device)
        heads = zip(*(tensor.double().unbind(1) for tensor in self.qkv), strict=True)  # head by head, to save memory
        each = [F.scaled_dot_product_attention(q, k, v, mask) for q, k, v in heads]
        return torch.stack(each, 1).masked_fill(~mask.any(1)[:, None], 0)


def _flex_attention(layout: BlockLayout, device: torch.device) -> Callable[..., Tensor]:
    if device.type != "cuda":
        raise NotImplementedError("compiled FlexAttention is timed on a GPU")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    table, (height, width) = layout.mask().to(device), layout.block_shape
    mask = create_block_mask(
        lambda b, h, i, j: table[i // height, j // width], None, None, *layout.shape, device="cuda"
    )
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


class SemiStructuredCase(PartCase):
    """A linear layer with 2:4 weights and its dense peer."""

    peers = ("dense",)
    layout = None

    def __init__(self, spec: SemiStructuredSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        if self.device.type != "cuda":
            raise NotImplementedError("only CUDA has kernels for 2:4 weights")
        self.x = self.randn(spec.tokens, spec.features)
        weight = self.randn(spec.features, spec.features)
        self.weight = weight * sparsity.nm_mask(weight)

    @property
    def stored(self) -> tuple[int, float]:
        return self.weight.numel() // 2, 0.5

    def call(self, name: str, copy: int = 0) -> Call:
        model = nn.Linear(self.spec.features, self.spec.features, bias=False, device="meta")
        model.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
        if name == OURS:
            sparsity.to_semi_structured(model)
        return forward(model, self.x)

    def exact(self) -> Tensor:
        return self.x.double() @ self.weight.double().T


class MlpBench(Bench):
    kind = MlpCase


class AttentionBench(Bench):
    kind = AttentionCase


class SemiStructuredBench(Bench):
    kind = SemiStructuredCase


_attention = AttentionSpec(4096, 0.1, 128, 64, heads=16)
# Bench, spec, and target speed-up over dense, if any. The MLP is that of Llama 8B.
TRANSFORMER: tuple[tuple[type[Bench], Any, float | None], ...] = (
    (MlpBench, MlpSpec(32, 0.05, 32, 4096, hidden=14336), 12.0),
    (MlpBench, MlpSpec(4096, 0.05, 128, 4096, hidden=14336), 12.0),
    (AttentionBench, _attention, None),
    (AttentionBench, replace(_attention, block=32), None),
    (SemiStructuredBench, SemiStructuredSpec(8192, 0.5, 1, 8192), None),
)
