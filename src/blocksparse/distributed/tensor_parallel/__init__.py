"""Tensor parallelism: styles of PyTorch's parallelize_module for block-sparse layers.

`cut.py` assigns features to processes, `plan.py` finds cuts that layers share, `styles.py` checks a layer, and
`shardable.py` keeps this process's part of it. `modules.py` computes with the part, by the collectives of
`collectives.py`.
"""

from .clip import clip_grad_norm_
from .cut import Cut
from .plan import parallelize_module
from .styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "Cut", "RowwiseParallel", "clip_grad_norm_", "parallelize_module"]
