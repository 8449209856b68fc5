"""Passes over calibration data: which modules it reaches and in which order, and rows of what reaches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .calibrate import Enough, check_finite, observe
from .inputs import Product

# Rows of a layer that are looked at, at random places, and the memory for what they are.
MAX_ROWS = 10_000
MAX_BYTES = 2**28

# Batches are left out when layers with this part of the weights have rows enough.
COVERED = 0.9


@dataclass
class Reached:
    """What reaches a module: how often each batch does, and how many rows of each of its products."""

    calls: list[int] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)


class Passes:
    """A model, and the data that it is run on again and again."""

    def __init__(self, model: nn.Module, batches: list[Any], products: Mapping[str, list[Product]], others: list[str]):
        self.products = products
        self.reached: dict[str, Reached] = {}
        """By the names of the modules that are reached, in the order of their first calls."""
        names = {model.get_submodule(name): name for name in (*products, *others)}
        sizes = {
            name: sum(w.tensor.numel() for product in found for w in product.weights)
            for name, found in products.items()
        }
        self.batches: list[Any] = []

        def see(module: nn.Module, args: tuple[Any, ...]) -> None:
            name = names[module]
            reached = self.reached.setdefault(name, Reached())
            reached.calls += [0] * (len(self.batches) - len(reached.calls))
            reached.calls[-1] += 1
            for product in self.products.get(name, ()):
                reached.rows[product.name] = reached.rows.get(product.name, 0) + product.rows(args)

        def enough() -> bool:
            covered = [name for name, those in self.reached.items() if min(those.rows.values(), default=0) >= MAX_ROWS]
            return sum(sizes.get(name, 0) for name in covered) >= COVERED * sum(sizes.values())

        def each() -> Iterator[Any]:
            for batch in batches:
                if self.batches and enough():
                    break
                self.batches.append(batch)
                yield batch

        observe(model, each(), names, see)

    def rows(self, model: nn.Module, product: Product, name: str) -> tuple[Tensor, list[int]]:
        """A product's inputs `[rows, in]`, all or a sample at the same places for each copy; rows by call."""
        at, first = self._places(product, self.reached[name].rows[product.name]), 0
        device = product.weights[0].tensor.device
        parts: list[Tensor] = []
        counts: list[int] = []

        def see(args: tuple[Any, ...]) -> None:
            nonlocal first
            count = product.rows(args)
            counts.append(count)
            low, high = torch.searchsorted(at, torch.tensor([first, first + count])).tolist()
            if high > low:
                parts.append(product.inputs(args, (at[low:high] - first).to(device)))
            first += count

        self.run(model, name, see)
        rows = torch.cat(parts) if parts else torch.empty(0)
        check_finite(product.weights[0].name, rows)
        return rows, counts

    def run(self, model: nn.Module, name: str, see: Any) -> None:
        """Calls `see` with the arguments of each call of a module; no batch runs further than it has to."""
        calls, left = self.reached[name].calls, 0

        def each() -> Iterator[Any]:
            nonlocal left
            for batch, left in zip(self.batches, calls, strict=False):
                if left:
                    yield batch

        def seen(module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal left
            see(args)
            left -= 1
            if not left:
                raise Enough

        observe(model, each(), [model.get_submodule(name)], seen)

    @staticmethod
    def _places(product: Product, rows: int) -> Tensor:
        """Which of the rows: int64, rising, the same every time."""
        width = max(sum(product.sizes), product.weights[0].shape[0])
        most = min(MAX_ROWS, max(64, MAX_BYTES // (4 * width)))
        if rows <= most:
            return torch.arange(rows)
        return torch.randint(rows, (most,), generator=torch.Generator().manual_seed(0)).unique()
