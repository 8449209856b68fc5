"""The gated MLP of language models, with block-sparse weights."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError
from ..ops.activations import ACTIVATIONS
from ..ops.checks import check_activation
from ..ops.gated_linear import gated_linear
from .linear import Linear

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class GatedMLP(nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)), whose first two products are one kernel on a GPU in inference.

    Its layers are `blocksparse.nn.Linear` with the names of LlamaMLP's, so that state dicts, pruning and sparse
    training treat it as they treat three layers.

    Args:
        features, hidden: sizes.
        density: the part of the blocks that random patterns store, each weight its own; None for all.
        block_size: an int or (rows, columns).
        activation: None, "relu", "gelu" (the exact one) or "silu".
        bias: whether the layers have biases.
        device, dtype: of the parameters.

    Shapes: `[..., features] -> [..., features]`.

    Raises:
        BlockSparseError: as `Linear`.

    Example:
        >>> import torch, blocksparse as bs
        >>> mlp = bs.nn.GatedMLP(256, 512, density=0.25)
        >>> mlp(torch.randn(5, 256)).shape
        torch.Size([5, 256])
        >>> mlp.gate_proj
        Linear(in_features=256, out_features=512, block_size=(32, 32), nnz=32, density=0.25, bias=False)

    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        activation: str | None = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_activation(activation, ACTIVATIONS)
        self.activation = activation
        options: dict[str, Any] = {"density": density, "block_size": block_size, "bias": bias}
        for name in PROJECTIONS:
            sizes = (hidden, features) if name == "down_proj" else (features, hidden)
            setattr(self, name, Linear(*sizes, **options, device=device, dtype=dtype))

    @classmethod
    def of(cls, mlp: nn.Module) -> Self:
        """The same layers, parameters shared, of a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`.

        Raises:
            BlockSparseError: the module has no such layers, block-sparse ones of one block, or computes something else,
                as a comparison for one random token finds.

        >>> import torch, blocksparse as bs
        >>> from torch import nn
        >>> class MLP(nn.Module):  # as in transformers
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate_proj, self.up_proj = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        ...         self.down_proj, self.act_fn = nn.Linear(128, 64, bias=False), nn.SiLU()
        ...     def forward(self, x):
        ...         return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        >>> mlp = bs.sparsify(MLP(), density=0.25, force=True)
        >>> fused = bs.nn.GatedMLP.of(mlp)
        """
        layers: list[Any] = [getattr(mlp, name, None) for name in PROJECTIONS]
        ours = all(isinstance(layer, Linear) and layer.activation is None for layer in layers)
        if not ours or layers[0].layout.block_shape != layers[1].layout.block_shape:
            got = ", ".join(f"{name} {type(layer).__name__}" for name, layer in zip(PROJECTIONS, layers, strict=True))
            raise BlockSparseError.expected("mlp", "gate_proj, up_proj and down_proj, blocksparse.nn.Linear", got)
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        for name, layer in zip(PROJECTIONS, layers, strict=True):
            setattr(fused, name, layer)
        act: Any = getattr(mlp, "act_fn", None)
        points = torch.linspace(-6, 6, 97, dtype=torch.float64)
        known = [key for key, own in ACTIVATIONS.items() if callable(act) and torch.allclose(act(points), own(points))]
        fused.activation = next(iter(known), None)
        if not known or not _same(mlp, fused):
            expected = f"act_fn out of {list(ACTIVATIONS)}, and down_proj(act_fn(gate_proj(x)) * up_proj(x))"
            raise BlockSparseError.expected("mlp", expected, f"{type(mlp).__name__}, which computes something else")
        return fused.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        if torch.compiler.is_compiling() or not (_is_bare(gate) and _is_bare(up)):
            hidden = ACTIVATIONS[self.activation](gate(x)) * up(x)
        else:
            weights = gate.values, gate.layout, up.values, up.layout
            hidden = gated_linear(x, *weights, gate.bias, up.bias, self.activation)
        return self.down_proj(hidden)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _is_bare(layer: Any) -> bool:
    """Whether a call of the layer is its product: no padding, and nobody waits for its inputs or outputs."""
    out_features, in_features = layer._layout.shape
    return (
        type(layer) is Linear
        and layer.in_features == in_features
        and layer.out_features == out_features
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


def _same(mlp: nn.Module, fused: GatedMLP) -> bool:
    """Whether both give the same for a random token."""
    like = fused.gate_proj.values
    training = mlp.training
    try:
        with torch.no_grad():
            x = torch.randn(1, fused.gate_proj.in_features, dtype=like.dtype, device=like.device)
            expected, found = mlp.eval()(x), fused(x)
    finally:
        mlp.train(training)
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    tolerance = max(4 * torch.finfo(like.dtype).eps, 1e-4)
    return bool((expected - found).norm() <= tolerance * expected.norm())
