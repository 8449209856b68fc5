"""The linear products against their peers: correct first, then timed in alternation.

The peers:
    dense       PyTorch's dense product of the same pass, with a weight that is random everywhere.
    torch-bsr   `torch.nn.functional.linear(x, weight)` with a `torch.sparse_bsr` weight; on a GPU its forward pass is
                the kernel behind it, tuned for the shape by PyTorch's own tuner.
    bsr-matmul  `(weight @ x.T).T` with the same weight.
    csr-matmul  the same with a `torch.sparse_csr` one: cuSPARSE on a GPU, MKL on a CPU.
    stk         `x @ weight.T` of the Sparse Toolkit: a GPU, blocks of 128.

Of those with a block-sparse weight, results are compared with float64 as ours are. They are tried through autograd for
the passes beyond forward; what a peer refuses is recorded with its own words.

On a GPU, copies of the weights take turns so that none is found in a cache, and all of them are replayed from one CUDA
graph per contender.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse.convert import block_coordinates
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call, Samples, Spread, alternate
from blocksparse.ops.gpu.tiles import FEW_TOKENS, PASSES, Gpu, Work, bucket, gpu_of, tile_for
from blocksparse.ops.linear import linear
from blocksparse.ops.linear.op import LINEAR, linear_op, linear_wgrad_op
from blocksparse.ops.linear.specs import LinearSpec

from . import peers as elsewhere
from .device import LEAST_CALLS, Device, device_of, same_bits

OURS = "blocksparse"
PEERS = ("dense", "torch-bsr", "bsr-matmul", "csr-matmul", "stk")

# Relative L2 error against float64 that a result may have.
BOUNDS = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}

# The check forms at most this many numbers of a dense float64 weight (all of hidden 4096), and multiplies at most
# this many tokens with them: beyond, it looks at a random part of the rows, columns or blocks, and of the tokens.
CHECKED_WEIGHT = 2**24
CHECKED_TOKENS = 128


def bound_of(dtype: str, device: torch.device) -> float:
    """The relative L2 error against float64 that a result of this dtype may have on this device."""
    if device.type == "cuda" and dtype == "float32":
        return 2e-3 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 1e-5
    return BOUNDS[dtype]


@dataclass(frozen=True)
class CaseResult:
    """The result of one spec. `refused` says why a peer could not run, `facts` how the rest was measured."""

    spec: LinearSpec
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

    @property
    def gflops(self) -> float:
        """Our useful arithmetic, in 10^9 operations per second: the stored blocks only."""
        return 1e-9 * self.operations / self.time().median

    @property
    def operations(self) -> int:
        """The multiplications and additions of the stored blocks."""
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
        return {
            **self.spec.as_dict(),
            "nnz": self.nnz,
            "density_stored": self.density,
            "error_bound": self.bound,
            "errors": self.errors,
            "seconds": {name: {**vars(self.time(name)), "repeat": self.samples.repeat[name]} for name in names},
            "speedup": {name: vars(self.speedup(name)) for name in self.peers},
            "gflops": self.gflops,
            "refused": self.refused,
            **self.facts,
        }


class LinearBench:
    """Measures specs one after the other.

    Args:
        against: the peers, out of `PEERS`.
        rounds, budget: of the timing of one spec (see `alternate`).
        seed: of patterns and numbers.
        device: "cpu", "cuda", or a `bench.device.Device`.
        tuning: seconds that a peer which tunes itself has for each shape.

    The inputs and the dense weight of a shape are drawn once for all its specs in a row: at hidden 12288 drawing
    them takes longer than timing them.

    >>> result = LinearBench(rounds=3, budget=0.1).run(LinearSpec(64, 64, tokens=8, block=16, density=0.5))
    >>> result.peers, result.nnz
    (['dense'], 8)
    """

    known_peers: Sequence[str] = PEERS

    def __init__(
        self,
        against: Sequence[str] = ("dense",),
        *,
        rounds: int = 21,
        budget: float = 4.0,
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
        self._drawn: tuple[Any, _Inputs] | None = None

    def _peers(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            if name not in self.known_peers:
                raise BlockSparseError.expected("against", f"some of {', '.join(self.known_peers)}", repr(name))
        return tuple(dict.fromkeys(names))

    def run(self, spec: LinearSpec, against: Sequence[str] | None = None) -> CaseResult:
        """Checks the product of `spec` against float64, then times it and its peers (other ones, if given here).

        Raises:
            BlockSparseError: the product is wrong.
        """
        problem = self.problem(spec)
        bound = bound_of(spec.dtype, self.device.torch)
        errors = problem.check(self.seed)
        counts: dict[str, int] = {}
        calls = {OURS: self.ready(problem, OURS, counts)}
        refused: dict[str, str] = {}
        for name in self.against if against is None else self._peers(against):
            try:
                call = problem.peer(name)
                call()
                if name != "dense" and (wrong := problem.wrong(name, call)):
                    raise BlockSparseError(wrong)
                calls[name] = self.ready(problem, name, counts)
            except Exception as error:  # of other libraries: whatever it is, the others are still measured
                refused[name] = " ".join(f"{error or type(error).__name__}".split())
        samples = self.alternate(calls, counts)
        facts = {"device": self.device.torch.type, "calls_per_sample": counts, **problem.facts()}
        return CaseResult(spec, problem.layout.nnz, problem.layout.density, errors, samples, refused, bound, facts)

    def ready(self, problem: Problem, name: str, counts: dict[str, int]) -> Call:
        """All the copies of a contender in turn as one call; how many products that is goes into `counts`.

        Raises:
            BlockSparseError: replaying ours gives other bits than calling it.
        """
        copies = self.device.copies(problem.size(name))
        calls = [problem.ours(copy) if name == OURS else problem.peer(name, copy) for copy in range(copies)]
        laps = -(-LEAST_CALLS // copies) if copies > 1 and problem.spec.tokens <= FEW_TOKENS else 1
        call = self.device.ready(calls, laps)
        if name == OURS and len(calls) > 1:
            call()
            if not same_bits(call.result, calls[-1]()):  # type: ignore[attr-defined]
                raise BlockSparseError.expected(f"a replay of {problem.spec!r}", "the bits of the call", "others")
        counts[name] = copies * laps
        return call

    def alternate(self, calls: dict[str, Call], counts: dict[str, int]) -> Samples:
        """Times what `ready` made, per product."""
        self.device.settle()
        samples = alternate(calls, rounds=self.rounds, budget=self.budget, clock=self.device.clock)
        return samples.per(counts)

    def problem(self, spec: LinearSpec) -> Problem:
        """The tensors of `spec`, and the calls on them."""
        key = (spec.out_features, spec.in_features, spec.tokens, spec.dtype)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = None  # lets go of the old ones before the new ones are made
            self._drawn = key, _Inputs(spec, self.seed, self.device.torch)
        return Problem(spec, self._drawn[1], self.seed, self.tuning)


class _Inputs:
    """Random activations, gradients and, on demand, dense weights."""

    def __init__(self, spec: LinearSpec, seed: int, device: torch.device):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.spec = spec
        self.x = self.randn(spec.tokens, spec.in_features)
        self.grad = self.randn(spec.tokens, spec.out_features)
        self._weights: list[Tensor] = []

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.spec.torch_dtype, device=self.generator.device)

    def weight(self, copy: int = 0) -> Tensor:
        while len(self._weights) <= copy:
            self._weights.append(self.randn(self.spec.out_features, self.spec.in_features))
        return self._weights[copy]


class Problem:
    """One spec with its tensors: our call, the peers' calls, and the check.

    Calls come in copies: the same product with the next weight. All copies have one layout.
    """

    def __init__(self, spec: LinearSpec, inputs: _Inputs, seed: int, tuning: float = 20.0):
        self.spec, self.inputs, self.tuning = spec, inputs, tuning
        self.layout = spec.layout(seed)
        self.x, self.grad = inputs.x, inputs.grad
        self._values = [inputs.randn(*self.layout.values_shape)]
        self._tuned: dict[str, int] | None = None

    @property
    def values(self) -> Tensor:
        """The stored blocks of the first copy."""
        return self._values[0]

    def copy_of_values(self, copy: int) -> Tensor:
        while len(self._values) <= copy:
            self._values.append(self.inputs.randn(*self.layout.values_shape))
        return self._values[copy]

    def size(self, name: str) -> int:
        """The bytes of one copy of the weight of a contender."""
        blocks = self.layout.grid[0] * self.layout.grid[1] if name == "dense" else self.layout.nnz
        return blocks * self.spec.block**2 * self.spec.torch_dtype.itemsize

    def facts(self) -> dict[str, Any]:
        """How it was computed, for the record: on a GPU, our tiles and a tuned peer's parameters."""
        if self.x.device.type != "cuda":
            return {}
        peer = {} if self._tuned is None else {"torch_bsr": self._tuned}
        return {"tiles": self.tiles(gpu_of(self.x.device)), **peer}

    def tiles(self, gpu: Gpu) -> dict[str, dict[str, Any]]:
        """Our tile on this GPU, by pass."""
        spec, tiles = self.spec, {}
        for pass_ in PASSES if spec.pass_ == "train" else (spec.pass_,):
            work = Work(pass_, spec.torch_dtype, self.layout.block_shape, bucket(spec.tokens), self.layout.density)
            tiles[pass_] = asdict(tile_for(work, gpu))
        return tiles

    # -- the calls -------------------------------------------------------------------------------------------------

    def ours(self, copy: int = 0) -> Call:
        """The pass of the spec on the block-sparse weight."""
        x, grad, values, layout = self.x, self.grad, self.copy_of_values(copy), self.layout
        indices, in_blocks = LINEAR.indices(layout, x), layout.grid[1]
        if self.spec.pass_ == "dgrad":
            return lambda: linear_op(grad, values, None, indices, in_blocks, True, None)
        if self.spec.pass_ == "wgrad":
            return lambda: linear_wgrad_op(grad, x, indices, in_blocks)
        return self._autograd(lambda x, values: linear(x, values, layout), x, values)

    def peer(self, name: str, copy: int = 0) -> Call:
        """The same pass as the peer does it. Making or calling it raises the library's own errors."""
        if name == "dense":
            return self._dense(copy)
        if self.spec.pass_ == "wgrad":
            raise NotImplementedError(f"{name} has no sampled product: its gradient is the whole dense one, if any")
        values, forward = self.copy_of_values(copy), self.spec.pass_ == "forward"
        if name == "stk":
            if not values.is_cuda:
                raise NotImplementedError("STK needs a GPU")
            product = elsewhere.stk(self.layout, values)
            return self._autograd(lambda x, _: product(x), self.x, values)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse ", UserWarning)
            weight = elsewhere.csr(self.layout, values) if name == "csr-matmul" else self.layout.to_torch_bsr(values)
        if name == "torch-bsr" and values.is_cuda and forward:
            if self._tuned is None:
                self._tuned = elsewhere.tuned(weight, self.x, self.tuning)
            product = elsewhere.torch_bsr(weight, self._tuned)
            return self._autograd(lambda x, _: product(x), self.x, weight)
        if name == "torch-bsr":
            return self._autograd(F.linear, self.x, weight)
        return self._autograd(lambda x, weight: (weight @ x.t()).t(), self.x, weight)

    def _dense(self, copy: int) -> Call:
        x, grad, weight = self.x, self.grad, self.inputs.weight(copy)
        if self.spec.pass_ == "dgrad":
            return lambda: grad @ weight
        if self.spec.pass_ == "wgrad":
            # Into existing memory: a new result of this size costs its page faults every time.
            result = torch.empty_like(weight)
            return lambda: torch.mm(grad.t(), x, out=result)
        return self._autograd(F.linear, x, weight)

    def _autograd(self, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Call:
        """Forward without autograd; dgrad and train through it (dgrad only of peers that have no other way)."""
        if self.spec.pass_ == "forward":

            def forward() -> Tensor:
                with torch.no_grad():
                    return product(x, weight)

            return forward
        x = x.detach().requires_grad_()
        weight = weight.detach().requires_grad_(self.spec.pass_ == "train")
        wanted = [tensor for tensor in (x, weight) if tensor.requires_grad]
        return lambda: torch.autograd.grad(product(x, weight), wanted, self.grad)

    # -- the check -------------------------------------------------------------------------------------------------

    def check(self, seed: int) -> dict[str, float]:
        """The relative L2 error of each result of the pass against a dense float64 product of our own making.

        Raises:
            BlockSparseError: an error beyond the bound of the dtype.
        """
        named = self._named(self.ours()())
        if self.spec.pass_ == "train":
            with torch.no_grad():
                named["y"] = linear(self.x, self.values, self.layout)
        rng = np.random.default_rng(seed)
        errors = {name: self._error(name, result, rng) for name, result in named.items()}
        bound = bound_of(self.spec.dtype, self.x.device)
        for name, error in errors.items():
            if not error <= bound:
                raise BlockSparseError.expected(
                    f"{name} of {self.spec!r}",
                    f"a relative L2 error of at most {bound:g} against float64",
                    f"{error:g}",
                )
        return errors

    def wrong(self, name: str, call: Call) -> str | None:
        """The reason why the result of a peer with our weight is wrong, if it is: the bound is ten times ours."""
        bound, rng = 10 * bound_of(self.spec.dtype, self.x.device), np.random.default_rng(0)
        for what, found in self._named(call()).items():
            if what == "grad_values":  # in the format of the peer
                continue
            error = self._error(what, found, rng)
            if not error <= bound:
                return f"wrong: {name}'s {what} has a relative L2 error of {error:g} against float64"
        return None

    def _named(self, results: Any) -> dict[str, Tensor]:
        names = {"forward": ["y"], "dgrad": ["grad_x"], "wgrad": ["grad_values"], "train": ["grad_x", "grad_values"]}
        results = results if isinstance(results, tuple) else [results]
        return dict(zip(names[self.spec.pass_], results, strict=True))

    def _error(self, name: str, result: Tensor, rng: np.random.Generator) -> float:
        block = self.spec.block
        if name == "grad_values":
            some = _some(rng, self.layout.nnz, CHECKED_WEIGHT // max(1, 2 * self.spec.tokens * block)).to(result.device)
            rows, cols = (indices[some] for indices in block_coordinates(self.layout, some.device))
            left = self.grad.reshape(self.spec.tokens, -1, block)[:, rows].double()
            right = self.x.reshape(self.spec.tokens, -1, block)[:, cols].double()
            return _relative(result[some], torch.einsum("tko,tki->koi", left, right))
        layout, values, x = self.layout, self.values, self.x
        if name == "grad_x":
            order = torch.from_numpy(layout.transpose_order).to(values.device)
            layout, values, x = layout.T, values[order].transpose(1, 2), self.grad
        tokens = _some(rng, self.spec.tokens, CHECKED_TOKENS).to(result.device)
        rows = _some(rng, layout.grid[0], max(1, CHECKED_WEIGHT // (block * layout.shape[1]))).to(result.device)
        weight = _dense_rows(layout, values, rows)
        found = result[tokens].reshape(len(tokens), -1, block)[:, rows].flatten(1)
        return _relative(found, x[tokens].double() @ weight.t())


def _some(rng: np.random.Generator, count: int, limit: int) -> Tensor:
    """Sorted indices: all of `count`, or `limit` drawn ones with the last among them, where kernels have their ends."""
    if count <= limit:
        return torch.arange(count)
    drawn = rng.choice(count - 1, limit - 1, replace=False)
    return torch.from_numpy(np.sort(np.append(drawn, count - 1)))


def _dense_rows(layout: BlockLayout, values: Tensor, rows: Tensor) -> Tensor:
    """The dense float64 weight of some block rows. Not by `to_dense`, which is itself under test."""
    starts, cols = layout.crow_indices(rows.device).long(), layout.col_indices(rows.device).long()
    count = starts.diff()[rows]
    nth = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
    within = torch.arange(len(nth), device=rows.device) - (count.cumsum(0) - count)[nth]
    blocks = starts[rows][nth] + within
    height, width = layout.block_shape
    weight = torch.zeros(len(rows), height, layout.grid[1], width, dtype=torch.float64, device=rows.device)
    weight[nth, :, cols[blocks]] = values[blocks].double()
    return weight.reshape(len(rows) * height, -1)


def _relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; where nothing but zeros is expected, 0 for just that and else infinity."""
    norm = expected.norm().item()
    error = (found.double() - expected).norm().item()
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm
