"""Checkpoints: written by some processes, read by others into models with other layouts, cut in other ways."""

import itertools
import os
import pathlib
import pickle
import re
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel, load_checkpoint, save_checkpoint
from blocksparse.errors import BlockSparseError
from processes import Processes


class Net(nn.Module):
    def __init__(self, seed, density=0.5):
        super().__init__()
        torch.manual_seed(seed)
        self.first = bs.nn.Linear(30, 48, density=density, block_size=8)
        self.lstm = bs.nn.LSTM(48, 16, density=density, block_size=8, batch_first=True)
        self.dense = nn.Linear(16, 24)
        self.out = bs.nn.Linear(24, 10, density=density, block_size=4)

    def forward(self, x):
        return self.out(torch.relu(self.dense(self.lstm(self.first(x))[0])))


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net, optimizer, steps=2, part=slice(None)):
    x = torch.randn(4, 3, 30, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        optimizer.zero_grad()
        net(x[part]).square().mean().backward()
        optimizer.step()
    return net


def trained(seed=0):
    """A net after two steps of one process, and its optimizer."""
    net = Net(seed)
    optimizer = adam(net)
    return train(net, optimizer), optimizer


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state(net, optimizer=None):
    """All of a net's numbers, and those that its optimizer has for them."""
    found = {name: whole(tensor).clone() for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters() if optimizer is not None else ():
        for key, kept in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(kept).clone()
    return found


def wrapped(net, how):
    if how == "ddp":
        return DistributedDataParallel(net)
    if how == "fsdp":
        fully_shard(net.lstm)
        return fully_shard(net)
    return net


def save(folder, how="plain"):
    """Every process trains the same; returns what one process has."""
    net = wrapped(Net(0), how)
    optimizer = adam(net)
    train(net, optimizer)
    save_checkpoint(net, folder, "model.", optimizer, about={"step": 2})
    return state(getattr(net, "module", net), optimizer)


def load(folder, how="plain", density=0.25, steps=0):
    net = Net(1, density)
    net = wrapped(net, how)
    optimizer = adam(net)
    optimizer.param_groups[0]["lr"] = 7.0
    assert load_checkpoint(net, folder, "model.", optimizer) == {"step": 2}
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(net, optimizer, steps)
    return state(getattr(net, "module", net), optimizer)


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def pairs():
    """Every way of saving with every way of loading; often each once."""
    saved = (1, "plain"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")
    loaded = (4, "fsdp"), (2, "fsdp"), (4, "plain"), (1, "plain")
    for (i, one), (j, other) in itertools.product(enumerate(saved), enumerate(loaded)):
        yield pytest.param(*one, *other, marks=() if i == j else pytest.mark.full)


@pytest.mark.parametrize(("saved", "before", "loaded", "after"), list(pairs()))
def test_any_number_of_processes(processes, tmp_path, saved, before, loaded, after):
    expected = (processes(saved)(save, tmp_path / "at", before) if saved > 1 else [save(tmp_path / "at")])[0]
    results = processes(loaded)(load, tmp_path / "at", after) if loaded > 1 else [load(tmp_path / "at")]
    for found in results:
        check_equal(found, expected)


class Pair(nn.Module):
    def __init__(self, first, out):
        super().__init__()
        self.first, self.out = first, out


def part(layer, axis, group):
    """The part of a layer that this process has of `group`: every second line of blocks, or so."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    lines = torch.arange(layer.layout.grid[axis])[rank::size]
    mask = layer.layout.mask()
    keep = torch.isin(torch.arange(mask.shape[axis]), lines)
    mine = mask[keep] if axis == 0 else mask[:, keep]
    held = keep[torch.tensor(layer.layout.row_of_block if axis == 0 else layer.layout.col_of_block)]
    weight = bs.nn.module.Weight(bs.BlockLayout(mine, layer.layout.block_shape))
    weight.values.data = layer.values.detach()[held]
    weight.part = bs.nn.tensor_parallel_part.TensorParallelPart(layer.layout.grid, axis, lines.numpy(), group)
    return weight


def parts(seed, sharded, density=0.5):
    """Two weights, cut by rows and by columns, on two processes or on pairs of them."""
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
    net = Net(seed, density)
    net = Pair(*(part(layer, axis, mesh["tp"].get_group()) for axis, layer in enumerate((net.first, net.out))))
    return fully_shard(net, mesh=mesh["dp"]) if sharded else net


def adam_without_forward(net):
    """Steps with gradients that the values determine, so that parts have what the whole would have."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return optimizer


def whole_net(seed, density=0.5):
    net = Net(seed, density)
    return Pair(weight_of(net.first), weight_of(net.out))


def weight_of(layer):
    weight = bs.nn.module.Weight(layer.layout)
    weight.values.data = layer.values.detach()
    return weight


def save_parts(folder, sharded):
    net = parts(0, sharded)
    save_checkpoint(net, folder, optimizer=adam_without_forward(net))


def load_parts(folder, sharded):
    """Into parts with other layouts; then what each has is written, and read on the first as a whole."""
    net = parts(1, sharded, 0.3)
    optimizer = adam_without_forward(net)
    load_checkpoint(net, folder, optimizer=optimizer)
    save_checkpoint(net, f"{folder}-again", optimizer=optimizer)


@pytest.mark.parametrize(("count", "sharded"), [(2, False), (4, True)])
@pytest.mark.parametrize(("again", "shards"), [(2, False), (4, False), (4, True)])
def test_parts_of_weights(processes, tmp_path, count, sharded, again, shards):
    net = whole_net(0)
    expected = state(net, adam_without_forward(net))
    processes(count)(save_parts, tmp_path / "at", sharded)
    processes(again)(load_parts, tmp_path / "at", shards)
    for folder in ("at", "at-again"):
        other = whole_net(1, 0.2)
        optimizer = adam_without_forward(other)
        load_checkpoint(other, tmp_path / folder, optimizer=optimizer)
        check_equal(state(other, optimizer), expected)


def parallel_net(seed, density):
    net = Net(seed, density)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(
        net,
        mesh["tp"],
        {"first": ColwiseParallel(output_layouts=Replicate()), "out": RowwiseParallel(input_layouts=Replicate())},
    )
    return fully_shard(net, mesh=mesh["dp"])


def load_parallel(folder):
    """A trained net into a tensor-parallel one, trained on and saved again; its outputs, and those of one process."""
    net, (truth, one) = parallel_net(1, 0.3), trained()
    optimizer = adam(net)
    load_checkpoint(net, folder, optimizer=optimizer)
    train(net, optimizer)
    save_checkpoint(net, f"{folder}-again", optimizer=optimizer)
    return state(train(truth, one), one)


@pytest.mark.parametrize("count", [2, 4])
def test_tensor_parallel_layers(processes, tmp_path, count):
    net, optimizer = trained()
    save_checkpoint(net, tmp_path / "at", optimizer=optimizer)
    expected = processes(count)(load_parallel, tmp_path / "at")[0]
    other = Net(1, 0.2)
    optimizer = adam(other)
    load_checkpoint(other, tmp_path / "at-again", optimizer=optimizer)
    found = state(other, optimizer)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_pytorch_wrote_and_reads(tmp_path):
    net, other = Net(0), Net(0)
    dcp.save({"model": train(net, adam(net)).state_dict()}, checkpoint_id=tmp_path / "plain")
    load_checkpoint(other, tmp_path / "plain", "model.")
    check_equal(state(other), state(net))
    save_checkpoint(net, tmp_path / "ours")
    found = Net(0).state_dict()
    dcp.load(found, checkpoint_id=tmp_path / "ours")
    check_equal(found, state(net))


def bad(case, folder):
    """A checkpoint, and a model that it is not for: the text of the error, and whether the model is as it was."""
    net, optimizer = Net(1), None
    if case == "another model":
        net.more = nn.Linear(2, 2)
    if case == "fewer layers":
        del net.dense
    if case == "block size":
        net.out = bs.nn.Linear(24, 10, density=0.5, block_size=2)
    if case == "another size":
        net.first = bs.nn.Linear(30, 64, density=0.5, block_size=8)
    if case == "optimizer":
        optimizer = adam(net)
    if case == "optimizer of another class":
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    if case == "one process" and dist.get_rank() == 1:
        net.dense = nn.Linear(3, 3)
    if case == "ddp":
        net = DistributedDataParallel(Net(1, 0.25))
    before = state(net)
    with pytest.raises(BlockSparseError) as error:
        load_checkpoint(net, folder, optimizer=optimizer)
    check_equal(state(net), before)
    return str(error.value)


BAD = {
    "another model": "the tensors of this model, more.weight with them, got none",
    "fewer layers": "the tensors of this model, got dense.bias besides",
    "block size": r"out with \(5, 12\) blocks of \(2, 2\), got \(3, 6\) blocks of \(4, 4\)",
    "another size": r"first with \(8, 4\) blocks of \(8, 8\), got \(6, 4\) blocks",
    "optimizer": "the optimizer's state of first.values, got none",
    "one process": r"process 1: .*expected dense.weight of \[3, 3\], got \[24, 16\]",
    "ddp": "expected first with .* blocks, .* before the model is wrapped in DistributedDataParallel",
    "cut": "expected a whole checkpoint, got ",
    "missing": "expected a whole checkpoint, got FileNotFoundError",
    "no folder": r"expected a folder of torch.distributed.checkpoint, got .* \(FileNotFoundError",
    "cut description": "expected a folder of torch.distributed.checkpoint, got",
    "other bits": "expected a whole checkpoint, got a data file that is cut or damaged$",
    "other pickle": "expected a whole checkpoint, got a data file that is cut or damaged$",
    "optimizer of another class": "expected the state of SGD for first.values, got that of AdamW",
    "evil": "posix.system, which no description of a checkpoint has",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(processes, tmp_path, case):
    folder = tmp_path / "at"
    save_checkpoint(Net(0), folder)
    if case == "optimizer of another class":
        net, optimizer = trained()
        save_checkpoint(net, folder, optimizer=optimizer)
    data = next(folder.glob("*.distcp"))
    if case == "other bits":
        data.write_bytes(bytes(0xFF ^ each for each in data.read_bytes()))
    if case == "other pickle":
        data.write_bytes(pickle.dumps(Net) * 999)
    if case == "cut":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    if case == "missing":
        data.unlink()
    if case == "no folder":
        shutil.rmtree(folder)
    if case == "cut description":
        (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-100])
    if case == "evil":
        (folder / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    first, second = processes(2)(bad, case, folder)
    assert first == second
    with pytest.raises(AssertionError, match=BAD[case]):
        raise AssertionError(first)


def test_a_description_imports_nothing(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"cthis\ns\n.")
    with pytest.raises(BlockSparseError, match=r"this\.s, which no description of a checkpoint has"):
        load_checkpoint(Net(0), tmp_path)
    assert "this" not in sys.modules


def described_by(folder, member):
    (folder / ".metadata").write_bytes(
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n" + member + b"\ntR."
    )
    with pytest.raises(BlockSparseError) as error:
        load_checkpoint(Net(0), folder)
    return str(error.value)


def test_a_description_of_an_older_python_names_members_of_enums_only(tmp_path):
    """Python 3.11.0 to 3.11.3 write them as `getattr(kind, name)`."""
    assert "MEM_FORMAT_ENCODING in place of a description" in described_by(
        tmp_path, b"_MEM_FORMAT_ENCODING\nS'TORCH_CHANNELS_LAST'"
    )
    for member in (b"_MEM_FORMAT_ENCODING\nS'__class__'", b"Metadata\nS'__init__'", b"Metadata\nS'__module__'"):
        assert "no member of an Enum" in described_by(tmp_path, member)


def about_of_one(folder):
    with pytest.raises(BlockSparseError) as error:
        save_checkpoint(Net(0), folder, about={"x": object() if dist.get_rank() else 1})
    return str(error.value)


def test_what_json_cannot_express_in_one_process(processes, tmp_path):
    first, second = processes(2)(about_of_one, tmp_path / "at")
    assert first == second
    assert first.startswith("process 1: about: expected values that JSON can express")
    assert not list((tmp_path / "at").iterdir())


def save_apart(folder, same):
    folder = folder if same else folder / str(dist.get_rank())
    if same and dist.get_rank() == 1:  # as if its file system were another
        exists = pathlib.Path.exists
        pathlib.Path.exists = lambda path: path.suffix != ".shared" and exists(path)
    try:
        with pytest.raises(BlockSparseError) as error:
            save_checkpoint(Net(0), folder)
    finally:
        if same and dist.get_rank() == 1:
            pathlib.Path.exists = exists
    return str(error.value)


@pytest.mark.parametrize(("same", "said"), [(True, "process 1: .* that all processes share"), (False, "in process 1$")])
def test_a_folder_that_is_not_one(processes, tmp_path, same, said):
    first, second = processes(2)(save_apart, tmp_path, same)
    assert first == second
    assert re.search(said, first)
    assert not list(tmp_path.iterdir())


def stopped(folder):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    save_checkpoint(bs.nn.Linear(8, 8, block_size=4), folder)


@pytest.mark.full
def test_a_process_that_stops_is_named(tmp_path):
    three = Processes(3, timeout=4)
    with pytest.raises(AssertionError, match="rank 1: expected an answer in time, got none: dead, or out of reach"):
        three(stopped, tmp_path)
