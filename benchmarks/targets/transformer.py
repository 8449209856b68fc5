"""Parts of transformers on a GPU: the gated MLP, attention on a layout, a linear layer with 2:4 weights.

The peers:
    dense       the same part with dense weights; PyTorch's dense attention.
    three       for the gated MLP, its three products one by one, with the same block-sparse weights.
    flex        for attention, PyTorch's FlexAttention with a mask of the same blocks.
    kernels     for attention, our Triton kernels, also where our function calls FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from blocksparse.ops.registry import use_backend
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
    """Self-attention on one text, forward or as a training step ("train"); `features` are per head.

    >>> print(AttentionSpec(4096, 0.1, 128, 64, heads=16))
    attention of 16 heads of 64, 4096 tokens, block 128, density 0.1
    """

    heads: int
    pass_: str = "forward"

    small: ClassVar = {"tokens": 256, "features": 16, "heads": 2}

    def __str__(self) -> str:
        step = "training step of " if self.pass_ == "train" else ""
        return self._describe(f"{step}attention of {self.heads} heads of {self.features}")

    def as_dict(self) -> dict[str, Any]:
        fields = super().as_dict()
        return {**fields, "pass": fields.pop("pass_")}


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

    peers = ("dense", "flex", "kernels")
    layout: BlockLayout

    def __init__(self, spec: AttentionSpec, seed: int = 0, device: torch.device | None = None):
        super().__init__(spec, seed, device)
        self.layout = patterns.random((spec.tokens, spec.tokens), spec.block, density=spec.density, seed=seed)
        *self.qkv, self.grad = (self.randn(1, spec.heads, spec.tokens, spec.features) for _ in range(4))

    def call(self, name: str, copy: int = 0) -> Call:
        function: Callable[..., Tensor] = F.scaled_dot_product_attention
        if name == OURS:
            function = partial(attention, layout=self.layout)
        elif name != "dense":
            if self.device.type != "cuda":
                raise NotImplementedError("FlexAttention and our kernels are timed on a GPU")
            function = self._by_kernels if name == "kernels" else _flex_attention(self.layout)
        return self.pass_call(function, *self.qkv)

    def _by_kernels(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with use_backend("triton"):
            y: Tensor = attention(q, k, v, self.layout)
        return y

    def exact_results(self) -> dict[str, Tensor]:
        """Return the correct results of a call in float64: y, or the gradients of q, k and v."""
        mask = self.layout.mask().repeat_interleave(self.spec.block, 0).repeat_interleave(self.spec.block, 1)
        mask, train, heads = mask.to(self.device), self.spec.pass_ == "train", []
        for *qkv, grad in zip(*(each.double().unbind(1) for each in (*self.qkv, self.grad)), strict=True):
            q, k, v = (each.requires_grad_(train) for each in qkv)  # head by head, to save memory
            y = F.scaled_dot_product_attention(q, k, v, mask).masked_fill(~mask.any(1)[:, None], 0)
            heads.append(torch.autograd.grad(y, (q, k, v), grad) if train else (y,))
        names = ("grad_q", "grad_k", "grad_v") if train else ("y",)
        return {name: torch.stack(each, 1) for name, each in zip(names, zip(*heads, strict=True), strict=True)}

    def errors(self, call: Call) -> dict[str, float]:
        results: Any = call()
        found = results if self.spec.pass_ == "train" else (results,)
        exact = self.exact_results()
        return {name: relative_error(mine, exact[name]) for name, mine in zip(exact, found, strict=True)}

    def check(self, seed: int) -> dict[str, float]:
        errors = self.errors(self.call(OURS))
        check_errors(self.bound, errors, self.spec)
        return errors

    def find_fault(self, name: str, call: Call) -> str | None:
        if name == "dense":
            return None
        errors = self.errors(call)
        wrong = [f"{each} has a relative L2 error of {error:g}" for each, error in errors.items()]
        return None if max(errors.values()) <= 10 * self.bound else f"wrong: {name}'s {', '.join(wrong)}"


def _flex_attention(layout: BlockLayout) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    table, (height, width) = layout.mask().cuda(), layout.block_shape
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
    *((AttentionBench, replace(_attention, block=block, pass_="train"), None) for block in (128, 64, 32, 16)),
    (SemiStructuredBench, SemiStructuredSpec(8192, 0.5, 1, 8192), None),
)
