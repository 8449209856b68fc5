"""Makes models block-sparse whose weights contain zeros, such as those pruned by another library."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ..checked import checked_block
from ..conversion.load import load_sparsified
from ..conversion.sparsify import no_weights_error, survey_weights
from ..conversion.speed import MIN_SPEEDUP, Example, Speed, checked_tokens
from ..errors import BlockSparseError, SparsityWarning, format_reasons
from ..layout import BlockLayout
from ..surgery.model_tools import copy_model
from ..surgery.prunable import Prunable, Skip, skip_by_name
from ..surgery.replace import replace_with_sparse
from .foreign import Checkpoint, read_foreign

BLOCK_SIZES = (32, 16, 8, 4, 1)

# Weights with a smaller fraction of zeros are dense.
MIN_ZEROS = 0.05


@torch.no_grad()
def from_zeros(
    model: nn.Module,
    block_size: int | tuple[int, ...] | list[int] = BLOCK_SIZES,
    *,
    skip: Skip = (),
    force: bool = False,
    tokens: int = 64,
    example: Example | None = None,
    checkpoint: Checkpoint | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Make weights that were pruned to zeros block-sparse; outputs stay equal.

    Blocks with a nonzero value are stored. Each weight gets the block size with the highest measured speed-up. It stays
    dense if none is faster; a `SparsityWarning` lists these weights with their zeros.

    Args:
        model: a model whose weights were pruned, such as one from a checkpoint with zeros; it stays as it is unless
            `inplace`.
        block_size: an int or (rows, columns), or a list of ints to choose from; 32, 16, 8, 4 and 1 by default.
        skip: modules, names or shell patterns of weights that stay dense.
        force: whether to take, without timing, the size that stores the fewest parameters, and large blocks if equal.
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
        BlockSparseError: sizes that are not positive, a model without dense weights that can become block-sparse, or a
            checkpoint that cannot be read or is of another model.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = torch.nn.Linear(128, 128)
        >>> layer.weight.data[:, 32:] = 0
        >>> bs.from_zeros(layer, force=True)
        Linear(in_features=128, out_features=128, block_size=(32, 32), nnz=4, density=0.25, bias=True)
    """
    checked_tokens(tokens)
    is_list = isinstance(block_size, list) or (isinstance(block_size, tuple) and len(block_size) != 2)
    sizes = [checked_block(size) for size in (block_size if is_list else [block_size])]  # type: ignore[union-attr]
    if not sizes:
        raise BlockSparseError.expected("block_size", "a size or more", "none")
    candidates = survey_weights(model, 1, skip)
    if not candidates.weights:
        raise no_weights_error(model, candidates)
    if checkpoint is not None:
        skip, model = skip_by_name(model, skip), model if inplace else copy_model(model)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        model, inplace = load_sparsified(model, read_foreign(checkpoint, shapes)), True
        candidates = survey_weights(model, 1, skip)
    weights = list(candidates.weights.values())
    speed = Speed(model, tokens, example)
    if not force:
        speed.record(weight.module for weight in weights)
    layouts, slow = {}, {}
    for weight in weights:
        zeros = float((weight.tensor == 0).float().mean())
        if zeros < MIN_ZEROS:
            continue
        options = [_layout(weight, size) for size in sizes]
        options = [(each, layout) for each, layout in options if layout.nnz > 0 and layout.density < 1]
        if not options:
            slow[weight.name] = (
                "all its values are 0: remove the layer"
                if zeros == 1
                else f"{zeros:.0%} of its values are 0, but no whole block is"
            )
        elif force:
            layouts[weight.name] = min(options, key=lambda option: option[1].nnz * option[0].blocks.size)[1]
        else:
            ups = [speed.of_weights([option]) for option in options]
            best = max(range(len(options)), key=ups.__getitem__)
            if ups[best] >= MIN_SPEEDUP:
                layouts[weight.name] = options[best][1]
            else:
                rows, columns = options[best][1].block_shape
                slow[weight.name] = (
                    f"{zeros:.0%} of its values are 0; in blocks of {rows} x {columns} it stores "
                    f"{options[best][1].density:.0%} and is {ups[best]:.2g} times as fast"
                )
    if slow or not layouts:
        lines = format_reasons(slow) or ["no weight has zeros: bs.sparsify prunes"]
        warnings.warn("\n  ".join(["from_zeros: these stay dense", *lines]), SparsityWarning, stacklevel=3)
    return replace_with_sparse(model if inplace else copy_model(model), layouts)


def _layout(weight: Prunable, size: tuple[int, int]) -> tuple[Prunable, BlockLayout]:
    """Return the weight seen in blocks of a size, and the layout of the blocks that have a nonzero value."""
    sized = weight.in_blocks(size)
    return sized, BlockLayout((sized.blocks.sums((sized.tensor != 0).float()) > 0).cpu(), size)
