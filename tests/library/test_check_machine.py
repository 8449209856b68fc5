"""Check what `make demo` requires of a machine, and what it prints where something is missing."""

import ast
import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest

FILE = Path(__file__).parents[2] / ".ci/check_machine.py"
LARGE_DISK = SimpleNamespace(free=100e9)


@pytest.fixture
def check_machine(monkeypatch):
    """The module on a machine that has all: a compiler, a large disk, and a new Python."""
    spec = util.spec_from_file_location("check_machine", FILE)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(shutil, "disk_usage", lambda root: LARGE_DISK)
    return module


def test_a_machine_that_has_all(check_machine, tmp_path):
    assert check_machine.problems(str(tmp_path)) == []


def test_an_old_python(check_machine, monkeypatch, tmp_path):
    old = SimpleNamespace(version_info=(3, 11, 2, "final", 0), executable="/usr/bin/python3")
    monkeypatch.setattr(check_machine, "sys", old)
    (problem,) = check_machine.problems(str(tmp_path))
    assert problem.startswith("Python 3.11.4 or newer is needed; /usr/bin/python3 is 3.11.2.")
    assert "make demo PYTHON=" in problem


def test_python_2_can_parse_it():
    assert not any(isinstance(node, ast.JoinedStr | ast.AnnAssign) for node in ast.walk(ast.parse(FILE.read_text())))


@pytest.mark.parametrize("compiler", ["c++", "g++", "clang++", "/opt/own/compiler"])
def test_one_compiler_is_enough(check_machine, monkeypatch, tmp_path, compiler):
    if compiler.startswith("/"):
        monkeypatch.setenv("CXX", f"{compiler} -m64")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == compiler else None)
    assert check_machine.problems(str(tmp_path)) == []


def test_no_compiler(check_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (problem,) = check_machine.problems(str(tmp_path))
    assert "A C++17 compiler is needed" in problem
    assert "apt-get install g++" in problem


def test_a_compiler_that_is_not_there(check_machine, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "clang++-99 -O2")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "g++" else None)
    (problem,) = check_machine.problems(str(tmp_path))
    assert problem == "CXX names the compiler clang++-99, which is not there. Name another: export CXX=g++"


def test_a_read_only_clone(check_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (problem,) = check_machine.problems(str(tmp_path))
    assert problem.startswith(f"{tmp_path} cannot be written")
    assert "git clone" in problem


def test_a_full_disk_stops_a_setup_without_pytorch(check_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda root: SimpleNamespace(free=1.23e9))
    (problem,) = check_machine.problems(str(tmp_path))
    assert f"4 GB of free disk space are needed, and {tmp_path} has 1.2 GB" in problem
    (tmp_path / ".venv/lib/python3.12/site-packages/torch").mkdir(parents=True)
    assert check_machine.problems(str(tmp_path)) == []


def test_all_problems_are_printed_together(check_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda root: SimpleNamespace(free=0))
    assert len(check_machine.problems(str(tmp_path))) == 2


def test_the_program_exits_with_the_problems(tmp_path):
    # A copy of the script in a folder of its own: with an empty PATH no compiler is found.
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(FILE, tmp_path / ".ci")
    ended = subprocess.run([sys.executable, script], env={"PATH": ""}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "A C++17 compiler is needed" in ended.stderr
    assert "Traceback" not in ended.stderr
