"""The WASAP example runs unchanged on two processes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from test_data_idx import write

EXAMPLE = Path(__file__).parents[2] / "examples" / "wasap_fashion_mnist.py"


@pytest.mark.full
def test_wasap_fashion_mnist(tmp_path):
    write(tmp_path, n=96)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    arguments = ["--data", str(tmp_path), "--epochs", "3", "--hidden", "40", "--batch", "16"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *arguments], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"epoch (\d) (\w+): loss \d.*, accuracy 0\.\d+, [\d,]+ samples/s\n", done.stdout)
    assert lines == [("1", "asynchronous"), ("2", "asynchronous"), ("3", "alone"), ("3", "average")]


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGINT to send")
@pytest.mark.parametrize(
    "script", [EXAMPLE, EXAMPLE.parents[1] / "benchmarks" / "wasap.py"], ids=lambda path: path.stem
)
def test_ctrl_c_ends_a_script_silently_while_it_imports(script, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), "--data", "nowhere"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
