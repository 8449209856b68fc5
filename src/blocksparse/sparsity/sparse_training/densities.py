"""The density of each layer of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...checked import checked_block, is_int, number
from ...errors import BlockSparseError

Shape = Sequence[int]


def erdos_renyi_density(shape: Shape, epsilon: float, block_size: int | tuple[int, int] = 1) -> float:
    """The density of a layer in sparse evolutionary training: epsilon (n_out + n_in) / (n_out n_in), at most 1.

    Args:
        shape: (out_features, in_features), rounded up to whole blocks; n_out and n_in count blocks.
        epsilon: a small number; 20 stores about 20 blocks for each row and each column.
        block_size: an int or (rows, columns).

    Raises:
        BlockSparseError: a density that rounds to no connection.

    >>> import blocksparse as bs
    >>> round(bs.sparsity.erdos_renyi_density((1000, 784), epsilon=20), 4)
    0.0455

    Source: Mocanu et al., Scalable training of artificial neural networks with adaptive sparse connectivity (2018).
    """
    grid = _grid(shape, checked_block(block_size))[:2]
    density = min(1.0, number("epsilon", epsilon, 0) * sum(grid) / math.prod(grid))
    _check_some(density, grid, shape)
    return density


def erk(
    shapes: Sequence[Shape], density: float, block_size: int | tuple[int, int] = 1, *, kernel: bool = True
) -> list[float]:
    """Returns densities of layers for the total `density`, by the rule Erdos-Renyi(-Kernel).

    The density of a layer is proportional to (n_out + n_in + height + width) / (n_out n_in height width), or without
    the kernel to (n_out + n_in) / (n_out n_in). Layers that this would make denser than 1 are dense, and the others
    share what is left.

    Args:
        shapes: of each layer, (out, in) or (out, in, *kernel), rounded up to whole blocks; n_out and n_in count blocks.
        density: of all weights together, 0 to 1.
        block_size: an int or (rows, columns), of all layers.
        kernel: whether the sizes of a kernel count (ERK), or only n_out and n_in (Erdos-Renyi).

    Raises:
        BlockSparseError: invalid shapes, a density outside of 0 to 1 or one with which a layer rounds to no
            connection.

    >>> import blocksparse as bs
    >>> [round(1 - d, 4) for d in bs.sparsity.erk([(300, 784), (100, 300), (10, 100)], density=0.1)]
    [0.9204, 0.7698, 0.0]

    Source: Evci et al., Rigging the lottery: making all tickets winners (2020).
    """
    total = number("density", density, 0, 1)
    block = checked_block(block_size)
    grids = [_grid(shape, block) for shape in shapes]
    if not grids:
        raise BlockSparseError.expected("shapes", "one shape or more", "none")
    blocks = [math.prod(grid) for grid in grids]
    sides = [grid if kernel else grid[:2] for grid in grids]
    raw = [sum(side) / math.prod(side) for side in sides]
    dense: set[int] = set()
    while True:
        rest = [i for i in range(len(grids)) if i not in dense]
        left = total * sum(blocks) - sum(blocks[i] for i in dense)
        scale = left / sum(raw[i] * blocks[i] for i in rest) if rest else 0.0
        top = max((raw[i] for i in rest), default=0.0)
        if top * scale <= 1:
            break
        dense.update(i for i in rest if raw[i] == top)
    densities = [1.0 if i in dense else scale * raw[i] for i in range(len(grids))]
    for found, grid, shape in zip(densities, grids, shapes, strict=True):
        _check_some(found, grid[:2], shape)
    return densities


def _grid(shape: Shape, block: tuple[int, int]) -> tuple[int, ...]:
    fits = isinstance(shape, tuple | list) and len(shape) >= 2 and all(is_int(n) and n > 0 for n in shape)
    if not fits:
        raise BlockSparseError.expected("shape", "positive ints (out, in) or (out, in, *kernel)", repr(shape))
    return -(-shape[0] // block[0]), -(-shape[1] // block[1]), *shape[2:]


def _check_some(density: float, grid: Sequence[int], shape: Shape) -> None:
    if round(density * grid[0] * grid[1]) < 1:
        raise BlockSparseError.expected("density", f"one that leaves a layer {tuple(shape)} a block", f"{density:.3g}")
