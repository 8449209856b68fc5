"""Every example of examples/distributed runs as it is, by several processes."""

import re
from pathlib import Path

import pytest

from processes import run_script

FOLDER = Path(__file__).parents[2] / "examples" / "distributed"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "checkpoints")
SAYS = {
    "data_parallel": r"accuracy 0\.9\d, 102 blocks",
    "fsdp2": r"accuracy 0\.9\d, 51 of 102",
    "pipeline": r"loss 3\.\d+ -> 1\.\d+",
    "tensor_parallel": r"loss (4\.\d+ -> [012]\.\d+); one process: \1",
}
FEWER = {"data_parallel": ("--steps", "120"), "fsdp2": ("--steps", "120")}


OFTEN = ("data_parallel",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in EXAMPLES]
)
def test_it_says_what_it_reached(name, tmp_path):
    said = run_script(2, FOLDER / f"{name}.py", *FEWER.get(name, ()), folder=tmp_path)
    assert re.search(SAYS.get(name, ""), said)


@pytest.mark.full
def test_a_checkpoint_of_two_is_loaded_by_any_number(tmp_path):
    def run(count, what):
        said = run_script(count, FOLDER / "checkpoints.py", what, str(tmp_path / "at"), folder=tmp_path)
        return re.fullmatch(r"(\d+) blocks, step (\d+), loss (\S+) -> (\S+)\n", said).groups()

    blocks, step, _, saved = run(2, "train")
    assert step == "50"
    alone, four = run(1, "resume"), run(4, "resume")
    assert alone == four == (blocks, "60", saved, alone[3])
    assert float(alone[3]) < float(saved)
