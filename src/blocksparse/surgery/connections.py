"""Finds which layers compute the features of a model and which layers read them, by tracing a call on an example.

Use:

>>> import torch
>>> from blocksparse.surgery.connections import find_features
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> (group,) = find_features(model, torch.randn(4, 8))
>>> group.size, [port.name for port in group.producers], [port.name for port in group.consumers]
(6, ['0'], ['2'])

The features of a group may be reordered: `group.permute(order)` reorders them in every tensor and leaves the model's
outputs as they are, up to rounding. A feature whose producers are all empty is a constant: `Port.positions` are the
lines to remove with it. The trace sees calls of torch's functions only, so compare the model's outputs afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..nn.conv import Conv1d, Conv2d, Conv3d
from ..nn.linear import Linear
from .model_tools import evaluation_mode

# Functions of each element; of tensors that broadcast, if there are several.
ELEMENTWISE = frozenset(
    """
    relu relu_ relu6 gelu silu silu_ elu elu_ selu celu leaky_relu leaky_relu_ mish softplus hardswish hardtanh
    hardsigmoid sigmoid tanh logsigmoid abs neg exp square sqrt rsqrt pow erf clamp clamp_ dropout dropout_ dropout1d
    dropout2d dropout3d alpha_dropout contiguous clone detach to float double half bfloat16 type_as add add_ __add__
    __radd__ __iadd__ sub __sub__ __rsub__ mul mul_ __mul__ __rmul__ __imul__ multiply div __truediv__ __pow__
    """.split()  # noqa: SIM905
)
# Functions that only move elements, or take means of equal elements.
SHAPING = frozenset(
    """
    view reshape flatten unflatten transpose swapaxes permute movedim squeeze unsqueeze expand __getitem__ select narrow
    chunk split unbind tensor_split cat concat mean adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    """.split()  # noqa: SIM905
)
# Functions of each channel, axis 1.
CHANNELWISE = frozenset(
    """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    interpolate pad
    """.split()  # noqa: SIM905
)
CONVOLUTIONS = {F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d}
# Functions of a tensor's shape and dtype.
OF_SHAPE = frozenset(
    {f"new_{fill}" for fill in ("ones", "zeros", "full", "empty")}
    | {f"{fill}_like" for fill in ("ones", "zeros", "full", "empty")}
)
# Results of these are no tensors but depend on all elements.
READING = frozenset({"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__"})


@dataclass(frozen=True, eq=False)
class Port:
    """An axis of a module's weight along which a group's features lie.

    Args:
        name: the module's name in the model.
        module: the module.
        tensors: the parameters and buffers that have the axis, with its number in each. Empty for a block-sparse
            module, whose dense weight has it.
        positions: int64 `[features, lines]`: where each feature lies on the axis. A flattened channel has several
            lines.
    """

    name: str
    module: nn.Module
    tensors: tuple[tuple[Tensor, int], ...]
    positions: np.ndarray


@dataclass(frozen=True, eq=False)
class FeatureGroup:
    """Features that the same layers compute and read in the same way, so any order of them gives the same outputs.

    Args:
        size: the number of features.
        producers: the outputs of linear layers and convolutions that compute them.
        consumers: the inputs of linear layers and convolutions that read them.
        batch_norms: batch norms and depthwise convolutions in between, with a channel for each feature.
        layer_norms: layer norms in between: they allow another order, but no removal.
        sections: int64 `[features]`: features may only move within their section, such as an attention head.
    """

    size: int
    producers: tuple[Port, ...]
    consumers: tuple[Port, ...]
    batch_norms: tuple[Port, ...] = ()
    layer_norms: tuple[Port, ...] = ()
    sections: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def ports(self) -> tuple[Port, ...]:
        return (*self.producers, *self.consumers, *self.batch_norms, *self.layer_norms)

    @torch.no_grad()
    def permute(self, order: np.ndarray) -> None:
        """Reorder the features in place: feature `order[i]` moves to the place of feature i."""
        for port in self.ports:
            for tensor, axis in port.tensors:
                lines = np.arange(tensor.shape[axis])
                lines[port.positions.ravel()] = port.positions[order].ravel()
                tensor.copy_(tensor.index_select(axis, torch.from_numpy(lines).to(tensor.device)))


def find_features(model: nn.Module, *args: Any, **kwargs: Any) -> list[FeatureGroup]:
    """Find the groups of features inside a model that can be reordered together.

    Args:
        model: any module. Linear layers, convolutions and attention are known, dense and (without attention)
            block-sparse. Features that reach another function, or the model's output, belong to no group.
        args, kwargs: inputs of the model; a small batch is enough.

    Returns:
        Groups of two features or more, in the order of the calls.
    """
    trace = _Trace(model)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with evaluation_mode(model), torch.no_grad(), _watch_sparse_modules(trace), trace:
            outputs = model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    trace.exclude(outputs)
    return trace.groups()


# -- trace -------------------------------------------------------------------------------------------------------


class _Axis:
    """An axis of a module's weight with the features that were seen on it.

    Attributes:
        ids: int64 `[lines]`, a feature id for each line.
    """

    def __init__(self, kind: str, name: str, module: nn.Module, tensors: tuple[tuple[Tensor, int], ...], ids: Any):
        self.kind, self.name, self.module, self.tensors, self.ids = kind, name, module, tensors, ids


class _Trace(TorchFunctionMode):
    """Follows feature ids through the functions that a model calls.

    The ids of a tensor are int64, with its number of axes and size 1 along axes on which they do not depend; -1 where
    an element depends on no single feature.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[int, nn.Module] = {
            id(tensor): module
            for module in self.names
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        self.users: dict[int, int] = {}
        for module in self.names:
            for parameter in module.parameters(recurse=False):
                self.users[id(parameter)] = self.users.get(id(parameter), 0) + 1
        self.axes: dict[tuple[nn.Module, str, str], _Axis] = {}
        self.ids: dict[int, np.ndarray] = {}
        self.alive: list[Any] = []  # an id of a Python object is unique only while the object exists
        self.count = 0
        self.equal: list[np.ndarray] = []  # `[2, n]`: pairs of ids of one feature
        self.excluded: list[np.ndarray] = []
        self.sections: list[tuple[np.ndarray, np.ndarray]] = []
        self.inside = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not self.inside:
            self.alive.append(result)
            self.follow(function, args, kwargs, result)
        return result

    def follow(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Give the result of a function its ids, or exclude the features of its arguments."""
        name = getattr(function, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if (not results and name not in READING) or name in OF_SHAPE:
            return
        handler = HANDLERS.get(function)
        if handler is not None and (ids := handler(self, *args, **kwargs)) is not None:
            self.ids[id(results[0])] = ids
            return
        labelled = [tensor for tensor in tensors if id(tensor) in self.ids]
        if labelled and not any(id(tensor) in self.owners for tensor in tensors if tensor.numel() > 1):
            if name in ELEMENTWISE:
                self.ids[id(result)] = self._broadcast(tensors)
                return
            if name in CHANNELWISE and (ids := self._of_channels(labelled[0], results)) is not None:
                self.ids[id(result)] = ids
                return
            if name in SHAPING and self._move(function, args, kwargs, results):
                return
        self.exclude(tensors)

    def exclude(self, values: Any) -> None:
        """Exclude the features of tensors, and those of weights, from all groups."""
        for leaf in _tensors(values):
            if id(leaf) in self.ids:
                self.excluded.append(self.ids[id(leaf)].ravel())
            if id(leaf) in self.owners:
                module = self.owners[id(leaf)]
                for axis in list(self.axes.values()):
                    if axis.module is module:
                        self.excluded.append(axis.ids)
                self.axes.setdefault((module, "", "excluded"), _Axis("excluded", "", module, (), np.zeros(0, np.int64)))

    def new_ids(self, count: int) -> np.ndarray:
        self.count += count
        return np.arange(self.count - count, self.count)

    def axis(self, kind: str, module: nn.Module, key: str, tensors: tuple[tuple[Tensor, int], ...], size: int) -> _Axis:
        """Return an axis of a module's weight; a new one has new ids."""
        if (axis := self.axes.get((module, key, kind))) is None:
            axis = _Axis(kind, self.names[module], module, tensors, self.new_ids(size))
            self.axes[module, key, kind] = axis
            shared = any(self.users.get(id(tensor), 1) > 1 for tensor, _ in tensors)
            if shared or (module, "", "excluded") in self.axes:
                self.excluded.append(axis.ids)
        return axis

    def read(self, tensor: Tensor, dim: int, axis: _Axis) -> None:
        """Record that an axis of a weight multiplies a dimension of a tensor."""
        dim %= tensor.dim()
        ids = self.ids.get(id(tensor))
        if ids is None or ids.size != ids.shape[dim] or ids.size != axis.ids.size:
            self.exclude(tensor)
            self.excluded.append(axis.ids)
        else:
            self.unite(ids.ravel(), axis.ids)

    def unite(self, ids: np.ndarray, others: np.ndarray) -> None:
        """Record that features are the same; a feature that meets an unknown one is excluded."""
        self.excluded += [ids[others < 0], others[ids < 0]]
        both = (ids >= 0) & (others >= 0)
        self.equal.append(np.stack([ids[both], others[both]]))

    def unite_heads(self, ids: np.ndarray, others: np.ndarray, heads: int) -> None:
        """Record that features are the same, and that they may only move within their attention head."""
        self.unite(ids, others)
        self.sections.append((ids[ids >= 0], np.repeat(np.arange(heads), ids.size // heads)[ids >= 0]))

    def _broadcast(self, tensors: list[Tensor]) -> np.ndarray:
        """Return the ids of an elementwise function of tensors."""
        ids: np.ndarray | None = None
        for tensor in tensors:
            if (new := self.ids.get(id(tensor))) is not None:
                if ids is None:
                    ids = new
                else:
                    a, b = np.broadcast_arrays(ids, new)
                    self.unite(a.ravel(), b.ravel())
                    ids = a
        assert ids is not None
        for tensor in tensors:
            if id(tensor) not in self.ids:
                shape = (1,) * (ids.ndim - tensor.dim()) + tuple(tensor.shape)
                offset = max(0, tensor.dim() - ids.ndim)
                if any(size > 1 and shape[dim + offset] > 1 for dim, size in enumerate(ids.shape)):
                    self.excluded.append(ids.ravel())
                ids = ids.reshape((1,) * offset + ids.shape)
        return ids

    def _of_channels(self, tensor: Tensor, results: list[Tensor]) -> np.ndarray | None:
        """Return the ids of a function of channels, or None if they depend on another axis."""
        ids = self.ids[id(tensor)]
        is_known = ids.ndim > 1 and ids.size == ids.shape[1] and len(results) == 1 and results[0].dim() == ids.ndim
        return ids if is_known and results[0].shape[1] == tensor.shape[1] else None

    def _move(self, function: Callable[..., Any], args: Any, kwargs: Any, results: list[Tensor]) -> bool:
        """Call a function on the ids instead of the tensors, and give its results their ids; False if it cannot."""

        def ids_of(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(ids_of, value)) if type(value) in (list, tuple) else value
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            ids = torch.from_numpy(self.ids.get(id(value), np.full((1,) * value.dim(), -1)))
            return ids.double().expand(value.shape)

        moved = tree_leaves(function(*ids_of(args), **{key: ids_of(value) for key, value in kwargs.items()}))
        if [tuple(each.shape) for each in moved] != [tuple(each.shape) for each in results]:
            return False
        for each, result in zip(moved, results, strict=True):
            for dim in range(each.dim()):
                first = each.narrow(dim, 0, 1)
                each = first if bool((each == first).all()) else each
            if not bool((each == each.round()).all()):
                return False
            self.ids[id(result)] = each.long().numpy()
        return True

    # -- result ----------------------------------------------------------------------------------------------

    def groups(self) -> list[FeatureGroup]:
        """Return the groups of features that the recorded calls allow."""
        root = _components(self.count, self.equal)
        allowed = np.ones(self.count, bool)
        for ids in self.excluded:
            allowed[root[ids[ids >= 0]]] = False
        ports: dict[int, list[tuple[int, np.ndarray]]] = {}  # by feature: (axis, positions)
        axes = [axis for axis in self.axes.values() if axis.kind != "excluded"]
        for number, axis in enumerate(axes):
            roots = root[axis.ids]
            order = np.argsort(roots, kind="stable")
            features, starts = np.unique(roots[order], return_index=True)
            for feature, positions in zip(features.tolist(), np.split(order, starts[1:]), strict=True):
                ports.setdefault(feature, []).append((number, positions))
        section = np.zeros((len(self.sections), self.count), np.int64)
        for row, (ids, sections) in zip(section, self.sections, strict=True):
            np.maximum.at(row, root[ids], sections + 1)
        families: dict[Any, list[int]] = {}
        for feature, found in ports.items():
            kinds = {axes[number].kind for number, _ in found}
            if allowed[feature] and "out" in kinds:
                shape = tuple((number, len(positions)) for number, positions in found)
                families.setdefault((shape, tuple((section[:, feature] > 0).tolist())), []).append(feature)
        return [
            group
            for (shape, _), features in families.items()
            if len(features) > 1 and (group := _group(axes, shape, features, ports, section)) is not None
        ]


def _group(
    axes: list[_Axis],
    shape: tuple[tuple[int, int], ...],
    features: list[int],
    ports: Mapping[int, list[tuple[int, np.ndarray]]],
    section: np.ndarray,
) -> FeatureGroup | None:
    """Return the group of these features, or None if no layer reads them."""
    by_kind: dict[str, list[Port]] = {"out": [], "in": [], "norm": [], "layer_norm": []}
    for index, (number, _) in enumerate(shape):
        axis, positions = axes[number], np.stack([ports[feature][index][1] for feature in features])
        by_kind[axis.kind].append(Port(axis.name, axis.module, axis.tensors, positions))
    _, sections = np.unique(section[:, features], axis=1, return_inverse=True)
    if not by_kind["in"] and not section[:, features].any():
        return None
    return FeatureGroup(
        size=len(features),
        producers=tuple(by_kind["out"]),
        consumers=tuple(by_kind["in"]),
        batch_norms=tuple(by_kind["norm"]),
        layer_norms=tuple(by_kind["layer_norm"]),
        sections=sections.reshape(-1),
    )


def _components(count: int, pairs: list[np.ndarray]) -> np.ndarray:
    """Return the smallest id of each id's connected component."""
    root = np.arange(count)
    edges = np.concatenate([np.zeros((2, 0), np.int64), *pairs], axis=1)
    while True:
        before = root.copy()
        smallest = np.minimum(root[edges[0]], root[edges[1]])
        np.minimum.at(root, edges[0], smallest)
        np.minimum.at(root, edges[1], smallest)
        root = root[root]
        if np.array_equal(root, before):
            return root


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and, a few levels deep, in attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            yield from _tensors(list(vars(leaf).values()), depth - 1)


# -- known functions ---------------------------------------------------------------------------------------------


def _owns(module: nn.Module, **tensors: Tensor | None) -> bool:
    """Return whether these tensors are a module's parameters of these names."""
    return all(getattr(module, key, None) is tensor for key, tensor in tensors.items())


def _with_bias(weight: Tensor, bias: Tensor | None, axis: int = 0) -> tuple[tuple[Tensor, int], ...]:
    return ((weight, axis),) if bias is None else ((weight, axis), (bias, 0))


def _place(ids: np.ndarray, dim: int, rank: int) -> np.ndarray:
    """Return ids along one dimension of a tensor of this rank."""
    return ids.reshape([-1 if each == dim % rank else 1 for each in range(rank)])


def _linear(trace: _Trace, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> np.ndarray | None:
    module = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    trace.read(input, -1, trace.axis("in", module, "weight", ((weight, 1),), weight.shape[1]))
    out = trace.axis("out", module, "weight", _with_bias(weight, bias), weight.shape[0])
    return _place(out.ids, -1, input.dim())


def _conv1d_of_transformers(trace: _Trace, bias: Tensor, input: Tensor, weight: Tensor, **_: Any) -> np.ndarray | None:
    """Follow torch.addmm, which the Conv1D of transformers calls with a weight `[in, out]`."""
    module = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    trace.read(input, 1, trace.axis("in", module, "weight", ((weight, 0),), weight.shape[0]))
    out = trace.axis("out", module, "weight", _with_bias(weight, bias, 1), weight.shape[1])
    return _place(out.ids, 1, 2)


def _convolution(
    trace: _Trace, input: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any
) -> np.ndarray | None:
    module = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    groups, rank, channels = getattr(module, "groups", None), weight.dim(), -weight.dim() + 1
    if groups == 1:
        trace.read(input, channels, trace.axis("in", module, "weight", ((weight, 1),), weight.shape[1]))
        out = trace.axis("out", module, "weight", _with_bias(weight, bias), weight.shape[0])
    elif groups == weight.shape[0] and weight.shape[1] == 1:
        out = trace.axis("norm", module, "weight", _with_bias(weight, bias), weight.shape[0])
        trace.read(input, channels, out)
    else:
        return None
    return _place(out.ids, channels, input.dim() if input.dim() < rank else rank)


def _batch_norm(trace: _Trace, input: Tensor, mean: Tensor | None, *_: Any, **named: Any) -> np.ndarray | None:
    module = trace.owners.get(id(mean))
    return None if module is None or input.dim() < 2 else _norm(trace, "norm", input, 1, module)


def _layer_norm(trace: _Trace, input: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
                eps: float = 1e-5) -> np.ndarray | None:  # fmt: skip
    module = trace.owners.get(id(weight))
    if module is None or len(shape) != 1 or not _owns(module, weight=weight, bias=bias):
        return None
    return _norm(trace, "layer_norm", input, -1, module)


def _norm(trace: _Trace, kind: str, input: Tensor, dim: int, module: nn.Module) -> np.ndarray:
    size = input.shape[dim]
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    per_feature = tuple((tensor, 0) for tensor in tensors if tensor.shape == (size,))
    axis = trace.axis(kind, module, "weight", per_feature, size)
    trace.read(input, dim, axis)
    return _place(axis.ids, dim, input.dim())


def _attention(trace: _Trace, query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any) -> np.ndarray:
    """Follow scaled dot-product attention of `[batch, heads, tokens, features]`."""
    ids = [trace.ids.get(id(each), np.full((1,) * each.dim(), -1)) for each in (query, key, value)]
    heads = query.shape[-3] if query.dim() > 3 else 1
    known = [
        each.size == heads * tensor.shape[-1] and each.shape[-1] == tensor.shape[-1] and tensor.dim() == query.dim()
        for each, tensor in zip(ids, (query, key, value), strict=True)
    ]
    if known[0] and known[1]:
        trace.unite_heads(ids[0].ravel(), ids[1].ravel(), heads)
    else:
        trace.exclude([query, key])
    if not known[2]:
        trace.exclude(value)
        return np.full((1,) * query.dim(), -1)
    trace.unite_heads(ids[2].ravel(), ids[2].ravel(), heads)
    return ids[2]


def _multihead_attention(
    trace: _Trace, query: Tensor, key: Tensor, value: Tensor, size: int, heads: int, weight: Tensor | None,
    bias: Tensor | None, bias_k: Tensor | None, *options: Any, **named: Any,
) -> np.ndarray | None:  # fmt: skip
    """Follow `torch.nn.MultiheadAttention`; its result is a tuple, of which the first tensor has features."""
    module = trace.owners.get(id(weight))
    if not isinstance(module, nn.MultiheadAttention) or bias_k is not None or weight is not module.in_proj_weight:
        return None
    inputs = trace.axis("in", module, "in_proj", ((weight, 1),), size)
    for each in (query, key, value):
        trace.read(each, -1, inputs)
    features = trace.axis("out", module, "in_proj", _with_bias(weight, bias), 3 * size).ids
    trace.unite_heads(features[:size], features[size : 2 * size], heads)
    trace.unite_heads(features[2 * size :], features[2 * size :], heads)
    out = module.out_proj
    trace.unite(features[2 * size :], trace.axis("in", out, "weight", ((out.weight, 1),), size).ids)
    return trace.axis("out", out, "weight", _with_bias(out.weight, out.bias), size).ids.reshape(1, 1, -1)[
        (0,) * (3 - query.dim())
    ]


HANDLERS: dict[Any, Callable[..., np.ndarray | None]] = {
    F.linear: _linear,
    torch.addmm: _conv1d_of_transformers,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead_attention,
}


@contextmanager
def _watch_sparse_modules(trace: _Trace) -> Iterator[None]:
    """Follow the calls of block-sparse layers, which bypass torch's functions, inside the `with` block."""
    hooks = []

    def enter(module: nn.Module, *_: Any) -> None:
        trace.inside += 1

    def leave(module: Any, args: Any, output: Tensor) -> None:
        trace.inside -= 1
        if trace.inside:
            return
        trace.alive.append(output)
        rows, columns = (module.out_features, module.in_features) if isinstance(module, Linear) else (
            module.out_channels, module.in_channels)  # fmt: skip
        dim = -1 if isinstance(module, Linear) else 1
        bias = () if module.bias is None else ((module.bias, 0),)
        trace.read(args[0], dim, trace.axis("in", module, "weight", (), columns))
        out = trace.axis("out", module, "weight", bias, rows)
        trace.ids[id(output)] = _place(out.ids, dim, output.dim())

    for module in trace.names:
        if isinstance(module, Linear | Conv1d | Conv2d | Conv3d):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
