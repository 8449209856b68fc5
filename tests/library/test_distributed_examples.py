"""Every example of examples/distributed runs unchanged on several processes, and prints what its page shows."""

import re
from pathlib import Path

import pytest

from processes import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "checkpoints")
OUTPUT = {
    "data_parallel": r"accuracy 0\.9\d, 102 blocks",
    "fsdp2": r"accuracy 0\.9\d, 51 of 102",
    "pipeline": r"loss 3\.\d+ -> 1\.\d+",
    "tensor_parallel": r"loss (4\.\d+ -> [012]\.\d+); one process: \1",
}
FEWER_STEPS = {"data_parallel": ("--steps", "120"), "fsdp2": ("--steps", "120")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "data_parallel" else pytest.mark.full) for name in EXAMPLES]
)
def test_an_example_prints_its_result(name, tmp_path):
    printed = run_script(2, FOLDER / f"{name}.py", *FEWER_STEPS.get(name, ()), folder=tmp_path)
    assert re.search(OUTPUT.get(name, ""), printed)


@pytest.mark.full
def test_any_number_of_processes_resumes_the_checkpoint_of_two(tmp_path):
    def run(count, command):
        printed = run_script(count, FOLDER / "checkpoints.py", command, str(tmp_path / "at"), folder=tmp_path)
        return re.fullmatch(r"(\d+) blocks, step (\d+), loss (\S+) -> (\S+)\n", printed).groups()

    blocks, step, _, saved = run(2, "train")
    assert step == "50"
    alone, four = run(1, "resume"), run(4, "resume")
    assert alone == four == (blocks, "60", saved, alone[3])
    assert float(alone[3]) < float(saved)
