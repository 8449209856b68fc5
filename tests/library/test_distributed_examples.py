"""Every example of examples/distributed runs as it is, by two processes; the one of checkpoints has its own test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "distributed").glob("*.py"))
EXAMPLES = [path for path in EXAMPLES if path.stem != "checkpoints"]
SAYS = {
    "data_parallel": r"accuracy 0\.9\d, 102 blocks",
    "fsdp2": r"accuracy 0\.9\d, 51 of 102",
    "pipeline": r"loss 3\.\d+ -> 1\.\d+",
    "tensor_parallel": r"loss (4\.\d+ -> [012]\.\d+); one process: \1",
}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_runs_under_torchrun(script, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS.get(script.stem, ""), done.stdout)
