"""Compare the linear products with their peers: check the results, then time all in alternation.

The peers:
    dense       PyTorch's dense product in the same pass, with a random dense weight: MKL's in float32.
    onednn      oneDNN's forward product on a CPU, with the weight packed beforehand for this number of tokens.
    torch-bsr   `torch.nn.functional.linear(x, weight)` with a `torch.sparse_bsr` weight; on a GPU its forward pass is
                the kernel behind it, tuned for the shape by PyTorch's own tuner.
    bsr-matmul  `(weight @ x.T).T` with the same weight.
    csr-matmul  the same with a `torch.sparse_csr` weight: cuSPARSE on a GPU, MKL on a CPU.
    stk         `x @ weight.T` of the Sparse Toolkit: on a GPU, with blocks of 128.

Results of peers with a block-sparse weight are compared with float64 as ours are. Passes beyond forward run through
autograd; if a peer refuses one, its own message is recorded.

On a GPU, copies of the weights take turns so that none is found in a cache. One CUDA graph per contender replays all of
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blocksparse.convert import block_coordinates
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call
from blocksparse.ops.gpu.tiles import PASSES, Gpu, Work, bucket, gpu_of, tile_for
from blocksparse.ops.linear import linear
from blocksparse.ops.linear.op import linear_op, linear_wgrad_op

from . import peers as products
from .case import OURS, Bench, Case, CaseResult, check_errors, forward, relative_error
from .linear_specs import LinearSpec

__all__ = ["OURS", "PEERS", "CaseResult", "LinearBench", "LinearCase"]

PEERS = ("dense", "onednn", "torch-bsr", "bsr-matmul", "csr-matmul", "stk")

DENSE = ("dense", "onednn")  # peers with a weight of their own

# The check forms at most this many elements of a dense float64 weight (all of hidden 4096) and multiplies them with at
# most this many tokens; of larger cases it samples rows, columns or blocks, and tokens.
CHECKED_WEIGHT = 2**24
CHECKED_TOKENS = 128

# Names of the results of a pass, in order.
RESULTS = {"forward": ["y"], "dgrad": ["grad_x"], "wgrad": ["grad_values"], "train": ["grad_x", "grad_values"]}


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


class LinearCase(Case):
    """A linear product, with copies whose weights differ and whose layout is the same."""

    peers = PEERS
    rotates = True
    layout: BlockLayout

    def __init__(self, spec: LinearSpec, inputs: _Inputs, seed: int, tuning: float):
        super().__init__(spec, seed, inputs.x.device)
        self.inputs, self.tuning = inputs, tuning
        self.layout = spec.layout(seed)
        self.x, self.grad = inputs.x, inputs.grad
        self._values = [inputs.randn(*self.layout.values_shape)]
        self._tuned: dict[str, int] | None = None

    @property
    def values(self) -> Tensor:
        """The stored blocks of the first copy."""
        return self._values[0]

    def copy_of_values(self, copy: int) -> Tensor:
        """Return the stored blocks of a copy, drawn at its first use."""
        while len(self._values) <= copy:
            self._values.append(self.inputs.randn(*self.layout.values_shape))
        return self._values[copy]

    def weight_bytes(self, name: str) -> int:
        """Return the bytes of one copy of a contender's weight."""
        blocks = self.layout.grid[0] * self.layout.grid[1] if name in DENSE else self.layout.nnz
        return blocks * self.spec.block**2 * self.spec.torch_dtype.itemsize

    def facts(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Return our tiles and a tuned peer's parameters on a GPU, and nothing on the CPU."""
        if self.x.device.type != "cuda":
            return {}
        peer = {} if self._tuned is None else {"torch_bsr": self._tuned}
        return {"tiles": self.tiles(gpu_of(self.x.device)), **peer}

    def tiles(self, gpu: Gpu) -> dict[str, dict[str, Any]]:
        """Return our tile on this GPU, by pass."""
        spec, tiles = self.spec, {}
        for pass_ in PASSES if spec.pass_ == "train" else (spec.pass_,):
            work = Work(pass_, spec.torch_dtype, self.layout.block_shape, bucket(spec.tokens), self.layout.density)
            tiles[pass_] = asdict(tile_for(work, gpu))
        return tiles

    # -- the calls -------------------------------------------------------------------------------------------------

    def call(self, name: str, copy: int = 0) -> Call:
        return self._our_call(copy) if name == OURS else self._peer_call(name, copy)

    def _our_call(self, copy: int) -> Call:
        """Return a call of the spec's pass with this library, on one copy of the values."""
        x, grad, values, layout = self.x, self.grad, self.copy_of_values(copy), self.layout
        indices, in_blocks = layout.indices_on(x.device), layout.grid[1]
        if self.spec.pass_ == "dgrad":
            return lambda: linear_op(grad, values, None, indices, in_blocks, True, None)
        if self.spec.pass_ == "wgrad":
            return lambda: linear_wgrad_op(grad, x, indices, in_blocks)
        return self.pass_call(lambda x, values: linear(x, values, layout), x, values)

    def _peer_call(self, name: str, copy: int) -> Call:
        """Return a call of the spec's pass with a peer, on one copy of the values.

        Raises NotImplementedError if the peer has no such pass.
        """
        if name == "dense":
            return self._dense_call(copy)
        if name == "onednn":
            return self._onednn_call(copy)
        if self.spec.pass_ == "wgrad":
            raise NotImplementedError(f"{name} has no sampled product: its gradient is the whole dense one, if any")
        values, infers = self.copy_of_values(copy), self.spec.pass_ == "forward"
        if name == "stk":
            if not values.is_cuda:
                raise NotImplementedError("STK needs a GPU")
            product = products.stk(self.layout, values)
            return self.pass_call(lambda x, _: product(x), self.x, values)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse ", UserWarning)
            weight = products.csr(self.layout, values) if name == "csr-matmul" else self.layout.to_torch_bsr(values)
        if name == "torch-bsr" and values.is_cuda and infers:
            if self._tuned is None:
                self._tuned = products.tuned(weight, self.x, self.tuning)
            product = products.torch_bsr(weight, self._tuned)
            return self.pass_call(lambda x, _: product(x), self.x, weight)
        if name == "torch-bsr":
            return self.pass_call(F.linear, self.x, weight)
        return self.pass_call(lambda x, weight: (weight @ x.t()).t(), self.x, weight)

    def _dense_call(self, copy: int) -> Call:
        """Return a call of the spec's pass with a dense weight."""
        x, grad, weight = self.x, self.grad, self.inputs.weight(copy)
        if self.spec.pass_ == "dgrad":
            return lambda: grad @ weight
        if self.spec.pass_ == "wgrad":
            # Write to existing memory: a new result of this size would cost its page faults in each call.
            result = torch.empty_like(weight)
            return lambda: torch.mm(grad.t(), x, out=result)
        return self.pass_call(F.linear, x, weight)

    def _onednn_call(self, copy: int) -> Call:
        if self.spec.pass_ != "forward" or self.x.is_cuda:
            raise NotImplementedError("its packed weights are for inference on a CPU")
        return forward(products.onednn(self.inputs.weight(copy), self.spec.tokens), self.x)

    # -- the check -------------------------------------------------------------------------------------------------

    def check(self, seed: int) -> dict[str, float]:
        """Return errors by name against a dense float64 product, made without our own conversions."""
        named = name_results(self.spec.pass_, self.call(OURS)())
        if self.spec.pass_ == "train":
            with torch.no_grad():
                named["y"] = linear(self.x, self.values, self.layout)
        rng = np.random.default_rng(seed)
        errors = {name: self._error_of_result(name, result, rng) for name, result in named.items()}
        check_errors(self.bound, errors, self.spec)
        return errors

    def find_fault(self, name: str, call: Call) -> str | None:
        """Return what is wrong with a peer's result against float64, or None; the bound is ten times ours.

        Peers without our weight are not compared.
        """
        rng = np.random.default_rng(0)
        for what, result in name_results(self.spec.pass_, call()).items() if name not in DENSE else ():
            if what == "grad_values":  # in a format of the peer's own
                continue
            error = self._error_of_result(what, result, rng)
            if not error <= 10 * self.bound:
                return f"wrong: {name}'s {what} has a relative L2 error of {error:g} against float64"
        return None

    def _error_of_result(self, name: str, result: Tensor, rng: np.random.Generator) -> float:
        """Return the relative error of a result, of a sample of it if it is large."""
        block = self.spec.block
        if name == "grad_values":
            limit = CHECKED_WEIGHT // max(1, 2 * self.spec.tokens * block)
            some = _sample_indices(rng, self.layout.nnz, limit).to(result.device)
            rows, cols = (indices[some] for indices in block_coordinates(self.layout, some.device))
            left = self.grad.reshape(self.spec.tokens, -1, block)[:, rows].double()
            right = self.x.reshape(self.spec.tokens, -1, block)[:, cols].double()
            return relative_error(result[some], torch.einsum("tko,tki->koi", left, right))
        layout, values, x = self.layout, self.values, self.x
        if name == "grad_x":
            order = torch.from_numpy(layout.transpose_order).to(values.device)
            layout, values, x = layout.T, values[order].transpose(1, 2), self.grad
        tokens = _sample_indices(rng, self.spec.tokens, CHECKED_TOKENS).to(result.device)
        limit = max(1, CHECKED_WEIGHT // (block * layout.shape[1]))
        rows = _sample_indices(rng, layout.grid[0], limit).to(result.device)
        weight = _dense_rows(layout, values, rows)
        sample = result[tokens].reshape(len(tokens), -1, block)[:, rows].flatten(1)
        return relative_error(sample, x[tokens].double() @ weight.t())


class LinearBench(Bench):
    """Measures linear products.

    Specs in a row that have the same shape share inputs and dense weights: at hidden 12288, drawing them takes longer
    than timing.

    >>> result = LinearBench(rounds=3, budget=0.1).run(LinearSpec(64, 64, tokens=8, block=16, density=0.5))
    >>> result.peers, result.nnz
    (['dense'], 8)
    """

    kind = LinearCase
    _drawn: tuple[Any, _Inputs] | None = None

    def case(self, spec: LinearSpec) -> LinearCase:
        """Return the case of `spec`; consecutive specs of the same sizes and dtype share inputs and dense weights."""
        key = (spec.out_features, spec.in_features, spec.tokens, spec.dtype)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = None  # free the old tensors before drawing new ones
            self._drawn = key, _Inputs(spec, self.seed, self.device.torch)
        return LinearCase(spec, self._drawn[1], self.seed, self.tuning)


def name_results(pass_: str, results: Any) -> dict[str, Tensor]:
    """Return the results of a pass by name."""
    return dict(zip(RESULTS[pass_], results if isinstance(results, tuple) else [results], strict=True))


def _sample_indices(rng: np.random.Generator, count: int, limit: int) -> Tensor:
    """Return sorted indices: all of `count`, or `limit` random ones including the last, where kernels handle their
    ends.
    """
    if count <= limit:
        return torch.arange(count)
    drawn = rng.choice(count - 1, limit - 1, replace=False)
    return torch.from_numpy(np.sort(np.append(drawn, count - 1)))


def _dense_rows(layout: BlockLayout, values: Tensor, rows: Tensor) -> Tensor:
    """Return the dense float64 weight of some block rows, without `to_dense`, which is itself under test."""
    starts, cols = layout.crow_indices(rows.device).long(), layout.col_indices(rows.device).long()
    count = starts.diff()[rows]
    nth = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
    within = torch.arange(len(nth), device=rows.device) - (count.cumsum(0) - count)[nth]
    blocks = starts[rows][nth] + within
    height, width = layout.block_shape
    weight = torch.zeros(len(rows), height, layout.grid[1], width, dtype=torch.float64, device=rows.device)
    weight[nth, :, cols[blocks]] = values[blocks].double()
    return weight.reshape(len(rows) * height, -1)
