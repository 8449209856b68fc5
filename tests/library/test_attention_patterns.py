"""Layouts of attention against their definitions, token by token."""

from __future__ import annotations

import tracemalloc

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


@pytest.mark.parametrize(("global_blocks", "sinks"), [(0, 0), (2, 0), (0, 9), (1, 9), (40, 0), (0, 400)])
@pytest.mark.parametrize("window", [1, 7, 100, (5, 0), (0, 3), (9, 20), (-1, 4), (4, -1)])
@pytest.mark.parametrize(("tokens", "block"), [(30, 1), (64, 8), (61, 8), (5, 8)])
def test_sliding_windows(tokens, block, window, global_blocks, sinks):
    found = patterns.sliding_window(tokens, window, block, global_blocks, sinks)
    left, right = (window - 1, 0) if isinstance(window, int) else window
    left, right = (tokens if n < 0 else n for n in (left, right))
    n = -(-tokens // block)
    i, j = np.divmod(np.arange((n * block) ** 2), n * block)
    seen = (i - j <= left) & (j - i <= right)
    lead = -(-sinks // block) * block
    seen |= (i < global_blocks * block) | (j < max(lead, global_blocks * block))
    blocks = seen.reshape(n, block, n, block).any((1, 3))
    blocks = np.tril(blocks) if isinstance(window, int) else blocks
    assert torch.equal(found.mask(), torch.from_numpy(blocks))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5], [8, 8], [3, 0, 2, 17, 0], [1] * 30, np.array([40, 1, 1])])
@pytest.mark.parametrize("block", [1, 8])
def test_documents(block, lengths, causal):
    found = patterns.documents(lengths, block, causal)
    n = -(-sum(lengths) // block)
    document = np.full(n * block, -1)
    document[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    seen = (document[:, None] == document) & (document >= 0)
    blocks = seen.reshape(n, block, n, block).any((1, 3))
    assert torch.equal(found.mask(), torch.from_numpy(np.tril(blocks) if causal else blocks))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("neighbors", "dilation"), [(0, 1), (2, 1), (3, 2), (9, 5)])
def test_dilated_windows(neighbors, dilation, causal):
    found = patterns.dilated(12, 1, neighbors, dilation, causal)
    rule = {"": lambda i, j: (i - j) % dilation == 0 and abs(i - j) <= neighbors * dilation}
    assert torch.equal(found.mask(), by_definition(rule, 12, causal, "all"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("neighbors", "first", "random"), [(1, 1, 3), (2, 0, 2), (0, 3, 0), (20, 0, 3), (0, 50, 1)])
def test_bigbird(neighbors, first, random, causal):
    found = patterns.bigbird(20, 1, neighbors, first, random, seed=3, causal=causal).mask()
    regular = by_definition({"": lambda i, j: abs(i - j) <= neighbors or min(i, j) < first}, 20, causal, "all")
    assert (found | regular).equal(found)
    assert not causal or not found.triu(1).any()
    left = (torch.arange(20) + 1 if causal else torch.full((20,), 20)) - regular.sum(1)
    assert torch.equal((found & ~regular).sum(1), left.clamp(max=random))


LONG = {
    "sliding window": lambda: patterns.sliding_window(96_000, 512, global_blocks=1, sinks=4),
    "documents": lambda: patterns.documents([1000] * 96),
    "dilated": lambda: patterns.dilated(96_000),
    "bigbird": lambda: patterns.bigbird(96_000),
    "strided": lambda: patterns.strided_attention(96_000, 64),
    "window and documents": lambda: patterns.sliding_window(96_000, 512) & patterns.documents([960] * 100),
    "window or dilated": lambda: (patterns.sliding_window(96_000, 512) | patterns.dilated(96_000))[:, :800],
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences_need_no_dense_mask(name):
    tracemalloc.start()
    LONG[name]()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 12e6


LAYOUTS = {
    "strided": patterns.strided_attention,
    "strided, far": lambda *of, **how: patterns.strided_attention(*of, part="far", **how),
    "fixed": patterns.fixed_attention,
    "fixed, far": lambda *of, **how: patterns.fixed_attention(*of, part="far", **how),
    "small world": patterns.small_world_attention,
    "dilated": patterns.dilated,
    "bigbird": patterns.bigbird,
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
        (lambda: patterns.sliding_window(32, 0), "window: expected an int, 1 or more, got 0"),
        (lambda: patterns.sliding_window(32, (1, 2, 3)), r"window: expected a pair \(left, right\) .*got \(1, 2, 3\)"),
        (lambda: patterns.sliding_window(32, (-2, 0)), r"window: expected a pair .* where -1 stands for all"),
        (lambda: patterns.documents([4, -1]), "lengths: expected 0 or more tokens per document"),
        (lambda: patterns.documents([0, 0]), "lengths: expected .* a token in one"),
        (lambda: patterns.documents([1.5]), "lengths: expected a vector of ints"),
        (lambda: patterns.dilated(32, 8, dilation=0), "dilation: expected an int, 1 or more, got 0"),
        (lambda: patterns.bigbird(30, 8), "tokens: expected a multiple of the block, 8, got 30"),
        (lambda: patterns.small_world_attention(32, 8, 4), "neighbors: expected an int, 0 or more and below .* 4"),
        (lambda: patterns.small_world_attention(32, 8, 2, 1.5), "rewire: expected a number from 0 to 1, got 1.5"),
        (lambda: patterns.small_world_attention(32, 8, 2, seed=-1), "seed: expected an int, 0 or more"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            call()


@pytest.mark.parametrize(
    ("queries", "keys", "remedy"),
    [
        (24, 40, r"pass layout\.crop\(40, 40\) if the queries are the last ones, else layout\.crop\(24, 40\)"),
        (96, 48, r"make a layout for the longest inputs, and use layout\.crop"),
        (37, 37, r"in whole blocks, \(40, 40\): pass layout\.crop\(40, 40\)"),
        (24, 24, r"pass layout\.crop\(24, 24\); if block_size was forgotten, 6 x 6 blocks need block_size=4"),
        (96, 96, r"make a layout for .*; if block_size was forgotten, 6 x 6 blocks need block_size=16"),
    ],
)
def test_a_mask_of_another_length_is_told_how_to_fit(queries, keys, remedy):
    layout = bs.patterns.random((48, 48), block_size=8, density=0.5, seed=0)
    q, k = torch.randn(2, 2, queries, 4), torch.randn(2, 2, keys, 4)
    with pytest.raises(bs.BlockSparseError, match=rf"layout: expected the shape .*{remedy}.*, got BlockLayout"):
        bs.nn.attention(q, k, k, layout)


def test_a_cropped_mask_serves_shorter_inputs():
    layout = bs.patterns.strided_attention(64, block_size=8)
    q, k, v = torch.randn(3, 2, 2, 64, 4)
    y = bs.nn.attention(q, k, v, layout, causal=True)
    q, k, v = (x[:, :, :40] for x in (q, k, v))
    torch.testing.assert_close(bs.nn.attention(q, k, v, layout.crop(40, 40), causal=True), y[:, :, :40])
