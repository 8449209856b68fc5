"""Nets to plan for: products with their numbers of stored blocks, paired as tensor parallelism splits them."""

from __future__ import annotations

from dataclasses import dataclass

from blocksparse.errors import BlockSparseError

from .formulas import shard

INDEX_BYTES = 4


@dataclass(frozen=True)
class ProductShape:
    """Sizes of a block-sparse linear layer.

    Args:
        out_blocks, in_blocks: blocks of the weight's grid.
        nnz: stored blocks.
        block: rows and columns of a block.
        cut: how tensor parallelism splits it, "column" (by outputs) or "row" (by inputs).
        bias: whether it has a bias.
    """

    out_blocks: int
    in_blocks: int
    nnz: int
    block: int
    cut: str
    bias: bool = True

    @property
    def out_features(self) -> int:
        return self.out_blocks * self.block

    @property
    def in_features(self) -> int:
        return self.in_blocks * self.block

    @property
    def biases(self) -> int:
        return self.out_features if self.bias else 0

    def weights(self, tensor_parallel: int = 1) -> int:
        """Return the number of stored values on one tensor-parallel rank, if blocks are balanced."""
        return shard(self.nnz, tensor_parallel) * self.block**2

    def parameters(self, tensor_parallel: int = 1, shards: int = 1) -> int:
        """Return the values and biases of one rank; a row-parallel layer's bias is not split, as it is added once."""
        biases = shard(self.biases, tensor_parallel) if self.cut == "column" else self.biases
        return shard(shard(self.nnz, tensor_parallel), shards) * self.block**2 + shard(biases, shards)

    def index_bytes(self, tensor_parallel: int = 1) -> int:
        """Return the bytes of `crow_indices` and `col_indices`."""
        rows = shard(self.out_blocks, tensor_parallel) if self.cut == "column" else self.out_blocks
        return INDEX_BYTES * (rows + 1 + shard(self.nnz, tensor_parallel))


@dataclass(frozen=True)
class Net:
    """Layers of products; under FSDP2 each layer is gathered as a unit.

    Args:
        layers: the products of each layer.
        width: features between layers.
        attention: whether each layer has attention, as in a Transformer.
        density: stored blocks as a fraction of all blocks.
    """

    layers: tuple[tuple[ProductShape, ...], ...]
    width: int
    attention: bool
    density: float

    @property
    def products(self) -> list[ProductShape]:
        return [product for layer in self.layers for product in layer]

    @property
    def weights(self) -> int:
        return sum(product.weights() for product in self.products)


def transformer(
    weights: int, density: float, block: int = 64, layers: int | None = None, width: int | None = None
) -> Net:
    """Return a Transformer with about `weights` stored weights: 12 width^2 density per layer, 4 in attention and 8 in
    the feed-forward part.

    Embeddings and norms are left out. Layers and width are chosen so that the width is 128 per layer, as in GPT-3,
    unless given.

    Args:
        weights: stored weights in all layers.
        density: stored blocks as a fraction of all; a lower density makes the net wider.
        block: rows and columns of a block.
        layers, width: chosen by default.

    Raises:
        BlockSparseError: less than a block per product, a density outside of (0, 1], or a size below 1.

    >>> net = transformer(175_000_000_000, 1.0)
    >>> net.width, len(net.layers)
    (12352, 96)
    """
    if not 0 < density <= 1:
        raise BlockSparseError.expected("density", "more than 0, at most 1", density)
    for name, size in (("block_size", block), ("layers", layers), ("width", width)):
        if size is not None and size < 1:
            raise BlockSparseError.expected(name, "at least 1", size)
    dense = weights / density / 12
    if layers is None:
        layers = max(1, round(dense / width**2) if width else round((dense / 128**2) ** (1 / 3)))
    if width is None:
        width = max(1, round((dense / layers) ** 0.5 / block)) * block
    if layers < 1 or width < block or width % block:
        raise BlockSparseError.expected("layers and width", f">= 1 and a multiple of {block}", (layers, width))
    blocks = width // block

    def product(out: int, in_: int, cut: str) -> ProductShape:
        nnz = round(density * out * in_ * blocks**2)
        if nnz == 0:
            raise BlockSparseError.expected("params", "at least a block in each product", weights)
        return ProductShape(out * blocks, in_ * blocks, nnz, block, cut)

    layer = (product(3, 1, "column"), product(1, 1, "row"), product(4, 1, "column"), product(1, 4, "row"))
    return Net((layer,) * layers, width, True, density)


def mlp(layers: int, width: int, hidden: int, density: float, block: int) -> Net:
    """Return pairs of products, width -> hidden -> width, with a ReLU after each; real nets of this kind check the
    plans.
    """
    wide, narrow = hidden // block, width // block
    nnz = round(density * wide * narrow)
    pair = ProductShape(wide, narrow, nnz, block, "column"), ProductShape(narrow, wide, nnz, block, "row")
    return Net((pair,) * layers, width, False, density)
