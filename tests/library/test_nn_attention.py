"""Block-sparse attention against PyTorch's own with a dense mask, in float64."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

import blocksparse as bs
from blocksparse.ops.attention import cpu, gathered, reference
from blocksparse.ops.attention.arguments import check_operands
from blocksparse.ops.attention.flex import flex
from blocksparse.ops.attention.op import in_graph
from blocksparse.ops.attention.rules import Rules
from linear_backends import CPU, assert_same_bits, running

# These tests run FlexAttention without a compiler.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SHAPES = {
    "square blocks": ((96, 96), 16),
    "one query at a time": ((7, 24), (1, 8)),
    "odd blocks": ((45, 30), (9, 5)),
    "one block": ((8, 8), 8),
}


def dense_mask(layout: bs.BlockLayout, causal: bool) -> torch.Tensor:
    mask = layout.mask().repeat_interleave(layout.block_shape[0], 0).repeat_interleave(layout.block_shape[1], 1)
    return mask.tril(mask.shape[1] - mask.shape[0]) if causal else mask


def dense_attention(q, k, v, mask, scale=None):
    """The definition, with 0 where a query sees no key."""
    none = ~mask.any(-1, keepdim=True)
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(~(mask | none), -torch.inf).softmax(-1)
    return (weights @ v).masked_fill(none, 0)


def draw(shape, heads=3, d=4, d_v=5, dtype=torch.float64):
    queries, keys = shape
    sizes = (queries, d), (keys, d), (keys, d_v)
    return [torch.randn(2, heads, *size, dtype=dtype, requires_grad=True) for size in sizes]


@contextmanager
def on(backend):
    """Every backend and instruction set of the CPU, and the rows of blocks that are gathered where there is none."""
    with pytest.MonkeyPatch.context() as patch, running("reference" if backend == "gathered" else backend):
        if backend == "gathered":
            patch.setattr(reference, "attention", gathered.attention)
        yield


def check(found, q, k, v, mask, within):
    """y and its gradients, against the definition in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    expected = dense_attention(*leaves, mask)
    assert not found[:, :, ~mask.any(-1)].any()
    upstream = torch.randn_like(found)
    ours = found, *torch.autograd.grad(found, (q, k, v), upstream)
    theirs = expected, *torch.autograd.grad(expected, leaves, upstream.double())
    for name, mine, wanted in zip("yqkv", ours, theirs, strict=True):
        assert (mine - wanted).norm() <= within * (1e-3 + wanted.norm()), name


@pytest.mark.parametrize("backend", ["gathered", "reference", *CPU])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_it_is_masked_attention(name, density, causal, backend):
    shape, block = SHAPES[name]
    grid = bs.patterns.dense(shape, block).grid
    layout = bs.BlockLayout(torch.rand(grid) < density, block)
    q, k, v = draw(shape)
    with on(backend):
        check(bs.nn.attention(q, k, v, layout, causal=causal), q, k, v, dense_mask(layout, causal), 1e-12)


@pytest.mark.parametrize("backend", CPU)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((320, 640), 32), ((600, 300), (100, 12)), ((1040, 1040), (520, 260))])
def test_rows_longer_than_a_group(shape, block, causal, backend):
    """More keys than are multiplied at a time, whose largest scores come late; queries of several tasks."""
    grid = bs.patterns.dense(shape, block).grid
    mask = torch.rand(grid) < 0.7
    mask[0, 0] = False
    layout = bs.BlockLayout(mask, block)
    q, k, v = draw(shape, heads=2, d=24, d_v=40, dtype=torch.float32)
    with torch.no_grad():
        k *= torch.linspace(0.1, 8, shape[1])[:, None]
    with on(backend):
        check(bs.nn.attention(q, k, v, layout, causal=causal), q, k, v, dense_mask(layout, causal), 1e-5)


@pytest.mark.parametrize("backend", CPU)
def test_the_same_bits_for_any_number_of_threads(backend):
    layout = bs.patterns.random((256, 256), block_size=32, density=0.4, seed=0)
    q, k, v = draw((256, 256), d=16, d_v=16, dtype=torch.float32)

    def outputs_and_gradients():
        y = bs.nn.attention(q, k, v, layout)
        return y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))

    with running(backend):
        assert_same_bits(outputs_and_gradients, (1, 2, 3))


