"""Finds which layers compute the features of a model and which layers read them, by tracing a call on an example.

Use:

>>> import torch
>>> from blocksparse.surgery.connections import find_features
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> (group,) = find_features(model, torch.randn(4, 8))
>>> group.size, [port.name for port in group.producers], [port.name for port in group.consumers]
(6, ['0'], ['2'])

The features of a group may be reordered: `group.permute(order)` reorders them in every tensor and leaves the model's
outputs as they are, up to rounding. `trace_features` also returns the groups whose order matters, and why features may
not be removed. The trace sees calls of torch's functions only, so compare the model's outputs afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .feature_trace import RETURNED, FeatureTrace, UntracedCalls, WeightAxis
from .layer_rules import LAYER_RULES, follow_modules
from .model_tools import evaluation_mode, parameter_device, uncompiled
from .moves import Combination, Move


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
        constants: float64 `[features, lines]`: the inputs of a consumer that are equal in all calls, otherwise NaN;
            None if they were not followed.
    """

    name: str
    module: nn.Module
    tensors: tuple[tuple[Tensor, int], ...]
    positions: np.ndarray
    constants: Tensor | None = None


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
        attends: whether attention compares or mixes them.
        attention: the number of the call of attention, whose heads are the sections; None if there are none or several.
        excluded: why their order matters, or None.
        unremovable: why they may move but not be removed, or None.
    """

    size: int
    producers: tuple[Port, ...]
    consumers: tuple[Port, ...]
    batch_norms: tuple[Port, ...] = ()
    layer_norms: tuple[Port, ...] = ()
    sections: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    attends: bool = False
    attention: int | None = None
    excluded: str | None = None
    unremovable: str | None = None

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
    return reorderable(trace_features(model, args, kwargs)[0])


def reorderable(groups: list[FeatureGroup]) -> list[FeatureGroup]:
    """Return the groups whose features can be reordered, of all groups that `trace_features` returns."""
    return [group for group in groups if group.excluded is None and (group.consumers or group.attends)]


def trace_features(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, for_removal: bool = False
) -> tuple[list[FeatureGroup], FeatureTrace]:
    """Return all groups of two features or more that layers compute, and the trace of the model's call.

    Args:
        model, args, kwargs: those of `find_features`.
        for_removal: whether to follow constants, and to find out which features may not be removed.
    """
    trace = FeatureTrace(model, LAYER_RULES, for_removal)
    with torch.no_grad(), follow_modules(trace), uncompiled():
        with evaluation_mode(model), UntracedCalls(trace), trace:
            trace.exclude(model(*args, **kwargs), RETURNED)
        if trace.unseen:  # such as an auxiliary head, which is called in training only
            _trace_in_training(trace, model, args, kwargs)
    return _group_features(trace), trace


def _trace_in_training(trace: FeatureTrace, model: nn.Module, args: Any, kwargs: Any) -> None:
    """Follow a call in training mode too, if the model accepts it, and restore buffers and random states."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gpus = [parameter_device(model)] if parameter_device(model).type == "cuda" else []
    trace.in_training, trace.attention_calls = True, 0  # the same calls again
    try:
        with torch.random.fork_rng(gpus), UntracedCalls(trace), trace:
            trace.exclude(model.train()(*args, **kwargs), RETURNED)
    except Exception:  # the user's module may raise anything, say because it needs labels in training
        return
    finally:
        for module, mode in modes.items():
            module.training = mode
        for buffer, value in buffers:
            buffer.copy_(value)


