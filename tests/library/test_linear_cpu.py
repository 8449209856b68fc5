"""Promises of the CPU backend alone: determinism, threads, instruction sets, addresses beyond 2^31; and its plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

import blocksparse as bs
from blocksparse.ops import cpu_core
from blocksparse.ops.cpu_plan import OUTPUT_STEP, TASK_COST, block_plan, row_plan
from blocksparse.ops.linear import all_blocks, cpu, linear, linear_transposed
from blocksparse.ops.linear.op import LINEAR
from linear_backends import CPU, assert_close, assert_same_bits, dgrad, forward, running, wgrad
from processes import run_script
from strategies import layouts

on_every_isa = pytest.mark.parametrize("backend", CPU)


# -- results do not depend on chance -----------------------------------------------------------------------------


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical_over_runs_and_thread_counts(backend, dtype):
    layout = bs.patterns.barabasi_albert(1024, block_size=32, m=4, seed=0)
    x, grad = torch.randn(300, 1024, dtype=dtype), torch.randn(300, 1024, dtype=dtype)
    values = torch.randn(layout.values_shape, dtype=dtype)
    with running(backend):
        assert_same_bits(lambda: (forward(x, values, layout), dgrad(grad, values, layout), wgrad(grad, x, layout)))


@on_every_isa
@pytest.mark.parametrize("tokens", [all_blocks.MIN_TOKENS - 1, all_blocks.MIN_TOKENS])
def test_layouts_with_all_blocks_keep_the_contract_in_the_dense_product(backend, tokens):
    # AVX2 calls PyTorch's dense product from this number of tokens on.
    layout = bs.patterns.dense((all_blocks.MIN_FEATURES, all_blocks.MIN_FEATURES + 32), block_size=32)
    (out, in_), values = layout.shape, torch.randn(layout.values_shape)
    x, grad, bias = torch.randn(tokens, in_ + 8)[:, :in_], torch.randn(tokens, out), torch.randn(out)
    weight = bs.to_dense(values, layout).double()

    def products():
        activated = linear(x, values, layout, bias=bias, activation="relu")
        return activated, dgrad(grad, values, layout), wgrad(grad, x, layout)

    expected = torch.relu(x.double() @ weight.T + bias), grad.double() @ weight, grad.double().T @ x.double()
    with running(backend):
        assert_same_bits(products)
        y, grad_x, grad_values = products()
        if tokens >= all_blocks.MIN_TOKENS and cpu_core.isa() == "avx2":
            assert torch.equal(grad_x, grad @ weight.float())  # the dense product itself
    assert_close(y, expected[0], 2e-6, "y")
    assert_close(grad_x, expected[1], 2e-6, "grad_x")
    assert_close(bs.to_dense(grad_values, layout), expected[2], 2e-6, "grad_values")


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [8, (16, 48)], ids=str)
def test_gradients_of_the_values_where_columns_come_in_panels(backend, dtype, block):
    height, width = (block, block) if isinstance(block, int) else block
    layout = bs.patterns.random((5 * height, 240 * width), block_size=block, density=0.3, seed=0)
    grad, x = (torch.randn(300, features, dtype=dtype) for features in layout.shape)  # x takes 1 to 14 MB
    mask = bs.to_dense(torch.ones(layout.values_shape, dtype=torch.float64), layout)
    expected = mask * (grad.double().T @ x.double())
    with running(backend):
        values = assert_same_bits(lambda: wgrad(grad, x, layout), (1, 2, 3))
    assert_close(bs.to_dense(values, layout), expected, 1e-2 if dtype == torch.bfloat16 else 2e-6)


@on_every_isa
@pytest.mark.parametrize("block", [32, (48, 96), (80, 64)], ids=str)
@pytest.mark.parametrize("tokens", [3, 17, 150])
def test_long_rows_are_right_where_a_plan_cuts_them(backend, block, tokens):
    height, width = (block, block) if isinstance(block, int) else block
    layout = bs.patterns.dense((height * 20, width * 20), block_size=block)
    assert len(row_plan(layout, False).row) > 20
    x, grad = torch.randn(tokens, width * 20).bfloat16(), torch.randn(tokens, height * 20).bfloat16()
    values = torch.randn(layout.values_shape).bfloat16()
    weight = bs.to_dense(values.double(), layout)
    with running(backend):
        assert_close(forward(x, values, layout), x.double() @ weight.T, 1e-2)
        assert_close(dgrad(grad, values, layout), grad.double() @ weight, 1e-2)


@on_every_isa
@pytest.mark.parametrize("block", [8, 32])
def test_a_token_has_the_same_bits_among_a_few_others_and_among_many(backend, block):
    # A few tokens are summed in another order than many. In each case the others make no difference.
    layout = bs.patterns.random((256, 256), block_size=block, density=0.3, seed=0)
    x, values = torch.randn(100, 256), torch.randn(layout.values_shape)
    with running(backend):
        for product in (forward, dgrad):
            many, alone = product(x, values, layout), product(x[:1], values, layout)
            assert torch.equal(product(x[:50], values, layout), many[:50])
            assert torch.equal(product(x[:2], values, layout)[:1], alone)
            assert_close(alone, many[:1].double(), 2e-6, "alone")


@on_every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [4, 8, 12, 15, 32])
def test_outputs_larger_than_the_caches_have_the_bits_of_small_ones(backend, block, dtype):
    # Large ones are written past the caches, whole cache lines at a time; small ones are not.
    features, tokens = 480, 2400 if dtype in (torch.float32, torch.float64) else 4800
    layout = bs.patterns.random((features, features), block_size=block, density=0.1, seed=0)
    x, values = torch.randn(tokens, features, dtype=dtype), torch.randn(layout.values_shape, dtype=dtype)
    bias = torch.randn(features, dtype=dtype)
    with running(backend):
        for product, own in ((linear, {"bias": bias, "activation": "relu"}), (linear_transposed, {})):
            many = product(x, values, layout, **own)
            parts = [product(part, values, layout, **own) for part in x.split(400)]
            assert torch.equal(many, torch.cat(parts))


@on_every_isa
def test_zero_has_the_same_sign_behind_an_activation_with_few_tokens_and_with_many(backend):
    layout = bs.patterns.dense((32, 32), block_size=32)
    values, x = torch.full(layout.values_shape, -1e-30), torch.full((20, 32), 1e-30)  # whose products are -0
    with running(backend):
        few, many = (linear(x[:tokens], values, layout, activation="silu") for tokens in (1, 20))
        assert not many.any()
        assert torch.equal(torch.signbit(few[0]), torch.signbit(many[0]))


# -- instruction sets ----------------------------------------------------------------------------------------------


IN_USE = """
import blocksparse as bs
from blocksparse.ops import cpu_core
try:
    print(cpu_core.isa())
