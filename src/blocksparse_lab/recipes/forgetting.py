"""Measure how long the cells of a recurrent language model keep information."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError

# Bytes read before two different texts become the same, bytes read after that, and pairs of such texts.
BEFORE, AFTER, PAIRS = 1024, 64, 64

# Beyond it, tanh is within 0.5 % of 1 and hardly distinguishes values.
SATURATED = 3.0


@torch.inference_mode()
def forgetting(model: Any, text: Tensor) -> dict[str, float]:
    """Measure which cells still differ after two different texts continue with the same 64 bytes.

    A pair has two passages of 1,024 bytes, after which both continue with a third passage. For each cell, the
    root-mean-square difference over up to 64 pairs is measured before and after these 64 bytes.

    Args:
        model: as for `text_features.features`, with `outputs`.
        text: integer bytes `[length]`, at least 2,112.

    Returns:
        "kept", the fraction of cells that keep at least half of the difference, and "saturated", the fraction of their
            values beyond 3 or -3, where tanh, by which the hidden state sees a cell, hardly changes.

    Raises:
        BlockSparseError: the text is too short, or its passages do not differ.
    """
    of_a_pair = 2 * BEFORE + AFTER
    pairs = min(PAIRS, len(text) // of_a_pair)
    if not pairs:
        raise BlockSparseError.expected("text", f"{of_a_pair:,} bytes or more", f"{len(text):,}")
    first, second, after = text[: pairs * of_a_pair].long().split([pairs * BEFORE, pairs * BEFORE, pairs * AFTER])
    state = model.initial_state(2 * pairs)
    device = state[-1].device
    differences = []
    for part in (torch.cat([first, second]).view(2 * pairs, BEFORE), after.view(pairs, AFTER).repeat(2, 1)):
        _, state = model.outputs(part.T.contiguous().to(device), state)
        cell = state[-1].flatten(0, -3).movedim(-2, 0).flatten(1).float()  # [texts, cells of all layers]
        differences.append((cell[:pairs] - cell[pairs:]).square().mean(0).sqrt())
    before, then = differences
    if not before.any():
        raise BlockSparseError.expected("text", "parts that differ, and so leave different cells", "none")
    return {
        "kept": float((then >= before / 2)[before > 0].float().mean()),
        "saturated": float((cell.abs() > SATURATED).float().mean()),
    }
