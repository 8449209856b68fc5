"""Pruning of a trained model with calibration data, without training: SparseGPT for blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...checked import number, positive_fraction
from ...errors import BlockSparseError
from ...layout import BlockLayout
from ...surgery.model_tools import copy_model
from ...surgery.prunable import Prunable, Skip, find_weights, prunable
from ...surgery.replace import replace_with_sparse
from ..selection import check_density, dense_norms, top_blocks
from .batch_norms import Moments, correct_statistics, has_statistics
from .calibrate import Batches, Stop, collect_batches, never, progress
from .fitting import Problem
from .inputs import LAYERS, Product, by_called_module, products, why_unobserved
from .joint import find_blocks, fit_block
from .passes import Passes
from .sequences import fit_states
from .targets import Targets, recurrent_size

# Recurrent weights stay closer to the dense ones, since errors of states add up.
RECURRENT_DAMPING = 10


@dataclass(frozen=True)
class Reconstruction:
    """The result of `reconstruct`.

    Args:
        model: the block-sparse model.
        layouts: its layouts, by the name of the dense weight.
        errors: relative error |Y' - Y|^2 / |X W^T|^2 of each fitted weight on the calibration data. Y are the outputs
            of its layer in the dense model, Y' in this one; for an LSTM, the gates before activation, of both weights,
            given the states of the dense model.
        by_magnitude: weights that were not fitted, with the reason; they keep their largest blocks, unchanged.
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
    jointly: bool = False,
) -> Reconstruction:
    """Return a block-sparse copy of a trained model whose layers reproduce the outputs of the dense ones.

    Layers are fitted in the order in which they run: to their outputs Y in the dense model, given their inputs X in the
    pruned model. So each layer compensates for errors of the ones before. Fitted are linear layers (also the Conv1D of
    transformers), convolutions (also transposed), recurrent layers and cells of torch.nn, and MultiheadAttention with
    one weight for query, key and value. Weights that no batch reaches keep their largest blocks. Biases absorb the
    remaining mean error, unless they require no gradient and their weights do. Running statistics of batch norms are
    corrected, also of frozen ones.

    Args:
        model: any module; it does not change.
        batches: inputs of the model, some hundred samples: an iterable, such as a DataLoader, of tensors, of tuples or
            lists of arguments, or of dicts of arguments by name. If a tuple has more values than the model has
            arguments, the last ones, such as labels, are ignored. Reading stops at 1,024 samples (by the first axis) or
            256 MiB.
        density: fraction of the blocks that each weight keeps, at least one block; 0.1 by default.
        block_size: an int, 32 by default, or (rows, columns).
        skip: modules, or names of modules or weights, that stay dense, such as the output layer; none by default.
        damping: weight of |V - W|^2 in the error, 0.01 by default; use more with few batches.
        jointly: whether to fit blocks of several layers, and the model, as a whole too, as `sparsify` does; False by
            default.

    Raises:
        BlockSparseError: no batch, or one on which the model fails; inputs of a layer that are not finite or too
            large; a density that leaves a weight without a block; no weight can become block-sparse; an unknown name to
            skip.

    >>> import torch, blocksparse as bs
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(200, 4) @ torch.randn(4, 64)        # 64 inputs, but only 4 that are independent
    >>> made = bs.sparsity.reconstruct(torch.nn.Linear(64, 16), [x], density=0.25, block_size=8)
    >>> made.model, made.errors["weight"] < 1e-3
    (Linear(in_features=64, out_features=16, block_size=(8, 8), nnz=4, density=0.25, bias=True), True)

    Notes:
        A weight V in place of W has the error |X V^T - Y|^2 + damping mean(diag(X^T X)) |V - W|^2. The number of blocks
        in each row of blocks follows from the optimal brain surgeon's score, sum t_ij^2 / (H^-1)_jj with H = X^T X +
        damping, for targets T = W H. Each row gets at least half of an equal share, and so do queries, keys and values
        each. The row then takes, again and again, the block that reduces the error most. Values are the exact
        least-squares solution. Recurrent layers are fitted with ten times the damping, then by gradient descent to the
        states of the dense layer over whole sequences.

        With `jointly`, a block is fitted as a whole once all of its layers are: up to 300 steps of Adam towards the
        outputs of the dense block. Blocks are modules with two weights or more in a `ModuleList` or `Sequential` that
        has several of them. At last, so is the model, unless it has recurrent layers.

        At most 10,000 rows (tokens, positions or steps) and 256 MiB of a layer's inputs are used, the same in each run.
        Up to 4,608 inputs (times taps), the score costs one inversion of H, and a row of blocks (in) (kept in)^2
        multiplications, in float64. With more inputs, 2,048 rows are used at most, and blocks that add least to the
        outputs are dropped in four stages. With fewer rows than inputs, values are found from the products of rows,
        X X^T, and the damping is increased up to 1,000 times if that helps on rows that were left out.

    Source: Frantar, Alistarh, SparseGPT (2023); Hassibi, Stork, Optimal brain surgeon (1993), for the score; Li et al.,
    BRECQ (2021), for the fit of blocks.
    """
    density, damping = positive_fraction("density", density), number("damping", damping, 0)
    weights = {weight.name: weight for weight in prunable(model, block_size, skip)}
    if not weights:
        raise BlockSparseError.expected("model", "dense weights that can become block-sparse", "none")
    blocks = {name: weight.blocks for name, weight in weights.items()}
    check_density(density, blocks, "layer")
    scores = {name: dense_norms(weight.blocks, weight.tensor) for name, weight in weights.items()}
    masks = top_blocks(scores, blocks, density, "layer")
    layouts = {name: BlockLayout(mask, weights[name].block_shape) for name, mask in masks.items()}
    copied = copy_model(model)
    fitted, errors = fit(copied, model, collect_batches(batches), layouts, damping=damping, jointly=jointly)
    by_magnitude = {name: why_unobserved(weight) for name, weight in weights.items() if name not in errors}
    return Reconstruction(replace_with_sparse(copied, fitted), fitted, errors, by_magnitude)