@pytest.mark.parametrize("of", ["q", "k", "v", "qv"])
def test_gradients_of_some(of):
    layout = bs.patterns.random((48, 48), block_size=8, density=0.4, seed=0)
    given = dict(zip("qkv", draw((48, 48)), strict=True))
    expected = torch.autograd.grad(bs.nn.attention(*given.values(), layout).square().sum(), [given[n] for n in of])
    some = {name: tensor.detach().requires_grad_(name in of) for name, tensor in given.items()}
    found = torch.autograd.grad(bs.nn.attention(*some.values(), layout).square().sum(), [some[n] for n in of])
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(found, expected, strict=True))


def test_a_nan_reaches_only_queries_that_see_it():
    layout = bs.BlockLayout([[True, False], [False, True]], block_size=8)
    q, k, v = (tensor.detach() for tensor in draw((16, 16)))
    k[:, :, 8], v[:, :, 9] = torch.nan, torch.nan
    found = bs.nn.attention(q, k, v, layout)
    assert found[:, :, :8].isfinite().all()
    assert found[:, :, 8:].isnan().all()


def test_the_backend_is_the_one_asked_for(monkeypatch):
    def refuses(*_):
        raise AssertionError("the core was called")

    layout, qkv = bs.patterns.random((16, 16), block_size=4, density=0.5, seed=0), draw((16, 16))
    expected = bs.nn.attention(*qkv, layout)
    monkeypatch.setattr(cpu, "attention", refuses)
    with bs.use_backend("reference"):
        torch.testing.assert_close(bs.nn.attention(*qkv, layout), expected)
    with pytest.raises(AssertionError, match="core"):
        bs.nn.attention(*qkv, layout)


@pytest.mark.parametrize("together", [1, 5])
def test_rows_may_be_computed_apart(together, monkeypatch):
    layout = bs.patterns.random((64, 64), block_size=8, density=0.4, seed=2)
    whole = bs.nn.attention(*(qkv := draw((64, 64))), layout)
    monkeypatch.setattr(gathered, "MAX_BATCHED_BLOCKS", together)
    with on("gathered"):
        torch.testing.assert_close(bs.nn.attention(*qkv, layout), whole)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_each_head_has_its_own(backend):
    layouts = [bs.patterns.random((32, 32), block_size=8, density=p, seed=i) for i, p in enumerate((0.2, 0.5, 0.2))]
    layouts[2] = layouts[0]
    q, k, v = draw((32, 32))
    with bs.use_backend(backend):
        found = bs.nn.attention(q, k, v, layouts, causal=True, scale=0.3)
    mask = torch.stack([dense_mask(layout, True) for layout in layouts])
    expected = dense_attention(q, k, v, mask, 0.3)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    grads = [torch.autograd.grad(y, (q, k, v), upstream) for y in (found, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_and_strides(dtype, backend):
    layout = bs.patterns.random((64, 64), block_size=16, density=0.4, seed=1)
    q, k, v = (torch.randn(2, 64, 3, 8, dtype=dtype).transpose(1, 2) for _ in range(3))
    with bs.use_backend(backend):
        found = bs.nn.attention(q, k, v, layout)
    expected = dense_attention(q.double(), k.double(), v.double(), dense_mask(layout, False))
    error = (found.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def test_no_nan_from_queries_that_see_nothing():
    layout = bs.BlockLayout([[False, True], [True, False]], block_size=4)  # causal: the first half sees no key
    q, k, v = draw((8, 8))
    found = bs.nn.attention(q, k, v, layout, causal=True)
    found.sum().backward()
    assert not found[:, :, :4].any()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_compiles_with_a_layout_that_is_new(causal, training):
    torch._dynamo.reset()
    layout = bs.patterns.watts_strogatz(64, block_size=8, neighbors=2, seed=5)
    q = torch.randn(1, 2, 64, 16, requires_grad=training)

    def run(q):
        return bs.nn.attention(q, q, q, layout, causal=causal)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), run(q))
    if training:
        grads = [torch.autograd.grad(f(q).square().sum(), q)[0] for f in (compiled, run)]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-4)


def test_the_compiled_graph_does_not_grow_with_the_rows():
    nodes = []

    def backend(graph, inputs):
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    for rows in (4, 40, 200):
        torch._dynamo.reset()
        layout = bs.patterns.banded((8 * rows, 8 * rows), block_size=8, bandwidth=1)
        q, k, v = (tensor.detach() for tensor in draw(layout.shape, heads=2))
        compiled = torch.compile(partial(bs.nn.attention, layout=layout), backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), bs.nn.attention(q, k, v, layout))
    assert len(nodes) == 3
    assert len(set(nodes)) == 1


