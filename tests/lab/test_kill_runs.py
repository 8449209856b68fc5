"""A few killed runs end with the same tensors; `kill_runs.py` tests any number."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="forks")
@pytest.mark.full
def test_killed_at_random_it_ends_with_the_same_tensors():
    program = Path(__file__).with_name("kill_runs.py")
    arguments = ["--kills", "30", "--kinds", "mlp,prune"]
    done = subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 of 30 in" in done.stdout
