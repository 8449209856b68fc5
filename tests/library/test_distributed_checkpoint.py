"""Checkpoints load on any number of processes, into models with other layouts that are sharded in other ways."""

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
from blocksparse.distributed import (
    ColwiseParallel,
    Cut,
    RowwiseParallel,
    load_checkpoint,
    save_checkpoint,
    save_safetensors,
)
from processes import Processes, error_of, shared_error


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
    """Return a net after two steps in one process, and its optimizer."""
    net = Net(seed)
    optimizer = adam(net)
    return train(net, optimizer), optimizer


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def state(net, optimizer=None):
    """Return copies of a net's tensors, and of its optimizer's state."""
    tensors = {name: whole(tensor).clone() for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = whole(value).clone()
    return tensors


def wrapped(net, how):
    if how == "ddp":
        return DistributedDataParallel(net)
    if how == "fsdp":
        fully_shard(net.lstm)
        return fully_shard(net)
    return net


def save(folder, how="plain"):
    """Train the same net in every process, with a clock per block, and save it after a change; return its state."""
    net = wrapped(Net(0), how)
    optimizer = bs.sparsity.BlockClock(adam(net))
    train(net, optimizer)
    bs.sparsity.SET(net, optimizer, init="zeros").step()
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


def check_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


def pairs():
    """Return every way of saving with every way of loading; each occurs once in the tests that always run."""
    saved = (1, "plain"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")
    loaded = (4, "fsdp"), (2, "fsdp"), (4, "plain"), (1, "plain")
    for (i, one), (j, other) in itertools.product(enumerate(saved), enumerate(loaded)):
        yield pytest.param(*one, *other, marks=() if i == j else pytest.mark.full)


@pytest.mark.parametrize(("saved", "before", "loaded", "after"), list(pairs()))
def test_any_number_of_processes(processes, tmp_path, saved, before, loaded, after):
    expected = (processes(saved)(save, tmp_path / "at", before) if saved > 1 else [save(tmp_path / "at")])[0]
    results = processes(loaded)(load, tmp_path / "at", after) if loaded > 1 else [load(tmp_path / "at")]
    for loaded_state in results:
        check_equal(loaded_state, expected)


CUTS = Cut(48, 8, ((0, 2, 4), (1, 3, 5))), Cut(24, 4, ((0, 1, 5), (2, 3, 4)))


def parallel_net(seed, density, sharded):
    """Return a net on pairs of processes with parts that are not contiguous, and FSDP2 over the pairs if sharded."""
    net = Net(seed, density)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    first = ColwiseParallel(output_layouts=Replicate(), cut=CUTS[0])
    out = RowwiseParallel(input_layouts=Replicate(), cut=CUTS[1])
    parallelize_module(net, mesh["tp"], {"first": first, "out": out})
    return fully_shard(net, mesh=mesh["dp"]) if sharded else net


def adam_without_forward(net):
    """Step with gradients that equal the values, so that the state of a part is a part of the whole state."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, foreach=False)
    for _ in range(2):
        for parameter in net.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return optimizer


def save_parts(folder, sharded):
    net = parallel_net(0, 0.5, sharded)
    save_checkpoint(net, folder, optimizer=adam_without_forward(net))


def load_parts(folder, sharded):
    net = parallel_net(1, 0.3, sharded)
    optimizer = adam_without_forward(net)
    load_checkpoint(net, folder, optimizer=optimizer)
    save_checkpoint(net, f"{folder}-again", optimizer=optimizer)


@pytest.mark.parametrize(("saved", "sharded"), [(2, False), (4, True)])
@pytest.mark.parametrize(("loaded", "shards"), [(2, False), (4, False), (4, True)])
def test_parts_of_weights(processes, tmp_path, saved, sharded, loaded, shards):
    net = Net(0)
    expected = state(net, adam_without_forward(net))
    processes(saved)(save_parts, tmp_path / "at", sharded)
    processes(loaded)(load_parts, tmp_path / "at", shards)
    for folder in ("at", "at-again"):
        other = Net(1, 0.2)
        optimizer = adam_without_forward(other)
        load_checkpoint(other, tmp_path / folder, optimizer=optimizer)
        check_equal(state(other, optimizer), expected)


def train_parallel(folder):
    """Load a checkpoint into a tensor-parallel net, train and save it; return the state after training alone."""
    net, (truth, optimizer_of_truth) = parallel_net(1, 0.3, True), trained()
    optimizer = adam(net)
    load_checkpoint(net, folder, optimizer=optimizer)
    train(net, optimizer)
    save_checkpoint(net, f"{folder}-again", optimizer=optimizer)
    return state(train(truth, optimizer_of_truth), optimizer_of_truth)


@pytest.mark.parametrize("count", [2, 4])
def test_training_continues_on_tensor_parallel_layers(processes, tmp_path, count):
    net, optimizer = trained()
    save_checkpoint(net, tmp_path / "at", optimizer=optimizer)
    expected = processes(count)(train_parallel, tmp_path / "at")[0]
    other = Net(1, 0.2)
    optimizer = adam(other)
    load_checkpoint(other, tmp_path / "at-again", optimizer=optimizer)
    restored = state(other, optimizer)
    assert restored.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(restored[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)


def factored(seed, sharded=True):
    """Return a layer that is the whole model, and the factored state of its optimizer, which changes no parameter."""
    torch.manual_seed(seed)
    layer = bs.nn.Linear(32, 48, density=0.5, block_size=8)
    if sharded:
        layer = parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel(cut=CUTS[0]))
    optimizer = torch.optim.Adafactor(layer.parameters(), lr=0.0)
    for parameter in layer.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return layer, optimizer


def save_factored(folder):
    layer, optimizer = factored(0)
    save_checkpoint(layer, folder, optimizer=optimizer)
    save_safetensors(layer, f"{folder}.safetensors")
    other, other_optimizer = factored(1)
    load_checkpoint(other, folder, optimizer=other_optimizer)
    check_equal(state(other, other_optimizer), state(layer, optimizer))


def test_a_layer_that_is_the_model_and_factored_state(processes, tmp_path):
    processes(2)(save_factored, tmp_path / "at")
    layer, optimizer = factored(0, sharded=False)
    other, other_optimizer = factored(1, sharded=False)
    load_checkpoint(other, tmp_path / "at", optimizer=other_optimizer)
    check_equal(state(other, other_optimizer), state(layer, optimizer))
    loaded, _ = bs.checkpoint.load(tmp_path / "at.safetensors")
    check_equal(loaded, layer.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_pytorch_wrote_and_reads(tmp_path):
    net, other = Net(0), Net(0)
    dcp.save({"model": train(net, adam(net)).state_dict()}, checkpoint_id=tmp_path / "plain")
    load_checkpoint(other, tmp_path / "plain", "model.")
    check_equal(state(other), state(net))
    save_checkpoint(net, tmp_path / "ours")
    loaded = Net(0).state_dict()
    dcp.load(loaded, checkpoint_id=tmp_path / "ours")
    check_equal(loaded, state(net))


def more_layers(net):
    net.more = nn.Linear(2, 2)


def fewer_layers(net):
    del net.dense


def other_blocks(net):
    net.out = bs.nn.Linear(24, 10, density=0.5, block_size=2)


def other_size(net):
    net.first = bs.nn.Linear(30, 64, density=0.5, block_size=8)


def other_size_on_rank_1(net):
    if dist.get_rank() == 1:
        net.dense = nn.Linear(3, 3)


# Changes of the model that loads, and words of the error.
BAD_MODELS = {
    more_layers: "the tensors of this model, more.weight with them, got none",
    fewer_layers: "the tensors of this model, got dense.bias besides",
    other_blocks: r"out with \(5, 12\) blocks of \(2, 2\), got \(3, 6\) blocks of \(4, 4\)",
    other_size: r"first with \(8, 4\) blocks of \(8, 8\), got \(6, 4\) blocks",
    other_size_on_rank_1: r"process 1: .*expected dense.weight of \[3, 3\], got \[24, 16\]",
}


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


# Changes of a checkpoint, given its folder and its data file, and words of the error.
BAD_FILES = {
    "cut": (lambda folder, data: cut(data, data.stat().st_size // 2), "expected a whole checkpoint, got "),
    "missing": (lambda folder, data: data.unlink(), "expected a whole checkpoint, got FileNotFoundError"),
    "no folder": (
        lambda folder, data: shutil.rmtree(folder),
        r"expected a folder of torch.distributed.checkpoint, got .* \(FileNotFoundError",
    ),
    "cut description": (
        lambda folder, data: cut(folder / ".metadata", -100),
        "expected a folder of torch.distributed.checkpoint, got",
    ),
    "other bits": (
        lambda folder, data: data.write_bytes(bytes(0xFF ^ each for each in data.read_bytes())),
        "expected a whole checkpoint, got a data file that is cut or damaged$",
    ),
    "other pickle": (
        lambda folder, data: data.write_bytes(pickle.dumps(Net) * 999),
        "expected a whole checkpoint, got a data file that is cut or damaged$",
    ),
    "evil": (
        lambda folder, data: (folder / ".metadata").write_bytes(b"cposix\nsystem\n(S'true'\ntR."),
        "posix.system, which no description of a checkpoint has",
    ),
}


def load_error(folder, change=None, density=0.5, optimizer=None):
    """Return the error of loading into a changed net, after a check that the net is as it was."""
    net = Net(1, density)
    net = (change and change(net)) or net
    before = state(net)
    error = error_of(load_checkpoint, net, folder, optimizer=optimizer and optimizer(net))
    check_equal(state(net), before)
    return error


def sgd(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def check_refused(processes, message, folder, *arguments):
    assert re.search(message, error := shared_error(processes(2), load_error, folder, *arguments)), error


@pytest.mark.parametrize("change", BAD_MODELS, ids=lambda change: change.__name__)
def test_another_model(processes, tmp_path, change):
    save_checkpoint(Net(0), tmp_path / "at")
    check_refused(processes, BAD_MODELS[change], tmp_path / "at", change)


@pytest.mark.parametrize("case", BAD_FILES)
def test_damaged_files(processes, tmp_path, case):
    damage, message = BAD_FILES[case]
    save_checkpoint(Net(0), tmp_path / "at")
    damage(tmp_path / "at", next((tmp_path / "at").glob("*.distcp")))
    check_refused(processes, message, tmp_path / "at")


def test_other_numbers_of_blocks_in_data_parallel(processes, tmp_path):
    save_checkpoint(Net(0), tmp_path / "at")
    message = "expected first with .* blocks, .* before the model is wrapped in DistributedDataParallel"
    check_refused(processes, message, tmp_path / "at", DistributedDataParallel, 0.25)


def test_another_optimizer(processes, tmp_path):
    net, optimizer = trained()
    for saved, asked, message in (
        (None, adam, "the optimizer's state of first.values, got none"),
        (optimizer, sgd, "expected the state of SGD for first.values, got that of AdamW"),
    ):
        save_checkpoint(net, tmp_path / "at", optimizer=saved)
        check_refused(processes, message, tmp_path / "at", None, 0.5, asked)


def test_a_description_imports_nothing(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"cthis\ns\n.")
    assert "this.s, which no description of a checkpoint has" in error_of(load_checkpoint, Net(0), tmp_path)
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (b"_MEM_FORMAT_ENCODING\nS'TORCH_CHANNELS_LAST'", "MEM_FORMAT_ENCODING in place of a description"),
        (b"_MEM_FORMAT_ENCODING\nS'__class__'", "no member of an Enum"),
        (b"Metadata\nS'__init__'", "no member of an Enum"),
        (b"Metadata\nS'__module__'", "no member of an Enum"),
    ],
)
def test_getattr_in_a_description_reads_members_of_enums_only(tmp_path, member, message):
    """Python 3.11.0 to 3.11.3 write such members as `getattr(kind, name)`."""
    description = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n" + member + b"\ntR."
    (tmp_path / ".metadata").write_bytes(description)
    assert message in error_of(load_checkpoint, Net(0), tmp_path)


def save_bad_about(folder):
    return error_of(save_checkpoint, Net(0), folder, about={"x": object() if dist.get_rank() else 1})


def test_facts_of_one_process_that_json_cannot_express(processes, tmp_path):
    error = shared_error(processes(2), save_bad_about, tmp_path / "at")
    assert error.startswith("process 1: about: expected values that JSON can express")
    assert not list((tmp_path / "at").iterdir())


def fail_on_rank_1(*_):
    if dist.get_rank():
        raise RuntimeError("no state")


def save_failing(folder):
    net = Net(0)
    net.register_state_dict_post_hook(fail_on_rank_1)
    return error_of(save_checkpoint, net, folder)


def test_any_error_of_one_process_is_raised_on_all(processes, tmp_path):
    assert shared_error(processes(2), save_failing, tmp_path / "at") == "process 1: RuntimeError: no state"


def save_apart(folder, same):
    exists, folder = pathlib.Path.exists, folder if same else folder / str(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        if same and dist.get_rank() == 1:  # as on another file system
            patch.setattr(pathlib.Path, "exists", lambda path: path.suffix != ".shared" and exists(path))
        return error_of(save_checkpoint, Net(0), folder)


@pytest.mark.parametrize(
    ("same", "message"), [(True, "process 1: .* that all processes share"), (False, "in process 1$")]
)
def test_processes_must_share_the_folder(processes, tmp_path, same, message):
    assert re.search(message, shared_error(processes(2), save_apart, tmp_path, same))
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