@pytest.fixture(params=["core", "no core"])
def core(request, monkeypatch):
    """With the compiled core, and as if it had not been built."""
    if request.param == "no core":
        monkeypatch.setattr(cpu, "unsupported_reason", lambda device, dtype: "it is not there")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_compiled_attention_trains_as_eager_attention_does(per_head, causal, dtype, core):
    torch._dynamo.reset()
    layouts = [bs.patterns.random((36, 48), (6, 8), density=p, seed=2) for p in (0.3, 0.6, 0.3)]
    layout = layouts if per_head else layouts[0]
    q, k, v = draw((36, 48))
    given = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
    compiled = torch.compile(bs.nn.attention, backend="aot_eager", fullgraph=True)
    found = compiled(*given, layout, causal=causal, scale=0.4)
    expected = bs.nn.attention(q, k, v, layout, causal=causal, scale=0.4)
    upstream = torch.randn_like(expected).to(dtype)
    ours = found, *torch.autograd.grad(found, given, upstream)
    theirs = expected, *torch.autograd.grad(expected, (q, k, v), upstream.double())
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert (mine - wanted).norm() <= {torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype] * wanted.norm()


def test_the_operation_of_graphs_is_twice_differentiable(core):
    layout = bs.BlockLayout([[True, False], [True, True], [False, False]], block_size=4)
    qkv = draw(layout.shape, heads=2, d=2, d_v=3)

    def run(*qkv):
        y, lse = in_graph(*qkv, layouts=[layout], rules=Rules(right=0, scale=0.7))
        return y, lse[:, :, 4:8]  # the other queries see no key

    assert torch.autograd.gradcheck(run, qkv, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, qkv, fast_mode=True)
    batch = [torch.stack([tensor.detach(), 2 * tensor.detach()]) for tensor in qkv]
    close = torch.testing.assert_close
    found = torch.vmap(run)(*batch)
    apart = [run(*(tensor[i] for tensor in batch)) for i in range(2)]
    close(tuple(found), tuple(torch.stack(each) for each in zip(*apart, strict=True)))


def test_the_operation_of_graphs_without_sequences(core):
    layout = bs.BlockLayout(torch.eye(2, dtype=torch.bool), 4)
    q, k, v = empty = [tensor.detach()[:0].requires_grad_() for tensor in draw((8, 8))]
    y, _ = in_graph(q, k, v, [layout], Rules(scale=0.5))
    grads = torch.autograd.grad(y.sum(), empty)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in empty]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_a_layout_that_is_new(causal, strict):
    class Attention(torch.nn.Module):
        def forward(self, q):
            return bs.nn.attention(q, q, q, layout, causal=causal)

    layout = bs.patterns.watts_strogatz(64, block_size=8, neighbors=2, seed=6 + strict)
    q = torch.randn(1, 2, 64, 16)
    exported = torch.export.export(Attention(), (q,), strict=strict).module()
    torch.testing.assert_close(exported(q), Attention()(q))


def test_autocast():
    layout = bs.patterns.random((16, 16), block_size=8, density=0.5, seed=1)
    q, k, v = (tensor.detach().float().requires_grad_() for tensor in draw((16, 16), d=4, d_v=4))
    with torch.autocast("cpu", torch.bfloat16):
        found = bs.nn.attention(q, k.bfloat16(), v, layout)
    expected = bs.nn.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), layout)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    found.float().sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [4, 2])
@pytest.mark.parametrize("blocks", [["x x", "xx ", " xx"], ["xx ", "xx "], ["xx", "xx"]])
@pytest.mark.parametrize("d_v", [2, 3])
def test_twice_differentiable(blocks, d_v, block, causal):
    layout = bs.BlockLayout([[block == "x" for block in row] for row in blocks], block)
    q, k, v = draw(layout.shape, heads=1, d=2, d_v=d_v)
    run = partial(bs.nn.attention, layout=layout, causal=causal)
    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v), fast_mode=True)


@pytest.mark.parametrize("density", [0.5, 1])
@pytest.mark.parametrize("scale", [-0.7, 0, np.float32(0.3)])
def test_any_scale(density, scale):
    layout = bs.patterns.random((16, 16), block_size=4, density=density, seed=0)
    q, k, v = draw((16, 16))
    found = bs.nn.attention(q, k, v, layout, causal=True, scale=scale)
    mask = dense_mask(layout, True)
    scores = (float(scale) * q @ k.mT).masked_fill(~mask, -torch.inf)
    expected = scores.masked_fill(~mask.any(-1, keepdim=True), 0).softmax(-1) @ v
    torch.testing.assert_close(found, expected.masked_fill(~mask.any(-1, keepdim=True), 0))


