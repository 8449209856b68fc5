"""Training by several processes: results of one process, kills, other numbers of processes, errors."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from blocksparse.errors import BlockSparseError

sys.path.append(str(Path(__file__).parent))
import kill_runs

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval=0.1", "--no-python"]


def without_dropout(run):
    """Return a run of SET on an MLP; dropout would draw differently on each rank."""
    return kill_runs.KINDS["mlp"](run, dropout=0.0)


def trained(kind, run, until=None):
    """Train until a step on every rank; return the rank."""
    trainer = without_dropout(run) if kind == "mlp" else kill_runs.KINDS[kind](run)
    for step in trainer.steps():
        if step == until:
            break
    return trainer.rank


def check_close(run, other):
    (ours, *_, mine), (theirs, *_, logged) = kill_runs.state(run), kill_runs.state(other)
    assert len(mine) == len(logged)
    for line, of in zip(mine, logged, strict=True):
        assert line == pytest.approx(of, rel=1e-4, abs=1e-5)
    for name in theirs:
        if name.startswith("model."):
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["charlm", "prune", pytest.param("mlp", marks=pytest.mark.full)])
def test_as_with_one_process(processes, tmp_path, kind):
    trained(kind, tmp_path / "one")
    assert processes(2)(trained, kind, tmp_path / "two") == [0, 1]
    check_close(tmp_path / "two", tmp_path / "one")


def test_goes_on_with_other_numbers_of_processes(processes, tmp_path):
    trained("mlp", tmp_path / "one")
    processes(2)(trained, "mlp", tmp_path / "more", 9)
    processes(4)(trained, "mlp", tmp_path / "more", 17)
    trained("mlp", tmp_path / "more")
    check_close(tmp_path / "more", tmp_path / "one")


@pytest.mark.full
def test_stopped_and_resumed_it_has_the_same_bits(processes, tmp_path):
    processes(2)(trained, "charlm", tmp_path / "whole")
    for until in (7, 16, None):
        processes(2)(trained, "charlm", tmp_path / "stopped", until)
    assert kill_runs.same(tmp_path / "stopped", tmp_path / "whole")


def too_small(run):
    trainer = kill_runs.KINDS["mlp"](run)
    trainer.task.batch = 3
    with pytest.raises(BlockSparseError) as error:
        trainer.task.split(trainer.rank, trainer.processes)
    return str(error.value)


def test_a_batch_smaller_than_the_processes(processes, tmp_path):
    assert set(processes(4)(too_small, tmp_path)) == {"batch: expected a sample or more for each of 4 processes, got 3"}


def write_table(path):
    rows = torch.randn(120, 20, generator=torch.Generator().manual_seed(0))
    lines = [",".join([*(f"{x:.3f}" for x in row.tolist()), "ab"[int(row[0] > 0)]]) for row in rows]
    path.write_text("\n".join([",".join([*(f"x{n}" for n in range(20)), "label"]), *lines]) + "\n")
    return path


def command(tmp_path, out, *more):
    data = write_table(tmp_path / "rows.csv")
    blocksparse = [sys.executable, "-m", "blocksparse_lab"]
    return [*blocksparse, *f"train mlp --data {data} --hidden 32,32 --batch 16 --out {out}".split(), *more]


@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=" ".join)
@pytest.mark.full
def test_the_command_line_prints_once(tmp_path, shard):
    launch = [*TORCHRUN, "--nproc-per-node=2", *command(tmp_path, tmp_path / "run", "--epochs", "2", *shard)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch 2 of 2: held out") == 1
    assert (tmp_path / "run" / "result.json").is_file()
    assert "Warning" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGSTOP")
@pytest.mark.full
@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=" ".join)
def test_a_process_that_stops_is_named(tmp_path, shard):
    out = tmp_path / "run"
    launch = [*TORCHRUN, "--nproc-per-node=2", *command(tmp_path, out, "--epochs", "100000", "--timeout", "5", *shard)]
    torchrun = subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log, stopped = out / "log.jsonl", None
    while not (log.is_file() and log.read_bytes().count(b"\n") > 3):
        assert torchrun.poll() is None, torchrun.communicate()
        time.sleep(0.1)
    for process in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split():
        if b"RANK=1\0" in Path(f"/proc/{process}/environ").read_bytes().replace(b"LOCAL_RANK", b""):
            stopped = int(process)
    os.kill(stopped, signal.SIGSTOP)
    started = time.monotonic()
    for line in torchrun.stderr:
        if line.startswith("error: "):
            break
    assert time.monotonic() - started < 30
    os.kill(stopped, signal.SIGKILL)  # torchrun would wait half a minute for it
    assert re.match("error: process 1: expected an answer in time, got none", line)
    torchrun.communicate(timeout=60)
    assert torchrun.returncode != 0


@pytest.mark.full
@pytest.mark.parametrize("kills", [1, 4])
def test_killed_under_torchrun_it_ends_with_the_same_tensors(tmp_path, kills):
    program = Path(kill_runs.__file__)
    arguments = ["--processes", "2", "--kills", str(kills), "--kinds", "mlp"]
    done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} of {kills} in" in done.stdout
