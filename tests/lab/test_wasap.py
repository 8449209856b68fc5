"""WASAP-SGD and WASSP-SGD: alone the sequential algorithm, with torchrun as good, and stopped by whoever dies."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse import checkpoint
from blocksparse.distributed import Settings, train
from blocksparse_lab.models.mlp import SparseMLP
from blocksparse_lab.wasap.train import batches
from processes import rendezvous, run_script, start_script

# Options of a rank go before those of all. What came out is saved; or with "says", what `train` raised is printed.
SCRIPT = """
import datetime, os, signal, sys, threading
import torch
from torch import nn
from blocksparse import BlockSparseError
from blocksparse.distributed import Settings, train
from blocksparse_lab.models.mlp import SparseMLP

torch.set_num_threads(1)
where, options = sys.argv[1], eval(sys.argv[2])
rank = int(os.environ["RANK"])
settings = Settings(**options["settings"] | options.get(rank, {}).pop("settings", {}))
options |= options.get(rank, {})
if "group" in options:
    torch.distributed.init_process_group(
        "gloo", init_method=options["group"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=settings.timeout),
    )
if "interrupt" in options:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()


def toy(seed, n):
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :5].sum(1) > 0).long()


steps = 0


def loss(y, target):
    global steps
    steps += 1
    if steps == options.get("stop") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), options.get("signal", signal.SIGKILL))
    return nn.functional.cross_entropy(y, target)


def run():
    # Each has drawn another: the master's counts.
    sizes = [20, options.get("hidden", 64), 64, 2]
    model = SparseMLP(sizes, density=0.3, activation="relu", dropout=0.1, init="fan_in", seed=rank)
    nnz = [layer.layout.nnz for layer in model.layers]
    epochs = train(
        model, toy(options.get("data", 1), options.get("rows", 512)), settings, test=toy(2, 500), skip=model.output,
        loss=loss, checkpoint=f"{where}/last.safetensors", resume=options.get("resume", False),
    )
    assert [layer.layout.nnz for layer in model.layers] == nnz
    assert bool(epochs) == (rank == 0)
    assert all(e.samples_per_second > 0 for e in epochs)
    return model.state_dict(), [(e.epoch, e.phase, e.accuracy) for e in epochs]


if "says" in options:
    try:
        run()
        said = "done"
    except BlockSparseError as error:
        said = str(error)
    except KeyboardInterrupt:
        said = "interrupted"
    with open(f"{where}/{rank}.said", "w") as file:
        file.write(said + ".\\n")
    os._exit(0)
if "again" in options:  # three runs of one group, the first refused
    torch.distributed.init_process_group("gloo")
    try:
        train(SparseMLP([20, 8, 2], epsilon=3), toy(1, 1), settings)
    except BlockSparseError as error:
        assert str(error) == "data: expected a sample or more for each of 2 workers, got 1"
    else:
        raise AssertionError("more workers than data")
    before = run()[0]
    found = run()
    for name, tensor in found[0].items():
        assert torch.equal(before[name], tensor), name
    torch.distributed.destroy_process_group()
else:
    found = run()
torch.save(found, f"{where}/{rank}.pt")
"""


def full(*cases):
    """The cases, all but the first one of them `full`: seconds each, of processes that import PyTorch."""
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.full) for case in cases[1:])]


# In the third epoch: each has 16 steps, of both together.
KILLED = {1: {"stop": 40}}
SETTINGS = {"epochs": 10, "batch": 16, "learning_rate": 0.05, "weight_decay": 0.0, "zeta": 0.1}


pytestmark = pytest.mark.usefixtures("one_thread")


def toy(seed, n):
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :5].sum(1) > 0).long()


def network(seed=0, dropout=0.1):
    return SparseMLP([20, 64, 64, 2], density=0.3, activation="relu", dropout=dropout, init="fan_in", seed=seed)


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def torchrun(tmp_path, workers, settings=None, restarts=0, given=None, **options):
    """The process of `torchrun` as it ended."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    command += ["--max-restarts", str(restarts), str(write_script(tmp_path))]
    command += [str(tmp_path), repr({"settings": SETTINGS | (settings or {}), **(given or {}), **options})]
    return subprocess.run([sys.executable, *command], env=environment(), capture_output=True, text=True, timeout=100)


def write_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return script


