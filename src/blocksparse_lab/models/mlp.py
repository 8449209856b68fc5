"""Multi-layer perceptrons that are sparse from the start, and dense ones of the same shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blocksparse import patterns
from blocksparse.checked import checked_block, integer, is_int, number
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.nn import AllReLU, Dropout, Linear
from blocksparse.sparsity.sparse_training.densities import erdos_renyi_density
from blocksparse.sparsity.sparse_training.growth import initial_values, uniform_bound
from blocksparse.surgery.compact import compact
from blocksparse.surgery.weight_handle import handle_of

ACTIVATIONS: dict[str, Callable[[float, int], nn.Module]] = {
    "all_relu": AllReLU,
    "relu": lambda alpha, layer: nn.ReLU(),
    "gelu": lambda alpha, layer: nn.GELU(),
    "silu": lambda alpha, layer: nn.SiLU(),
}
INITS = ("he", "xavier", "fan_in", "kaiming")


class SparseMLP(nn.Module):
    """Linear layers with activation and dropout between them, as sparse evolutionary training starts.

    Args:
        sizes: features of the input, each hidden layer and the output.
        epsilon: Erdos-Renyi layouts with about epsilon (n_in + n_out) blocks per layer.
        density: instead, the fraction of blocks of a random layout, or a list with one per layer; None for a dense
            network of torch.nn.Linear.
        block_size: an int or (rows, columns); 1 for single connections. Sizes are padded inside to whole blocks.
        activation: "all_relu", "relu", "gelu" or "silu".
        alpha: slope of All-ReLU.
        dropout: of the hidden layers' outputs.
        init: the initial weights; biases are 0 unless noted. n_in and n_out are those of the dense layer, as in the
            papers' code.
            "he": uniform within sqrt(6 / n_in).
            "xavier": uniform within sqrt(6 / (n_in + n_out)).
            "kaiming": uniform within sqrt(6 / ((1 + alpha^2) connections)), which keeps the size of the signal.
            "fan_in": weights and biases by the number of connections, as `bs.nn.Linear` draws them.
        seed: of layouts and weights; PyTorch's generators are left alone.
        layout_seed: of layouts, to share them between nets of several seeds; `seed` by default.

    Shapes: `[..., sizes[0]] -> [..., sizes[-1]]`.

    Example:
        >>> import torch
        >>> from blocksparse_lab.models.mlp import SparseMLP
        >>> fashion_mnist = SparseMLP([784, 1000, 1000, 1000, 10], epsilon=20, alpha=0.6)
        >>> dense = SparseMLP([784, 1000, 1000, 1000, 10], density=None, alpha=0.6)
        >>> sum(p.numel() for p in fashion_mnist.parameters()) < 0.05 * sum(p.numel() for p in dense.parameters())
        True

    Source: Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        epsilon: float = 20,
        density: float | Sequence[float] | EllipsisType | None = ...,
        block_size: int | tuple[int, int] = 1,
        activation: str = "all_relu",
        alpha: float = 0.6,
        dropout: float = 0.3,
        init: str = "he",
        seed: int = 0,
        layout_seed: int | None = None,
    ):
        super().__init__()
        self.sizes = _checked(sizes)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise BlockSparseError.expected("activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
        if init not in INITS:
            raise BlockSparseError.expected("init", f"one of {', '.join(INITS)}", repr(init))
        number("dropout", dropout, 0, below=1)
        number("alpha", alpha, 0)  # of activation or weights
        integer("seed", seed, 0, below=2**32)
        of_layouts = seed if layout_seed is None else integer("layout_seed", layout_seed, 0, below=2**32)
        layers = len(self.sizes) - 1
        densities: list[Any] = list(density) if isinstance(density, list | tuple) else [density] * layers
        if len(densities) != layers:
            raise BlockSparseError.expected("density", f"{layers} numbers, one for each layer", densities)
        self.layers = nn.ModuleList()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for i, (n_in, n_out) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
                apart = 1_000_003 * i  # no layer shares the seed of another net's layer
                layout = _layout((n_out, n_in), epsilon, densities[i], block_size, of_layouts + apart)
                linear = nn.Linear if layout is None else partial(Linear, layout=layout)
                layer = linear(n_in, n_out)
                self.layers.append(layer)
                if init == "kaiming":
                    _scale(layer, math.sqrt(6 / (1 + alpha**2)))
                elif init != "fan_in":
                    _draw(layer, init, seed + apart)
        self.activations = nn.ModuleList(ACTIVATIONS[activation](alpha, i) for i in range(2, layers + 1))
        self.dropout = Dropout(dropout)

    @property
    def output(self) -> nn.Module:
        """The last layer, which sparse training must not change: `SET(model, optimizer, skip=model.output)`."""
        return self.layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of rows `[rows, features]`."""
        for layer, activation in zip(self.layers, self.activations, strict=False):
            x = layer(x)  # reuse the name, so that the input can be freed
            # All-ReLU and dropout in one pass over memory.
            x = self.dropout(x, activation.slope) if isinstance(activation, AllReLU) else self.dropout(activation(x))
        return self.output(x)

    def compact(self, optimizer: torch.optim.Optimizer | None = None) -> list[int]:
        """Remove neurons without incoming connections; return the new sizes.

        In evaluation the output changes only by rounding; see `bs.sparsity.compact`. The state dict then fits a model
        of the new sizes.
        """
        for i, activation in enumerate(self.activations):
            first, second = self.layers[i], self.layers[i + 1]
            self.sizes[i + 1] = len(compact(first, second, activation, optimizer))  # type: ignore[arg-type]
        return self.sizes


def _checked(sizes: Sequence[int]) -> list[int]:
    if not isinstance(sizes, tuple | list) or len(sizes) < 2 or not all(is_int(n) and n > 0 for n in sizes):
        raise BlockSparseError.expected("sizes", "two positive ints or more", repr(sizes))
    return [int(n) for n in sizes]


def _layout(
    shape: tuple[int, int],
    epsilon: float,
    density: float | EllipsisType | None,
    block_size: int | tuple[int, int],
    seed: int,
) -> BlockLayout | None:
    """Draw the layout of a layer; None for a dense one."""
    if density is None:
        return None
    block = checked_block(block_size)
    padded = (-(-shape[0] // block[0]) * block[0], -(-shape[1] // block[1]) * block[1])
    if isinstance(density, EllipsisType):
        erdos_renyi_density(shape, epsilon, block)  # raises if a layer would be empty
        layout = patterns.erdos_renyi(padded, block, epsilon=epsilon, seed=seed)
    else:
        layout = patterns.random(padded, block, density=density, seed=seed)
    if layout.nnz == 0:
        raise BlockSparseError.expected("the topology", f"connections in a layer {shape}", "none")
    return layout


@torch.no_grad()
def _scale(layer: Linear | nn.Linear, by: float) -> None:
    """Scale default weights, within 1 / sqrt(connections), and set biases to 0."""
    (layer.values if isinstance(layer, Linear) else layer.weight).mul_(by)
    if layer.bias is not None:
        layer.bias.zero_()


@torch.no_grad()
def _draw(layer: Linear | nn.Linear, init: str, seed: int) -> None:
    """Draw a layer's weights by `init`."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(layer, Linear):
        layout = layer.layout
        places = lambda: (layout.row_of_block, layout.col_of_block)  # noqa: E731
        drawn = initial_values(handle_of(layer), layout.nnz, init, generator, places, np.arange(layout.nnz))
        layer.values.copy_(drawn)
    else:
        most = uniform_bound(init, layer.out_features, layer.in_features)
        layer.weight.uniform_(-most, most, generator=generator)
    if layer.bias is not None:
        layer.bias.zero_()
