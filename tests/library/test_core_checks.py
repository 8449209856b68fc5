"""Checks before the compiled core: tensors must cover what kernels touch, index arrays must fit each other.

The CPU backends are called directly, past the checks of the public functions.
"""

from __future__ import annotations

import itertools
import re
from functools import partial

import numpy as np
import pytest
import torch

import blocksparse as bs
import recurrent_entries
from blocksparse.ops import cpu_core
from blocksparse.ops.attention import cpu as attention
from blocksparse.ops.attention import few_queries
from blocksparse.ops.attention.rules import Rules
from blocksparse.ops.conv import cpu as conv
from blocksparse.ops.conv.op import conv_op, conv_wgrad_op
from blocksparse.ops.conv.plan import axes_of, channel_plan, packed_taps, runs
from blocksparse.ops.cpu_plan import block_plan, column_plan, row_plan
from blocksparse.ops.dropout import cpu as dropout
from blocksparse.ops.expert_linear import cpu as expert_linear
from blocksparse.ops.linear import cpu as linear
from blocksparse.ops.linear.op import linear_op, linear_wgrad_op
from blocksparse.ops.lstm_gates import cpu as gates
from blocksparse.ops.momentum import cpu as momentum
from blocksparse.ops.momentum import reference as momentum_reference

pytestmark = pytest.mark.skipif(cpu_core.unavailable() is not None, reason="the compiled core is not there")

BLOCKS = bs.BlockLayout([[True, False, True], [True, True, False]], block_size=(4, 2))
NUMBERS = bs.BlockLayout([[True, False, True], [True, True, False]], block_size=1)
STARTS = torch.tensor([0, 3, 6])  # of the rows of two experts
AXES = axes_of((5, 6), (5, 6), (3, 3), (1, 1), (1, 1), (1, 1))
SEEN = bs.patterns.random((8, 12), block_size=4, density=0.5, seed=0)
POINT = axes_of((5, 6), (5, 6), (1, 1), (1, 1), (0, 0), (1, 1))
RATES = {"momentum": 0.9, "rate": 0.1, "keep": 1.0}
FACTORS = (0.0, 1.0, 0.5)


def a_linear(layout):
    out, in_ = layout.shape
    operands = {"x": (7, in_), "values": layout.values_shape, "bias": (out,), "out": (7, out)}
    return operands, lambda x, values, bias, out: linear.linear(x, values, bias, layout, False, None, out)


def a_dgrad(layout):
    out, in_ = layout.shape
    operands = {"x": (7, out), "values": layout.values_shape, "out": (7, in_)}
    return operands, lambda x, values, out: linear.linear(x, values, None, layout, True, None, out)


def a_wgrad(layout):
    out, in_ = layout.shape
    return {"grad": (7, out), "x": (7, in_)}, lambda grad, x: linear.linear_wgrad(grad, x, layout)


def an_expert_linear(transpose):
    operands = {"x": (7, 4 if transpose else 6), "values": BLOCKS.values_shape}
    return operands, lambda x, values: expert_linear.expert_linear(x, values, BLOCKS, STARTS, transpose)


def an_expert_wgrad():
    return {"grad": (7, 4), "x": (7, 6)}, lambda grad, x: expert_linear.expert_linear_wgrad(grad, x, BLOCKS, STARTS)


def all_gradients():
    operands = {"grad": (7, 2), "x": (7, 3), "values": NUMBERS.values_shape}
    return operands, lambda grad, x, values: linear.gradients(grad, x, values, NUMBERS, True, True)


def a_conv(axes):
    kernel = [axis.kernel for axis in axes]
    operands = {"x": (2, 5, 6, 6), "values": (*BLOCKS.values_shape, *kernel), "bias": (8,)}
    return operands, lambda x, values, bias: conv.conv(x, values, bias, BLOCKS, False, False, axes, None)


def a_conv_wgrad(axes):
    operands = {"grad": (2, 5, 6, 8), "x": (2, 5, 6, 6)}
    return operands, lambda grad, x: conv.conv_wgrad(grad, x, BLOCKS, False, axes)


