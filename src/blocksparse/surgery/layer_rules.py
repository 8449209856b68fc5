"""How layers connect features: which axes of a weight read its inputs and compute its outputs, for each known function.

Each rule takes the trace and the arguments of a torch function, records what it reads and computes, and returns the
features of its result; None if it does not know this use.
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
from .feature_trace import Features, FeatureTrace, WeightAxis
from .prunable import CONVOLUTIONS, TRANSPOSED

SPARSE_LAYERS = Linear, Conv1d, Conv2d, Conv3d


def _owns(module: nn.Module, **tensors: Tensor | None) -> bool:
    """Return whether these tensors are a module's parameters of these names."""
    return all(getattr(module, key, None) is tensor for key, tensor in tensors.items())


def _with_bias(weight: Tensor, bias: Tensor | None, axis: int = 0) -> tuple[tuple[Tensor, int], ...]:
    """Return the tensors of a layer's output axis, with the axis in each."""
    return ((weight, axis),) if bias is None else ((weight, axis), (bias, 0))


def _outputs(trace: FeatureTrace, axis: WeightAxis, dim: int, rank: int) -> Features:
    """Return the features that lines of a weight compute. Those without a weight other than 0 are their bias."""
    if not trace.for_removal or not axis.tensors:
        return Features.along(axis.ids, None, dim, rank)
    (weight, lines), *bias = axis.tensors
    added = bias[0][0].detach().double() if bias else torch.zeros(len(axis.ids), dtype=torch.float64, device="cpu")
    written = (weight.detach() != 0).movedim(lines, 0).flatten(1).any(1).cpu()
    return Features.along(axis.ids, added.cpu().masked_fill(written, torch.nan), dim, rank)


def adds_constants(module: Any) -> bool:
    """Return whether a constant input adds the same to all outputs of a feature: no zeros pad the input."""
    if type(module) in TRANSPOSED:
        return False
    if type(module) in CONVOLUTIONS and module.padding_mode == "zeros":
        return not any(module.padding) if not isinstance(module.padding, str) else module.padding == "valid"
    return True


