"""The benches: alternating timing, the check before it, results, files, and the commands."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import bench_parts
import blocksparse as bs
import command
from blocksparse.measure import Samples, alternate
from blocksparse_lab import machine
from blocksparse_lab.bench import linear, report
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.conv import ConvBench, ConvCase
from blocksparse_lab.bench.conv_specs import LAYERS, ConvSpec
from blocksparse_lab.bench.conv_specs import REACH as CONV_REACH
from blocksparse_lab.bench.linear import PEERS, LinearBench, LinearCase
from blocksparse_lab.bench.linear_specs import DTYPES, PASSES, REACH, LinearSpec
from blocksparse_lab.bench.lstm import LstmSpec
from blocksparse_lab.models.char_lm import CharLMConfig

pytestmark = pytest.mark.usefixtures("any_backend")

LINEAR = LinearSpec(64, 96, tokens=10, block=8, density=0.3)
CONV = ConvSpec(32, 48, size=6, images=2, block=8, density=0.4)
LSTM = LstmSpec(CharLMConfig(width=64, embedding=8, block_size=8, pattern="barabasi_albert", m=2, depth=2), 2, 3)
BENCHES = {LinearSpec: LinearBench, ConvSpec: ConvBench}


# -- timing --------------------------------------------------------------------------------------------------------


class Clock:
    """A clock for calls that return their name and seconds; it logs the name and the repeats of each timing."""

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


def test_slow_peer_skips_rounds_and_budget_ends_them():
    calls = {"ours": lambda: ("ours", 1e-3), "fast": lambda: ("fast", 0.25), "slow": lambda: ("slow", 5.0)}
    samples = alternate(calls, rounds=100, budget=3, clock=Clock())
    assert [samples.time(name).count for name in ("slow", "fast", "ours")] == [1, 4, 4]
    assert samples.ratio("slow", "ours").median == pytest.approx(5000)


def test_calls_have_one_round_without_a_budget():
    samples = alternate({"a": lambda: ("a", 1.0), "b": lambda: ("b", 2.0)}, rounds=3, budget=0, clock=Clock())
    assert samples.seconds == {"a": [1.0], "b": [2.0]}


def test_ratio_is_per_round():
    # The machine is half as fast in the second round, which the ratio ignores.
    samples = Samples({"ours": [1.0, 2.0, 1.0], "theirs": [3.0, 6.0, math.nan]}, {})
    assert samples.ratio("theirs", "ours").median == 3
    assert samples.ratio("theirs", "ours").count == 2


# -- cases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        *((spec, {"dtype": dtype}) for spec in (LINEAR, CONV) for dtype in DTYPES),
        *((LINEAR, {"density": density}) for density in (0, 1)),
        *((CONV, changes) for changes in ({"stride": 2}, {"kernel": 1, "padding": 0}, {"density": 0})),
    ],
    ids=str,
)
@pytest.mark.parametrize("pass_", PASSES)
def test_every_pass_is_correct_and_timed(pass_, spec, changes):
    kind = BENCHES[type(spec)]
    result = kind(kind.kind.peers, rounds=2, budget=0.01).run(replace(spec, pass_=pass_, **changes))
    assert {*result.peers, *result.refused} == set(kind.kind.peers)
    assert "dense" in result.peers
    y = {"y"} if pass_ == "train" and kind is LinearBench else set()
    assert set(result.errors) == {*linear.RESULTS[pass_], *y}
    assert result.time().median > 0
    assert result.speedup("dense").median > 0
    assert json.dumps(result.as_dict())
    if kind is ConvBench:
        assert result.peers == ["dense"]
        assert "block-diagonal" in result.refused["grouped"]


@pytest.mark.parametrize("pass_", PASSES)
def test_grouped_convolution_is_the_block_diagonal_one(pass_):
    spec = ConvSpec(32, 32, size=6, images=2, block=8, pattern="block-diagonal", dtype="float64", pass_=pass_)
    case = ConvCase(spec, seed=0)
    ours, theirs = case.call(OURS)(), case.call("grouped")()
    if pass_ == "forward":
        pairs = [(ours, theirs)]
    elif pass_ == "dgrad":
        pairs = [(ours.movedim(-1, 1), theirs[0])]
    elif pass_ == "wgrad":
        pairs = [(ours.flatten(0, 1), theirs[1])]
    else:
        pairs = [(ours[0], theirs[0]), (ours[1].flatten(0, 1), theirs[1])]
    for pair in pairs:
        torch.testing.assert_close(*pair)


def test_peers_refusals_keep_pytorchs_words():
    refused = {
        pass_: LinearBench(PEERS, rounds=1, budget=0.01).run(replace(LINEAR, pass_=pass_)).refused
        for pass_ in ("dgrad", "wgrad")
    }
    assert "not implemented" in refused["dgrad"]["torch-bsr"]
    assert "not implemented" in refused["dgrad"]["bsr-matmul"]
    assert "the whole dense one" in refused["wgrad"]["torch-bsr"]


def test_peers_compute_the_same():
    case = LinearBench().case(replace(LINEAR, dtype="float64"))
    for name in ("torch-bsr", "bsr-matmul"):
        torch.testing.assert_close(case.call(name)(), case.call(OURS)())


@pytest.mark.parametrize("spec", [*(replace(LINEAR, pass_=pass_) for pass_ in PASSES), CONV], ids=str)
def test_wrong_result_stops_the_run(spec, monkeypatch):
    kind = BENCHES[type(spec)]
    right = kind.kind.call

    def spoiled(case, name, copy=0):
        def call():
            results = right(case, name, copy)()
            last = results if torch.is_tensor(results) else results[-1]
            last[(-1,) * last.dim()] += 0.1
            return results

        return call if name == OURS else right(case, name, copy)

    monkeypatch.setattr(kind.kind, "call", spoiled)
    with pytest.raises(bs.BlockSparseError, match=r"relative L2 error of at most 2e-06 against float64, got"):
        kind(rounds=1).run(spec)


@pytest.mark.parametrize("pass_", ["forward", "dgrad", "wgrad"])
def test_sampled_check_includes_the_last_elements(pass_, monkeypatch):
    monkeypatch.setattr(linear, "CHECKED_WEIGHT", 2 * 8 * 96)
    monkeypatch.setattr(linear, "CHECKED_TOKENS", 3)
    case = LinearBench().case(replace(LINEAR, pass_=pass_, density=1))
    result = case.call(OURS)().clone()
    monkeypatch.setattr(LinearCase, "call", lambda *_: lambda: result)
    case.check(seed=0)
    result.view(-1)[-1] += 1
    with pytest.raises(bs.BlockSparseError, match="relative L2 error"):
        case.check(seed=0)


def test_inputs_are_random_and_shared_by_specs_of_one_shape():
    bench = LinearBench()
    first, second = bench.case(LINEAR), bench.case(replace(LINEAR, density=0.6))
    assert first.x is second.x
    assert first.inputs.weight() is second.inputs.weight()
    assert all((tensor != 0).all() for tensor in (first.x, first.grad, first.values, first.inputs.weight()))
    assert bench.case(replace(LINEAR, tokens=11)).x.shape == (11, 96)


BAD_SPECS = [
    (LINEAR, {"pass_": "sideways"}, "pass: expected one of forward, dgrad, wgrad, train, got 'sideways'"),
    (LINEAR, {"dtype": "int8"}, "dtype: expected one of float32"),
    (LINEAR, {"density": 1.5}, "density: expected a number from 0 to 1, got 1.5"),
    (LINEAR, {"tokens": 0}, "tokens: expected a positive int, got 0"),
    (LINEAR, {"block": 7}, "out_features: expected a multiple of the block size 7, got 64"),
    (LINEAR, {"pattern": "star"}, "pattern: expected one of random, barabasi-albert, got 'star'"),
    (CONV, {"size": 0}, "size: expected a positive int"),
    (CONV, {"out_channels": 30}, "out_channels: expected a multiple of the block size 8"),
    (CONV, {"padding": -1}, "padding: expected"),
    (CONV, {"kernel": 9}, "kernel: expected"),
    (CONV, {"density": 2}, "density: expected"),
    (CONV, {"dtype": "int8"}, "dtype: expected one of"),
    (CONV, {"pass_": "sideways"}, "pass: expected one of"),
    (CONV, {"pattern": "plaid"}, "pattern: expected one of"),
    (LSTM, {"batch": 0}, "batch: expected a positive int"),
    (LSTM, {"seq": 1.5}, "seq: expected a positive int"),
    (LSTM, {"dtype": "float16"}, "dtype: expected one of float32, bfloat16"),
    (LSTM, {"pass_": "dgrad"}, "pass: expected one of train, inference"),
]


@pytest.mark.parametrize(("spec", "changes", "message"), BAD_SPECS, ids=str)
def test_bad_specs_raise(spec, changes, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        replace(spec, **changes)


@pytest.mark.parametrize(
    "arguments", [{"against": ["cublas"]}, {"rounds": 0}, {"budget": 0}, {"seed": 2**63}, {"device": "abacus"}], ids=str
)
def test_bad_arguments_of_a_bench_raise(arguments):
    with pytest.raises(bs.BlockSparseError, match="expected"):
        LinearBench(**arguments)


def test_named_shapes_and_targets():
    assert all(peer in PEERS for target in REACH.values() for peer, _ in target.ratios)
    assert {"reach", "resnet50-conv4-3x3", "pixelcnn-16"} <= set(LAYERS)
    assert all(target.spec.block == 32 for target in CONV_REACH)


# -- files ---------------------------------------------------------------------------------------------------------


def test_json_has_the_machine_and_every_number(tmp_path):
    results = [LinearBench(PEERS, rounds=3, budget=0.01).run(replace(LINEAR, dtype="bfloat16"))]
    report.write_results(tmp_path / "r.json", results, "products", rounds=3)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["settings"] == {"rounds": 3}
    facts = {"cpu", "features", "isa", "threads", "torch", "numpy", "python", "blocksparse", "commit", "dirty", "date"}
    assert facts <= set(content["machine"])
    (case,) = content["results"]
    assert (case["pass"], case["dtype"]) == ("forward", "bfloat16")
    assert case["errors"]["y"] <= case["error_bound"]
    packed = {"onednn"} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
    assert set(case["seconds"]) == {OURS, "dense"} | packed
    assert case["speedup"]["dense"].keys() == {"median", "low", "high", "count"}
    assert set(case["refused"]) == set(PEERS) - {"dense"} - packed


def timed(spec, refused=(), **seconds):
    return bench_parts.timed(spec, spec.layout(), refused, {"device": "cpu"}, **seconds)


@pytest.mark.parametrize(
    "results",
    [
        [
            timed(replace(LINEAR, density=density), blocksparse=1.0, dense=2.0, csr_matmul=9.0)
            for density in (1, 0.3, 0)
        ],
        [timed(replace(LINEAR, density=0), blocksparse=1.0, dense=2.0)],
        [timed(LINEAR, blocksparse=1.0)],
        [
            timed(LINEAR, blocksparse=1.0, dense=1.1, torch=1.2, dense_wide=9.0),
            timed(replace(LINEAR, density=0.5), blocksparse=0.5, dense=0.6, refused={"torch": "no"}),
        ],
    ],
    ids=["densities", "no blocks", "no peers", "widths"],
)
def test_chart_is_a_png(tmp_path, results):
    pytest.importorskip("matplotlib")
    report.write_chart(tmp_path / "r.png", results, "title")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_chart_without_matplotlib_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(bs.BlockSparseError, match="pip install matplotlib"):
        report.write_chart(tmp_path / "r.png", [], "title")


def test_commit_is_that_of_the_packages_checkout(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    source, installed = (tmp_path / folder / "blocksparse" / "__init__.py" for folder in (".", "env"))
    for file in (source, installed):
        file.parent.mkdir(parents=True)
        file.touch()
    (tmp_path / ".gitignore").write_text("env/\n")
    for arguments in (["init"], ["add", "."], ["commit", "-m", "one"]):
        git(*arguments)

    monkeypatch.setattr(machine, "PACKAGE", source.parent)
    commit, dirty = machine.checkout()
    assert len(commit) == 40
    assert dirty is False
    source.write_text("changed")
    assert machine.checkout() == (commit, True)
    monkeypatch.setattr(machine, "PACKAGE", installed.parent)
    assert machine.checkout() == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert machine.checkout() == (None, None)


def test_machine_facts_are_json():
    facts = json.loads(json.dumps(machine.machine()))
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cpu"]


@pytest.mark.parametrize(
    ("family", "flags", "name"),
    [(25, "avx2 avx512f", "AMD EPYC, Zen 4"), (25, "avx2", "AMD EPYC"), (26, "avx2 avx512f", "AMD EPYC")],
)
def test_cpu_name_tells_zen_4_from_zen_5(family, flags, name):
    processor = f"vendor_id\t: AuthenticAMD\ncpu family\t: {family}\nmodel name\t: AMD EPYC\npower management:\n"
    cpuinfo = "\n".join(f"processor\t: {i}\n{processor}flags\t\t: {flags}\n" for i in range(2))
    assert machine.name_in_cpuinfo(cpuinfo) == name
    assert machine.name_in_cpuinfo("processor\t: 0\n") is None


# -- programs ------------------------------------------------------------------------------------------------------

QUICK = ["--rounds", 1, "--budget", 0.01]
CONV2D = ["conv2d", *QUICK, "--layer", "resnet50-conv5-3x3", "--images", 1, "--densities", "0.1"]
TINY_LSTM = ["lstm", *QUICK, "--width", 96, "--block-size", 8, "--batch", 2, "--seq", 3]
TINY_LSTM += ["--m", "4,2", "--densities", "0.5,0.1", "--against", "dense,dense-wide,torch"]
FULL = ("barabasi_albert", "watts_strogatz", "random", "block_diagonal", "dense")
run = partial(command.run, "bench", columns=200)


@pytest.mark.parametrize("pattern", ["random", "block-diagonal"])
def test_conv2d_command_writes_results(tmp_path, pattern):
    out = run(*CONV2D, "--pass", "forward,wgrad", "--pattern", pattern, "--out", tmp_path).stdout
    assert "forward float32, 512x512, 3x3 on 7x7" in out
    check_files(tmp_path, "block-sparse 2-D convolutions", ["forward", "wgrad"], 2 if pattern == "random" else 0)


@pytest.mark.parametrize("pattern", ["random_diagonal", *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_lstm_command_writes_results(tmp_path, pattern):
    pytest.importorskip("matplotlib")
    out = run(*TINY_LSTM, "--pattern", pattern, "--out", tmp_path).stdout
    assert "train float32, lstm of width 96" in out
    assert "inference float32" in out
    count = 1 if pattern == "dense" else 2
    passes = ["train"] * count + ["inference"] * count
    results = check_files(tmp_path, "block-sparse recurrent language models", passes, 2)
    assert set(results[0]["speedup"]) == {"dense", "dense-wide", "torch"}


def check_files(folder, title, passes, charts):
    (path,) = folder.glob("*.json")
    content = json.loads(path.read_text())
    assert content["what"] == title
    assert [result["pass"] for result in content["results"]] == passes
    assert len(list(folder.glob("*.png"))) == charts
    return content["results"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["conv2d", "--layer", "alexnet"], "layer: expected one of"),
        (["conv2d", "--against", "winograd"], "against: expected some of"),
        (["lstm", "--cell", "gru"], "cell: expected one of"),
        (["lstm", "--pattern", "plaid"], "pattern: expected one of"),
        (["lstm", "--m", "many"], "m: expected ints with commas between, as in 8,4,2, got 'many'"),
        (["lstm", "--against", "tensorflow"], "against: expected some of"),
        (["lstm", "--width", 100], "width: expected a multiple of the block"),
        (["lstm", "--pass", "wgrad"], "pass: expected one of train, inference"),
    ],
)
def test_bad_options_end_in_one_line(arguments, message):
    assert message in run(*arguments, code=1).stderr


@pytest.mark.full
def test_cpu_targets_run_on_small_shapes():
    if not bs.backends()["cpu"]:
        pytest.skip("the targets are of the compiled core")
    script = bench_parts.PROGRAMS / "reach.py"
    wide = {**os.environ, "COLUMNS": "300"}  # so that no line of a table wraps
    done = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True, env=wide)
    assert done.returncode == 0, done.stderr
    assert "a dense weight is" in done.stdout  # the last row of the linear op
    assert "block-diagonal" in done.stdout