def an_attention(backward):
    y = {"y": (1, 2, 8, 16), "log_sum": (1, 2, 8), "grad": (1, 2, 8, 16)} if backward else {}
    run = partial(attention.backward, grad_lse=None) if backward else attention.forward
    shapes = {"q": (1, 2, 8, 16), "k": (1, 2, 12, 16), "v": (1, 2, 12, 16), **y}
    return shapes, partial(run, layout=SEEN, rules=Rules(softcap=3.0))


def a_few_queries():
    shapes = {"q": (1, 2, 3, 16), "k": (1, 1, 12, 16), "v": (1, 1, 12, 16)}
    return shapes, lambda q, k, v: few_queries.attention(q, k, v, SEEN, Rules(5), return_lse=True)


def a_momentum():
    def step(weights, velocities, grads):
        lists = ([torch.zeros(2), tensor] for tensor in (weights, velocities, grads))
        momentum.step(*lists, **RATES)

    return dict.fromkeys(("weights", "velocities", "grads"), (4, 3)), step


ENTRIES = {
    "linear": a_linear(BLOCKS),
    "linear_transposed": a_dgrad(BLOCKS),
    "linear_wgrad": a_wgrad(BLOCKS),
    "expert_linear": an_expert_linear(False),
    "expert_linear_transposed": an_expert_linear(True),
    "expert_linear_wgrad": an_expert_wgrad(),
    "csr_linear": a_linear(NUMBERS),
    "csr_linear_transposed": a_dgrad(NUMBERS),
    "csr_wgrad": a_wgrad(NUMBERS),
    "csr_gradients": all_gradients(),
    "conv": a_conv(AXES),
    "conv_wgrad": a_conv_wgrad(AXES),
    "conv_of_points": a_conv(POINT),
    "conv_wgrad_of_points": a_conv_wgrad(POINT),
    **recurrent_entries.ENTRIES,
    "attention_forward": an_attention(False),
    "attention_backward": an_attention(True),
    "attention_few_queries": a_few_queries(),
    "dropout_forward": ({"x": (4, 3)}, lambda x: dropout.forward(x, FACTORS, 1, 100)),
    "dropout_backward": ({"grad": (4, 3), "code": (4, 3)}, lambda grad, code: dropout.backward(grad, code, FACTORS)),
    "momentum": a_momentum(),
}
# Functions that take strided operands, by a copy where kernels do not, and operands that are copied anyway.
COPIED = {"linear", "expert", "csr", "conv", "attention"}
CLONED = {(entry, grad) for entry in recurrent_entries.OF_ALL_STEPS for grad in ("grad_h", "grad_c")}


def operands_of(entry):
    shapes, call = ENTRIES[entry]
    operands = {name: torch.randn(shape) for name, shape in shapes.items()}
    if "code" in operands:
        operands["code"] = operands["code"].abs().to(torch.uint8)
    return operands, call


def apart(tensor):
    """Return a view with the same numbers, no two of them contiguous."""
    return tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2].copy_(tensor)


WRONG = ["smaller", "larger", "fewer axes", "dtype", "device"]
# It takes any shape, and every dtype of the core.
LEGAL = {("dropout_forward", "x", wrong) for wrong in WRONG if wrong != "device"}
LEGAL.add(("dropout_backward", "grad", "dtype"))
LAST = "attention_few_queries"
LEGAL |= {
    ("attention_forward", "v", "larger"),
    (LAST, "v", "larger"),
    (LAST, "v", "smaller"),
}  # values have features of their own
CASES = {(entry, operand, wrong) for entry, (shapes, _) in ENTRIES.items() for operand in shapes for wrong in WRONG}


