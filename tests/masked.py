"""The reference for block-sparse models: the dense model, with zeros where its layouts have no block."""

import copy

import torch

from blocksparse.surgery.prunable import prunable


def elements(layout, matrix, name):
    """Whether each number of a weight `[out, in, *kernel]` is in a stored block; of an LSTM the gates are padded."""
    rows, columns = layout.block_shape
    keep = layout.mask().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    gates = 4 if "weight_ih" in name or "weight_hh" in name else 1
    keep = keep.unflatten(0, (gates, -1))[:, : matrix.shape[0] // gates, : matrix.shape[1]].flatten(0, 1)
    return keep.reshape(*keep.shape, *[1] * (matrix.dim() - 2))


@torch.no_grad()
def masked(model, layouts):
    """A copy of a dense model with zeros where its layouts have no block."""
    model = copy.deepcopy(model)
    for name, layout in layouts.items():
        (weight,) = (w for w in prunable(model, layout.block_shape) if w.name == name)
        matrix = weight.matrix()
        matrix.mul_(elements(layout, matrix, name))
    return model
