"""Log of the fuzz: JSON lines from any number of processes, and their summary as a page."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


def add(options: argparse.Namespace, counts: Mapping, faults: list[dict], seconds: float) -> None:
    """Append one line with a single write, so that lines of several processes do not mix."""
    if not options.log:
        return
    line = {
        "commit": _commit(),
        "machine": platform.machine(),
        "sanitized": bool(os.environ.get("BLOCKSPARSE_FUZZ_CORE")),
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "calls": [[*key, count] for key, count in sorted(counts.items())],
        "faults": faults,
    }
    with options.log.open("a") as file:
        file.write(json.dumps(line) + "\n")


@cache
def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE, check=False
    )
    return done.stdout.strip() or "unknown"


def summary(file: Path) -> str:
    """Return the page: calls by operation and instruction set, calls by dtype, and faults."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    isas: list[str] = []
    by_op: dict[str, Counter] = {}
    dtypes: Counter = Counter()
    for line in lines:
        for op, isa, dtype, count in line["calls"]:
            isas += [] if isa in isas else [isa]
            by_op.setdefault(op, Counter())[isa] += count
            dtypes[dtype or "none"] += count
    isas = _order(isas)
    total, faults = sum(dtypes.values()), [fault for line in lines for fault in line["faults"]]
    sanitized = {line["sanitized"] for line in lines}
    how = " and ".join(["with sanitizers"] * (True in sanitized) + ["without sanitizers"] * (False in sanitized))
    rows = [
        [op, *(f"{counts[isa]:,}" for isa in isas), f"{sum(counts.values()):,}"] for op, counts in sorted(by_op.items())
    ]
    sums = [f"{sum(counts[isa] for counts in by_op.values()):,}" for isa in isas]
    return "\n".join(
        [
            "# The compiled core, fuzzed",
            "",
            "Random calls of the compiled core against float64, by `make fuzz` and, with AddressSanitizer and",
            "UndefinedBehaviorSanitizer, by `make sanitize`. The generator is in `tests/fuzz/`.",
            "",
            f"{total:,} calls in {sum(line['seconds'] for line in lines) / 3600:.1f} hours of a process, {how}: "
            f"reports: {len(faults)}.",
            "",
            f"- commits: {', '.join(sorted({line['commit'] for line in lines}))}",
            f"- machines: {', '.join(sorted({line['machine'] for line in lines}))}",
            f"- seeds: {', '.join(map(str, sorted({line['seed'] for line in lines})))}",
            "",
            *_table(["Operation", *isas, "all"], [*rows, ["all", *sums, f"{total:,}"]]),
            "",
            *_table(["Dtype", "calls"], [[dtype, f"{count:,}"] for dtype, count in sorted(dtypes.items())]),
            *(["", "## Reports", ""] if faults else []),
            *(
                f"- seed {line['seed']}, case {fault['index']}: {fault['fault']}"
                for line in lines
                for fault in line["faults"]
            ),
            "",
        ]
    )


def _order(isas: list[str]) -> list[str]:
    known = [
        "portable",
        "avx2",
        "avx512",
        "avx512_emulated",
        "avx512_bf16",
        "avx512_bf16_emulated",
        "amx",
        "amx_emulated",
    ]
    return [isa for isa in known if isa in isas] + [isa for isa in isas if isa not in known]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
