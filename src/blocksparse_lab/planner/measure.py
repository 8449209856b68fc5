"""Measure the rates of this machine in a few seconds: gloo between processes, block-sparse products, memory."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import blocksparse as bs
from blocksparse.errors import BlockSparseError

from .formulas import ROUNDS, flops, ring_bytes, ring_steps
from .hardware import Hardware, Link, Network

# Seconds of timing per rate.
BUDGET = 0.15
# Bytes of the two timed collectives: a message whose latency dominates, and a layer's parameters.
SMALL, LARGE = 1 << 12, 1 << 22
# Bytes of a copy: more than the caches hold, as are the states of an optimizer.
COPIED = 1 << 26
FEATURES, TOKENS, DENSITY = 2048, 256, 0.1


def rates(blocks: tuple[int, ...] = (32,)) -> Hardware:
    """Return the rates of the default process group; all its processes must call this together."""
    ranks, cores = dist.get_world_size(), available_cores()
    links = {name: _measure_link(name) for name in ROUNDS}
    network = Network(**links)
    alone = min(ranks, cores)  # one process per core, while the others wait
    bandwidth = 2 * COPIED / _time_together(_copy_call(), alone)
    product_rates = {}
    for block in blocks:
        call, weights = _product_call(block)
        product_rates[4, block] = flops(weights, TOKENS) / _time_together(call, alone)
    x = torch.randn(512, 512)
    dense = 2 * 512**3 / _time_together(lambda: x @ x, alone)
    return Hardware(
        name="measured",
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks,
        devices=ranks,
        inside=network,
        between=network,
        bandwidth=bandwidth,
        rates=product_rates,
        dense={4: dense},
        overlap=False,
        cores=cores,
        source=f"measured on {ranks} processes",
    )


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure_link(collective: str) -> Link:
    """Return latency and bandwidth from the times of a small and a large tensor, by the formulas of a ring."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return Link(0.0, 1e12)
    small, large = (_time_together(_collective_call(collective, size), ranks) for size in (SMALL, LARGE))
    sent = ring_bytes(collective, LARGE, ranks) - ring_bytes(collective, SMALL, ranks)
    return Link(small / ring_steps(collective, ranks), sent / max(large - small, 1e-9))


def _collective_call(name: str, size: int) -> Callable[[], Any]:
    """Return a collective over `size` bytes as a call."""
    ranks = dist.get_world_size()
    whole = torch.ones(size // 4 // ranks * ranks)
    part = torch.ones(len(whole) // ranks)
    # torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }

    def call() -> None:
        whole.fill_(1.0)  # sums of sums would overflow
        calls[name]()

    return call


def _copy_call() -> Callable[[], Any]:
    source = torch.ones(COPIED // 4)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _product_call(block: int) -> tuple[Callable[[], Any], int]:
    """Return forward and backward of a layer as a call, and the number of weights that it stores."""
    torch.manual_seed(0)
    layer = bs.nn.Linear(FEATURES, FEATURES, density=DENSITY, block_size=block, bias=False)
    x = torch.randn(TOKENS, FEATURES, requires_grad=True)
    gradient = torch.randn(TOKENS, FEATURES)

    def call() -> None:
        layer.values.grad = x.grad = None
        y: Tensor = layer(x)
        y.backward(gradient)

    return call, layer.values.numel()


def _time_together(call: Callable[[], Any], ranks: int) -> float:
    """Return the median seconds of a call that the first `ranks` processes make at once, of the slowest rank, on every
    rank.
    """
    seconds = torch.zeros(1)
    dist.barrier()
    if dist.get_rank() < ranks:
        call()
        start = perf_counter()
        call()
        often = torch.tensor([min(max(int(BUDGET / (perf_counter() - start + 1e-6)), 5), 200)])
    else:
        often = torch.tensor([0])
    dist.all_reduce(often, dist.ReduceOp.MAX)
    if dist.get_rank() < ranks:
        times = []
        for _ in range(int(often)):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
        seconds[0] = statistics.median(times)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(processes: int) -> Hardware:
    """Return the rates of several processes with one thread each."""
    hardware: Hardware = in_processes(processes, rates)
    return hardware


def in_processes(processes: int, function: Callable[[], Any]) -> Any:
    """Call a module's function in several processes of a gloo group, with one thread each; return the first one's
    result.

    Raises:
        BlockSparseError: one of them fails.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (processes, str(Path(folder) / "store"), theirs, function)
        started = [context.Process(target=_run_process, args=(rank, *arguments)) for rank in range(processes)]
        for process in started:
            process.start()
        theirs.close()
        try:
            return ours.recv()
        except EOFError:
            raise BlockSparseError("measuring: a process ended before it had a result") from None
        finally:
            for process in started:
                process.join(10)
                process.kill()


def _run_process(rank: int, processes: int, store: str, pipe: Any, function: Callable[[], Any]) -> None:
    """Join the group, call the function, and send the first rank's result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    result = function()
    if rank == 0:
        pipe.send(result)
    pipe.close()
    dist.barrier()
    dist.destroy_process_group()
