"""Removal of the blocks whose gate is 0."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import BlockSparseError
from ...nn.module import BlockSparseModule, replace_data
from ...surgery.optimizer import check_optimizer, has_parameter
from ...surgery.rewire import OnLayoutChange, rewire
from ...surgery.weight_handle import carry_state, check_module


@torch.no_grad()
def prune_gated_blocks(
    module: BlockSparseModule,
    gate: Tensor,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    on_layout_change: OnLayoutChange | None = None,
) -> Tensor:
    """Remove the blocks whose gate is 0 from a module and from the gate, in place.

    The gated module computes the same as before, and training continues as if these gates stayed 0: values, gate and
    the optimizer's state for both follow. To fold a gate that is no longer trained into the values:
    `with torch.no_grad(): module.values.mul_(gate.view(-1, *[1] * (module.values.dim() - 1)))`.

    Args:
        module: any block-sparse module.
        gate: `[nnz]`, a parameter or another leaf; see `blocksparse.linear`.
        optimizer: the optimizer of `module.values`, and possibly of the gate; None by default.
        on_layout_change: see `rewire`.

    Returns:
        int64 `[new nnz]`: the old position of each block.

    Raises:
        BlockSparseError: as for `rewire`; a gate that has another length, is all 0 or not finite, or is the result of
            an operation. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.Linear(4, 4, block_size=2)
    >>> gate = torch.nn.Parameter(torch.tensor([1.0, 0.0, 0.0, 0.5]))
    >>> bs.sparsity.prune_gated_blocks(layer, gate)
    tensor([0, 3])
    >>> layer.layout.nnz, gate.data
    (2, tensor([1.0000, 0.5000]))

    Source: `prune(param, gate)` of openai/blocksparse (2017).
    """
    check_module(module)
    if not isinstance(gate, Tensor) or list(gate.shape) != [module.layout.nnz]:
        got = list(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__
        raise BlockSparseError.expected("gate", f"[{module.layout.nnz}] for {module.layout!r}", got)
    if not gate.is_leaf:
        raise BlockSparseError.expected("gate", "a leaf, such as a parameter", "the result of an operation")
    if not gate.isfinite().all() or not gate.any():
        raise BlockSparseError.expected("gate", "finite numbers, not all of them 0", gate)
    trained = optimizer is not None and has_parameter(optimizer, gate)
    if optimizer is not None and trained:
        check_optimizer(optimizer, gate, "gate")
    drop = (gate == 0).nonzero().squeeze(1)
    source = rewire(module, drop, [], [], optimizer, on_layout_change=on_layout_change).to(gate.device)
    carry_state(optimizer if trained else None, gate, source)
    replace_data(gate, gate.detach()[source])
    return source
