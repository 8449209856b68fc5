"""Tensor parallelism: layers whose blocks several processes hold together, as styles of PyTorch's parallelize_module.

`cut.py` says which features each process has, `styles.py` leaves that part of a layer, `modules.py` computes with it,
`moves.py` moves activations and gradients between processes.
"""

from .clip import clip_grad_norm_
from .cut import Cut
from .plan import parallelize_module
from .styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "Cut", "RowwiseParallel", "clip_grad_norm_", "parallelize_module"]
