"""The layout of all experts cut into one per expert."""

from __future__ import annotations

from typing import NamedTuple

from ...layout import BlockLayout


class ExpertPart(NamedTuple):
    """The blocks of one expert within those of all experts, and their layout."""

    blocks: slice
    layout: BlockLayout

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is one block, and so a dense matrix."""
        return self.layout.grid == (1, 1) and self.layout.nnz == 1


def parts_of(layout: BlockLayout, experts: int) -> list[ExpertPart]:
    """Cut the layout of all experts into one per expert, cached; equal ones are one object."""

    def make() -> list[ExpertPart]:
        height, parts = layout.grid[0] // experts, []
        rows, cols = layout.row_of_block, layout.col_of_block
        shared: dict[BlockLayout, BlockLayout] = {}
        edges = rows.searchsorted(range(0, layout.grid[0] + 1, height))
        for expert, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            own = rows[begin:end] - expert * height
            part = BlockLayout.from_indices(own, cols[begin:end], (height, layout.grid[1]), layout.block_shape)
            parts.append(ExpertPart(slice(begin, end), shared.setdefault(part, part)))
        return parts

    return layout.derived(("experts", experts), make)