def test_a_scale_that_16_bits_do_not_bear():
    layout = bs.BlockLayout([[True, False], [False, True]], block_size=8)
    q, k, v = (tensor.detach().half() for tensor in draw((16, 16)))
    q, k = 20 * q, k / 1e4
    found = bs.nn.attention(q, k, v, layout, scale=1e4)
    expected = dense_attention(q.double(), k.double(), v.double(), dense_mask(layout, False), 1e4)
    torch.testing.assert_close(found.double(), expected, atol=2e-3, rtol=0)


def test_few_queries_see_few_keys():
    """Only the keys in a cache that are attended to are read."""
    layout = bs.BlockLayout([[False, True, False, False, True, False]], (1, 16))
    q, k, v = (tensor.detach() for tensor in draw((1, 96)))
    expected = dense_attention(q, k, v, dense_mask(layout, False))
    k[:, :, :16], v[:, :, 48:64] = torch.nan, torch.nan
    torch.testing.assert_close(bs.nn.attention(q, k, v, layout), expected)


def test_memory_follows_the_blocks():
    """A row in 64: no tensor on the way is as large as the scores of all."""
    length = 2048
    layout = bs.patterns.banded((length, length), block_size=32, bandwidth=0)
    q, k, v = (torch.randn(1, 1, length, 8) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        bs.nn.attention(q, k, v, layout)
    most = max(event.self_cpu_memory_usage for event in profile.events() or [])
    assert 0 < most < length * length


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_head", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("shape", "block"), [((256, 384), 32), ((320, 320), (64, 160)), ((96, 200), (48, 40))])
def test_flex_attention_sees_the_same(shape, block, per_head, causal, training):
    """Its kernel is for GPUs; uncompiled, it says on a CPU what it would compute."""
    grid = bs.patterns.dense(shape, block).grid
    layouts = [bs.BlockLayout(torch.rand(grid) < 0.5, block) for _ in range(2 if per_head else 1)]
    q, k, v = (tensor.detach() for tensor in draw(shape, heads=2, d=16, d_v=16, dtype=torch.float32))
    q.requires_grad_(training)
    seen, _ = check_operands(q, k, v, layouts if per_head else layouts[0])
    tiles = []

    def kernel(*args, block_mask, **options):
        tiles.append((block_mask.BLOCK_SIZE, options["kernel_options"].get("BLOCK_M")))
        return flex_attention(*(each.detach() for each in args), block_mask=block_mask, **options)

    found = flex(q, k, v, seen, Rules(right=0 if causal else None, scale=0.25), kernel)
    # The backward pass, not on a CPU, and the kernel for few queries take all of them, or 128, at once.
    assert tiles == [((128, 128), None) if training or shape[0] < 128 else ((32, 32), 32)]
    mask = torch.stack([dense_mask(layout, causal) for layout in layouts])
    torch.testing.assert_close(found, dense_attention(q, k, v, mask, 0.25), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "rules"),
    [
        (256, 256, Rules(right=0, left=70, scale=0.3)),
        (200, 250, Rules(row=50, right=0, scale=0.3)),
        (130, 256, Rules(row=126, left=100, right=30, scale=0.3, softcap=2.0)),
        (1, 250, Rules(row=249, left=90, right=0, scale=0.3)),
    ],
)
def test_flex_attention_with_rules(queries, keys, rules, per_head):
    """Shared heads, windows, lengths that are no multiple of a block, the last rows of a layout, and a cap."""
    count = 4 if per_head else 1
    layouts = [bs.patterns.random((256, 256), block_size=32, density=0.6, seed=i) for i in range(count)]
    q, k, v = torch.randn(1, 4, queries, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    expected, _ = reference.attention(q, k, v, layouts, rules)
    torch.testing.assert_close(flex(q, k, v, layouts, rules, flex_attention), expected, atol=1e-5, rtol=1e-5)


def test_heads_with_different_blocks():
    layouts = [bs.patterns.random((64, 64), block_size=b, density=0.5, seed=0) for b in (8, 32)]
    q, k, v = (tensor.detach() for tensor in draw((64, 64), heads=2, d=16, d_v=16, dtype=torch.float32))
    expected = dense_attention(q, k, v, torch.stack([dense_mask(layout, False) for layout in layouts]))
    torch.testing.assert_close(bs.nn.attention(q, k, v, layouts), expected)
    torch.testing.assert_close(flex(q, k, v, layouts, Rules(scale=0.25), flex_attention), expected)


def test_nothing_to_do():
    layout = bs.BlockLayout(torch.zeros(2, 2, dtype=torch.bool), 4)
    assert not bs.nn.attention(*draw((8, 8)), layout).any()


@pytest.mark.parametrize("backend", ["gathered", *CPU])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "softcap": 2.0}, {"window_size": (3, 2)}])
def test_no_sequences(backend, options):
    empty = [tensor.detach()[:0].requires_grad_() for tensor in draw((8, 8))]
    with on(backend):
        y = bs.nn.attention(*empty, bs.BlockLayout(torch.eye(2, dtype=torch.bool), 4), **options)
        grads = torch.autograd.grad(y.sum(), empty)
    assert y.shape == (0, 3, 8, 5)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in empty]


