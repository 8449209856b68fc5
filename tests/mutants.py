"""Break a copy of the project in small ways, one at a time, and report which of them the tests notice.

    python tests/mutants.py                        all of mutants.toml
    python tests/mutants.py --only gelu-constant   one, or several
    python tests/mutants.py --tests 2031115        with the tests of another commit

A mutant is caught if one of its test files fails or does not end. A test that fails without the mutant too is a false
alarm. Mutants of the core run with the portable kernels only, which are rebuilt for each; the others use the installed
core.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "mutants.toml"
TIMEOUT = 1800  # seconds for the tests of one mutant
# Editable installations import their own sources whatever PYTHONPATH is, so that mutants would seem to survive.
USE_COPY = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
"""
RUN_TESTS = USE_COPY + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
SHOW_SOURCE = USE_COPY + "import importlib.util; print(importlib.util.find_spec('blocksparse').origin)"


@dataclass(frozen=True)
class Mutant:
    name: str
    why: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the broken text of its file.

        Raises:
            ValueError: the text to replace is not there exactly once.
        """
        if text.count(self.find) != 1:
            raise ValueError(
                f"{self.name}: expected once in {self.file}, got {text.count(self.find)} times: {self.find}"
            )
        return text.replace(self.find, self.replace)


def mutants(path: Path = LIST) -> list[Mutant]:
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in tomllib.loads(path.read_text())["mutant"]]


def copy_project(to: Path, tests: str | None) -> None:
    """Copy the files that git tracks in their present state, with the tests of a commit if one is given."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]
    for name in listed:
        if (ROOT / name).is_file() and not (tests and name.startswith("tests/")):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    if tests:
        archive = subprocess.check_output(["git", "archive", tests, "tests"], cwd=ROOT)
        subprocess.run(["tar", "x"], cwd=to, input=archive, check=True)


def build(project: Path) -> bool:
    """Build the core in place, and return whether that worked."""
    ccache = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={found}"] if (found := shutil.which("ccache")) else []
    configure = ["cmake", "-S", ".", "-B", "build/mutants", "-G", "Ninja", "-DBLOCKSPARSE_SETS=portable",
                 f"-DPython_EXECUTABLE={sys.executable}", *ccache]  # fmt: skip
    environment = {**os.environ, "CCACHE_BASEDIR": str(project)}
    for command in (configure, ["cmake", "--build", "build/mutants"]):
        if subprocess.run(command, cwd=project, env=environment, capture_output=True).returncode:
            return False
    for built in (project / "build/mutants").glob("_core*.so"):
        (project / "src/blocksparse" / built.name).unlink(missing_ok=True)  # a process may still have the old file open
        shutil.copy2(built, project / "src/blocksparse")
    return True


def environment_of(project: Path) -> dict[str, str]:
    """Return the environment in which the project's sources are imported, with one thread, and JAX if it is there."""
    path = os.pathsep.join(map(str, (project / "src", ROOT / "build/jax/newest")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def check_imports(project: Path) -> None:
    """Stop unless Python imports the library of the project."""
    source = subprocess.check_output(
        [sys.executable, "-c", SHOW_SOURCE], env=environment_of(project), text=True
    ).strip()
    if not Path(source).is_relative_to(project):
        raise SystemExit(f"The tests would import {source}, not the mutated copy {project}.")


def failing(project: Path, tests: tuple[str, ...]) -> str | None:
    """Return the first of these tests that fails, or another failure of the run; None if all pass."""
    command = [sys.executable, "-c", RUN_TESTS, "-xq", "-rfE", "-m", "not full", "--hypothesis-seed=0", *tests]
    environment = environment_of(project)
    shutil.rmtree(project / ".hypothesis", ignore_errors=True)  # it has failures of other mutants
    try:
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode in (0, 5):  # all pass, or there are no tests
        return None
    names = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return names[0].partition(" - ")[0] if names else f"exit status {done.returncode}"


def attempt(mutant: Mutant, project: Path) -> tuple[str, str]:
    """Return the outcome of a mutant, and the test that decided it."""
    path = project / mutant.file
    right = path.read_text()
    compiled = mutant.file.startswith("csrc/")
    path.write_text(mutant.applied(right))
    try:
        if compiled and not build(project):
            return "does not build", ""
        found = failing(project, tuple(file for file in mutant.tests if (project / file).exists()))
    finally:
        path.write_text(right)
    if found is None:
        return "survived", ""
    if "::" in found and (not compiled or build(project)) and failing(project, (found,)):
        return "false alarm", found
    return "caught", found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="only this mutant; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the project in which mutants run (default 1)")
    parser.add_argument("--tests", metavar="COMMIT", help="with the tests of this commit")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not options.only or mutant.name in options.only]
    # Mutants of the core come last, as each leaves its build behind.
    chosen.sort(key=lambda mutant: mutant.file.startswith("csrc/"))
    for mutant in chosen:
        mutant.applied((ROOT / mutant.file).read_text())
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        projects = [Path(folder) / f"copy{n}" for n in range(options.jobs)]
        for project in projects:
            copy_project(project, options.tests)
            if core := importlib.util.find_spec("blocksparse._core"):
                shutil.copy2(str(core.origin), project / "src/blocksparse")
            check_imports(project)
        free = list(projects)

        def one(mutant: Mutant) -> tuple[Mutant, str, str]:
            project, began = free.pop(), time.time()
            try:
                outcome, said = attempt(mutant, project)
            finally:
                free.append(project)
            print(f"| {mutant.name} | {outcome} | {time.time() - began:.0f} s | {said} |", flush=True)
            return mutant, outcome, said

        print("| mutant | outcome | time | by |\n|---|---|---|---|", flush=True)
        outcomes = [outcome for _, outcome, _ in pool.map(one, chosen)]
    print(f"\n{outcomes.count('caught')} of {len(outcomes)} caught")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
