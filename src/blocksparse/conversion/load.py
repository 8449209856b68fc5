"""Loads the state of a sparsified model into a dense one of the same architecture."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..errors import BlockSparseError
from ..layout import BlockLayout, layout_of_indices
from ..surgery.prunable import prunable
from ..surgery.replace import replace_with_sparse


def load_sparsified(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Loads the state dict of a sparsified model into one that is still dense, in place.

    Weights with `values`, `crow_indices` and `col_indices` in the state become block-sparse; all others are
    loaded as by `load_state_dict`.

    Args:
        model: of the kind that was sparsified, with any values. One on the meta device takes the tensors themselves,
            of any dtype.
        state: what `state_dict` of the sparsified one gave, from a safetensors file say.

    Returns:
        The model; another object only where the model itself is a layer that became block-sparse.

    Raises:
        BlockSparseError: tensors that are missing, too many, or do not fit the model.

    >>> import torch, blocksparse as bs
    >>> state = bs.sparsify(torch.nn.Linear(256, 256), density=0.25, force=True).state_dict()
    >>> bs.load_sparsified(torch.nn.Linear(256, 256), state)
    Linear(in_features=256, out_features=256, block_size=(32, 32), nnz=16, density=0.25, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise BlockSparseError.expected("model", "a torch.nn.Module", type(model).__name__)
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise BlockSparseError.expected("state", "what state_dict gave", type(state).__name__)
    model = replace_with_sparse(model, _layouts(model, state))
    empty = any(tensor.is_meta for tensor in model.state_dict().values())
    try:
        model.load_state_dict(dict(state), assign=empty)
    except RuntimeError as error:
        raise BlockSparseError.expected("state", f"that of a {type(model).__name__} like this one", error) from error
    return model


def _layouts(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, BlockLayout]:
    layouts = {}
    weights = {weight.values_name: weight for weight in prunable(model, 1, empty=True)}
    for key, tensor in state.items():
        if not key.endswith("values") or key not in weights:
            continue
        at = key.removesuffix("values")
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else []
        if len(shape) < 3 or 0 in shape[1:3] or not {f"{at}crow_indices", f"{at}col_indices"} <= set(state):
            got = shape or type(tensor).__name__
            raise BlockSparseError.expected(key, "blocks with crow_indices and col_indices", got)
        name = weights[key].name
        block = (tensor.shape[1], tensor.shape[2])
        (weight,) = (each for each in prunable(model, block, empty=True) if each.name == name)
        layout = layout_of_indices(state[f"{at}crow_indices"], state[f"{at}col_indices"], weight.grid, block)
        layout.check_values(tensor)
        layouts[name] = layout
    return layouts
