"""Repeated runs of a model on calibration data, which collect inputs of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .calibrate import SkipBatch, check_finite, observe
from .inputs import Product

# Limits of the rows of a layer's inputs that are used; more are sampled at random.
MAX_ROWS = 10_000
MAX_BYTES = 2**28

# No more batches are run once layers with this fraction of the weights have enough rows.
COVERED_FRACTION = 0.9


@dataclass
class Reach:
    """How the batches reach a module."""

    calls: list[int] = field(default_factory=list)
    """Calls of the module by each batch."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of inputs by the name of the product."""


class Passes:
    """The calibration batches and the modules that they reach, for repeated runs.

    Args:
        model: the model.
        batches: its inputs; the last ones are not used if the first suffice.
        products: the products of each module, by the module's name.
        others: names of further modules to observe.
    """

    def __init__(self, model: nn.Module, batches: list[Any], products: Mapping[str, list[Product]], others: list[str]):
        self.products = products
        self.reached: dict[str, Reach] = {}
        """The modules that are reached, by name, in the order of their first calls."""
        names = {model.get_submodule(name): name for name in (*products, *others)}
        sizes = {
            name: sum(w.tensor.numel() for product in of_module for w in product.weights)
            for name, of_module in products.items()
        }
        self.batches: list[Any] = []

        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            name = names[module]
            reached = self.reached.setdefault(name, Reach())
            reached.calls += [0] * (len(self.batches) - len(reached.calls))
            reached.calls[-1] += 1
            for product in self.products.get(name, ()):
                reached.rows[product.name] = reached.rows.get(product.name, 0) + product.rows(args)

        def is_enough() -> bool:
            covered = [name for name, each in self.reached.items() if min(each.rows.values(), default=0) >= MAX_ROWS]
            return sum(sizes.get(name, 0) for name in covered) >= COVERED_FRACTION * sum(sizes.values())

        def needed() -> Iterator[Any]:
            for batch in batches:
                if self.batches and is_enough():
                    break
                self.batches.append(batch)
                yield batch

        observe(model, needed(), names, record)

    def rows(self, model: nn.Module, product: Product, name: str) -> tuple[Tensor, list[int]]:
        """Return a product's inputs `[rows, in]`, and the number of rows of each call.

        Rows beyond the limits are sampled, at the same positions for each copy of the model.
        """
        at, first = self._positions(product, self.reached[name].rows[product.name]), 0
        device = product.weights[0].tensor.device
        parts: list[Tensor] = []
        counts: list[int] = []

        def record(args: tuple[Any, ...]) -> None:
            nonlocal first
            count = product.rows(args)
            counts.append(count)
            low, high = torch.searchsorted(at, torch.tensor([first, first + count])).tolist()
            if high > low:
                parts.append(product.inputs(args, (at[low:high] - first).to(device)))
            first += count

        self.run(model, name, record)
        rows = torch.cat(parts) if parts else torch.empty(0)
        check_finite(product.weights[0].name, rows)
        return rows, counts

    def run(self, model: nn.Module, name: str, record: Any) -> None:
        """Call `record` with the arguments of each call of a module; stop each batch after its last call."""
        calls, remaining = self.reached[name].calls, 0

        def reaching() -> Iterator[Any]:
            nonlocal remaining
            for batch, remaining in zip(self.batches, calls, strict=False):
                if remaining:
                    yield batch

        def observer(module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal remaining
            record(args)
            remaining -= 1
            if not remaining:
                raise SkipBatch

        observe(model, reaching(), [model.get_submodule(name)], observer)

    @staticmethod
    def _positions(product: Product, rows: int) -> Tensor:
        """Return the positions of the rows to use, int64, rising, the same in each call."""
        width = max(sum(product.sizes), product.weights[0].shape[0])
        limit = min(MAX_ROWS, max(64, MAX_BYTES // (4 * width)))
        if rows <= limit:
            return torch.arange(rows)
        return torch.randint(rows, (limit,), generator=torch.Generator().manual_seed(0)).unique()
