"""Tensor parallelism: outputs and gradients equal those of one process."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel, check_layouts, clip_grad_norm_


def whole_gradients(model):
    """Return the gradients of all parameters, assembled from the ranks' parts."""
    gradients = {}
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        part, sharding = getattr(module, "part", None), getattr(module, "sharded_parameters", {}).get(key)
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, (parameter.grad, part and part.global_indices(module.layout)))
        if sharding is not None:
            whole = torch.cat([grad for grad, _ in by_rank])
            whole[torch.from_numpy(np.concatenate(sharding.indices))] = whole.clone()
        elif key == "values" and part is not None:
            rows, cols = (np.concatenate(each) for each in zip(*(places for _, places in by_rank), strict=True))
            whole = torch.cat([grad for grad, _ in by_rank])[torch.from_numpy(np.lexsort((cols, rows)))]
        else:
            whole = parameter.grad
            assert all(torch.equal(whole, grad) for grad, _ in by_rank), name
        gradients[name] = whole
    return gradients


def close(a, b, tolerance):
    assert a.shape == b.shape
    assert (a - b).norm() <= tolerance * max(b.norm(), 1e-30), (a - b).norm() / b.norm()


def same(x, model):
    return x


def compare(model, plan, x, tolerance=1e-12, parallelize=parallelize_module, local_input=same, local_output=same):
    """Compare outputs and gradients with those of one process; return the parallel model.

    Args:
        local_input, local_output: what this rank has of a whole input or output.
    """
    truth = copy.deepcopy(model)
    model = parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    a, b = x.clone().requires_grad_(), local_input(x, model).clone().requires_grad_()
    y, z = truth(a), model(b)
    close(z.detach(), local_output(y.detach(), model), tolerance)
    (y * y.detach().sin()).sum().backward()
    (z * z.detach().sin()).sum().backward()
    close(b.grad, local_input(a.grad, model), tolerance)
    for name, grad in whole_gradients(model).items():
        close(grad, truth.get_parameter(name).grad, tolerance)
    return model


class MLP(nn.Module):
    def __init__(self, features, hidden, **options):
        super().__init__()
        self.fc1 = bs.nn.Linear(features, hidden, activation="gelu", **options)
        self.fc2 = bs.nn.Linear(hidden, features, activation="silu", **options)

    def forward(self, x):
        return self.fc2(self.fc1(x))


PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


def half_dense_mlp(hidden=96, **options):
    return MLP(64, hidden, density=0.5, block_size=8, **options)


def mlp(dtype, tolerance, options):
    model = MLP(100, 200, density=0.4, block_size=8, dtype=dtype, **options)
    stored = sum(p.numel() for p in model.parameters())
    model = compare(model, PLAN, torch.randn(3, 5, 100, dtype=dtype), tolerance)
    assert sum(p.numel() for p in model.parameters()) < 0.7 * stored
    assert (model.fc1.part.axis, model.fc2.part.grid) == (0, (13, 25))
    assert list(model.state_dict()) == list(MLP(100, 200, block_size=8, **options).state_dict())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
def test_mlp_equals_one_process(processes, ranks, dtype, tolerance, options):
    processes(ranks)(mlp, dtype, tolerance, options)


class LSTMNet(nn.Module):
    """An LSTM with a linear layer; the output has the final states too."""

    def __init__(self, options):
        super().__init__()
        self.lstm = bs.nn.LSTM(20, 40, dtype=torch.float64, **options)
        self.out = bs.nn.Linear(40, 12, density=0.5, block_size=4, dtype=torch.float64)

    def forward(self, x):
        y, (h, c) = self.lstm(x)
        return torch.cat([self.out(y[..., :40]).flatten(), h.flatten(), c.sin().flatten()])


def lstm(options, outputs):
    plan = {"lstm": ColwiseParallel(output_layouts=outputs)}
    plan |= {"out": RowwiseParallel()} if outputs == Shard(-1) else {}
    shape = (3, 5, 20) if options.get("batch_first") else (5, 3, 20)
    compare(LSTMNet(options), plan, torch.randn(shape, dtype=torch.float64))


