"""Benchmarks of recurrent networks: cells are correct and timed, peers compute the same, and the targets."""

import json
from dataclasses import replace

import pytest
import torch

import bench_parts
import blocksparse as bs
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


def torch_runs(dtype):
    """Return whether PyTorch's LSTM runs here: under autocast, oneDNN's in bfloat16 needs AVX-512."""
    try:
        with torch.autocast("cpu", enabled=dtype == "bfloat16"):
            torch.nn.LSTM(8, 16)(torch.zeros(1, 1, 8))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_is_correct_and_timed(cell, dtype):
    for pass_ in PASSES:
        spec = replace(SPEC, config=replace(CONFIG, cell=cell), dtype=dtype, pass_=pass_)
        result = QUICK.run(spec, ["dense", "torch"])
        assert result.peers == (["dense", "torch"] if cell == "lstm" and torch_runs(dtype) else ["dense"])
        assert result.speedup("dense").median > 0
        assert result.tokens_per_second() > 0
        assert set(result.errors) == {"scores", "gradients"}
        assert json.dumps(result.as_dict())
    if cell != "lstm":
        assert result.refused == {"torch": f"torch.nn has no such cell as {cell}"}


def test_peers_have_equal_parameters_or_equal_width():
    result = LstmBench(PEERS, rounds=1, budget=0.01).run(
        replace(SPEC, config=replace(CONFIG, width=256, block_size=32))
    )
    parameters, width = result.facts["parameters"], result.facts["widths"]
    assert width["dense-wide"] == width["torch-wide"] == width[OURS] == 256
    assert width["dense"] == width["torch"] < 256
    assert parameters["dense"] == pytest.approx(parameters[OURS], rel=0.05)
    assert LstmCase(replace(SPEC, narrow=40), seed=0).config("torch").width == 40


def test_pytorchs_model_is_the_dense_one():
    case = LstmCase(SPEC, seed=0)
    ours, theirs = case.model("dense-wide"), case.model("torch-wide")
    assert isinstance(theirs.recurrent, torch.nn.LSTM)
    torch.testing.assert_close(case._results(ours), case._results(theirs), rtol=1e-4, atol=1e-6)


def test_a_step_trains():
    step = LstmCase(SPEC, seed=0).call(OURS)
    losses = [float(step()) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_wrong_gradient_stops_the_run(monkeypatch):
    right = LstmCase._results

    def results(case, model):
        found = right(case, model)
        exact = next(model.parameters()).dtype == torch.float64
        return found if exact else {**found, "outlet.bias": found["outlet.bias"] + 1}

    monkeypatch.setattr(LstmCase, "_results", results)
    with pytest.raises(bs.BlockSparseError, match=r"gradient of outlet.bias .* of at most 1e-05 against float64, got"):
        QUICK.run(SPEC)


def test_peer_that_runs_out_of_memory_is_recorded(monkeypatch):
    right = LstmCase.model

    def model(case, name):
        if name == "dense-wide":
            raise RuntimeError("out of\nmemory")
        return right(case, name)

    monkeypatch.setattr(LstmCase, "model", model)
    result = QUICK.run(SPEC, ["dense-wide", "dense"])
    assert result.refused == {"dense-wide": "out of memory"}
    assert result.peers == ["dense"]


# -- targets -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_all_rows_on_small_sizes():
    rows = list(lstm_targets.rows(quick=True))
    assert [row.target for row in rows if row.target != "-"] == [
        "<= 1.15x dense of equal parameters",
        *[">= 20x torch.nn.LSTM of the same width"] * 2,
        *["<= 1x torch.nn.LSTM, give or take 1%"] * 2,
        *[">= 1x torch's LSTM of as many parameters"] * 2 * len(lstm_targets.FEW),
        "a process below 8 GiB",
    ]
    assert len(rows) == 11 + 2 * len(lstm_targets.FEW)
    assert all((row.met is None) == (row.target == "-") for row in rows)
    details = rows[-1].details
    assert 2**26 < details["peak"] < 2**32
    assert len(details["losses"]) == len(details["seconds"]) + 1
    assert json.dumps([row.details for row in rows])


def test_target_of_equal_parameters(monkeypatch):
    facts = {"widths": {OURS: 64, "dense": 48}, "parameters": {OURS: 10**6, "dense": 10**6}}
    result = bench_parts.timed(SPEC, SPEC.config.layout, facts=facts, blocksparse=1.2, dense=1.0)
    monkeypatch.setattr(LstmBench, "run", lambda *_: result)
    assert [lstm_targets.equal_row(QUICK, SPEC, target).met for target in (1.15, 1.2, None)] == [False, True, None]
    assert lstm_targets.equal_row(QUICK, SPEC, 1.15).measured.startswith("1.20x (1.20-1.20) dense of width 48, 1 M")


def test_layer_and_pytorchs_have_the_same_weights(monkeypatch):
    ours = bs.nn.LSTM(64, 64, density=0.3, block_size=16)
    x = torch.randn(5, 3, 64)
    torch.testing.assert_close(lstm_targets.to_torch_lstm(ours)(x)[0], ours(x)[0], rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(lstm_targets, "to_torch_lstm", lambda ours: torch.nn.LSTM(ours.input_size, ours.hidden_size))
    with pytest.raises(bs.BlockSparseError, match=r"y of LSTM\(.* L2 error of .* against torch\.nn\.LSTM"):
        lstm_targets.dense_row(QUICK, SPEC, 32)


def test_training_that_dies_is_an_unmeasured_row(monkeypatch):
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
