"""The planner against real processes: rates measured, then steps of DDP, FSDP2 and TP x FSDP2 predicted and timed.

    python benchmarks/plan.py                  two and four processes, about two minutes on two quiet cores
    python benchmarks/plan.py --processes 2    two only

Writes benchmarks/results/plan-<machine>.json and .md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from blocksparse_lab import machine
from blocksparse_lab.bench import rows
from blocksparse_lab.bench.rows import Row
from blocksparse_lab.planner import hardware, measure, net, plan, reality

RESULTS = Path(__file__).parent / "results"
STEPS = 15
NEAR = 0.2
# 4.2 and 4.7 million stored weights.
NETS = {
    "4 layers, 1024-2048-1024, density 1/4": net.mlp(4, 1024, 2048, 0.25, 32),
    "2 layers, 1536-6144-1536, density 1/8": net.mlp(2, 1536, 6144, 0.125, 32),
}
TOKENS = 256


def work(rank: int, processes: int, store: str, pipe: Any) -> None:
    """For every engine the rates, then real steps, of one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    found = []
    for name, model in NETS.items():
        for degree in (None, *(d for d in (1, 2, 4) if d <= processes)):
            rates = measure.rates()  # each time: what else runs on a machine changes
            job = plan.Job(processes, TOKENS, optimizer="adam")
            found.append((name, degree, rates, reality.run(model, job, degree, STEPS)))
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def compare(processes: int) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        arguments = (processes, str(Path(folder) / "store"), theirs)
        started = [context.Process(target=work, args=(rank, *arguments)) for rank in range(processes)]
        for process in started:
            process.start()
        theirs.close()
        found = ours.recv()
        for process in started:
            process.join()
    for name, degree, rates, real in found:
        job = plan.Job(processes, TOKENS, optimizer="adam")
        model = NETS[name]
        predicted = plan.ddp(model, rates, job) if degree is None else plan.fsdp2(model, rates, job, degree)
        off = predicted.step / real["seconds"] - 1
        sent = sum(size for calls in real["calls"].values() for size, _ in calls)
        expected = sum(size for calls in predicted.calls.values() for size, _ in calls)
        memory = sum(real["memory"].values()) / (predicted.bytes_on_rank - predicted.memory.get("copies", 0)) - 1
        yield Row(
            f"{processes} processes, {predicted.engine}, {name}",
            f"step within {NEAR:.0%}",
            f"{1e3 * predicted.step:.1f} ms predicted, {1e3 * real['seconds']:.1f} ms taken: {off:+.0%}; "
            f"bytes on a rank {memory:+.1%}, in collectives {sent / expected - 1:+.1%}",
            abs(off) <= NEAR,
            {"predicted": predicted.as_dict(), "real": real, "rates": hardware.as_json(rates)},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner against real processes.")
    parser.add_argument("--processes", type=int, nargs="*", default=(2, 4))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts = machine.machine()
    found = [row for processes in arguments.processes for row in compare(processes)]
    console = Console()
    console.print(rows.table(found, f"planner: {machine.chip(facts)}, load {facts['load'][0]:g} before"))
    path = arguments.out / f"plan-{machine.slug(facts['cpu'])}.json"
    rows.write(path, found, "the planner against real processes", facts, tokens=TOKENS, steps=STEPS)
    console.print(f"wrote {path} and .md", soft_wrap=True)


if __name__ == "__main__":
    main()
