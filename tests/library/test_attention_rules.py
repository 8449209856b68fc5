"""Attention with windows, documents, lengths, shared heads, caps, sinks and dropout, at random combinations."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch

import blocksparse as bs
from blocksparse.ops.attention import cpu, gathered, reference
from blocksparse.ops.attention.rules import Rules, data_spans
from linear_backends import CPU, assert_same_bits, running

BLOCKS = (1, 8), (4, 4), (8, 8), (16, 16), (16, 4), (5, 7), (3, 33), (64, 32), (70, 12)


def draw(rng: Random, most: int | None = None) -> dict:
    """Draw the arguments of a call, any combination of them, with at most `most` queries."""
    block = rng.choice(BLOCKS)
    keys = rng.choice((1, 5, 31, 32, 33, 64, 100, 150))
    queries = keys if most is None and rng.random() < 0.5 else rng.randint(1, min(keys, most or keys))
    ratio, shared = rng.choice((1, 1, 2, 2, 3, 4, 5, 6, 7, 8)), rng.choice((1, 1, 2, 3))
    heads = ratio * shared
    batch = rng.randint(1, 3)
    whole = queries < keys and rng.random() < 0.7
    case = {
        "block": block,
        "queries": queries,
        "keys": keys,
        "whole": whole or math.ceil(queries / block[0]) == math.ceil(keys / block[0]),
        "batch": batch,
        "heads": (heads, shared),
        "d": tuple(rng.choice((1, 3, 8, 16, 40, rng.randint(1, 256))) for _ in range(2)),
        "density": rng.choice((0.2, 0.6, 1.0)),
        "per_head": rng.random() < 0.2,
        "causal": rng.random() < 0.5,
        "scale": rng.choice((None, 0.3, 1.5)),
    }
    options: dict = {}
    if rng.random() < 0.5:
        options["window_size"] = (rng.choice((-1, 0, 3, 20, 200)), rng.choice((-1, 0, 2, 30)))
    if rng.random() < 0.3:
        cuts = sorted(rng.randint(0, keys) for _ in range(rng.randint(0, 5)))
        options["cu_seqlens"] = [0, *cuts, keys]
    if rng.random() < 0.3:
        options["lengths"] = [rng.randint(0, keys) for _ in range(batch)]
    if rng.random() < 0.3:
        options["softcap"] = rng.choice((0.5, 3.0, 50.0))
    options["return_lse"] = rng.random() < 0.4
    sinks = rng.random() < 0.3
    if "cu_seqlens" not in options and rng.random() < 0.3:
        options["sink_tokens"] = rng.choice((1, 4, 40))
    return case | {"options": options, "sinks": sinks}


def seen_by(case: dict, layouts: list[bs.BlockLayout]) -> torch.Tensor:
    """The visible keys by the definition, bool [batch, heads or 1, queries, keys]."""
    queries, keys, options = case["queries"], case["keys"], case["options"]
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    left, right = options.get("window_size", (-1, -1))
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen &= (i - j <= left) | (left < 0) | (j < options.get("sink_tokens", 0))
    seen &= (j - i <= right) | (right < 0)
    seen &= (j <= i) | (not case["causal"])
    if "cu_seqlens" in options:
        lengths = torch.tensor(options["cu_seqlens"]).diff()
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        seen &= document[i] == document[j]
    seen = seen.expand(case["batch"], 1, queries, keys)
    if "lengths" in options:
        seen = seen & (j < torch.tensor(options["lengths"])[:, None, None, None])
    stored = [
        layout.mask().repeat_interleave(b[0], 0).repeat_interleave(b[1], 1)
        for layout in layouts
        for b in [case["block"]]
    ]
    first = keys - queries if case["whole"] else 0
    return seen & torch.stack(stored)[:, first : first + queries, :keys]


def defined(q, k, v, seen, scale, softcap, sinks):
    """Attention by the definition, and its log-sum-exp."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    none = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(none, 0).softmax(-1).masked_fill(none, 0)[..., : k.shape[2]]
    return weights @ v, scores.masked_fill(none, 0).logsumexp(-1).masked_fill(none[..., 0], -math.inf)


