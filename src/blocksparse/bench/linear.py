"""The linear products against their peers: correct first, then timed in alternation.

The peers:
    dense       PyTorch's dense product of the same pass, with a weight that is random everywhere.
    torch-bsr   `torch.nn.functional.linear(x, weight)` with a `torch.sparse_bsr` weight.
    bsr-matmul  `(weight @ x.T).T` with the same weight.

The two BSR peers are tried through autograd for the passes beyond forward; what PyTorch refuses is recorded with its
own words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import patterns
from ..convert import block_coordinates
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.linear import linear
from ..ops.linear.op import indices_of, linear_op, linear_wgrad_op
from ..ops.linear.specs import LinearSpec
from .timing import Call, Clock, Samples, Spread, alternate, host_clock

OURS = "blocksparse"
PEERS = ("dense", "torch-bsr", "bsr-matmul")

# Relative L2 error against float64 that a result may have.
BOUNDS = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}

# The check forms at most this many numbers of a dense float64 weight (all of hidden 4096), and multiplies at most
# this many tokens with them: beyond, it looks at a random part of the rows, columns or blocks, and of the tokens.
CHECKED_WEIGHT = 2**24
CHECKED_TOKENS = 128

_CLOCKS: dict[str, Clock] = {"cpu": host_clock}


@dataclass(frozen=True)
class CaseResult:
    """What came of one spec. `refused` says of each peer that could not run why."""

    spec: LinearSpec
    nnz: int
    density: float
    errors: dict[str, float]
    samples: Samples
    refused: dict[str, str]

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
        spec = self.spec
        return 2e-9 * spec.products * self.nnz * spec.block**2 * spec.tokens / self.time().median

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        names = self.samples.names
        return {
            **self.spec.as_dict(),
            "nnz": self.nnz,
            "density_stored": self.density,
            "error_bound": BOUNDS[self.spec.dtype],
            "errors": self.errors,
            "seconds": {name: {**vars(self.time(name)), "repeat": self.samples.repeat[name]} for name in names},
            "speedup": {name: vars(self.speedup(name)) for name in self.peers},
            "gflops": self.gflops,
            "refused": self.refused,
        }


class LinearBench:
    """Measures specs one after the other.

    Args:
        against: the peers, out of `PEERS`.
        rounds, budget: of the timing of one spec (see `alternate`).
        seed: of patterns and numbers.
        device: "cpu".

    The inputs and the dense weight of a shape are drawn once for all its specs in a row: at hidden 12288 drawing
    them takes longer than timing them.

    >>> result = LinearBench(rounds=3, budget=0.1).run(LinearSpec(64, 64, tokens=8, block=16, density=0.5))
    >>> result.peers, result.nnz
    (['dense'], 8)
    """

    def __init__(
        self,
        against: Sequence[str] = ("dense",),
        *,
        rounds: int = 21,
        budget: float = 4.0,
        seed: int = 0,
        device: str = "cpu",
    ):
        if rounds < 1:
            raise BlockSparseError.expected("rounds", "a positive int", rounds)
        if not budget > 0:
            raise BlockSparseError.expected("budget", "a positive number of seconds", budget)
        if not 0 <= seed < 2**63:
            raise BlockSparseError.expected("seed", "an int from 0 to 2^63 - 1", seed)
        if device not in _CLOCKS:
            raise BlockSparseError.expected("device", f"one that can be timed ({', '.join(_CLOCKS)})", repr(device))
        self.against = _peers(against)
        self.rounds, self.budget, self.seed, self.device = rounds, budget, seed, device
        self._drawn: tuple[Any, _Inputs] | None = None

    def run(self, spec: LinearSpec, against: Sequence[str] | None = None) -> CaseResult:
        """Checks the product of `spec` against float64, then times it and its peers (other ones, if given here).

        Raises:
            BlockSparseError: the product is wrong.
        """
        problem = self.problem(spec)
        errors = problem.check(self.seed)
        calls: dict[str, Call] = {OURS: problem.ours()}
        refused = {}
        for name in self.against if against is None else _peers(against):
            try:
                call = problem.peer(name)
                call()
            except (RuntimeError, NotImplementedError) as error:
                refused[name] = " ".join(str(error).split())
            else:
                calls[name] = call
        samples = alternate(calls, rounds=self.rounds, budget=self.budget, clock=_CLOCKS[self.device])
        return CaseResult(spec, problem.layout.nnz, problem.layout.density, errors, samples, refused)

    def problem(self, spec: LinearSpec) -> Problem:
        """The tensors of `spec`, and the calls on them."""
        key = (spec.out_features, spec.in_features, spec.tokens, spec.dtype)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = None  # lets go of the old ones before the new ones are made
            self._drawn = key, _Inputs(spec, self.seed, self.device)
        return Problem(spec, self._drawn[1], self.seed)


def _peers(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in PEERS:
            raise BlockSparseError.expected("against", f"some of {', '.join(PEERS)}", repr(name))
    return tuple(dict.fromkeys(names))


class _Inputs:
    """Random activations, gradients and, once it is asked for, a dense weight."""

    def __init__(self, spec: LinearSpec, seed: int, device: str):
        self.generator = torch.Generator(device).manual_seed(seed)
        self.spec = spec
        self.x = self.randn(spec.tokens, spec.in_features)
        self.grad = self.randn(spec.tokens, spec.out_features)
        self._weight: Tensor | None = None

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.spec.torch_dtype, device=self.generator.device)

    def weight(self) -> Tensor:
        if self._weight is None:
            self._weight = self.randn(self.spec.out_features, self.spec.in_features)
        return self._weight


class Problem:
    """One spec with its tensors: our call, the peers' calls, and the check."""

    def __init__(self, spec: LinearSpec, inputs: _Inputs, seed: int):
        self.spec, self.inputs = spec, inputs
        shape = (spec.out_features, spec.in_features)
        if spec.density == 1:
            self.layout = patterns.dense(shape, spec.block)
        else:
            self.layout = patterns.random(shape, spec.block, density=spec.density, seed=seed)
        self.x, self.grad = inputs.x, inputs.grad
        self.values = inputs.randn(*self.layout.values_shape)

    # -- the calls -------------------------------------------------------------------------------------------------

    def ours(self) -> Call:
        """The pass of the spec on the block-sparse weight."""
        x, grad, values, layout = self.x, self.grad, self.values, self.layout
        indices, in_blocks = indices_of(layout, x), layout.grid[1]
        if self.spec.pass_ == "dgrad":
            return lambda: linear_op(grad, values, None, indices, in_blocks, True, None)
        if self.spec.pass_ == "wgrad":
            return lambda: linear_wgrad_op(grad, x, indices, in_blocks)
        return self._autograd(lambda x, values: linear(x, values, layout), x, values)

    def peer(self, name: str) -> Call:
        """The same pass as the peer does it; calling it raises what PyTorch raises where it refuses."""
        if name == "dense":
            return self._dense()
        if self.spec.pass_ == "wgrad":
            raise NotImplementedError("PyTorch's gradient of a BSR weight is the whole dense product")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse .* tensor support is in beta", UserWarning)
            weight = self.layout.to_torch_bsr(self.values)
        if name == "torch-bsr":
            return self._autograd(F.linear, self.x, weight)
        return self._autograd(lambda x, weight: (weight @ x.t()).t(), self.x, weight)

    def _dense(self) -> Call:
        x, grad, weight = self.x, self.grad, self.inputs.weight()
        if self.spec.pass_ == "dgrad":
            return lambda: grad @ weight
        if self.spec.pass_ == "wgrad":
            # Into memory that is there already: a new result of this size costs its page faults, every time.
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
        results = self.ours()()
        names = {"forward": ["y"], "dgrad": ["grad_x"], "wgrad": ["grad_values"], "train": ["grad_x", "grad_values"]}
        named = dict(zip(names[self.spec.pass_], results if isinstance(results, tuple) else [results], strict=True))
        if self.spec.pass_ == "train":
            with torch.no_grad():
                named["y"] = linear(self.x, self.values, self.layout)
        rng = np.random.default_rng(seed)
        errors = {name: self._error(name, result, rng) for name, result in named.items()}
        bound = BOUNDS[self.spec.dtype]
        for name, error in errors.items():
            if not error <= bound:
                raise BlockSparseError.expected(
                    f"{name} of {self.spec!r}",
                    f"a relative L2 error of at most {bound:g} against float64",
                    f"{error:g}",
                )
        return errors

    def _error(self, name: str, result: Tensor, rng: np.random.Generator) -> float:
        block = self.spec.block
        if name == "grad_values":
            some = _some(rng, self.layout.nnz, CHECKED_WEIGHT // max(1, 2 * self.spec.tokens * block))
            rows, cols = (indices[some] for indices in block_coordinates(self.layout, some.device))
            left = self.grad.reshape(self.spec.tokens, -1, block)[:, rows].double()
            right = self.x.reshape(self.spec.tokens, -1, block)[:, cols].double()
            return _relative(result[some], torch.einsum("tko,tki->koi", left, right))
        layout, values, x = self.layout, self.values, self.x
        if name == "grad_x":
            order = torch.from_numpy(layout.transpose_order)
            layout, values, x = layout.T, values[order].transpose(1, 2), self.grad
        tokens = _some(rng, self.spec.tokens, CHECKED_TOKENS)
        rows = _some(rng, layout.grid[0], max(1, CHECKED_WEIGHT // (block * layout.shape[1])))
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
    """The dense float64 weight of some block rows. Not by `to_dense`, so as to lean on nothing that is under test."""
    crow = layout.crow_indices().tolist()
    blocks = torch.cat([torch.arange(crow[row], crow[row + 1]) for row in rows.tolist()])
    nth = torch.repeat_interleave(layout.crow_indices().diff()[rows])
    height, width = layout.block_shape
    weight = torch.zeros(len(rows), height, layout.grid[1], width, dtype=torch.float64)
    weight[nth, :, layout.col_indices().long()[blocks]] = values[blocks].double()
    return weight.reshape(len(rows) * height, -1)


def _relative(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; where nothing but zeros is expected, 0 for just that and else infinity."""
    norm = expected.norm().item()
    error = (found.double() - expected).norm().item()
    if norm == 0:
        return 0.0 if error == 0 else float("inf")
    return error / norm
