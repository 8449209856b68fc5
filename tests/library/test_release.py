"""The version is said in one place, and files of the release agree with it; Pythons too."""

import re
import tomllib
from pathlib import Path

import blocksparse
from blocksparse import _requirements

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version_comes_from_the_package():
    source = PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert re.search(r'^__version__ = "(.+)"$', (ROOT / source).read_text(), re.M)[1] == blocksparse.__version__
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == blocksparse.__version__
    assert f"## [{blocksparse.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


PYTHONS = [match[1] for line in PROJECT["project"]["classifiers"] if (match := re.search(r":: (3\.\d+)$", line))]


def test_supported_pythons_are_the_tested_ones():
    oldest = ".".join(map(str, _requirements._MIN_PYTHON))
    assert oldest.startswith(PYTHONS[0])
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert f"MIN_PYTHON = {_requirements._MIN_PYTHON}" in (ROOT / ".ci/check_machine.py").read_text()
    assert PROJECT["tool"]["cibuildwheel"]["build"] == [f"cp{python.replace('.', '')}-*" for python in PYTHONS]
    for file in (".github/workflows/tests.yml", ".github/workflows/nightly.yml", "noxfile.py"):
        assert str(PYTHONS).replace("'", '"') in (ROOT / file).read_text(), file


def test_the_page_on_installing_has_the_supported_versions():
    torches = re.findall(r'^    "(2\.\d+)": \[', (ROOT / "noxfile.py").read_text(), re.M)
    assert f"torch>={torches[0]}" in PROJECT["project"]["dependencies"]
    assert torches[0] == ".".join(map(str, _requirements._MIN_TORCH))
    # Each change is tested with the one of the constraints and the newest one.
    pinned = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]
    first, *others = re.findall(r'torch: \[?"(\S+)"', (ROOT / ".github/workflows/tests.yml").read_text())
    assert first == pinned
    tested = [version.rpartition(".")[0] for version in (first, *others)]
    assert torches[-1] in tested
    page = (ROOT / "docs/start/install.md").read_text()
    table = re.findall(r"^\| (.*) \|$", page.partition("## Versions")[2], re.M)
    assert [cell.strip() for cell in table[0].split("|")] == ["", *(f"Python {python}" for python in PYTHONS)]
    rows = [row.split(" | ") for row in table[1:]]
    assert [row[0] for row in rows] == [f"PyTorch {torch}" for torch in torches]
    assert {(row[0], len(row)) for row in rows} == {(row[0], 1 + len(PYTHONS)) for row in rows}
    # The CI of each change runs the pinned version; the page says what ran with the others.
    assert f"PyTorch {tested[0]}" in [row[0] for row in rows if "**tested**" in row]
    said = f"Python {PYTHONS[0]} to {PYTHONS[-1]} with PyTorch {torches[0]} to {torches[-1]}"
    assert said in page
    assert said.replace(" with ", " and ") in (ROOT / "CONTRIBUTING.md").read_text()


def test_actions_have_versions():
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        assert not re.findall(r"uses: \S+@(?!v\d|release/v\d)\S+", workflow.read_text()), workflow.name
