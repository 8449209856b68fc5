"""Repeated runs of a model on calibration data, which collect inputs of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from .calibrate import SkipBatch, Stop, check_finite, never, observe, sample_count
from .fitting import MAX_INPUTS
from .inputs import CELLS, LAYERS, Product

# Limits of the rows of a layer's inputs that are used; more are sampled at random. With many inputs, the cost of a fit
# grows with the third power of the rows. Batches after those with enough rows, and this number of samples, are not run.
MAX_ROWS, MAX_ROWS_WIDE, MIN_SAMPLES = 10_000, 2048, 256
MAX_BYTES = 2**28

# Outputs of layers with at least this number of inputs (times taps) are cached, up to this number of bytes for each of
# the two models, because each layer that is fitted takes several runs of all layers before it.
MIN_CACHED_INPUTS, MAX_CACHED_BYTES = 512, 2**29

T = TypeVar("T")

# No more batches are run once layers with this fraction of the weights have enough rows.
COVERED_FRACTION = 0.9


@dataclass
class Reach:
    """How the batches reach a module."""

    calls: list[int] = field(default_factory=list)
    """Calls of the module by each batch."""
    rows: dict[str, list[int]] = field(default_factory=dict)
    """Rows of inputs in each batch, by the name of the product."""

    def total(self, product: Product) -> int:
        """Return the number of rows of a product's inputs."""
        return sum(self.rows.get(product.name, ()))


@dataclass
class Sampled(Generic[T]):
    """Parts made of sampled rows of the inputs of a product, call by call."""

    total: int
    """The number of rows to sample from; later ones are ignored."""
    at: Tensor
    """The positions of the sampled rows, int64, rising."""
    parts: list[T] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """The number of rows of each call."""
    squares: float = 0.0
    """The sum of all squares of the sampled inputs."""

    @property
    def is_complete(self) -> bool:
        """Whether the calls had all rows to sample from."""
        return sum(self.counts) >= self.total

    def add(self, product: Product, args: tuple[Any, ...], keep: Callable[[Product, Tensor], T]) -> None:
        """Include a call with these arguments, unless there were enough.

        Raises:
            BlockSparseError: inputs that are not finite, or whose squares overflow.
        """
        if self.is_complete:
            return
        first, count = sum(self.counts), product.rows(args)
        self.counts.append(count)
        low, high = torch.searchsorted(self.at, torch.tensor([first, first + count], device="cpu")).tolist()
        if high == low:
            return
        rows = product.inputs(args, (self.at[low:high] - first).to(product.weights[0].tensor.device))
        self.squares += torch.linalg.vector_norm(rows, dtype=torch.float64).item() ** 2
        if not self.squares <= torch.finfo(rows.dtype).max:
            check_finite(product.weights[0].name, rows)
            expected = "numbers whose squares have a finite sum (scale the data, and replace marks of missing values)"
            got = f"numbers up to {rows.abs().max():.1e}"
            raise BlockSparseError.expected(f"the inputs of {product.weights[0].name}", expected, got)
        self.parts.append(keep(product, rows))


