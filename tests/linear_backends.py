"""Every backend and CPU instruction set that this machine has, to run one contract on.

The `triton` backend runs on the GPU, or without one in Triton's interpreter. It runs three times: with the tiles it
would choose, with small ones that cut rows, blocks and sums in parts, and with two rows per task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import blocksparse as bs
from blocksparse.ops import cpu_core
from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse.ops.gpu.tiles import Tile, use_tiles
from blocksparse.ops.linear.op import linear_op, linear_wgrad_op

SMALL = Tile(block_m=32, block_n=32, block_k=32, warps=1, stages=2, group_m=2)
PAIRS = Tile(block_m=32, block_n=32, block_k=64, warps=4, stages=3, pairs=True)
TILES = {
    "tuned": {},
    "small": {"forward": SMALL, "dgrad": SMALL, "wgrad": SMALL},
    "pairs": {"forward": PAIRS, "dgrad": PAIRS},
}

BACKENDS = ["reference"]
ISA = None if cpu_core.unavailable() else cpu_core.isa()
if ISA:
    BACKENDS += [f"cpu-{isa}" for isa, present in cpu_core.isas().items() if present]
if triton_runtime.unavailable() is None:
    BACKENDS += [f"triton-{tiles}" for tiles in TILES]

# The interpreter is slow: it gets fewer and smaller cases.
FAST = [backend for backend in BACKENDS if not (backend.startswith("triton") and triton_runtime.interpreting())]
SLOW = [backend for backend in BACKENDS if backend not in FAST]
CPU = [backend for backend in FAST if backend.startswith("cpu")]
# The sets that emulate products of bfloat16 pairs, which take all other kernels from AVX-512.
EMULATED_PAIRS = {"cpu-avx512_bf16_emulated", "cpu-amx_emulated"} & {*CPU}
# On a GPU sizes are free and each kernel that differs is compiled for a second: it gets fewer shapes of blocks.
GPU = [backend for backend in FAST if backend.startswith("triton")]
# Code above the kernels is tested with one backend of each kind.
MAIN = [backend for backend in BACKENDS if backend in ("reference", f"cpu-{ISA}", "triton-tuned")]

# Relative L2 error against float64 on the same (rounded) inputs.
BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)

# Each backend in the dtypes for which it has code of its own: the sets that emulate pairs differ from AVX-512 in
# products of bfloat16 alone. In the interpreter each way of cutting meets one way of summing. Where a CPU has
# better kernels than the portable ones, these, which are one template, meet two dtypes. The others are `full`.
INTERPRETED = {
    "triton-tuned": (torch.float32,),
    "triton-small": (torch.bfloat16, torch.float64),
    "triton-pairs": (torch.float16,),
}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(backends: list[str] = BACKENDS, dtypes: Sequence[torch.dtype] = DTYPES) -> list:
    """(backend, dtype) for `pytest.mark.parametrize`."""
    found = []
    for backend in backends:
        own = INTERPRETED[backend] if backend in SLOW else dtypes
        if backend == "cpu-portable" and ISA != "portable":
            own = (torch.float32, torch.bfloat16)
        for dtype in dtypes:
            if backend not in EMULATED_PAIRS or dtype == torch.bfloat16:
                marks = () if dtype in own else pytest.mark.full
                found.append(pytest.param(backend, dtype, id=f"{backend}-{name_of(dtype)}", marks=marks))
    return found


def bound(backend: str, dtype: torch.dtype) -> float:
    """On a GPU a sum runs over all its terms one by one."""
    return 1e-5 if backend.startswith("triton") and dtype == torch.float32 else BOUNDS[dtype]


@contextmanager
def running(backend: str):
    """Runs products on this backend, whose outputs and working memory are full of NaN beforehand.

    Tensors that tests make meanwhile are on its device.
    """
    name, _, variant = backend.partition("-")
    with ExitStack() as stack:
        stack.enter_context(bs.use_backend(name))
        if name == "cpu":
            stack.enter_context(cpu_core.use_isa(variant))
            poison_working_memory()
        if name == "triton":
            stack.enter_context(use_tiles(**TILES[variant]))
            if not triton_runtime.interpreting():
                stack.enter_context(torch.device("cuda"))
                stack.enter_context(exact_convolutions())
        if name != "reference":
            stack.enter_context(poisoned_empty())
        yield


@contextmanager
def exact_convolutions():
    """Turn off TF32, which PyTorch allows in convolutions by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def poisoned_empty():
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def full_of_nan(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    torch.empty, torch.Tensor.new_empty = full_of_nan(empty), full_of_nan(new_empty)
    try:
        yield
    finally:
        torch.empty, torch.Tensor.new_empty = empty, new_empty


def poison_working_memory() -> None:
    """Products of NaN: what the kernels keep from call to call is NaN after them."""
    for layout, nan, values in _full_of_nan():
        forward(nan, values, layout), dgrad(nan, values, layout), wgrad(nan, nan, layout)


@cache
def _full_of_nan() -> list[tuple]:
    layouts = [bs.patterns.dense((128, 128), block_size) for block_size in (1, 32)]
    return [
        (layout, torch.full((96, 128), torch.nan, dtype=dtype), torch.full(layout.values_shape, torch.nan, dtype=dtype))
        for layout in layouts
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]


def forward(x, values, layout, bias=None, activation=None):
    return linear_op(x, values, bias, layout.indices_on(x.device), layout.grid[1], False, activation)


def dgrad(grad, values, layout):
    return linear_op(grad, values, None, layout.indices_on(grad.device), layout.grid[1], True, None)


def wgrad(grad, x, layout):
    return linear_wgrad_op(grad, x, layout.indices_on(x.device), layout.grid[1])


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, bound: float, what: str = "", terms: torch.Tensor | None = None
) -> None:
    """Relative L2 error within the bound; what is expected to be zero throughout is exactly zero.

    Relative to what is expected, or to the terms of which it is a sum where these are larger.
    """
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} for {tuple(expected.shape)}"
    size = expected.double().norm()
    size = size if terms is None else torch.maximum(size, terms.double().norm())
    error = (got.double() - expected.double()).norm()
    assert error <= bound * size, f"{what}: relative error {error / size:.2e}, bound {bound:.0e}"


