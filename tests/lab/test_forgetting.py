"""How long cells keep information."""

import pytest
import torch

from blocksparse import BlockSparseError
from blocksparse_lab.recipes.forgetting import AFTER, BEFORE, forgetting

FACTORS = (0.5, 0.98, 0.995, 1.0, 0.0)


class Leaky:
    """Each cell sums the bytes with a decay; the last cell is always 0."""

    def initial_state(self, batch):
        return torch.zeros(1, batch, 2), torch.zeros(1, batch, len(FACTORS))

    def outputs(self, text, state):
        h, cell = state
        for byte in text:
            cell = cell * torch.tensor(FACTORS) + byte[:, None] * torch.tensor([1e-3, 1e-3, 1e-3, 1e-3, 0.0])
        return torch.zeros(*text.shape, 2), (h, cell)


def test_the_part_of_the_cells_that_keep_half():
    # After 64 bytes 0.98 ** 64 = 0.27 and 0.995 ** 64 = 0.73 are left. The constant cell does not count.
    text = torch.randint(1, 256, (10 * (2 * BEFORE + AFTER) + 7,), dtype=torch.uint8)
    found = forgetting(Leaky(), text)
    assert found["kept"] == 0.5
    # Decayed sums of bytes of 128 on average are about 130 over a thousand bytes, 25 over two hundred, 6 over fifty.
    assert found["saturated"] == pytest.approx(3 / 5, abs=0.02)


def test_texts_that_tell_nothing():
    one = torch.randint(1, 256, (2 * BEFORE + AFTER,), dtype=torch.uint8)
    assert 0 <= forgetting(Leaky(), one)["kept"] <= 1
    with pytest.raises(BlockSparseError, match=r"text: expected 2,112 bytes or more, got 2,111"):
        forgetting(Leaky(), one[1:])
    with pytest.raises(BlockSparseError, match="text: expected parts that differ"):
        forgetting(Leaky(), torch.ones_like(one))