LSTMS = [
    {"density": 0.4, "block_size": 4},
    {"density": 0.4, "block_size": (4, 16), "bias": False},
    {"density": 0.4, "block_size": 8, "num_layers": 2, "batch_first": True, "bidirectional": True},
    {"num_layers": 2},
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", LSTMS, ids=str)
def test_lstm_equals_one_process(processes, ranks, options):
    if ranks == 4 and options.get("block_size") == (4, 16):
        options = options | {"block_size": (4, 8)}
    processes(ranks)(lstm, options, Replicate())


def test_outputs_of_an_lstm_may_stay_sharded(processes):
    processes(2)(lstm, LSTMS[0], Shard(-1))


def placements(style, options, input, output):
    layer = bs.nn.Linear(48, 32, density=0.5, block_size=8, activation="gelu", dtype=torch.float64, **options)

    def local(tensor, model, placement):
        if not isinstance(placement, Shard):
            return tensor
        if placement.dim == -1 and tensor.shape[-1] == 32 and style is ColwiseParallel:
            return tensor[..., torch.from_numpy(model.sharding.features.local_indices)]
        return tensor.chunk(2, placement.dim)[dist.get_rank()]

    local_input, local_output = (partial(local, placement=placement) for placement in (input, output))
    plan, x = style(input_layouts=input, output_layouts=output), torch.randn(4, 6, 48, dtype=torch.float64)
    compare(layer, plan, x, local_input=local_input, local_output=local_output)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
@pytest.mark.parametrize("input", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=str)
@pytest.mark.parametrize("output", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=str)
def test_any_placement_of_inputs_and_outputs(processes, style, options, input, output):
    processes(2)(placements, style, options, input, output)


def convolutions(kind, axes):
    options = {"density": 0.5, "block_size": 8, "dtype": torch.float64}
    first = kind(24, 40, 3, padding=1, activation="relu", **options)
    second = kind(40, 20, 3, padding=1, activation="gelu", **options)
    x = torch.randn(2, 24, *[5] * axes, dtype=torch.float64)
    compare(nn.Sequential(first, second), {"0": ColwiseParallel(), "1": RowwiseParallel()}, x)
    compare(kind(24, 40, 3, **options), ColwiseParallel(output_layouts=Replicate()), x)


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d"])
def test_convolutions_equal_one_process(processes, name):
    processes(2)(convolutions, getattr(bs.nn, name), int(name[-2]))


def autocast(kind, sizes, options, shape, style, output):
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(shape)
    layer = kind(*sizes, density=0.5, block_size=8, **options)
    truth = copy.deepcopy(layer)
    parallelize_module(layer, mesh, style(input_layouts=Replicate(), output_layouts=output))
    with torch.autocast("cpu", torch.bfloat16):
        y, z = truth(x), layer(x)
        y, z = (out[0] if kind is bs.nn.LSTM else out for out in (y, z))
    assert z.dtype == y.dtype
    if isinstance(output, Replicate):
        close(z.detach().double(), y.detach().double(), 0.02)
    z.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("output", [Replicate(), Shard(0), Shard(-1)], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes", "options", "shape", "style"),
    [
        (bs.nn.Linear, (48, 32), {"activation": "gelu"}, (4, 6, 48), ColwiseParallel),
        (bs.nn.Linear, (48, 32), {"activation": "gelu"}, (4, 6, 48), RowwiseParallel),
        (bs.nn.Conv2d, (16, 32, 3), {}, (4, 16, 6, 6), ColwiseParallel),
        (bs.nn.Conv2d, (16, 32, 3), {}, (4, 16, 6, 6), RowwiseParallel),
        (bs.nn.LSTM, (16, 32), {}, (4, 2, 16), ColwiseParallel),
    ],
)
def test_autocast_gives_the_dtype_of_one_process(processes, kind, sizes, options, shape, style, output):
    processes(2)(autocast, kind, sizes, options, shape, style, output)


class Attention(nn.Module):
    """Llama's attention: two queries for each key, in heads of 16 features."""

    def __init__(self, **options):
        super().__init__()
        self.q_proj = bs.nn.Linear(64, 128, **options)
        self.k_proj, self.v_proj = bs.nn.Linear(64, 64, **options), bs.nn.Linear(64, 64, **options)
        self.o_proj = bs.nn.Linear(128, 64, **options)

    def forward(self, x):
        heads = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gate_proj, self.up_proj = bs.nn.Linear(64, 160, **options), bs.nn.Linear(64, 160, **options)
        self.down_proj = bs.nn.Linear(160, 64, **options)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.self_attn, self.mlp = Attention(**options), GatedMLP(**options)
        self.norm1, self.norm2 = nn.RMSNorm(64, dtype=torch.float64), nn.RMSNorm(64, dtype=torch.float64)

    def forward(self, x):
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def llama(parallelize, heads=None, hidden=None):
    options = {"density": 0.4, "block_size": 8, "bias": False, "dtype": torch.float64}
    model = nn.Sequential()
    model.layers = nn.Sequential(LlamaBlock(**options), LlamaBlock(**options))
    queries = heads and 2 * heads
    plan = {
        "layers.*.self_attn.[kv]_proj": ColwiseParallel(multiple=heads),
        "layers.*.self_attn.q_proj": ColwiseParallel(multiple=queries),
        "layers.*.self_attn.o_proj": RowwiseParallel(multiple=queries),
        "layers.*.mlp.gate_proj": ColwiseParallel(multiple=hidden),
        "layers.*.mlp.up_proj": ColwiseParallel(multiple=hidden),
        "layers.*.mlp.down_proj": RowwiseParallel(multiple=hidden),
    }
    compare(model, plan, torch.randn(2, 6, 64, dtype=torch.float64), parallelize=parallelize)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_llama_by_wildcards(processes, ranks):
    processes(ranks)(llama, parallelize_module)
    processes(ranks)(llama, bs.distributed.parallelize_module, 16)
    processes(ranks)(llama, bs.distributed.parallelize_module, 16, 1)


def balance(features, multiple):
    plan = {"fc1": ColwiseParallel(multiple=multiple), "fc2": RowwiseParallel(multiple=multiple)}
    x, whole = torch.randn(3, features, dtype=torch.float64), MLP(8, 8)
    layouts = [bs.patterns.barabasi_albert(features, block_size=8, m=4, seed=seed) for seed in (7, 8)]
    whole.fc1, whole.fc2 = (bs.nn.Linear(features, features, layout=each, dtype=torch.float64) for each in layouts)
    stored = sum(p.numel() for p in whole.parameters())
    model = compare(whole, plan, x, parallelize=bs.distributed.parallelize_module)
    return model.fc1.layout.nnz + model.fc2.layout.nnz, sum(p.numel() for p in model.parameters()) / stored


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("multiple", [None, 1])
def test_parts_of_barabasi_albert_are_balanced(processes, ranks, multiple):
    blocks, fractions = zip(*processes(ranks)(balance, 1024, multiple), strict=True)
    assert max(blocks) <= 1.05 * np.mean(blocks)
    assert max(fractions) <= 1 / ranks + 0.05


def train(model, x, steps, lr=1e-2, max_norm=None, **options):
    """Train with AdamW, and with SET by these options; return the last gradient norm if gradients are clipped."""
    optimizer, norm = torch.optim.AdamW(model.parameters(), lr=lr), None
    method = bs.sparsity.SET(model, optimizer, **options) if options else None
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norm = max_norm and clip_grad_norm_(model, max_norm)
        optimizer.step()
        if method:
            method.step()
    return norm


def life():
    model = half_dense_mlp(128)
    truth, x = copy.deepcopy(model), torch.randn(5, 64)
    if dist.get_rank():  # parallelize_module must copy the values of the first process
        torch.nn.init.zeros_(model.fc1.values)
    parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    close(other.eval()(x), truth(x), 1e-6)
    assert other.fc1.part is model.fc1.part
    y = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)
    y.square().sum().backward()
    truth(x).square().sum().backward()
    for name, grad in whole_gradients(model).items():
        close(grad, truth.get_parameter(name).grad, 1e-6)
    norms = [train(each, x.detach(), steps=3, max_norm=1e-3) for each in (model, truth)]
    assert norms[1] > 1e-3
    close(*norms, 1e-4)
    close(model(x), truth(x), 1e-4)


