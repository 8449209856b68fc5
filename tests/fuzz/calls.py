"""Calls of one case on each instruction set, and error bounds for their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from blocksparse.checkpoint import bytes_of
from blocksparse.ops import cpu_core

DTYPES = {str(dtype)[6:]: dtype for dtype in cpu_core.DTYPES}
# Half the distance between neighbouring numbers, at 1 and at 0.
ROUNDING = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 1e-35, torch.float64: 1e-300, torch.bfloat16: 1e-35, torch.float16: 2.0**-24}


class Fault(AssertionError):
    """A wrong result."""


class Calls:
    """Runs functions on each instruction set and counts the calls by (op, isa, dtype)."""

    def __init__(self, isas: list[str] | None = None):
        self.isas = isas or [name for name, here in cpu_core.isas().items() if here]
        self.counts: Counter[tuple[str, str, str]] = Counter()

    def total(self) -> int:
        return sum(self.counts.values())

    def on_each(
        self, op: str, dtype: torch.dtype | None, call: Callable, check: Callable, threads: int = 1, any_isa=False
    ) -> None:
        """Check the result of `call` on each instruction set, unless it is `NotImplemented`; more threads must give
        equal bits.
        """
        for isa in self.isas[-1:] if any_isa else self.isas:
            try:
                with cpu_core.use_isa(isa):
                    got = self._counted(op, isa, dtype, call)
                    if got is NotImplemented:
                        continue
                    check(got)
                    if threads > 1:
                        self._same_on_threads(got, op, isa, dtype, call, threads)
            except Exception as error:
                error.add_note(f"in {op} on {isa}, {dtype}")
                raise

    def _counted(self, op, isa, dtype, call):
        got = call()
        if got is not NotImplemented:
            self.counts[op, isa, "" if dtype is None else str(dtype)[6:]] += 1
        return got

    def _same_on_threads(self, expected, op, isa, dtype, call, threads) -> None:
        torch.set_num_threads(threads)
        try:
            got = self._counted(op, isa, dtype, call)
        finally:
            torch.set_num_threads(1)
        for one, other in zip(_tensors(expected), _tensors(got), strict=True):
            if not same_bits(one, other):
                raise Fault(f"not the same on {threads} threads: {describe_error(one, other, one != other)}")


def _tensors(results) -> list[Tensor]:
    results = results if isinstance(results, tuple) else (results,)
    return [result for result in results if result is not None]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal bits."""
    return one.shape == other.shape and bytes_of(one) == bytes_of(other)


def sum_bound(terms: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the error bound of a sum of `count` products, given `terms`, the sum of their absolute values.

    The bound is count + 2 roundings of `terms`, doubled since the float64 reference rounds too. Source: Higham,
    Accuracy and Stability of Numerical Algorithms (2002), section 3.1.
    """
    return 2 * (count + 2) * ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32] * terms


def assert_within(got: Tensor, expected: Tensor, bound: Tensor | float, what: str = "result") -> None:
    """Compare each element with its bound plus the rounding to its dtype; overflow to infinity is accepted."""
    if got.shape != expected.shape:
        raise Fault(f"{what}: {list(got.shape)} for {list(expected.shape)}")
    dtype = got.dtype
    size = expected.abs() + bound
    wrong = ~((got.double() - expected).abs() <= bound + 1.01 * ROUNDING[dtype] * size + SMALLEST[dtype])
    wrong &= ~(got.isinf() & (got.sign() == expected.sign()) & (size >= torch.finfo(dtype).max))
    if wrong.any():
        raise Fault(f"{what}: {describe_error(got, expected, wrong)}")


def assert_same(got: Tensor, expected: Tensor, what: str = "result") -> None:
    if got.shape != expected.shape or not torch.equal(got, expected):
        raise Fault(f"{what}: {describe_error(got, expected, got != expected)}")


def describe_error(got: Tensor, expected: Tensor, wrong: Tensor) -> str:
    """Describe the first wrong element."""
    at = tuple(wrong.nonzero()[0].tolist()) if wrong.any() else ()
    return f"{got[at]} for {expected[at]} at {list(at)}, {int(wrong.sum())} of {wrong.numel()} wrong"


# -- activations -----------------------------------------------------------------------------------------------------

ACTIVATIONS = (None, None, "relu", "gelu", "silu")
# Lipschitz constants.
LIPSCHITZ = {None: 1.0, "relu": 1.0, "gelu": 1.13, "silu": 1.1}


def exact_output(
    exact: tuple[Tensor, Tensor], bias: Tensor | None, count: int, activation: str | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the output of an exact product after bias and activation, and its bound; `exact` is (sums, terms)."""
    expected, terms = exact
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    return activate(expected, sum_bound(terms, count, dtype), activation, dtype)


def activate(expected: Tensor, bound: Tensor, activation: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the result of an activation and its bound; in float32, activations are polynomials with a relative error
    of 1e-5.
    """
    if activation is None:
        return expected, bound
    function = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[activation]
    result = function(expected)
    # GELU in float64 is 1 + erf, which cancels on the negative side.
    own = (2e-15 * expected.abs() if dtype == torch.float64 else 2e-5 * result.abs()) if activation != "relu" else 0
    return result, LIPSCHITZ[activation] * bound + own