except bs.BlockSparseError as error:
    print(error)
print(bs.backends()["cpu"])
"""


def in_use(folder, **environment: str) -> list[str]:
    """The instruction set that a process uses, or why none, and whether the backend is on."""
    (folder / "script.py").write_text(IN_USE)
    return run_script(1, folder / "script.py", folder=folder, **environment).splitlines()


def test_the_environment_variable_chooses_the_instruction_set(tmp_path):
    # The first that is here, and the first that is not.
    for present, isa in {here: isa for isa, here in reversed(cpu_core.isas().items())}.items():
        said = in_use(tmp_path, BLOCKSPARSE_CPU_ISA=isa)
        if present:
            assert said == [isa, f"usable: instruction set {isa}"]
        else:
            assert "expected an instruction set this CPU has" in said[0]


def test_a_wrong_instruction_set_turns_the_backend_off_with_the_reason(tmp_path):
    why, backend = in_use(tmp_path, BLOCKSPARSE_CPU_ISA="mmx")
    assert why.startswith("environment variable BLOCKSPARSE_CPU_ISA: expected")
    assert backend == f"off: {why}"
    assert "'mmx'" in why


def test_the_default_is_the_best_that_is_present_and_not_emulated(tmp_path):
    present = [isa for isa, here in cpu_core.isas().items() if here and "emulated" not in isa]
    assert in_use(tmp_path, BLOCKSPARSE_CPU_ISA="")[0] == present[-1]


# -- addresses beyond 2^31 ---------------------------------------------------------------------------------------


def test_tokens_more_than_two_to_the_31_elements_apart():
    # The memory between the three tokens is never touched, and so never there.
    memory = torch.empty(2**32 + 2**12, dtype=torch.bfloat16)
    x = memory.as_strided((3, 64), (2**31 + 64, 1))
    x.copy_(torch.randn(3, 64))
    layout = bs.patterns.random((32, 64), block_size=16, density=0.5, seed=0)
    values = torch.randn(layout.values_shape, dtype=torch.bfloat16)
    weight = bs.to_dense(values, layout).double()
    assert_close(forward(x, values, layout), x.double() @ weight.T, 1e-2)
    grad = torch.randn(3, 32, dtype=torch.bfloat16)
    assert_close(wgrad(grad, x, layout), bs.from_dense(grad.double().T @ x.double(), layout), 1e-2)


def test_outputs_more_than_two_to_the_31_elements_apart():
    memory = torch.empty(2**32 + 2**12, dtype=torch.bfloat16)  # of which only three rows are touched
    out = memory.as_strided((3, 32), (2**31 + 64, 1))
    layout = bs.BlockLayout([[True, False], [False, False]], block_size=16)
    x, values = torch.randn(3, 32).bfloat16(), torch.randn(layout.values_shape).bfloat16()
    LINEAR.on(x.device, x.dtype).linear(x, values, None, layout, False, None, out)
    assert_close(out, x.double() @ bs.to_dense(values, layout).double().T, 1e-2)


@pytest.mark.full  # 4 GB
def test_more_than_two_to_the_31_outputs():
    height, rows = 4096, 2**31 // 4096 // 16 + 1
    layout = bs.BlockLayout.from_indices([rows - 1], [0], grid=(rows, 1), block_size=(height, 16))
    x, values = torch.randn(16, 16, dtype=torch.float16), torch.randn(1, height, 16, dtype=torch.float16)
    y = forward(x, values, layout)
    assert_close(y[:, -height:], x.double() @ values[0].double().T, 2e-3)
    assert (y[:, -2 * height : -height] == 0).all()


@pytest.mark.full  # 5 GB
def test_values_of_more_than_two_to_the_31_elements():
    block, count = 4096, 2**31 // 4096**2 + 2
    layout = bs.patterns.dense((block, count * block), block_size=block)
    values = torch.zeros(layout.values_shape, dtype=torch.bfloat16)
    values[-1, :8] = torch.randn(8, block, dtype=torch.bfloat16)
    x = torch.randn(1, count * block, dtype=torch.bfloat16)
    y = forward(x, values, layout)
    expected = x[:, -block:].double() @ values[-1, :8].double().T
    assert_close(y[:, :8], expected, 1e-2)
    assert (y[:, 8:] == 0).all()


def test_writing_to_a_layouts_index_tensors_leads_no_kernel_astray():
    layout = bs.patterns.random((96, 96), block_size=32, density=0.5, seed=0)
    x, values, grad = torch.randn(9, 96), torch.randn(layout.values_shape), torch.randn(9, 96)
    weight = bs.to_dense(values, layout)
    expected = bs.from_dense(grad.T @ x, layout)
    layout.col_indices().fill_(3_000_000)
    layout.crow_indices().fill_(3_000_000)
    torch.testing.assert_close(forward(x, values, layout), x @ weight.T)
    torch.testing.assert_close(dgrad(grad, values, layout), grad @ weight)
    torch.testing.assert_close(wgrad(grad, x, layout), expected)
    for array in (layout.row_of_block, layout.col_of_block, layout.row_start):
        assert not array.flags.writeable


# -- the short way of calls without gradients ------------------------------------------------------------------------

INPUTS = {
    "a vector": lambda n: torch.randn(n),
    "rows": lambda n: torch.randn(5, n),
    "a row": lambda n: torch.randn(1, n),
    "rows apart": lambda n: torch.randn(5, 2 * n)[:, :n],
    "one row again": lambda n: torch.randn(n).expand(5, n),
    "columns": lambda n: torch.randn(n, 5).T,
    "three axes": lambda n: torch.randn(2, 3, n),
    "three axes apart": lambda n: torch.randn(2, 4, n)[:, ::2],
    "nothing": lambda n: torch.randn(0, n),
    "no sequence": lambda n: torch.randn(2, 0, n),
}
SHORT = {"a vector", "rows", "a row", "rows apart", "three axes"}


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("kind", INPUTS)
def test_without_gradients_results_are_the_same_bits(monkeypatch, kind, transpose, activation):
    layout = bs.patterns.random((48, 72), block_size=24, density=0.5, seed=0)
    values, bias = torch.randn(layout.values_shape), torch.randn(48)
    x, took = INPUTS[kind](layout.shape[not transpose]), []
    short = cpu.linear_fast
    monkeypatch.setattr(cpu, "linear_fast", lambda *given: (took.append(short(*given)), took[-1])[1])

    def product():
        if transpose:
            return linear_transposed(x, values, layout)
        return bs.linear(x, values, layout, bias, activation)

    with bs.use_backend("cpu"):  # the long way, which leaves the tasks behind
        expected = product()
    assert not took
    with torch.no_grad():
        got = product()
    assert got.shape == expected.shape
    assert torch.equal(got, expected)
    assert (took[0] is not None) == (kind in SHORT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_without_gradients_in_every_dtype(dtype):
    layout = bs.patterns.random((48, 72), block_size=24, density=0.5, seed=0)
    x, values = torch.randn(5, 72, dtype=dtype), torch.randn(layout.values_shape, dtype=dtype)
    with bs.use_backend("cpu"):
        expected = bs.linear(x, values, layout)
    with torch.inference_mode():
        assert torch.equal(bs.linear(x, values, layout), expected)


@torch.no_grad()
def test_bad_input_is_refused_without_gradients_too():
    layout = bs.patterns.dense((8, 8), block_size=4)
    x, values, bias = torch.randn(3, 8), torch.randn(layout.values_shape), torch.randn(8)
    bs.linear(x, values, layout, bias)
    freed, flat = torch.randn(3, 8), torch.randn(1 + 24 + 64 + 8)
    views = flat[1:25].view(3, 8), flat[25:89].view(layout.values_shape), flat[89:]
    freed.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(0)
    for operands, named in (
        ((x[:, :7], values, layout, bias), "x"),
        ((x, values[1:], layout, bias), "values"),
        ((x, values, layout, bias[:7]), "bias"),
        ((x.double(), values, layout, bias), "values"),
        ((x, values, layout, bias.double()), "bias"),
        ((x.to("meta"), values, layout, bias), "values"),
        ((x, values.to("meta"), layout, bias), "values"),
        ((freed, values, layout, bias), "x"),
        ((views[0], values, layout, bias), "x"),
        ((x, views[1], layout, bias), "values"),
        ((x, values, layout, views[2]), "bias"),
        ((None, values, layout, bias), "x"),
        ((x, None, layout, bias), "values"),
        ((x.long(), values.long(), layout, bias.long()), "linear|dtype"),
    ):
        with pytest.raises(bs.BlockSparseError, match=rf"^({named}): expected"):
            bs.linear(*operands)


# -- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@given(layout=layouts(max_grid=12, blocks=(1, 4, 8, 24, 32, 128)))
def test_a_row_plan_covers_every_output_once_and_every_block(layout, transpose):
    plan = row_plan(layout, transpose)
    oriented = layout.T if transpose else layout
    covered = np.zeros(oriented.shape[0], dtype=int)
    for row, begin, end in zip(plan.row, plan.begin, plan.end, strict=True):
        assert begin % OUTPUT_STEP == 0
        covered[row * oriented.block_shape[0] + begin : row * oriented.block_shape[0] + end] += 1
    assert (covered == 1).all()
    assert sorted(plan.position) == list(range(layout.nnz))
    rows = np.repeat(np.arange(oriented.grid[0]), np.diff(plan.start))
    at = (plan.col, rows) if transpose else (rows, plan.col)
    assert np.array_equal(layout.row_of_block[plan.position], at[0])
    assert np.array_equal(layout.col_indices().numpy()[plan.position], at[1])
    assert plan.task_start[0] == 0
    assert plan.task_start[-1] == len(plan.row)
    assert (np.diff(plan.task_start) > 0).all()


def test_hub_rows_are_cut_and_come_first():
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[5], mask[:, 7] = True, True
    plan = row_plan(bs.BlockLayout(mask, block_size=64), transpose=False)
    pieces = (plan.row == 5).sum()
    assert pieces == 64 // OUTPUT_STEP
    assert (plan.row[:pieces] == 5).all()


@pytest.mark.parametrize("block", [(1, 64), (8, 8), (16, 16)])
@pytest.mark.parametrize("inputs", [1024, 65536])
def test_rows_of_low_blocks_stay_together_unless_that_is_too_much_for_a_task(block, inputs):
    layout = bs.patterns.random((64, inputs), block_size=block, density=0.1, seed=0)
    plan = row_plan(layout, transpose=False)
    cost = np.diff(layout.row_start) * block[0] * block[1]
    tasks = [plan.row[a:b] for a, b in zip(plan.task_start, plan.task_start[1:], strict=False)]
    if cost.mean() * 32 // block[0] <= TASK_COST:
        assert all(len(rows) % (32 // block[0]) == 0 for rows in tasks)  # whole cache lines
    else:
        assert max(cost[rows].sum() for rows in tasks) <= max(3 * TASK_COST, cost.max())


@given(layout=layouts(max_grid=12, blocks=(1, 8, 32, 128)))
def test_a_block_plan_covers_every_block_in_order(layout):
    plan = block_plan(layout)
    assert np.array_equal(plan.row, layout.row_of_block)
    assert np.array_equal(plan.col, layout.col_indices())
    starts = plan.task_start
    assert starts[0] == 0
    assert starts[-1] == layout.nnz
    cost = np.diff(starts) * layout.block_shape[0] * layout.block_shape[1]
    assert (cost < TASK_COST + 2 * 128 * 128).all()


def test_plans_are_made_once_per_layout():
    layout = bs.patterns.dense((64, 64), block_size=32)
    assert row_plan(layout, False) is row_plan(layout, False)
    assert row_plan(layout, False) is not row_plan(layout, True)
