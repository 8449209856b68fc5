"""Compare the planner with real processes: measure rates, then predict and time steps of DDP, FSDP2 and TP x FSDP2.

    python benchmarks/plan.py                  two and four processes, about two minutes on two quiet cores
    python benchmarks/plan.py --processes 2    two only

Writes benchmarks/results/plan-<machine>.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

import real_steps as reality
from blocksparse.measure import Spread
from blocksparse_lab import machine
from blocksparse_lab.planner import hardware, measure, net, plan
from targets import rows
from targets.rows import Row

RESULTS = Path(__file__).parent / "results"
STEPS, ROUNDS = 5, 3
TOLERANCE = 0.2
# Nets with 4.2 and 4.7 million stored weights.
NETS = {
    "4 layers, 1024-2048-1024, density 1/4": net.mlp(4, 1024, 2048, 0.25, 32),
    "2 layers, 1536-6144-1536, density 1/8": net.mlp(2, 1536, 6144, 0.125, 32),
}
TOKENS = 256


def measure_engines() -> list[Any]:
    """Measure rates and real steps in turns, for each engine; runs in each process."""
    results = []
    processes = dist.get_world_size()
    job = plan.Job(processes, TOKENS, optimizer="adam")
    for name, model in NETS.items():
        for degree in (None, *(d for d in (1, 2, 4) if d <= processes)):
            # In turns, since other programs on the machine slow down both.
            rounds = [(measure.rates(), reality.run(model, job, degree, STEPS)) for _ in range(ROUNDS)]
            results.append((name, degree, rounds))
    return results


def compare(processes: int) -> Iterator[Row]:
    """Yield the rows of this many processes."""
    for name, degree, rounds in measure.in_processes(processes, measure_engines):
        yield engine_row(NETS[name], name, plan.Job(processes, TOKENS, optimizer="adam"), degree, rounds)


def engine_row(
    model: net.Net, name: str, job: plan.Job, degree: int | None, rounds: list[tuple[hardware.Hardware, dict[str, Any]]]
) -> Row:
    """Return the row of one engine: real steps against the median of the predictions from each round's rates."""
    plans = [
        plan.ddp(model, rates, job) if degree is None else plan.fsdp2(model, rates, job, degree) for rates, _ in rounds
    ]
    off = Spread.of([each.step / real["seconds"] - 1 for each, (_, real) in zip(plans, rounds, strict=True)])
    real, expected = rounds[0][1], plans[0]
    memory = sum(real["memory"].values()) / (expected.bytes_on_rank - expected.memory.get("copies", 0)) - 1
    sent = [sum(size for calls in each.values() for size, _ in calls) for each in (real["calls"], expected.calls)]
    predicted, taken = (
        statistics.median(times) for times in ([p.step for p in plans], [r["seconds"] for _, r in rounds])
    )
    return Row(
        f"{job.ranks} processes, {expected.engine}, {name}",
        f"step within {TOLERANCE:.0%}, bytes within 2%",
        f"{1e3 * predicted:.0f} ms predicted, {1e3 * taken:.0f} ms taken: {off.median:+.0%} ({off.low:+.0%} to "
        f"{off.high:+.0%}); bytes on a rank {memory:+.1%}, in collectives {sent[0] / sent[1] - 1:+.1%}",
        abs(off.median) <= TOLERANCE and abs(memory) <= 0.02 and abs(sent[0] / sent[1] - 1) <= 0.02,
        {
            "off": vars(off),
            "predicted": [each.as_dict() for each in plans],
            "real": [each for _, each in rounds],
            "rates": [hardware.as_json(each) for each, _ in rounds],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The planner against real processes.")
    parser.add_argument("--processes", type=int, nargs="*", default=(2, 4))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    facts = machine.machine()
    path = arguments.out / f"plan-{machine.slug(facts['cpu'])}.json"
    all_rows: list[Row] = []
    for processes in arguments.processes:
        all_rows += compare(processes)
        rows.write(
            path, all_rows, "the planner against real processes", facts, tokens=TOKENS, steps=STEPS, rounds=ROUNDS
        )
    console = Console()
    console.print(rows.table(all_rows, f"planner: {machine.chip(facts)}, load {facts['load'][0]:g} before"))
    console.print(f"wrote {path} and .md", soft_wrap=True)


if __name__ == "__main__":
    main()
