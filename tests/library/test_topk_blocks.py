"""Blocks of attention that are chosen from the data, eagerly and in compiled graphs."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo

import blocksparse as bs


def draw(batch=2, heads=4, shared=2, queries=90, keys=90, d=8):
    sizes = (heads, queries), (shared, keys), (shared, keys)
    return [torch.randn(batch, *size, d, dtype=torch.float64, requires_grad=True) for size in sizes]


def chosen(q, k, candidates, blocks):
    """The choice by its definition, bool [batch, heads, rows, columns]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    pooled = [
        torch.stack([p.mean(2) for p in x.split(b, 2)], 2) for x, b in zip((q, k), candidates.block_shape, strict=True)
    ]
    scores, mask = pooled[0] @ pooled[1].mT, candidates.mask()
    result = torch.zeros(scores.shape, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        row = scores[tuple(at)].masked_fill(~mask[at[2]], -math.inf)
        if q.shape[2] == k.shape[2] and candidates.block_shape[0] == candidates.block_shape[1]:
            row[at[2]] = math.inf if mask[at[2], at[2]] else -math.inf
        best = row.argsort(descending=True)[:blocks]
        result[tuple(at)][best[row[best] > -math.inf]] = True
    return result


CANDIDATES = {
    "dense": lambda: bs.patterns.dense((96, 96), 16),
    "causal": lambda: bs.patterns.sliding_window(90, 90, 16),
    "other blocks": lambda: bs.patterns.random((96, 96), (32, 8), density=0.5, seed=0),
    "rows without blocks": lambda: bs.BlockLayout(torch.rand(6, 6) < 0.3, 16),
}


@pytest.mark.parametrize("blocks", [1, 3, 100])
@pytest.mark.parametrize("name", CANDIDATES)
def test_choice_outputs_and_gradients(name, blocks):
    candidates, (q, k, v) = CANDIDATES[name](), draw()
    layouts = bs.nn.topk_blocks(q, k, candidates, blocks)
    masks = chosen(q.detach(), k.detach(), candidates, blocks)
    assert torch.equal(torch.stack([layout.mask() for layout in layouts]), masks.flatten(0, 1))
    causal = name == "causal"
    found = bs.nn.attention(q, k, v, layouts, causal)
    height, width = candidates.block_shape
    seen = masks.repeat_interleave(height, 2).repeat_interleave(width, 3)[:, :, :90, :90]
    seen = seen.tril() if causal else seen
    nothing = ~seen.any(-1, keepdim=True)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ wide_k.mT * 8**-0.5).masked_fill(~(seen | nothing), -math.inf)
    expected = (scores.softmax(-1) @ wide_v).masked_fill(nothing, 0)
    upstream = torch.randn_like(expected)
    ours, theirs = ((y, *torch.autograd.grad(y, (q, k, v), upstream)) for y in (found, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["dense", "causal"])
def test_padding_does_not_change_the_choice(name, compiled):
    """Each sequence has the choice that it has alone, without padding, whose numbers may be anything."""
    torch._dynamo.reset()
    candidates, lengths, blocks = CANDIDATES[name](), [90, 37, 48, 1], 2
    q, k, _ = (x.detach() for x in draw(batch=4))
    for i, length in enumerate(lengths):
        q[i, :, length:], k[i, :, length:] = 1e3, math.nan if i % 2 else -1e3

    def run(q, k, lengths):
        layouts = bs.nn.topk_blocks(q, k, candidates, blocks, lengths=lengths)
        return bs.nn.attention(q, k, k, layouts, lengths=lengths)

    layouts = bs.nn.topk_blocks(q, k, candidates, blocks, lengths=lengths)
    for i, length in enumerate(lengths):
        whole = -(-length // 16)
        alone = chosen(q[i, None, :, :length], k[i, None, :, :length], candidates[:whole, :whole], blocks)[0]
        for head, mask in enumerate(alone):
            assert torch.equal(layouts[4 * i + head].mask()[:whole, :whole], mask)
    if compiled:
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, torch.tensor(lengths))
        for i, length in enumerate(lengths):
            torch.testing.assert_close(found[i, :, :length], run(q, k, lengths)[i, :, :length])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_sequences_with_layouts_of_their_own_may_be_padded(return_lse, compiled):
    candidates, lengths = bs.patterns.sliding_window(90, 90, 16), torch.tensor([90, 37])

    def run(q, k, v, lengths):
        layouts = bs.nn.topk_blocks(q, k, candidates, 3)
        return bs.nn.attention(q, k, v, layouts, True, sinks=torch.ones(4), lengths=lengths, return_lse=return_lse)

    q, k, v = draw()
    torch._dynamo.reset()
    both = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v, lengths) if compiled else None
    both = run(q, k, v, lengths) if both is None else both
    with torch.no_grad():
        k[1, :, 48:] = torch.nan  # in blocks of padding only
    alone = [run(*(x[i, None] for x in (q, k, v)), lengths[i, None]) for i in range(2)]
    expected = tuple(map(torch.cat, zip(*alone, strict=True))) if return_lse else torch.cat(alone)
    tokens = torch.arange(90)[:, None] < lengths[:, None, None, None]
    for y, z in zip(both, expected, strict=True) if return_lse else [(both, expected)]:
        real = tokens if y.dim() == 4 else tokens[..., 0]
        torch.testing.assert_close(y.where(real, 0), z.where(real, 0))


