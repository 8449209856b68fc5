"""Records which layers and functions a model calls on which tensors, by torch.fx or in a run on an example."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import BlockSparseError
from .prunable import CONV1D, own_forward, qualified

# Reads of a tensor that depend on no features.
IGNORED = {"dtype", "device", "dim", "ndim", "is_floating_point", "is_cuda", "requires_grad", "is_nested", "layout"}
SHAPES = {"shape", "size"}


@dataclass(frozen=True)
class Ref:
    """A tensor that a model computes; a new one after each change in place."""

    index: int


@dataclass(frozen=True)
class Call:
    """A call of a layer or function.

    Args:
        target: a module that `is_leaf`, or a function.
        args, kwargs: its arguments, with a `Ref` for each tensor that is computed. Parameters stay what they are.
        results: the tensors that it returns.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[Ref]

    @property
    def name(self) -> str:
        """The name of the function without underscores, or of the module's class."""
        if isinstance(self.target, nn.Module):
            return type(self.target).__name__
        own = getattr(self.target, "__self__", None)  # the descriptor of an attribute of tensors
        named = own if getattr(self.target, "__name__", "") == "__get__" else self.target
        return getattr(named, "__name__", repr(named)).strip("_")

    @property
    def inputs(self) -> list[Ref]:
        """The computed tensors among the arguments."""
        return [each for each in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(each, Ref)]

    @property
    def is_in_place(self) -> bool:
        """Whether the call changes its first argument."""
        if isinstance(self.target, nn.Module):
            return bool(getattr(self.target, "inplace", False))
        name = getattr(self.target, "__name__", "")
        is_operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        named = self.kwargs.get("inplace", False) is True or any(each is True for each in self.args[1:])
        return named or is_operator or name in INPLACE_OPERATORS or (name.endswith("_") and not name.startswith("_"))


INPLACE_OPERATORS = {"iadd", "isub", "imul", "itruediv"}


@dataclass
class Trace:
    """The calls of a model in their order, and the tensors that it returns."""

    calls: list[Call]
    outputs: list[Ref]


def is_leaf(module: nn.Module) -> bool:
    """Return whether a trace contains the module as one call."""
    package = type(module).__module__.partition(".")[0]
    return (
        package == "blocksparse"
        or isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule)
        or (package == "torch" and not module._modules)
        or qualified(type(module)) == CONV1D
        or own_forward(module) is not None
    )


def trace_symbolically(model: nn.Module) -> Trace:
    """Trace a model by torch.fx, with the default values of its optional arguments.

    Raises:
        BlockSparseError: torch.fx cannot trace the model.
    """

    class Tracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return is_leaf(module) or super().is_leaf_module(module, name)

    root = nn.Sequential(model) if is_leaf(model) else model
    defaults = {
        name: parameter.default
        for name, parameter in signature(root.forward).parameters.items()
        if parameter.default is not parameter.empty
    }
    try:
        graph = Tracer().trace(root, concrete_args=defaults or None)
    except Exception as error:  # the user's forward may raise anything
        got = f"{type(error).__name__}: {str(error).strip()[:200]}"
        raise BlockSparseError(
            f"model: torch.fx cannot trace it ({got}): pass example=, inputs to run it on"
        ) from error
    values: dict[fx.Node, Any] = {}
    trace = Trace([], [])
    for index, node in enumerate(graph.nodes):
        values[node] = Ref(index)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "get_attr":
            values[node] = _attribute(root, node.target)
        elif node.op == "output":
            trace.outputs = [each for each in pytree.tree_leaves(args) if isinstance(each, Ref)]
        elif _reads_no_features(node):
            values[node] = None
        elif node.op != "placeholder":
            target: Any = node.target
            if node.op == "call_module":
                target = root.get_submodule(target)
            elif node.op == "call_method":
                target = getattr(Tensor, target)
            trace.calls.append(Call(target, args, kwargs, [Ref(index)]))
    return trace


def _attribute(model: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(model.get_submodule(owner), name)


def _reads_no_features(node: fx.Node) -> bool:
    """Return whether a node of a graph reads a tensor's dtype or batch size, say, but none of its features."""
    name = node.args[1] if node.target is getattr else node.target
    if name in SHAPES:
        batch_only = name == "size" and node.args[1:] == (0,)
        return batch_only or all(each.args[1:] == (0,) and each.name.startswith("getitem") for each in node.users)
    if name in IGNORED:
        return True
    source = node.args[0] if node.args else None  # an item of a shape
    return node.name.startswith("getitem") and isinstance(source, fx.Node) and _is_shape(source)


def _is_shape(node: fx.Node) -> bool:
    return (node.args[1] if node.target is getattr else node.target) in SHAPES


class _Recorder(TorchFunctionMode):
    """Records the functions that are called outside of leaf modules, and the leaf modules."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.trace = Trace([], [])
        self.depth = 0
        self._constants = {id(each) for each in (*model.parameters(), *model.buffers())}
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []  # an id may be used again after its tensor is freed
        self._count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.depth == 0:
            self.record(function, args, kwargs or {}, result)
        return result

    def record(self, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Append a call to the trace."""
        args, kwargs = pytree.tree_map_only(Tensor, self.ref, (tuple(args), kwargs))
        results = [self._new_ref(each) for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        call = Call(target, args, kwargs, results)
        if call.name not in IGNORED | SHAPES:
            self.trace.calls.append(call)

    def ref(self, tensor: Tensor) -> Any:
        """Return the current `Ref` of a tensor, or the tensor itself if it is a parameter or buffer."""
        if id(tensor) in self._constants:
            return tensor
        return self._refs.get(id(tensor)) or self._new_ref(tensor)

    def _new_ref(self, tensor: Tensor) -> Ref:
        self._alive.append(tensor)
        self._count += 1
        self._refs[id(tensor)] = Ref(self._count)
        return self._refs[id(tensor)]


def trace_example(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Trace a run of a model on example inputs."""
    recorder = _Recorder(model)

    def enter(*_: Any) -> None:
        recorder.depth += 1

    def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        recorder.depth -= 1
        if recorder.depth == 0:
            recorder.record(module, args, kwargs, result)

    with ExitStack() as stack:
        for module in model.modules():
            if is_leaf(module):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        # PyTorch's fused encoder layers, which call no modules, run without gradients only.
        stack.enter_context(torch.enable_grad())
        with recorder:
            result = model(*args, **kwargs)
    recorder.depth = 0
    leaves = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
    recorder.trace.outputs = [each for each in map(recorder.ref, leaves) if isinstance(each, Ref)]
    return recorder.trace


def greatest_difference(ours: Any, theirs: Any) -> float:
    """Return the greatest relative difference of the tensors in two results, inf if their shapes differ."""
    pairs = [
        [each.double() for each in pytree.tree_leaves(result) if isinstance(each, Tensor) and not each.is_complex()]
        for result in (ours, theirs)
    ]
    if len(pairs[0]) != len(pairs[1]):
        return math.inf
    errors = [0.0]
    for one, other in zip(*pairs, strict=True):
        if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
            return math.inf
        one, other = one.nan_to_num(), other.nan_to_num()
        scale = float(one.abs().max()) if one.numel() else 1.0
        difference = float((one - other).abs().max()) if one.numel() else 0.0
        errors.append(difference / max(scale, 1e-12))
    return max(errors)
