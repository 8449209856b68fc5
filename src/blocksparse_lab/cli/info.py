"""`blocksparse info`: list the backends that work here, and why others do not."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table


def info() -> None:
    """Show backends (usable, or why not), CPU features, instruction sets and versions."""
    from blocksparse.ops import backends, cpu_core

    from ..machine import machine

    facts = machine()
    out = Console()
    commit = f", commit {facts['commit'][:12]}{' with changes' if facts['dirty'] else ''}" if facts["commit"] else ""
    out.print(f"[bold]blocksparse {facts['blocksparse']}[/]{commit}\n", highlight=False)

    table = _table("backend", "state")
    for name, status in backends().items():
        table.add_row(name, f"[green]{status}[/]" if status else f"[yellow]{status}[/]")
    out.print(table)

    if cpu_core.unavailable() is None:
        out.print()
        table = _table("instruction set", "state")
        for name, here in cpu_core.isas().items():
            state = "usable" if here else "[dim]this CPU does not have it[/]"
            table.add_row(name, "[green]in use[/]" if name == facts["isa"] else state)
        out.print(table)
        if "portable" not in cpu_core.isas():
            out.print(
                "This core was compiled for CPUs like this one only. Wheels have the kernels for all.",
                style="dim",
                highlight=False,
            )
        chosen = os.environ.get(cpu_core.ISA_VARIABLE)
        out.print(
            f"{cpu_core.ISA_VARIABLE}={chosen} chose it" if chosen else f"{cpu_core.ISA_VARIABLE}=NAME chooses another",
            style="dim",
            highlight=False,
        )

    out.print()
    table = _table("machine", "")
    table.add_row("CPU", facts["cpu"])
    if facts["features"] is not None:
        table.add_row("features", ", ".join(facts["features"]) or "none of those we use")
    table.add_row("threads", f"{facts['threads']} (torch.set_num_threads)")
    for name in ("system", "python", "torch", "numpy"):
        table.add_row(name, facts[name])
    out.print(table)


def _table(*columns: str) -> Table:
    """Build an empty table without lines; the first column does not wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for nth, column in enumerate(columns):
        table.add_column(column, no_wrap=nth == 0, min_width=15 if nth == 0 else None, overflow="fold")
    return table
