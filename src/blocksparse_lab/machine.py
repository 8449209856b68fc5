"""Describe the machine that a measurement ran on. Every JSON file of results has this description."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blocksparse import __version__
from blocksparse.ops import cpu_core

PACKAGE = Path(__file__).resolve().parent


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return CPU, instruction set, threads, load, versions, commit and date, and for "cuda" the GPU, ready for JSON."""
    usable = cpu_core.unavailable() is None
    commit, dirty = checkout()
    return {
        "cpu": cpu_model(),
        "arch": platform.machine(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "features": list(cpu_core.core().features()) if usable else None,
        "isa": cpu_core.isa() if usable else None,
        "gpu": gpu() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_blas": "MKL" if torch.backends.mkl.is_available() else "other",
        "numpy": np.__version__,
        "blocksparse": __version__,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def gpu() -> dict[str, Any]:
    """Describe PyTorch's current GPU, its driver and CUDA's versions."""
    device = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(device)
    drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "name": facts.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "multiprocessors": facts.multi_processor_count,
        "memory": facts.total_memory,
        "l2_cache": facts.L2_cache_size,
        "driver": drivers.splitlines()[0] if drivers else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _version("triton"),
        "fp32_precision": torch.backends.cuda.matmul.fp32_precision,
    }


def _version(package: str) -> str | None:
    """Return a package's installed version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the CPU's name."""
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        name = name_in_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        name = None
    return name or platform.processor() or platform.machine()


def name_in_cpuinfo(cpuinfo: str) -> str | None:
    """Return the CPU's name in the text of /proc/cpuinfo, with the generation of a Zen 4; None if it has no name.

    Virtual machines often hide an EPYC's number. AVX-512 on Zen 4 takes twice the cycles that it takes on Zen 5.
    """
    facts = dict(re.findall(r"^(.+?)\s*:[ \t]*(.*)$", cpuinfo.partition("\n\n")[0], re.MULTILINE))
    name, flags = facts.get("model name"), facts.get("flags", "").split()
    # Of AMD's family 25 (Zen 3 and 4) only Zen 4 has AVX-512.
    is_zen4 = facts.get("vendor_id") == "AuthenticAMD" and facts.get("cpu family") == "25" and "avx512f" in flags
    return f"{name}, Zen 4" if name and is_zen4 else name or None


def slug(text: str) -> str:
    """Turn a text into a file name.

    >>> slug("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz")
    'intel-xeon-platinum-8481c'
    """
    text = re.sub(r"\((r|tm)\)|@.*$|\bcpu\b|\bprocessor\b", " ", text.lower())
    return "-".join(re.findall(r"[a-z0-9]+", text)) or "machine"


def checkout() -> tuple[str | None, bool | None]:
    """Return the commit of this package's checkout and whether tracked files differ from it; (None, None) if unknown.

    git must track the package's own files: an environment inside some other repository does not count. For a copy
    without .git, set BLOCKSPARSE_COMMIT to the commit, with a + at the end if files differ.
    """
    if listed := os.environ.get("BLOCKSPARSE_COMMIT"):
        return listed.rstrip("+"), listed.endswith("+")
    if _output("git", "-C", str(PACKAGE), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _output("git", "-C", str(PACKAGE), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(PACKAGE), "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it fails or takes 20 seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def chip(facts: Mapping[str, Any]) -> str:
    """Name the GPU in a machine's facts, or the CPU."""
    if gpu := facts["gpu"]:
        return f"{gpu['name']}, driver {gpu['driver'] or 'unknown'}, triton {gpu['triton']}"
    return f"{facts['cpu']}, {facts['isa'] or 'no compiled core'}, {facts['threads']} threads"


def where(facts: Mapping[str, Any]) -> str:
    """Describe a machine in one line, with versions and commit."""
    commit = f", commit {code(facts)}" if facts["commit"] else ""
    return f"{chip(facts)}, torch {facts['torch']}, blocksparse {facts['blocksparse']}{commit}"


def code(facts: Mapping[str, Any]) -> str:
    """Name the code that ran: the commit and whether files differed from it, or the version."""
    return facts["commit"][:8] + " with changes" * facts["dirty"] if facts["commit"] else facts["blocksparse"]


def commits(machines: Mapping[str, Iterable[Mapping[str, Any]]]) -> str:
    """Return a clause to append to `where`: the commits and their runs; "" if all runs have the same commit.

    Args:
        machines: facts of the machines, by name of the run.
    """
    found: dict[str, list[str]] = {}
    for name, some in machines.items():
        for one in {one for facts in some if facts["commit"] for one in facts.get("codes", [code(facts)])}:
            found.setdefault(one, []).append(name)
    listed = [one if len(of) == len(machines) else f"{one} ({'; '.join(of)})" for one, of in sorted(found.items())]
    return f"; the runs are of commits {', '.join(listed)}" if len(found) > 1 else ""


def available_memory() -> int:
    """Return the bytes that a new process could allocate, by system and control group."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free.append(int(limit.read_text()) - int(used.read_text()))
    return min(free)
