"""How long the cells of a recurrent language model keep what came before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError

# Bytes that are read before texts that differ become the same, and after it; and pairs of such texts.
BEFORE, AFTER, PAIRS = 1024, 64, 64

# Beyond it tanh is within half a percent of 1, and hardly tells one value from another.
SATURATED = 3.0


@torch.inference_mode()
def forgetting(model: Any, text: Tensor) -> dict[str, float]:
    """What two texts leave in the cells of a model after both went on with the same 64 bytes.

    Each pair is of two parts of the text, 1,024 bytes each, after which both read a third. Of each cell, the
    difference within the pairs is measured before and after those 64 bytes, as a root mean square over the pairs, of
    which there are 64, or as many as the text has.

    Args:
        model: one of `text_features.features`, with `outputs`.
        text: integer bytes `[length]`, 2,112 or more.

    Returns:
        "kept": the part of the cells that keep half of the difference or more; "saturated": the part of their values,
        then, beyond 3 or -3, where tanh, by which the hidden state sees a cell, hardly differs.

    Raises:
        BlockSparseError: a text that is too short, or of parts that do not differ.
    """
    of_a_pair = 2 * BEFORE + AFTER
    pairs = min(PAIRS, len(text) // of_a_pair)
    if not pairs:
        raise BlockSparseError.expected("text", f"{of_a_pair:,} bytes or more", f"{len(text):,}")
    first, second, after = text[: pairs * of_a_pair].long().split([pairs * BEFORE, pairs * BEFORE, pairs * AFTER])
    state = model.initial_state(2 * pairs)
    device = state[-1].device
    found = []
    for part in (torch.cat([first, second]).view(2 * pairs, BEFORE), after.view(pairs, AFTER).repeat(2, 1)):
        _, state = model.outputs(part.T.contiguous().to(device), state)
        cell = state[-1].flatten(0, -3).movedim(-2, 0).flatten(1).float()  # [texts, cells of all layers]
        found.append((cell[:pairs] - cell[pairs:]).square().mean(0).sqrt())
    before, then = found
    if not before.any():
        raise BlockSparseError.expected("text", "parts that differ, and so leave different cells", "none")
    return {
        "kept": float((then >= before / 2)[before > 0].float().mean()),
        "saturated": float((cell.abs() > SATURATED).float().mean()),
    }
