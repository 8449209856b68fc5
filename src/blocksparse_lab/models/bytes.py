"""A residual MLP, dense or block-sparse, that predicts the next byte from a window of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import patterns
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.nn import Linear


def check_bytes(name: str, text: Any, batch: int | None = None) -> None:
    """Raise a BlockSparseError unless the text is integers `[steps, batch]`."""
    integers = isinstance(text, Tensor) and not (text.is_floating_point() or text.is_complex())
    if integers and text.dim() == 2 and batch in (None, text.shape[1]):
        return
    got = f"{list(text.shape)}, {text.dtype}" if isinstance(text, Tensor) else type(text).__name__
    raise BlockSparseError.expected(name, f"integer bytes [steps, {'batch' if batch is None else batch}]", got)


@dataclass(frozen=True)
class ByteLayouts:
    """Layouts of a block-sparse ByteMLP: of its input layer, each hidden weight (two per layer) and its output
    layer."""

    inlet: BlockLayout
    hidden: tuple[BlockLayout, ...]
    outlet: BlockLayout

    def __iter__(self) -> Iterator[BlockLayout]:
        return iter((self.inlet, *self.hidden, self.outlet))

    @property
    def weights(self) -> int:
        """Number of weights that the layouts store."""
        return sum(layout.nnz * layout.block_shape[0] * layout.block_shape[1] for layout in self)


class ByteMLP(nn.Module):
    """Scores of the next byte from the last `context` bytes, by `depth` residual layers of `width`.

    Each layer adds W2 relu(W1 norm(h)) to the state h. There are no biases and no gains in the norms: all parameters
    except the embedding are weights of products, so equal parameters mean equal multiply-adds.

    Shapes: int64 `[n, context] -> [n, 256]`, the logits.
    """

    def __init__(
        self, context: int, width: int, depth: int, *, embedding: int = 16, layouts: ByteLayouts | None = None
    ):
        super().__init__()
        if layouts is not None and len(layouts.hidden) != 2 * depth:
            raise BlockSparseError.expected("layouts.hidden", f"{2 * depth} for {depth} layers", len(layouts.hidden))
        self.context, self.width = context, width

        def linear(in_features: int, out_features: int, layout: BlockLayout | None, relu: bool = False) -> nn.Module:
            if layout is not None:
                return Linear(in_features, out_features, layout=layout, bias=False, activation="relu" if relu else None)
            dense = nn.Linear(in_features, out_features, bias=False)
            return nn.Sequential(dense, nn.ReLU()) if relu else dense

        hidden = layouts.hidden if layouts else (None,) * (2 * depth)
        self.embedding = nn.Embedding(256, embedding)
        self.inlet = linear(context * embedding, width, layouts.inlet if layouts else None)
        self.first = nn.ModuleList(linear(width, width, layout, relu=True) for layout in hidden[::2])
        self.second = nn.ModuleList(linear(width, width, layout) for layout in hidden[1::2])
        self.outlet = linear(width, 256, layouts.outlet if layouts else None)

    def forward(self, window: Tensor) -> Tensor:
        if window.shape[-1] != self.context:
            raise BlockSparseError.expected("window", f"[n, {self.context}]", list(window.shape))
        h = self.inlet(self.embedding(window).flatten(-2))
        for first, second in zip(self.first, self.second, strict=True):
            h = h + second(first(self._norm(h)))
        return self.outlet(self._norm(h))

    def _norm(self, h: Tensor) -> Tensor:
        return F.layer_norm(h, (self.width,))


def small_world_layouts(
    context: int,
    width: int,
    depth: int,
    *,
    embedding: int = 16,
    block_size: int = 16,
    neighbors: int = 4,
    rewire: float = 0.5,
    ends: float = 1 / 3,
    seed: int = 0,
) -> ByteLayouts:
    """Draw layouts for a wide ByteMLP: Watts-Strogatz graphs inside, random ones for the input and output layer.

    With so few neighbors, the state needs many shortcuts to mix within the given layers; less rewiring is worse.
    """
    hidden = tuple(
        patterns.watts_strogatz(width, block_size, neighbors=neighbors, rewire=rewire, seed=seed + 1_000_003 * i)
        for i in range(2 * depth)
    )
    inlet = patterns.random((width, context * embedding), block_size, density=ends, seed=seed)
    outlet = patterns.random((256, width), block_size, density=ends, seed=seed + 1)
    return ByteLayouts(inlet, hidden, outlet)


def dense_width(layouts: ByteLayouts, context: int, *, embedding: int = 16) -> int:
    """Return the width at which a dense ByteMLP has nearest to as many weights as these layouts."""

    def off(width: int) -> int:
        dense = width * (context * embedding + len(layouts.hidden) * width + 256)
        return abs(dense - layouts.weights)

    return min(range(1, layouts.hidden[0].shape[0] + 1), key=off)


def parameters(model: nn.Module) -> int:
    """Count a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def multiply_adds(model: ByteMLP) -> int:
    """Count multiply-adds per predicted byte: one per stored weight; the embedding is a look-up."""
    return sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embedding"))