@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_graphs_serve_any_choice(batch):
    torch._dynamo.reset()
    candidates = bs.patterns.sliding_window(90, 90, 16)

    def run(q, k, v):
        return bs.nn.attention(q, k, v, bs.nn.topk_blocks(q, k, candidates, 3), causal=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    seen = set()
    for step in range(4):
        leaves = draw(batch)
        seen.add(bs.nn.topk_blocks(*leaves[:2], candidates, 3)[0])
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            found = compiled(*leaves)
        expected = run(*leaves)
        upstream = torch.randn_like(expected)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y, leaves, upstream) for y in (found, expected)))
    assert len(seen) > 1


@pytest.mark.parametrize(("block_size", "sizes"), [(None, (64, 64)), (16, (16, 16)), ((32, 8), (32, 8))])
@pytest.mark.parametrize("queries", [1, 90])
def test_without_a_layout_all_blocks_are_candidates(queries, block_size, sizes):
    q, k, v = draw(queries=queries)
    options = {} if block_size is None else {"block_size": block_size}
    layouts = bs.nn.topk_blocks(q, k, None, 2, **options)
    every = bs.patterns.dense([-(-n // block) * block for n, block in zip((queries, 90), sizes, strict=True)], sizes)
    assert layouts == bs.nn.topk_blocks(q, k, every, 2)

    def run(q, k, v):
        return bs.nn.attention(q, k, v, bs.nn.topk_blocks(q, k, None, 2, **options))

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), bs.nn.attention(q, k, v, layouts))
    for step in range(2):
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            compiled(*draw(queries=queries))


def test_only_own_blocks_are_chosen_whatever_their_score():
    """With blocks of (1, 16), the grid of 6 queries and 90 keys is square, but its diagonal is not their own blocks."""
    q, k, _ = (x.detach() for x in draw(queries=6))
    layouts = bs.nn.topk_blocks(q, k, None, 1, block_size=(1, 16))
    masks = chosen(q, k, bs.patterns.dense((6, 96), (1, 16)), 1).flatten(0, 1)
    assert torch.equal(torch.stack([layout.mask() for layout in layouts]), masks)
    assert not masks.diagonal(dim1=1, dim2=2).all()


@pytest.mark.parametrize("keys", [1, 2, 40, 64, 65, 90])
def test_decoding_without_a_layout_serves_every_length_of_the_cache(keys):
    q, k, v = draw(queries=1, keys=keys)
    layouts = bs.nn.topk_blocks(q, k, None, 2)
    wide_k, wide_v = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, wide_k, wide_v)
    torch.testing.assert_close(bs.nn.attention(q, k, v, layouts), expected)


@pytest.mark.parametrize("block_size", [200, (16, 100)])
def test_blocks_may_be_longer_than_the_input(block_size):
    q, k, v = draw()
    for lengths in (None, [90, 37]):
        layouts = bs.nn.topk_blocks(q, k, None, 1, block_size=block_size, lengths=lengths)
        assert all(layout.mask().all() for layout in layouts)
        found = bs.nn.attention(q, k, v, layouts, lengths=lengths)
        whole = bs.nn.attention(q, k, v, bs.patterns.dense((90, 90), 90), lengths=lengths)
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("decoding", [False, True])
def test_compiled_choices_without_a_layout_serve_several_lengths(decoding, fullgraph, dynamic):
    torch._dynamo.reset()

    def run(q, k, v):
        return bs.nn.attention(q, k, v, bs.nn.topk_blocks(q, k, None, 2, block_size=(1, 16) if decoding else 16))

    compiled = torch.compile(run, backend="aot_eager", fullgraph=fullgraph, dynamic=dynamic)
    for tokens in (100, 101, 120, 130, 101):
        leaves = [x.detach() for x in draw(queries=1 if decoding else tokens, keys=tokens)]
        torch.testing.assert_close(compiled(*leaves), run(*leaves))


