"""The version is said in one place, and files of the release agree with it; Pythons too."""

import re
import tomllib
from pathlib import Path

import blocksparse

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_comes_from_the_package():
    source = PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.search(r'^__version__ = "(.+)"$', (ROOT / source).read_text(), re.M)[1] == blocksparse.__version__
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == blocksparse.__version__
    assert f"## [{blocksparse.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_supported_pythons_are_the_tested_ones():
    pythons = [match[1] for line in PROJECT["project"]["classifiers"] if (match := re.search(r":: (3\.\d+)$", line))]
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    assert PROJECT["tool"]["cibuildwheel"]["build"] == [f"cp{python.replace('.', '')}-*" for python in pythons]
    for file in (".github/workflows/tests.yml", "noxfile.py"):
        assert str(pythons).replace("'", '"') in (ROOT / file).read_text(), file


def test_actions_have_versions():
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        assert not re.findall(r"uses: \S+@(?!v\d|release/v\d)\S+", workflow.read_text()), workflow.name
