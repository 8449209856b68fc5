"""The example of checkpoints, by two processes, then by one and by four."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed" / "checkpoints.py"


def test_saved_by_two_and_loaded_by_any_number(tmp_path):
    def run(count, what):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
        done = subprocess.run(
            [sys.executable, *launch, EXAMPLE, what, tmp_path / "at"], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return re.fullmatch(r"(\d+) blocks, step (\d+), loss (\S+) -> (\S+)\n", done.stdout).groups()

    blocks, step, _, saved = run(2, "train")
    assert step == "50"
    alone, four = run(1, "resume"), run(4, "resume")
    assert alone == four == (blocks, "60", saved, alone[3])
    assert float(alone[3]) < float(saved)
