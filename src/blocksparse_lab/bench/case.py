"""One way to measure: a case is checked against float64 first, then timed in alternation with its peers."""

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

from .device import MIN_CALLS, Device, device_of, same_bits

OURS = "blocksparse"

# Relative L2 error against float64 that a result may have.
BOUNDS = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


def bound_of(dtype: str, device: torch.device) -> float:
    """The relative L2 error against float64 that a result of this dtype may have on this device."""
    if device.type == "cuda" and dtype == "float32":
        return 2e-3 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 1e-5
    return BOUNDS[dtype]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; where nothing but zeros is expected, 0 for just that and else infinity."""
    norm = expected.norm().item()
    error = (found.double() - expected).norm().item()
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm


def within(bound: float, errors: Mapping[str, float], of: object, against: str = "float64") -> None:
    """Compares relative L2 errors with their bound; raises where one is beyond it, or not a number."""
    for name, error in errors.items():
        if not error <= bound:
            said = f"a relative L2 error of at most {bound:g} against {against}"
            raise BlockSparseError.expected(f"{name} of {of!r}", said, f"{error:g}")


def forward(function: Callable[..., Any], *inputs: Any) -> Call:
    """The function of these inputs as a call without gradients."""

    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def backward(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor, wanted: int) -> Call:
    """Forward and backward as a call: the gradients of the first `wanted` inputs."""
    inputs = [x.detach().requires_grad_(nth < wanted) for nth, x in enumerate(inputs)]
    return lambda: torch.autograd.grad(function(*inputs), inputs[:wanted], grad)


class Case(ABC):
    """One piece of work with its tensors: our call, the peers' calls, and the check.

    Args:
        spec: its sizes: `as_dict()`, `tokens`, `products`, `block`.
        seed: of all that is drawn.
        device: the CPU by default.

    A subclass says its `layout`, that of our weight, or None where it is dense.
    """

    peers: ClassVar[tuple[str, ...]]
    rotates: ClassVar[bool] = False
    """Whether calls come in copies, each with a weight of its own."""
    layout: BlockLayout | None
    grad: Tensor
    """Of the output, where a pass goes through autograd."""

    def __init__(self, spec: Any, seed: int = 0, device: torch.device | None = None):
        self.spec, self.seed, self.device = spec, seed, device or torch.device("cpu")
        self.bound = bound_of(spec.dtype, self.device)

    @property
    def stored(self) -> tuple[int, float]:
        """The number of stored blocks, and their part of all."""
        if self.layout is None:
            raise NotImplementedError
        return self.layout.nnz, self.layout.density

    @abstractmethod
    def check(self, seed: int) -> dict[str, float]:
        """The relative L2 error of each of our results.

        Raises:
            BlockSparseError: an error beyond the bound.
        """

    def bound_for(self, name: str) -> float:
        """The largest error that `check` takes of a result."""
        return self.bound

    @abstractmethod
    def call(self, name: str, copy: int = 0) -> Call:
        """The work as we or a peer do it. Making or calling a peer's raises the library's own errors."""

    def wrong(self, name: str, call: Call) -> str | None:
        """The reason why a peer's result is wrong, if it is; None for peers that are PyTorch itself."""
        return None

    def size(self, name: str) -> int:
        """The bytes of one copy of the weight of a contender that rotates."""
        raise NotImplementedError

    def facts(self, names: Sequence[str]) -> dict[str, Any]:
        """How the contenders were measured, for the record."""
        return {}

    def through(self, product: Callable[..., Tensor], *inputs: Tensor) -> Call:
        """A product of the spec's pass: forward without autograd, dgrad (of the first input) and train through it."""
        if self.spec.pass_ == "forward":
            return forward(product, *inputs)
        return backward(product, inputs, self.grad, wanted=1 if self.spec.pass_ == "dgrad" else len(inputs))

    def switches(self) -> AbstractContextManager[Any]:
        """PyTorch's switches during check and timing."""
        return nullcontext()


