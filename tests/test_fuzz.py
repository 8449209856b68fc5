"""A slice of the fuzz, the cases that it once found, and whether it finds what is planted."""

from __future__ import annotations

import itertools
import json
import os
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


def indices_of(family: str):
    return (index for index in itertools.count() if cases.draw(SEED, index)["family"] == family)


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_cases_of(family):
    calls, (often, *_) = Calls(), cases.FAMILIES[family]
    count = max(5, int(4 * often))
    assert run.run_cases(SEED, itertools.islice(indices_of(family), count), calls) == []
    assert calls.total() >= count


@pytest.mark.parametrize("case", run.corpus(), ids=lambda case: case.get("why", case["family"]))
def test_what_was_found_once(case):
    assert run.attempt(case, Calls()) is None


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


DYING = """
import importlib.util, os
spec = importlib.util.spec_from_file_location("blocksparse._core", {core!r})
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
globals().update({{name: value for name, value in vars(core).items() if not name.startswith("__")}})

def linear(**given):
    if os.path.exists({once!r}):
        return core.linear(**given)
    open({once!r}, "w").close()
    os.abort()
"""


def test_a_process_that_dies_is_reported_and_another_goes_on(tmp_path, monkeypatch, capsys):
    core = tmp_path / "dying.py"
    core.write_text(DYING.format(core=cpu_core.core().__file__, once=str(tmp_path / "once")))
    monkeypatch.setenv("BLOCKSPARSE_FUZZ_CORE", str(core))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(os.path.dirname(bs.__file__))]))
    index = next(indices_of("linear"))
    options = run._parser().parse_args(
        [f"--seed={SEED}", f"--first={index}", "--calls=10", "--jobs=1", f"--log={tmp_path / 'log'}"]
    )
    assert run._keep_working(options, tmp_path / "place", 0, time.time() + 600)
    assert f"python tests/fuzz --seed {SEED} --only {index}" in capsys.readouterr().out
    page = log.summary(tmp_path / "log")
    assert "reports: 1." in page
    assert f"- seed {SEED}, case {index}: died with status -6" in page
