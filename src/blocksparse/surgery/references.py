"""Finds modules that a model also refers to outside of its tree of modules, and replaces some of these references."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dis import get_instructions
from functools import cache, partial
from gc import get_referents
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

from .carry import OF_MODULE, functions_of, own_names

# A model may hold a data set, so the search ends after this many objects; it is breadth-first.
MAX_OBJECTS = 1_000_000

LIBRARIES = frozenset({"torch", "blocksparse", "numpy", *sys.stdlib_module_names}) - {"__main__"}
DICTS = dict, OrderedDict, defaultdict
# Standard modules whose objects may contain a user's objects, such as UserDict and lru_cache.
CONTAINER_MODULES = frozenset({"collections", "functools", "itertools", "weakref"})
CONTAINERS = list, deque, tuple, set, frozenset, *DICTS
WEAK = WeakSet, WeakKeyDictionary, WeakValueDictionary
# copy.deepcopy does not copy these, or keeps their references to the original objects.
UNCOPIED = FunctionType, type, weakref.ref, type(cache(len)), *WEAK
# How a model refers to a module: by attributes and containers only; by objects that deep copies copy; by objects that
# deep copies share.
PLAIN, DEEP, SHARED = range(3)
HOOKS_OF_TENSORS = "_backward_hooks", "_post_accumulate_grad_hooks"


def find_references(model: nn.Module, targets: Collection[Any]) -> dict[Any, str]:
    """Find the targets that functions and objects of a model refer to directly, and where.

    Such references are closures, bound methods, partials, hooks, weak references, and objects of the user's classes.
    Modules in plain lists, tuples, dicts, sets and attributes are left out: `replace_references` replaces these.

    Args:
        model: the model whose attributes, hooks and methods are searched.
        targets: modules and parameters.
    """
    found: dict[Any, str] = {}
    for target, where, way in _references(model, targets):
        if way > PLAIN or not isinstance(target, nn.Module):
            found.setdefault(target, where)
    return found


def shared_with_copies(model: nn.Module) -> str | None:
    """Return where a model has a function or weak reference to a part of it, which deep copies would share; or None."""
    parts = [*model.modules(), *model.parameters()]
    return next((where for _, where, way in _references(model, parts) if way == SHARED), None)


def _references(model: nn.Module, targets: Collection[Any]) -> Iterator[tuple[Any, str, int]]:
    """Yield targets that a model refers to outside of its tree of modules, with the place and the way."""
    by_id = {id(target): target for target in targets}
    modules = {id(module) for module in model.modules()}
    packages = {_package(type(module).__module__) for module in model.modules()} - LIBRARIES
    seen: set[tuple[int, int]] = set()
    queue = deque(_roots(model))
    while queue and len(seen) < MAX_OBJECTS:
        value, where, way = queue.popleft()
        if isinstance(value, UNCOPIED):
            way = SHARED
        if (id(value), way) in seen:
            continue
        seen.add((id(value), way))
        if id(value) in by_id:
            yield by_id[id(value)], where, way
        elif id(value) not in modules:
            way = way if _is_container(value) else max(way, DEEP)
            queue.extend((each, where, way) for each in _referents(value, packages))


def replace_references(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules in the attributes of a model's modules, and in containers there."""
    for module in model.modules():
        for key, value in _attributes(module):
            changed = _replaced(value, new, set())
            if changed is not value:
                vars(module)[key] = changed


def _replaced(value: Any, new: Mapping[nn.Module, nn.Module], seen: set[int]) -> Any:
    """Return a value with modules replaced; a list, dict or set stays the same object."""
    if isinstance(value, nn.Module):
        return new.get(value, value)
    if not _is_container(value) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        pairs = [(_replaced(key, new, seen), _replaced(each, new, seen)) for key, each in value.items()]
        if any(a is not c or b is not d for (a, b), (c, d) in zip(pairs, value.items(), strict=True)):
            value.clear()
            value.update(pairs)
        return value
    items = [_replaced(each, new, seen) for each in value]
    if all(mine is its for mine, its in zip(items, value, strict=True)):
        return value
    if isinstance(value, tuple):
        return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, frozenset):
        return frozenset(items)
    value.clear()
    value.update(items) if isinstance(value, set) else value.extend(items)
    return value


