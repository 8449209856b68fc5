"""How layers connect features: which axes of a weight read its inputs and compute its outputs, for each known function.

Each function takes the trace and the arguments of a torch function, records what it reads and computes, and returns the
feature ids of its result; None if it does not know this use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.conv import Conv1d, Conv2d, Conv3d
from ..nn.linear import Linear
from .feature_trace import FeatureTrace


def _owns(module: nn.Module, **tensors: Tensor | None) -> bool:
    """Return whether these tensors are a module's parameters of these names."""
    return all(getattr(module, key, None) is tensor for key, tensor in tensors.items())


def _with_bias(weight: Tensor, bias: Tensor | None, axis: int = 0) -> tuple[tuple[Tensor, int], ...]:
    """Return the tensors of a layer's output axis, with the axis in each."""
    return ((weight, axis),) if bias is None else ((weight, axis), (bias, 0))


def _place(ids: np.ndarray, dim: int, rank: int) -> np.ndarray:
    """Return ids along one dimension of a tensor of this rank."""
    return ids.reshape([-1 if each == dim % rank else 1 for each in range(rank)])


def _linear(trace: FeatureTrace, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> np.ndarray | None:
    """Follow F.linear."""
    module = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    trace.read(input, -1, trace.axis("in", module, "weight", ((weight, 1),), weight.shape[1]))
    out = trace.axis("out", module, "weight", _with_bias(weight, bias), weight.shape[0])
    return _place(out.ids, -1, input.dim())


def _conv1d_of_transformers(
    trace: FeatureTrace, bias: Tensor, input: Tensor, weight: Tensor, **_: Any
) -> np.ndarray | None:
    """Follow torch.addmm, which the Conv1D of transformers calls with a weight `[in, out]`."""
    module = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    trace.read(input, 1, trace.axis("in", module, "weight", ((weight, 0),), weight.shape[0]))
    out = trace.axis("out", module, "weight", _with_bias(weight, bias, 1), weight.shape[1])
    return _place(out.ids, 1, 2)


def _convolution(
    trace: FeatureTrace, input: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any
) -> np.ndarray | None:
    """Follow a convolution of one group, or a depthwise one, whose channels are both its inputs and its outputs."""
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


def _batch_norm(trace: FeatureTrace, input: Tensor, mean: Tensor | None, *_: Any, **named: Any) -> np.ndarray | None:
    """Follow a batch norm that has running statistics."""
    module = trace.owners.get(id(mean))
    return None if module is None or input.dim() < 2 else _norm(trace, "norm", input, 1, module)


def _layer_norm(
    trace: FeatureTrace,
    input: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> np.ndarray | None:
    """Follow a layer norm over the last dimension."""
    module = trace.owners.get(id(weight))
    if module is None or len(shape) != 1 or not _owns(module, weight=weight, bias=bias):
        return None
    return _norm(trace, "layer_norm", input, -1, module)


def _norm(trace: FeatureTrace, kind: str, input: Tensor, dim: int, module: nn.Module) -> np.ndarray:
    """Follow a norm whose parameters and statistics have an entry for each feature of a dimension."""
    size = input.shape[dim]
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    per_feature = tuple((tensor, 0) for tensor in tensors if tensor.shape == (size,))
    axis = trace.axis(kind, module, "weight", per_feature, size)
    trace.read(input, dim, axis)
    return _place(axis.ids, dim, input.dim())


def _attention(
    trace: FeatureTrace, query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> np.ndarray:
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
    trace: FeatureTrace, query: Tensor, key: Tensor, value: Tensor, size: int, heads: int, weight: Tensor | None,
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
    features = trace.axis("out", out, "weight", _with_bias(out.weight, out.bias), size).ids
    return _place(features, -1, query.dim())


LAYER_RULES: dict[Any, Callable[..., np.ndarray | None]] = {
    F.linear: _linear,
    torch.addmm: _conv1d_of_transformers,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead_attention,
}


@contextmanager
def trace_sparse_layers(trace: FeatureTrace) -> Iterator[None]:
    """Follow calls of block-sparse layers, which bypass torch's functions, inside the `with` block."""
    hooks = []

    def enter(module: nn.Module, *_: Any) -> None:
        trace.sparse_depth += 1

    def leave(module: Any, args: Any, output: Tensor) -> None:
        trace.sparse_depth -= 1
        if trace.sparse_depth:
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