def _linear(trace: FeatureTrace, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Features | None:
    """Follow F.linear."""
    module = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    trace.read(input, -1, trace.axis("in", module, "weight", ((weight, 1),), weight.shape[1]))
    out = trace.axis("out", module, "weight", _with_bias(weight, bias), weight.shape[0])
    return _outputs(trace, out, -1, input.dim())


def _conv1d_of_transformers(
    trace: FeatureTrace, bias: Tensor, input: Tensor, weight: Tensor, **_: Any
) -> Features | None:
    """Follow torch.addmm, which the Conv1D of transformers calls with a weight `[in, out]`."""
    module = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    trace.read(input, 1, trace.axis("in", module, "weight", ((weight, 0),), weight.shape[0]))
    out = trace.axis("out", module, "weight", _with_bias(weight, bias, 1), weight.shape[1])
    return _outputs(trace, out, 1, 2)


def _convolution(
    trace: FeatureTrace, input: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **named: Any
) -> Features | None:
    """Follow a convolution of one group, or a depthwise one, whose channels are both its inputs and its outputs."""
    module: Any = trace.owners.get(id(weight))
    if module is None or not _owns(module, weight=weight, bias=bias):
        return None
    groups, channels = getattr(module, "groups", None), -weight.dim() + 1
    reads, writes = (0, 1) if type(module) in TRANSPOSED else (1, 0)
    if groups == 1:
        trace.read(input, channels, trace.axis("in", module, "weight", ((weight, reads),), weight.shape[reads]))
        out = trace.axis("out", module, "weight", _with_bias(weight, bias, writes), weight.shape[writes])
        return _outputs(trace, out, channels, input.dim())
    if groups != weight.shape[0] or weight.shape[1] != 1:
        return None
    out = trace.axis("norm", module, "weight", _with_bias(weight, bias), weight.shape[0])
    constants = trace.constants(input)
    trace.read(input, channels, out)
    result = _outputs(trace, out, channels, input.dim())
    if result.constants is None or constants is None or constants.shape != result.constants.shape:
        return result
    gains = weight.detach().double().flatten(1).sum(1).cpu().view(constants.shape)
    computed = gains * constants + (0 if bias is None else bias.detach().double().cpu().view(constants.shape))
    is_known = adds_constants(module) | (constants == 0)
    return result._replace(constants=torch.where(result.constants.isnan() & is_known, computed, result.constants))


def _batch_norm(trace: FeatureTrace, input: Tensor, mean: Tensor | None, *_: Any, **named: Any) -> Features | None:
    """Follow a batch norm that has running statistics."""
    module: Any = trace.owners.get(id(mean))
    if module is None or input.dim() < 2:
        return None
    constants = trace.constants(input)
    result = _norm(trace, "norm", input, 1, module)
    if (
        constants is None
        or constants.shape != result.ids.shape
        or not isinstance(module, nn.modules.batchnorm._BatchNorm)
    ):
        return result

    def of(tensor: Tensor | None, otherwise: float) -> Tensor:
        values = torch.full((module.num_features,), otherwise, device="cpu") if tensor is None else tensor.detach()
        return values.double().cpu().view(constants.shape)

    gain, shift = of(module.weight, 1.0), of(module.bias, 0.0)
    normalized = (constants - of(module.running_mean, 0.0)) / (of(module.running_var, 1.0) + module.eps).sqrt()
    return result._replace(constants=torch.where(gain == 0, shift, normalized * gain + shift))


def _layer_norm(
    trace: FeatureTrace,
    input: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Features | None:
    """Follow a layer norm over the last dimension."""
    module = trace.owners.get(id(weight))
    if module is None or len(shape) != 1 or not _owns(module, weight=weight, bias=bias):
        return None
    result = _norm(trace, "layer_norm", input, -1, module)
    trace.unremovable.append((result.ids.ravel(), f"{trace.title('layer_norm')} reads them"))
    return result


def _norm(trace: FeatureTrace, kind: str, input: Tensor, dim: int, module: nn.Module) -> Features:
    """Follow a norm whose parameters and statistics have an entry for each feature of a dimension."""
    size = input.shape[dim]
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    per_feature = tuple((tensor, 0) for tensor in tensors if tensor.shape == (size,))
    axis = trace.axis(kind, module, "weight", per_feature, size)
    trace.read(input, dim, axis)
    return Features.along(axis.ids, None, dim, input.dim())


def _attention(
    trace: FeatureTrace, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *options: Any,
    attn_mask: Tensor | None = None, enable_gqa: bool = False, **named: Any,
) -> Features:  # fmt: skip
    """Follow scaled dot-product attention of `[batch, heads, tokens, features]`."""
    trace.attention_calls += 1
    mask = attn_mask if mask is None else mask
    unknown = np.full((1,) * query.dim(), -1)
    ids = [unknown if (own := trace.ids(each)) is None else own for each in (query, key, value)]
    heads = query.shape[-3] if query.dim() > 3 else 1
    if enable_gqa:  # several heads of queries share keys and values
        ids[1:] = [np.repeat(each, heads // key.shape[-3], axis=-3) for each in ids[1:]]
    known = [
        each.size == heads * tensor.shape[-1]
        and each.shape[-1] == tensor.shape[-1]
        and tensor.dim() == query.dim()
        and (heads == 1 or each.shape[-3] == heads)  # not along the axis of tokens
        for each, tensor in zip(ids, (query, key, value), strict=True)
    ]
    if known[0] and known[1]:
        trace.unite_heads(ids[0].ravel(), ids[1].ravel(), heads)
    else:
        trace.exclude([query, key], "attention reads them")
    if not known[2]:
        trace.exclude(value, "attention reads them")
        return Features(unknown)
    trace.unite_heads(ids[2].ravel(), ids[2].ravel(), heads)
    if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
        trace.unremovable.append((ids[2].ravel(), "attention has a mask for each head"))
    constants = None if enable_gqa else trace.constants(value)
    if constants is not None and mask is not None:  # a token that sees no other is 0
        constants = constants.masked_fill(constants != 0, torch.nan)
    return Features(ids[2], constants)


def _multihead_attention(
    trace: FeatureTrace, query: Tensor, key: Tensor, value: Tensor, size: int, heads: int, weight: Tensor | None,
    bias: Tensor | None, bias_k: Tensor | None, *options: Any, **named: Any,
) -> Features | None:  # fmt: skip
    """Follow `torch.nn.MultiheadAttention`; its result is a tuple, of which the first tensor has features."""
    module = trace.owners.get(id(weight))
    if not isinstance(module, nn.MultiheadAttention) or bias_k is not None or weight is not module.in_proj_weight:
        return None
    trace.attention_calls += 1
    inputs = trace.axis("in", module, "in_proj", ((weight, 1),), size)
    reason = f"{trace.title('attention')} reads them"
    trace.unremovable.append((inputs.ids, reason))
    for each in (query, key, value):
        trace.read(each, -1, inputs)
    features = trace.axis("out", module, "in_proj", _with_bias(weight, bias), 3 * size).ids
    trace.unite_heads(features[:size], features[size : 2 * size], heads)
    trace.unite_heads(features[2 * size :], features[2 * size :], heads)
    trace.unremovable.append((features, reason))
    out = module.out_proj
    trace.unite(features[2 * size :], trace.axis("in", out, "weight", ((out.weight, 1),), size).ids)
    axis = trace.axis("out", out, "weight", _with_bias(out.weight, out.bias), size)
    return _outputs(trace, axis, -1, query.dim())


LAYER_RULES: dict[Any, Callable[..., Features | None]] = {
    F.linear: _linear,
    torch.addmm: _conv1d_of_transformers,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _convolution),
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multihead_attention,
}


@contextmanager
def follow_modules(trace: FeatureTrace) -> Iterator[None]:
    """Record which modules are called inside the `with` block, and follow block-sparse layers.

    These bypass torch's functions.
    """
    hooks = []

    def enter(module: nn.Module, *_: Any) -> None:
        trace.modules.append(module)
        trace.calls[module] += not trace.in_training
        trace.sparse_depth += isinstance(module, SPARSE_LAYERS)

    def leave(module: Any, args: Any, output: Any) -> None:
        while trace.modules.pop() is not module:  # a module that raised an error
            pass
        if not isinstance(module, SPARSE_LAYERS):
            return
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
        trace.set_features(output, Features.along(out.ids, None, dim, output.dim()))

    for module in trace.names:
        if not isinstance(module, torch.jit.ScriptModule):
            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
