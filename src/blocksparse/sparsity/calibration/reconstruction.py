"""Pruning a trained model with some calibration data, without training it: SparseGPT, for blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...checked import number
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ...surgery.model_tools import copy_model
from ...surgery.prunable import Prunable, Skip, prunable, weights_of
from ...surgery.replace import replace_with_sparse
from ..selection import check_density, dense_norms, top_blocks
from .activations import MIN_PART
from .batch_norms import follow, has_statistics
from .calibrate import Batches, keep, progress
from .fitting import Problem
from .inputs import CELLS, LAYERS, Product, called, products, unseen
from .passes import Passes

# A recurrent layer is fitted on the states that the dense weights lead to, then on those that the new ones do.
ROUNDS = 3


@dataclass(frozen=True)
class Reconstruction:
    """The result of `reconstruct`.

    Args:
        model: with block-sparse weights.
        layouts: of these, by the name of the dense weight.
        errors: of each weight that was fitted, |Y' - Y|^2 / |X W^T|^2 on the calibration data: Y are the outputs of its
            layer in the dense model, Y' in this one. Of an LSTM the gates' before their activation, of both weights.
        by_magnitude: the weights that were not fitted, with the reason: they keep their largest blocks as they are.
    """

    model: nn.Module
    layouts: Mapping[str, BlockLayout]
    errors: Mapping[str, float]
    by_magnitude: Mapping[str, str]


@torch.no_grad()
def reconstruct(
    model: nn.Module,
    batches: Batches,
    density: float = 0.1,
    block_size: int | tuple[int, int] = 32,
    *,
    skip: Skip = (),
    damping: float = 0.01,
) -> Reconstruction:
    """Makes a block-sparse copy of a trained model whose layers reproduce the outputs of the dense ones.

    Layer by layer, in the order in which they run, with the inputs X that the pruned layers before give them, and the
    outputs Y that they have in the dense model: a layer makes up for what those before it lost. A weight V in the
    place of W has the error |X V^T - Y|^2 + damping * mean(diag(X^T X)) |V - W|^2. Each row of blocks gets as many
    blocks as it has among the best by the score of the optimal brain surgeon, sum w_ij^2 / (H^-1)_jj with
    H = X^T X + damping. It chooses them one after the other, always the one that lowers the error most, and their
    values are the exact least squares solution. The layer's bias takes what is left of the mean, and the running
    statistics of batch norms change as those of their inputs do.

    Fitted are linear layers (also the Conv1D of transformers), convolutions, transposed ones, torch.nn's recurrent
    layers and cells (twice more on the states that the new weights lead to), and MultiheadAttention with one weight for
    query, key and value. What no batch reaches keeps its largest blocks.

    Of a layer 10,000 rows at most are looked at (tokens, positions or steps), at the same random places in each run,
    and 256 MiB of them. Up to 4,608 inputs (times taps) the score costs one inversion of H, the choice (in) (kept in)^2
    multiplications for a row of blocks, in float64. With more, blocks are dropped in four stages, those first that add
    least to the outputs, and values found by conjugate gradients.

    Args:
        model: any module; it stays as it is.
        batches: the model's inputs, some hundred samples: an iterable, a DataLoader say, of tensors, of tuples or lists
            of arguments, or of dicts of arguments by name. Of a tuple longer than the list of the model's arguments the
            first ones are taken: labels are not. Batches are kept up to 1,024 samples (by the first axis) or 256 MiB.
        density: the part of the blocks that each weight keeps, to the nearest block and at least one.
        block_size: an int or (rows, columns).
        skip: what stays dense, the output layer say: modules, or names of modules or weights.
        damping: larger for few batches.

    Raises:
        BlockSparseError: no batch, or one that the model fails on, inputs of a layer that are not finite, a density
            that leaves a weight without a block, no weight that can become block-sparse, an unknown name to skip.

    >>> import torch, blocksparse as bs
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 4) @ torch.randn(4, 64)        # 64 inputs, but only 4 that are independent
    >>> made = bs.sparsity.reconstruct(torch.nn.Linear(64, 16), [x], density=0.25, block_size=8)
    >>> made.model, made.errors["weight"] < 1e-3
    (Linear(in_features=64, out_features=16, block_size=(8, 8), nnz=4, density=0.25, bias=True), True)

    Source: Frantar, Alistarh, SparseGPT (2023); Hassibi, Stork, Optimal brain surgeon (1993), for the score.
    """
    density, damping = number("density", density, 0, 1), number("damping", damping, 0)
    weights = {weight.name: weight for weight in prunable(model, block_size, skip)}
    if not weights:
        raise BlockSparseError.expected("model", "dense weights that can become block-sparse", "none")
    blocks = {name: weight.blocks for name, weight in weights.items()}
    check_density(density, blocks, "layer")
    scores = {name: dense_norms(weight.blocks, weight.tensor) for name, weight in weights.items()}
    masks = top_blocks(scores, blocks, density, "layer")
    layouts = {name: BlockLayout(mask, weights[name].block_shape) for name, mask in masks.items()}
    made = copy_model(model)
    fitted, errors = fit(made, model, keep(batches), layouts, damping=damping)
    by_magnitude = {name: unseen(weight) for name, weight in weights.items() if name not in errors}
    return Reconstruction(replace_with_sparse(made, fitted), fitted, errors, by_magnitude)


def fit(
    model: nn.Module,
    dense: nn.Module,
    batches: list[Any],
    layouts: Mapping[str, BlockLayout],
    *,
    damping: float = 0.01,
    choose: bool = True,
) -> tuple[dict[str, BlockLayout], dict[str, float]]:
    """Fits a copy of a dense model, on layouts with as many blocks as these, to its outputs; the layouts, and errors.

    With `choose` the blocks are chosen here: an LSTM's weights of inputs and of states have their number together, but
    each has half of its own for certain. Weights that could not be fitted have no error, and their layouts as given.
    """
    mine, theirs = (_products(each, weights_of(each, layouts)) for each in (model, dense))
    norms = [name for name, module in model.named_modules() if has_statistics(module)]
    passes = Passes(dense, batches, theirs, norms)
    work = _Fit(model, dense, passes, damping, choose, dict(layouts), {})
    for name in progress(passes.reached, "layers fitted to the data:"):
        if name in norms:
            follow(name, model, dense, passes)
        for product, other in zip(mine.get(name, ()), theirs.get(name, ()), strict=True):
            if not passes.reached[name].rows[product.name]:
                continue  # called without a row, as an expert that no token is sent to
            try:
                work.fit(name, product, other)
            except torch.linalg.LinAlgError as error:
                expected = f"more, so that the Hessian of {product.weights[0].name} can be inverted"
                raise BlockSparseError.expected("damping", expected, damping) from error
    return work.layouts, work.errors


@dataclass
class _Fit:
    """What `fit` has got; the layouts and errors become those of what was fitted."""

    model: nn.Module
    dense: nn.Module
    passes: Passes
    damping: float
    choose: bool
    layouts: dict[str, BlockLayout]
    errors: dict[str, float]

    def fit(self, name: str, product: Product, other: Product) -> None:
        """Sets the weights and the bias of a product, in a module of this name, to what is nearest to the other's."""
        matrix = other.matrix()
        x, counts = self.passes.rows(self.dense, other, name)
        y = torch.cat([part @ matrix.to(x.dtype).T for part in x.split(1024)])
        given = [self.layouts[weight.name] for weight in product.weights]
        total = sum(layout.nnz for layout in given)
        mask = torch.cat([layout.mask() for layout in given], 1).to(y.device)
        mean = y.mean(0) if product.bias else torch.zeros_like(y[0])
        for turn in range(ROUNDS if type(product.module) in (*LAYERS, *CELLS) else 1):
            del x  # before the next ones
            x, mine = self.passes.rows(self.model, product, name)
            if mine != counts:  # a router sends this module other rows than before: those of the dense model
                del x
                x, _ = self.passes.rows(self.dense, other, name)
            middle = x.mean(0) if product.bias else torch.zeros_like(x[0])
            problem = Problem(matrix, x.sub_(middle), y - mean, product.block, self.damping)
            if self.choose and turn == 0:
                mask = _with_floors(problem.choose(total), mask, problem.energy(), [w.grid[1] for w in product.weights])
            fitted = problem.values(mask)
            product.set(fitted, other, (mean.double() - fitted.double() @ middle.double()))
        whole = y.double().square().sum().item()
        error = problem.lost(fitted) / whole if whole > 0 else 0.0
        for weight, part in zip(product.weights, mask.split([w.grid[1] for w in product.weights], 1), strict=True):
            self.layouts[weight.name] = BlockLayout(part.cpu(), weight.block_shape)
            self.errors[weight.name] = error