def test_bad_input():
    layout = bs.patterns.dense((8, 8), block_size=4)
    q, k, v = draw((8, 8))
    for args, message in [
        ((q[0], k, v, layout), r"q: expected a tensor \[batch, heads, tokens, d\], got \[3, 8, 4\]"),
        ((q, k.float(), v, layout), "k: expected the dtype and the device of q, torch.float64 and cpu, got"),
        ((q.int(), k, v, layout), "q: expected float32, float64, bfloat16 or float16, got torch.int32"),
        (
            (q, k, v.to(torch.float8_e4m3fn), layout),
            "v: expected float32, float64, bfloat16 or float16, got torch.float8",
        ),
        ((q, k[..., :3], v, layout), r"k: expected \[2, heads, keys, 4\], as of q, got \[2, 3, 8, 3\]"),
        ((q, k[:, :2], v[:, :2], layout), r"k: expected \[2, 3, keys, 4\], as of q, or fewer heads that divide 3, got"),
        ((q, k, v[:, :, :4], layout), r"v: expected \[2, 3, 8, d_v\], as of k, got \[2, 3, 4, 5\]"),
        ((q, k[:, :, :4], v[:, :, :4], layout), r"layout: expected the shape \(queries, keys\) = \(8, 4\)"),
        (
            (q, k, v, [layout]),
            "layout: expected one for each of 3 heads, or for each of 2 x 3 heads and sequences, got 1",
        ),
        ((q, k, v, None), "layout: expected a BlockLayout, got NoneType"),
        ((q, k[:, :, :0], v[:, :, :0], layout), "k: expected 1 or more tokens, got 0"),
        ((q[:, :, :0], k[:, :, :0], v[:, :, :0], layout), "q: expected 1 or more tokens, got 0"),
        ((q[:, :0], k[:, :0], v[:, :0], []), "layout: expected a BlockLayout, since q has no heads, got an empty list"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            bs.nn.attention(*args)
    for options, message in [
        ({"causal": 1}, "causal: expected a bool, got 1"),
        ({"scale": 1j}, "scale: expected a finite number or None, got 1j"),
        ({"scale": torch.ones(4)}, "scale: expected a finite number or None"),
        ({"scale": math.nan}, "scale: expected a finite number or None, got nan"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            bs.nn.attention(q, k, v, layout, **options)
    halves = [torch.randn(1, 1, 8, 16, dtype=torch.float16) for _ in range(3)]
    with pytest.raises(bs.BlockSparseError, match=r"q: expected torch.float32 or torch.float64, got torch.float16"):
        cpu.forward(*halves, layout, Rules())


def test_arguments_are_checked_after_a_call_that_equals_them():
    layout, x = bs.patterns.dense((8, 8), block_size=4), torch.randn(1, 1, 8, 4)
    bs.nn.attention(x, x, x, layout, causal=True)
    with pytest.raises(bs.BlockSparseError, match="causal: expected a bool, got 1"):
        bs.nn.attention(x, x, x, layout, causal=1)


def test_the_reference_of_these_tests():
    q, k, v = draw((6, 6))
    torch.testing.assert_close(
        dense_attention(q, k, v, torch.ones(6, 6).bool().tril()),
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-2), (torch.bfloat16, 3e-2)], ids=str)
def test_on_a_gpu(dtype, most, causal):
    layout = bs.patterns.random((256, 256), block_size=32, density=0.4, seed=0)
    q, k, v = (t.detach().to("cuda", dtype).requires_grad_() for t in draw((256, 256), d=32, d_v=32))
    found = bs.nn.attention(q, k, v, layout, causal=causal)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = dense_attention(*exact, dense_mask(layout, causal).cuda())
    upstream = torch.randn_like(found)
    ours = [found, *torch.autograd.grad(found, (q, k, v), upstream)]
    for got, right in zip(ours, [expected, *torch.autograd.grad(expected, exact, upstream.double())], strict=True):
        assert (got.double() - right).norm() <= most * right.norm()
