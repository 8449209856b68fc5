"""`save_safetensors` writes the file of a plain model, in pieces, and keeps the old file if it fails."""

import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel as DenseColwise
from torch.distributed.tensor.parallel import RowwiseParallel as DenseRowwise
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse import checkpoint
from blocksparse.distributed import ColwiseParallel, RowwiseParallel, save_safetensors, single_file
from processes import error_of, shared_error


def network(seed=0, density=0.4):
    torch.manual_seed(seed)
    return nn.Sequential(
        bs.nn.Conv2d(8, 24, 3, density=density, block_size=4),
        nn.Conv2d(24, 6, 1),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        bs.nn.Linear(96, 40, density=density, block_size=8),
        bs.nn.Linear(40, 96, density=density, block_size=8),
        bs.nn.LSTM(96, 32, density=density, block_size=8),
    ).bfloat16()


class Mixed(nn.Module):
    def __init__(self, seed=0, density=0.4):
        super().__init__()
        self.sparse, self.scale = network(seed, density), nn.Parameter(torch.tensor(float(seed)))
        self.up, self.down = nn.Linear(20, 24), nn.Linear(24, 4)


def wrap(how):
    net, count = Mixed(), dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(net)
    if how in ("fsdp", "replicas"):
        mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("replicate", "shard"))
        mesh = mesh if how == "replicas" else init_device_mesh("cpu", (count,))
        del net.scale  # which fully_shard does not take
        for layer in net.sparse:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    tensor = 2 if how == "both" else count
    mesh = init_device_mesh("cpu", (count // tensor, tensor), mesh_dim_names=("data", "tensor"))
    plan = {
        "sparse.0": ColwiseParallel(output_layouts=Replicate()),
        "sparse.4": ColwiseParallel(),
        "sparse.5": RowwiseParallel(),
        "sparse.6": ColwiseParallel(output_layouts=Replicate()),
        "up": DenseColwise(),
        "down": DenseRowwise(),
    }
    parallelize_module(net, mesh["tensor"], plan)
    if how == "both":
        del net.scale
        fully_shard(net, mesh=mesh["data"])
    return net


def save(how, path, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_file, "PIECE_BYTES", piece)
        save_safetensors(wrap(how), path, about={"step": 3})


@pytest.mark.parametrize("how", ["ddp", "fsdp", "replicas", "tensor", "both"])
@pytest.mark.filterwarnings("ignore::blocksparse.SparsityWarning")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("piece", [1000, 2**25])
def test_the_file_equals_that_of_one_process(processes, tmp_path, how, count, piece):
    processes(count)(save, how, tmp_path / "net", piece)
    truth, other = Mixed(), Mixed(1, 0.2)
    if how in ("fsdp", "replicas", "both"):
        del truth.scale, other.scale
    other.load_state_dict(load_file(tmp_path / "net"))
    actual, expected = other.state_dict(), truth.state_dict()
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    assert checkpoint.load(tmp_path / "net")[1] == {"step": 3}
    assert [file.name for file in tmp_path.iterdir()] == ["net"]


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Measures the bytes of the largest tensor that operations make; `known` tensors do not count."""

    largest, known = 0, frozenset()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if type(made) is torch.Tensor and made.untyped_storage().data_ptr() not in self.known:
            self.largest = max(self.largest, made.untyped_storage().nbytes())
        return made


def largest(path):
    net = nn.Sequential(bs.nn.Linear(1024, 1024, density=0.5, block_size=32), nn.Linear(1024, 512))
    fully_shard(net)
    sizes = Sizes()
    sizes.known = {p.to_local().untyped_storage().data_ptr() for p in net.parameters()}
    with sizes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(single_file, "PIECE_BYTES", 2**16)
        save_safetensors(net, path)
    return sizes.largest


def test_no_process_has_a_whole_tensor(processes, tmp_path):
    assert max(processes(2)(largest, tmp_path / "net")) <= 2**16
    assert load_file(tmp_path / "net")["0.values"].nbytes == 2**21


def full_disk(calls):
    """Return a function in place of `checkpoint.bytes_of` that fails after some calls."""
    left = iter(range(calls))

    def write(tensor):
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        return memoryview(bytes(tensor.nbytes))

    return write


def out_of_memory(*_):
    raise RuntimeError("out of memory")


def fail(case, path):
    """Save a model with a fault on one process; return the error."""
    rank = dist.get_rank()
    net = fully_shard(Mixed(density=0.2 if case == "others" and rank == 1 else 0.4).sparse)
    with pytest.MonkeyPatch.context() as patch:
        if case == "disk" and rank == 0:
            patch.setattr(checkpoint, "bytes_of", full_disk(4))
        if case == "a process" and rank == 1:
            patch.setattr(single_file.LocalChunk, "between", out_of_memory)
        error = error_of(save_safetensors, net, path)
    dist.barrier()
    return error


FAULTS = {
    "disk": "a place to write a checkpoint to, got No space left on device; the checkpoint before it is whole",
    "a process": r"process 1: .*: RuntimeError: out of memory",
    "others": r"process 1, 0.col_indices: expected .* as in process 0, got",
    "folder": "a place to write a checkpoint to, got ",
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_failure_raises_on_all_processes_and_the_old_file_remains(processes, tmp_path, case):
    path = tmp_path / "net"
    checkpoint.save(path, {"x": torch.ones(2)}, {})
    error = shared_error(processes(2), fail, case, path / "under a file" if case == "folder" else path)
    assert re.search(FAULTS[case], error), error
    assert load_file(path)["x"].tolist() == [1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["net"]
