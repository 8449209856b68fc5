"""Densities of the layers of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...checked import boolean, checked_block, is_int, number, positive_fraction
from ...errors import BlockSparseError

Shape = Sequence[int]


def erdos_renyi_density(shape: Shape, epsilon: float, block_size: int | tuple[int, int] = 1) -> float:
    """Return the density of a layer in sparse evolutionary training: epsilon (n_out + n_in) / (n_out n_in), at most 1.

    Args:
        shape: (out_features, in_features), rounded up to whole blocks; n_out and n_in count blocks.
        epsilon: about the number of blocks per row plus those per column, 20 say.
        block_size: an int, 1 by default, or (rows, columns).

    Raises:
        BlockSparseError: a density at which the layer stores no block.

    >>> import blocksparse as bs
    >>> round(bs.sparsity.erdos_renyi_density((1000, 784), epsilon=20), 4)
    0.0455

    Source: Mocanu et al., Scalable training of artificial neural networks with adaptive sparse connectivity (2018).
    """
    grid = _grid_with_kernel(shape, checked_block(block_size))[:2]
    density = min(1.0, number("epsilon", epsilon, 0) * sum(grid) / math.prod(grid))
    _check_not_empty("epsilon", density, grid, shape)
    return density


def erk(
    shapes: Sequence[Shape], density: float, block_size: int | tuple[int, int] = 1, *, kernel: bool = True
) -> list[float]:
    """Return the density of each layer for a total density, by the Erdos-Renyi(-Kernel) rule.

    A layer's density is proportional to (n_out + n_in + height + width) / (n_out n_in height width), or to
    (n_out + n_in) / (n_out n_in) without the kernel. Layers whose density would exceed 1 become dense, and the others
    share the rest.

    Args:
        shapes: (out, in) or (out, in, *kernel) of each layer, rounded up to whole blocks; n_out and n_in count blocks.
        density: density of all weights together, above 0 and at most 1.
        block_size: an int, 1 by default, or (rows, columns), of all layers.
        kernel: whether kernel sizes count (ERK, default), or only n_out and n_in (Erdos-Renyi).

    Raises:
        BlockSparseError: invalid shapes; a density outside of 0 to 1, or at which a layer stores no block.

    >>> import blocksparse as bs
    >>> [round(1 - d, 4) for d in bs.sparsity.erk([(300, 784), (100, 300), (10, 100)], density=0.1)]
    [0.9204, 0.7698, 0.0]

    Source: Evci et al., Rigging the lottery: making all tickets winners (2020).
    """
    total = positive_fraction("density", density)
    block, kernel = checked_block(block_size), boolean("kernel", kernel)
    if not isinstance(shapes, Sequence):
        raise BlockSparseError.expected("shapes", "a list of shapes, such as [(300, 784)]", type(shapes).__name__)
    grids = [_grid_with_kernel(shape, block) for shape in shapes]
    if not grids:
        raise BlockSparseError.expected("shapes", "one shape or more", "none")
    blocks = [math.prod(grid) for grid in grids]
    sides = [grid if kernel else grid[:2] for grid in grids]
    raw = [sum(side) / math.prod(side) for side in sides]
    dense: set[int] = set()
    while True:
        rest = [i for i in range(len(grids)) if i not in dense]
        budget = total * sum(blocks) - sum(blocks[i] for i in dense)
        scale = budget / sum(raw[i] * blocks[i] for i in rest) if rest else 0.0
        top = max((raw[i] for i in rest), default=0.0)
        if top * scale <= 1:
            break
        dense.update(i for i in rest if raw[i] == top)
    densities = [1.0 if i in dense else scale * raw[i] for i in range(len(grids))]
    for layer_density, grid, shape in zip(densities, grids, shapes, strict=True):
        _check_not_empty("density", layer_density, grid[:2], shape)
    return densities


def _grid_with_kernel(shape: Shape, block: tuple[int, int]) -> tuple[int, ...]:
    """Return (out_blocks, in_blocks, *kernel)."""
    fits = isinstance(shape, tuple | list) and len(shape) >= 2 and all(is_int(n) and n > 0 for n in shape)
    if not fits:
        raise BlockSparseError.expected("shape", "positive ints (out, in) or (out, in, *kernel)", repr(shape))
    return -(-shape[0] // block[0]), -(-shape[1] // block[1]), *shape[2:]


def _check_not_empty(name: str, density: float, grid: Sequence[int], shape: Shape) -> None:
    """Raise a BlockSparseError about the argument `name` if a layer would store no block."""
    if round(density * grid[0] * grid[1]) < 1:
        expected = f"enough for one block of a layer {tuple(shape)} (pass a larger {name}, or a smaller block_size)"
        raise BlockSparseError.expected(name, expected, f"a density of {density:.3g}")
