"""Attention by Triton kernels against the definition in float64. Interpreted where there is no GPU."""

from __future__ import annotations

import math
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.ops.attention import flex, gathered, reference
from blocksparse.ops.attention import triton as kernels
from blocksparse.ops.attention.rules import Rules, data_spans
from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse.ops.gpu.tiles import Tile, use_tiles
from linear_backends import assert_close, running
from test_attention_rules import defined, draw, seen_by

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton_runtime.unavailable() is not None, reason=str(triton_runtime.unavailable())),
]

# The smallest tiles of tensor cores: blocks are cut in parts, and steps end within them.
SMALL = {f"attention {name}": Tile(16, 16, 16, 1, 2) for name in ("forward", "dq", "dkv")}
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DEVICE = torch.device("cpu" if triton_runtime.interpreting() else "cuda:0")


@contextmanager
def on_kernels(tiles=None):
    """Fail if anything else computes attention."""
    with pytest.MonkeyPatch.context() as patch, running("triton-tuned"), use_tiles(**(tiles or {})):
        for other in (gathered, flex):
            patch.setattr(other, "attention" if other is gathered else "flex", None)
        yield


def tensors(*shapes, dtype=torch.float32):
    """Random tensors whose features are contiguous, and nothing else is."""
    strided = (torch.randn(tokens, *outer, d).permute(1, 2, 0, 3) for *outer, tokens, d in shapes)
    return [each.to(dtype).requires_grad_() for each in strided]


def check(leaves, layouts, rules):
    """Outputs and gradients are those of the definition."""
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected, expected_lse = reference.attention(*exact, layouts, rules, return_lse=True)
    y, lse = kernels.attention(*leaves, layouts, rules, return_lse=True)
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    upstream, of_lse = torch.randn_like(expected), torch.randn_like(expected_lse)
    theirs = torch.autograd.grad((expected, expected_lse.where(finite, 0)), exact, (upstream, of_lse))
    ours = torch.autograd.grad((y, lse.where(finite, 0)), leaves, (upstream.to(y.dtype), of_lse.to(lse.dtype)))
    bound = BOUNDS[y.dtype]
    assert_close(lse.where(finite, 0), expected_lse.where(finite, 0), bound, "lse")
    for name, mine, right in zip("yqkv", (y, *ours), (expected, *theirs), strict=True):
        assert_close(mine, right, bound, name)