def _group_features(trace: FeatureTrace) -> list[FeatureGroup]:
    """Group the features of a trace that lie on the same axes of weights and take part in the same attention."""
    feature_of_id = _connected_components(trace.id_count, trace.equal_ids)
    excluded, unremovable = (
        {feature: reason for ids, reason in reversed(entries) for feature in set(feature_of_id[ids[ids >= 0]].tolist())}
        for entries in (trace.excluded, trace.unremovable)
    )
    # A row for each call of attention: the head of each feature, counted from 1; 0 if it takes no part.
    heads = np.zeros((len(trace.heads), trace.id_count), np.int64)
    for row, (_, ids, head) in zip(heads, trace.heads, strict=True):
        np.maximum.at(row, feature_of_id[ids], head + 1)
    # A number for each feature, equal for those that the same functions computed.
    history, generator = np.zeros(trace.id_count, np.int64), np.random.default_rng(0)
    for ids in trace.touched_ids:
        history[np.unique(feature_of_id[ids[ids >= 0]])] ^= generator.integers(2**63 - 1)
    axes = list(trace.axes.values())
    places = _places_of_features(axes, feature_of_id)
    groups: dict[Any, list[int]] = {}
    for feature, lines_by_axis in places.items():
        kinds = {axes[number].kind for number in lines_by_axis}
        attends = tuple((heads[:, feature] > 0).tolist())
        if "out" in kinds:
            line_counts = tuple((number, len(lines)) for number, lines in lines_by_axis.items())
            key = line_counts, attends, int(history[feature]), excluded.get(feature)
            groups.setdefault(key, []).append(feature)
    return [
        replace(
            _make_group(axes, [places[feature] for feature in features], heads[:, features]),
            attends=any(key[1]),
            attention=_only_attention(trace, key[1]),
            excluded=key[3],
            unremovable=next((unremovable[feature] for feature in features if feature in unremovable), None)
            or _reason_of_move(np.array(features), heads[:, features].sum(0), feature_of_id, trace.moves),
        )
        for key, features in groups.items()
        if len(features) > 1
    ]


def _only_attention(trace: FeatureTrace, attends: tuple[bool, ...]) -> int | None:
    """Return the number of the only call of attention that reads features; None if there are none or several."""
    calls = {call for (call, *_), is_read in zip(trace.heads, attends, strict=True) if is_read}
    return calls.pop() if len(calls) == 1 else None


def _reason_of_move(
    features: np.ndarray, heads: np.ndarray, feature_of_id: np.ndarray, moves: list[Move | Combination]
) -> str | None:
    """Return why a function of these features needs all of them, or None.

    Few features may not be enough to see it: half of 23 lines is 12, as of 24. So nearly all are removed, too. Features
    that attention reads are removed by whole heads.
    """
    units = heads if heads.any() else np.arange(len(features))
    first, last = units == units.min(), units == units.max()
    if first.all():  # one head, which stays
        return None
    for move in moves:
        if np.isin(features, feature_of_id[move.touched[move.touched >= 0]]).any():
            for removed in (features[first], features[last], features[~first], features[~last]):
                if not move.works_without(lambda ids: np.isin(feature_of_id[ids], removed) & (ids >= 0)):  # noqa: B023
                    return move.reason
    return None


def _places_of_features(axes: list[WeightAxis], feature_of_id: np.ndarray) -> dict[int, dict[int, np.ndarray]]:
    """Return where each feature lies: by feature and by index of the axis, its int64 lines on that axis."""
    places: dict[int, dict[int, np.ndarray]] = {}
    for number, axis in enumerate(axes):
        if not len(axis.ids):
            continue
        feature_of_line = feature_of_id[axis.ids]
        order = np.argsort(feature_of_line, kind="stable")
        features, starts = np.unique(feature_of_line[order], return_index=True)
        for feature, lines in zip(features.tolist(), np.split(order, starts[1:]), strict=True):
            places.setdefault(feature, {})[number] = lines
    return places


def _make_group(axes: list[WeightAxis], places: list[dict[int, np.ndarray]], heads: np.ndarray) -> FeatureGroup:
    """Build the group of features that lie on the same axes.

    Args:
        axes: all axes of the trace.
        places: for each feature of the group, its lines by index of the axis.
        heads: int64 `[calls of attention, features]`: the head of each feature.
    """
    ports: dict[str, list[Port]] = {"out": [], "in": [], "norm": [], "layer_norm": []}
    for number in places[0]:
        axis, positions = axes[number], np.stack([lines_by_axis[number] for lines_by_axis in places])
        constants = None if axis.constants is None else axis.constants[torch.from_numpy(positions)]
        ports[axis.kind].append(Port(axis.name, axis.module, axis.tensors, positions, constants))
    rows = heads[heads.any(1)]
    sections = (
        rows[0] - 1 if len(rows) and (rows == rows[0]).all() else np.unique(heads, axis=1, return_inverse=True)[1]
    )
    return FeatureGroup(
        size=len(places),
        producers=tuple(ports["out"]),
        consumers=tuple(ports["in"]),
        batch_norms=tuple(ports["norm"]),
        layer_norms=tuple(ports["layer_norm"]),
        sections=sections.reshape(-1),
    )


def _connected_components(count: int, pairs: list[np.ndarray]) -> np.ndarray:
    """Return the smallest id that each id is connected to, int64 `[count]`. Pairs `[2, n]` are the edges."""
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