def test_compiled_choices_from_a_layout_serve_several_lengths():
    torch._dynamo.reset()
    candidates = bs.patterns.sliding_window(128, 128, 16)

    def run(q, k, v):
        return bs.nn.attention(q, k, v, bs.nn.topk_blocks(q, k, candidates, 3), causal=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for tokens in (115, 120, 128, 120):
        leaves = [x.detach() for x in draw(queries=tokens, keys=tokens)]
        torch.testing.assert_close(compiled(*leaves), run(*leaves))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_nan_is_chosen_and_shows_in_the_result(compiled):
    torch._dynamo.reset()
    choose = lambda q, k: bs.nn.topk_blocks(q, k, None, 2, block_size=16)  # noqa: E731
    run = lambda q, k: bs.nn.attention(q, k, k, choose(q, k))  # noqa: E731
    run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    q, k, _ = (x.detach() for x in draw())
    k[0, 0, 40] = math.nan  # of the first two heads
    assert all(layout.mask()[:, 2].all() and layout.mask().diagonal().all() for layout in choose(q, k)[:2])
    assert run(q, k)[0, :2].isnan().all()
    assert run(q, k)[:, 2:].isfinite().all()
    k[0, 0, 40], q[1, 1, 50] = 0, math.nan
    assert choose(q, k)[5].mask().sum(1).eq(2).all()
    assert torch.equal(run(q, k).isnan().any(-1), q.isnan().any(-1))


def test_compiled_choices_with_first_keys_beside_a_window():
    torch._dynamo.reset()

    def run(q, k, v):
        layouts = bs.nn.topk_blocks(q, k, None, 3, block_size=16)
        return bs.nn.attention(q, k, v, layouts, True, window_size=(20, 0), sink_tokens=20)

    leaves = draw()
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(*leaves)
    expected = run(*leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (found, expected)))


def test_nan_and_infinity_do_not_change_how_many():
    q, k, _ = (x.detach() for x in draw())
    q[0, 0, 20], k[0, 0, 40], k[1, 1, 0] = math.nan, math.inf, -math.inf
    layouts = bs.nn.topk_blocks(q, k, bs.patterns.dense((96, 96), 16), 3)
    assert all((layout.mask().sum(1) == 3).all() for layout in layouts)


def test_bad_input():
    q, k, v = draw()
    dense = bs.patterns.dense((96, 96), 16)
    with pytest.raises(bs.BlockSparseError, match="blocks: expected an int, 1 or more, got 0"):
        bs.nn.topk_blocks(q, k, dense, 0)
    with pytest.raises(bs.BlockSparseError, match=r"layout: expected the shape .*layout\.crop\(48, 48\)"):
        bs.nn.topk_blocks(q[:, :, :40], k[:, :, :40], dense, 2)
    with pytest.raises(bs.BlockSparseError, match="q: expected as many queries as the layout has rows"):
        bs.nn.topk_blocks(q[:, :, :16], k, dense, 2)
    with pytest.raises(bs.BlockSparseError, match=r"q: expected as many queries .*\(pass block_size=\(1, 64\)\)"):
        bs.nn.topk_blocks(q[:, :, :70], k, None, 2)
    bs.nn.topk_blocks(q[:, :, :70], k, None, 2, block_size=(1, 64))
    with pytest.raises(bs.BlockSparseError, match="q: expected 1 or more tokens"):
        bs.nn.topk_blocks(q[:, :, :0], k, None, 2)
    with pytest.raises(bs.BlockSparseError, match="k: expected 1 or more tokens"):
        bs.nn.topk_blocks(q, k[:, :, :0], None, 2)
    with pytest.raises(bs.BlockSparseError, match="block_size: expected None if a layout is given, got 16"):
        bs.nn.topk_blocks(q, k, dense, 2, block_size=16)
    with pytest.raises(bs.BlockSparseError, match=r"block_size: expected a positive int .*, got 0"):
        bs.nn.topk_blocks(q, k, None, 2, block_size=0)
    for size in (10**9, (1, 10**9)):
        with pytest.raises(bs.BlockSparseError, match="block_size: expected blocks of at most 268,435,456"):
            bs.nn.topk_blocks(q, k, None, 2, block_size=size)
    with pytest.raises(bs.BlockSparseError, match=r"k: expected a tensor \[batch, heads, tokens, d\], got NoneType"):
        bs.nn.topk_blocks(q, None, None, 2)
    with pytest.raises(bs.BlockSparseError, match="layout: expected a BlockLayout, got list"):
        bs.nn.topk_blocks(q, k, [dense] * 4, 2)
    for empty in (q[:0], q[:, :0]):
        with pytest.raises(bs.BlockSparseError, match="q: expected 1 or more sequences and heads"):
            bs.nn.topk_blocks(empty, empty, dense, 2)
    unreadable = "q and k: expected tensors whose numbers can be read"
    with pytest.raises(bs.BlockSparseError, match=unreadable):
        bs.nn.topk_blocks(q.to("meta"), k.to("meta"), dense, 2)
    with pytest.raises(bs.BlockSparseError, match=unreadable):
        torch.func.vmap(
            lambda q: bs.nn.attention(q[None], q[None], q[None], bs.nn.topk_blocks(q[None], q[None], dense, 2))
        )(q)
    layouts = bs.nn.topk_blocks(q, k, dense, 2)
    with pytest.raises(bs.BlockSparseError, match="lengths: expected "):
        bs.nn.attention(q, k, v, layouts, lengths=[90])
    with pytest.raises(
        bs.BlockSparseError, match="layout: expected one for each of 4 heads, or for each of 2 x 4 heads"
    ):
        bs.nn.attention(q, k, v, layouts[:5])
