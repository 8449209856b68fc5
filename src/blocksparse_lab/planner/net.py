"""The nets that are planned: products with numbers of stored blocks, in pairs as tensor parallelism cuts them."""

from __future__ import annotations

from dataclasses import dataclass

from blocksparse.errors import BlockSparseError

from .formulas import shard

INDEX_BYTES = 4


@dataclass(frozen=True)
class Product:
    """A block-sparse linear layer.

    Args:
        out_blocks, in_blocks: of its weight.
        nnz: stored blocks.
        block: rows and columns of a block.
        cut: how tensor parallelism cuts it, "column" (by outputs) or "row" (by inputs).
        bias: whether it has one.
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
        """Of values: the part of one tensor-parallel rank, if blocks are balanced."""
        return shard(self.nnz, tensor_parallel) * self.block**2

    def parameters(self, tensor_parallel: int = 1, shards: int = 1) -> int:
        """Values and biases of one rank; the bias of a row-parallel layer is not cut, as it is added once."""
        biases = shard(self.biases, tensor_parallel) if self.cut == "column" else self.biases
        return shard(shard(self.nnz, tensor_parallel), shards) * self.block**2 + shard(biases, shards)

    def index_bytes(self, tensor_parallel: int = 1) -> int:
        """Of `crow_indices` and `col_indices`."""
        rows = shard(self.out_blocks, tensor_parallel) if self.cut == "column" else self.out_blocks
        return INDEX_BYTES * (rows + 1 + shard(self.nnz, tensor_parallel))


@dataclass(frozen=True)
class Net:
    """Layers of products; under FSDP2 each layer is a unit that is gathered at once.

    Args:
        layers: the products of each.
        width: features between layers.
        attention: whether each layer attends, as those of a Transformer.
        density: stored blocks of all.
    """

    layers: tuple[tuple[Product, ...], ...]
    width: int
    attention: bool
    density: float

    @property
    def products(self) -> list[Product]:
        return [product for layer in self.layers for product in layer]

    @property
    def weights(self) -> int:
        return sum(product.weights() for product in self.products)


def transformer(
    weights: int, density: float, block: int = 64, layers: int | None = None, width: int | None = None
) -> Net:
    """A Transformer with about `weights` stored: 12 width^2 density in each layer, attention 4 and feed-forward 8.

    Embeddings and norms are left out. What is not given follows from a width of 128 per layer, as of GPT-3.

    Args:
        weights: stored, in all layers.
        density: stored blocks of all; below 1 the net is as much wider.

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

    def product(out: int, in_: int, cut: str) -> Product:
        nnz = round(density * out * in_ * blocks**2)
        if nnz == 0:
            raise BlockSparseError.expected("params", "at least a block in each product", weights)
        return Product(out * blocks, in_ * blocks, nnz, block, cut)

    layer = (product(3, 1, "column"), product(1, 1, "row"), product(4, 1, "column"), product(1, 4, "row"))
    return Net((layer,) * layers, width, True, density)


def mlp(layers: int, width: int, hidden: int, density: float, block: int) -> Net:
    """Pairs of products, width -> hidden -> width, with a ReLU after each: what is built to check plans."""
    wide, narrow = hidden // block, width // block
    nnz = round(density * wide * narrow)
    pair = Product(wide, narrow, nnz, block, "column"), Product(narrow, wide, nnz, block, "row")
    return Net((pair,) * layers, width, False, density)