@pytest.mark.parametrize(("entry", "operand", "wrong"), sorted(CASES - LEGAL))
def test_a_wrong_operand_is_refused_by_name(entry, operand, wrong):
    operands, call = operands_of(entry)
    tensor = operands[operand]
    others = "|".join(map(re.escape, operands))
    if wrong == "smaller":
        operands[operand] = tensor[..., :-1].contiguous()
    elif wrong == "larger":
        operands[operand] = torch.cat([tensor, tensor], -1)
    elif wrong == "fewer axes":
        operands[operand] = torch.tensor(1.0)
    elif wrong == "dtype":
        operands[operand] = tensor.double()
    else:
        operands[operand] = tensor.to("meta")
    # Of two that do not fit each other either can be named: the first operand gives the dtype and the number of rows.
    alone = wrong in ("smaller", "larger") and operand.partition("[")[0] in ("values", "bias", "out")
    named = re.escape(operand) if alone else others
    with pytest.raises(bs.BlockSparseError, match=rf"^({named})(\[1\])?: expected"):
        call(**operands)


@pytest.mark.parametrize(
    ("entry", "operand"), sorted({(e, o) for e, (shapes, _) in ENTRIES.items() for o in shapes} - CLONED)
)
def test_strided_operands_are_copied_or_refused(entry, operand):
    operands, call = operands_of(entry)
    strided = {**operands, operand: apart(operands[operand])}
    if entry.split("_")[0] not in COPIED:
        with pytest.raises(bs.BlockSparseError, match=rf"^{re.escape(operand)}(\[1\])?: expected"):
            call(**strided)
        return
    expected = call(**operands)
    expected = expected if isinstance(expected, tuple) else (expected,)
    expected = [tensor.clone() for tensor in expected]
    got = call(**strided)
    for mine, wanted in zip(got if isinstance(got, tuple) else (got,), expected, strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("entry", ["linear", "linear_wgrad", "csr_linear", "csr_wgrad", "conv", "conv_wgrad"])
def test_ints_are_refused(entry):
    operands, call = operands_of(entry)
    with pytest.raises(bs.BlockSparseError, match=r"^dtype: expected"):
        call(**{name: tensor.long() for name, tensor in operands.items()})


def test_gates_without_features():
    z, c = torch.empty(3, 0), torch.empty(3, 0)
    gates.forward(z, None, None, c, h_out=c.clone(), c_out=c.clone())


@pytest.mark.parametrize("setting", ["default dtype", "default device"])
def test_torch_defaults_do_not_change_outputs_and_working_memory(setting):
    torch.manual_seed(0)
    layout = bs.patterns.dense((40, 40), 1)
    x, grad, values = torch.randn(40, 40), torch.randn(40, 40), torch.randn(layout.values_shape)
    expected = linear.linear(x, values, None, layout, False, None), linear.linear_wgrad(grad, x, layout)
    linear._small.memory = torch.empty(0, dtype=torch.uint8)
    try:
        if setting == "default dtype":
            torch.set_default_dtype(torch.float16)
        else:
            torch.set_default_device("meta")
        got = linear.linear(x, values, None, layout, False, None), linear.linear_wgrad(grad, x, layout)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(got, expected, strict=True))


# -- index arrays ------------------------------------------------------------------------------------------------


class Recorder:
    """The core, which keeps the arguments of a call."""

    def __init__(self, monkeypatch, name):
        self.core, self.name = cpu_core.core(), name
        monkeypatch.setattr(cpu_core, "core", lambda: self)

    def __getattr__(self, name):
        function = getattr(self.core, name)
        if name != self.name:
            return function

        def call(**arguments):
            self.arguments = arguments

        return call


INDICES = {
    ("linear_wgrad", "linear_wgrad"): ("row", "col", "task_start"),
    ("expert_linear", "expert_linear"): ("rows", "blocks"),
    ("expert_linear_wgrad", "expert_linear_wgrad"): ("rows", "blocks", "row", "col"),
    ("csr_linear", "csr_linear"): ("start", "col"),
    ("csr_linear_transposed", "csr_linear"): ("start", "col", "position"),
    ("csr_wgrad", "csr_wgrad"): ("start", "col"),
    ("csr_gradients", "csr_gradients"): ("start", "col", "position"),
    ("conv", "conv"): ("start", "col", "position", "order"),
    ("conv_wgrad", "conv_wgrad"): ("row", "col"),
}