def fit(
    model: nn.Module,
    dense: nn.Module,
    batches: list[Any],
    layouts: Mapping[str, BlockLayout],
    *,
    damping: float = 0.01,
    choose: bool = True,
    jointly: bool = False,
    states: bool = True,
    stop: Stop = never,
) -> tuple[dict[str, BlockLayout], dict[str, float]]:
    """Fit the weights of a model, a copy of a dense one, to the outputs of the latter.

    Args:
        model: the copy; its weights change.
        dense: the dense model.
        batches: inputs of the model.
        layouts: layouts of the weights to fit.
        damping: see `reconstruct`.
        choose: whether to choose other blocks, the same number for each weight (default), or to fit on these layouts.
        jointly: whether to fit repeated blocks of layers, and the model, as a whole too.
        states: whether to fit recurrent layers over whole sequences too, which takes longer than the rest.
        stop: returns whether to leave the layers that are not fitted yet as they are, with their layouts.

    Returns:
        The layouts, and the errors of the weights that could be fitted; both by name.
    """
    copied_products, dense_products = (products_of(each, find_weights(each, layouts)) for each in (model, dense))
    norms = {name: Moments() for name, module in model.named_modules() if has_statistics(module)}
    passes = Passes(dense, batches, dense_products, {name: moments.add for name, moments in norms.items()})
    # An expert may be called without rows, since it gets no token.
    pairs_of = {
        name: [
            (product, other)
            for product, other in zip(copied_products.get(name, ()), dense_products.get(name, ()), strict=True)
            if reached.total(product)
        ]
        for name, reached in passes.reached.items()
    }
    targets = Targets(dense, passes, {name: [other for _, other in pairs] for name, pairs in pairs_of.items()})
    fitter = _Fitter(model, dense, copied_products, passes, targets, damping, choose, stop, dict(layouts), {})
    one_step = [name for name in passes.reached if copied_products.get(name) and name not in norms]
    one_step = [name for name in one_step if type(model.get_submodule(name)) not in LAYERS]
    blocks = find_blocks(model, one_step) if jointly else []
    last_layers = {max((n for n in one_step if n.startswith(f"{each}.")), key=one_step.index): each for each in blocks}
    for name in progress(passes.reached, "layers fitted to the data:"):
        if stop():
            return fitter.layouts, fitter.errors
        if name in norms and norms[name].samples:
            correct_statistics(name, model, norms[name], passes)
        for level, pairs_of_level in groupby(pairs_of[name], key=lambda pair: pair[0].level):
            fitted = []
            for product, other in pairs_of_level:
                try:
                    fitter.fit(name, product, other)
                except torch.linalg.LinAlgError as error:
                    expected = (
                        f"more, so that the Hessian of {product.weights[0].name} can be inverted (pass more data, or "
                        "call sparsity.reconstruct with a larger damping)"
                    )
                    raise BlockSparseError.expected("damping", expected, damping) from error
                fitted.append(product)
            if states and type(fitted[0].module) in LAYERS:
                fitter.fit_level(name, level, fitted)
        passes.fitted.add(name)
        if (block := last_layers.get(name)) is not None:
            fitter.fit_block(block, [each for each in one_step if each.startswith(f"{block}.")], batches)
            passes.forget(model, f"{block}.")
    if jointly and one_step and not any(type(module) in LAYERS for module in model.modules()):
        fitter.fit_block("", one_step, batches)
    return fitter.layouts, fitter.errors