def results(tmp_path, workers):
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(workers)]


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(other[name], tensor), name


# -- alone -------------------------------------------------------------------------------------------------------


def sequential(model, settings, data):
    """Sparse evolutionary training as it is told: all epochs, evolution after each but the last."""
    optimizer = bs.sparsity.SGD(model.parameters(), settings.learning_rate, settings.momentum, settings.weight_decay)
    told = {"end": settings.epochs, "init": settings.regrow, "seed": settings.seed}
    method = bs.sparsity.SET(model, optimizer, settings.zeta, skip=model.output, **told)
    model.train()
    for epoch in range(settings.epochs):
        for rows in batches(torch.arange(len(data[0])), settings, epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()
        method.step()


@pytest.mark.parametrize(("synchronous", "regrow"), [(False, "he"), (True, "zeros")])
def test_alone_it_is_the_sequential_algorithm_bit_for_bit(synchronous, regrow, tmp_path):
    settings = Settings(**SETTINGS | {"epochs": 6, "synchronous": synchronous, "regrow": regrow, "seed": 3})
    data = toy(1, 200)
    wanted = network()
    with torch.random.fork_rng():
        sequential(wanted, settings, data)
    found, random, reports = network(), torch.get_rng_state(), []
    epochs = train(found, data, settings, test=toy(2, 50), skip=found.output, report=reports.append)
    same(found.state_dict(), wanted.state_dict())
    assert torch.equal(torch.get_rng_state(), random)
    first = "synchronous" if synchronous else "asynchronous"
    phases = [(e, first) for e in (1, 2, 3, 4)] + [(5, "alone"), (6, "alone"), (6, "average")]
    assert [(e.epoch, e.phase) for e in epochs] == phases
    assert reports == epochs
    # A run that was stopped goes on with the same bits: whatever it began with.
    path = tmp_path / "last.safetensors"
    for stop in (2, 5):

        class StopError(Exception):
            pass

        def until(epoch, stop=stop, error=StopError):
            if epoch.epoch == stop:
                raise error

        part, rest = network(), network(seed=7)
        with pytest.raises(StopError):
            train(part, data, settings, skip=part.output, checkpoint=path, report=until)
        assert checkpoint.load(path)[1]["epoch"] == stop
        train(rest, data, settings, skip=rest.output, checkpoint=path, resume=True)
        same(rest.state_dict(), wanted.state_dict())
    over = network(seed=8)
    assert train(over, data, settings, skip=over.output, checkpoint=path, resume=True) == []
    same(over.state_dict(), wanted.state_dict())


# -- several -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequential_accuracy():
    model = network()
    return train(model, toy(1, 512), Settings(**SETTINGS), test=toy(2, 500), skip=model.output)[-1].accuracy


@pytest.mark.parametrize(("workers", "synchronous"), full((2, False), (4, False), (2, True)))
def test_several_workers_are_as_good(workers, synchronous, tmp_path, sequential_accuracy):
    # Synchronous runs have the same bits each time: the script sees to it.
    again = {"again": True} if synchronous else {}
    # Gradients of four are three steps old, which is momentum too: at the rate of two they would diverge.
    told = SETTINGS | {"synchronous": synchronous, "learning_rate": {2: 0.05, 4: 0.02}[workers]}
    arguments = str(tmp_path), repr({"settings": told, "rows": 256 * workers, **again})
    run_script(workers, write_script(tmp_path), *arguments, folder=tmp_path)
    (state, epochs), *others = results(tmp_path, workers)
    for other, none in others:
        same(other, state)
        assert none == []
    first = "synchronous" if synchronous else "asynchronous"
    assert [(e, phase) for e, phase, _ in epochs] == [(e, first) for e in range(1, 8)] + [
        (e, "alone") for e in (8, 9, 10)
    ] + [(10, "average")]
    assert sequential_accuracy > 0.85
    assert epochs[-1][2] > sequential_accuracy - 0.05
    begun = network().layers
    assert [state[f"layers.{i}.col_indices"].numel() for i in range(3)] == [layer.layout.nnz for layer in begun]
    assert not torch.equal(state["layers.0.col_indices"], begun[0].layout.col_indices())
    tensors, about = checkpoint.load(tmp_path / "last.safetensors")
    same({name.removeprefix("model."): t for name, t in tensors.items() if name != "momentum"}, state)
    assert about["epoch"] == 10


def frozen_and_unused(synchronous):
    model = nn.Sequential(bs.nn.Linear(20, 8, density=0.5, block_size=1), nn.Linear(8, 2))
    model[1].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = Settings(epochs=2, first_phase=1.0, batch=16, weight_decay=0.1, synchronous=synchronous)
    train(model, toy(1, 65), settings)
    return {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_has_no_gradient_stays_as_it_is(processes, synchronous):
    assert processes(2)(frozen_and_unused, synchronous)[0] == {"1.weight", "unused"}


# -- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_that_is_killed_stops_the_run_and_it_goes_on_from_its_checkpoint(tmp_path):
    begin = time.monotonic()
    done = torchrun(tmp_path, 2, {"epochs": 5, "synchronous": True}, given=KILLED)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert time.monotonic() - begin < 60, "and not after the time-out of minutes"
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["epoch"] == 2
    assert not (tmp_path / "0.pt").exists()
    again = torchrun(tmp_path, 2, {"epochs": 5, "synchronous": True}, resume=True)
    assert again.returncode == 0, again.stderr
    phases = [epoch[:2] for epoch in results(tmp_path, 2)[0][1]]
    assert phases == [(3, "synchronous"), (4, "synchronous"), (5, "alone"), (5, "average")]


@pytest.mark.full
def test_restarted_by_torchrun_it_goes_on_from_its_checkpoint(tmp_path):
    done = torchrun(tmp_path, 2, {"epochs": 5, "synchronous": True}, restarts=1, given=KILLED)
    assert done.returncode == 0, done.stderr
    phases = [epoch[:2] for epoch in results(tmp_path, 2)[0][1]]
    assert phases == [(3, "synchronous"), (4, "synchronous"), (5, "alone"), (5, "average")]


def said_by_ranks(tmp_path, ranks, given=None, variables=None, timeout=20.0, of=None, **options):
    """The output of each process `of` a group without torchrun, which would end all when one dies."""
    shared = rendezvous(max(ranks) + 1)
    settings = SETTINGS | {"epochs": 4, "timeout": timeout} | options.pop("settings", {})
    arguments = str(tmp_path), repr({**(given or {}), "says": True, "settings": settings, "rows": 128, **options})
    own = [shared | {"RANK": str(rank)} | (variables or {}).get(rank, {}) for rank in ranks]
    script = write_script(tmp_path)  # once: who has started reads it
    running = [
        start_script(script, *arguments, variables=of, output=tmp_path / f"{rank}.out")
        for rank, of in zip(ranks, own, strict=True)
    ]
    said = [tmp_path / f"{rank}.said" for rank in of or ranks]
    try:
        deadline = time.monotonic() + 100
        waiting = set(said)
        while waiting and time.monotonic() < deadline:
            time.sleep(0.1)
            waiting = {path for path in waiting if not path.exists() or not path.read_text().endswith(".\n")}
    finally:
        for process in running:
            process.kill()
            process.join()
    return [path.read_text() for path in said]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        pytest.param({1: {"data": 5}}, "process 1: inputs", marks=pytest.mark.full),
        pytest.param(
            {1: {"settings": {"synchronous": True}}}, "process 1: settings (synchronous)", marks=pytest.mark.full
        ),
        pytest.param({1: {"hidden": 24}}, "process 1: parameters", marks=pytest.mark.full),
        ({0: {"rows": 60}}, "process 0: inputs"),  # two agree
    ],
    ids=["data", "settings", "model", "master"],
)
def test_a_process_that_was_given_something_else_is_named_by_all(given, what, tmp_path):
    wanted = f"processes: expected the same model, settings and data in all, got others in {what}.\n"
    assert said_by_ranks(tmp_path, [0, 1, 2], given) == [wanted] * 3