@pytest.mark.parametrize(
    ("entry", "function", "index"), [(*names, index) for names, indices in INDICES.items() for index in indices]
)
@pytest.mark.parametrize("change", [1, -1], ids=["longer", "shorter"])
def test_index_arrays_of_other_lengths_are_refused(monkeypatch, entry, function, index, change):
    operands, call = operands_of(entry)
    recorder = Recorder(monkeypatch, function)
    call(**operands)
    array = recorder.arguments[index]
    other = np.append(array, array[-1:] + (index == "task_start")) if change > 0 else array[:-1]
    with pytest.raises(bs.BlockSparseError, match="the compiled core: expected"):
        getattr(recorder.core, function)(**{**recorder.arguments, index: other})
    with pytest.raises((TypeError, bs.BlockSparseError)):  # not converted in silence
        getattr(recorder.core, function)(**{**recorder.arguments, index: array.astype(np.float64)})


@pytest.mark.parametrize("entry", recurrent_entries.OF_ALL_STEPS)
def test_steps_and_weights_of_a_recurrence_that_do_not_fit_are_refused(monkeypatch, entry):
    (operands, call), function = operands_of(entry), entry.removesuffix("_multiplied")
    recorder = Recorder(monkeypatch, function)
    call(**operands)
    run, weights = partial(getattr(recorder.core, function), **recorder.arguments), recorder.arguments["weights"]
    for step in ([0, 2], [0, 1, 3], [0, 3, 2, 3], [1, 3], [0, 2, 4], []):
        with pytest.raises(bs.BlockSparseError, match="the compiled core: expected"):
            run(step=np.array(step, dtype=np.int64))
    for wrong in ([], [*weights, *weights[:1], *weights[:1]], weights[::-1] if len(weights) > 1 else []):
        with pytest.raises(bs.BlockSparseError, match="the compiled core: expected"):
            run(weights=wrong)
    back, turned = function.endswith("backward"), bs.patterns.dense((8, 32), block_size=4)
    others = row_plan(recurrent_entries.GATES, not back), row_plan(turned, back)
    for i, other in itertools.product(range(len(weights)), others):
        with pytest.raises(bs.BlockSparseError, match="weights that fit"):
            run(weights=[*weights[:i], (weights[i][0], other), *weights[i + 1 :]])


@pytest.mark.parametrize("index", ["start", "col"])
@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
def test_plans_of_indices_that_do_not_fit_are_refused(monkeypatch, transpose, index):
    recorder = Recorder(monkeypatch, "RowTasks")
    row_plan(bs.BlockLayout(BLOCKS.mask(), BLOCKS.block_shape), transpose)  # not planned before
    arguments, tasks = recorder.arguments, recorder.core.RowTasks
    tasks(**arguments)
    array = arguments[index]
    first, last = np.append(array[:1] + 7, array[1:]), np.append(array[:-1], -1)
    for other in (np.append(array, array[-1:]), array[:-1], first, last, array[::-1].copy() + 1):
        with pytest.raises(bs.BlockSparseError, match="the compiled core: expected"):
            tasks(**{**arguments, index: other.astype(array.dtype)})
    for dtype in (np.float64, np.int64):  # not converted in silence, and both of one dtype
        with pytest.raises(TypeError):
            tasks(**{**arguments, index: array.astype(dtype)})
    for wrong in ({"grid": (3, 3)}, {"grid": (2, 2)}, {"grid": (0, 3)}, {"block": (4, 0)}, {"block": (-1, 2)}):
        with pytest.raises(bs.BlockSparseError, match="the compiled core: expected"):
            tasks(**{**arguments, **wrong})


@pytest.mark.parametrize("function", ["csr_linear", "csr_wgrad", "csr_gradients"])
def test_too_little_working_memory_is_refused(monkeypatch, function):
    operands, call = operands_of(function)
    recorder = Recorder(monkeypatch, function)
    call(**operands)
    with pytest.raises(bs.BlockSparseError, match="working memory"):
        getattr(recorder.core, function)(**{**recorder.arguments, "working_bytes": 1})