CASES = {
    "shared heads in one program, causal": (
        torch.float32, (16, 16), (44, 44), (4, 2), (16, 24), {"right": 0}, False, None
    ),
    "small tiles, any sizes, a window": (
        torch.bfloat16, (24, 40), (45, 70), (2, 2), (20, 9), {"left": 30, "right": 4}, False, SMALL
    ),
    "a layout per head, the last rows, a softcap": (
        torch.float16, (16, 32), (45, 90), (4, 2), (16, 16), {"row": 45, "right": 0, "softcap": 2.0}, True, None
    ),
    "blocks below those of tensor cores": (
        torch.float32, (4, 8), (20, 32), (2, 1), (3, 5), {"scale": -0.7}, False, SMALL
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name):
    dtype, block, (queries, keys), (heads, shared), (d, d_v), rules, per_head, tiles = CASES[name]
    row = rules.get("row", 0)
    grid = math.ceil((row + queries) / block[0]), math.ceil(keys / block[1])
    layouts = [bs.BlockLayout(torch.rand(grid) < 0.6, block) for _ in range(heads if per_head else 1)]
    with on_kernels(tiles):
        leaves = tensors((1, heads, queries, d), (1, shared, keys, d), (1, shared, keys, d_v), dtype=dtype)
        check(leaves, layouts, Rules(**{"scale": 0.3, **rules}))


def test_documents_and_lengths():
    """Spans that differ between sequences, with blocks that no query of theirs sees."""
    layouts = [bs.patterns.dense((64, 64), 16)]
    with on_kernels(SMALL):
        cu_seqlens, lengths = torch.tensor([0, 20, 21, 64]), torch.tensor([64, 0, 33])
        spans = data_spans(64, 64, 30, 0, cu_seqlens, lengths)
        check(tensors(*[(3, 1, 64, 16)] * 3), layouts, Rules(spans=spans, scale=0.3))


@pytest.mark.full
@pytest.mark.parametrize("number", range(20))
def test_random_combinations(number):
    case = draw(Random(3000 + number))
    case |= {"batch": 2, "block": Random(number).choice(((8, 8), (16, 16), (16, 4), (5, 7), (64, 32), (70, 12)))}
    options = {name: each for name, each in case["options"].items() if name != "sink_tokens"}
    if "lengths" in options:
        options["lengths"] = [Random(number).randint(0, case["keys"]) for _ in range(2)]
    case["options"] = options
    queries, keys, (heads, shared), (d, d_v) = (case[name] for name in ("queries", "keys", "heads", "d"))
    grid = math.ceil((keys if case["whole"] else queries) / case["block"][0]), math.ceil(keys / case["block"][1])
    count = heads if case["per_head"] else 1
    layouts = [bs.BlockLayout(torch.rand(grid) < case["density"], case["block"]) for _ in range(count)]
    seen, causal = seen_by(case, layouts), case["causal"]
    with on_kernels(SMALL if number % 2 else None):
        q, k, v = tensors((2, heads, queries, d), (2, shared, keys, d), (2, shared, keys, d_v))
        sinks = [torch.randn(heads, requires_grad=True)] if case["sinks"] else []
        seen = seen.to(q.device)
        hidden = ~seen.expand(-1, heads, -1, -1).unflatten(1, (shared, -1)).any((2, 3))[..., None]
        exact = [each.detach().double().requires_grad_() for each in (q, k, v, *sinks)]
        expected, _ = defined(*exact[:3], seen, case["scale"], options.get("softcap"), exact[3] if sinks else None)
        k, v = (each.detach().masked_fill(hidden, math.nan).requires_grad_() for each in (k, v))
        y = bs.nn.attention(
            q, k, v, layouts if case["per_head"] else layouts[0], causal, case["scale"],
            sinks=sinks[0] if sinks else None, **options | {"return_lse": True},
        )[0]  # fmt: skip
        upstream = torch.randn_like(expected)
        theirs = torch.autograd.grad(expected, exact, upstream, materialize_grads=True)
        ours = torch.autograd.grad(y, [q, k, v, *sinks], upstream.float(), materialize_grads=True)
        for nth, (mine, right) in enumerate(zip((y, *ours), (expected, *theirs), strict=True)):
            assert_close(mine, right, 2e-5, str(nth), terms=torch.ones((), dtype=torch.float64, device=q.device))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_nan_is_seen_by_the_queries_that_see_it_and_no_other():
    """Within one block, and in the gradients too."""
    layouts, rules = [bs.patterns.dense((32, 32), 32)], Rules(right=0, left=9, scale=0.3)
    with on_kernels():
        leaves = tensors(*[(1, 2, 32, 16)] * 3)
        expected = [each.detach().clone().requires_grad_() for each in leaves]
        with torch.no_grad():
            leaves[2][0, 1, 20, 3], leaves[1][0, 1, 8, 0] = math.nan, math.inf
        y, lse = kernels.attention(*leaves, layouts, rules, return_lse=True)
        bad = torch.zeros(1, 2, 32, dtype=torch.bool, device=y.device)
        bad[0, 1, 20:30] = bad[0, 1, 8:18] = True
        assert torch.equal(y.isnan().all(-1), bad)
        assert torch.equal(y.isnan().any(-1), bad)
        assert torch.equal(lse.isnan(), bad)
        right, _ = reference.attention(*expected, layouts, rules)
        assert_close(y[~bad], right[~bad], 1e-5)
        upstream = torch.randn_like(y).masked_fill(bad[..., None], 0)
        ours = torch.autograd.grad(y, leaves, upstream)
        theirs = torch.autograd.grad(right, expected, upstream)
        assert_close(ours[0][~bad], theirs[0][~bad], 1e-5)
        # Keys that only clean queries see.
        clean = torch.tensor([each for each in range(32) if not bad[0, 1, each : each + 10].any()])
        for mine, wanted in zip(ours[1:], theirs[1:], strict=True):
            assert_close(mine[0, 1, clean], wanted[0, 1, clean], 1e-5)


def test_equal_bits_in_every_run_and_gradients_of_gradients():
    layout = bs.BlockLayout([[True, False], [True, True]], block_size=16)
    with running("triton-tuned"):
        leaves = tensors((1, 2, 32, 4), (1, 1, 32, 4), (1, 1, 32, 4))

        def run():
            y = bs.nn.attention(*leaves, layout, causal=True)
            return y, *torch.autograd.grad(y.square().sum(), leaves, create_graph=True)

        first, second = run(), run()
        assert all(torch.equal(mine, other) for mine, other in zip(first[:1], second[:1], strict=True))
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        y = gathered.attention(*exact, [layout], Rules(right=0, scale=0.5))[0]
        grads = torch.autograd.grad(y.square().sum(), exact, create_graph=True)
        theirs = torch.autograd.grad(sum(each.square().sum() for each in grads), exact)
        ours = torch.autograd.grad(sum(each.square().sum() for each in first[1:]), leaves)
        for mine, right in zip(ours, theirs, strict=True):
            assert_close(mine, right, 1e-5)


@pytest.mark.parametrize("per_head", [False, True])
def test_compiled_graphs_run_the_kernels(per_head):
    torch._dynamo.reset()
    layouts = [bs.patterns.random((32, 48), (16, 16), density=0.6, seed=seed) for seed in range(1 + per_head)]
    with on_kernels():
        leaves = tensors((1, 2, 32, 8), (1, 1, 48, 8), (1, 1, 48, 8))
        call = torch.compile(bs.nn.attention, backend="aot_eager", fullgraph=True)
        y, _ = call(*leaves, layouts if per_head else layouts[0], window_size=(9, 12), return_lse=True)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        right, _ = reference.attention(*exact, layouts, Rules(left=9, right=12, scale=8**-0.5))
        upstream = torch.randn_like(y)
        ours = torch.autograd.grad(y, leaves, upstream)
        for mine, wanted in zip(
            (y, *ours), (right, *torch.autograd.grad(right, exact, upstream.double())), strict=True
        ):
            assert_close(mine, wanted, 1e-5)


def test_the_choice_of_kernels():
    """They serve on request, where they can."""
    q, wide = (torch.randn(1, 1, 256, d, device=DEVICE) for d in (16, 300))
    trained = q.clone().requires_grad_()
    spans = torch.zeros(2, 1, 256, dtype=torch.int32, device=DEVICE)
    uses = kernels.uses_kernels
    assert not uses(q, q, q, Rules())
    assert not uses(trained, q, q, Rules(spans=spans))
    with bs.use_backend("triton"):
        assert uses(q, q, q, Rules())
        assert uses(trained, q, q, Rules(right=0))
        assert uses(q, q, q, Rules(spans=spans))
        assert not uses(trained, q, q, Rules(dropout=0.5))
        assert not uses(trained.double(), q.double(), q.double(), Rules())
        assert not uses(wide, wide, wide, Rules())
        assert not uses(q, q, wide, Rules())


@pytest.mark.parametrize("of", ["", "q", "v"])
def test_nothing_to_compute_that_is_not_needed(of):
    layout = bs.BlockLayout(torch.zeros(2, 2, dtype=torch.bool), 16)
    with on_kernels():
        q, k, v = (each.detach() for each in tensors(*[(1, 1, 32, 4)] * 3))
        q.requires_grad_(of == "q")
        v.requires_grad_(of == "v")
        y = bs.nn.attention(q, k, v, layout)
        assert not y.any()
        if of:
            (grad,) = torch.autograd.grad(y.sum(), q if of == "q" else v)
            assert not grad.any()
        empty = [each[:0] for each in (q, k, v)]
        assert bs.nn.attention(*empty, layout).shape == (0, 1, 32, 4)


@pytest.mark.full
@pytest.mark.skipif(
    not triton_runtime.interpreting(), reason="memory that is never touched costs nothing on a CPU only"
)
def test_addresses_beyond_int32():
    distance = 2**27  # between tokens, so that the last one is more than 2^31 numbers away
    memory = torch.from_numpy(np.empty(32 * distance, dtype=np.float16))
    layout = bs.patterns.dense((32, 32), 16)
    leaves = [memory[16 * nth :].as_strided((1, 1, 32, 16), (0, 0, distance, 1)) for nth in range(3)]
    for leaf in leaves:
        leaf.copy_(torch.randn(leaf.shape))
    with on_kernels():
        check([leaf.detach().requires_grad_() for leaf in leaves], [layout], Rules(right=0, scale=0.3))


def test_any_tile_of_queries():
    """More rows than the heads of a block row have."""
    layouts = [bs.patterns.random((32, 32), block_size=16, density=0.7, seed=0)]
    with on_kernels({"attention forward": Tile(64, 16, 32, 4, 2), "attention dq": Tile(128, 16, 16, 4, 2)}):
        check(tensors((1, 6, 32, 4), (1, 2, 32, 4), (1, 2, 32, 4)), layouts, Rules(scale=0.3))
