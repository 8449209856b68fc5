"""The WASAP benchmark: its runs by torchrun, their output and failures, the report, and bad arguments."""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bench_parts
from blocksparse import BlockSparseError
from blocksparse_lab.machine import machine
from test_data_idx import write


@pytest.fixture(scope="module")
def wasap():
    return bench_parts.load("wasap")


FACTS = {"threads": 1, "cores": 2, "rows": 60, "tested": 10, "batch": 16, "connections": 1000, "density": 0.045}


def epoch(number, phase, accuracy, speed, seconds=1.0):
    facts = {"epoch": number, "phase": phase, "loss": 0.5, "accuracy": accuracy, "seconds": seconds}
    return facts | {"samples_per_second": speed}


def run_of(wasap, processes, seed, accuracy, speeds):
    phases = [(1, "asynchronous"), (2, "asynchronous"), (3, "alone"), (3, "average")]
    epochs = [epoch(*phase, accuracy, speed, 7.0) for phase, speed in zip(phases, speeds, strict=True)]
    return wasap.Run(processes, seed, epochs, FACTS)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_command_writes_a_report(tmp_path):
    write(tmp_path, n=96)
    arguments = ["--data-dir", tmp_path, "--epochs", 1, "--processes", 2, "--rows", 64, "--out", tmp_path / "out"]
    command = [sys.executable, bench_parts.PROGRAMS / "wasap.py", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"2 processes, seed 0: epoch 1 of 1, asynchronous: loss \d.*, test accuracy", done.stdout)
    assert len(lines) == 1
    content = json.loads((tmp_path / "out" / "wasap-fashion_mnist.json").read_text())
    assert content["machine"]["threads"] == 1
    (run,) = content["runs"]
    assert (run["processes"], run["seed"], run["failure"]) == (2, 0, None)
    assert (run["facts"]["rows"], run["facts"]["tested"], run["facts"]["threads"]) == (64, 96, 1)
    correct = 96 * run["epochs"]["accuracy"][-1]
    assert correct == pytest.approx(round(correct), abs=1e-4)
    assert "|  | 2 processes |" in (tmp_path / "out" / "wasap-fashion_mnist.md").read_text()


@pytest.mark.full
def test_a_worker_that_fails_is_named(wasap, tmp_path):
    run = wasap.Run(1, 0)
    wasap.measure(run, wasap.Options(1, None, str(tmp_path), 200.0), print)
    assert f"BlockSparseError: folder: expected {tmp_path}/train-images-idx3-ubyte" in run.failure


def measured(wasap, monkeypatch, script, patience=60.0):
    monkeypatch.setattr(wasap, "command", lambda run, options: [sys.executable, "-c", script])
    run, log = wasap.Run(2, 3), []
    wasap.measure(run, wasap.Options(2, None, None, patience), log.append)
    return run, log


def test_lines_of_other_programs_are_skipped(wasap, monkeypatch):
    lines = [json.dumps({"facts": FACTS}), "a warning", json.dumps({"epoch": epoch(2, "average", 0.875, 1234.5)}), "[]"]
    run, log = measured(wasap, monkeypatch, f"print({chr(10).join(lines)!r})")
    assert run.failure is None
    assert run.facts == FACTS
    assert log == ["2 processes, seed 3: epoch 2 of 2, average: loss 0.5000, test accuracy 87.50 %, 1,234 rows/s"]


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (
            "raise SystemExit('RuntimeError: reset\\n  traceback : Signal 9 (SIGKILL) received by 7')",
            "Signal 9 (SIGKILL)",
        ),
        (f"print({json.dumps({'epoch': epoch(1, 'asynchronous', 0.5, 1.0)})!r})", "it ended before its last epoch"),
        ("pass", "it ended before its last epoch"),
    ],
    ids=["status", "error", "signal", "early", "nothing"],
)
def test_a_run_that_fails(wasap, monkeypatch, script, failure):
    assert failure in measured(wasap, monkeypatch, script)[0].failure


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGTERM")
@pytest.mark.full
def test_a_run_without_output_is_ended_with_its_processes(wasap, monkeypatch, tmp_path):
    # Like torchrun, the script has processes in sessions of their own, and ends them on SIGTERM.
    script = f"""
import pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    child.wait()
finally:
    child.kill()
    child.wait()
"""
    start = time.monotonic()
    run, _ = measured(wasap, monkeypatch, script, patience=6.0)
    assert run.failure == "no output for 6 s"
    assert time.monotonic() - start < 50
    child = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


# -- the report --------------------------------------------------------------------------------------------------------