@pytest.mark.parametrize("function", ["conv", "conv_wgrad"])
def test_packed_axes_of_other_lengths_are_refused(monkeypatch, function):
    operands, call = operands_of(function)
    recorder = Recorder(monkeypatch, function)
    call(**operands)
    axes = recorder.arguments["axes"]
    for cut in ([], axes[:-1], [axes[0][:-1], *axes[1:]], [axes[0][:1], *axes[1:]], [axes[0][:0], *axes[1:]]):
        with pytest.raises(bs.BlockSparseError, match="the compiled core: expected"):
            getattr(recorder.core, function)(**{**recorder.arguments, "axes": cut})


@pytest.mark.parametrize("col", [[0, 3, 0, 1], [0, -1, 0, 1]])
def test_columns_outside_of_the_matrix_are_not_turned(col):
    start, col = NUMBERS.row_start, np.array(col, dtype=np.int32)
    to = {"to_start": np.empty(4, np.int32), "to_row": np.empty(4, np.int32), "to_position": np.empty(4, np.int32)}
    with pytest.raises(bs.BlockSparseError, match="columns"):
        cpu_core.core().csr_transposed(start=start, col=col, **to)
    to["to_row"] = np.empty(3, np.int32)
    with pytest.raises(bs.BlockSparseError, match="the compiled core: expected"):
        cpu_core.core().csr_transposed(start=start, col=NUMBERS.col_of_block, **to)


@pytest.mark.parametrize(
    "plan",
    [
        lambda layout: row_plan(layout, False),
        lambda layout: row_plan(layout, True),
        block_plan,
        lambda layout: channel_plan(layout, False),
        lambda layout: channel_plan(layout, True),
    ],
    ids=["rows", "columns", "blocks", "channels", "channels transposed"],
)
@pytest.mark.parametrize(("grid", "block"), [((1, 2**31), 2), ((1, 1), (2**31, 1))], ids=["columns", "high blocks"])
def test_plans_beyond_int32_are_refused(plan, grid, block):
    layout = bs.BlockLayout.from_indices([0], [grid[1] - 1], grid, block)
    with pytest.raises(bs.BlockSparseError, match=r"layout: expected below 2\^31"):
        plan(layout)


# -- the ops themselves --------------------------------------------------------------------------------------------

CROW, COL = torch.tensor([0, 2, 4]), torch.tensor([0, 2, 0, 1])
BAD_INDICES = {
    "columns out of order": ([CROW, COL[[1, 0, 2, 3]]], 3),
    "a column twice": ([CROW, torch.tensor([0, 0, 0, 1])], 3),
    "a column outside": ([CROW, torch.tensor([0, 3, 0, 1])], 3),
    "a negative column": ([CROW, torch.tensor([-1, 2, 0, 1])], 3),
    "float columns": ([CROW, COL.float()], 3),
    "float starts": ([CROW.float(), COL], 3),
    "falling starts": ([torch.tensor([0, 5, 4]), COL], 3),
    "starts beyond": ([torch.tensor([0, 2, 5]), COL], 3),
    "one start": ([CROW[:1], COL], 3),
    "no starts": ([CROW[:0], COL], 3),
    "a number for starts": ([CROW[0], COL], 3),
    "a matrix of columns": ([CROW, COL[None]], 3),
    "starts alone": ([CROW], 3),
    "nothing": ([], 3),
    "no columns": ([CROW, COL], 0),
    "less than no columns": ([CROW, COL], -1),
}
SPACE = ([5, 6], [1, 1], [1, 1], [1, 1])
OPS = {
    "linear": lambda x, grad, values, *indices: linear_op(x[0, 0], values, None, *indices, False, None),
    "linear_wgrad": lambda x, grad, values, *indices: linear_wgrad_op(grad[0, 0], x[0, 0], *indices),
    "conv": lambda x, grad, values, *indices: conv_op(
        x, values[..., None, None].repeat(1, 1, 1, 3, 3), None, *indices, False, False, *SPACE, None
    ),
    "conv_wgrad": lambda x, grad, values, *indices: conv_wgrad_op(grad, x, *indices, False, [3, 3], *SPACE[1:]),
}