def test_copies_state_dicts_activation_checkpointing_and_training(processes):
    processes(2)(life)


def with_fsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = half_dense_mlp(128, dtype=torch.float64)
    truth, x = copy.deepcopy(model), torch.randn(4, 64, dtype=torch.float64)
    parallelize_module(model, mesh["tp"], PLAN)
    for module in (model.fc1, model.fc2, model):
        fully_shard(module, mesh=mesh["dp"])
    check_layouts(model)
    mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    for steps in (1, 2):
        close(model(mine).detach(), truth(mine).detach(), 1e-10)
        norms = [train(each, data, steps, max_norm=1e-3) for each, data in ((model, mine), (truth, x))]
        assert norms[1] > 1e-3
    close(model(mine).detach(), truth(mine).detach(), 1e-10)
    return sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in truth.parameters())


def test_fsdp2_on_the_other_dimension_of_a_mesh(processes):
    assert max(processes(4)(with_fsdp)) < 0.25 + 0.05


def evolve():
    model = half_dense_mlp(dtype=torch.float64)
    truth, x = copy.deepcopy(model), torch.randn(5, 64, dtype=torch.float64)
    parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
    for each in (model, truth):
        train(each, x, steps=6, init="zeros", every=2)
    close(model(x).detach(), truth(x).detach(), 1e-10)


def test_state_of_new_blocks_is_the_mean_over_all_parts(processes):
    processes(2)(evolve)


def scaled():
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(half_dense_mlp(), mesh, PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=mesh.get_group())
    moved = []
    for step in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 64)).square().mean()).backward()
        if step == dist.get_rank() == 0:
            model.fc1.values.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        moved.append([not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)])
    return scaler.get_scale(), *map(any, moved)


def test_all_processes_skip_a_step_that_overflows_in_one_part(processes):
    assert processes(2)(scaled) == [(2.0, False, True)] * 2
