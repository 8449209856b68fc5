"""The example runs as it is, by two processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from test_data_idx import write

EXAMPLE = Path(__file__).parents[1] / "examples" / "wasap_fashion_mnist.py"


def test_wasap_fashion_mnist(tmp_path):
    write(tmp_path, n=96)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    arguments = ["--data", str(tmp_path), "--epochs", "3", "--hidden", "40", "--batch", "16"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *arguments], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"epoch (\d) (\w+): loss \d.*, accuracy 0\.\d+, [\d,]+ samples/s\n", done.stdout)
    assert lines == [("1", "asynchronous"), ("2", "asynchronous"), ("3", "alone"), ("3", "average")]
