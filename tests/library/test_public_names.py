"""Each public package lists its public names and nothing else; all of them exist and are documented."""

import importlib
import inspect
import re

import pytest

import blocksparse as bs
from blocksparse.nn.recurrent import SparseOptions

PACKAGES = ["", ".compression", ".conversion", ".distributed", ".nn", ".patterns", ".sparsity", ".topology"]
MODULES = [".checkpoint", ".convert", ".errors", ".layout", ".matmul", ".measure"]
FOR_JAX = {".jax": "jax", ".jax.equinox": "equinox", ".jax.nnx": "flax"}  # modules, and the library that each needs


def imported(name):
    """Import a module of the library; skip the test without JAX and its libraries."""
    if name in FOR_JAX:
        pytest.importorskip("jax")
        pytest.importorskip(FOR_JAX[name])
    return importlib.import_module(f"blocksparse{name}")


@pytest.mark.parametrize("name", [*PACKAGES, ".jax"])
def test_dir_shows_public_names_only(name):
    package = imported(name)
    assert sorted(dir(package)) == sorted(package.__all__)


@pytest.mark.parametrize("name", [*PACKAGES, *MODULES, *FOR_JAX])
def test_public_names_exist_and_are_documented(name):
    module = imported(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert not public.startswith("_")
        assert getattr(module, public).__doc__, public


def own_members(cls):
    """The public methods and properties that are written here, by name: not those of torch.nn.Module."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if not name.startswith("_") and owner.__module__.startswith("blocksparse"):
            member = vars(owner)[name]
            if inspect.isroutine(member) or isinstance(member, property):
                yield name


@pytest.mark.parametrize("name", [*PACKAGES, *MODULES, *FOR_JAX])
def test_public_methods_and_properties_are_documented(name):
    module = imported(name)
    classes = [public for name in module.__all__ if inspect.isclass(public := getattr(module, name))]
    # One that overrides a documented method needs no docstring of its own: `getdoc` finds the other.
    missing = [(cls, name) for cls in classes for name in own_members(cls) if not inspect.getdoc(getattr(cls, name))]
    assert not missing


def arguments(public):
    """The arguments of a function or of making a module; results, which only we make, have attributes instead."""
    if inspect.isclass(public):
        if "__init__" not in vars(public) or hasattr(public, "__dataclass_fields__"):
            return []
        parameters = [*inspect.signature(public.__init__).parameters.values()][1:]
    elif inspect.isfunction(public):
        parameters = [*inspect.signature(public).parameters.values()]
    else:
        return []
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return named + [name for p in parameters for name in typed_options(p)]


def typed_options(parameter):
    """The names of `**options: Unpack[SparseOptions]`, and of no other `**options`."""
    is_typed = parameter.kind is parameter.VAR_KEYWORD and parameter.annotation == "Unpack[SparseOptions]"
    return list(SparseOptions.__annotations__) if is_typed else []


@pytest.mark.parametrize("name", sorted(set(bs.nn.__all__) - {"functional"}))
def test_a_module_shows_and_checks_its_arguments(name):
    kind = getattr(bs.nn, name)
    hidden = [p for p in inspect.signature(kind).parameters.values() if p.kind is p.VAR_KEYWORD]
    assert all(map(typed_options, hidden))
    if isinstance(kind, type):
        needed = [p for p in inspect.signature(kind).parameters.values() if p.default is p.empty]
        with pytest.raises(TypeError, match="'densty'"):
            kind(*(16 for _ in needed), densty=0.5)


def test_a_cell_has_no_layers():
    with pytest.raises(TypeError, match=r"LSTMCell.*'num_layers'"):
        bs.nn.LSTMCell(8, 16, num_layers=2)


@pytest.mark.parametrize("name", [*PACKAGES, ".matmul"])
def test_arguments_are_documented(name):
    module = imported(name)
    missing = {}
    for public in (getattr(module, name) for name in module.__all__):
        text = inspect.getdoc(public) or ""
        if "Arguments and errors are those of" not in text:
            words = set(re.findall(r"\w+", text))
            if left := [argument for argument in arguments(public) if argument not in words]:
                missing[public.__name__] = left
    assert not missing
