"""Time an epoch of a truly sparse MLP against the dense net of its shape and an implementation in scipy.

All train the same net in the same way: forward, cross entropy, backward, momentum SGD, with All-ReLU and dropout. Loss
and gradients without dropout are compared first. The contenders:

    blocksparse  `SparseMLP` and `bs.sparsity.SGD`.
    dense        the same with torch.nn.Linear and the faster implementation of torch.optim.SGD, and our dropout, which
                 is faster than PyTorch's.
    scipy        numpy and scipy.sparse as fast as they allow; as in ours, nothing dense is formed: see `ScipyNet`.
    blas         as scipy, but the gradient of the values is gathered from the dense gradient, which BLAS computes with
                 one thread at the speed of dense nets: faster for a small net, impossible for a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.convert import from_dense, to_dense
from blocksparse.errors import BlockSparseError
from blocksparse.layout import import_scipy_sparse
from blocksparse.measure import Call, Samples
from blocksparse.sparsity import SET, SGD
from blocksparse_lab.bench.case import OURS, check_errors
from blocksparse_lab.bench.report import duration
from blocksparse_lab.models.mlp import SparseMLP
from targets.rows import Race, Row, RowIterator, race, set_threads, timing_options

PEERS = ("dense", "scipy", "blas")
# Largest relative L2 difference from our loss and gradients.
BOUND = 1e-5
# Target speed-ups of an epoch, with their texts.
TARGETS = {"dense": (1.0, "> 1x dense torch.nn"), "scipy": (5.0, ">= 5x scipy CSR")}

# Steps per timed call: as in an epoch, a step finds the caches as the step before left them.
STEPS = 10

Results = dict[str, np.ndarray]


@dataclass(frozen=True)
class MlpSpec:
    """A net and its training, by default as published for Fashion-MNIST.

    `sizes` are the features of the input, of each hidden layer and of the output. Rows that do not fill a batch are
    left out of an epoch.

    >>> MlpSpec().steps
    468
    """

    sizes: tuple[int, ...] = (784, 1000, 1000, 1000, 10)
    epsilon: float = 20
    batch: int = 128
    rows: int = 60_000
    alpha: float = 0.6
    dropout: float = 0.3
    zeta: float = 0.3
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 2e-4

    @property
    def steps(self) -> int:
        """Training steps per epoch."""
        return self.rows // self.batch


def rows(budget: float = 8.0, quick: bool = False) -> RowIterator:
    """Time an epoch against dense and scipy, with PyTorch's number of threads and with one; `quick` uses small sizes.

    Raises:
        BlockSparseError: scipy is missing, or a loss or gradient differs from ours.
    """
    spec = MlpSpec((60, 80, 80, 10), epsilon=3, batch=16, rows=160) if quick else MlpSpec()
    problem = MlpProblem(spec)
    differences = problem.check()
    before = torch.get_num_threads()
    for threads in dict.fromkeys((before, 1)):
        with set_threads(threads), _limit_blas_threads():
            samples, details = time_epochs(problem, **timing_options(budget, quick))
        details |= {"threads": threads, "differences": differences}
        for peer in PEERS:
            yield epoch_row(spec, peer, samples, details, has_target=threads == before)


def time_epochs(problem: MlpProblem, rounds: int, budget: float) -> tuple[Samples, dict[str, Any]]:
    """Return the seconds of an epoch of each contender, by round, and further facts."""
    dense = {kind: problem.dense_step(kind) for kind in ("fused", "foreach")}
    kind = _fastest_way(dense)
    step, evolve = problem.our_step(), problem.evolution()
    calls = {OURS: step, "dense": dense[kind], "scipy": problem.scipy.step, "blas": problem.blas.step}
    calls = {name: partial(_run_steps, call) for name, call in calls.items()} | {"evolution": evolve}
    steps = race(calls, rounds, budget).samples.per(dict.fromkeys(calls, STEPS) | {"evolution": 1})
    evolution = steps.time("evolution").median
    # Scipy would take longer than our evolution, as it would rebuild its matrices. The dense net has no topology.
    extra = {OURS: evolution, "dense": 0.0, "scipy": evolution, "blas": evolution}
    epochs = {name: [problem.spec.steps * t + extra[name] for t in steps.seconds[name]] for name in (OURS, *PEERS)}
    details = {
        **asdict(problem.spec),
        "steps": problem.spec.steps,
        "step": {name: vars(steps.time(name)) for name in (OURS, *PEERS)},
        "evolution": evolution,
        "dense_sgd": kind,
        "scipy_ways": [layer.ways for layer in problem.scipy.layers],
        "blas_ways": [layer.ways for layer in problem.blas.layers],
    }
    return Samples(epochs, steps.repeat), details


def _limit_blas_threads() -> Any:
    # More BLAS threads keep spinning after a product: on two cores, our steps took 2.4 times as long.
    try:
        return import_module("threadpoolctl").threadpool_limits(1, user_api="blas")
    except ImportError:
        raise BlockSparseError("This benchmark needs threadpoolctl: pip install threadpoolctl.") from None


def _run_steps(step: Call) -> None:
    for _ in range(STEPS):
        step()


def epoch_row(spec: MlpSpec, peer: str, epochs: Samples, details: dict[str, Any], has_target: bool) -> Row:
    """Return the row of our epoch's speed-up over a peer's."""
    threads = details["threads"]
    work = f"an epoch, {describe(spec)}, {threads} thread{'s' * (threads != 1)}"
    wgrads = ", ".join(sorted({ways["wgrad"] for ways in details["blas_ways"]}))
    descriptions = {
        "dense": f"dense torch.nn, SGD {details['dense_sgd']}",
        "scipy": "scipy CSR, whose sparse products have one thread, nothing dense",
        "blas": f"the same with gradients of the values from dense products where faster ({wgrads})",
    }[peer]
    ours, theirs = (duration(epochs.time(name).median) for name in (OURS, peer))
    least, target = TARGETS.get(peer, (None, None)) if has_target else (None, None)
    more = f"; {ours} against {theirs}, of it an evolution {duration(details['evolution'])}"
    details = {**details, "seconds": {name: vars(epochs.time(name)) for name in (OURS, peer)}}
    return Race(epochs).row(
        work, peer, OURS, descriptions, least=least, target=target or "-", more=more, details=details
    )


def describe(spec: MlpSpec) -> str:
    """Return the net and its training as text.

    >>> describe(MlpSpec())
    'MLP 784-1000-1000-1000-10, epsilon 20, 60,000 rows, batch 128, SET'
    """
    sizes = "-".join(map(str, spec.sizes))
    return f"MLP {sizes}, epsilon {spec.epsilon:g}, {spec.rows:,} rows, batch {spec.batch}, SET"


class MlpProblem:
    """One net and its inputs, in our form and in each peer's, with the same weights."""

    def __init__(self, spec: MlpSpec, seed: int = 0):
        self.spec, self.seed = spec, seed
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(spec.batch, spec.sizes[0], generator=generator)
        self.labels = torch.randint(spec.sizes[-1], (spec.batch,), generator=generator)

    def ours(self) -> SparseMLP:
        """Return a new copy of the net."""
        s = self.spec
        return SparseMLP(s.sizes, epsilon=s.epsilon, alpha=s.alpha, dropout=s.dropout, seed=self.seed)

    def dense(self) -> SparseMLP:
        """Return the dense net that computes the same."""
        s = self.spec
        dense = SparseMLP(s.sizes, density=None, alpha=s.alpha, dropout=s.dropout)
        with torch.no_grad():
            for layer, sparse in _pairs(dense, self.ours()):
                layer.weight.copy_(to_dense(sparse.values, sparse.layout))
                layer.bias.copy_(sparse.bias)
        return dense

    @cached_property
    def scipy(self) -> ScipyNet:
        """The net in scipy, with nothing dense formed."""
        return ScipyNet(self.spec, self.ours(), self.x, self.labels).tuned()

    @cached_property
    def blas(self) -> ScipyNet:
        """The net in scipy, with dense gradients where they are faster."""
        return ScipyNet(self.spec, self.ours(), self.x, self.labels).tuned(dense=True)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Call:
        """Return a training step as a call."""
        model.train()

        def run() -> Tensor:
            optimizer.zero_grad()
            loss = self._loss(model)
            loss.backward()
            optimizer.step()
            return loss

        return run

    def our_step(self) -> Call:
        model = self.ours()
        s = self.spec
        return self.step(model, SGD(model.parameters(), s.lr, s.momentum, s.weight_decay))

    def dense_step(self, kind: str) -> Call:
        """Return a training step with PyTorch's "fused" or "foreach" SGD."""
        model, s = self.dense(), self.spec
        chosen = {"fused": kind == "fused", "foreach": kind == "foreach"}
        sgd = torch.optim.SGD(model.parameters(), s.lr, s.momentum, weight_decay=s.weight_decay, **chosen)
        return self.step(model, sgd)

    def evolution(self) -> Call:
        """Return the evolution between two epochs as a call, with the momentum of that time."""
        model, s = self.ours(), self.spec
        optimizer = SGD(model.parameters(), s.lr, s.momentum, s.weight_decay)
        self.step(model, optimizer)()
        return SET(model, optimizer, s.zeta, skip=model.output).step

    def check(self) -> dict[str, float]:
        """Return the largest relative L2 difference from our loss and gradients, by peer."""
        expected = self._results(self.ours())
        others = {"dense": self._results(self.dense()), "scipy": self.scipy.results(), "blas": self.blas.results()}
        worst = {}
        for peer, results in others.items():
            off = {
                f"{name} of {peer}": _relative_difference(results[name], reference)
                for name, reference in expected.items()
            }
            check_errors(BOUND, off, self.spec, "ours")
            worst[peer] = max(off.values())
        return worst

    def _results(self, model: SparseMLP) -> Results:
        """Return loss and gradients without dropout; of a dense net, the gradients of our connections."""
        loss = self._loss(model.eval())
        loss.backward()
        results = {"loss": loss.detach().numpy()}
        for i, (layer, sparse) in enumerate(_pairs(model, self.ours())):
            values = layer.values.grad if hasattr(layer, "values") else from_dense(layer.weight.grad, sparse.layout)
            results |= {f"values {i}": values.numpy().reshape(-1), f"bias {i}": layer.bias.grad.numpy()}
        return results

    def _loss(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.x), self.labels)


