"""Follows the features of a model through the torch functions that it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .moves import Combination, Move
from .prunable import CONV1D, qualified

# Names of functions, without the underscores at their ends.
# Functions of each element; of tensors that broadcast, if there are several.
ELEMENTWISE = frozenset(
    """
    relu relu6 gelu silu elu selu celu leaky_relu mish softplus softsign softshrink hardshrink tanhshrink hardswish
    hardtanh hardsigmoid sigmoid tanh logsigmoid log_sigmoid abs neg exp square sqrt rsqrt pow erf sin cos clamp dropout
    dropout1d dropout2d dropout3d alpha_dropout feature_dropout contiguous clone detach to float double half bfloat16
    type_as add radd iadd sub rsub isub mul rmul imul multiply div truediv itruediv
    """.split()  # noqa: SIM905
)
# Functions that only move elements, or take means of equal elements.
SHAPING = frozenset(
    """
    view reshape flatten unflatten transpose swapaxes permute movedim squeeze unsqueeze expand getitem select narrow
    chunk split unbind tensor_split cat concat mean adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    """.split()  # noqa: SIM905
)
# Functions of each channel, axis 1.
CHANNELWISE = frozenset(
    """
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d interpolate pad
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
    get size dim ndimension numel nelement stride is_contiguous storage_offset element_size len hash type get_device
    is_floating_point is_complex is_signed is_inference is_same_size result_type can_cast
    """.split()  # noqa: SIM905
)

RETURNED = "the model returns them"


class Features(NamedTuple):
    """The features of a tensor.

    Args:
        ids: int64, with the tensor's number of axes and size 1 along axes on which they do not depend; -1 where an
            element depends on no single feature.
        constants: float64 in the shape of the ids: the value of elements that are equal for all inputs, otherwise NaN.
            None if constants are not followed or not known.
    """

    ids: np.ndarray
    constants: Tensor | None = None

    @classmethod
    def along(cls, ids: np.ndarray, constants: Tensor | None, dim: int, rank: int) -> Features:
        """Return features that lie along one dimension of a tensor of this rank."""
        shape = [-1 if each == dim % rank else 1 for each in range(rank)]
        return cls(ids.reshape(shape), None if constants is None else constants.reshape(shape))


class WeightAxis:
    """An axis of a module's weight, with a feature id for each of its lines.

    Args:
        kind: "in" or "out" of a layer, "norm" or "layer_norm".
        name: the module's name in the model.
        module: the module.
        tensors: the parameters and buffers that have the axis, with its number in each.
        ids: int64 `[lines]`.

    Attributes:
        constants: float64 `[lines]`: inputs that are equal in all calls, otherwise NaN; None before a call.
    """

    def __init__(
        self, kind: str, name: str, module: nn.Module, tensors: tuple[tuple[Tensor, int], ...], ids: np.ndarray
    ):
        self.kind, self.name, self.module, self.tensors, self.ids = kind, name, module, tensors, ids
        self.constants: Tensor | None = None


class FeatureTrace(TorchFunctionMode):
    """A mode that follows features through the functions that a model calls, and records which are equal.

    Args:
        model: the model to be called while the mode is active.
        rules: how layers connect features, by torch function. Each returns the features of the result, or None.
        for_removal: whether features may be removed, so that constants matter, and functions of their number.
    """

    def __init__(self, model: nn.Module, rules: Mapping[Any, Callable[..., Features | None]], for_removal: bool):
        super().__init__()
        self.rules, self.for_removal = rules, for_removal
        self.in_training = False  # then constants are not followed
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[int, nn.Module] = {
            id(tensor): module
            for module in self.names
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        }
        self.users_of_parameter: dict[int, list[str]] = {}
        for module, name in self.names.items():
            for parameter in module.parameters(recurse=False):
                self.users_of_parameter.setdefault(id(parameter), []).append(name)
        self.axes: dict[tuple[nn.Module, str, str], WeightAxis] = {}
        self.features: dict[int, tuple[Features, int | None]] = {}  # by id of the tensor, with its version
        self.alive: list[Any] = []  # an id of a Python object is unique only while the object exists
        self.id_count = 0
        self.equal_ids: list[np.ndarray] = []  # `[2, n]`: pairs of ids of one feature
        # Ids with a reason: of features whose order matters, and of those that may move but not be removed.
        self.excluded: list[tuple[np.ndarray, str]] = []
        self.unremovable: list[tuple[np.ndarray, str]] = []
        self.moves: list[Move | Combination] = []  # which may need all features
        self.excluded_modules: dict[nn.Module, str] = {}  # all features of their weights are excluded
        self.heads: list[tuple[int, np.ndarray, np.ndarray]] = []  # a call of attention, ids, and the head of each
        self.attention_calls = 0
        self.touched_ids: list[np.ndarray] = []  # by function: the ids in its results
        self.unseen = {id(parameter) for parameter in model.parameters()}
        self.calls: Counter[nn.Module] = Counter()
        self.modules: list[nn.Module] = []  # those that are being called, innermost last
        self.function_depth = 0  # of the torch functions being called
        self.sparse_depth = 0  # of the block-sparse layers being called; the functions they call are not followed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.function_depth += 1
        try:
            if _name(function) in ("to", "type_as") and len(args) > 1 and isinstance(args[1], Tensor):
                function, args = Tensor.to, (args[0], args[1].device, args[1].dtype)  # its elements do not matter
            constants = None if self.sparse_depth else self._constant_arguments(function, args, kwargs)
            result = function(*args, **kwargs)
            if not self.sparse_depth:
                self.alive.append(result)
                self.follow(function, args, kwargs, result, constants)
        finally:
            self.function_depth -= 1
        return result

    def follow(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, constants: Any = None) -> None:
        """Give the result of a function its features, or exclude the features of its arguments."""
        name = _name(function)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.unseen.difference_update(map(id, tensors))
        if (not results and name in METADATA) or name in OF_SHAPE:
            return
        rule = self.rules.get(function)
        if rule is not None and (features := rule(self, *args, **kwargs)) is not None:
            self.set_features(results[0], features)
        elif not results or not self._follow_function(function, args, kwargs, tensors, results, constants):
            self.exclude(tensors, f"{self.title(name)} reads them", f"the model also calls {name} on its weight")
        # A function of some features only, say of a chunk, makes them differ from the others.
        self.touched_ids += [self.features[id(each)][0].ids.ravel() for each in results if id(each) in self.features]

    def title(self, function: str) -> str:
        """Return the innermost module of torch.nn that is being called, or the function."""
        module = self.modules[-1] if self.modules else None
        if module is None or not type(module).__module__.startswith("torch.nn."):
            return function
        return f"{self.names[module] or 'the model'} ({type(module).__name__})"

    def set_features(self, tensor: Tensor, features: Features) -> None:
        """Store the features of a tensor, as long as no function changes it in place."""
        self.features[id(tensor)] = features, _version(tensor)

    def ids(self, tensor: Tensor) -> np.ndarray | None:
        """Return the ids of a tensor's features, or None."""
        return self.features[id(tensor)][0].ids if id(tensor) in self.features else None

    def constants(self, tensor: Tensor) -> Tensor | None:
        """Return the constants of a tensor, or None if they are not known or it was changed in place, say by a view."""
        features, version = self.features.get(id(tensor), (None, None))
        is_current = features is not None and version is not None and version == _version(tensor)
        return features.constants if is_current else None  # type: ignore[union-attr]

    def exclude(self, values: Any, reason: str, reason_of_weight: str = "") -> None:
        """Exclude the features of tensors, and those of weights, from all groups."""
        for leaf in _tensors(values):
            if (ids := self.ids(leaf)) is not None:
                self.excluded.append((ids.ravel(), reason))
            if id(leaf) in self.owners and leaf.numel() > 1:  # not a counter of batches
                module = self.owners[id(leaf)]
                for axis in self.axes.values():
                    if axis.module is module:
                        self.excluded.append((axis.ids, reason_of_weight or reason))
                self.excluded_modules.setdefault(module, reason_of_weight or reason)

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
            users = [name for tensor, _ in tensors for name in self.users_of_parameter.get(id(tensor), ())]
            if len(set(users)) > 1 or len(users) > len(tensors):
                others = ", ".join(dict.fromkeys(name for name in users if name != axis.name)) or "itself"
                self.excluded.append((axis.ids, f"it shares a parameter with {others}"))
            elif module in self.excluded_modules:
                self.excluded.append((axis.ids, self.excluded_modules[module]))
        return axis

    def read(self, tensor: Tensor, dim: int, axis: WeightAxis) -> None:
        """Record that an axis of a weight multiplies a dimension of a tensor."""
        dim %= tensor.dim()
        ids, constants = self.ids(tensor), self.constants(tensor)
        if ids is None or ids.size != ids.shape[dim] or ids.size != axis.ids.size:
            self.exclude(tensor, f"{axis.name or 'the model'} reads them")
            self.excluded.append((axis.ids, "other functions compute them"))
            return
        self.unite(ids.ravel(), axis.ids)
        if self.in_training and axis.constants is not None:
            return
        constants = torch.full((ids.size,), torch.nan, device="cpu") if constants is None else constants.flatten()
        known = constants if axis.constants is None else axis.constants
        axis.constants = known.double().masked_fill(known != constants, torch.nan)

    def unite(self, ids: np.ndarray, others: np.ndarray) -> None:
        """Record that ids at equal places are one feature. An id that meets -1 is excluded."""
        reason = "functions mix them with others"
        self.excluded += [(ids[others < 0], reason), (others[ids < 0], reason)]
        both = (ids >= 0) & (others >= 0)
        self.equal_ids.append(np.stack([ids[both], others[both]]))

    def unite_heads(self, ids: np.ndarray, others: np.ndarray, heads: int) -> None:
        """Record that ids at equal places are one feature, which may only move within its head of this attention."""
        self.unite(ids, others)
        head_of_id = np.repeat(np.arange(heads), ids.size // heads)
        self.heads.append((self.attention_calls, ids[ids >= 0], head_of_id[ids >= 0]))

    def _follow_function(
        self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor], constants: Any
    ) -> bool:
        """Store the features of a function's results. Return False if it is unknown or reads a weight."""
        name, full_name = _name(function), getattr(function, "__name__", "")
        labelled = [tensor for tensor in tensors if id(tensor) in self.features]
        is_in_place = full_name.startswith("__i") or (full_name.endswith("_") and not full_name.endswith("__"))
        # A value written into a tensor without ids may be read through others that share its memory.
        if not labelled or "out" in kwargs or (is_in_place and id(args[0]) not in self.features):
            return False
        if any(id(tensor) in self.owners for tensor in tensors if tensor.numel() > 1):
            return False
        if name in ELEMENTWISE:
            ids = [self._broadcast(tensors)]
        elif name in CHANNELWISE and len(tensors) == 1 and _has_channels(name, args, kwargs):
            ids = self._channel_ids(tensors[0], results)
        elif name in SHAPING:
            ids = self._moved_ids(function, args, kwargs, results)
            in_conv1d = bool(self.modules) and qualified(type(self.modules[-1])) == CONV1D  # it views by its own size
            if ids and self.for_removal and not in_conv1d:
                ids_of_tensor = {id(each): self.features[id(each)][0].ids for each in labelled}
                reason = f"{self.title(name)} depends on their number"
                self.moves.append(Move(function, args, kwargs, ids_of_tensor, reason))
        else:
            return False
        values = self._constant_results(function, constants, results, ids)
        for result, each, value in zip(results, ids, values, strict=False):
            self.set_features(result, Features(each, value))
        return bool(ids)

    def _broadcast(self, tensors: list[Tensor]) -> np.ndarray:
        """Return the ids of an elementwise function's result, and record that ids which meet in it are equal."""
        ids, *others = (self.features[id(tensor)][0].ids for tensor in tensors if id(tensor) in self.features)
        for new in others:
            ids, new = np.broadcast_arrays(ids, new)
            self.unite(ids.ravel(), new.ravel())
        for tensor in tensors:
            if id(tensor) not in self.features:
                shape = (1,) * (ids.ndim - tensor.dim()) + tuple(tensor.shape)
                offset = max(0, tensor.dim() - ids.ndim)
                reason = "they are combined with a tensor that no layer computes"
                varies = [size > 1 and shape[dim + offset] > 1 for dim, size in enumerate(ids.shape)]
                if any(varies) and self.for_removal and not all(varies):
                    self.moves.append(Combination(ids, varies, reason))
                elif any(varies):
                    self.excluded.append((ids.ravel(), reason))
                ids = ids.reshape((1,) * offset + ids.shape)
        return ids

    def _channel_ids(self, tensor: Tensor, results: list[Tensor]) -> list[np.ndarray]:
        """Return the ids of a result computed channel by channel; nothing if they depend on another axis than 1."""
        ids = self.features[id(tensor)][0].ids
        is_known = ids.ndim > 1 and ids.size == ids.shape[1] and len(results) == 1 and results[0].dim() == ids.ndim
        return [ids] if is_known and results[0].shape[1] == tensor.shape[1] else []

    def _moved_ids(
        self, function: Callable[..., Any], args: Any, kwargs: Any, results: list[Tensor]
    ) -> list[np.ndarray]:
        """Call a function that moves elements on the ids instead of the tensors, and return the ids of its results.

        Return nothing if the results are not whole ids in the expected shapes.
        """

        def call(power: int) -> list[Tensor]:
            def ids_of(tensor: Tensor) -> Tensor:
                if not tensor.is_floating_point():
                    return tensor
                ids = self.ids(tensor)
                whole = torch.from_numpy(np.full((1,) * tensor.dim(), -1) if ids is None else ids)
                return whole.double().pow(power).expand(tensor.shape).contiguous()  # which `view` accepts

            moved_args, moved_kwargs = tree_map_only(Tensor, ids_of, (tuple(args), kwargs))
            return tree_leaves(function(*moved_args, **moved_kwargs))

        moved = call(1)
        if [tuple(each.shape) for each in moved] != [tuple(each.shape) for each in results]:
            return []
        # Means of different features differ from the root of their mean square.
        if not all(torch.equal(each.square(), square) for each, square in zip(moved, call(2), strict=True)):
            return []
        return [_collapse(each).long().numpy() for each in moved] if all(each.numel() for each in moved) else []

    # -- constants -----------------------------------------------------------------------------------------------

    def _constant_arguments(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of a function with constants in place of tensors; None if no result is constant."""
        name = _name(function)
        if not self.for_removal or self.in_training or name not in ELEMENTWISE | CHANNELWISE | SHAPING:
            return None
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        if "dropout" in name and training:
            return None
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = {id(each): self.constants(each) for each in tensors}
        if all(value is None for value in values.values()):
            return None

        def constant_of(tensor: Tensor) -> Tensor:
            value = values[id(tensor)]
            if value is None:
                return torch.full_like(tensor, torch.nan, dtype=torch.float64, device="cpu") if (
                    tensor.is_floating_point() or name in ELEMENTWISE) else tensor  # fmt: skip
            return value.clone() if name in ELEMENTWISE else value.expand(tensor.shape).clone()

        return tree_map_only(Tensor, constant_of, (tuple(args), kwargs))

    def _constant_results(
        self, function: Any, arguments: Any, results: list[Tensor], ids: list[np.ndarray]
    ) -> list[Tensor | None]:
        """Return the constants of a function's results, in the shapes of their ids, by a call on constants."""
        if arguments is None or not ids:
            return [None] * len(results)
        name = _name(function)
        if name in ELEMENTWISE:
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
            unknown = torch.stack(list(torch.broadcast_tensors(*(each.isnan() for each in tensors)))).any(0)
        try:
            values = [leaf for leaf in tree_leaves(function(*arguments[0], **arguments[1])) if isinstance(leaf, Tensor)]
        except (RuntimeError, TypeError, ValueError):  # not for float64
            return [None] * len(results)
        if name in ELEMENTWISE:
            values = [values[0].double().masked_fill(unknown, torch.nan)]
        constants: list[Tensor | None] = []
        for value, each in zip(values, ids, strict=False):
            for dim in range(value.dim()):
                if dim < each.ndim and each.shape[dim] == 1 and value.shape[dim] > 1:
                    first = value.narrow(dim, 0, 1)
                    value = first.masked_fill((value != first).any(dim, keepdim=True), torch.nan)
            constants.append(value.double().expand(each.shape) if value.dim() <= each.ndim else None)
        return constants


class UntracedCalls(TorchDispatchMode):
    """A mode that excludes features which reach an operation outside of torch's functions, say in `torch.jit`."""

    def __init__(self, trace: FeatureTrace):
        super().__init__()
        self.trace = trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler, which takes seconds

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.trace.function_depth and not self.trace.sparse_depth:
            self.trace.exclude((args, kwargs), f"{self.trace.title(_name(function))} reads them")
        return function(*args, **(kwargs or {}))


def _name(function: Any) -> str:
    """Return a function's name without underscores at its ends."""
    return str(getattr(function, "__name__", "")).strip("_")


def _version(tensor: Tensor) -> int | None:
    """Return a number that changes with each change of the tensor's memory in place; None if it is not known."""
    return None if tensor.is_inference() else tensor._version


def _collapse(ids: Tensor) -> Tensor:
    """Return ids with size 1 along the axes on which they do not depend."""
    for dim in range(ids.dim()):
        first = ids.narrow(dim, 0, 1)
        ids = first if bool((ids == first).all()) else ids
    return ids


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
