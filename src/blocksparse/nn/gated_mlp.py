"""The gated MLP of language models, with block-sparse weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

from ..errors import BlockSparseError
from ..ops.activations import ACTIVATIONS
from ..ops.checks import check_activation, without_autocast
from ..ops.gated_linear import gated_linear
from .linear import Linear

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class GatedMLP(nn.Module):
    """A gated MLP: down_proj(activation(gate_proj(x)) * up_proj(x)).

    In inference on a GPU, one kernel computes the first two products. The three layers are `blocksparse.nn.Linear` and
    have the names of LlamaMLP, so state dicts, pruning and sparse training treat them as three layers.

    Args:
        features, hidden: sizes.
        density: fraction of every weight that a random layout stores; None stores all.
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
        """Make a GatedMLP that shares the layers of a module with `gate_proj`, `up_proj`, `down_proj` and `act_fn`.

        Raises:
            BlockSparseError: the module does not have these layers, block-sparse without activations, or it computes
                something else, which is tested with some random tokens in training and in evaluation mode.

        >>> import torch, blocksparse as bs
        >>> from torch import nn
        >>> class MLP(nn.Module):  # as in transformers
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate_proj, self.up_proj = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        ...         self.down_proj, self.act_fn = nn.Linear(128, 64, bias=False), nn.SiLU()
        ...     def forward(self, x):
        ...         return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        >>> mlp = bs.sparsify(MLP(), density=0.25, block_size=8, force=True)
        >>> fused = bs.nn.GatedMLP.of(mlp)
        """
        layers: list[Any] = [getattr(mlp, name, None) for name in PROJECTIONS]
        if not all(isinstance(layer, Linear) and layer.activation is None for layer in layers):
            got = ", ".join(f"{name} {_kind(layer)}" for name, layer in zip(PROJECTIONS, layers, strict=True))
            expected = "gate_proj, up_proj and down_proj, blocksparse.nn.Linear without activations"
            raise BlockSparseError.expected("mlp", expected, got)
        others = {name for name, _ in mlp.named_children()} - {*PROJECTIONS, "act_fn"}
        if others or _has_hooks(mlp):
            got = f"others ({', '.join(sorted(others))})" if others else "hooks on the module itself"
            raise BlockSparseError.expected("mlp", "no modules but its projections and act_fn, and no hooks", got)
        if layers[0].values.is_meta:
            raise BlockSparseError.expected("mlp", "weights with data, to compare outputs", "meta tensors")
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        for name, layer in zip(PROJECTIONS, layers, strict=True):
            setattr(fused, name, layer)
        matching = [key for key, own in ACTIVATIONS.items() if _is_activation(getattr(mlp, "act_fn", None), own)]
        fused.activation = next(iter(matching), None)
        if not matching or not _computes_same(mlp, fused):
            expected = (
                f"act_fn out of {list(ACTIVATIONS)}, and down_proj(act_fn(gate_proj(x)) * up_proj(x)), not only 0"
            )
            raise BlockSparseError.expected("mlp", expected, f"{type(mlp).__name__}, which computes something else")
        fused.training = mlp.training
        return fused

    def forward(self, x: Tensor) -> Tensor:
        """Return down(activation(gate(x)) * up(x)); one kernel computes gate and up if nothing must see their calls."""
        gate, up = self.gate_proj, self.up_proj
        can_fuse = not torch.compiler.is_compiling() and _is_product_only(gate) and _is_product_only(up)
        if not can_fuse or gate._layout.block_shape != up._layout.block_shape:
            hidden = ACTIVATIONS[self.activation](gate(x)) * up(x)
        else:
            weights = gate.values, gate.layout, up.values, up.layout
            hidden = gated_linear(x, *weights, gate.bias, up.bias, self.activation)
        return self.down_proj(hidden)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _kind(layer: Any) -> str:
    """Describe a layer's class and activation, for an error."""
    activation = f" with {layer.activation}" if isinstance(layer, Linear) and layer.activation else ""
    return f"{type(layer).__module__.split('.')[0]}'s {type(layer).__name__}{activation}"


def _is_product_only(layer: Any) -> bool:
    """Return whether the layer's call is just its product, without hooks, activation or padding."""
    if type(layer) is not Linear or "forward" in vars(layer):  # accelerate replaces `forward` of the instance
        return False
    if layer.activation is not None or torchs._has_any_global_hook():
        return False
    return (layer.out_features, layer.in_features) == layer._layout.shape and not _has_hooks(layer)


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module's own hooks must see its call."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


# Inputs that distinguish activations: near 0, and far from 0, where some saturate.
POINTS = torch.cat(
    [torch.linspace(-6, 6, 97, device="cpu"), torch.tensor([-1e4, -100, -20, 20, 100, 1e4], device="cpu")]
).double()


def _is_activation(act: Any, own: Callable[[Tensor], Tensor]) -> bool:
    """Return whether `act` computes the same as our activation `own`."""
    try:
        return torch.allclose(act(POINTS), own(POINTS))
    except Exception:  # not a function of one tensor
        return False


def _computes_same(mlp: nn.Module, fused: GatedMLP) -> bool:
    """Return whether both modules have equal outputs, not all 0, for random tokens of small and of large numbers."""
    like = fused.gate_proj.values
    modes = {module: module.training for module in mlp.modules()}
    kind: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    draw = torch.Generator(like.device).manual_seed(0)
    tokens = torch.randn(2, 3, fused.gate_proj.in_features, generator=draw, **kind)
    tolerance = max(4 * torch.finfo(like.dtype).eps, 1e-4)
    try:
        with torch.no_grad(), torch.random.fork_rng(), without_autocast(like.device):
            for size, training in ((1, True), (30, False)):
                for module in modes:
                    module.training = training
                expected, actual = mlp(size * tokens), fused(size * tokens)
                if not (expected.norm() > 0 and (expected - actual).norm() <= tolerance * expected.norm()):
                    return False
    except Exception:  # its input or output is something else than tokens
        return False
    finally:
        for module, training in modes.items():
            module.training = training
    return True