def tensors_of_ops(device="cpu"):
    shapes = (2, 5, 6, 6), (2, 5, 6, 8), BLOCKS.values_shape
    return [torch.ones(shape, device=device) for shape in shapes]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("bad", BAD_INDICES)
def test_ops_refuse_indices_that_are_no_layout(name, bad):
    with pytest.raises(bs.BlockSparseError, match=r"indices|cols|x|col"):
        OPS[name](*tensors_of_ops(), *BAD_INDICES[bad])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("bad", ["one start", "no starts", "a number for starts", "nothing", "no columns"])
def test_ops_on_meta_refuse_indices_of_such_sizes(name, bad):
    indices, in_blocks = BAD_INDICES[bad]
    with pytest.raises(bs.BlockSparseError, match="indices"):
        OPS[name](*tensors_of_ops("meta"), [index.to("meta") for index in indices], in_blocks)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ops_refuse_tensors_without_axes(name, device):
    values = tensors_of_ops(device)[-1]
    ones = torch.ones((), device=device)
    indices = [[index.to(device) for index in (CROW, COL)], 3]
    calls = {
        "linear": lambda: linear_op(ones, values, None, *indices, False, None),
        "linear_wgrad": lambda: linear_wgrad_op(ones, ones, *indices),
        "conv": lambda: conv_op(ones, values, None, *indices, False, False, *SPACE, None),
        "conv_wgrad": lambda: conv_wgrad_op(ones, ones, *indices, False, [3, 3], *SPACE[1:]),
    }
    with pytest.raises(bs.BlockSparseError, match=r"^(grad, )?x"):
        calls[name]()


@pytest.mark.parametrize("name", OPS)
def test_ops_take_index_tensors_of_any_int_dtype(name):
    torch.manual_seed(0)
    tensors = [torch.randn_like(tensor) for tensor in tensors_of_ops()]
    expected = OPS[name](*tensors, BLOCKS.indices_on(tensors[0].device), 3)
    assert torch.equal(OPS[name](*tensors, [CROW.int(), COL.short()], 3), expected)


def test_a_copy_of_the_indices_that_was_written_to_is_read():
    layout = bs.patterns.dense((8, 8), 4)
    crow, _ = bs.BlockLayout([[True, False], [True, False]], 4).indices_on("cpu")
    own_crow, own_col = layout.indices_on("cpu")
    values = torch.ones(4, 4, 4)
    with pytest.raises(bs.BlockSparseError):  # rows of another layout with these columns
        linear_op(torch.ones(1, 8), values, None, [crow, own_col], 2, False, None)
    assert linear_op(torch.ones(1, 8), values, None, [own_crow, own_col], 2, False, None).sum() == 64


# -- momentum ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [momentum, momentum_reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("wrong", ["velocities", "grads"])
def test_momentum_of_another_shape_is_refused_by_every_backend(backend, wrong):
    lists = {name: [torch.zeros(3), torch.zeros(4, 1)] for name in ("weights", "velocities", "grads")}
    lists[wrong][1] = torch.zeros(1)  # which PyTorch would spread
    with pytest.raises(bs.BlockSparseError, match=rf"^{wrong}\[1\]: expected \[4, 1\]"):
        backend.step(**lists, **RATES)
    lists[wrong].pop()
    with pytest.raises(bs.BlockSparseError, match=f"^{wrong}: expected"):
        backend.step(**lists, **RATES)


def test_geometry_that_int64_does_not_hold_is_refused():
    x, values = torch.ones(1, 2, 4, 4), torch.ones(1, 2, 2, 3, 3)
    layout = bs.patterns.dense((2, 2), 2)
    with pytest.raises(bs.BlockSparseError, match=r"2\^31"):
        bs.conv2d(x, values, layout, padding=1, stride=2**62)
    axis = axes_of((4,), (4,), (3,), (1,), (0,), (2**30,))[0]
    assert packed_taps(axis).dtype == np.int64
    assert runs(axis, False, True).packed.dtype == np.int64
    assert column_plan(NUMBERS)[0].dtype == np.int32


