"""WASAP-SGD and WASSP-SGD: one process runs the sequential algorithm, several are as accurate, failures end runs."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse import checkpoint
from blocksparse.distributed import Settings, train
from blocksparse_lab.models.mlp import SparseMLP
from blocksparse_lab.wasap.train import batches
from processes import rendezvous, run_script, start_script
from wasap_worker import network, toy_data

WORKER = Path(__file__).parents[1] / "wasap_worker.py"
SETTINGS = {"epochs": 10, "batch": 16, "learning_rate": 0.05, "weight_decay": 0.0, "zeta": 0.1}
X, Y = toy_data(0, 8)

pytestmark = pytest.mark.usefixtures("one_thread")


def first_only(*cases):
    """Mark all cases but the first as `full`: each starts processes for seconds."""
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.full) for case in cases[1:])]


def check_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def results(folder, workers):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(workers)]


# -- one process -------------------------------------------------------------------------------------------------


def train_sequentially(model, settings, data):
    """Run sparse evolutionary training: all epochs, with an evolution after each but the last."""
    optimizer = bs.sparsity.SGD(model.parameters(), settings.learning_rate, settings.momentum, settings.weight_decay)
    options = {"end": settings.epochs, "init": settings.regrow, "seed": settings.seed}
    method = bs.sparsity.SET(model, optimizer, settings.zeta, skip=model.output, **options)
    model.train()
    for epoch in range(settings.epochs):
        for rows in batches(torch.arange(len(data[0])), settings, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()
        method.step()


class StopError(Exception):
    pass


def stop_after(epoch):
    def report(result):
        if result.epoch == epoch:
            raise StopError

    return report


@pytest.mark.parametrize(("synchronous", "regrow"), [(False, "he"), (True, "zeros")])
def test_one_process_runs_the_sequential_algorithm_bit_for_bit(synchronous, regrow, tmp_path):
    settings = Settings(**SETTINGS | {"epochs": 6, "synchronous": synchronous, "regrow": regrow, "seed": 3})
    data, expected = toy_data(1, 200), network()
    with torch.random.fork_rng():
        train_sequentially(expected, settings, data)
    model, generator_state, reports = network(), torch.get_rng_state(), []
    epochs = train(model, data, settings, test=toy_data(2, 50), skip=model.output, report=reports.append)
    check_same(model.state_dict(), expected.state_dict())
    assert torch.equal(torch.get_rng_state(), generator_state)
    first = "synchronous" if synchronous else "asynchronous"
    phases = [(e, first) for e in (1, 2, 3, 4)] + [(5, "alone"), (6, "alone"), (6, "average")]
    assert [(e.epoch, e.phase) for e in epochs] == phases
    assert reports == epochs
    # A resumed run ends with the same bits, whatever net it starts with.
    path = tmp_path / "last.safetensors"
    for stop in (2, 5):
        stopped, resumed = network(), network(seed=7)
        with pytest.raises(StopError):
            train(stopped, data, settings, skip=stopped.output, checkpoint=path, report=stop_after(stop))
        assert checkpoint.load(path)[1]["epoch"] == stop
        train(resumed, data, settings, skip=resumed.output, checkpoint=path, resume=True)
        check_same(resumed.state_dict(), expected.state_dict())
    finished = network(seed=8)
    assert train(finished, data, settings, skip=finished.output, checkpoint=path, resume=True) == []
    check_same(finished.state_dict(), expected.state_dict())


# -- several processes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequential_accuracy():
    model = network()
    epochs = train(model, toy_data(1, 512), Settings(**SETTINGS), test=toy_data(2, 500), skip=model.output)
    return epochs[-1].accuracy


@pytest.mark.parametrize(("workers", "synchronous"), first_only((2, False), (4, False), (2, True)))
def test_several_workers_are_as_accurate(workers, synchronous, tmp_path, sequential_accuracy):
    # The worker checks that synchronous runs have the same bits each time.
    again = {"again": True} if synchronous else {}
    # Gradients of four workers are three steps old, which acts like momentum: with the rate of two they diverge.
    settings = SETTINGS | {"synchronous": synchronous, "learning_rate": {2: 0.05, 4: 0.02}[workers]}
    arguments = str(tmp_path), repr({"settings": settings, "rows": 256 * workers, **again})
    run_script(workers, WORKER, *arguments, folder=tmp_path)
    (state, epochs), *others = results(tmp_path, workers)
    for other, none in others:
        check_same(other, state)
        assert none == []
    first = "synchronous" if synchronous else "asynchronous"
    assert [(e, phase) for e, phase, _ in epochs] == [(e, first) for e in range(1, 8)] + [
        (e, "alone") for e in (8, 9, 10)
    ] + [(10, "average")]
    assert sequential_accuracy > 0.85
    assert epochs[-1][2] > sequential_accuracy - 0.05
    initial = network().layers
    assert [state[f"layers.{i}.col_indices"].numel() for i in range(3)] == [layer.layout.nnz for layer in initial]
    assert not torch.equal(state["layers.0.col_indices"], initial[0].layout.col_indices())
    tensors, about = checkpoint.load(tmp_path / "last.safetensors")
    check_same({name.removeprefix("model."): t for name, t in tensors.items() if name != "momentum"}, state)
    assert about["epoch"] == 10


def unchanged_parameters(synchronous):
    model = nn.Sequential(bs.nn.Linear(20, 8, density=0.5, block_size=1), nn.Linear(8, 2))
    model[1].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = Settings(epochs=2, first_phase=1.0, batch=16, weight_decay=0.1, synchronous=synchronous)
    train(model, toy_data(1, 65), settings)
    return {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}


@pytest.mark.parametrize("synchronous", [False, True])
def test_frozen_and_unused_parameters_do_not_change(processes, synchronous):
    assert processes(2)(unchanged_parameters, synchronous)[0] == {"1.weight", "unused"}


# -- failures ----------------------------------------------------------------------------------------------------

# Stops rank 1 in the third epoch: an epoch has 16 steps of both workers.
KILLED = {1: {"stop": 40}}


def torchrun(folder, by_rank=None, restarts=0, **options):
    """Run two synchronous workers for five epochs; return torchrun's finished process."""
    settings = SETTINGS | {"epochs": 5, "synchronous": True}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    arguments = str(folder), repr({"settings": settings, **(by_rank or {}), **options})
    command, environment = [sys.executable, *launch, str(WORKER), *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


RESUMED = [(3, "synchronous"), (4, "synchronous"), (5, "alone"), (5, "average")]


@pytest.mark.full
def test_a_killed_process_ends_the_run_which_resumes_from_its_checkpoint(tmp_path):
    start = time.monotonic()
    done = torchrun(tmp_path, KILLED)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert time.monotonic() - start < 60, "and not after the timeout of minutes"
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["epoch"] == 2
    assert not (tmp_path / "0.pt").exists()
    resumed = torchrun(tmp_path, resume=True)
    assert resumed.returncode == 0, resumed.stderr
    assert [epoch[:2] for epoch in results(tmp_path, 2)[0][1]] == RESUMED


@pytest.mark.full
def test_a_run_that_torchrun_restarts_resumes_from_its_checkpoint(tmp_path):
    done = torchrun(tmp_path, KILLED, restarts=1)
    assert done.returncode == 0, done.stderr
    assert [epoch[:2] for epoch in results(tmp_path, 2)[0][1]] == RESUMED


def errors_of_ranks(folder, ranks, by_rank=None, variables=None, timeout=20.0, waited=None, **options):
    """Run processes without torchrun, which would end all when one dies; return the errors of the `waited` ranks.

    Args:
        by_rank: the worker's options of a rank.
        variables: the environment variables of a rank.
    """
    shared, waited = rendezvous(max(ranks) + 1), waited or ranks
    settings = SETTINGS | {"epochs": 4, "timeout": timeout} | options.pop("settings", {})
    arguments = str(folder), repr({**(by_rank or {}), "error": True, "settings": settings, "rows": 128, **options})
    running = []
    for rank in ranks:
        own = shared | {"RANK": str(rank)} | (variables or {}).get(rank, {})
        running.append(start_script(WORKER, *arguments, variables=own, output=folder / f"{rank}.out"))
    paths = [folder / f"{rank}.error" for rank in waited]
    try:
        deadline, missing = time.monotonic() + 100, set(paths)
        while missing and time.monotonic() < deadline:
            time.sleep(0.1)
            missing = {path for path in missing if not path.exists() or not path.read_text().endswith(".\n")}
    finally:
        for process in running:
            process.kill()
            process.join()
    return [path.read_text() for path in paths]


@pytest.mark.parametrize(
    ("by_rank", "fact"),
    [
        pytest.param({1: {"data": 5}}, "process 1: inputs", marks=pytest.mark.full),
        pytest.param(
            {1: {"settings": {"synchronous": True}}}, "process 1: settings (synchronous)", marks=pytest.mark.full
        ),
        pytest.param({1: {"hidden": 24}}, "process 1: parameters", marks=pytest.mark.full),
        ({0: {"rows": 60}}, "process 0: inputs"),  # the other two agree
    ],
    ids=["data", "settings", "model", "master"],
)
def test_all_processes_name_one_that_differs(by_rank, fact, tmp_path):
    expected = f"processes: expected the same model, settings and data in all, got others in {fact}.\n"
    assert errors_of_ranks(tmp_path, [0, 1, 2], by_rank) == [expected] * 3


def test_a_port_in_use_is_named_before_pytorchs_timeout(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        start = time.monotonic()
        variables = {rank: {"MASTER_PORT": port} for rank in (0, 1)}
        first, second = errors_of_ranks(tmp_path, [0, 1], variables=variables, timeout=2.0)
    expected = "expected a free port: choose another with MASTER_PORT, in torchrun with --master-port"
    assert first == f"127.0.0.1:{port}: {expected}, got one that another program has.\n"
    assert f"process 0 at 127.0.0.1:{port}: expected an answer within 2 s" in second
    assert time.monotonic() - start < 45, "and not after the minute that PyTorch waits"


def test_processes_that_have_not_started_are_named(tmp_path):
    four = {rank: {"WORLD_SIZE": "4"} for rank in (0, 2)}
    first, third = errors_of_ranks(tmp_path, [0, 2], variables=four, timeout=2.0)
    assert first == "processes 1, 3: expected to have started within 2 s, got nothing from there.\n"
    assert third.startswith("process")


def test_all_processes_name_one_with_another_world_size(tmp_path):
    expected = "process 1: expected WORLD_SIZE 2, as in process 0, got 3.\n"
    assert errors_of_ranks(tmp_path, [0, 1], variables={1: {"WORLD_SIZE": "3"}}) == [expected] * 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "x", "expected an int from 0 to 1, got 'x'"),
        ("RANK", "2", "expected an int from 0 to 1, got '2'"),
        ("WORLD_SIZE", "-1", "expected an int from 1 to 2147483647, got '-1'"),
        ("MASTER_ADDR", "", "expected one, as torchrun sets it, got none"),
        ("MASTER_PORT", "", "expected one, as torchrun sets it, got none"),
    ],
)
def test_bad_environment_variables(name, value, message, monkeypatch):
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, text in (usual | {name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(bs.BlockSparseError, match=re.escape(f"environment variable {name}: {message}")):
        train(network(), (X, Y), Settings(epochs=1, timeout=5.0))


@pytest.mark.parametrize(
    ("workers", "which", "number", "synchronous", "own"),
    first_only(
        (3, 1, "SIGKILL", False, True), (3, 1, "SIGSTOP", True, False), (2, 1, "SIGSTOP", False, True),
        (2, 0, "SIGSTOP", False, True), (2, 0, "SIGKILL", True, True), (3, 2, "SIGKILL", True, False),
        (3, 0, "SIGSTOP", True, False),
    ),
)  # fmt: skip
def test_a_process_that_hangs_or_dies_is_named(workers, which, number, synchronous, own, tmp_path):
    """`own`: the user's group instead of one that `train` forms. Asynchronous workers wait for the master only."""
    by_rank = {which: {"stop": 5, "signal": int(getattr(signal, number))}}
    group = {"group": (tmp_path / "group").as_uri()} if own else {}
    others = sorted(set(range(workers)) - {which})
    errors = errors_of_ranks(
        tmp_path, [*range(workers)], by_rank, timeout=8.0, waited=others, settings={"synchronous": synchronous}, **group
    )
    for rank, text in zip(others, errors, strict=True):
        silent = which if synchronous else 1 - min(rank, 1)
        kind = "rank" if own and synchronous else "process"
        # The master may end before this rank asks who is missing; then the error names both.
        names = [f"{kind} {silent}"] + [f"ranks 0, {which}"] * (own and not synchronous and rank > 1)
        assert text.startswith(
            tuple(f"{name}: expected an answer in time, got none: dead, or out of reach" for name in names)
        ), text


def test_an_interrupt_ends_the_wait_for_other_processes(tmp_path):
    (error,) = errors_of_ranks(tmp_path, [1], {1: {"interrupt": True}}, timeout=300.0)
    assert error == "interrupted.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": (X, Y[1:])}, "data: expected as many targets as inputs, one or more, got 8 inputs and 7 targets"),
        ({"data": (X[:0], Y[:0])}, "data: expected as many targets as inputs, one or more, got 0"),
        ({"data": X}, "data: expected a pair of tensors"),
        ({"test": (X, 3)}, "test: expected a pair of tensors"),
        ({"model": nn.Linear(20, 2)}, "modules: expected one with block-sparse weights"),
        ({"model": nn.Sequential(network(), nn.BatchNorm1d(2))}, "1: expected a module without running statistics"),
        ({"skip": "layers.9"}, "skip: expected"),
        ({"resume": True}, "resume: expected a checkpoint to resume from"),
        ({"resume": True, "checkpoint": "nowhere.safetensors"}, "checkpoint: expected a file"),
        ({"epochs": 0}, "epochs: expected an int, 1 or more"),
        ({"batch": 1.5}, "batch: expected an int"),
        ({"first_phase": 1.1}, "first_phase: expected a number from 0 to 1"),
        ({"regrow": "none"}, "regrow: expected one of zeros, he, xavier, got .none."),
        ({"learning_rate": -1.0}, "learning_rate: expected"),
        ({"synchronous": 1}, "synchronous: expected True or False"),
        ({"timeout": 0}, "timeout: expected a positive number"),
    ],
)
def test_bad_arguments(arguments, message):
    names = {field.name for field in dataclasses.fields(Settings)}
    settings = {"epochs": 1} | {name: value for name, value in arguments.items() if name in names}
    others = {"model": network(), "data": (X, Y)} | {name: arguments[name] for name in arguments.keys() - names}
    with pytest.raises(bs.BlockSparseError, match=message):
        train(**others, settings=Settings(**settings))


def test_a_checkpoint_of_another_run(tmp_path):
    path = tmp_path / "last.safetensors"
    train(network(), (X, Y), Settings(epochs=1), checkpoint=path)
    with pytest.raises(bs.BlockSparseError, match="expected a checkpoint of"):
        train(network(), (X, Y), Settings(epochs=2), checkpoint=path, resume=True)
    with pytest.raises(bs.BlockSparseError, match="expected a checkpoint of this model"):
        train(SparseMLP([20, 8, 2], epsilon=3), (X, Y), Settings(epochs=1), checkpoint=path, resume=True)