class OutputCache:
    """Outputs of linear layers and convolutions of a model, which later runs return instead of computing them again.

    If there is no room for all, those that cost most to compute are stored.

    Args:
        model: the model.
        names: its layers.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]):
        self.modules: dict[str, Any] = {name: model.get_submodule(name) for name in names}
        self.outputs: dict[tuple[str, int, int], Tensor] = {}
        self.bytes = 0
        self.begin(0)

    def begin(self, batch: int) -> None:
        """Start the run of a batch, by its number."""
        self.batch, self.calls = batch, dict.fromkeys(self.modules, 0)

    @contextmanager
    def used(self, names: Iterable[str]) -> Iterator[None]:
        """Use cached outputs of these layers, and cache those that are missing while there is room."""
        modules = {name: self.modules[name] for name in names}
        try:
            for name, module in modules.items():
                module.forward = self._cached(name, module.forward)
            yield
        finally:
            for module in modules.values():
                vars(module).pop("forward", None)

    def _cached(self, name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `forward` of a layer with cached outputs."""

        @wraps(forward)
        def cached(*args: Any, **kwargs: Any) -> Tensor:
            key = name, self.batch, self.calls[name]
            self.calls[name] += 1
            if key in self.outputs:
                return self.outputs[key].clone()  # the model may change it in place
            output = forward(*args, **kwargs)
            size = output.numel() * output.element_size()
            if self._make_room(size, self._cost(name)):
                self.outputs[key] = output.clone()
                self.bytes += size
            return output

        return cached

    def _cost(self, name: str) -> int:
        """Return the number of weights of an output of a layer: the multiplications that each of its values costs."""
        return self.modules[name].weight[0].numel()

    def _make_room(self, size: int, cost: int) -> bool:
        """Remove outputs that cost less to compute until `size` bytes are free; return whether they are."""
        while self.bytes + size > MAX_CACHED_BYTES:
            key = min(self.outputs, key=lambda key: self._cost(key[0]), default=None)
            if key is None or self._cost(key[0]) >= cost:
                return False
            removed = self.outputs.pop(key)
            self.bytes -= removed.numel() * removed.element_size()
        return True


