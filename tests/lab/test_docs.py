"""Check the pages of docs/: their code runs, their links exist, and the reference has every public name."""

import importlib
import pydoc
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from blocksparse.errors import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("start", "how_to", "understand", "coming_from", "results")
PAGES = sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))
WITH_CODE = [DOCS / "index.md", *(page for page in PAGES if "```python" in page.read_text())]
ALL = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
PUBLIC = ["", ".conversion", ".distributed", ".matmul", ".nn", ".patterns", ".sparsity", ".topology"]
TRAINERS = ("transformers", "lightning")
OPTIONAL = (*TRAINERS, "jax", "equinox", "nnx")
PARTS = [
    *(f".integrations.{library}" for library in TRAINERS),
    ".checkpoint",
    ".convert",
    ".errors",
    ".integrations",
    ".jax",
    ".jax.equinox",
    ".jax.nnx",
    ".layout",
    ".measure",
    ".topology.drawings",
]


@pytest.mark.filterwarnings("ignore::blocksparse.SparsityWarning", "ignore:`torch.jit", "ignore::DeprecationWarning")
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    for library in ("transformers", "accelerate", "sklearn", "jax", "optax", "equinox"):
        if re.search(rf"^(import|from) {library}\b", page.read_text(), re.MULTILINE):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    with torch.random.fork_rng([]):
        exec(compile(program, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", link):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


@pytest.mark.parametrize("page", Page)
def test_help_pages_that_messages_name_exist(page):
    name = re.fullmatch(r"help\((.+)\)", page)[1]
    assert len(pydoc.locate(name).__doc__) > 300


def test_no_word_of_a_docstring_was_left_alone_by_a_wrap():
    alone = re.compile(r"^( +)[a-z]+\n\1 +\S", re.MULTILINE)  # less indented than the line it continues
    assert not [path for path in (ROOT / "src").rglob("*.py") if alone.search(path.read_text())]


def imported(name):
    """Import a module; return None if it is for a library that is not installed."""
    optional = name.rpartition(".")[2] in OPTIONAL
    try:
        module = importlib.import_module(name)
    except ImportError:
        if not optional:
            raise
        return None
    # pytest leaves a part of a package in place whose doctests it could not import
    return None if optional and not hasattr(module, "__all__") else module


def documented():
    """Return (module, name) of every name on a page of the reference."""
    found = set()
    for page in (DOCS / "reference").glob("*.md"):
        for name, names in re.findall(r"```\{public\} (\S+)\n(.*?)```", page.read_text(), re.DOTALL):
            if module := imported(name):
                found |= {(module, each) for each in names.split() or module.__all__}
    return found


def test_reference_has_every_public_name():
    shown = {id(getattr(module, name)) for module, name in documented()}
    for package in PUBLIC + PARTS:
        module = imported(f"blocksparse{package}")
        for name in module.__all__ if module else ():
            value = getattr(module, name)
            assert isinstance(value, ModuleType) or id(value) in shown, f"blocksparse{package}.{name}"


def test_readme_is_short():
    text = re.sub(r"```(python|text)\n.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 700
