"""Processes with other layouts hear of it, all of them and by name, also when one does not come."""

import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, check_layouts
from blocksparse.surgery import agreement
from blocksparse.surgery.agreement import agreed


def net(*seeds):
    layers = {
        f"fc{k}": bs.patterns.random((64, 64), block_size=8, density=0.3, seed=seed) for k, seed in enumerate(seeds)
    }
    return nn.ModuleDict({name: bs.nn.Linear(64, 64, layout=layout) for name, layout in layers.items()})


def said(model, group=None):
    try:
        check_layouts(model, group)
    except bs.BlockSparseError as error:
        return str(error)


def cases():
    rank = dist.get_rank()
    model = net(0, 1)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {
        "equal": said(model),
        "other": said(net(0, 1 + (rank == 2))),
        "both": said(net(rank % 2, rank % 2)),
        "fewer": said(net(0) if rank == 1 else model),
        "group": said(net(0, rank // 2), pairs[rank // 2]),
        "dense": said(nn.Linear(4, 4)),
    }
    with torch.no_grad():
        if rank == 3:
            model["fc1"].col_indices[0] += 1
    found["written"] = said(model)
    return found


def test_ranks_and_layers_that_differ_are_named(processes):
    found = processes(4)(cases)
    assert all(each == found[0] for each in found)
    found = found[0]
    assert found["equal"] is found["group"] is found["dense"] is None
    assert "rank 2 with another one of fc1" in found["other"]
    assert "fc0" not in found["other"]
    assert "ranks 1, 3 with another one of fc0, fc1" in found["both"]
    assert "rank 1 with another one of fc1" in found["fewer"]
    assert found["written"].startswith("rank 3: fc1.col_indices")


def parts(differ):
    """Processes of a column of a 2 x 2 mesh have the same part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    seed = mesh["dp"].get_local_rank() if differ else 0
    model = net(5, seed)
    parallelize_module(model, mesh["tp"], {"fc1": ColwiseParallel()})
    return said(model)


def test_equal_parts_are_compared(processes):
    assert processes(4)(parts, False) == [None] * 4
    (said_,) = set(processes(4)(parts, True))
    assert re.search(r"ranks? .* another one of fc1", said_)
    assert "fc0" not in said_


def wrapped():
    model = DistributedDataParallel(net(0, dist.get_rank()))
    return said(model)


def test_layouts_under_data_parallel(processes):
    one, other = processes(2)(wrapped)
    assert one == other
    assert "rank 1: module.fc1." in one


def one_stays_away(done):
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    begin = time.monotonic()
    if dist.get_rank() == 1:
        while not done.exists() and time.monotonic() - begin < 5:
            time.sleep(0.05)
        return None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "ROLL_CALL", 0.5)
        text = said(net(0), group)
    done.touch()
    return text, time.monotonic() - begin


def test_a_missing_rank_is_named_in_time(processes, tmp_path):
    (text, seconds), _ = processes(2)(one_stays_away, tmp_path / "done")
    assert text.startswith("rank 1: expected an answer in time")
    assert seconds < 5


def test_one_process_has_nothing_to_compare():
    check_layouts(net(0, 1))
    with pytest.raises(bs.BlockSparseError, match="model"):
        check_layouts(3)
    with pytest.raises(bs.BlockSparseError, match="wrong"), agreed():
        raise bs.BlockSparseError("wrong")