@dataclass
class _Fitter:
    """The state of `fit`; `layouts` and `errors` are updated with each product."""

    model: nn.Module
    dense: nn.Module
    products: Mapping[str, list[Product]]
    passes: Passes
    targets: Targets
    damping: float
    choose: bool
    stop: Stop
    layouts: dict[str, BlockLayout]
    errors: dict[str, float]

    def fit(self, name: str, product: Product, other: Product) -> None:
        """Fit weights and bias of a product of the module `name` to the outputs of the dense product `other`."""
        target, recurrent = self.targets.of(other), recurrent_size(product)
        y, norm = target.outputs, target.outputs.double().square().sum().item()
        x = self._inputs(name, product, other, target.counts)
        x[:, x.shape[1] - recurrent :] = target.states
        mean = y.mean(0) if product.bias else torch.zeros_like(y[0])
        mean_x = x.mean(0) if product.bias else torch.zeros_like(x[0])
        damping = self.damping * (RECURRENT_DAMPING if recurrent else 1)
        noise = torch.finfo(x.dtype).eps * len(x) * mean_x.double().square().mean().item()
        problem = Problem(other.matrix(), x.sub_(mean_x), y.sub_(mean), product.block, damping, noise)
        old_masks = [self.layouts[weight.name].mask().to(y.device) for weight in product.weights]
        masks = self._choose(problem, product, old_masks) if self.choose else old_masks
        fitted = problem.values(torch.cat(masks, 1))
        product.set(fitted, other, mean.double() - fitted.double() @ mean_x.double())
        error = problem.error(fitted) / norm if norm > 0 else 0.0
        for weight, mask in zip(product.weights, masks, strict=True):
            self.layouts[weight.name] = BlockLayout(mask.cpu(), weight.block_shape)
            self.errors[weight.name] = error

    @staticmethod
    def _choose(problem: Problem, product: Product, masks: list[Tensor]) -> list[Tensor]:
        """Return masks with the same numbers of blocks, chosen for each weight of the product separately.

        Together, a recurrent layer would keep states instead of inputs: a state of the dense layer predicts the next
        one well, but a state of the pruned layer does not.
        """
        if len(masks) == 1:
            # The small values of an attention layer would lose all of their blocks to queries and keys.
            parts = 3 if product.weights[0].parameter == "in_proj_weight" else 1
            return [problem.choose(int(masks[0].sum()), parts)]
        sides = zip(problem.dense.split(product.sizes, 1), problem.x.split(product.sizes, 1), masks, strict=True)
        return [
            Problem(dense, x, x @ dense.to(x.dtype).T, product.block, problem.damping, problem.noise).choose(
                int(mask.sum())
            )
            for dense, x, mask in sides
        ]

    def fit_level(self, name: str, level: int, products: list[Product]) -> None:
        """Fit a level of the recurrent layer `name` over whole sequences, after least squares for its products."""
        masks: dict[str, Tensor | None] = {product.bias: None for product in products if product.bias}
        for weight in chain.from_iterable(product.weights for product in products):
            layout = self.layouts[weight.name]
            masks[weight.parameter] = weight.blocks.spread(layout.mask().to(weight.tensor.device))
        fit_states(self.model, self.dense, name, level, masks, self.passes, self.stop)

    def fit_block(self, block: str, layers: list[str], batches: list[Any]) -> None:
        """Fit these layers of a block, all of which are fitted already, as a whole."""
        inside = [product for layer in layers for product in self.products[layer]]
        trained = self._trained_parameters(block, inside)
        fit_block(self.model, self.dense, block, batches, trained, self.passes.multiplications(layers))

    def _trained_parameters(self, block: str, products: list[Product]) -> dict[str, Tensor | None]:
        """Return parameters of a block by their names in it, with masks of stored weights; None for biases."""
        names = {id(parameter): key for key, parameter in self.model.get_submodule(block).named_parameters()}
        found: dict[str, Tensor | None] = {}
        for product in products:
            for weight in product.weights:
                mask = self.layouts[weight.name].mask().to(weight.tensor.device)
                found[names[id(weight.tensor)]] = weight.blocks.spread(mask)
            if product.bias and id(bias := getattr(product.weights[0].module, product.bias)) in names:
                found.setdefault(names[id(bias)], None)
        return found

    def _inputs(self, name: str, product: Product, other: Product, counts: list[int]) -> Tensor:
        """Return the inputs of a product in the model; those of the dense one if a router now sends other rows here."""
        x, counts_now = self.passes.rows(self.model, product, name)
        if counts_now != counts:
            del x
            x, _ = self.passes.rows(self.dense, other, name)
        return x


def products_of(model: nn.Module, weights: Mapping[str, Prunable]) -> dict[str, list[Product]]:
    """Return the observable products of these weights by the name of the module that is called."""
    names = {module: name for name, module in model.named_modules()}
    groups = by_called_module(model, weights.values())
    by_name = {names[module]: products(module, group) for module, group in groups.items()}
    return {name: found for name, found in by_name.items() if found}