@pytest.mark.parametrize("name", ["linear", "csr_linear"])
def test_a_strided_output_of_another_shape_is_refused(name):
    operands, call = operands_of(name)
    with pytest.raises(bs.BlockSparseError, match="out: expected"):
        call(**{**operands, "out": apart(torch.zeros(2, *operands["out"].shape))})


@pytest.mark.parametrize("name", OPS)
def test_ops_refuse_sparse_tensors(name):
    x, grad, values = tensors_of_ops()
    calls = {
        "linear": lambda: linear_op(x[0, 0].to_sparse(), values, None, [CROW, COL], 3, False, None),
        "linear_wgrad": lambda: linear_wgrad_op(grad[0, 0], x[0, 0].to_sparse(), [CROW, COL], 3),
        "conv": lambda: OPS["conv"](x.to_sparse(), grad, values, [CROW, COL], 3),
        "conv_wgrad": lambda: OPS["conv_wgrad"](x.to_sparse(), grad, values, [CROW, COL], 3),
    }
    with pytest.raises(bs.BlockSparseError, match=r"x: expected .* dense"):
        calls[name]()


@pytest.mark.parametrize("absent", ["x", "values", "bias", "grad", "indices"])
def test_an_operand_without_memory_is_refused(absent):
    layout = bs.patterns.dense((4, 4), block_size=2)
    operands = {"x": torch.ones(3, 4), "values": torch.ones(4, 2, 2), "bias": torch.ones(4), "grad": torch.ones(3, 4)}
    if absent in operands:
        operands[absent] = operands[absent].to("meta")
    indices = layout.indices_on("meta" if absent == "indices" else "cpu")
    x, values, bias, grad = operands.values()
    with pytest.raises(bs.BlockSparseError, match="expected the device of x"):  # noqa: PT012
        linear_op(x, values, bias, indices, 2, False, None)
        linear_wgrad_op(grad, x, indices, 2)


@pytest.mark.parametrize("freed", ["x", "values"])
def test_freed_storages_are_refused(freed):
    operands = {"x": torch.ones(3, 4), "values": torch.ones(4, 2, 2)}
    operands[freed].untyped_storage().resize_(0)
    with pytest.raises(bs.BlockSparseError, match=f"{freed}: expected a tensor with memory"):
        bs.linear(*operands.values(), bs.patterns.dense((4, 4), block_size=2))


@pytest.mark.parametrize("entry", ["linear", "linear_wgrad", "csr_linear", "csr_wgrad"])
def test_no_rows_have_any_strides(entry):
    shapes, call = ENTRIES[entry]
    no_rows = {name: torch.zeros(()).expand(0, *shape[1:]) for name, shape in shapes.items() if name in ("x", "grad")}
    no_rows |= {"out": torch.zeros(shapes["out"])[:0]} if "out" in shapes else {}
    assert not call(**{name: no_rows.get(name, torch.zeros(shape)) for name, shape in shapes.items()}).any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": [0, 2**30, 3]}, "starts that rise from 0"),
        ({"start": [0, 2, 1, 3]}, "starts that rise from 0"),
        ({"start": [1, 2, 3]}, "starts that rise from 0"),
        ({"start": []}, "starts that rise from 0"),
        ({"drop": [True]}, "a bool for each block"),
        ({"added": [4, 2]}, "added keys of the grid that rise"),
        ({"added": [6]}, "added keys of the grid that rise"),
        ({"added": [-1]}, "added keys of the grid that rise"),
        ({"added": [1, 5]}, "room for all blocks, and no more"),
        ({"source": [0, 0]}, "new arrays of one length"),
    ],
)
def test_changes_of_a_layout_that_do_not_fit_are_refused(change, said):
    dtypes = {"drop": np.bool_, "added": np.int64, "source": np.int64}
    arrays = {"start": [0, 2, 3], "col": [0, 2, 1], "drop": [False, True, False], "added": [5], "to_start": [0] * 3}
    arrays |= {"to_col": [0] * 3, "source": [0] * 3} | change
    made = {name: np.array(array, dtypes.get(name, np.int32)) for name, array in arrays.items()}
    with pytest.raises(bs.BlockSparseError, match=said):
        cpu_core.core().replace_blocks(columns=3, **made)