@dataclass(frozen=True)
class CaseResult:
    """The result of one case. `refused` says why a peer could not run, `facts` how the rest was measured."""

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
        """Seconds per call."""
        return self.samples.time(name)

    def speedup(self, peer: str) -> Spread:
        """How many times longer the peer takes than we do."""
        return self.samples.ratio(peer, OURS)

    def tokens_per_second(self, name: str = OURS) -> float:
        return self.spec.tokens / self.time(name).median

    @property
    def gflops(self) -> float:
        """Our useful arithmetic, in 10^9 operations per second: the stored blocks only."""
        return 1e-9 * self.operations / self.time().median

    @property
    def operations(self) -> int:
        """The multiplications and additions of the stored blocks; 0 where a step is more than its products."""
        spec = self.spec
        return 2 * spec.products * self.nnz * spec.block**2 * spec.tokens

    @property
    def moved(self) -> int:
        """The fewest bytes that one product moves: values, inputs and outputs, each once."""
        spec = self.spec
        elements = self.nnz * spec.block**2 + spec.tokens * (spec.in_features + spec.out_features)
        return elements * spec.torch_dtype.itemsize

    @property
    def bandwidth(self) -> float:
        """Bytes per second, of those that have to be moved."""
        return self.spec.products * self.moved / self.time().median

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
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
    """A peer that had run before failed while it was timed; the cause is its own error."""

    def __init__(self, peer: str):
        super().__init__(peer)
        self.peer = peer


def _in_a_line(error: BaseException | None) -> str:
    return " ".join(f"{error or type(error).__name__}".split())


class Bench:
    """Measures cases of one kind, one after the other.

    Args:
        against: the peers, out of those of the cases.
        rounds, budget: of the timing of one case (see `alternate`).
        seed: of patterns and numbers.
        device: "cpu", "cuda", or a `bench.device.Device`.
        tuning: seconds that a peer which tunes itself has for each shape.
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
        self.device = device_of(device)
        self.against = self._peers(against)
        self.rounds, self.budget, self.seed, self.tuning = rounds, budget, seed, tuning

    def _peers(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            if name not in self.kind.peers:
                raise BlockSparseError.expected("against", f"some of {', '.join(self.kind.peers)}", repr(name))
        return tuple(dict.fromkeys(names))

    def case(self, spec: Any) -> Any:
        """The tensors of `spec`, and the calls on them."""
        return self.kind(spec, self.seed, self.device.torch)

    def checked(self, spec: Any) -> Any:
        """The case of `spec`, our work on which has been compared with float64."""
        case = self.case(spec)
        case.check(self.seed)
        return case

    def run(self, spec: Any, against: Sequence[str] | None = None) -> CaseResult:
        """Checks our work on `spec` against float64, then times it and its peers (other ones, if given here).

        Raises:
            BlockSparseError: our result is wrong.
        """
        case = self.case(spec)
        with case.switches():
            errors = case.check(self.seed)
            counts: dict[str, int] = {}
            calls = {OURS: self.ready(case, OURS, counts)}
            refused: dict[str, str] = {}
            for name in self.against if against is None else self._peers(against):
                try:
                    call = case.call(name)
                    call()
                    if wrong := case.wrong(name, call):
                        raise BlockSparseError(wrong)
                    calls[name] = self.ready(case, name, counts)
                except Exception as error:  # of other libraries: whatever it is, the others are still measured
                    refused[name] = _in_a_line(error)
            while True:
                try:
                    samples = self.alternate(calls, counts)
                    break
                except PeerFailed as failed:
                    del calls[failed.peer]
                    refused[failed.peer] = _in_a_line(failed.__cause__)
        facts = {"device": self.device.torch.type, "calls_per_sample": counts, **case.facts(list(calls))}
        nnz, density = case.stored
        return CaseResult(spec, nnz, density, errors, samples, refused, case.bound, facts)

    def ready(self, case: Case, name: str, counts: dict[str, int]) -> Call:
        """All the copies of a contender in turn as one call; how many calls that is goes into `counts`.

        Raises:
            BlockSparseError: replaying ours gives other bits than calling it.
        """
        copies = self.device.copies(case.size(name)) if case.rotates else 1
        calls = [case.call(name, copy) for copy in range(copies)]
        laps = -(-MIN_CALLS // copies) if copies > 1 and case.spec.tokens <= FEW_TOKENS else 1
        call = self.device.ready(calls, laps)
        if name == OURS and len(calls) > 1:
            call()
            if not same_bits(call.result, calls[-1]()):  # type: ignore[attr-defined]
                raise BlockSparseError.expected(f"a replay of {case.spec!r}", "the bits of the call", "others")
        counts[name] = copies * laps
        return call

    def alternate(
        self, calls: Mapping[str, Call], counts: Mapping[str, int] | None = None, rounds: int | None = None
    ) -> Samples:
        """Times calls in turn; of those that `ready` made, per call.

        Raises:
            PeerFailed: by an error of a call that is not ours.
        """
        self.device.settle()
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