def cells(markdown, title):
    row = next(line for line in markdown.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_the_report(wasap, tmp_path):
    runs = [
        run_of(wasap, 1, 0, 0.89, [100, 110, 200, 200]),
        run_of(wasap, 4, 0, 0.88, [200, 210, 500, 500]),
        run_of(wasap, 1, 1, 0.88, [100, 100, 200, 200]),
        run_of(wasap, 4, 1, 0.885, [300, 300, 700, 700]),
        wasap.Run(2, 0, failure="exit status 3"),
    ]
    runs.append(run_of(wasap, 2, 1, 0.87, [150, 150, 400, 400]))
    runs[-1].synchronous = True
    for each in runs[-1].epochs[:2]:
        each["phase"] = "synchronous"
    paths = wasap.write(runs, wasap.Options(3, None, None, 60.0), machine(), tmp_path / "new")
    assert [path.name for path in paths] == [f"wasap-fashion_mnist.{kind}" for kind in ("json", "md", "png")]
    assert json.loads(paths[0].read_text())["runs"][4]["failure"] == "exit status 3"
    markdown = paths[1].read_text()
    assert "|  | 1 process | 4 processes | 2 processes, WASSP |" in markdown
    for title, expected in {
        "cores per process": ["1", "0.5", "1"],
        "seeds": ["2", "2", "1"],
        "epochs": ["3", "3", "3"],
        "of them in the first phase": ["2", "2", "2"],
        "density": ["4.5 %", "4.5 %", "4.5 %"],
        "test accuracy, %": ["88.50 ± 0.71", "88.25 ± 0.35", "87.00"],
        "test accuracy, against 1 process": ["0.00 ± 0.00", "-0.25 ± 1.06", "-1.00"],
        "rows per second of all, first phase": ["102 ± 4", "252 ± 67", "150"],
        "rows per second of all, second phase": ["200 ± 0", "600 ± 141", "400"],
        "rows per second against 1 process, second phase": ["1.00 ± 0.00", "3.00 ± 0.71", "2.00"],
    }.items():
        assert cells(markdown, title) == expected
    assert "| 2 processes, seed 0 | exit status 3 |" in markdown


def test_the_committed_table_is_drawn_from_its_json(wasap, tmp_path):
    path = Path(__file__).parents[2] / "docs" / "results" / "wasap-fashion_mnist.json"
    (tmp_path / path.name).write_bytes(path.read_bytes())
    wasap.draw(tmp_path / path.name)
    assert (tmp_path / "wasap-fashion_mnist.md").read_text() == path.with_suffix(".md").read_text()


def test_a_report_of_failures_only(wasap, tmp_path):
    runs = [wasap.Run(2, 0, failure="exit status 3")]
    markdown = wasap.write(runs, wasap.Options(3, None, None, 60.0), machine(), tmp_path)[1].read_text()
    assert "| 2 processes, seed 0 | exit status 3 |" in markdown


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_an_old_report_is_not_overwritten(wasap, tmp_path, monkeypatch, capsys):
    write(tmp_path)
    (tmp_path / "wasap-fashion_mnist.json").write_text("{}")
    run = bench_parts.script(wasap, monkeypatch, capsys)
    status, output, _ = run("--data-dir", tmp_path, "--processes", 1, "--epochs", 1, "--out", tmp_path)
    assert (status, "out: expected a folder without another report" in output) == (1, True), output
    assert (tmp_path / "wasap-fashion_mnist.json").read_text() == "{}"


def parsed(wasap, folder, **changes):
    """Return the runs and options of a command line with these changes."""
    arguments = {"epochs": 1, "patience": 60.0, "processes": "1,2,4", "seeds": "0", "wassp": False, "rows": None}
    arguments |= {"data_dir": str(folder), "threads": False, "rates": "1"}
    return wasap.checked(argparse.Namespace(**arguments | changes))


def test_runs_of_a_command_line(wasap, tmp_path, monkeypatch):
    write(tmp_path)
    runs, options = parsed(wasap, tmp_path)
    assert [(run.processes, run.seed) for run in runs] == [(1, 0), (2, 0), (4, 0)]
    assert options.epochs == 1
    monkeypatch.setattr(wasap, "cores", lambda: 2)
    runs, _ = parsed(wasap, tmp_path, threads=True)
    assert [run.contender for run in runs] == ["1 process", "1 process, 2 threads", "2 processes", "4 processes"]
    runs, _ = parsed(wasap, tmp_path, processes="1,2", wassp=True, rates="1,0.5", seeds="3,4")
    assert len({id(run.epochs) for run in runs}) == len(runs)
    several = ["2 processes", "2 processes, rate x0.5", "2 processes, WASSP", "2 processes, WASSP, rate x0.5"]
    expected = [(name, seed) for seed in (3, 4) for name in ("1 process", *several)]
    assert [(run.contender, run.seed) for run in runs] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs: expected a positive int, got 0"),
        ({"patience": 0.0}, "patience: expected a positive number of seconds, got 0"),
        ({"patience": float("nan")}, "patience: expected a positive number of seconds, got nan"),
        ({"processes": "1,1"}, "processes: expected different ints of 1 or more, with commas between, got '1,1'"),
        ({"processes": "0"}, "processes: expected different ints of 1 or more"),
        ({"processes": "1,"}, "processes: expected different ints of 1 or more"),
        ({"seeds": "-1"}, "seeds: expected different ints of 0 or more"),
        ({"rows": 3}, "rows: expected 4, one for each process, to 30, got 3"),
        ({"rows": 31}, "rows: expected 4, one for each process, to 30, got 31"),
        ({"processes": "64"}, "rows: expected 64, one for each process, to 30, got 30"),
        ({"rates": "1,0"}, "rates: expected different positive numbers, with commas between, got 1,0"),
        ({"rates": "1,nan"}, "rates: expected different positive numbers"),
        ({"rates": "half"}, "rates: expected different positive numbers"),
        ({"threads": True, "processes": "2"}, "threads: expected two cores or more, and one process among the runs"),
        ({"processes": "1", "wassp": True}, "processes: expected several somewhere, for --wassp and --rates, got 1"),
        ({"processes": "1", "rates": "2"}, "processes: expected several somewhere, for --wassp and --rates, got 1"),
        ({"data_dir": "nowhere"}, "folder: expected nowhere/train-images-idx3-ubyte"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(wasap, tmp_path, changes, message):
    write(tmp_path)
    with pytest.raises(BlockSparseError, match=re.escape(message)):
        parsed(wasap, tmp_path, **changes)
