"""Runs of extreme networks: their records, refusals and files."""

import json
import mmap
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import bench_parts
import blocksparse as bs
import extreme
from extreme import ExtremeRun, Line, Phases, RunResult

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of 66,000 neurons in this process, and its output."""
    lines = []
    return extreme.train(ExtremeRun(66_000, rows=16), tmp_path_factory.mktemp("run"), lines.append), lines


def test_run_is_recorded(small):
    found, lines = small
    assert found.neurons == pytest.approx(66_000, abs=4)
    assert found.connections == pytest.approx(ExtremeRun(66_000).connections, rel=0.05)
    assert set(found.peak) == set(extreme.PHASES)
    assert all(found.peak[phase] >= found.resident[phase] > 2**26 for phase in extreme.PHASES)
    assert found.most == max(found.peak.values())
    assert all(found.seconds[phase] > 0 for phase in (*extreme.PHASES, "epoch"))
    assert found.seconds["epoch"] == 4 * found.seconds["train"] + found.seconds["evolve"]
    assert len(found.losses) == len(found.held_out) == 2
    assert f"{found.connections:,} connections" in lines[0]
    assert found == RunResult(**json.loads(json.dumps(asdict(found))))


def test_inner_phase_has_its_own_peak():
    phases = Phases()

    # Not from Python's allocator, which may give memory that this process has used before.
    with phases.phase("outer"), phases.phase("inner"), mmap.mmap(-1, 200 << 20) as memory:
        for page in range(0, 200 << 20, mmap.PAGESIZE):
            memory[page] = 1
    assert phases.peak["inner"] - phases.peak["outer"] > 100 << 20


@pytest.mark.full
def test_run_in_its_own_process(tmp_path):
    spec, lines = ExtremeRun(66_000, rows=8, epochs=1), []
    found = extreme.measure(spec, tmp_path, lines.append)
    assert found.run == asdict(spec)
    assert len(lines) >= 2
    assert not list(tmp_path.iterdir())


def test_too_little_memory_and_dead_processes_raise(tmp_path, monkeypatch):
    monkeypatch.setattr(extreme, "available_memory", lambda: 3 << 30)
    wanted = r"memory: expected 7.5 GiB free for 99,934,466 connections, or --force, got 3.0 GiB"
    with pytest.raises(bs.BlockSparseError, match=wanted):
        extreme.measure(ExtremeRun(50_000_000), tmp_path)
    monkeypatch.setattr(extreme.sys, "executable", "/bin/false")
    with pytest.raises(bs.BlockSparseError, match="66,000 neurons: expected a run to its end, got status 1"):
        extreme.measure(ExtremeRun(66_000, rows=8, epochs=1), tmp_path)


def test_prediction_grows_with_connections():
    assert [ExtremeRun(n).predicted > ExtremeRun(n // 2).predicted for n in extreme.NEURONS] == [True] * 6
    assert ExtremeRun(100_000_000).predicted < 22 << 30
    assert ExtremeRun(50_000_000).predicted < 16 << 30


def found(neurons, connections, most, seconds):
    phases = dict.fromkeys(extreme.PHASES, most)
    times = dict.fromkeys((*extreme.PHASES, "epoch"), seconds)
    run = asdict(ExtremeRun(neurons))
    facts = {"gpu": None, "cpu": "a CPU", "isa": "avx2", "threads": 2, "commit": "0" * 40, "dirty": False}
    facts |= {"torch": "2", "blocksparse": "0"}
    return RunResult(neurons, connections, [1, 2], 1, phases, phases, times, [0.7, 0.6], [50.0, 10.0], run, facts)


def test_table_merges_runs_by_size(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "docs" / "extreme.json"
    for neurons in (4_000_000, 1_000_000, 2_000_000, 1_000_000):
        one = found(neurons, 2 * neurons, 2**28 + 80 * 2 * neurons, neurons / 1e6)
        extreme.write(path, extreme.merged(path, one))
    content = json.loads(path.read_text())
    assert [run["neurons"] for run in content["runs"]] == [1_000_000, 2_000_000, 4_000_000]
    assert content["lines"]["memory"]["slope"] == pytest.approx(80)
    assert content["lines"]["step"]["off"] < 1e-9
    text = path.with_suffix(".md").read_text()
    assert "| peak memory | 80.0 bytes | 0.25 GiB | 0% |" in text
    assert "| 4,000,002 |" not in text
    assert "| 4,000,000 | 8,000,000 |" in text
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_committed_table_matches_its_json(tmp_path, monkeypatch):
    monkeypatch.setattr(extreme, "_draw", lambda *of: None)
    committed = Path(__file__).parents[2] / "docs" / "results" / "extreme.json"
    extreme.write(tmp_path / "extreme.json", extreme.read(committed))
    assert (tmp_path / "extreme.md").read_text() == committed.with_suffix(".md").read_text()


def test_bad_options_end_in_a_line_and_a_status(tmp_path, monkeypatch, capsys):
    run = bench_parts.script(bench_parts.load("extreme"), monkeypatch, capsys)
    (tmp_path / "other.json").write_text('{"runs": [{"x": 1}]}')
    (tmp_path / "file").touch()
    for arguments, message in {
        ("--seeds", "x"): "error: seeds: expected ints of 0 or more",
        ("--neurons", "abc"): "error: neurons: expected a number such as",
        ("--neurons", "100k", "--out", tmp_path / "other.json"): "expected the report of extreme.py",
        ("--neurons", "100k", "--out", tmp_path / "file" / "a.json"): "error: ",
        ("--neurons", "10G", "--out", tmp_path / "a.json"): "GiB free for",
    }.items():
        status, lines, _ = run(*arguments)
        assert (status, message in lines) == (1, True), lines
    assert not (tmp_path / "a.json").exists()


def test_line_reports_its_largest_error():
    line = Line.of([1, 2, 4, 8], [2.0, 4.0, 8.0, 20.0])
    assert 0.05 < line.off < 0.3
    assert not extreme.lines([replace(found(1, 2, 3, 4.0))] * 2)
