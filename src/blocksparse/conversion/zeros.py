"""Makes weights that contain zeros block-sparse, such as those pruned by another library."""

from __future__ import annotations

from collections.abc import Mapping

from ..checked import checked_block
from ..errors import BlockSparseError, format_reasons, warn_user
from ..layout import BlockLayout
from ..surgery.prunable import Prunable
from .selection import Layouts, check_finite_weight
from .speed import MIN_SPEEDUP, Speed

BlockSizes = int | tuple[int, ...] | list[int]
"""A block size, or several to choose from: an int, (rows, columns), or a list of ints."""

BLOCK_SIZES = (32, 16, 8, 4, 1)

# Weights with a smaller fraction of zeros are dense.
MIN_ZEROS = 0.05


def layouts_of_zeros(
    weights: Mapping[str, Prunable], sizes: BlockSizes, speed: Speed | None, *, name: str
) -> tuple[Layouts, dict[str, str]]:
    """Return the layouts of the blocks that have a nonzero value, and why weights with zeros are better left dense.

    Args:
        weights: the dense weights by name.
        sizes: the block sizes to choose from.
        speed: to choose the fastest size of each weight, or None to choose the one that takes the least memory.
        name: the function that the warning is about.
    """
    pairs = checked_sizes(sizes)
    if speed is not None:
        speed.record(weight.module for weight in weights.values())
    layouts: Layouts = {}
    slow = {}
    for weight in weights.values():
        check_finite_weight(weight)
        zeros = float((weight.tensor == 0).float().mean())
        if zeros < MIN_ZEROS:
            continue
        options = [_layout(weight, size) for size in pairs]
        options = [(each, layout) for each, layout in options if layout.nnz > 0 and layout.density < 1]
        if not options:
            slow[weight.name] = (
                "all its values are 0: remove the layer"
                if zeros == 1
                else f"{zeros:.0%} of its values are 0, but no whole block is"
            )
        elif speed is None:
            layouts[weight.name] = min(options, key=lambda option: _bytes_of(*option))[1]
        else:
            try:
                ups = [speed.of_weights([option]) for option in options]
            except BlockSparseError as error:
                slow[weight.name] = f"does not run block-sparse here: {error}"
                continue
            best = max(range(len(options)), key=ups.__getitem__)
            if ups[best] >= MIN_SPEEDUP:
                layouts[weight.name] = options[best][1]
            else:
                rows, columns = options[best][1].block_shape
                slow[weight.name] = (
                    f"{zeros:.0%} of its values are 0; in blocks of {rows} x {columns} it stores "
                    f"{options[best][1].density:.0%} and is {ups[best]:.2g} times as fast"
                )
    if slow or not layouts:
        lines = format_reasons(slow) or ["no weight has zeros: bs.sparsify(model, density) prunes"]
        warn_user("\n  ".join([f"{name}: these stay dense", *lines]))
    return layouts, slow


def checked_sizes(sizes: BlockSizes) -> list[tuple[int, int]]:
    """Return block sizes as (rows, columns) after a check."""
    is_list = isinstance(sizes, list) or (isinstance(sizes, tuple) and len(sizes) != 2)
    checked = [checked_block(size) for size in (sizes if is_list else [sizes])]  # type: ignore[union-attr]
    if not checked:
        raise BlockSparseError.expected("block_size", "a size or more", "none")
    return checked


def _bytes_of(weight: Prunable, layout: BlockLayout) -> int:
    """Return the memory of a weight's blocks and of their column indices."""
    return layout.nnz * (weight.blocks.size * weight.tensor.element_size() + 4)


def _layout(weight: Prunable, size: tuple[int, int]) -> tuple[Prunable, BlockLayout]:
    """Return the weight seen in blocks of a size, and the layout of the blocks that have a nonzero value."""
    sized = weight.in_blocks(size)
    return sized, BlockLayout((sized.blocks.sums((sized.tensor != 0).float()) > 0).cpu(), size)
