"""The command as a module, and Ctrl-C during its imports."""

import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import blocksparse as bs

SOURCES = Path(__file__).parents[2] / "src"

no_windows = pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")

# A partially imported torch that catches every exception.
TORCH = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except BaseException:
    raise ImportError("half of it is there")
"""
MAIN = "import sys; sys.path[:0] = sys.argv[1:]; from blocksparse_lab.__main__ import main; main()"


def started(folder, program=MAIN, options=()):
    (folder / "torch.py").write_text(TORCH)
    command = [sys.executable, *options, "-c", program, folder, SOURCES]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@no_windows
def test_ctrl_c_while_it_imports_is_quiet(tmp_path):
    done = started(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@no_windows
def test_where_it_is_ignored_it_stays_so(tmp_path):
    ignored = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import time; time.sleep = int; {MAIN}"
    done = started(tmp_path, ignored)
    assert "interrupted" not in done.stderr
    assert done.returncode != 130


@no_windows
def test_afterwards_it_is_an_exception_again(tmp_path):
    package = tmp_path / "blocksparse_lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(SOURCES / "blocksparse_lab" / "__main__.py", package)
    handler = "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    (package / "cli.py").write_text(f"import signal\ndef app():\n    {handler}\n")
    # Without site-packages, as an editable installation puts its own finder first.
    assert started(tmp_path, options=["-S"]).stdout == "True\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_library_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["blocksparse", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("blocksparse", run_name="__main__")
    assert not end.value.code
    assert bs.__version__ in capsys.readouterr().out


def test_without_the_programs_the_command_says_how_to_install_them():
    program = "import runpy, sys; sys.modules['typer'] = None; runpy.run_module('blocksparse', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the command line needs typer: pip install")
    assert done.stderr.endswith("pip install '.[lab]'\n")