def _with_floors(mask: Tensor, given: Tensor, scores: Tensor, columns: list[int]) -> Tensor:
    """The chosen blocks of one or two weights side by side, so that each has half of its given ones; as many in all."""
    parts = [slice(end - size, end) for size, end in zip(columns, accumulate(columns), strict=True)]
    for part, other in zip(parts, parts[::-1], strict=True):
        missing = math.ceil(MIN_PART * int(given[:, part].sum())) - int(mask[:, part].sum())
        if missing > 0:
            best = scores.masked_fill(mask, -torch.inf)[:, part].flatten().topk(missing).indices
            mask[:, part] |= torch.zeros_like(mask[:, part]).flatten().index_fill(0, best, True).view_as(mask[:, part])
            worst = scores.masked_fill(~mask, torch.inf)[:, other].flatten().topk(missing, largest=False).indices
            gone = torch.zeros_like(mask[:, other]).flatten().index_fill(0, worst, True)
            mask[:, other] &= ~gone.view_as(mask[:, other])
    return mask


def _products(model: nn.Module, weights: Mapping[str, Prunable]) -> dict[str, list[Product]]:
    """By the names of the modules."""
    names = {module: name for name, module in model.named_modules()}
    found = {names[module]: products(module, those) for module, those in called(model, weights.values()).items()}
    return {name: those for name, those in found.items() if those}
