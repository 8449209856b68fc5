"""Tensor parallelism: outputs and gradients are one process's, each process stores its part, mistakes have names."""

import contextlib
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
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel, check_layouts, clip_grad_norm_


def whole_gradients(model, group=None):
    """Gradients of all parameters, of those that are cut as one process has them."""
    found = {}
    ranks = dist.get_world_size(group)
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        part, sharding = getattr(module, "part", None), getattr(module, "sharded_parameters", {}).get(key)
        every = [None] * ranks
        dist.all_gather_object(every, (parameter.grad, part and part.global_indices(module.layout)), group)
        if sharding is not None:
            whole = torch.cat([grad for grad, _ in every])
            whole[torch.from_numpy(np.concatenate(sharding.indices))] = whole.clone()
        elif key == "values" and part is not None:
            rows, cols = (np.concatenate(each) for each in zip(*(places for _, places in every), strict=True))
            whole = torch.cat([grad for grad, _ in every])[torch.from_numpy(np.lexsort((cols, rows)))]
        else:
            whole = parameter.grad
            assert all(torch.equal(whole, grad) for grad, _ in every), name
        found[name] = whole
    return found


def close(a, b, tolerance):
    assert a.shape == b.shape
    assert (a - b).norm() <= tolerance * max(b.norm(), 1e-30), (a - b).norm() / b.norm()


def compare(model, plan, x, tolerance=1e-12, ranks=None, parallelize=parallelize_module):
    """One process and the mesh, from the same model and input: outputs, gradients; returns the parallel model."""
    mesh = init_device_mesh("cpu", (ranks or dist.get_world_size(),))
    truth = copy.deepcopy(model)
    model = parallelize(model, mesh, plan)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = truth(a), model(b)
    close(z.detach(), y.detach(), tolerance)
    (y * y.detach().sin()).sum().backward()
    (z * z.detach().sin()).sum().backward()
    close(b.grad, a.grad, tolerance)
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


def lstm(options, placements):
    model = bs.nn.LSTM(20, 40, dtype=torch.float64, **options)
    x = torch.randn(5, 3, 20, dtype=torch.float64)
    if options.get("batch_first"):
        x = x.transpose(0, 1)
    outputs = Replicate() if placements is None else placements

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = model, bs.nn.Linear(40, 12, density=0.5, block_size=4, dtype=torch.float64)

        def forward(self, x):
            y, (h, c) = self.lstm(x)
            return torch.cat([self.out(y[..., :40]).flatten(), h.flatten(), c.sin().flatten()])

    plan = {"lstm": ColwiseParallel(output_layouts=outputs)}
    if placements is not None:
        plan["out"] = RowwiseParallel()
    compare(Net(), plan, x)


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
    processes(ranks)(lstm, options, None)


def test_units_of_an_lstm_go_on_cut(processes):
    processes(2)(lstm, LSTMS[0], Shard(-1))


