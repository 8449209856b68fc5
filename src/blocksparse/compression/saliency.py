"""Scores the stored blocks of a model in training by the loss that dropping them would add."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..conversion.sparser import dense_name
from ..convert import block_coordinates
from ..nn.module import BlockSparseModule


@torch.no_grad()
def block_saliency(
    model: nn.Module, optimizer: torch.optim.Optimizer, without: Collection[str] = ()
) -> dict[str, Tensor] | None:
    """Return scores `[out_blocks, in_blocks]` by name of the dense weight, as a `criterion` of `sparsify`.

    The score of a block is the mean of w² E[g²] over its parameters w with gradients g. Adam's second moments estimate
    E[g²], the diagonal of the Fisher information. Scores of different layers can be compared.

    Args:
        model: the model in training.
        optimizer: the Adam or AdamW that trains it.
        without: names of modules to leave out.

    Returns:
        The scores; None if the optimizer has no second moments for some weight, or only zeros.

    Source: LeCun, Denker, Solla, Optimal brain damage (1990); Theis et al., Faster gaze prediction with dense networks
    and Fisher pruning (2018).
    """
    scores = {}
    for name, module in model.named_modules():
        if name in without or not isinstance(module, BlockSparseModule) or not module.layout.nnz:
            continue
        moments = optimizer.state.get(module.values, {}).get("exp_avg_sq")
        if moments is None or not moments.any():
            return None
        blocks = (module.values.double().square() * moments).flatten(1).mean(1)
        score = blocks.new_zeros(module.layout.grid)
        score[block_coordinates(module.layout, blocks.device)] = blocks
        scores[dense_name(name, module)] = score
    return scores