def _pairs(model: SparseMLP, other: SparseMLP) -> Iterator[tuple[Any, Any]]:
    """Return the layers of two nets in pairs."""
    return zip(model.layers, other.layers, strict=True)


def _relative_difference(result: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))


# -- in scipy --------------------------------------------------------------------------------------------------------


class ScipyNet:
    """The net in numpy and scipy.sparse, which must be installed: float32, int32 indices, activations `[features,
    batch]`, as CSR products need.

    `tuned` times the ways to compute each kind of product and takes the fastest. The weights are copies of the model's.
    """

    def __init__(self, spec: MlpSpec, model: SparseMLP, x: Tensor, labels: Tensor):
        self.spec, self.labels = spec, labels.numpy()
        self.x = np.ascontiguousarray(x.numpy().T)
        self.layers = [_ScipyLayer(layer) for layer in model.layers]
        self.slopes = [np.float32(activation.slope) for activation in model.activations]  # type: ignore[arg-type]
        self.random = np.random.Generator(np.random.SFC64(0))

    def tuned(self, dense: bool = False) -> ScipyNet:
        """Choose the faster way for each kind of product and return self; `dense` allows those that form a dense
        gradient.
        """
        inputs, _, _ = self._forward(0.0)
        for layer, a in zip(self.layers, inputs, strict=True):
            delta = self.random.standard_normal((layer.shape[0], a.shape[1]), dtype=np.float32)
            layer.ways["dgrad"] = _fastest_way({name: partial(way, layer, delta) for name, way in _DGRADS.items()})
            if dense:
                layer.ways["wgrad"] = _fastest_way(
                    {name: partial(way, layer, delta, a) for name, way in _WGRADS.items()}
                )
        return self

    def results(self) -> Results:
        """Return loss and gradients without dropout."""
        loss, gradients = self._gradients(0.0)
        results: Results = {"loss": np.array(loss)}
        for i, (values, bias) in enumerate(gradients):
            results |= {f"values {i}": values, f"bias {i}": bias}
        return results

    def step(self) -> float:
        """Run a training step and return the loss."""
        s = self.spec
        loss, gradients = self._gradients(s.dropout)
        for layer, own in zip(self.layers, gradients, strict=True):
            for w, v, grad in zip(layer.parameters, layer.momenta, own, strict=True):
                v *= np.float32(s.momentum)
                grad *= np.float32(s.lr)
                v -= grad
                w *= np.float32(1 - s.weight_decay)
                w += v
        return loss

    def _forward(self, dropout: float) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        """Return the inputs of all layers, the factors of all hidden units, and the scores `[classes, batch]`."""
        inputs, factors = [self.x], []
        for layer, slope in zip(self.layers, self.slopes, strict=False):
            z = layer.forward(inputs[-1])
            # One factor does activation and dropout, in both passes.
            factor = np.multiply(z > 0, 1 - slope, dtype=np.float32)
            factor += slope
            if dropout:
                factor *= self.random.random(z.shape, dtype=np.float32) >= dropout
                factor *= np.float32(1 / (1 - dropout))
            z *= factor
            inputs.append(z)
            factors.append(factor)
        return inputs, factors, self.layers[-1].forward(inputs[-1])

    def _gradients(self, dropout: float) -> tuple[float, list[tuple[np.ndarray, np.ndarray]]]:
        """Return the loss, and the gradients of values and bias of each layer."""
        inputs, factors, scores = self._forward(dropout)
        scores -= scores.max(0)
        delta = np.exp(scores)
        total = delta.sum(0)
        batch = np.arange(len(self.labels))
        loss = float((np.log(total) - scores[self.labels, batch]).mean())
        delta /= total
        delta[self.labels, batch] -= 1
        delta /= np.float32(len(batch))
        gradients = []
        for i in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[i]
            gradients.append((_WGRADS[layer.ways["wgrad"]](layer, delta, inputs[i]), delta.sum(1)))
            if i:
                delta = _DGRADS[layer.ways["dgrad"]](layer, delta)
                delta *= factors[i - 1]
        return loss, gradients[::-1]


