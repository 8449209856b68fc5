"""Measuring recurrent networks: every cell right and timed, peers that compute the same, what is refused, written."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

import bench_parts
import blocksparse as bs
import command
from blocksparse_lab.bench import report
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.linear import LinearBench
from blocksparse_lab.bench.lstm import PASSES, PEERS, LstmBench, LstmCase, LstmSpec
from blocksparse_lab.models.char_lm import CELLS, CharLMConfig
from targets import lstm as lstm_targets
from targets import memory
from targets.gpu import GpuTargets

CONFIG = CharLMConfig(width=64, embedding=8, block_size=8, pattern="barabasi_albert", m=2, depth=2)
SPEC = LstmSpec(CONFIG, batch=2, seq=3)
QUICK = LstmBench(rounds=1, budget=0.01)


def result(spec=SPEC, refused=(), **seconds):
    """A result whose contenders took these seconds."""
    facts = {"device": "cpu", "widths": dict.fromkeys(seconds, 48), "parameters": dict.fromkeys(seconds, 10**6)}
    return bench_parts.timed(spec, spec.config.layout, refused, facts, **seconds)


def torch_runs(dtype):
    """Whether PyTorch's own LSTM runs here: autocast's, oneDNN's of bfloat16, needs AVX-512."""
    try:
        with torch.autocast("cpu", enabled=dtype == "bfloat16"):
            torch.nn.LSTM(8, 16)(torch.zeros(1, 1, 8))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_is_right_and_timed(cell, dtype):
    for pass_ in PASSES:
        spec = replace(SPEC, config=replace(CONFIG, cell=cell), dtype=dtype, pass_=pass_)
        found = QUICK.run(spec, ["dense", "torch"])
        assert found.peers == (["dense", "torch"] if cell == "lstm" and torch_runs(dtype) else ["dense"])
        assert found.speedup("dense").median > 0
        assert found.tokens_per_second() > 0
        assert set(found.errors) == {"scores", "gradients"}
        assert json.dumps(found.as_dict())
    if cell != "lstm":
        assert found.refused == {"torch": f"torch.nn has no such cell as {cell}"}


def test_peers_are_of_equal_parameters_or_of_the_same_width():
    found = LstmBench(PEERS, rounds=1, budget=0.01).run(replace(SPEC, config=replace(CONFIG, width=256, block_size=32)))
    ours, width = found.facts["parameters"][OURS], found.facts["widths"]
    assert width["dense-wide"] == width["torch-wide"] == width[OURS] == 256
    assert width["dense"] == width["torch"] < 256
    assert found.facts["parameters"]["dense"] == pytest.approx(ours, rel=0.05)
    assert LstmCase(replace(SPEC, narrow=40), seed=0).config("torch").width == 40


def test_pytorchs_model_is_the_dense_one():
    problem = LstmCase(SPEC, seed=0)
    ours, theirs = problem.model("dense-wide"), problem.model("torch-wide")
    ours_found, theirs_found = problem._results(ours), problem._results(theirs)
    assert isinstance(theirs.recurrent, torch.nn.LSTM)
    assert ours_found.keys() == theirs_found.keys()
    for name, found in ours_found.items():
        torch.testing.assert_close(found, theirs_found[name], rtol=1e-4, atol=1e-6)


