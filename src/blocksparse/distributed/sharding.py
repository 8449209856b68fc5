"""The functions that `blocksparse.surgery` calls for sharded weights: `blocksparse.surgery.sharding.Sharding`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..layout import BlockLayout
from ..surgery.blocks import Blocks
from .dense_shard import DenseShard
from .fsdp import hand_over, record_of
from .sharded_weight import handle_of

__all__ = ["hand_over", "handle_of", "is_sharded", "mask_blocks_", "reduce_blocks", "values_of"]


def is_sharded(module: nn.Module, name: str) -> bool:
    return record_of(module, name) is not None


def reduce_blocks(blocks: Blocks, dense: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return DenseShard(blocks, dense).reduce_blocks(reduce)


def mask_blocks_(blocks: Blocks, dense: Tensor, keep: Tensor) -> None:
    DenseShard(blocks, dense).mask_(keep)


def values_of(blocks: Blocks, layout: BlockLayout, dense: Tensor) -> Tensor:
    return DenseShard(blocks, dense).values(layout)
