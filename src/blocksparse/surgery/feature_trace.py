"""Follows feature ids through a model's calls of torch's functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
# Functions of a tensor's shape and dtype.
OF_SHAPE = frozenset(
    {f"new_{fill}" for fill in ("ones", "zeros", "full", "empty")}
    | {f"{fill}_like" for fill in ("ones", "zeros", "full", "empty")}
)
# Functions that return no tensor and neither read nor write an element.
METADATA = frozenset(
    """
    __get__ size dim ndimension numel nelement stride is_contiguous storage_offset element_size __len__ __hash__ type
    get_device is_floating_point is_complex is_signed is_inference is_same_size result_type can_cast
    """.split()  # noqa: SIM905
)


class WeightAxis:
    """An axis of a module's weight, with a feature id for each of its lines.

    Args:
        kind: "in" or "out" of a layer, "norm" or "layer_norm".
        name: the module's name in the model.
        module: the module.
        tensors: the parameters and buffers that have the axis, with its number in each.
        ids: int64 `[lines]`.
    """

    def __init__(
        self, kind: str, name: str, module: nn.Module, tensors: tuple[tuple[Tensor, int], ...], ids: np.ndarray
    ):
        self.kind, self.name, self.module, self.tensors, self.ids = kind, name, module, tensors, ids


class FeatureTrace(TorchFunctionMode):
    """A mode that follows feature ids through the functions that a model calls, and records which are equal.

    Args:
        model: the model to be called while the mode is active.
        rules: how layers connect features, by torch function. Each returns the ids of the result, or None.

    The ids of a tensor are int64, with its number of axes and size 1 along axes on which they do not depend; -1 where
    an element depends on no single feature.
    """

    def __init__(self, model: nn.Module, rules: Mapping[Any, Callable[..., np.ndarray | None]]):
        super().__init__()
        self.rules = rules
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[int, nn.Module] = {
            id(tensor): module
            for module in self.names
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        self.use_counts = Counter(id(each) for module in self.names for each in module.parameters(recurse=False))
        self.axes: dict[tuple[nn.Module, str, str], WeightAxis] = {}
        self.ids: dict[int, np.ndarray] = {}
        self.alive: list[Any] = []  # an id of a Python object is unique only while the object exists
        self.id_count = 0
        self.equal_ids: list[np.ndarray] = []  # `[2, n]`: pairs of ids of one feature
        self.excluded_ids: list[np.ndarray] = []
        self.excluded_modules: set[nn.Module] = set()  # all features of their weights are excluded
        self.heads: list[tuple[np.ndarray, np.ndarray]] = []  # by call of attention: ids, and the head of each
        self.touched_ids: list[np.ndarray] = []  # by function: the ids in its results
        self.unseen = {id(parameter) for parameter in model.parameters()}
        self.function_depth = 0  # of the torch functions being called
        self.sparse_depth = 0  # of the block-sparse layers being called; the functions they call are not followed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.function_depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self.function_depth -= 1
        if not self.sparse_depth:
            self.alive.append(result)
            self.follow(function, args, kwargs, result)
        return result

    def follow(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Give the result of a function its ids, or exclude the features of its arguments."""
        name = getattr(function, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.unseen.difference_update(map(id, tensors))
        if (not results and name in METADATA) or name in OF_SHAPE:
            return
        rule = self.rules.get(function)
        if rule is not None and (ids := rule(self, *args, **kwargs)) is not None:
            self.ids[id(results[0])] = ids
        elif not results or not self._label(function, args, kwargs, tensors, results):
            self.exclude(tensors)
        # A function of some features only, say of a chunk, makes them differ from the others.
        self.touched_ids += [self.ids[id(each)].ravel() for each in results if id(each) in self.ids]

    def _label(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]) -> bool:
        """Store the ids of a function's results. Return False if it is unknown or reads a weight."""
        name = getattr(function, "__name__", "")
        labelled = [tensor for tensor in tensors if id(tensor) in self.ids]
        is_in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        # A value written into a tensor without ids may be read through others that share its memory.
        if not labelled or "out" in kwargs or (is_in_place and id(args[0]) not in self.ids):
            return False
        if any(id(tensor) in self.owners for tensor in tensors if tensor.numel() > 1):
            return False
        if name in ELEMENTWISE:
            self.ids[id(results[0])] = self._broadcast(tensors)
            return True
        if name in CHANNELWISE and len(tensors) == 1 and _has_channels(name, args, kwargs):
            ids = self._channel_ids(tensors[0], results)
            if ids is not None:
                self.ids[id(results[0])] = ids
                return True
        return name in SHAPING and self._move_ids(function, args, kwargs, results)

    def exclude(self, values: Any) -> None:
        """Exclude the features of tensors, and those of weights, from all groups."""
        for leaf in _tensors(values):
            if id(leaf) in self.ids:
                self.excluded_ids.append(self.ids[id(leaf)].ravel())
            if id(leaf) in self.owners and leaf.numel() > 1:  # not a counter of batches
                module = self.owners[id(leaf)]
                for axis in self.axes.values():
                    if axis.module is module:
                        self.excluded_ids.append(axis.ids)
                self.excluded_modules.add(module)

    def new_ids(self, count: int) -> np.ndarray:
        """Return ids that no feature has yet, int64 `[count]`."""
        self.id_count += count
        return np.arange(self.id_count - count, self.id_count)

    def axis(
        self, kind: str, module: nn.Module, key: str, tensors: tuple[tuple[Tensor, int], ...], size: int
    ) -> WeightAxis:
        """Return an axis of a module's weight. The first call creates it with new ids.

        Args:
            kind, module, tensors: those of `WeightAxis`.
            key: distinguishes weights of one module.
            size: the number of lines.
        """
        if (axis := self.axes.get((module, key, kind))) is None:
            axis = WeightAxis(kind, self.names[module], module, tensors, self.new_ids(size))
            self.axes[module, key, kind] = axis
            shared = any(self.use_counts[id(tensor)] > 1 for tensor, _ in tensors)
            if shared or module in self.excluded_modules:
                self.excluded_ids.append(axis.ids)
        return axis

    def read(self, tensor: Tensor, dim: int, axis: WeightAxis) -> None:
        """Record that an axis of a weight multiplies a dimension of a tensor."""
        dim %= tensor.dim()
        ids = self.ids.get(id(tensor))
        if ids is None or ids.size != ids.shape[dim] or ids.size != axis.ids.size:
            self.exclude(tensor)
            self.excluded_ids.append(axis.ids)
        else:
            self.unite(ids.ravel(), axis.ids)

    def unite(self, ids: np.ndarray, others: np.ndarray) -> None:
        """Record that ids at equal places are one feature. An id that meets -1 is excluded."""
        self.excluded_ids += [ids[others < 0], others[ids < 0]]
        both = (ids >= 0) & (others >= 0)
        self.equal_ids.append(np.stack([ids[both], others[both]]))

    def unite_heads(self, ids: np.ndarray, others: np.ndarray, heads: int) -> None:
        """Record that ids at equal places are one feature, which may only move within its attention head."""
        self.unite(ids, others)
        self.heads.append((ids[ids >= 0], np.repeat(np.arange(heads), ids.size // heads)[ids >= 0]))

    def _broadcast(self, tensors: list[Tensor]) -> np.ndarray:
        """Return the ids of an elementwise function's result, and record that ids which meet in it are equal."""
        ids, *others = (self.ids[id(tensor)] for tensor in tensors if id(tensor) in self.ids)
        for new in others:
            ids, new = np.broadcast_arrays(ids, new)
            self.unite(ids.ravel(), new.ravel())
        for tensor in tensors:
            if id(tensor) not in self.ids:
                shape = (1,) * (ids.ndim - tensor.dim()) + tuple(tensor.shape)
                offset = max(0, tensor.dim() - ids.ndim)
                if any(size > 1 and shape[dim + offset] > 1 for dim, size in enumerate(ids.shape)):
                    self.excluded_ids.append(ids.ravel())
                ids = ids.reshape((1,) * offset + ids.shape)
        return ids

    def _channel_ids(self, tensor: Tensor, results: list[Tensor]) -> np.ndarray | None:
        """Return the ids of a result computed channel by channel; None if they depend on another axis than 1."""
        ids = self.ids[id(tensor)]
        is_known = ids.ndim > 1 and ids.size == ids.shape[1] and len(results) == 1 and results[0].dim() == ids.ndim
        return ids if is_known and results[0].shape[1] == tensor.shape[1] else None

    def _move_ids(self, function: Callable[..., Any], args: Any, kwargs: Any, results: list[Tensor]) -> bool:
        """Call a function that moves elements on the ids instead of the tensors, and store the ids of its results.

        Return False if the results are not whole ids in the expected shapes.
        """

        def call(power: int) -> list[Tensor]:
            named = {key: ids_of(value, power) for key, value in kwargs.items()}
            return tree_leaves(function(*ids_of(args, power), **named))

        def ids_of(value: Any, power: int) -> Any:
            if type(value) in (list, tuple):
                return type(value)(ids_of(each, power) for each in value)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            ids = torch.from_numpy(self.ids.get(id(value), np.full((1,) * value.dim(), -1)))
            return ids.double().pow(power).expand(value.shape).contiguous()  # which `view` accepts

        moved = call(1)
        if [tuple(each.shape) for each in moved] != [tuple(each.shape) for each in results]:
            return False
        # Means of different features differ from the root of their mean square.
        if not all(torch.equal(each.square(), square) for each, square in zip(moved, call(2), strict=True)):
            return False
        for each, result in zip(moved, results, strict=True):
            for dim in range(each.dim()):
                first = each.narrow(dim, 0, 1)
                each = first if bool((each == first).all()) else each
            self.ids[id(result)] = each.long().numpy()
        return True


class UntracedCalls(TorchDispatchMode):
    """A mode that excludes features which reach an operation outside of torch's functions, say in `torch.jit`."""

    def __init__(self, trace: FeatureTrace):
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.trace.function_depth and not self.trace.sparse_depth:
            self.trace.exclude((args, kwargs))
        return function(*args, **(kwargs or {}))


def _has_channels(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a function of channels leaves axis 1 alone: inputs have a batch, and pads are behind it."""
    pads = kwargs["pad"] if "pad" in kwargs else args[1] if name == "pad" else ()
    axes = int(name[-2]) if name.endswith("d") and name[-2].isdigit() else max(1, len(pads) // 2)
    return bool(args) and args[0].dim() >= axes + 2


def _tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in nested containers and, a few levels deep, in attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            yield from _tensors(list(vars(leaf).values()), depth - 1)
