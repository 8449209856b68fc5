"""Loads the state of a sparsified model into a dense one of the same architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import check_model
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..state_indices import layout_of_indices
from ..surgery.model_tools import copy_model
from ..surgery.prunable import prunable
from ..surgery.replace import replace_with_sparse
from ..surgery.tied import forget_ties, tie, tied_names, untie_output_layers


def load_sparsified(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load the state dict of a sparsified model into a model that is still dense, in place.

    Weights with `values`, `crow_indices` and `col_indices` in the state become block-sparse; all others are loaded as
    by `load_state_dict`. The state needs only one of several tied weights, as in safetensors files. If the model ties a
    linear layer to an embedding, and the state stores a weight of its own for the layer, the layer is untied.

    Args:
        model: a dense model of the same architecture with any values. On the meta device it adopts the tensors
            themselves, of any dtype.
        state: the state dict of the sparsified model, from a safetensors file say. For models of the transformers
            library use `save_pretrained` and `from_pretrained` instead.

    Returns:
        The model. This is another object only if the model itself is a layer that became block-sparse.

    Raises:
        BlockSparseError: tensors that are missing, unknown, or do not fit the model, or that differ where the model has
            one weight for several layers. Nothing is changed then.

    >>> import torch, blocksparse as bs
    >>> state = bs.sparsify(torch.nn.Linear(256, 256), density=0.25, force=True).state_dict()
    >>> bs.load_sparsified(torch.nn.Linear(256, 256), state)
    Linear(in_features=256, out_features=256, block_size=(32, 32), nnz=16, density=0.25, bias=True)
    """
    check_model(model)
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise BlockSparseError.expected("state", "a state dict", type(state).__name__)
    own = {name for name, others in tied_names(model).items() if _is_stored_separately(name, others, state)}
    trial = _without_values(model)
    untied = untie_output_layers(trial, own)
    tied = tied_names(trial)
    # A parameter would not fit where the model has a buffer.
    state = {key: value.detach() if isinstance(value, nn.Parameter) else value for key, value in state.items()}
    for name, others in tied.items():
        if different := [other for other in others if _are_different(state.get(name), state.get(other))]:
            got = f"{different[0]} with other values (give each layer a weight of its own first)"
            raise BlockSparseError.expected(name, f"the weight that the model shares with {different[0]}", got)
    for name, others in tied.items():  # safetensors stores tied weights once
        stored = [state[other] for other in others if other in state]
        if name not in state and stored:
            state[name] = stored[0]
    layouts = _layouts_of_state(trial, state)
    on_meta = any(own.is_meta for own in (*model.parameters(), *model.buffers()))
    for key, tensor in state.items():
        # PyTorch would notice these only when the model is half loaded.
        if isinstance(tensor, Tensor) and (tensor.layout != torch.strided or (tensor.is_meta and not on_meta)):
            raise BlockSparseError.expected(key, "a dense tensor with values", f"{tensor.layout} on {tensor.device}")
    try:
        # A first load without values fails before the model is changed. Indices keep theirs, which layouts need.
        empty = {
            key: tensor.to("meta") if isinstance(tensor, Tensor) and not key.endswith("_indices") else tensor
            for key, tensor in state.items()
        }
        _load(trial, layouts, empty)
        untie_output_layers(model, own)
        forget_ties(model, untied)
        model = _load(model, layouts, state)
    except RuntimeError as error:
        raise BlockSparseError.expected("state", f"the state of this {type(model).__name__}", error) from error
    for name, others in tied.items():  # a model on the meta device has a parameter for each name now
        tie(model, dict.fromkeys(others, name))
    return model


def _is_stored_separately(name: str, others: list[str], state: Mapping[str, Tensor]) -> bool:
    """Return whether a state stores a block-sparse weight for a tied one, or other values than for those tied to it."""
    is_sparse = f"{name.removesuffix('weight')}values" in state
    return is_sparse or any(_are_different(state.get(name), state.get(other)) for other in others)


def _are_different(one: Any, other: Any) -> bool:
    """Return whether both are dense tensors with values, and these differ."""
    tensors = [each for each in (one, other) if isinstance(each, Tensor) and each.layout == torch.strided]
    return len(tensors) == 2 and not (one.is_meta or other.is_meta or torch.equal(one, other.to(one)))


def _load(model: nn.Module, layouts: Mapping[str, BlockLayout], state: Mapping[str, Tensor]) -> nn.Module:
    """Replace weights on these layouts and load the state; a model on the meta device adopts the tensors."""
    model = replace_with_sparse(model, layouts)
    assign = any(isinstance(each, Tensor) and each.is_meta for each in model.state_dict().values())
    model.load_state_dict(dict(state), assign=assign)
    return model


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device."""
    empties: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            empty = tensor.detach().to("meta")
            new = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            empties[id(tensor)] = new
    return copy_model(model, empties)


def _layouts_of_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, BlockLayout]:
    """Return the layouts in a state by name of the dense weight, after checks."""
    layouts = {}
    weights = {weight.values_name: weight for weight in prunable(model, 1, empty=True)}
    for key, tensor in state.items():
        if not key.endswith("values") or key not in weights:
            continue
        prefix = key.removesuffix("values")
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else []
        if len(shape) < 3 or 0 in shape[1:3] or not {f"{prefix}crow_indices", f"{prefix}col_indices"} <= set(state):
            got = shape or type(tensor).__name__
            raise BlockSparseError.expected(key, "blocks with crow_indices and col_indices", got)
        block = (tensor.shape[1], tensor.shape[2])
        weight = weights[key].in_blocks(block)
        layout = layout_of_indices(state[f"{prefix}crow_indices"], state[f"{prefix}col_indices"], weight.grid, block)
        layout.check_values(tensor)
        layouts[weight.name] = layout
    return layouts