# -- where to look -----------------------------------------------------------------------------------------------


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that neither PyTorch nor a library's class has set."""
    kind = next(base for base in type(module).__mro__ if _package(base.__module__) in LIBRARIES)
    own = OF_MODULE | own_names(kind)
    own |= {"_compiled_call_impl"}  # copies do not have it
    return [(key, value) for key, value in vars(module).items() if key not in own]


def _roots(model: nn.Module) -> Iterator[tuple[Any, str, int]]:
    """Yield the values that a model's modules refer to, except submodules, with the place and the way."""
    kinds: set[type] = set()
    for name, module in model.named_modules():
        for key, value in _attributes(module):
            yield value, f"{name}.{key}".lstrip("."), PLAIN
        hooks = [value for key, value in vars(module).items() if "hook" in key and key in OF_MODULE]
        for parameter in module._parameters.values():
            if parameter is not None:
                yield vars(parameter), f"an attribute of a parameter of {name or 'the model'}", DEEP
                hooks += [getattr(parameter, key, None) for key in HOOKS_OF_TENSORS]
        for each in hooks:
            for hook in each.values() if isinstance(each, dict) else ():
                yield getattr(hook, "hook", hook), f"a hook of {name or 'the model'}", DEEP
        kinds.update(base for base in type(module).__mro__ if _is_users(base.__module__))
    for kind in kinds:
        yield kind, f"the class {kind.__name__}", DEEP
        for function in functions_of(kind):
            if not function.__name__.startswith("__"):  # methods such as `__setattr__` do not compute
                yield function, f"{kind.__name__}.{function.__name__}", DEEP


def _referents(value: Any, packages: Collection[str]) -> Iterable[Any]:
    """Return the objects that a value refers to, for the search of the model's callables.

    Objects of libraries are opaque unless their package is in `packages`.
    """
    if isinstance(value, Tensor | str | bytes | int | float | ModuleType | torch.optim.Optimizer):
        return ()
    if isinstance(value, type):
        return _of_class(value)
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, MethodType):
        # The object of a bound method is searched, even one of a library's class.
        return value.__func__, value.__self__
    if isinstance(value, BuiltinMethodType):
        return (value.__self__,)
    if isinstance(value, weakref.ref):
        return (value(),)
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, nn.Module | SimpleNamespace):
        return vars(value).values()
    module = type(value).__module__
    if isinstance(value, WEAK):
        return (*value.values(), *value.keys()) if isinstance(value, Mapping) else tuple(value)
    known = _is_container(value) or isinstance(value, partial | MappingProxyType) or module in CONTAINER_MODULES
    return get_referents(value) if known or _package(module) in packages or _is_users(module) else ()


def _of_class(kind: type) -> Iterator[Any]:
    """Yield the attributes of a user's class except functions; `_roots` yields those that compute."""
    if _is_users(kind.__module__):
        yield from (each for each in vars(kind).values() if not isinstance(each, FunctionType))


def _of_function(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function refers to: closure, defaults, attributes, and globals of a user's code."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    yield function.__defaults__
    yield function.__kwdefaults__
    yield vars(function)
    if _is_users(function.__module__):
        for name in _globals_of(function.__code__):
            yield function.__globals__.get(name)


@cache
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the names of global variables that code reads, with the functions in it."""
    inside = (_globals_of(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(each.argval for each in get_instructions(code) if each.opname == "LOAD_GLOBAL").union(*inside)


def _is_container(value: Any) -> bool:
    return type(value) in CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_make"))


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


@cache
def _is_users(module: str | None) -> bool:
    """Return whether a Python module belongs neither to an installed library nor to the standard library."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return _package(module) not in LIBRARIES and "site-packages" not in file and "dist-packages" not in file