def test_a_step_trains():
    problem = LstmCase(SPEC, seed=0)
    step = problem.call(OURS)
    losses = [float(step()) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_a_wrong_model_stops_the_run(monkeypatch):
    right = LstmCase._results

    def results(problem, model):
        found = right(problem, model)
        exact = next(model.parameters()).dtype == torch.float64
        return found if exact else {**found, "outlet.bias": found["outlet.bias"] + 1}

    monkeypatch.setattr(LstmCase, "_results", results)
    with pytest.raises(bs.BlockSparseError, match=r"gradient of outlet.bias .* of at most 1e-05 against float64, got"):
        QUICK.run(SPEC)


def test_a_peer_without_memory_is_recorded(monkeypatch):
    right = LstmCase.model

    def model(problem, name):
        if name == "dense-wide":
            raise RuntimeError("out of\nmemory")
        return right(problem, name)

    monkeypatch.setattr(LstmCase, "model", model)
    found = QUICK.run(SPEC, ["dense-wide", "dense"])
    assert found.refused == {"dense-wide": "out of memory"}
    assert found.peers == ["dense"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch: expected a positive int"),
        ({"seq": 1.5}, "seq: expected a positive int"),
        ({"dtype": "float16"}, "dtype: expected one of float32, bfloat16"),
        ({"pass_": "dgrad"}, "pass: expected one of train, inference"),
    ],
)
def test_bad_specs(changes, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        replace(SPEC, **changes)


# -- targets -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_all_rows_come_in_small():
    rows = list(lstm_targets.rows(quick=True))
    targets = [row.target for row in rows if row.target != "-"]
    assert targets == [
        "<= 1.15x dense of equal parameters",
        *[">= 20x torch.nn.LSTM of the same width"] * 2,
        *["<= 1x torch.nn.LSTM, give or take 1%"] * 2,
        *[">= 1x torch's LSTM of as many parameters"] * 2 * len(lstm_targets.FEW),
        "a process below 8 GiB",
    ]
    assert len(rows) == 11 + 2 * len(lstm_targets.FEW)
    assert all((row.met is None) == (row.target == "-") for row in rows)
    memory = rows[-1].details
    assert 2**26 < memory["peak"] < 2**32
    assert len(memory["losses"]) == len(memory["seconds"]) + 1
    assert json.dumps([row.details for row in rows])


def test_what_meets_a_target(monkeypatch):
    found = result(blocksparse=1.2, dense=1.0)
    monkeypatch.setattr(LstmBench, "run", lambda *_: found)
    assert [lstm_targets.equal_row(QUICK, SPEC, target).met for target in (1.15, 1.2, None)] == [False, True, None]
    assert lstm_targets.equal_row(QUICK, SPEC, 1.15).measured.startswith("1.20x (1.20-1.20) dense of width 48, 1 M")


def test_a_layer_and_pytorchs_have_the_same_weights():
    ours = bs.nn.LSTM(64, 64, density=0.3, block_size=16)
    x = torch.randn(5, 3, 64)
    torch.testing.assert_close(lstm_targets.to_torch_lstm(ours)(x)[0], ours(x)[0], rtol=1e-4, atol=1e-6)


def test_a_layer_that_differs_stops_the_run(monkeypatch):
    monkeypatch.setattr(lstm_targets, "to_torch_lstm", lambda ours: torch.nn.LSTM(ours.input_size, ours.hidden_size))
    with pytest.raises(bs.BlockSparseError, match=r"y of LSTM\(.* L2 error of .* against torch\.nn\.LSTM"):
        lstm_targets.dense_row(QUICK, SPEC, 32)


def test_a_training_that_dies_is_not_measured(monkeypatch):
    monkeypatch.setattr(memory.sys, "executable", "/bin/false")
    row = lstm_targets.memory_row(SPEC)
    assert (row.met, row.measured) == (None, "not measured: measure_peak: expected a run to its end, got status 1")


def test_jobs_for_a_gpu():
    jobs = {job.work: job for job in GpuTargets(None).jobs() if "language model" in job.work}
    assert [job.target for job in jobs.values()] == [">= 0.8x torch", ">= 10x torch-wide"]
    assert all("width 18432, Barabasi-Albert m = 8" in work for work in jobs)
    assert {target.spec.narrow for target in lstm_targets.GPU_REACH} == {3168}
    reach = GpuTargets(LinearBench(rounds=1, budget=0.01), shrink=64)
    rows = [row for job in reach.jobs() if "language model" in job.work for row in job.run()]
    assert len(rows) == 2
    if not torch_runs("bfloat16"):
        assert all((row.met, row.measured[:12]) == (None, "not measured") for row in rows)
        return
    assert "torch of width 49" in rows[0].measured
    assert "torch-wide of width 288" in rows[1].measured
    assert all(isinstance(row.met, bool) for row in rows)


# -- the command -----------------------------------------------------------------------------------------------------


run = partial(command.run, "bench", "lstm", columns=200)


@pytest.mark.parametrize(
    "pattern",
    [
        "random",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("barabasi_albert", "watts_strogatz", "block_diagonal", "dense")
        ),
    ],
)
def test_the_command_writes_what_it_says(tmp_path, pattern):
    pytest.importorskip("matplotlib")
    tiny = ["--width", 96, "--block-size", 8, "--batch", 2, "--seq", 3, "--rounds", 1, "--budget", 0.01]
    tiny += ["--m", "4,2", "--densities", "0.5,0.1", "--pattern", pattern, "--against", "dense,dense-wide,torch"]
    out = run(*tiny, "--out", tmp_path).stdout
    assert "train float32, lstm of width 96" in out
    assert "inference float32" in out
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    assert content["what"] == "block-sparse recurrent language models"
    count = 1 if pattern == "dense" else 2
    assert [found["pass"] for found in content["results"]] == ["train"] * count + ["inference"] * count
    assert set(content["results"][0]["speedup"]) == {"dense", "dense-wide", "torch"}
    assert len(list(tmp_path.glob("*.png"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cell", "gru"], "cell: expected one of"),
        (["--pattern", "plaid"], "pattern: expected one of"),
        (["--m", "many"], "m: expected ints with commas between, as in 8,4,2, got 'many'"),
        (["--against", "tensorflow"], "against: expected some of"),
        (["--width", 100], "width: expected a multiple of the block"),
        (["--pass", "wgrad"], "pass: expected one of train, inference"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message):
    assert message in run(*arguments, code=1).stderr


def test_the_chart_is_a_png_of_one_result_or_several(tmp_path):
    pytest.importorskip("matplotlib")
    other = replace(SPEC, config=replace(CONFIG, m=1))
    several = [
        result(blocksparse=1.0, dense=1.1, torch=1.2, dense_wide=9.0),
        result(other, blocksparse=0.5, dense=0.6, refused={"torch": "no"}),
    ]
    for some in (several, [result(blocksparse=1.0)]):
        report.write_chart(tmp_path / "r.png", some, "title")
        assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