def outcome(call, leaves, twice):
    """Outputs, gradients and, if `twice`, gradients of the gradients, for a fixed upstream."""
    torch.manual_seed(7)
    outputs = call(*leaves)
    finite = [y.where(y.isfinite(), 0) for y in outputs]
    upstream = [torch.randn(y.shape, dtype=y.dtype).requires_grad_() for y in finite]
    grads = torch.autograd.grad(finite, leaves, upstream, create_graph=twice)
    if not twice:
        return [*outputs, *grads]
    loss = sum((grad * torch.randn(grad.shape, dtype=grad.dtype)).sum() for grad in grads)
    return [*outputs, *grads, *torch.autograd.grad(loss, [*leaves, *upstream], materialize_grads=True)]


def operands_of(case: dict, number: int, dtype=torch.float64) -> tuple[list, torch.Tensor, list, list]:
    """Layouts, the visible keys, q, k and v, and the sinks, which may be missing."""
    torch.manual_seed(number)
    (heads, shared), (d, d_v), queries, keys = case["heads"], case["d"], case["queries"], case["keys"]
    block = case["block"]
    grid = math.ceil((keys if case["whole"] else queries) / block[0]), math.ceil(keys / block[1])
    count = heads if case["per_head"] else 1
    layouts = [bs.BlockLayout(torch.rand(grid) < case["density"], block) for _ in range(count)]
    sizes = (heads, queries, d), (shared, keys, d), (shared, keys, d_v)
    leaves = [torch.randn(case["batch"], *size, dtype=dtype) for size in sizes]
    return layouts, seen_by(case, layouts), leaves, [torch.randn(heads, dtype=dtype)] if case["sinks"] else []


