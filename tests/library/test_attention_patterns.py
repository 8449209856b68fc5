"""Layouts of attention against their definitions, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse import patterns

STRIDED = {
    "near": lambda i, j, stride: abs(i - j) <= stride,
    "far": lambda i, j, stride: (i - j) % stride == 0,
}
FIXED = {
    "near": lambda i, j, stride, summary: i // stride == j // stride,
    "far": lambda i, j, stride, summary: j % stride >= stride - summary or i == j,
}


def by_definition(rules, n, causal, part, *numbers):
    rules = rules.values() if part == "all" else [rules[part]]
    return torch.tensor(
        [[(not causal or j <= i) and any(rule(i, j, *numbers) for rule in rules) for j in range(n)] for i in range(n)]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("part", ["near", "far", "all"])
@pytest.mark.parametrize(("n", "stride"), [(12, 4), (13, 4), (7, 1), (5, 9), (1, 1)])
def test_strided_and_fixed_are_the_papers(n, stride, part, causal):
    found = patterns.strided_attention(n, 1, stride, part=part, causal=causal)
    assert torch.equal(found.mask(), by_definition(STRIDED, n, causal, part, stride))
    for summary in {1, (stride + 1) // 2, stride}:
        found = patterns.fixed_attention(n, 1, stride, summary, part=part, causal=causal)
        assert torch.equal(found.mask(), by_definition(FIXED, n, causal, part, stride, summary))


LAYOUTS = {
    "strided": patterns.strided_attention,
    "strided, far": lambda *of, **how: patterns.strided_attention(*of, part="far", **how),
    "fixed": patterns.fixed_attention,
    "fixed, far": lambda *of, **how: patterns.fixed_attention(*of, part="far", **how),
    "small world": patterns.small_world_attention,
    "all rewired": lambda *of, **how: patterns.small_world_attention(*of, rewire=1, **how),
    "a band": lambda *of, **how: patterns.small_world_attention(*of, rewire=0, **how),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_all_have(name):
    """Every row has its own block, and a causal one nothing behind it; a layout in blocks is that of 1 in large."""
    for causal in (True, False):
        layout = LAYOUTS[name](30 * 16, 16, causal=causal)
        mask = layout.mask()
        assert mask.diagonal().all()
        assert mask.triu(1).any() != causal
        assert layout.shape == (480, 480)
        assert layout.block_shape == (16, 16)
        assert torch.equal(mask, LAYOUTS[name](30, 1, causal=causal).mask())
        assert layout.density < 0.5


@pytest.mark.parametrize("causal", [True, False])
def test_small_worlds(causal):
    n, k = 60, 6
    make = lambda **how: patterns.small_world_attention(n, 1, k, causal=causal, **how)  # noqa: E731
    band, world = make(rewire=0).mask(), make(rewire=0.3, seed=1).mask()
    i, j = np.divmod(np.arange(n * n), n)
    near = (j <= i) & (i - j <= k) if causal else abs(i - j) <= k // 2
    inner = torch.from_numpy(near.reshape(n, n))
    rows = slice(None) if causal else slice(k, n - k)  # at the ends of a sequence the nearest are on one side
    assert torch.equal(band[rows], inner[rows])
    counts = torch.arange(1, n + 1).clamp(max=k + 1) if causal else torch.full((n,), k + 1)
    assert torch.equal(band.sum(1), counts)
    assert torch.equal(world.sum(1), counts)
    exchanged = (world & ~band).sum().item() / (band.sum().item() - n)
    assert 0.2 < exchanged < 0.4
    assert torch.equal(world, make(rewire=0.3, seed=1).mask())
    assert not torch.equal(world, make(rewire=0.3, seed=2).mask())
    assert _layers(world) < _layers(band)


def _layers(mask: torch.Tensor) -> int:
    """Until the last token has seen the first one."""
    seen, layers = mask[-1:], 1
    while not seen[0, 0]:
        seen, layers = (seen.float() @ mask.float()) > 0, layers + 1
    return layers


def test_exchanged_blocks_are_drawn_evenly():
    drawn = sum(patterns.small_world_attention(12, 1, 3, 1.0, seed=seed).mask()[11].int() for seed in range(400))
    assert drawn[11] == 400
    assert not drawn[8:11].any()  # the nearest have all made room
    assert (drawn[:8] / 400 - 3 / 8).abs().max() < 0.15  # 6 deviations


def test_heads_of_their_own():
    """One head attends to near tokens, another to far ones, as in the paper."""
    layouts = [patterns.fixed_attention(64, 8, 4, part=part) for part in ("near", "far")]
    q, k, v = (torch.randn(2, 2, 64, 8, dtype=torch.float64) for _ in range(3))
    found = bs.nn.attention(q, k, v, layouts, causal=True)
    masks = torch.stack([layout.mask().repeat_interleave(8, 0).repeat_interleave(8, 1).tril() for layout in layouts])
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=masks))


def test_bad_input():
    for call, message in [
        (lambda: patterns.strided_attention(30, 8), "tokens: expected a multiple of the block, 8, got 30"),
        (lambda: patterns.strided_attention(32, 8, 0), "stride: expected an int, 1 or more, got 0"),
        (lambda: patterns.strided_attention(32, 8, part="left"), "part: expected one of all, near, far, got 'left'"),
        (lambda: patterns.fixed_attention(32, (8, 4)), "block_size: expected an int, 1 or more"),
        (lambda: patterns.fixed_attention(32, 8, 2, 3), "summary: expected an int, 1 or more and below 3, got 3"),
        (lambda: patterns.small_world_attention(32, 8, 4), "neighbors: expected an int, 0 or more and below .* 4"),
        (lambda: patterns.small_world_attention(32, 8, 2, 1.5), "rewire: expected a number from 0 to 1, got 1.5"),
        (lambda: patterns.small_world_attention(32, 8, 2, seed=-1), "seed: expected an int, 0 or more"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            call()