def test_a_port_in_use_is_said_and_no_process_waits_longer_than_told(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        begun = time.monotonic()
        port_of = {rank: {"MASTER_PORT": port} for rank in (0, 1)}
        first, second = said_by_ranks(tmp_path, [0, 1], variables=port_of, timeout=2.0)
    wanted = "expected a free port: choose another with MASTER_PORT, in torchrun with --master-port"
    assert first == f"127.0.0.1:{port}: {wanted}, got one that another program has.\n"
    assert f"process 0 at 127.0.0.1:{port}: expected an answer within 2 s" in second
    assert time.monotonic() - begun < 45, "and not after the minute that PyTorch waits"


def test_processes_that_have_not_started_are_named(tmp_path):
    four = {rank: {"WORLD_SIZE": "4"} for rank in (0, 2)}
    first, third = said_by_ranks(tmp_path, [0, 2], variables=four, timeout=2.0)
    assert first == "processes 1, 3: expected to have started within 2 s, got nothing from there.\n"
    assert third.startswith("process")


def test_processes_that_do_not_agree_on_their_number(tmp_path):
    wanted = "process 1: expected WORLD_SIZE 2, as in process 0, got 3.\n"
    assert said_by_ranks(tmp_path, [0, 1], variables={1: {"WORLD_SIZE": "3"}}) == [wanted] * 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x"}, "environment variable RANK: expected an int from 0 to 1, got 'x'"),
        ({"RANK": "2"}, "environment variable RANK: expected an int from 0 to 1, got '2'"),
        ({"WORLD_SIZE": "-1"}, "environment variable WORLD_SIZE: expected an int from 1 to 2147483647, got '-1'"),
        ({"MASTER_ADDR": ""}, "environment variable MASTER_ADDR: expected one, as torchrun sets it, got none"),
        ({"MASTER_PORT": ""}, "environment variable MASTER_PORT: expected one, as torchrun sets it, got none"),
    ],
    ids=["rank", "rank too high", "size", "address", "port"],
)
def test_wrong_variables(variables, message, monkeypatch):
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (usual | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(bs.BlockSparseError, match=re.escape(message)):
        train(network(), (X, Y), Settings(epochs=1, timeout=5.0))


@pytest.mark.parametrize(
    ("workers", "which", "number", "synchronous", "own"),
    full(
        (3, 1, "SIGKILL", False, True), (3, 1, "SIGSTOP", True, False), (2, 1, "SIGSTOP", False, True),
        (2, 0, "SIGSTOP", False, True), (2, 0, "SIGKILL", True, True), (3, 2, "SIGKILL", True, False),
        (3, 0, "SIGSTOP", True, False),
    ),
)  # fmt: skip
def test_who_is_stuck_or_gone_is_named(workers, which, number, synchronous, own, tmp_path):
    """In the group of `train`, or in one of the user's own; asynchronously others wait for the master only."""
    given = {which: {"stop": 5, "signal": int(getattr(signal, number))}}
    group = {"group": (tmp_path / "group").as_uri()} if own else {}
    others = sorted(set(range(workers)) - {which})
    settings = {"synchronous": synchronous}
    said = said_by_ranks(tmp_path, [*range(workers)], given, timeout=8.0, of=others, settings=settings, **group)
    for rank, text in zip(others, said, strict=True):
        gone = which if synchronous else 1 - min(rank, 1)
        whose = "rank" if own and synchronous else "process"
        # Who waits for all when the master ends in turn names both, as both are gone by then.
        names = [f"{whose} {gone}"] + [f"ranks 0, {which}"] * (own and not synchronous and rank > 1)
        assert text.startswith(
            tuple(f"{name}: expected an answer in time, got none: dead, or out of reach" for name in names)
        ), text


def test_an_interrupt_while_others_are_waited_for_ends_it_at_once(tmp_path):
    (said,) = said_by_ranks(tmp_path, [1], {1: {"interrupt": True}}, timeout=300.0)
    assert said == "interrupted.\n"


X, Y = toy(0, 8)


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
    given = {"model": network(), "data": (X, Y)} | {name: arguments[name] for name in arguments.keys() - names}
    with pytest.raises(bs.BlockSparseError, match=message):
        train(**given, settings=Settings(**settings))


def test_a_checkpoint_of_another_run(tmp_path):
    path = tmp_path / "last.safetensors"
    train(network(), (X, Y), Settings(epochs=1), checkpoint=path)
    with pytest.raises(bs.BlockSparseError, match="expected a checkpoint of"):
        train(network(), (X, Y), Settings(epochs=2), checkpoint=path, resume=True)
    with pytest.raises(bs.BlockSparseError, match="expected a checkpoint of this model"):
        train(SparseMLP([20, 8, 2], epsilon=3), (X, Y), Settings(epochs=1), checkpoint=path, resume=True)