class Passes:
    """The calibration batches and the modules that they reach, for repeated runs.

    Args:
        model: the model.
        batches: its inputs; the last ones are not used if the first suffice.
        products: the products of each module, by the module's name.
        others: functions that get the arguments of each call of further modules, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: list[Any],
        products: Mapping[str, list[Product]],
        others: Mapping[str, Callable[[tuple[Any, ...]], None]],
    ):
        self.products = products
        self.reached: dict[str, Reach] = {}
        """The modules that are reached, by name, in the order of their first calls."""
        names = {model.get_submodule(name): name for name in (*products, *others)}
        sizes = {
            name: sum(w.tensor.numel() for product in of_module for w in product.weights)
            for name, of_module in products.items()
        }
        self.batches: list[Any] = []
        self.fitted: set[str] = set()
        """Modules whose weights and inputs will not change any more, by name."""
        self._cacheable = {
            name
            for name, of_module in products.items()
            if type(model.get_submodule(name)) not in (*LAYERS, *CELLS, nn.MultiheadAttention)
            and sum(sum(product.sizes) for product in of_module) >= MIN_CACHED_INPUTS
        }
        self._caches = {model: OutputCache(model, self._cacheable)}

        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            name = names[module]
            reached = self.reached.setdefault(name, Reach())
            of_products = [
                (reached.rows.setdefault(product.name, []), product.rows(args)) for product in products.get(name, ())
            ]
            for counts, count in ((reached.calls, 1), *of_products):
                counts += [0] * (len(self.batches) - len(counts))
                counts[-1] += count
            if name in others:
                others[name](args)

        def is_enough() -> bool:
            covered = [
                name
                for name, reached in self.reached.items()
                if reached.rows and all(reached.total(each) >= self._limit(each) for each in products.get(name, ()))
            ]
            return sum(sizes.get(name, 0) for name in covered) >= COVERED_FRACTION * sum(sizes.values())

        def needed() -> Iterator[Any]:
            for batch in batches:
                if self.batches and is_enough():
                    break
                self._caches[model].begin(len(self.batches))
                self.batches.append(batch)
                yield batch

        with self._caches[model].used(self._cacheable):
            observe(model, needed(), names, record)
        for reached in self.reached.values():
            reached.calls += [0] * (len(self.batches) - len(reached.calls))
        self._dense = model

    def multiplications(self, names: Iterable[str]) -> float:
        """Return the average number of multiplications per sample in the products of these modules."""
        total = sum(
            self.reached[name].total(product) * product.weights[0].shape[0] * sum(product.sizes)
            for name in names
            for product in self.products[name]
        )
        return total / sum(sample_count(batch) for batch in self.batches)

    def row_count(self, name: str, product: Product) -> int:
        """Return the number of rows of a product's inputs that are used, given the name of its module."""
        return min(self._limit(product), self._enough_rows(product, self.reached[name].rows[product.name]))

    def rows(self, model: nn.Module, product: Product, name: str) -> tuple[Tensor, list[int]]:
        """Return a product's inputs `[rows, in]`, and the number of rows of each call of the module `name`.

        Rows beyond the limits are sampled, at the same positions for each copy of the model.

        Raises:
            BlockSparseError: inputs that are not finite, or whose squares overflow.
        """
        sampled = self.collect(model, {name: [product]}, lambda _, rows: rows)[product.name]
        return torch.cat(sampled.parts) if sampled.parts else torch.empty(0, device="cpu"), sampled.counts

    def collect(
        self, model: nn.Module, products: Mapping[str, list[Product]], keep: Callable[[Product, Tensor], T]
    ) -> dict[str, Sampled[T]]:
        """Return what `keep` makes of the sampled inputs of several products, by their names, in a single run.

        Args:
            model: the model.
            products: products by the name of their module.
            keep: gets a product and its inputs at the sampled rows of a call, `[rows, in]`.

        Raises:
            BlockSparseError: inputs that are not finite, or whose squares overflow.
        """
        modules = {model.get_submodule(name): name for name in products}
        sampled: dict[str, Sampled[T]] = {}
        for name, of_module in products.items():
            for product in of_module:
                total = self._enough_rows(product, self.reached[name].rows[product.name])
                sampled[product.name] = Sampled(total, self._positions(product, total))

        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            for product in products[modules[module]]:
                sampled[product.name].add(product, args, keep)

        self.run(model, modules.values(), record, lambda: all(each.is_complete for each in sampled.values()))
        return sampled

    def run(
        self,
        model: nn.Module,
        modules: Iterable[str],
        record: Callable[[nn.Module, tuple[Any, ...]], None],
        stop: Stop = never,
    ) -> None:
        """Call `record` with each call of these modules and its arguments; stop each batch after the last one.

        After a batch, `stop` returns whether no more are needed.
        """
        observed, remaining = list(modules), 0
        cache = self._caches.setdefault(model, OutputCache(model, self._cacheable))
        names = self._cacheable
        if model is not self._dense:
            # The input of a second call may depend on modules that are fitted later.
            names = {each for each in names & self.fitted if max(self.reached[each].calls) == 1}

        def reaching() -> Iterator[Any]:
            nonlocal remaining
            for number, batch in enumerate(self.batches):
                remaining = sum(self.reached[name].calls[number] for name in observed)
                if remaining:
                    if stop():
                        break
                    cache.begin(number)
                    yield batch

        def observer(module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal remaining
            record(module, args)
            remaining -= 1
            if not remaining:
                raise SkipBatch

        with cache.used(names):
            observe(model, reaching(), [model.get_submodule(name) for name in observed], observer)

    def forget(self, model: nn.Module, prefix: str) -> None:
        """Remove cached outputs of layers whose names start so, as their weights have changed."""
        if (cache := self._caches.get(model)) is not None:
            for key in [key for key in cache.outputs if key[0].startswith(prefix)]:
                removed = cache.outputs.pop(key)
                cache.bytes -= removed.numel() * removed.element_size()

    @staticmethod
    def _limit(product: Product) -> int:
        """Return the number of rows of a product that are used at most."""
        inputs = sum(product.sizes)
        width = max(inputs, product.weights[0].shape[0])
        return min(MAX_ROWS if inputs <= MAX_INPUTS else MAX_ROWS_WIDE, max(64, MAX_BYTES // (4 * width)))

    def _enough_rows(self, product: Product, counts: list[int]) -> int:
        """Return the rows in the first batches that have enough rows and samples, given the rows of each."""
        total = samples = 0
        for batch, count in zip(self.batches, counts, strict=False):
            if total >= self._limit(product) and samples >= MIN_SAMPLES:
                break
            total, samples = total + count, samples + sample_count(batch)
        return total

    @staticmethod
    def _positions(product: Product, rows: int) -> Tensor:
        """Return the positions of the rows to use, int64, rising, the same in each call."""
        limit = Passes._limit(product)
        if rows <= limit:
            return torch.arange(rows, device="cpu")
        # Unlike torch.randperm, this takes little time and memory for a billion rows.
        drawn = np.random.default_rng(0).choice(rows, limit, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(drawn))
