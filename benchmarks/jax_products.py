"""Measure the targets of `blocksparse.jax` on a CPU; each product is checked before it is timed.

    python benchmarks/jax_products.py            five minutes on two cores, with nothing else running
    python benchmarks/jax_products.py --quick    small shapes, to try the program; writes nothing

Needs `pip install ".[jax]"`. Prints a table, and writes it to benchmarks/results/jax-<machine>-<instruction set>.md and
.json. The curves of the training are drawn to docs/results/jax-training.png.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from rich.console import Console

import blocksparse as bs
from blocksparse.measure import Samples, host_clock
from blocksparse.topology.drawings.style import COLORS, figure_and_axes
from blocksparse_lab import machine
from blocksparse_lab.bench import report
from targets import rows
from targets.rows import Race, Row, race, timing_options

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs/results/jax-training.png"
BUDGET = 6.0  # seconds of timing per row
DENSITY = 0.1
# PyTorch's threads spin for some 10 ms after its turn, and XLA's may share a core in their first calls.
SETTLE_SECONDS = 0.03

Contender = tuple[str, int]  # which product, and the number of its threads


def main() -> None:
    parser = argparse.ArgumentParser(description="Targets of blocksparse.jax on a CPU.")
    parser.add_argument("--quick", action="store_true", help="small shapes; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts, budget = machine.machine(), 0.02 if arguments.quick else BUDGET
    console, every = Console(), []
    for row in measure(256 if arguments.quick else 4096, budget, arguments.quick):
        every.append(row)
        console.print(f"{row.work}: {row.measured} ({row.target})", soft_wrap=True)
    console.print(rows.table(every, f"blocksparse.jax: {machine.chip(facts)}, load {facts['load'][0]:g} before"))
    if not arguments.quick:
        import jax

        path = arguments.out / f"jax-{machine.slug(facts['cpu'])}-{facts['isa']}.json"
        rows.write(path, every, "targets of blocksparse.jax", facts | {"jax": jax.__version__}, budget=budget)
        draw(every[-1].details["curves"], PICTURE)
        console.print(f"wrote {path} and .md, and {PICTURE}", soft_wrap=True)


def measure(features: int, budget: float, quick: bool) -> Iterator[Row]:
    """Measure all rows for layers of this many features."""
    options = timing_options(budget, quick)
    tokens, threads = features // 4, len(os.sched_getaffinity(0))
    for count in (features // 64, tokens):
        work = f"forward, {features} x {features}, density {DENSITY}, {count} tokens"
        result = race_processes(
            {name: (name, threads) for name in ("ours", "dense", "torch")}, features, count, options
        )
        yield result.row(work, "dense", "ours", "XLA's dense product", least=8)
        yield result.row(f"{work}: time", "ours", "torch", "the PyTorch front end's", most=1.1)
        result = race(product_calls(features, count, gradients=False), **options)
        yield result.row(f"{work}, cold caches: in turn in one process", "dense", "ours", "XLA's dense product")
    result = race(product_calls(features, tokens, gradients=True), **options)
    work = f"both gradients, {features} x {features}, density {DENSITY}, {tokens} tokens"
    yield result.row(work, "dense", "ours", "XLA's dense product", least=6)
    yield small_product(options)
    contenders: dict[str, Contender] = {"one": ("ours", 1), "two": ("ours", 2)}
    result = race_processes(contenders, features, tokens, options)
    yield result.row(f"forward, {tokens} tokens: two threads over one", "one", "two", "one thread", least=1.7)
    yield set_steps(features, budget)
    yield from training(features, tokens // 4, 2 if quick else 12)


# -- products --------------------------------------------------------------------------------------------------------


def product_calls(features: int, tokens: int, gradients: bool) -> dict[str, Callable[[], Any]]:
    """Return calls of our product and XLA's, or of both gradients, after a check of ours."""
    import jax
    import jax.numpy as jnp

    import blocksparse.jax as bsj

    layout = bsj.layout(bs.patterns.random((features, features), 32, DENSITY, seed=0))
    keys = jax.random.split(jax.random.key(0), 3)
    values = jax.random.normal(keys[0], layout.values_shape)
    x, grad = (jax.random.normal(key, (tokens, features)) for key in keys[1:])
    weight = bsj.to_dense(values, layout)

    def ours(x: Any, values: Any, layout: Any) -> Any:
        return bsj.linear(x, values, layout)

    def dense(x: Any, weight: Any) -> Any:
        return x @ weight.T

    if gradients:

        @jax.jit
        def sparse_pull(x: Any, values: Any, layout: Any, grad: Any) -> Any:
            return jax.vjp(partial(ours, layout=layout), x, values)[1](grad)

        @jax.jit
        def dense_pull(x: Any, weight: Any, grad: Any) -> Any:
            return jax.vjp(dense, x, weight)[1](grad)

        calls = {"ours": lambda: sparse_pull(x, values, layout, grad), "dense": lambda: dense_pull(x, weight, grad)}
        got, expected = calls["ours"](), calls["dense"]()
        pairs = [(got[0], expected[0]), (got[1], bsj.from_dense(expected[1], layout))]
    else:
        sparse_call, dense_call = jax.jit(ours), jax.jit(dense)
        calls = {"ours": lambda: sparse_call(x, values, layout), "dense": lambda: dense_call(x, weight)}
        pairs = [(calls["ours"](), calls["dense"]())]
    for a, b in pairs:
        error = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        if not error < 1e-5:
            raise AssertionError(f"relative error {error:.2e} of the product of {features} features")
    return {name: partial(_finished, call) for name, call in calls.items()}


