"""Targets of the pruned layers: outputs of the dense ones on calibration data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .inputs import Product
from .passes import Passes

# The model runs once to record the targets of as many layers as take this number of bytes.
MAX_BYTES = 2**28


@dataclass(frozen=True)
class Target:
    """The target of a product."""

    outputs: Tensor
    """What the dense weights compute on the sampled rows, `[rows, out]`."""
    states: Tensor
    """The states among their inputs `[rows, states]`, without a column if the weights are not recurrent."""
    counts: list[int]
    """The number of rows of each call."""


class Targets:
    """The targets of a dense model's products, recorded for many layers at a time.

    Args:
        dense: the dense model.
        passes: its runs.
        products: products by the name of their module, in the order in which `of` will be asked for them.
    """

    def __init__(self, dense: nn.Module, passes: Passes, products: Mapping[str, list[Product]]):
        self.dense, self.passes = dense, passes
        self._missing = {name: of_module for name, of_module in products.items() if of_module}
        self._recorded: dict[str, Target] = {}

    def of(self, product: Product) -> Target:
        """Return the target of a product, once, and record it with those of the next layers if it is missing."""
        if product.name not in self._recorded:
            self._record_next()
        return self._recorded.pop(product.name)

    def _record_next(self) -> None:
        """Record the targets of the next layers: of one, and of more while they take less than `MAX_BYTES`."""
        window: dict[str, list[Product]] = {}
        size = 0
        for name, products in self._missing.items():
            size += sum(self.passes.row_count(name, each) * 4 * each.weights[0].shape[0] for each in products)
            if window and size > MAX_BYTES:
                break
            window[name] = products
        matrices = {each.name: each.matrix() for products in window.values() for each in products}

        def compute(product: Product, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ matrices[product.name].to(x.dtype).T, x[:, x.shape[1] - recurrent_size(product) :].clone()

        for name, sampled in self.passes.collect(self.dense, window, compute).items():
            outputs, states = zip(*sampled.parts, strict=True)
            self._recorded[name] = Target(torch.cat(outputs), torch.cat(states), sampled.counts)
        for name in window:
            del self._missing[name]
        if not self._missing:
            self.passes.forget(self.dense, "")


def recurrent_size(product: Product) -> int:
    """Return how many inputs of a product are states of a recurrent layer; they come last."""
    return product.sizes[-1] if product.weights[-1].parameter.startswith("weight_hh") else 0
