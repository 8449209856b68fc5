"""What completion shows: each public package lists its public names, all of which exist, and nothing else."""

import importlib

import pytest

PACKAGES = ["", ".conversion", ".distributed", ".nn", ".patterns", ".sparsity", ".topology"]
MODULES = [".checkpoint", ".convert", ".errors", ".layout", ".matmul", ".measure"]


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_public_names_only(name):
    package = importlib.import_module(f"blocksparse{name}")
    assert sorted(dir(package)) == sorted(package.__all__)


@pytest.mark.parametrize("name", PACKAGES + MODULES)
def test_public_names_exist_and_are_documented(name):
    module = importlib.import_module(f"blocksparse{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert not public.startswith("_")
        assert getattr(module, public).__doc__, public