def placements(style, options, input, output):
    """A layer by itself, with any placement of its input and output."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    layer = bs.nn.Linear(48, 32, density=0.5, block_size=8, activation="gelu", dtype=torch.float64, **options)
    truth, x = copy.deepcopy(layer), torch.randn(4, 6, 48, dtype=torch.float64)
    parallelize_module(layer, mesh, style(input_layouts=input, output_layouts=output))
    a = x.clone().requires_grad_()
    y = truth(a)
    (y * y.detach().sin()).sum().backward()

    def part(tensor, placement):
        if not isinstance(placement, Shard):
            return tensor
        if placement.dim == -1 and tensor.shape[-1] == 32 and style is ColwiseParallel:
            return tensor[..., torch.from_numpy(layer.sharding.features.local_indices)]
        return tensor.chunk(2, placement.dim)[rank]

    b = part(x, input).clone().requires_grad_()
    z = layer(b)
    close(z.detach(), part(y.detach(), output), 1e-12)
    (z * z.detach().sin()).sum().backward()
    close(b.grad, part(a.grad, input), 1e-12)
    for name, grad in whole_gradients(layer).items():
        close(grad, truth.get_parameter(name).grad, 1e-12)


@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
@pytest.mark.parametrize("input", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=str)
@pytest.mark.parametrize("output", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=str)
def test_inputs_and_outputs_of_any_placement(processes, style, options, input, output):
    processes(2)(placements, style, options, input, output)


def convolutions(kind, axes):
    width = 5
    first = kind(24, 40, 3, padding=1, density=0.5, block_size=8, activation="relu", dtype=torch.float64)
    second = kind(40, 20, 3, padding=1, density=0.5, block_size=8, activation="gelu", dtype=torch.float64)
    x = torch.randn(2, 24, *[width] * axes, dtype=torch.float64)
    compare(nn.Sequential(first, second), {"0": ColwiseParallel(), "1": RowwiseParallel()}, x)
    layer = kind(24, 40, 3, density=0.5, block_size=8, dtype=torch.float64)
    compare(layer, ColwiseParallel(output_layouts=Replicate()), x)


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
    """As in Llama: `groups` queries for each key, heads of `head` features."""

    def __init__(self, features, heads, keys, head, **options):
        super().__init__()
        self.head = head
        self.q_proj = bs.nn.Linear(features, heads * head, **options)
        self.k_proj = bs.nn.Linear(features, keys * head, **options)
        self.v_proj = bs.nn.Linear(features, keys * head, **options)
        self.o_proj = bs.nn.Linear(heads * head, features, **options)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, features, hidden, **options):
        super().__init__()
        self.gate_proj = bs.nn.Linear(features, hidden, **options)
        self.up_proj = bs.nn.Linear(features, hidden, **options)
        self.down_proj = bs.nn.Linear(hidden, features, **options)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.self_attn, self.mlp = Attention(64, 8, 4, 16, **options), Gated(64, 160, **options)
        self.norm1, self.norm2 = nn.RMSNorm(64, dtype=torch.float64), nn.RMSNorm(64, dtype=torch.float64)

    def forward(self, x):
        x = x + self.self_attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, blocks=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(Block(density=0.4, block_size=8, bias=False, **options) for _ in range(blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def llama_plan(heads=None, hidden=None):
    col, row = ColwiseParallel, RowwiseParallel
    return {
        "layers.*.self_attn.[kv]_proj": col(multiple=heads),
        "layers.*.self_attn.q_proj": col(multiple=heads and 2 * heads),
        "layers.*.self_attn.o_proj": row(multiple=heads and 2 * heads),
        "layers.*.mlp.gate_proj": col(multiple=hidden),
        "layers.*.mlp.up_proj": col(multiple=hidden),
        "layers.*.mlp.down_proj": row(multiple=hidden),
    }


def llama(plan, ours):
    model = Llama(dtype=torch.float64)
    parallelize = bs.distributed.parallelize_module if ours else parallelize_module
    model = compare(model, plan, torch.randn(2, 6, 64, dtype=torch.float64), parallelize=parallelize)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [m.layout.nnz for m in model.modules() if isinstance(m, bs.nn.Linear)])
    return parts


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_llama_by_wildcards(processes, ranks):
    processes(ranks)(llama, llama_plan(), False)
    processes(ranks)(llama, llama_plan(16), True)
    processes(ranks)(llama, llama_plan(16, 1), True)


def balance(features, m, seed, multiple):
    plan = {"fc1": ColwiseParallel(multiple=multiple), "fc2": RowwiseParallel(multiple=multiple)}
    x = torch.randn(3, features, dtype=torch.float64)
    layouts = [bs.patterns.barabasi_albert(features, block_size=8, m=m, seed=seed + k) for k in (0, 1)]
    whole = MLP(8, 8)
    whole.fc1, whole.fc2 = (bs.nn.Linear(features, features, layout=each, dtype=torch.float64) for each in layouts)
    stored = sum(p.numel() for p in whole.parameters())
    model = compare(whole, plan, x, parallelize=bs.distributed.parallelize_module)
    return model.fc1.layout.nnz + model.fc2.layout.nnz, sum(p.numel() for p in model.parameters()) / stored


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("multiple", [None, 1])
def test_parts_of_barabasi_albert_are_balanced(processes, ranks, multiple):
    found = processes(ranks)(balance, 1024, 4, 7, multiple)
    blocks = np.array([nnz for nnz, _ in found])
    assert blocks.max() <= 1.05 * blocks.mean()
    assert max(share for _, share in found) <= 1 / ranks + 0.05


def mistakes():
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    col, row = ColwiseParallel(), RowwiseParallel()

    def refused(module, style, *words, mesh=mesh):
        with pytest.raises(bs.BlockSparseError) as caught:
            style._apply(module, mesh)
        assert all(word in str(caught.value) for word in words), caught.value

    def linear(*sizes, **options):
        torch.manual_seed(0)
        return bs.nn.Linear(*sizes, density=0.5, block_size=8, **options)

    refused(bs.nn.Linear(32, 32, density=0.5, block_size=8), col, "mesh", mesh=None)
    refused(linear(32, 8), col, "at least 2", "1: 8 features")
    refused(linear(8, 32), row, "at least 2")
    refused(linear(32, 32, device="meta").to_empty(device="meta"), ColwiseParallel(multiple=32), "at least 2")
    refused(nn.GELU(), col, "Linear", "GELU")
    refused(bs.nn.LSTM(8, 16, density=0.5, block_size=8), row, "Linear", "LSTM")
    refused(bs.nn.LSTM(8, 16, density=0.5, block_size=4, proj_size=8), col, "projection")
    refused(bs.nn.LSTM(8, 16, density=0.5, block_size=4, bidirectional=True), col, "output_layouts", "two directions")
    local = {"use_local_output": False}
    refused(linear(24, 24), ColwiseParallel(**local), "use_local_output", "[16, 8]")
    refused(linear(32, 32), ColwiseParallel(cut=bs.distributed.Cut(32, 8, ((0, 2), (1, 3))), **local), "even")
    refused(linear(32, 32), ColwiseParallel(cut=bs.distributed.Cut.even(64, 8, 2)), "32 features in blocks of 8")
    refused(linear(32, 32), ColwiseParallel(cut=bs.distributed.Cut.even(32, 8, 4)), "2 processes")
    layer = linear(32, 32)
    col._apply(layer, mesh)
    refused(layer, col, "not parallel yet")
    # One rank only is wrong; both hear of it.
    mask = torch.tensor([[1, 0], [0, 1]]) if rank else torch.tensor([[1, 1], [0, 1]])
    refused(bs.nn.Linear(16, 16, layout=bs.BlockLayout(mask, 8)), col, "same layouts", "rank 1", "Linear")
    refused(linear(32, 32) if rank else nn.GELU(), col, "rank 0", "GELU")
    refused(linear(32, 32, device="meta" if rank else "cpu"), ColwiseParallel(multiple=32 if rank else 8), "rank 1")
    for name in ("input_layouts", "output_layouts"):
        with pytest.raises(bs.BlockSparseError, match=name):
            ColwiseParallel(**{name: "rows"})
    with pytest.raises(bs.BlockSparseError, match="parallelize_module, which"):
        row._apply(linear(32, 32), mesh)(torch.randn(2, 24 if rank else 16))
    with pytest.raises(bs.BlockSparseError, match="divisible"):
        RowwiseParallel(output_layouts=Shard(0))._apply(linear(32, 32), mesh)(torch.randn(3, 16))
    # Dense layers are PyTorch's.
    dense = nn.Linear(32, 32)
    assert type(col._apply(dense, mesh).weight).__name__ == "DTensor"
    with pytest.warns(bs.SparsityWarning, match="balance") if rank == 0 else contextlib.nullcontext():
        col._apply(bs.nn.Linear(512, 512, layout=bs.patterns.barabasi_albert(512, block_size=8, m=2, seed=0)), mesh)


def test_mistakes_are_named_on_every_process(processes):
    processes(2)(mistakes)


def life():
    """What is asked of any module works for a part: copies, state dicts, checkpointing of activations, training."""
    mesh = init_device_mesh("cpu", (2,))
    model = MLP(64, 128, density=0.5, block_size=8)
    truth = copy.deepcopy(model)
    if dist.get_rank():  # the values are those of the first process
        torch.nn.init.zeros_(model.fc1.values)
    parallelize_module(model, mesh, PLAN)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    x = torch.randn(5, 64)
    close(other.eval()(x), truth(x), 1e-6)
    assert other.fc1.part is model.fc1.part
    y = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)
    y.square().sum().backward()
    truth(x).square().sum().backward()
    for name, grad in whole_gradients(model).items():
        close(grad, truth.get_parameter(name).grad, 1e-6)
    norms = {}
    for each in (model, truth):
        optimizer = torch.optim.Adam(each.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            each(x.detach()).square().sum().backward()
            norms = norms | {each: clip_grad_norm_(each, 1.0)}
            optimizer.step()
    close(norms[model], norms[truth], 1e-4)
    close(model(x), truth(x), 1e-4)


def test_copies_states_checkpointing_and_training(processes):
    processes(2)(life)


def with_fsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = MLP(64, 128, density=0.5, block_size=8, dtype=torch.float64)
    truth = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], PLAN)
    for layer in (model.fc1, model.fc2):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    check_layouts(model)
    x = torch.randn(4, 64, dtype=torch.float64)
    mine = x.chunk(2)[mesh["dp"].get_local_rank()]
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, truth)]
    for _ in range(3):
        close(model(mine).detach(), truth(mine).detach(), 1e-10)
        for each, optimizer, data in zip((model, truth), optimizers, (mine, x), strict=True):
            optimizer.zero_grad()
            each(data).square().mean().backward()
            clip_grad_norm_(each, 0.01)
            optimizer.step()
    close(model(mine).detach(), truth(mine).detach(), 1e-10)
    return sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in truth.parameters())


def test_fsdp2_on_the_other_dimension_of_a_mesh(processes):
    assert max(processes(4)(with_fsdp)) < 0.25 + 0.05


def evolving():
    """New blocks begin with the mean over all parts: Adam moves them as one process does."""
    model = MLP(64, 96, density=0.5, block_size=8, dtype=torch.float64)
    truth = copy.deepcopy(model)
    parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for each in (model, truth):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        method = bs.sparsity.SET(each, optimizer, init="zeros", every=2)
        for _ in range(6):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
            method.step()
    close(model(x).detach(), truth(x).detach(), 1e-10)


def test_new_blocks_of_parts_begin_as_in_one_process(processes):
    processes(2)(evolving)


def refusals(parallelize):
    """What `parallelize_module` refuses: said with the layer's name, on both processes, before anything is cut."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()

    def net(sizes=(64, 96, 64), **options):
        torch.manual_seed(0)
        return nn.ModuleDict({"mlp": MLP(*sizes[:2], density=0.5, block_size=8, **options)})

    def refused(model, *words, plan=None):
        before = [id(parameter) for parameter in model.parameters()]
        with pytest.raises(bs.BlockSparseError) as caught:
            parallelize(model, mesh, plan or {f"mlp.{name}": style for name, style in PLAN.items()})
        assert all(word in str(caught.value) for word in words), caught.value
        if ours:
            assert [id(parameter) for parameter in model.parameters()] == before
            assert model.mlp.fc1.part is None
        return str(caught.value)

    ours = parallelize is not parallelize_module
    fc1 = "mlp.fc1" if ours else "Linear"
    said = [
        refused(net().double() if rank else net(), fc1, "dtype"),
        refused(net(bias=not rank), fc1, "bias"),
        refused(net((64, 8)), fc1, "at least 2", "1: 8 features"),
    ]
    tied = net()
    tied.mlp.fc2 = bs.nn.Linear(96, 64, density=0.5, block_size=8)
    tied["other"] = bs.nn.Linear(64, 96, layout=tied.mlp.fc1.layout)
    tied.other.values = tied.mlp.fc1.values
    words = ("mlp.fc1.values", "other.values") if ours else ("values: expected one for", "Linear(in_features=64")
    said.append(refused(tied, *words, plan={"mlp.fc1": ColwiseParallel(), "other": ColwiseParallel()}))
    if ours:
        tied = net((64, 64))
        tied.mlp.fc2.bias = tied.mlp.fc1.bias
        said += [
            refused(tied, "mlp.fc1.bias", "mlp.fc2.bias too"),
            refused(net(), "mlp.fc2 (style)", plan={f"mlp.{name}": PLAN[name] for name in list(PLAN)[: 2 - rank]}),
            refused(
                net(),
                "rank 1 with another one of mlp.fc1 (style)",
                plan={"mlp.fc1": ColwiseParallel(multiple=16 if rank else 8)},
            ),
            refused(net((64, 96 + 8 * rank)), "another one of mlp.fc1 ["),
        ]
        plan = {f"mlp.{name}": PLAN[name] for name in sorted(PLAN, reverse=bool(rank))}
        parallelize(net(), mesh, plan)
    return said


@pytest.mark.parametrize("parallelize", [parallelize_module, bs.distributed.parallelize_module])
def test_refusals_name_the_layer(processes, parallelize):
    one, other = processes(2)(refusals, parallelize)
    assert one == other


def scaled():
    """An inf in the part of one process: all leave the step out."""
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize_module(MLP(64, 96, density=0.5, block_size=8), mesh, PLAN)
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


def test_gradients_that_overflow_in_one_part(processes):
    assert processes(2)(scaled) == [(2.0, False, True)] * 2


def beside_ddp():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(MLP(64, 96, density=0.5, block_size=8), mesh["tp"], PLAN)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    for method in (bs.sparsity.SET, partial(bs.sparsity.RigL, end=10)):
        with pytest.raises(bs.BlockSparseError, match="fully_shard"):
            method(wrapped, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bs.sparsity.RigL(model, optimizer, end=10, every=1)
    with pytest.raises(bs.BlockSparseError, match="fully_shard"):
        wrapped(torch.ones(3, 64))


def test_methods_that_move_blocks_refuse_ddp_of_parts(processes):
    processes(2)(beside_ddp)
