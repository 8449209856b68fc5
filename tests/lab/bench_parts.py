"""Helpers for tests of benchmarks: programs as modules, and results with chosen times."""

import importlib.util
import sys
from pathlib import Path

import pytest

from blocksparse.measure import Samples
from blocksparse_lab.bench.case import CaseResult

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    """Import the program benchmarks/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", PROGRAMS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def script(module, monkeypatch, capsys):
    """Return a function that runs a program in this process and returns its status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [Path(module.__file__).name, *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            module.main()
        return end.value.code, *capsys.readouterr()

    return run


def timed(spec, layout, refused=(), facts=(), **seconds):
    """Return the result of a case whose contenders took these seconds; `dense_wide` is the peer dense-wide."""
    seconds = {name.replace("_", "-"): [value] * 3 for name, value in seconds.items()}
    samples = Samples(seconds, dict.fromkeys(seconds, 1))
    errors = {"y": 1e-7}
    return CaseResult(spec, layout.nnz, layout.density, errors, samples, dict(refused), 1e-5, dict(facts))
