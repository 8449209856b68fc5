"""Cases of attention, patterns and experts from the trackers of other libraries, and where they are tested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import blocksparse as bs
from linear_backends import CPU, running

# The tests of each public report, "module::function"; without a module, in this file.
REPORTS = {
    "triton-lang/triton#266, wrong products for odd multiples of a block of 16": ["test_odd_multiples_of_the_block"],
    "triton-lang/triton#360, wrong shapes and crashes for blocks below 16": ["test_blocks_of_any_size"],
    "triton-lang/triton#419, wrong gradients even for dense layouts": ["test_gradients_of_a_layout_per_head"],
    "Dao-AILab/flash-attention#2623, wrong gradients for 64 features per head": [
        "test_gradients_for_64_features",
        "test_attention_rules::test_random_combinations",
    ],
    "kuleshov-group/bd3lms#23, a forgotten block size gives another mask": [
        "test_a_mask_with_a_forgotten_block_size",
        "test_attention_patterns::test_a_mask_of_another_length_is_told_how_to_fit",
    ],
    "meta-pytorch/attention-gym#31, one mask for shorter inputs": [
        "test_attention_patterns::test_a_mask_of_another_length_is_told_how_to_fit",
        "test_attention_patterns::test_a_cropped_mask_serves_shorter_inputs",
    ],
    "pytorch/pytorch#134756, a mask of 96,000 tokens needs too much memory": [
        "test_attention_patterns::test_long_sequences_need_no_dense_mask",
        "test_nn_attention::test_memory_follows_the_blocks",
    ],
    "pytorch/pytorch#141486, a new pattern in each call compiles each time": [
        "test_topk_blocks::test_compiled_graphs_serve_any_choice",
        "test_compiled_layouts::test_many_layouts_one_recompilation",
    ],
    "databricks/megablocks#166, many small experts are slower than a loop": [
        "test_many_small_experts_against_a_loop",
        "test_nn_experts::test_any_imbalance_and_number_of_threads",
    ],
}


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_has_its_tests(report):
    for name in REPORTS[report]:
        *module, function = name.split("::")
        path = Path(__file__).with_name(f"{module[0]}.py") if module else Path(__file__)
        assert f"\ndef {function}(" in path.read_text()


def outputs_and_gradients(attention, leaves, grad):
    leaves = [leaf.detach().to(grad.dtype).requires_grad_() for leaf in leaves]
    y = attention(*leaves)
    return y, *torch.autograd.grad(y, leaves, grad)


def check_attention(queries, keys, d, layouts, dtype=torch.float64, causal=False):
    """Compare attention and its gradients with the dense computation in float64."""
    heads = len(layouts)
    q, k, v = torch.randn(1, heads, queries, d), *torch.randn(2, 1, heads, keys, d)
    height, width = layouts[0].block_shape
    seen = torch.stack([layout.mask() for layout in layouts])
    seen = seen.repeat_interleave(height, 1).repeat_interleave(width, 2)
    seen = seen.tril(keys - queries) if causal else seen
    seen |= ~seen.any(-1, keepdim=True)  # each query sees a key: the layout stores one in each row
    grad = torch.randn(1, heads, queries, d)
    ours = outputs_and_gradients(lambda *x: bs.nn.attention(*x, layouts, causal), (q, k, v), grad.to(dtype))
    dense = torch.nn.functional.scaled_dot_product_attention
    right = outputs_and_gradients(lambda *x: dense(*x, attn_mask=seen), (q, k, v), grad.double())
    for found, expected in zip(ours, right, strict=True):
        assert (found.double() - expected).norm() <= (1e-12 if dtype is torch.float64 else 1e-5) * expected.norm()


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("sizes", [(32, 32, 16), (16, 48, 48), (48, 80, 16)])
def test_odd_multiples_of_the_block(sizes, name):
    queries, keys, d = sizes
    with running(name):
        check_attention(queries, keys, d, [bs.patterns.random((queries, keys), 16, 0.6, seed=s) for s in range(2)])
        layout = bs.patterns.random((keys, d), 16, 0.6, seed=0)
        x, values = torch.randn(queries, d), torch.randn(layout.values_shape)
        torch.testing.assert_close(bs.linear(x, values, layout), x @ bs.to_dense(values, layout).T)


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("block", range(1, 16))
def test_blocks_of_any_size(block, name):
    with running(name):
        check_attention(5 * block, 7 * block, 8, [bs.patterns.random((5 * block, 7 * block), block, 0.5, seed=0)])


@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_a_layout_per_head(dtype, density):
    check_attention(512, 384, 64, [bs.patterns.random((512, 384), 64, density, seed=s) for s in range(2)], dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_for_64_features(dtype, causal):
    layout = bs.patterns.bigbird(512, 128, random_blocks=1, causal=causal)
    check_attention(512, 512, 64, [layout] * 2, dtype, causal)


def test_a_mask_with_a_forgotten_block_size():
    """Block diffusion: noisy blocks see themselves and the clean blocks before them, clean ones see the past."""
    length, size = 64, 4
    block = torch.arange(2 * length) // size
    clean, block = block >= length // size, block % (length // size)
    rows, cols = (block[:, None], clean[:, None]), (block, clean)
    same, before = rows[0] == cols[0], rows[0] > cols[0]
    seen = same & (rows[1] == cols[1]) | before & cols[1]
    q, k, v = torch.randn(3, 1, 2, 2 * length, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    mask = seen[::size, ::size]
    torch.testing.assert_close(bs.nn.attention(q, k, v, bs.BlockLayout(mask, size)), expected)
    with pytest.raises(bs.BlockSparseError, match=r"\(128, 128\).*need block_size=4, got .*shape=\(1024, 1024\)"):
        bs.nn.attention(q, k, v, bs.BlockLayout(mask))


def test_many_small_experts_against_a_loop():
    """48 experts of 192 units, 8 per token, density 0.5: equal outputs and gradients.

    The report's step took 9 times as long as a loop; `benchmarks/reach.py --only experts` times ours.
    """
    experts = bs.nn.Experts(48, 256, 192, density=0.5, block_size=64)
    dense = experts.densified()
    x, weights = torch.randn(64, 256), torch.rand(64, 8)
    index = torch.rand(64, 48).topk(8).indices

    def loop(x):
        y = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(
            zip(*(weight.unbind(0) for weight in dense.parameters()), strict=True)
        ):
            token, place = (index == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up.T).chunk(2, -1)
            out = (torch.nn.functional.silu(gate) * up) @ down.T
            y = y.index_add(0, token, out * weights[token, place, None])
        return y

    y, expected = experts(x, index, weights), loop(x)
    grads, dense_grads = (
        torch.autograd.grad(of.sum(), [*module.parameters()]) for of, module in ((y, experts), (expected, dense))
    )
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for found, right, name in zip(grads, dense_grads, ("gate_up_proj", "down_proj"), strict=True):
        layout = getattr(experts, name).layout
        torch.testing.assert_close(found, bs.from_dense(right.flatten(0, 1), layout), rtol=1e-3, atol=1e-3)
