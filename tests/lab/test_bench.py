"""Measuring: the alternation, the check before it, what is recorded, what is written."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blocksparse as bs
from blocksparse.measure import Samples, alternate
from blocksparse_lab import machine
from blocksparse_lab.bench import report
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.linear import PEERS, LinearBench, LinearCase
from blocksparse_lab.bench.linear_specs import DTYPES, PASSES, REACH, LinearSpec

WIDE = {**os.environ, "COLUMNS": "300"}  # of the terminal: no line of a table wraps
SMALL = LinearSpec(64, 96, tokens=10, block=8, density=0.3)


@pytest.fixture(autouse=True)
def backend():
    name = "cpu" if bs.backends()["cpu"] else "reference"
    with bs.use_backend(name):
        yield name


def spec(**changes):
    return LinearSpec(**{**vars(SMALL), **changes})


class Clock:
    """A clock whose calls say how long they took; `log` has the calls that it timed."""

    def __init__(self):
        self.log = []

    def __call__(self, call, repeat):
        name, seconds = call()
        self.log.append((name, repeat))
        return seconds


def test_calls_alternate_and_short_ones_repeat():
    clock = Clock()
    samples = alternate({"a": lambda: ("a", 1e-4), "b": lambda: ("b", 2e-3)}, rounds=3, budget=1e3, clock=clock)
    assert clock.log[-6:] == [("a", 10), ("b", 1)] * 3
    assert samples.repeat == {"a": 10, "b": 1}
    assert samples.ratio("b", "a").median == pytest.approx(20)


def test_a_slow_peer_sits_rounds_out_and_the_last_one_ends_it():
    calls = {"ours": lambda: ("ours", 1e-3), "fast": lambda: ("fast", 0.25), "slow": lambda: ("slow", 5.0)}
    samples = alternate(calls, rounds=100, budget=3, clock=Clock())
    assert samples.time("slow").count == 1
    assert samples.time("fast").count == samples.time("ours").count == 4
    assert samples.ratio("slow", "ours").median == pytest.approx(5000)


def test_ratio_is_taken_round_by_round():
    # The machine is half as fast in the second round: the ratio does not notice.
    samples = Samples({"ours": [1.0, 2.0, 1.0], "theirs": [3.0, 6.0, math.nan]}, {})
    assert samples.ratio("theirs", "ours").median == 3
    assert samples.ratio("theirs", "ours").count == 2


@pytest.mark.parametrize(
    ("dtype", "density"), [*((dtype, 0.3) for dtype in DTYPES), ("float32", 0), ("float32", 1)], ids=str
)
@pytest.mark.parametrize("pass_", PASSES)
def test_every_pass_is_right_and_timed(pass_, dtype, density):
    result = LinearBench(PEERS, rounds=2, budget=0.01).run(spec(pass_=pass_, dtype=dtype, density=density))
    assert {*result.peers, *result.refused} == set(PEERS)
    assert "dense" in result.peers
    results = {"forward": {"y"}, "dgrad": {"grad_x"}, "wgrad": {"grad_values"}, "train": {"y", "grad_x", "grad_values"}}
    assert set(result.errors) == results[pass_]
    assert result.time().median > 0
    assert result.speedup("dense").median > 0


def test_what_pytorch_refuses_is_recorded_with_its_words():
    refused = LinearBench(PEERS, rounds=1, budget=0.01).run(spec(pass_="dgrad")).refused
    assert "not implemented" in refused["torch-bsr"]
    assert "not implemented" in refused["bsr-matmul"]
    refused = LinearBench(PEERS, rounds=1, budget=0.01).run(spec(pass_="wgrad")).refused
    assert "the whole dense one" in refused["torch-bsr"]


def test_peers_compute_the_same_as_we_do(backend):
    bench = LinearBench()
    problem = bench.case(spec(dtype="float64"))
    y = problem.call(OURS)()
    for name in ("torch-bsr", "bsr-matmul"):
        torch.testing.assert_close(problem.call(name)(), y)


@pytest.mark.parametrize("pass_", PASSES)
def test_a_wrong_result_stops_the_run(pass_, monkeypatch):
    right = LinearCase.call

    def wrong(case, name, copy=0):
        call = right(case, name, copy)

        def spoiled():
            results = call()
            (results if torch.is_tensor(results) else results[-1]).view(-1)[-1] += 0.1
            return results

        return spoiled if name == OURS else call

    monkeypatch.setattr(LinearCase, "call", wrong)
    with pytest.raises(bs.BlockSparseError, match=r"relative L2 error of at most 2e-06 against float64, got"):
        LinearBench(rounds=1).run(spec(pass_=pass_))


@pytest.mark.parametrize("pass_", ["forward", "dgrad", "wgrad"])
def test_the_check_of_a_part_sees_the_ends(pass_, monkeypatch):
    from blocksparse_lab.bench import linear

    monkeypatch.setattr(linear, "CHECKED_WEIGHT", 2 * 8 * 96)
    monkeypatch.setattr(linear, "CHECKED_TOKENS", 3)
    problem = LinearBench().case(spec(pass_=pass_, density=1))
    right = problem.call(OURS)().clone()
    monkeypatch.setattr(LinearCase, "call", lambda *_: lambda: right)
    problem.check(seed=0)
    right.view(-1)[-1] += 1
    with pytest.raises(bs.BlockSparseError, match="relative L2 error"):
        problem.check(seed=0)


def test_inputs_are_random_and_shared_by_the_specs_of_a_shape():
    bench = LinearBench()
    first, second = bench.case(spec()), bench.case(spec(density=0.6))
    assert first.x is second.x
    assert first.inputs.weight() is second.inputs.weight()
    assert all((tensor != 0).all() for tensor in (first.x, first.grad, first.values, first.inputs.weight()))
    assert bench.case(spec(tokens=11)).x.shape == (11, 96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pass_": "sideways"}, "pass: expected one of forward, dgrad, wgrad, train, got 'sideways'"),
        ({"dtype": "int8"}, "dtype: expected one of float32"),
        ({"density": 1.5}, "density: expected a number from 0 to 1, got 1.5"),
        ({"tokens": 0}, "tokens: expected a positive int, got 0"),
        ({"block": 7}, "out_features: expected a multiple of the block size 7, got 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_spec_says_what_was_expected(changes, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    "arguments", [{"against": ["cublas"]}, {"rounds": 0}, {"budget": 0}, {"seed": 2**63}, {"device": "abacus"}], ids=str
)
def test_a_wrong_bench_says_what_was_expected(arguments):
    with pytest.raises(bs.BlockSparseError, match="expected"):
        LinearBench(**arguments)


def test_targets_name_known_peers():
    assert all(peer in PEERS for target in REACH.values() for peer, _ in target.ratios)


def test_json_has_the_machine_and_every_number(tmp_path):
    results = [LinearBench(PEERS, rounds=3, budget=0.01).run(spec(dtype="bfloat16"))]
    report.write_results(tmp_path / "r.json", results, "products", rounds=3)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["settings"] == {"rounds": 3}
    facts = {"cpu", "features", "isa", "threads", "torch", "numpy", "python", "blocksparse", "commit", "dirty", "date"}
    assert facts <= set(content["machine"])
    (case,) = content["results"]
    assert case["pass"] == "forward"
    assert case["dtype"] == "bfloat16"
    assert case["errors"]["y"] <= case["error_bound"]
    packed = {"onednn"} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
    assert set(case["seconds"]) == {OURS, "dense"} | packed
    assert case["speedup"]["dense"].keys() == {"median", "low", "high", "count"}
    assert set(case["refused"]) == set(PEERS) - {"dense"} - packed


@pytest.mark.parametrize("densities", [(1, 0.3, 0), (0,)], ids=["some", "no blocks"])
def test_chart_is_a_png(tmp_path, densities):
    pytest.importorskip("matplotlib")
    bench = LinearBench(PEERS, rounds=3, budget=0.01)
    report.write_chart(tmp_path / "r.png", [bench.run(spec(density=density)) for density in densities], "title")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_chart_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(bs.BlockSparseError, match=r"blocksparse-torch\[lab\]"):
        report.write_chart(tmp_path / "r.png", [], "title")


def test_commit_is_of_the_packages_own_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "blocksparse").mkdir()
    source = tmp_path / "blocksparse" / "__init__.py"
    source.touch()
    (tmp_path / ".gitignore").write_text("env/\n")
    installed = tmp_path / "env" / "blocksparse"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    git("init")
    git("add", ".")
    git("commit", "-m", "one")

    monkeypatch.setattr(machine, "PACKAGE", source.parent)
    commit, dirty = machine.checkout()
    assert len(commit) == 40
    assert dirty is False
    source.write_text("changed")
    assert machine.checkout() == (commit, True)
    monkeypatch.setattr(machine, "PACKAGE", installed)
    assert machine.checkout() == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))  # no git at all
    assert machine.checkout() == (None, None)


def test_machine_facts_are_json():
    facts = json.loads(json.dumps(machine.machine()))
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu"]


@pytest.mark.full
def test_the_targets_run_on_small_shapes(backend):
    if backend != "cpu":
        pytest.skip("they are those of the compiled core")
    script = Path(__file__).parents[2] / "benchmarks" / "reach.py"
    done = subprocess.run(
        [sys.executable, str(script), "--quick"], capture_output=True, text=True, check=False, env=WIDE
    )
    assert done.returncode == 0, done.stderr
    assert "a dense weight is" in done.stdout  # the last row of the linear op
    assert "block-diagonal" in done.stdout
