"""Tensor parallelism: errors name the layer, and are raised on every process before anything is sharded."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, Cut, RowwiseParallel
from processes import error_of, shared_error
from test_tensor_parallel import PLAN, half_dense_mlp

COL, ROW = ColwiseParallel(), RowwiseParallel()


def linear(*sizes, **options):
    torch.manual_seed(0)
    return bs.nn.Linear(*sizes, density=0.5, block_size=8, **options)


def lstm_of(block_size=4, **options):
    return bs.nn.LSTM(8, 16, density=0.5, block_size=block_size, **options)


def upper(rank):
    mask = torch.tensor([[1, 0], [0, 1]]) if rank else torch.tensor([[1, 1], [0, 1]])
    return bs.nn.Linear(16, 16, layout=bs.BlockLayout(mask, 8))


def global_output(cut):
    return ColwiseParallel(cut=cut, use_local_output=False)


def of_rank(value, rank):
    """Return a value of one rank, given the same value for all or a function of the rank."""
    return value(rank) if callable(value) else value


# A module by rank, its style by rank, and words of the error, which both ranks raise.
REFUSED = [
    (lambda rank: linear(32, 8), COL, "at least 2", "1: 8 features"),
    (lambda rank: linear(8, 32), ROW, "at least 2"),
    (lambda rank: linear(32, 32, device="meta"), ColwiseParallel(multiple=32), "at least 2"),
    (lambda rank: nn.GELU(), COL, "Linear", "GELU"),
    (lambda rank: lstm_of(8), ROW, "Linear", "LSTM"),
    (lambda rank: lstm_of(proj_size=8), COL, "projection"),
    (lambda rank: lstm_of(bidirectional=True), COL, "output_layouts", "two directions"),
    (lambda rank: linear(24, 24), global_output(None), "use_local_output", "[16, 8]"),
    (lambda rank: linear(32, 32), global_output(Cut(32, 8, ((0, 2), (1, 3)))), "even"),
    (lambda rank: linear(32, 32), ColwiseParallel(cut=Cut.even(64, 8, 2)), "32 features in blocks of 8"),
    (lambda rank: linear(32, 32), ColwiseParallel(cut=Cut.even(32, 8, 4)), "2 processes"),
    (upper, COL, "same layouts", "rank 1", "Linear"),
    (lambda rank: linear(32, 32) if rank else nn.GELU(), COL, "rank 0", "GELU"),
    (
        lambda rank: linear(32, 32, device="meta" if rank else "cpu"),
        lambda rank: ColwiseParallel(multiple=32 if rank else 8),
        "rank 1",
    ),
]


def refusals():
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    errors = [(error_of(of_rank(style, rank)._apply, make(rank), mesh), words) for make, style, *words in REFUSED]
    parallel = ROW._apply(linear(32, 32), mesh)
    scattered = RowwiseParallel(output_layouts=Shard(0))._apply(linear(32, 32), mesh)
    whole = RowwiseParallel(input_layouts=Replicate())._apply(linear(32, 32), mesh)
    column = COL._apply(linear(32, 32), mesh)
    uneven = distribute_tensor(torch.randn(2, 5, 32), mesh, [Shard(1)])
    return [
        *errors,
        (error_of(COL._apply, linear(32, 32), None), ["mesh"]),
        (error_of(ROW._apply, parallel, mesh), ["not parallel yet"]),
        (error_of(parallel, torch.randn(2, 24 if rank else 16)), ["parallelize_module, which"]),
        (error_of(scattered, torch.randn(3, 16)), ["divisible"]),
        (error_of(whole, torch.randn(4, 64)), ["input: expected 32 features, got 64"]),
        (error_of(whole, uneven), ["input: expected a size divisible by the 2 processes, got 5"]),
        (error_of(column, uneven), ["input: expected a size divisible by the 2 processes, got 5"]),
    ]


def test_errors_of_styles_are_raised_on_every_process(processes):
    for errors in processes(2)(refusals):
        for text, words in errors:
            assert all(word in text for word in words), text


@pytest.mark.parametrize("name", ["input_layouts", "output_layouts"])
def test_placements_are_checked(name):
    with pytest.raises(bs.BlockSparseError, match=name):
        ColwiseParallel(**{name: "rows"})


@pytest.mark.parametrize("parts", [((2, 0), (1, 3)), ((0, 1), (0, 1)), ((0, 1), (2,)), ((0, 1, 2, 3), (4,))], ids=str)
def test_a_cut_has_each_unit_in_one_part(parts):
    with pytest.raises(bs.BlockSparseError, match="parts: expected the units 0 to 3, each in one part"):
        Cut(32, 8, parts)


def dense_and_uneven():
    mesh = init_device_mesh("cpu", (2,))
    assert type(COL._apply(nn.Linear(32, 32), mesh).weight).__name__ == "DTensor"
    with contextlib.nullcontext() if dist.get_rank() else pytest.warns(bs.SparsityWarning, match="balance"):
        COL._apply(bs.nn.Linear(512, 512, layout=bs.patterns.barabasi_albert(512, block_size=8, m=2, seed=0)), mesh)


def test_dense_layers_get_pytorchs_style_and_uneven_parts_a_warning(processes):
    processes(2)(dense_and_uneven)


def net(hidden=96, **options):
    torch.manual_seed(0)
    return nn.ModuleDict({"mlp": half_dense_mlp(hidden, **options)})


def tied_values(rank):
    model = net()
    model["other"] = bs.nn.Linear(64, 96, layout=model.mlp.fc1.layout)
    model.other.values = model.mlp.fc1.values
    return model


def tied_biases(rank):
    model = net(64)
    model.mlp.fc2.bias = model.mlp.fc1.bias
    return model


def styles_that_differ(rank):
    return {"mlp.fc1": ColwiseParallel(multiple=16 if rank else 8)}


MLP_PLAN = {f"mlp.{name}": style for name, style in PLAN.items()}
# A model by rank, a plan by rank, and words of the error of PyTorch's function (None: no error) and of ours.
REFUSED_PLANS = {
    "dtypes": (lambda rank: net().double() if rank else net(), MLP_PLAN, ["Linear", "dtype"], ["mlp.fc1", "dtype"]),
    "biases": (lambda rank: net(bias=not rank), MLP_PLAN, ["Linear", "bias"], ["mlp.fc1", "bias"]),
    "few rows": (lambda rank: net(8), MLP_PLAN, ["Linear", "1: 8 features"], ["mlp.fc1", "at least 2"]),
    "tied values": (
        tied_values,
        {"mlp.fc1": COL, "other": COL},
        ["values: expected one for", "Linear(in_features=64"],
        ["mlp.fc1.values", "other.values"],
    ),
    "tied biases": (tied_biases, MLP_PLAN, None, ["mlp.fc1.bias", "mlp.fc2.bias too"]),
    "plans": (lambda rank: net(), lambda rank: dict(list(MLP_PLAN.items())[: 2 - rank]), None, ["mlp.fc2 (style)"]),
    "styles": (lambda rank: net(), styles_that_differ, None, ["rank 1 with another one of mlp.fc1 (style)"]),
    "layouts": (lambda rank: net(96 + 8 * rank), MLP_PLAN, None, ["another one of mlp.fc1 ["]),
}


def refused_plan(case, ours):
    make, plan, *words = REFUSED_PLANS[case]
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    model = make(rank)
    before = [id(parameter) for parameter in model.parameters()]
    function = bs.distributed.parallelize_module if ours else parallelize_module
    error = error_of(function, model, mesh, of_rank(plan, rank))
    assert all(word in error for word in words[ours]), error
    if ours:  # nothing is sharded before all layers are checked
        assert [id(parameter) for parameter in model.parameters()] == before
        assert model.mlp.fc1.part is None
    return error


PLAN_CASES = [(case, ours) for case in REFUSED_PLANS for ours in (False, True) if REFUSED_PLANS[case][2 + ours]]


@pytest.mark.parametrize(("case", "ours"), PLAN_CASES, ids=str)
def test_refused_plans_name_the_layer_on_every_process(processes, case, ours):
    shared_error(processes(2), refused_plan, case, ours)


def reversed_plan():
    plan = dict(sorted(MLP_PLAN.items(), reverse=bool(dist.get_rank())))
    bs.distributed.parallelize_module(net(), init_device_mesh("cpu", (2,)), plan)


def test_the_order_of_a_plan_may_differ(processes):
    processes(2)(reversed_plan)


def beside_ddp():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(half_dense_mlp(), mesh["tp"], PLAN)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in (bs.sparsity.SET, partial(bs.sparsity.RigL, end=10)):
        assert "fully_shard" in error_of(method, wrapped, optimizer)
    method = bs.sparsity.RigL(model, optimizer, end=10, every=1)  # it watches while it lives
    assert "fully_shard" in error_of(wrapped, torch.ones(3, 64))


def test_methods_that_move_blocks_refuse_ddp_of_parts(processes):
    processes(2)(beside_ddp)