def assert_same_bits(call: Callable[[], Any], threads: Sequence[int] = (1, 2, 3, 7, 2)) -> Any:
    """Check that a call returns the same bits with any number of threads; return its results."""
    before, results = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            results.append(call())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(tree_leaves(results[0]), tree_leaves(other), strict=True))
    return results[0]


ACTIVATIONS = {None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class Expected:
    """A product of random operands in float64, its gradients, and the sizes of the terms of their sums.

    Where a sum cancels, or an activation makes little of it, the error is still one of the terms, times the slope.

    Args:
        product: of x, values and a bias or not, linear in each.
        operands: these.
        activation: behind it.
    """

    def __init__(self, product: Callable, operands: Sequence[torch.Tensor], activation: str | None = None):
        self._operands = [tensor.detach().double().requires_grad_() for tensor in operands]
        self._squares = [tensor.detach().square().requires_grad_() for tensor in self._operands]
        self._sums, self._terms = product(*self._operands), product(*self._squares)
        y = self._sums.detach().requires_grad_()
        self.y = ACTIVATIONS[activation](y)
        (slope,) = torch.autograd.grad(self.y.sum(), y)
        self.terms = self._terms.detach().sqrt() * (1 if activation in (None, "relu") else slope.abs())
        self.y = self.y.detach()

    def gradients(self, grad: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(gradient, terms) of each operand."""
        found = torch.autograd.grad(self._sums, self._operands, grad.double(), retain_graph=True)
        terms = torch.autograd.grad(self._terms, self._squares, grad.double().square(), retain_graph=True)
        return [(each, size.sqrt()) for each, size in zip(found, terms, strict=True)]