def hide(case: dict, seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Keys or values with NaN where no query sees them."""
    heads, shared = case["heads"]
    hidden = ~seen.expand(-1, heads, -1, -1).unflatten(1, (shared, -1)).any((2, 3))[..., None]
    return x.detach().masked_fill(hidden, math.nan)


def check(case: dict, number: int, twice: bool) -> None:
    layouts, seen, *tensors = operands_of(case, number)
    leaves, sinks = ([x.requires_grad_() for x in each] for each in tensors)
    scale, options = case["scale"], case["options"]
    lse = options["return_lse"]

    def theirs(q, k, v, sinks=None):
        return defined(q, k, v, seen, scale, options.get("softcap"), sinks)[: 1 + lse]

    def ours(q, k, v, sinks=None):
        layout = layouts if case["per_head"] else layouts[0]
        y = bs.nn.attention(q, k, v, layout, case["causal"], scale, sinks=sinks, **options)
        return y if lse else (y,)

    expected = outcome(theirs, [*leaves, *sinks], twice)
    # NaN in keys and values that no query sees is never seen.
    poisoned = [leaves[0], *(hide(case, seen, x).requires_grad_() for x in leaves[1:])]
    for mine, right in zip(outcome(ours, [*poisoned, *sinks], twice), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-8)


@pytest.fixture(params=["gathered", "reference", *CPU])
def backend(request, monkeypatch):
    if request.param == "gathered":
        monkeypatch.setattr(reference, "attention", gathered.attention)
    with running("reference" if request.param == "gathered" else request.param):
        yield request.param


@pytest.mark.parametrize("start", range(0, 100, 50))
def test_random_combinations(start, backend):
    for number in range(start, start + 50):
        check(draw(Random(number)), number, twice=number % 5 == 0)


def test_draws_have_every_ratio_of_heads_and_sizes_of_any_kind():
    cases = [draw(Random(number)) for number in range(100, 2100)]
    assert {heads // shared for heads, shared in (case["heads"] for case in cases)} == set(range(1, 9))
    sizes = {d for case in cases for d in case["d"]}
    assert {1, 256} <= sizes
    assert len(sizes) > 200
    assert sum(case["keys"] % case["block"][1] > 0 for case in cases) > 500


@pytest.mark.full
@pytest.mark.parametrize("start", range(100, 2100, 100))
def test_many_random_combinations(start, backend):
    """2,000 draws on each backend: 1 to 256 features, 1 to 8 query heads per head of keys."""
    for number in range(start, start + 100):
        check(draw(Random(number)), number, twice=number % 5 == 0)


# Relative to the largest score, about 10, which the softmax turns into a factor.
FEW_BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def strided(x: torch.Tensor, rng: Random) -> torch.Tensor:
    """Return the numbers of x in memory of another order, or between others, which are NaN."""
    ways = [lambda: x, lambda: x.transpose(1, 2).contiguous().transpose(1, 2)]
    ways.append(lambda: x.new_full((*x.shape[:-1], x.shape[-1] + 3), math.nan)[..., :-3].copy_(x))
    ways.append(lambda: x.new_full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)[..., ::2].copy_(x))
    return rng.choice(ways)()


def check_few(case: dict, number: int, dtype: torch.dtype) -> None:
    layouts, seen, leaves, sinks = operands_of(case, number, dtype)
    rng, scale, options = Random(number), case["scale"], case["options"]
    expected = defined(*(x.double() for x in leaves), seen, scale, options.get("softcap"), *(sinks or [None]))
    q, k, v = (strided(x, rng) for x in (leaves[0], *(hide(case, seen, x) for x in leaves[1:])))
    layout = layouts if case["per_head"] else layouts[0]
    found = bs.nn.attention(q, k, v, layout, case["causal"], scale, sinks=(sinks or [None])[0], **options)
    again = bs.nn.attention(q, k, v, layout, case["causal"], scale, sinks=(sinks or [None])[0], **options)
    for mine, repeated, right in zip(*(x if options["return_lse"] else (x,) for x in (found, again)), expected):  # noqa: B905
        assert torch.equal(mine, repeated)
        assert torch.equal(mine.isfinite(), right.isfinite())
        finite = right.isfinite()
        error = (mine.double() - right)[finite].norm()
        assert error <= FEW_BOUNDS[dtype] * (1e-2 + right[finite].norm())
        assert not mine[right == 0].any()


@pytest.mark.parametrize("dtype", FEW_BOUNDS, ids=str)
@pytest.mark.parametrize("name", CPU)
def test_few_queries(name, dtype):
    """Without gradients they read keys and values in place, of any strides, and have the bits of a second call."""
    with running(name):
        for number in range(5000, 5060):
            check_few(draw(Random(number), most=8), number, dtype)


@pytest.mark.parametrize(
    "shape", [(4, 1, 700, 64, 64), (1, 8, 1500, 128, 40), (6, 3, 2100, 33, 130), (32, 4, 600, 16, 8)]
)
@pytest.mark.parametrize("queries", [1, 5, 8])
@pytest.mark.parametrize("name", CPU)
def test_few_queries_of_long_rows_on_any_number_of_threads(name, queries, shape):
    """Rows that are cut into several tasks, whose largest scores come late."""
    heads, shared, keys, d, d_v = shape
    heads = max(heads, shared)
    layout = bs.patterns.bigbird(math.ceil(keys / 32) * 32, 32, neighbors=9, random_blocks=12, causal=True)
    q, k, v = torch.randn(2, heads, queries, d), torch.randn(2, shared, keys, d), torch.randn(2, shared, keys, d_v)
    k *= torch.linspace(0.1, 4, keys)[:, None]
    case = {
        "block": (32, 32),
        "queries": queries,
        "keys": keys,
        "whole": True,
        "batch": 2,
        "causal": True,
        "options": {},
    }
    y, _ = defined(q.double(), k.double(), v.double(), seen_by(case, [layout]), None, None, None)
    with running(name):
        assert_same_bits(lambda: (bs.nn.attention(q, k, v, layout, True),), (1, 2, 3))
        assert (bs.nn.attention(q, k, v, layout, True) - y).norm() < 1e-5 * y.norm()


def test_a_repeated_call_follows_its_options_and_shapes():
    layout = bs.patterns.sliding_window(64, 40, 8)
    q, k, v = (x.detach() for x in sizes(1, 64))
    whole = bs.patterns.dense((64, 64), 8)

    def expected(keys, window, scale, softcap):
        case = {"block": (8, 8), "queries": 1, "keys": keys, "whole": True, "batch": 2, "causal": True}
        case["options"] = {"window_size": window}
        return defined(q, k[:, :, :keys], v[:, :, :keys], seen_by(case, [layout]), scale, softcap, None)[0]

    for keys in (64, 63, 64):
        for window, scale, softcap in [
            ((5, 0), None, None),
            ((9, 0), None, None),
            ((9, 0), 0.3, None),
            ((9, 0), 0.3, 2.0),
        ]:
            for _ in range(2):
                y = bs.nn.attention(
                    q, k[:, :, :keys], v[:, :, :keys], layout, True, scale, window_size=window, softcap=softcap
                )
                torch.testing.assert_close(y, expected(keys, window, scale, softcap))
    with pytest.raises(bs.BlockSparseError, match="k: expected"):
        bs.nn.attention(q, k.float(), v, layout, True, 0.3, window_size=(9, 0), softcap=2.0)
    leaf = q.clone().requires_grad_()
    y = bs.nn.attention(leaf, k, v, layout, True, 0.3, window_size=(9, 0), softcap=2.0)
    assert torch.autograd.grad(y.sum(), leaf)[0].any()
    assert bs.nn.attention(q, k, v, whole, True).shape == q.shape


def sizes(queries, keys, heads=4, shared=2, d=16, dtype=torch.float64):
    return [
        torch.randn(2, *each, d, dtype=dtype, requires_grad=True)
        for each in ((heads, queries), (shared, keys), (shared, keys))
    ]


@pytest.mark.parametrize("per_head", [False, True])
def test_dropout_has_the_same_bits_on_each_backend_and_in_backward(per_head, monkeypatch):
    layouts = [bs.patterns.random((48, 64), (8, 16), density=p, seed=i) for i, p in enumerate((0.6, 0.9, 0.6, 0.6))]
    layout = layouts if per_head else layouts[0]
    leaves = sizes(43, 60)
    options = {"dropout_p": 0.4, "cu_seqlens": [0, 20, 60], "softcap": 5.0, "return_lse": True}

    def run(*leaves):
        torch.manual_seed(3)
        y, lse = bs.nn.attention(*leaves, layout, **options)
        return y, lse.where(lse.isfinite(), 0)

    found = []
    for backend in ("gathered", "reference", *CPU):
        with monkeypatch.context() as patch, running("reference" if backend == "gathered" else backend):
            if backend == "gathered":
                patch.setattr(reference, "attention", gathered.attention)
            if not (per_head and backend == "reference"):  # it draws all heads at once
                found.append(outcome(run, leaves, twice=True))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    y, _ = run(*leaves)
    assert torch.equal(y, run(*leaves)[0])
    assert not torch.equal(y, bs.nn.attention(*leaves, layout, **options)[0])


def test_dropout_drops_a_fraction_of_the_weights_and_keeps_the_mean():
    layout = bs.patterns.dense((512, 512), 64)
    q, k = torch.zeros(2, 2, 4, 512, 1)
    v = torch.eye(512).expand(2, 4, -1, -1)
    weights = bs.nn.attention(q, k, v, layout, dropout_p=0.3) * 512
    assert ((weights == 0) | (weights - 1 / 0.7).abs().lt(1e-4)).all()
    for axis in range(4):
        others = [a for a in range(4) if a != axis]
        share = (weights == 0).float().mean(others)
        assert (share - 0.3).abs().max() < 6 * math.sqrt(0.21 * weights.shape[axis] / weights.numel())
    flat = (weights == 0).double().flatten(0, 1)
    together = torch.corrcoef(flat.flatten(1)) - torch.eye(8)
    assert together.abs().max() < 0.012  # no two heads drop the same weights
    assert torch.corrcoef(flat[0]).fill_diagonal_(0).abs().max() < 0.3


@pytest.mark.parametrize("options", [{}, {"window_size": (20, 0)}, {"window_size": (5, 3)}, {"softcap": 2.0}])
def test_decoding_is_the_last_rows_of_the_whole(options, backend):
    layout = bs.patterns.bigbird(96, 8, seed=1, causal=True)
    q, k, v = (x.detach() for x in sizes(90, 90))
    causal = "window_size" not in options
    whole = bs.nn.attention(q, k, v, layout, causal, **options)
    for first in (1, 7, 40, 88, 89):
        last = bs.nn.attention(q[:, :, first:], k, v, layout, causal, **options)
        torch.testing.assert_close(last, whole[:, :, first:])
    if options.get("window_size", (0, 0))[1] == 0:
        for keys in (8, 33, 40, 89):  # token by token, with a growing cache
            cropped = layout.crop(-(-keys // 8) * 8, -(-keys // 8) * 8)
            step = bs.nn.attention(q[:, :, keys - 1 : keys], k[:, :, :keys], v[:, :, :keys], cropped, causal, **options)
            torch.testing.assert_close(step, whole[:, :, keys - 1 : keys])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("number", range(12))
def test_compiled_combinations(number, dynamic):
    """With the outputs and gradients of the definition; documents and lengths are data of the graph."""
    torch._dynamo.reset()
    rng = Random(1000 + number)
    case = draw(rng)
    if number % 2:
        case["options"] |= {"cu_seqlens": [0, case["keys"] // 3, case["keys"]], "sink_tokens": 0}
    data = {name: torch.tensor(case["options"][name]) for name in ("cu_seqlens", "lengths") if name in case["options"]}
    call = bs.nn.attention

    def compiled(*args, **options):
        function = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        return function(*args, **options | data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bs.nn, "attention", compiled)
        check(case, number, twice=False)


class Exported(torch.nn.Module):
    layout = bs.patterns.sliding_window(64, 24, 8)

    def forward(self, q, k, v, cu_seqlens):
        return bs.nn.attention(
            q, k, v, self.layout, True, window_size=(23, 0), cu_seqlens=cu_seqlens, softcap=4.0, return_lse=True
        )


@pytest.mark.parametrize("strict", [False, True])
def test_exports_with_documents(strict):
    q, k, v = (x.detach().float() for x in sizes(60, 60))
    arguments = q, k, v, torch.tensor([0, 20, 60])
    exported = torch.export.export(Exported(), arguments, strict=strict)
    assert not any("blocksparse" in str(node.target) for node in exported.graph.nodes)
    for borders in ([0, 20, 60], [0, 41, 60]):
        arguments = q, k, v, torch.tensor(borders)
        torch.testing.assert_close(exported.module()(*arguments), Exported()(*arguments))


def test_a_nan_reaches_only_queries_that_see_it_within_a_block(backend):
    layout = bs.patterns.sliding_window(32, 32, 16)
    q, k, v = (x.detach() for x in sizes(32, 32))
    v[:, :, 9], k[:, :, 21] = math.nan, math.inf
    y = bs.nn.attention(q, k, v, layout, causal=True, window_size=(40, 0), cu_seqlens=[0, 12, 32])
    nan = y.isnan().any(-1).any((0, 1)).nonzero().flatten().tolist()
    assert {9, 10, 11} <= set(nan) <= {9, 10, 11, *range(21, 32)}


def test_bad_input():
    layout = bs.patterns.dense((16, 16), 8)
    q, k, v = (x.detach() for x in sizes(16, 16))
    expected = "pair .left, right. of ints from -1 on; -1 stands for all keys on that side"
    for options, message in [
        ({"window_size": 4}, f"window_size: expected a {expected}, got 4"),
        ({"window_size": (4, -2)}, f"window_size: expected a {expected}"),
        (
            {"cu_seqlens": [0, 4, 12]},
            r"cu_seqlens: expected ascending ints from 0 to the 16 keys \(add a last document",
        ),
        ({"cu_seqlens": [0, 9, 4, 16]}, "cu_seqlens: expected ascending ints"),
        ({"cu_seqlens": [16]}, "cu_seqlens: expected 2 or more borders, and a key for each query, got 1 borders"),
        (
            {"cu_seqlens": torch.tensor([0.0, 16.0])},
            r"cu_seqlens: expected ints \[documents \+ 1\], a list or a tensor",
        ),
        (
            {"lengths": [4]},
            r"lengths: expected \[2\], one for each sequence of the batch \(for packed documents, use cu",
        ),
        ({"lengths": [4, 17]}, r"lengths: expected ints from 0 to the 16 keys, got \[4, 17\]"),
        ({"lengths": "all"}, r"lengths: expected ints \[2\], one for each sequence of the batch, a list or"),
        ({"softcap": -1.0}, "softcap: expected a finite number"),
        ({"sink_tokens": -1}, "sink_tokens: expected"),
        ({"sink_tokens": 2, "cu_seqlens": [0, 16]}, "sink_tokens: expected 0 for packed documents, got 2"),
        ({"sinks": torch.zeros(3)}, r"sinks: expected a tensor \[4\], one score per head, got \[3\]"),
        ({"dropout_p": 1.0}, "dropout_p: expected a number from 0 to below 1, got 1.0"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            bs.nn.attention(q, k, v, layout, **options)
    with pytest.raises(
        bs.BlockSparseError, match=r"k: expected \[2, 4, keys, 16\], as of q, or fewer heads that divide 4"
    ):
        bs.nn.attention(q, k.repeat(1, 3, 1, 1)[:, :3], v, layout)
    with pytest.raises(bs.BlockSparseError, match="cu_seqlens: expected 2 or more borders, and a key for each query"):
        bs.nn.attention(q, k[:, :, :8], v[:, :, :8], layout[:, :1], cu_seqlens=[0, 8])
    whole, own = bs.patterns.dense((16, 16), 8), bs.patterns.dense((8, 16), 8)
    with pytest.raises(bs.BlockSparseError, match="layout: expected layouts of 8 queries, or all of 16 queries"):
        bs.nn.attention(q[:, :, :8], k, v, [whole, own, whole, own])


@pytest.mark.parametrize("run", [gathered.gradients, cpu.gradients])
@pytest.mark.parametrize("number", range(12))
def test_gradients_without_autograd(number, run):
    """Compiled graphs call these functions, with the dropped weights of the forward pass."""
    torch.manual_seed(number)
    q, k, v = sizes(43, 60)
    layout = bs.BlockLayout(torch.rand(8, 4) < 0.7, (8, 16))
    spans = data_spans(43, 60, 30, None, torch.tensor([0, 25, 60]), torch.tensor([60, 41])) if number % 2 else None
    rules = Rules(17, 30, None, spans, 0.4, (0.0, 3.0)[number % 4 > 1], (0.0, 0.3)[number % 3 > 0], torch.tensor(5))
    y, lse = reference.attention(q, k, v, [layout], rules, return_lse=True)
    lse = lse.where(lse.isfinite(), 0)
    upstream = torch.randn(y.shape, dtype=y.dtype), torch.randn(lse.shape, dtype=y.dtype)
    expected = torch.autograd.grad((y, lse), (q, k, v), upstream)
    with torch.no_grad():
        y, lse = reference.attention(q, k, v, [layout], rules, return_lse=True)
        found = run(q, k, v, y, lse, *upstream, layout, rules)
    torch.testing.assert_close(tuple(found), expected, rtol=1e-9, atol=1e-9)
