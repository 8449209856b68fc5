"""A slice of the fuzz, the cases that it once found, and whether it finds what is planted."""

from __future__ import annotations

import itertools
import json
import secrets
import struct
import time

import pytest
import torch

import blocksparse as bs
from blocksparse.ops import cpu_core
from blocksparse.ops.conv import cpu as conv
from blocksparse.ops.dropout import cpu as dropout
from blocksparse.ops.linear import cpu as linear
from blocksparse.ops.lstm_gates import cpu as gates
from blocksparse.ops.momentum import cpu as momentum
from fuzz import cases, log, run
from fuzz.calls import Calls

pytestmark = pytest.mark.skipif(not bs.backends()["cpu"], reason="the fuzz is of the compiled core")
SEED = 20_26


def indices_of(family: str, seed: int = SEED):
    return (index for index in itertools.count() if cases.draw(seed, index)["family"] == family)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_cases_of(family):
    calls, (often, *_) = Calls(), cases.FAMILIES[family]
    count = max(5, int(4 * often))
    assert run.run_cases(SEED, itertools.islice(indices_of(family), count), calls) == []
    assert calls.total() >= count


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_cases_of_a_fresh_seed(family):
    """A few seconds of the nightly run, in every run of the tests; a fault prints the command that replays it."""
    seed = secrets.randbits(32)
    faults = run.run_cases(seed, itertools.islice(indices_of(family, seed), 40), Calls())
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("case", run.corpus(), ids=lambda case: case.get("why", case["family"]))
def test_what_was_found_once(case):
    assert run.attempt(case, Calls()) is None


SMALL = {"family": "recurrent", "numbers": 1, "input": 2, "hidden": 2, "block": 2, "density": 0.2, "directions": 1,
         "lengths": [2, 1], "packed": False, "dtype": "float64", "threads": 1}  # fmt: skip


@pytest.mark.parametrize("layer", ["SmallWorldLSTM", "MultiplicativeLSTM"])
def test_a_refusal_is_expected_only_for_the_reason_of_the_case(layer):
    case = {**SMALL, "layer": layer}
    assert run.attempt({**case, "refused": "density: 0.2 * 1 rounds to no block"}, Calls()) is None
    for reason in (None, "hidden_size: one unit"):
        assert run.attempt({**case, "refused": reason}, Calls()).startswith("BlockSparseError: density: expected")
    fault = run.attempt({**case, "density": 0.6, "refused": "density: 0.6 * 1 rounds to no block"}, Calls())
    assert fault == "Fault: not refused, density: 0.6 * 1 rounds to no block"


def largest_off(tensor: torch.Tensor) -> None:
    """Its largest number a twentieth larger."""
    if tensor.numel():
        flat = tensor.view(-1)
        flat[flat.abs().nan_to_num().argmax()] *= 1.05


PLANTED = [("linear", linear, "linear"), ("csr", linear, "linear_wgrad"), ("csr", linear, "gradients"),
           ("conv", conv, "conv"), ("conv", conv, "conv_wgrad"), ("gates", gates, "forward"),
           ("gates", gates, "backward"), ("dropout", dropout, "backward"), ("momentum", momentum, "step")]  # fmt: skip


@pytest.mark.parametrize(("family", "module", "name"), PLANTED, ids=lambda value: value if type(value) is str else "")
def test_one_wrong_number_is_found_and_comes_with_the_command_that_replays_it(
    family, module, name, monkeypatch, capsys
):
    right = getattr(module, name)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        found = result if result is not None else kwargs.get("h_out", kwargs.get("grad_pre_out", args[0]))
        tensors = found if isinstance(found, tuple | list) else (found,)
        largest_off(next(tensor for tensor in tensors if tensor is not None))
        return result

    monkeypatch.setattr(module, name, wrong)
    isa = [cpu_core.isa()]
    index = next(index for index in indices_of(family) if run.run_cases(SEED, [index], Calls(isa)))
    (report,) = run.run_cases(SEED, [index], Calls(isa))
    *_, command = report.split("python tests/fuzz ")
    assert run.main(command.split()) == run.FOUND
    assert "FAULT" in capsys.readouterr().out
    monkeypatch.undo()
    assert run.main(command.split()) == 0


def test_a_case_is_said_by_its_seed_and_index():
    first = [cases.draw(7, index) for index in range(200)]
    assert first == [json.loads(json.dumps(cases.draw(7, index))) for index in range(200)]
    assert len({json.dumps(case) for case in first}) == 200


def options(*more: str):
    return run._parser().parse_args([f"--seed={SEED}", "--jobs=2", *more])


WORKER = """
import json, os, pathlib, struct, sys

place, first, step, *_ = json.loads(sys.argv[-1].removeprefix("--worker="))
with open(place + " starts", "a") as file:
    file.write(f"{first} ")
if first == 5:
    pathlib.Path(place).write_bytes(struct.pack("<q", 9))
    os.abort()
sys.exit(STATUS)
"""


@pytest.mark.parametrize("status", [0, run.FOUND, 1])
def test_a_process_that_dies_is_reported_and_another_goes_on_behind_the_case(status, tmp_path, monkeypatch, capsys):
    (tmp_path / "__main__.py").write_text(WORKER.replace("STATUS", str(status)))
    monkeypatch.setattr(run, "HERE", tmp_path)
    given = options("--first=5", f"--log={tmp_path / 'log'}")
    assert run._keep_working(given, tmp_path / "place", 0, time.time() + 60)
    assert f"python tests/fuzz --seed {SEED} --only 9" in capsys.readouterr().out
    assert (tmp_path / "place starts").read_text().split() == ["5", "11"]
    page = log.summary(tmp_path / "log")
    assert "reports: 1." in page
    assert f"- seed {SEED}, case 9: died with status -6" in page


def test_a_process_that_stays_in_one_case_is_ended(tmp_path, monkeypatch, capsys):
    (tmp_path / "__main__.py").write_text("import sys, time\nif ', 5, ' in sys.argv[-1]: time.sleep(600)")
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "MAX_SECONDS", 0.5)
    assert run._keep_working(options("--first=5"), tmp_path / "place", 0, time.time() + 60)
    assert "no end within 0.5 s" in capsys.readouterr().out


def test_before_each_case_a_process_writes_which(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.write_bytes(bytes(8))
    seen = []

    def attempt(case, calls):
        (at,) = struct.unpack("<q", place.read_bytes())
        assert case == cases.draw(SEED, at)
        seen.append(at)
        calls.counts["an op", "an isa", "float32"] += 1

    monkeypatch.setattr(run, "attempt", attempt)
    worker = json.dumps([str(place), 4, 3, 5, time.time() + 60])
    assert run._work(options(f"--worker={worker}", f"--log={tmp_path / 'log'}")) == 0
    assert seen == [4, 7, 10, 13, 16]
    page = log.summary(tmp_path / "log")
    assert "5 calls in 0.0 hours of a process, without sanitizers: reports: 0." in page
    assert "| an op | 5 | 5 |" in page
