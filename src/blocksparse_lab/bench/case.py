"""Cases that are checked against float64 and then timed in alternation with their peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.measure import BUDGET, ROUNDS, Call, Samples, Spread, alternate
from blocksparse.ops.gpu.tiles import FEW_TOKENS

from .device import MIN_CALLS, Device, get_device, have_same_bits

OURS = "blocksparse"

# Largest relative L2 error against float64, by dtype.
BOUNDS = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


def error_bound(dtype: str, device: torch.device) -> float:
    """Return the largest relative L2 error against float64 that is accepted for this dtype on this device."""
    if device.type == "cuda" and dtype == "float32":
        return 2e-3 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 1e-5
    return BOUNDS[dtype]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected||; if `expected` is all 0, 0 if equal, else infinity."""
    norm = expected.norm().item()
    error = (result.double() - expected).norm().item()
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm


def check_errors(bound: float, errors: Mapping[str, float], subject: object, against: str = "float64") -> None:
    """Compare relative L2 errors with their bound.

    Raises:
        BlockSparseError: an error is beyond the bound, or is NaN.
    """
    for name, error in errors.items():
        if not error <= bound:
            requirement = f"a relative L2 error of at most {bound:g} against {against}"
            raise BlockSparseError.expected(f"{name} of {subject!r}", requirement, f"{error:g}")


def forward(function: Callable[..., Any], *inputs: Any) -> Call:
    """Return a call of the function on these inputs without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def backward(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, count: int) -> Call:
    """Return a call of forward and backward that gives the gradients of the first `count` inputs."""
    inputs = [x.detach().requires_grad_(nth < count) for nth, x in enumerate(inputs)]
    return lambda: torch.autograd.grad(function(*inputs), inputs[:count], grad)


class Case(ABC):
    """One piece of work with its tensors: our call, the calls of the peers, and the check.

    A subclass sets `layout`, the layout of our weight, or None if it is dense.

    Args:
        spec: the sizes, with `as_dict()`, `tokens`, `products` and `block`.
        seed: the seed of patterns and tensors.
        device: the CPU by default.
    """

    peers: ClassVar[tuple[str, ...]]
    rotates: ClassVar[bool] = False
    """Whether there are copies of each call, each with its own weight."""
    layout: BlockLayout | None
    grad: Tensor
    """The gradient of the output, for passes through autograd."""

    def __init__(self, spec: Any, seed: int = 0, device: torch.device | None = None):
        self.spec, self.seed, self.device = spec, seed, device or torch.device("cpu")
        self.bound = error_bound(spec.dtype, self.device)

    @property
    def stored(self) -> tuple[int, float]:
        """The number of stored blocks, and their fraction of all blocks."""
        if self.layout is None:
            raise NotImplementedError
        return self.layout.nnz, self.layout.density

    @abstractmethod
    def check(self, seed: int) -> dict[str, float]:
        """Return the relative L2 error of each of our results.

        Raises:
            BlockSparseError: an error is beyond the bound.
        """

    def bound_for(self, name: str) -> float:
        """Return the largest error that `check` accepts for a result."""
        return self.bound

    @abstractmethod
    def call(self, name: str, copy: int = 0) -> Call:
        """Return the work as a call of ours or of a peer; a peer raises its own errors, here or when it is called."""

    def find_fault(self, name: str, call: Call) -> str | None:
        """Return the reason why a peer's result is wrong, or None; peers that are PyTorch itself are not checked."""
        return None

    def weight_bytes(self, name: str) -> int:
        """Return the bytes of one copy of a contender's weight."""
        raise NotImplementedError

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """Return how the contenders were measured, for the JSON file."""
        return {}

    def pass_call(self, product: Callable[..., Tensor], *inputs: Tensor) -> Call:
        """Return a call of a product in the pass of the spec: forward without autograd, or through autograd for the
        gradients of the first input (dgrad) or of all inputs (train).
        """
        if self.spec.pass_ == "forward":
            return forward(product, *inputs)
        return backward(product, inputs, self.grad, count=1 if self.spec.pass_ == "dgrad" else len(inputs))

    def switches(self) -> AbstractContextManager[Any]:
        """Return a context manager that sets PyTorch's switches during check and timing."""
        return nullcontext()


@dataclass(frozen=True)
class CaseResult:
    """The errors and times of one case, the reasons why peers could not run, and facts about the measurement."""

    spec: Any
    nnz: int
    density: float
    errors: dict[str, float]
    samples: Samples
    refused: dict[str, str]
    bound: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def peers(self) -> list[str]:
        """The peers that ran."""
        return [name for name in self.samples.names if name != OURS]

    def time(self, name: str = OURS) -> Spread:
        """Return the seconds per call."""
        return self.samples.time(name)

    def speedup(self, peer: str) -> Spread:
        """Return how many times longer the peer takes than we do."""
        return self.samples.ratio(peer, OURS)

    def tokens_per_second(self, name: str = OURS) -> float:
        """Return the tokens that a contender processes per second."""
        return self.spec.tokens / self.time(name).median

    @property
    def gflops(self) -> float:
        """Our rate in 10^9 operations per second, counting stored blocks only."""
        return 1e-9 * self.operations / self.time().median

    @property
    def operations(self) -> int:
        """The multiplications and additions with stored blocks; 0 if a step does more than its products."""
        spec = self.spec
        return 2 * spec.products * self.nnz * spec.block**2 * spec.tokens

    @property
    def moved(self) -> int:
        """The fewest bytes that one product moves: values, inputs and outputs once each."""
        spec = self.spec
        elements = self.nnz * spec.block**2 + spec.tokens * (spec.in_features + spec.out_features)
        return elements * spec.torch_dtype.itemsize

    @property
    def bandwidth(self) -> float:
        """The fewest bytes to move, per second."""
        return self.spec.products * self.moved / self.time().median

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        names = self.samples.names
        if self.spec.products:
            rate: dict[str, Any] = {"gflops": self.gflops}
        else:
            rate = {"bytes_per_second": {name: self.tokens_per_second(name) for name in names}}
        return {
            **self.spec.as_dict(),
            "nnz": self.nnz,
            "density_stored": self.density,
            "error_bound": self.bound,
            "errors": self.errors,
            "seconds": {name: {**vars(self.time(name)), "repeat": self.samples.repeat[name]} for name in names},
            "speedup": {name: vars(self.speedup(name)) for name in self.peers},
            **rate,
            "refused": self.refused,
            **self.facts,
        }


