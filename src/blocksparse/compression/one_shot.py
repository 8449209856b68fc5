"""Fits a model at several densities at once, each layer by itself, which is faster than `sparsify`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..conversion.selection import Layouts
from ..sparsity.calibration.batch_norms import has_statistics
from ..sparsity.calibration.calibrate import observe, progress
from ..sparsity.calibration.fitting import Problem
from ..sparsity.calibration.inputs import Product
from ..sparsity.calibration.passes import Passes
from ..sparsity.calibration.reconstruction import products_of
from ..surgery.model_tools import copy_model
from ..surgery.prunable import find_weights
from ..surgery.replace import replace_with_sparse

DAMPING = 0.01


@torch.no_grad()
def fit_at_densities(dense: nn.Module, batches: list[Any], layouts: Sequence[Layouts]) -> list[nn.Module]:
    """Return block-sparse copies of a dense model, one for each of `layouts`, with fitted values.

    Each layer is fitted to its own outputs in the dense model, given its inputs there, so that all copies share these
    inputs and their products. Statistics of batch norms are computed again. `sparsify` takes longer, because its layers
    also compensate for errors of the layers before.

    Args:
        dense: the dense model.
        batches: its inputs.
        layouts: the layouts of each copy, by name of the weight.
    """
    copies = [copy_model(dense) for _ in layouts]
    everything = {name: layout for each in layouts for name, layout in each.items()}
    observed = products_of(dense, find_weights(dense, everything))
    dense_products = [products_of(dense, find_weights(dense, each)) for each in layouts]
    new_products = [
        products_of(copied, find_weights(copied, each)) for copied, each in zip(copies, layouts, strict=True)
    ]
    passes = Passes(dense, batches, observed, {})
    for name in progress(passes.reached, "layers fitted:"):
        problems: dict[tuple[str, ...], _Centered] = {}
        for olds, news, chosen in zip(dense_products, new_products, layouts, strict=True):
            for old, new in zip(olds.get(name, ()), news.get(name, ()), strict=True):
                if not passes.reached[name].total(old):
                    continue  # called without rows, such as an expert that gets no token
                key = tuple(weight.name for weight in old.weights)
                if key not in problems:
                    problems[key] = _Centered(dense, passes, old, name)
                problems[key].fit(old, new, chosen)
    fitted = [replace_with_sparse(copied, each) for copied, each in zip(copies, layouts, strict=True)]
    for model, each in zip(fitted, layouts, strict=True):
        if each:
            _compute_statistics(model, passes.batches)
    return fitted


class _Centered:
    """The least-squares problem of a product in the dense model, with the mean of its inputs.

    Args:
        dense, passes: the dense model and its runs.
        product: the product.
        name: the name of the module that is called.
    """

    def __init__(self, dense: nn.Module, passes: Passes, product: Product, name: str):
        x, _ = passes.rows(dense, product, name)
        self.matrix = product.matrix()
        self.mean = x.mean(0) if product.bias else torch.zeros_like(x[0])
        x.sub_(self.mean)
        self.problem = Problem(self.matrix, x, x @ self.matrix.to(x.dtype).T, product.block, DAMPING)

    def fit(self, old: Product, new: Product, layouts: Layouts) -> None:
        """Set the weights of a product in a copy to the best ones with these layouts."""
        mask = torch.cat([layouts[weight.name].mask() for weight in old.weights], 1).to(self.mean.device)
        values = self.problem.values(mask)
        new.set(values, old, (self.matrix.double() - values.double()) @ self.mean.double())


def _compute_statistics(model: nn.Module, batches: Iterable[Any]) -> None:
    """Replace the running statistics of batch norms by those of the batches."""
    norms: list[Any] = [module for module in model.modules() if has_statistics(module)]
    momenta: dict[nn.Module, Any] = {}

    def train(module: Any, args: tuple[Any, ...]) -> None:
        if args[0].numel() <= 2 * args[0].shape[1]:  # the variance of a channel needs several values
            return
        if module not in momenta:
            momenta[module] = module.momentum
            module.momentum = None  # the mean over all batches
            module.reset_running_stats()
        module.training = True  # `observe` restores the mode

    if norms:
        observe(model, batches, norms, train)
    for norm, momentum in momenta.items():
        norm.momentum = momentum
