"""Loads checkpoints of other libraries, whose zeros decide the layouts."""

from __future__ import annotations

import torch
from torch import nn

from ..checked import check_model
from ..conversion.load import load_sparsified
from ..conversion.sparsify import keep_nonzero, survey_weights
from ..conversion.speed import Example
from ..conversion.zeros import BLOCK_SIZES, BlockSizes, checked_sizes
from ..surgery.model_tools import copy_model
from ..surgery.prunable import Skip, skip_by_name
from .foreign import Checkpoint, read_foreign


@torch.no_grad()
def from_zeros(
    model: nn.Module,
    block_size: BlockSizes = BLOCK_SIZES,
    *,
    skip: Skip = (),
    force: bool = False,
    tokens: int = 64,
    example: Example | None = None,
    checkpoint: Checkpoint | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Make weights that were pruned to zeros block-sparse; outputs stay equal.

    This is `sparsify(model, keep="nonzero")`, and loads checkpoints of other libraries. Blocks with a nonzero value are
    stored. Each weight gets the block size with the highest measured speed-up. It stays dense if none is faster; a
    `SparsityWarning` lists these weights with their zeros.

    Args:
        model: a model whose weights were pruned, such as one from a checkpoint with zeros; it stays as it is unless
            `inplace`.
        block_size: an int or (rows, columns), or a list of ints to choose from; 32, 16, 8, 4 and 1 by default.
        skip: modules, names or shell patterns of weights that stay dense.
        force: whether to take, without timing, the size that takes the least memory, indices included.
        tokens: rows of the inputs to time with, 64 by default.
        example: inputs of the model to time with instead, as for `sparsify`.
        checkpoint: a state dict, a .safetensors, .pt or .bin file, or a folder of transformers, to load into the
            model first. It may be one of another library: 2:4 and unstructured bitmasks of compressed-tensors, BSR, CSR
            and COO tensors of PyTorch, torchao's block-sparse tensors, matrices of STK, and models of BERT from which
            nn_pruning removed heads.
        inplace: whether to change the model itself instead of a copy.

    Returns:
        The model. In place this is another object only if the model itself is one layer.

    Raises:
        BlockSparseError: sizes that are not positive, a model without dense weights that can become block-sparse,
            weights that are not finite, or a checkpoint that cannot be read or is of another model.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = torch.nn.Linear(128, 128)
        >>> layer.weight.data[:, 32:] = 0
        >>> bs.from_zeros(layer, force=True)
        Linear(in_features=128, out_features=128, block_size=(32, 32), nnz=4, density=0.25, bias=True)
    """
    checked_sizes(block_size)
    check_model(model)
    skip = skip_by_name(model, skip)
    if checkpoint is not None:
        survey_weights(model, 1, skip)
        model = model if inplace else copy_model(model)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        model, inplace = load_sparsified(model, read_foreign(checkpoint, shapes)), True
    return keep_nonzero(
        model, block_size, skip, force=force, tokens=tokens, example=example, inplace=inplace, name="from_zeros"
    )