def _finished(call: Callable[[], Any]) -> Any:
    """Return the result of a call once it is computed."""
    import jax

    return jax.block_until_ready(call())


def race_processes(contenders: dict[str, Contender], features: int, tokens: int, options: dict[str, Any]) -> Race:
    """Time forward products in turn, each in a process of its own.

    PyTorch's idle threads would spin against XLA's, a process has one pool of threads, and calls in one process evict
    each other's operands from the caches.
    """
    with ExitStack() as stack:
        calls = {}
        for name, (product, threads) in contenders.items():
            context = multiprocessing.get_context("spawn")
            process = stack.enter_context(ProcessPoolExecutor(1, context, _use_cpus, (threads,)))
            calls[name] = partial(process.submit, _forward_seconds, product, features, tokens)
        return race(calls, clock=lambda call, repeat: cast(Future[float], call()).result(), **options)


def _use_cpus(count: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])  # XLA sizes its pool by it


def _forward_seconds(product: str, features: int, tokens: int) -> float:
    """Return the seconds of a forward product in this process, after `SETTLE_SECONDS` of calls."""
    call = _forward_call(product, features, tokens)
    call()
    end = perf_counter() + SETTLE_SECONDS
    while perf_counter() < end:
        call()
    return host_clock(call, 5)


@cache
def _forward_call(product: str, features: int, tokens: int) -> Callable[[], Any]:
    """Return the forward product of the PyTorch front end, "torch", or one of `product_calls`."""
    if product != "torch":
        return product_calls(features, tokens, gradients=False)[product]
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    layout = bs.patterns.random((features, features), 32, DENSITY, seed=0)
    x, values = torch.randn(tokens, features), torch.randn(layout.values_shape)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return bs.linear(x, values, layout)

    return call


def small_product(options: dict[str, Any]) -> Row:
    """Measure a product that takes microseconds, where the cost of a call counts."""
    samples: Samples = race(product_calls(256, 16, gradients=False), **options).samples
    more = 1e6 * (samples.time("ours").median - samples.time("dense").median)
    work = f"forward, 256 x 256, density {DENSITY}, 16 tokens: time beyond XLA's dense product"
    return Row(work, "<= 20 us", f"{more:.3g} us", more <= 20, {"microseconds": more})


# -- training --------------------------------------------------------------------------------------------------------


def set_steps(features: int, budget: float) -> Row:
    """Count the traces of SET steps, and time them."""
    import jax

    import blocksparse.jax as bsj

    traces: list[object] = []

    @jax.jit
    def step(key: Any, values: Any, layout: Any, fraction: Any) -> Any:
        traces.append(layout)
        return bsj.set_step(key, values, layout, fraction)

    layout = bsj.layout(bs.patterns.random((features, features), 32, DENSITY, seed=0))
    values = jax.random.normal(jax.random.key(0), layout.values_shape)
    seconds = []
    for i in range(5):
        start = perf_counter()
        values, layout, _ = jax.block_until_ready(step(jax.random.key(i), values, layout, 0.3 - 0.01 * i))
        seconds.append(perf_counter() - start)
    measured = f"{len(traces)} trace for 5 steps, {1e3 * min(seconds):.3g} ms each"
    work = f"SET step, {features} x {features}, density {DENSITY}"
    return Row(work, "1 trace", measured, len(traces) == 1, {"traces": len(traces), "seconds": seconds})