class _ScipyLayer:
    """A weight in CSR, its transpose, and its momentum."""

    def __init__(self, layer: Any):
        sparse = import_scipy_sparse()
        layout = layer.layout
        self.shape = layout.shape
        self.rows, self.cols = layout.row_of_block.astype(np.int32), np.array(layout.col_of_block)
        self.values = layer.values.detach().numpy().reshape(-1).copy()
        self.bias = layer.bias.detach().numpy().copy()
        self.weight = sparse.csr_array((self.values, self.cols, np.array(layout.row_start)), shape=self.shape)
        self.order = layout.transpose_order
        turned = layout.T
        arrays = (self.values[self.order], np.array(turned.col_of_block), np.array(turned.row_start))
        self.turned = sparse.csr_array(arrays, shape=turned.shape)
        self.view = self.weight.T  # CSC, sharing the values
        self.parameters = (self.weight.data, self.bias)
        self.momenta = tuple(np.zeros_like(p) for p in self.parameters)
        self.ways = {"dgrad": "transposed CSR", "wgrad": "gathers"}

    def forward(self, a: np.ndarray) -> np.ndarray:
        z = self.weight @ a
        z += self.bias[:, None]
        return z


def _dgrad_by_transposed_csr(layer: _ScipyLayer, delta: np.ndarray) -> np.ndarray:
    np.take(layer.weight.data, layer.order, out=layer.turned.data, mode="clip")
    return layer.turned @ delta


def _wgrad_by_gathers(layer: _ScipyLayer, delta: np.ndarray, a: np.ndarray) -> np.ndarray:
    gradient = np.empty_like(layer.values)
    for first in range(0, len(gradient), 4096):  # 4,096 rows of each fit into the cache
        part = slice(first, first + 4096)
        np.einsum("kb,kb->k", delta[layer.rows[part]], a[layer.cols[part]], out=gradient[part])
    return gradient


_DGRADS: dict[str, Callable[..., np.ndarray]] = {
    "transposed CSR": _dgrad_by_transposed_csr,
    "CSC view": lambda layer, delta: layer.view @ delta,
}
_WGRADS: dict[str, Callable[..., np.ndarray]] = {
    "dense, gathered": lambda layer, delta, a: (delta @ a.T)[layer.rows, layer.cols],
    "gathers": _wgrad_by_gathers,
}


def _fastest_way(ways: dict[str, Callable[[], object]]) -> str:
    """Time the ways in turn and return the name of the fastest."""
    samples = race(ways, rounds=9, budget=0.5).samples
    return min(ways, key=lambda name: samples.time(name).median)
