"""Tensor parallelism: layers whose blocks several processes hold together, as styles of PyTorch's parallelize_module.

`cut.py` says which features each process has, `styles.py` leaves that part of a layer, `modules.py` computes with it,
`moves.py` moves activations and gradients between processes.
"""

from .cut import Cut
from .styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "Cut", "RowwiseParallel"]
