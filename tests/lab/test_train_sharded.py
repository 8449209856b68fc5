"""Training with `shard`: results of one process, memory per process, and resumption with the same bits."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blocksparse.errors import BlockSparseError
from blocksparse_lab.data.synthetic import Synthetic
from blocksparse_lab.models.mlp import SparseMLP
from blocksparse_lab.recipes.classify import ClassifyTask, Topology
from blocksparse_lab.training.settings import Settings
from blocksparse_lab.training.sharding import local_shard
from blocksparse_lab.training.trainer import Trainer

sys.path.append(str(Path(__file__).parent))
import kill_runs

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def evolving(method, optimizer, run, shard):
    """Return a trainer with moving connections and running means."""
    of_set = {"importance_from": 0, "importance_every": 2} if method == "set" else {}
    topology = Topology(method, every=3, **of_set)
    model = SparseMLP([40, 48, 48, 2], epsilon=4, dropout=0)
    task = ClassifyTask(model, Synthetic(features=40, rows=64, tested=20), 8, 16, topology)
    how = Settings(steps=task.steps, ema=0.9, log_every=4, eval_every=8, save_every=4, optimizer=optimizer, shard=shard)
    return Trainer(task, run, how)


def trainer(kind, run, shard):
    """Return a trainer that saves at every fourth step."""
    if kind in ("set", "rigl"):
        return evolving(kind, {"set": "adagrad", "rigl": "sgd"}[kind], run, shard)
    made = kill_runs.KINDS[kind](run, shard=shard)
    made.settings = replace(made.settings, save_every=4)
    for module in made.model.modules():
        if hasattr(module, "p"):
            module.p = 0.0  # dropout draws differently on each rank
    return made


def trained(kind, run, until=None, shard=True):
    """Train until a step; return the fraction of parameters, means and optimizer state that is local."""
    made = trainer(kind, run, shard)
    for step in made.steps():
        if step == until:
            break
    tensors = [*made.parameters.values(), *made.ema.values()]
    tensors += [t for state in made.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    here, total = (sum(t.numel() for t in some) for some in (map(local_shard, tensors), tensors))
    return here / total


def check_close(run, other):
    (ours, *_, mine), (theirs, *_, logged) = kill_runs.state(run), kill_runs.state(other)
    assert len(mine) == len(logged)
    for line, of in zip(mine, logged, strict=True):
        norms = [each.pop("grad_norm", 0) for each in (line, of)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        assert line == pytest.approx(of, rel=1e-5, abs=1e-6)
    for name in theirs:
        if not name.startswith("rng"):
            assert ours[name].shape == theirs[name].shape, name
            limit = 1e-3 if name.startswith("optimizer.") else 1e-5
            assert (ours[name] - theirs[name]).double().norm() <= limit * theirs[name].double().norm() + 1e-7, name


@pytest.mark.parametrize(
    ("kind", "shard"),
    [
        ("resnet", True),
        pytest.param("set", True, marks=pytest.mark.full),
        pytest.param("charlm", True, marks=pytest.mark.full),
        pytest.param("mlp", True, marks=pytest.mark.full),
        pytest.param("rigl", True, marks=pytest.mark.full),
        pytest.param("rigl", False, marks=pytest.mark.full),
        pytest.param("pixelcnn", True, marks=pytest.mark.full),  # a thousand tensors, each sent by itself
    ],
)
def test_as_with_one_process(processes, tmp_path, kind, shard):
    # Each rank counts batch norm's statistics, as with data parallelism.
    processes(2 if kind == "resnet" else 1)(trained, kind, tmp_path / "whole", None, False)
    shares = processes(2)(trained, kind, tmp_path / "both", None, shard)
    check_close(tmp_path / "both", tmp_path / "whole")
    assert max(shares) < 1 / 2 + 0.05 or not shard


@pytest.mark.parametrize("kind", [pytest.param("charlm", marks=pytest.mark.full), "set"])
def test_stopped_and_resumed_it_has_the_same_bits(processes, tmp_path, kind):
    processes(2)(trained, kind, tmp_path / "whole")
    for until in (7, 16, None):
        processes(2)(trained, kind, tmp_path / "stopped", until)
    assert kill_runs.same(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize("kind", ["set", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("charlm", "mlp"))])
def test_goes_on_with_other_numbers_of_processes_and_without(processes, tmp_path, kind):
    trained(kind, tmp_path / "whole", None, False)
    for count, until, shard in ((2, 5, True), (4, 9, True), (2, 13, False), (2, 17, True), (1, None, True)):
        processes(count)(trained, kind, tmp_path / "changed", until, shard)
    check_close(tmp_path / "changed", tmp_path / "whole")


def refused(run):
    with pytest.raises(BlockSparseError) as error:
        trainer("prune", run, True)
    return str(error.value)


def test_a_task_that_replaces_its_model_is_refused(processes, tmp_path):
    expected = "shard: expected a task that trains one model throughout, or a run without it, got PruneTask"
    assert set(processes(2)(refused, tmp_path)) == {expected}


def breaks(run):
    made = trainer("charlm", run, True)
    if made.rank == 1:
        local_shard(made.parameters["outlet.bias"])[-1] = float("nan")
    with pytest.raises(BlockSparseError) as error:
        made.train()
    return str(error.value)


def test_numbers_that_are_not_finite_in_one_process_stop_all(processes, tmp_path):
    ours, theirs = processes(2)(breaks, tmp_path)
    assert ours == theirs
    assert "step 0: expected finite parameters, got values that are not in outlet.bias" in ours


@pytest.mark.full
def test_killed_under_torchrun_it_ends_with_the_same_tensors():
    command = [sys.executable, kill_runs.__file__, "--processes", "2", "--kills", "1", "--kinds", "mlp", "--shard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 in" in done.stdout