class PeerFailed(Exception):
    """A peer that ran before failed while it was timed; the cause is its own error."""

    def __init__(self, peer: str):
        super().__init__(peer)
        self.peer = peer


def _on_one_line(error: BaseException | None) -> str:
    return " ".join(f"{error or type(error).__name__}".split())


class Bench:
    """Measures cases of one kind, one after the other.

    Args:
        against: the peers, some of those of the cases.
        rounds, budget: limits on the timing of one case (see `alternate`).
        seed: the seed of patterns and tensors.
        device: "cpu", "cuda", or a `bench.device.Device`.
        tuning: seconds for each shape that a peer may spend on tuning itself.
    """

    kind: ClassVar[type[Case]]

    def __init__(
        self,
        against: Sequence[str] = ("dense",),
        *,
        rounds: int = ROUNDS,
        budget: float = BUDGET,
        seed: int = 0,
        device: str | Device = "cpu",
        tuning: float = 20.0,
    ):
        if rounds < 1:
            raise BlockSparseError.expected("rounds", "a positive int", rounds)
        if not budget > 0:
            raise BlockSparseError.expected("budget", "a positive number of seconds", budget)
        if not 0 <= seed < 2**63:
            raise BlockSparseError.expected("seed", "an int from 0 to 2^63 - 1", seed)
        self.device = get_device(device)
        self.against = self._check_peers(against)
        self.rounds, self.budget, self.seed, self.tuning = rounds, budget, seed, tuning

    def _check_peers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Check that the kind has these peers, and return them once each."""
        for name in names:
            if name not in self.kind.peers:
                raise BlockSparseError.expected("against", f"some of {', '.join(self.kind.peers)}", repr(name))
        return tuple(dict.fromkeys(names))

    def case(self, spec: Any) -> Any:
        """Return the case of `spec`."""
        return self.kind(spec, self.seed, self.device.torch)

    def checked_case(self, spec: Any) -> Any:
        """Return the case of `spec` after comparing our results with float64."""
        case = self.case(spec)
        case.check(self.seed)
        return case

    def run(self, spec: Any, against: Sequence[str] | None = None) -> CaseResult:
        """Check our results of `spec` against float64, then time ours and the peers, by default those of the bench.

        Raises:
            BlockSparseError: our result is wrong.
        """
        case = self.case(spec)
        with case.switches():
            errors = case.check(self.seed)
            counts: dict[str, int] = {}
            calls = {OURS: self.prepare(case, OURS, counts)}
            refused: dict[str, str] = {}
            for name in self.against if against is None else self._check_peers(against):
                try:
                    call = case.call(name)
                    call()
                    if fault := case.find_fault(name, call):
                        raise BlockSparseError(fault)
                    calls[name] = self.prepare(case, name, counts)
                except Exception as error:  # whatever another library raises, the others are still measured
                    refused[name] = _on_one_line(error)
            while True:
                try:
                    samples = self.alternate(calls, counts)
                    break
                except PeerFailed as failed:
                    del calls[failed.peer]
                    refused[failed.peer] = _on_one_line(failed.__cause__)
        facts = {"device": self.device.torch.type, "calls_per_sample": counts, **case.facts(list(calls))}
        nnz, density = case.stored
        return CaseResult(spec, nnz, density, errors, samples, refused, case.bound, facts)

    def prepare(self, case: Case, name: str, counts: dict[str, int]) -> Call:
        """Return one call that runs all copies of a contender in turn; for few tokens, in several rounds.

        Record in `counts[name]` how many times the returned call runs the contender.

        Raises:
            BlockSparseError: a replay of our calls does not give the bits of the calls.
        """
        copies = self.device.copies(case.weight_bytes(name)) if case.rotates else 1
        calls = [case.call(name, copy) for copy in range(copies)]
        repeats = -(-MIN_CALLS // copies) if copies > 1 and case.spec.tokens <= FEW_TOKENS else 1
        call = self.device.prepare(calls, repeats)
        if name == OURS and len(calls) > 1:
            call()
            if not have_same_bits(call.result, calls[-1]()):  # type: ignore[attr-defined]
                raise BlockSparseError.expected(f"a replay of {case.spec!r}", "the bits of the call", "others")
        counts[name] = copies * repeats
        return call

    def alternate(
        self, calls: Mapping[str, Call], counts: Mapping[str, int] | None = None, rounds: int | None = None
    ) -> Samples:
        """Time calls in turn; with `counts` from `prepare`, the times are per call.

        Raises:
            PeerFailed: a call of a peer raised an error.
        """
        self.device.warm_up()
        names = {id(call): name for name, call in calls.items()}

        def clock(call: Call, repeat: int) -> float:
            try:
                return self.device.clock(call, repeat)
            except Exception as error:
                if (name := names[id(call)]) == OURS:
                    raise
                raise PeerFailed(name) from error

        samples = alternate(calls, rounds=rounds or self.rounds, budget=self.budget, clock=clock)
        return samples if counts is None else samples.per(counts)