def training(features: int, tokens: int, steps: int) -> Iterator[Row]:
    """Train an MLP of four layers dense, dense with masks, and block-sparse with SET, for equal seconds.

    The dense one makes this many steps, and the others the steps that fit in its time.
    """
    import jax
    import jax.numpy as jnp
    import optax

    import blocksparse.jax as bsj

    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (tokens, features))
    y = jnp.tanh(x @ jax.random.normal(keys[1], (features, 10)) / features**0.5)
    head = jax.random.normal(keys[2], (10, features)) / features**0.5
    layouts = [bsj.layout(bs.patterns.random((features, features), 32, DENSITY, seed=i)) for i in range(4)]
    scale = (2 / (DENSITY * features)) ** 0.5
    blocks = [scale * jax.random.normal(keys[3], each.values_shape) for each in layouts]
    masks = [bsj.to_dense(jnp.ones(each.values_shape), each) for each in layouts]
    weights = [bsj.to_dense(*each) for each in zip(blocks, layouts, strict=True)]
    optimizer = optax.sgd(3e-3, momentum=0.9)

    def trainer(product: Callable[..., Any]) -> Callable[..., Any]:
        def loss(parameters: Any, fixed: Any) -> Any:
            hidden = x
            for weight, each in zip(parameters["weights"], fixed, strict=True):
                hidden = jax.nn.relu(product(hidden, weight, each))
            return ((hidden @ parameters["head"].T - y) ** 2).mean()

        @jax.jit
        def step(parameters: Any, state: Any, fixed: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(parameters, fixed)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(parameters, updates), state, value

        return step

    @jax.jit
    def evolve(key: Any, parameters: Any, state: Any, layouts: Any) -> Any:
        trace, *others = state
        moved, momenta, new = [], [], []
        for each, values, momentum, layout in zip(
            jax.random.split(key, 4), parameters["weights"], trace.trace["weights"], layouts, strict=True
        ):
            values, layout, source = bsj.set_step(each, values, layout, 0.3)
            moved.append(values)
            momenta.append(bsj.follow(momentum, layout.values_shape, source))
            new.append(layout)
        state = (trace._replace(trace=trace.trace | {"weights": momenta}), *others)
        return parameters | {"weights": moved}, state, new

    ways = {
        "dense": (lambda x, weight, _: x @ weight.T, weights, [None] * 4),
        "masks": (lambda x, weight, mask: x @ (weight * mask).T, weights, masks),
        "ours": (lambda x, values, layout: bsj.linear(x, values, layout), blocks, layouts),
    }
    seconds, curves, limit = {}, {}, 0.0
    for name, (product, first, fixed) in ways.items():
        step, parameters = trainer(product), {"weights": first, "head": head}
        state = optimizer.init(parameters)
        jax.block_until_ready(step(parameters, state, fixed))  # compiles
        if name == "ours":
            jax.block_until_ready(evolve(keys[4], parameters, state, fixed))
        times: list[float] = []
        losses = []
        while sum(times) < limit if limit else len(times) < steps:
            start = perf_counter()
            parameters, state, value = jax.block_until_ready(step(parameters, state, fixed))
            if name == "ours" and len(times) % 10 == 9:
                parameters, state, fixed = jax.block_until_ready(evolve(keys[5], parameters, state, fixed))
            times.append(perf_counter() - start)
            losses.append(float(value))
        limit = limit or sum(times)
        seconds[name], curves[name] = sorted(times)[len(times) // 2], (losses, times)
    details = {"seconds per step": seconds, "curves": curves}
    work = f"training step, MLP 4 x {features}, density {DENSITY}, {tokens} tokens"
    for name, over in (("dense", "dense"), ("masks", "dense with masks")):
        value, least = seconds[name] / seconds["ours"], 5.0 if name == "dense" else None
        last = {each: curve[0][-1] for each, curve in curves.items()}
        more = f"; loss after {limit:.3g} s {last['ours']:.3g}, {over} {last[name]:.3g}"
        met = None if least is None else value >= least
        yield Row(work, "-" if least is None else f">= {least:g}x {over}", f"{value:.3g}x {over}{more}", met, details)


def draw(curves: dict[str, tuple[list[float], list[float]]], path: Path) -> None:
    """Draw the losses of the training against seconds."""
    figure, axes = figure_and_axes((7, 4))
    labels = {"dense": "dense", "masks": "dense with masks", "ours": "block-sparse with SET"}
    for (name, (losses, times)), color in zip(curves.items(), COLORS, strict=False):
        axes.plot([0, *accumulate(times)][:-1], losses, label=labels[name], color=color)
    axes.set_yscale("log")
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss of the training batch")
    axes.legend(frameon=False)
    report.save(figure, path, "An MLP of four layers that learns random targets of one batch")


if __name__ == "__main__":
    main()
