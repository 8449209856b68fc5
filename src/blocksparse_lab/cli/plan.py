"""`blocksparse plan`: predict memory and time of training on many devices, and recommend an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError

from .options import parse_count
from .terminal import JsonFile, short, table, write

if TYPE_CHECKING:
    from ..planner.hardware import Hardware
    from ..planner.plan import Plan

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
MAX_GPUS, MAX_TOKENS, MAX_PARAMS = 10**7, 10**9, 10**13
# Bounds of GB, GB/s and devices per node.
MIN_RATE, MAX_RATE = 1e-6, 1e6


def plan(
    params: Annotated[str, typer.Option(help="Stored weights, such as 10B.")] = "1B",
    density: Annotated[float, typer.Option(help="Fraction of the blocks that are stored.")] = 0.1,
    gpus: Annotated[int, typer.Option(help="Total number of devices.")] = 8,
    machine: Annotated[str, typer.Option(help="h100, h200, or a file written by --measure --json.")] = "h100",
    layers: Annotated[int | None, typer.Option(help="Transformer layers; by default width / 128.")] = None,
    width: Annotated[int | None, typer.Option(help="Features; by default from --params.")] = None,
    block_size: Annotated[int, typer.Option(help="Rows and columns of a block.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences per device and step.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32, for products and gathers.")] = "bf16",
    pure: Annotated[bool, typer.Option("--pure", help="Keep weights and states in --dtype too, not in fp32.")] = False,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")] = "adamw",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Recompute activations instead of keeping them.")
    ] = False,
    memory: Annotated[float | None, typer.Option(help="GB per device; by default the machine's.")] = None,
    per_node: Annotated[int | None, typer.Option(help="Devices per node; by default the machine's.")] = None,
    inside: Annotated[float | None, typer.Option(help="GB/s per device within a node, one direction.")] = None,
    between: Annotated[float | None, typer.Option(help="GB/s per device between nodes, one direction.")] = None,
    measure: Annotated[int | None, typer.Option(help="Instead, measure this machine with this many processes.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Predict memory, communication and time of DDP, FSDP2 and TP x FSDP2 for a block-sparse Transformer."""
    from ..planner import hardware, net
    from ..planner.plan import USABLE, Job, plans, recommend

    console = Console()
    if measure is not None:
        _measure(console, measure, json_file)
        return
    if dtype not in DTYPES:
        raise BlockSparseError.expected("dtype", f"one of {list(DTYPES)}", repr(dtype))
    for name, count, most in (
        ("gpus", gpus, MAX_GPUS),
        ("batch", batch, MAX_TOKENS),
        ("sequence", sequence, MAX_TOKENS),
    ):
        if not 1 <= count <= most:
            raise BlockSparseError.expected(name, f"from 1 to {most}", count)
    if (stored := parse_count(params)) > MAX_PARAMS:
        raise BlockSparseError.expected("params", f"at most {short(MAX_PARAMS)}", params)
    device = _changed(hardware.find(machine), memory=memory, per_node=per_node, inside=inside, between=between)
    model = net.transformer(stored, density, block_size, layers, width)
    job = Job(gpus, batch * sequence, sequence, DTYPES[dtype], DTYPES[dtype] if pure else 4, optimizer, recompute)
    candidates = plans(model, device, job)
    chosen, why = recommend(candidates)
    console.print(
        f"{short(model.weights)} stored weights of {short(model.weights / density)}: {len(model.layers)} layers of "
        f"width {model.width}, blocks of {block_size}; {dtype}, {optimizer}{', recompute' if recompute else ''}",
        highlight=False,
    )
    console.print(
        f"{gpus} x {device.name}, {device.devices} per node, {device.memory / 1e9:.0f} GB, of which {USABLE:.0%} is "
        f"used; {job.tokens} tokens each ({short(job.tokens * gpus)} per step)\n",
        highlight=False,
    )
    console.print(_table(candidates, chosen))
    console.print("\n[dim]GB on a device[/]")
    console.print(_memory(candidates))
    console.print(f"\n[bold]{why}[/]", highlight=False)
    console.print(f"[dim]{device.source}[/]", highlight=False)
    if json_file is not None:
        content = {"machine": hardware.as_json(device), "plans": [each.as_dict() for each in candidates], "why": why}
        write(console, "json", json_file, content)


def _changed(device: Hardware, **given: float | None) -> Hardware:
    """Return the device with the given memory and rates, in GB."""
    from ..planner.hardware import GB, Network

    changes: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "per_node":
            changes["devices"] = integer(name, value, 1)
        elif not MIN_RATE <= value <= MAX_RATE:
            raise BlockSparseError.expected(name, f"from {MIN_RATE:g} to {MAX_RATE:g}", value)
        elif name == "memory":
            changes["memory"] = value * GB
        else:
            changes[name] = Network.uniform(getattr(device, name).all_reduce.latency, value * GB)
    return replace(device, **changes)


def _table(candidates: list[Plan], chosen: Plan | None) -> Table:
    """Build the table of all plans, with the recommended one marked."""
    rows = []
    for each in candidates:
        colour = "bold green" if each is chosen else "" if each.fits else "red"
        cells = (
            each.engine,
            _gb(each.bytes_on_rank),
            "yes" if each.fits else "NO",
            _gb(sum(each.sent.values())),
            _seconds(each.seconds["forward"] + each.seconds["backward"]),
            _seconds(each.seconds["collectives"]),
            _seconds(each.step),
        )
        rows.append([f"[{colour}]{cell}[/]" if colour else cell for cell in cells])
    return table(("engine", "GB", "fits", "GB sent", "compute", "collectives", "step"), rows)


def _memory(candidates: list[Plan]) -> Table:
    parts = ["values", "gradients", "optimizer", "layouts", "activations", "copies"]
    rows = [[each.engine, *(_gb(each.memory.get(part, 0)) for part in parts)] for each in candidates]
    return table(("engine", *parts), rows)


def _measure(console: Console, processes: int, json_file: Path | None) -> None:
    """Measure this machine and print or write its rates."""
    from ..planner.hardware import as_json
    from ..planner.measure import measure

    if processes < 1:
        raise BlockSparseError.expected("measure", "at least 1 process", processes)
    hardware = measure(processes)
    rows = [
        (name, f"{link.bandwidth / 1e9:.3g} GB/s", f"{link.latency * 1e6:.3g} us a message")
        for name, link in vars(hardware.inside).items()
    ]
    for (_, block), rate in hardware.rates.items():
        rows.append((f"block-sparse layer, fp32, blocks of {block}", f"{rate / 1e9:.3g} GFLOP/s", "forward, backward"))
    rows.append(("dense product, fp32", f"{hardware.dense[4] / 1e9:.3g} GFLOP/s", ""))
    rows.append(("memory", f"{hardware.bandwidth / 1e9:.3g} GB/s", f"{hardware.cores} cores"))
    console.print(f"{processes} processes, gloo, a thread each", highlight=False)
    console.print(table(("", "rate", ""), rows))
    if json_file is not None:
        more = f": blocksparse plan --machine {json_file} --dtype fp32"
        write(console, "json", json_file, {"hardware": as_json(hardware)}, more)


def _gb(size: float) -> str:
    """Return a number of bytes in GB as text.

    >>> _gb(123_456_000_000), _gb(9_870_000_000), _gb(12_000_000), _gb(0)
    ('123', '9.87', '0.012', '-')
    """
    number = size / 1e9
    if number < 0.001:
        return "<0.001" if number else "-"
    return f"{number:.0f}" if 100 <= number < 100_000 else f"{number:.3g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms" if seconds else "-"
