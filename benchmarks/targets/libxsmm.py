"""Time the linear product against libxsmm's block-sparse one (BCSC), once benchmarks/libxsmm/build.py has built it.

It is timed in two forms: on libxsmm's own panels of tokens, a format that layers do not use, and on row-major `[tokens,
features]`. Each form uses the fastest panel width and order of work that was tried.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.measure import Call, geometric_mean, host_clock
from blocksparse_lab.bench.case import OURS
from blocksparse_lab.bench.linear import LinearBench, LinearCase
from blocksparse_lab.bench.linear_specs import LinearSpec
from targets.rows import Race, Row, RowIterator, set_threads, timing_options, unmeasured_row

VARIABLE = "BLOCKSPARSE_LIBXSMM"
BUILT = Path(__file__).parents[2] / "build" / "libxsmm" / "libblocksparse_libxsmm.so"

OWN, ROWS = "libxsmm, own panels", "libxsmm, row-major"
MIN_ROWS, MIN_OWN = 1.1, 0.95  # target speed-ups: of each product; of the geometric mean

SHAPES = ((1, 2048, 32), (1, 2048, 512), (2, 4096, 64), (2, 4096, 1024))  # threads, features in and out, tokens
BLOCKS, DTYPES = (8, 16, 32), ("float32", "bfloat16")
WIDTHS, CHUNKS = (16, 32, 64, 128), 8  # panel widths in tokens; chunks of outputs per thread
TRIES = 5


@torch.no_grad()
def rows(budget: float, quick: bool = False) -> RowIterator:
    """Yield a row for each form, dtype, shape and block size, and the means, or one row with the reason why there are
    none.
    """
    try:
        shim = library()
    except BlockSparseError as error:
        yield unmeasured_row("libxsmm", f">= {MIN_ROWS:g}x {ROWS}", error)
        return
    for dtype in DTYPES:
        if not shim.serves(dtype):
            no_kernel = f"libxsmm has no {dtype} kernel for {shim.target}"
            yield unmeasured_row(f"{dtype} forward", f">= {MIN_ROWS:g}x {ROWS}", no_kernel)
            continue
        own: list[float] = []
        for (threads, hidden, tokens), block in product(SHAPES, BLOCKS):
            features = hidden // 16 if quick else hidden
            spec = LinearSpec(features, features, tokens, block, 0.1, dtype)
            on = f"{threads} thread{'s' * (threads > 1)}"
            work = f"{dtype} forward, hidden {features}, {tokens} tokens, {on}, blocks of {block}"
            bench = LinearBench(**timing_options(budget, quick))
            case = bench.case(spec)
            with set_threads(threads):
                errors = case.check(bench.seed)
                try:
                    race, plans = time_both_forms(bench, case, threads)
                except BlockSparseError as error:
                    yield unmeasured_row(work, f">= {MIN_ROWS:g}x {ROWS}", error)
                    continue
            details = {
                **spec.as_dict(),
                "threads": threads,
                "errors": errors,
                "target": shim.target,
                "libxsmm": plans,
            }
            own.append(race.samples.ratio(OWN, OURS).median)
            yield race.row(work, ROWS, OURS, ROWS, least=MIN_ROWS, details=details)
            yield race.row(work, OWN, OURS, OWN, details=details)
        if own:
            yield mean_row(dtype, own)


def mean_row(dtype: str, ratios: list[float]) -> Row:
    """
    >>> mean_row("float32", [0.5, 2.0]).measured
    '1.00x libxsmm, own panels'
    """
    mean = geometric_mean(ratios)
    target = f">= {MIN_OWN:g}x {OWN}"
    return Row(f"{dtype} forward, geometric mean of all", target, f"{mean:.2f}x {OWN}", mean >= MIN_OWN)


def time_both_forms(bench: LinearBench, case: LinearCase, threads: int) -> tuple[Race, dict[str, Any]]:
    """Check both forms of libxsmm against float64, then time them and ours in turn; return the times and each form's
    plan.

    Raises:
        BlockSparseError: libxsmm has no such kernel, or its result is wrong.
    """
    peers = {name: fastest_plan(case, name, threads) for name in (OWN, ROWS)}
    for name, peer in peers.items():
        if fault := case.find_fault(name, peer.result):
            raise BlockSparseError(fault)
    samples = bench.alternate({OURS: case.call(OURS), **{name: peer.call for name, peer in peers.items()}})
    return Race(samples), {name: peer.how for name, peer in peers.items()}


def fastest_plan(case: LinearCase, form: str, threads: int) -> Peer:
    """Return the product in this form with the fastest of all panel widths and orders."""
    spec, best, least = case.spec, None, float("inf")
    orders = ((1, True), (CHUNKS * threads, True), (CHUNKS * threads, False))
    for width, (chunks, panels_first), prefetch in product(WIDTHS, orders, (False, True)):
        if spec.tokens % width or case.layout.grid[0] % chunks:
            continue
        how = {"width": width, "chunks": chunks, "panels_first": panels_first, "prefetch": prefetch}
        peer = Peer(library(), case, form, threads, how)
        if peer.plan is None:
            continue
        peer.call()
        seconds = min(host_clock(peer.call, 1) for _ in range(TRIES))
        if seconds < least:
            best, least = peer, seconds
    if best is None:
        raise BlockSparseError(f"libxsmm has no kernel of {spec!r} for {library().target}")
    return best


class Peer:
    """A product by libxsmm: `call` runs it, and `result` returns it in row-major order."""

    def __init__(self, library: Library, case: LinearCase, form: str, threads: int, how: dict[str, Any]):
        self.library, self.form, self.threads, self.how = library, form, threads, how
        spec, layout = case.spec, case.layout
        self.x, self.values = case.x.contiguous(), case.values
        # The CSR arrays of W are the CSC arrays of its transpose, which BCSC stores.
        self.crow, self.col = layout.crow_indices().int(), layout.col_indices().int()
        self.plan = library.plan(spec, layout, threads, **how)
        if self.plan is None:
            return
        self.width: int = how["width"]
        pairs = self.x.unflatten(0, (-1, self.width)).unflatten(2, (-1, 4 // self.x.itemsize))
        self.a = pairs.transpose(1, 2).contiguous()  # [panels, features / pairs, width, pairs]
        self.c = self.x.new_empty(spec.tokens // self.width, spec.out_features, self.width)
        self.shape = (spec.tokens, spec.out_features)

    @property
    def call(self) -> Call:
        return self._in_rows if self.form == ROWS else self._in_panels

    def result(self) -> Tensor:
        """Return the product in row-major order."""
        return self._in_rows() if self.form == ROWS else self._in_panels().transpose(1, 2).reshape(self.shape)

    def _in_panels(self) -> Tensor:
        self.library.run(self, repack=False, y=self.c)
        return self.c

    def _in_rows(self) -> Tensor:
        y = self.x.new_empty(self.shape)
        self.library.run(self, repack=True, y=y)
        return y

    def __del__(self) -> None:
        if self.plan is not None:
            self.library.free(self.plan)


class Library:
    """The loaded shim."""

    def __init__(self, path: Path):
        shim = ctypes.CDLL(str(path))
        long, flag, address = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
        self._plan = self._declare(shim.blocksparse_libxsmm_plan, address, flag, *[long] * 7, flag, flag, long)
        self._run = self._declare(shim.blocksparse_libxsmm_run, flag, address, address, long, flag, *[address] * 7)
        self.free = self._declare(shim.blocksparse_libxsmm_free, None, address)
        target = self._declare(shim.blocksparse_libxsmm_target, ctypes.c_char_p)
        self.target = target().decode()
        """The CPU that libxsmm generates code for."""
        (torch_cpu,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
        self._loop = ctypes.cast(ctypes.CDLL(str(torch_cpu)).torch_parallel_for, address)

    @staticmethod
    def _declare(function: Any, result: Any, *arguments: Any) -> Callable[..., Any]:
        """Set result and argument types of a C function."""
        function.restype, function.argtypes = result, arguments
        return function

    def serves(self, dtype: str) -> bool:
        """Return whether libxsmm has kernels of this dtype for this CPU."""
        spec = LinearSpec(16, 16, 16, block=8, density=1, dtype=dtype)
        plan = self.plan(spec, spec.layout(), 1, width=16, chunks=1, panels_first=True, prefetch=False)
        if plan is not None:
            self.free(plan)
        return plan is not None

    def plan(
        self,
        spec: LinearSpec,
        layout: BlockLayout,
        threads: int,
        width: int,
        chunks: int,
        panels_first: bool,
        prefetch: bool,
    ) -> int | None:
        """Return the address of a planned product, or None if libxsmm has no such kernel."""
        sizes = (spec.tokens, spec.in_features, spec.out_features, *layout.block_shape, width, chunks)
        plan: int | None = self._plan(spec.dtype == "bfloat16", *sizes, panels_first, prefetch, threads)
        return plan

    def run(self, peer: Peer, repack: bool, y: Tensor) -> None:
        tensors = (peer.x, peer.a, peer.values, peer.crow, peer.col, peer.c, y)
        if self._run(peer.plan, self._loop, peer.threads, repack, *(tensor.data_ptr() for tensor in tensors)):
            raise RuntimeError("PyTorch's parallel loop failed")


@cache
def _load(path: Path) -> Library:
    return Library(path)


def library() -> Library:
    """Return the shim from the path in BLOCKSPARSE_LIBXSMM, or from where benchmarks/libxsmm/build.py puts it.

    Raises:
        BlockSparseError: the shim does not exist, or does not load.
    """
    path = Path(os.environ.get(VARIABLE) or BUILT)
    if not path.exists():
        raise BlockSparseError(
            f"no {path}: build it with `python benchmarks/libxsmm/build.py <libxsmm's sources>`, "
            f"or set {VARIABLE} to its path"
        )
    try:
        return _load(path)
    except (OSError, AttributeError) as error:
        raise BlockSparseError(f"{path} does not load: {error}") from error
