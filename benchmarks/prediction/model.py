"""Model of a GPU: the time of work from its plan, its compiled kernels and the GPU's rates.

A launch takes as long as its slowest part:

    memory   the bytes of values, inputs and outputs, each once, from the GPU's memory;
    cache    the bytes that all programs load, most of them from the L2 cache: inputs again for each row of blocks,
             values again for each tile of tokens;
    compute  the tensor cores (or multiply-adds), the issue of instructions, or shared memory with its bank conflicts,
             whichever is slowest, as counted in the compiled loop;
    longest  the steps of the longest program, one after the other.

Cache and compute overlap in part (OVERLAP). The launch and the start and end of each wave of programs are added.

The model is calibrated on one GPU, an H100, by an earlier run at commit d01ed05: within 17 % of each measured forward
product in bfloat16 and float32, and 22 % for training steps. docs/results/gpu.md compares it with the newest runs on an
H100 and an H200. For other GPUs it presumes the same fractions of their nominal rates.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blocksparse.errors import BlockSparseError
from blocksparse_lab.bench.conv_specs import GPU_REACH as CONV_REACH
from blocksparse_lab.bench.linear_specs import GPU_REACH, GPU_TRAINING_PART, LinearSpec
from blocksparse_lab.bench.report import short
from targets.lstm import GPU_REACH as LSTM_REACH
from targets.rows import Row
from targets.transformer import TRANSFORMER

ROOT = Path(__file__).parents[2]

# Fractions of nominal rates that the H100 reached: a stream of values from memory (2.66 of 3.35 TB/s), dense products
# in bfloat16 (737 of 989 TFLOP/s) and float32 (51.5 of 67), cuBLAS in float32 with few tokens (22.6 of 67).
MEMORY, TENSOR, PLAIN, PLAIN_FEW = 0.795, 0.745, 0.77, 0.337
# Fraction of the L2 cache's 64 bytes per clock and multiprocessor, fitted to times with many tokens.
CACHE = 0.574
OVERLAP = 1.5
# Fraction of an instruction per clock for each of four schedulers, since address computations wait for each other.
ISSUE = 0.5
# Seconds of a step of a program whose loads are in flight: two memory latencies for three buffers.
STEP = 0.5e-6
# Seconds of a launch in a graph, and of the first loads and last stores of a wave of programs.
LAUNCH, WAVE = 2.3e-6, 2.0e-6
# For titles: the largest error of the ratios over dense, against the measurements on an H100 and an H200.
LARGEST_ERROR = "up to 45 %"


@dataclass(frozen=True)
class Chip:
    """A GPU's nominal figures from its data sheet: bytes and operations per second, without sparsity."""

    name: str
    kind: str
    multiprocessors: int
    memory: float
    cache: float
    tensor: float  # bfloat16
    plain: float  # float32
    clock: float
    shared: int  # bytes per multiprocessor
    registers: int = 65536
    threads: int = 2048
    width: int = 32  # threads of a warp
    kept: int = 1024  # bytes of each program's shared memory that the driver reserves


# Cache: 64 bytes x multiprocessors x clock for NVIDIA's; the Infinity Cache for the MI300X.
CHIPS = {
    "a100": Chip("A100 80GB", "sm80", 108, 2.04e12, 9.7e12, 312e12, 19.5e12, 1.41e9, 164 * 1024),
    "h100": Chip("H100 SXM", "sm90", 132, 3.35e12, 14.8e12, 989e12, 67e12, 1.755e9, 228 * 1024),
    "h200": Chip("H200", "sm90", 132, 4.8e12, 14.8e12, 989e12, 67e12, 1.755e9, 228 * 1024),
    "b200": Chip("B200", "sm100", 148, 8.0e12, 17.5e12, 2250e12, 80e12, 1.85e9, 228 * 1024),
    "mi300x": Chip("MI300X", "gfx942", 304, 5.3e12, 17.2e12, 1307e12, 163e12, 2.1e9, 64 * 1024, 131072, 2048, 64, 0),
}


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds, and the seconds of each part."""

    seconds: float
    parts: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The part that takes longest.

        >>> Prediction(3e-6, {"launch": 1e-6, "memory": 2e-6}).bound
        'memory'
        """
        return max(self.parts, key=lambda name: self.parts[name])


def resident(kernel: Mapping[str, Any], chip: Chip) -> int:
    """Return how many programs of a kernel fit on a multiprocessor, by registers, shared memory and threads.

    >>> resident({"registers": 56, "shared": 50 * 1024, "warps": 4}, CHIPS["h100"])
    4
    """
    threads = kernel["warps"] * chip.width
    registers = -(-max(kernel["registers"], 16) // 8) * 8 * threads
    memory = max(kernel["shared"] + chip.kept, 1)
    fits = chip.registers // registers, chip.shared // memory, chip.threads // threads
    return max(1, min(*fits, 32))


def launch_time(launch: Mapping[str, Any], chip: Chip) -> Prediction:
    """Predict the time of one launch.

    Args:
        launch: its `programs`; `steps` of all programs and of the `longest` one; `macs`, multiply-adds including
            padding, and whether 16-bit ones run on `tensor` cores; the bytes of `memory` and `cache`; and the `kernel`:
            `products` by name, `registers`, `shared`, `warps` and the `loop`. The loop has what a step takes per warp,
            `instructions` and `wavefronts` of shared memory, and the outputs of a product that reads shared memory,
            `narrow`. A launch without a kernel is a pass of PyTorch's over `memory`.
    """
    if "kernel" not in launch:
        parts = {"launch": LAUNCH + WAVE, "memory": launch["memory"] / (MEMORY * chip.memory)}
        return Prediction(sum(parts.values()), parts)
    kernel, loop = launch["kernel"], launch["kernel"]["loop"]
    cycles = launch["steps"] * kernel["warps"] / (chip.multiprocessors * chip.clock)
    if any("tf32" in name for name in kernel["products"]):  # float32 as three TF32 products at half the rate
        products = 6 * launch["macs"] / (TENSOR * chip.tensor / 2)
    elif launch["tensor"]:
        products = 2 * launch["macs"] / (TENSOR * chip.tensor) * _from_shared_memory(loop["narrow"])
    else:
        products = 2 * launch["macs"] / chip.plain
    compute = {"products": products, "issue": cycles * loop["instructions"] / (4 * ISSUE)}
    compute["shared memory"] = cycles * loop["wavefronts"]
    slowest = max(compute, key=lambda name: compute[name])
    cache = launch["cache"] / (CACHE * chip.cache)
    together = (cache**OVERLAP + compute[slowest] ** OVERLAP) ** (1 / OVERLAP)
    waves = math.ceil(launch["programs"] / (chip.multiprocessors * resident(kernel, chip)))
    fixed = LAUNCH + WAVE * waves
    parts = {"launch": fixed, "memory": launch["memory"] / (MEMORY * chip.memory), "L2 cache": cache}
    parts |= {slowest: compute[slowest], "longest row": STEP * launch["longest"]}
    return Prediction(fixed + max(parts["memory"], parts["longest row"], together), parts)


def _from_shared_memory(narrow: int | None) -> float:
    """Return how many times longer a product of 64 tokens and this many outputs takes for its operands than in the
    tensor cores.

    Hopper's products read both operands from shared memory, 128 bytes per clock, which is fast enough for 64 outputs or
    more.

    >>> _from_shared_memory(32), _from_shared_memory(64), _from_shared_memory(None)
    (1.5, 1.0, 1.0)
    """
    return 1.0 if narrow is None else max(1.0, (16 + narrow / 4) / (narrow / 2))


def together(launches: list[Mapping[str, Any]], chip: Chip) -> Prediction:
    """Predict launches one after the other, each repeated `times` times, or once."""
    predictions = [(launch.get("times", 1), launch_time(launch, chip)) for launch in launches]
    names = dict.fromkeys(name for _, one in predictions for name in one.parts)
    parts = {name: sum(times * one.parts.get(name, 0) for times, one in predictions) for name in names}
    return Prediction(sum(times * one.seconds for times, one in predictions), parts)


def dense_time(
    operations: float, moved: float, dtype: str, few: bool, chip: Chip, launches: int = 0, times: int = 1
) -> float:
    """Return the seconds of a dense product of this many operations and bytes with few or many tokens, as cuBLAS takes
    on the H100.

    Args:
        launches: number of launches that wait for each other; with 0 it is one, whose first loads overlap the launch
            before it in the graph.
        times: how often it is computed.

    >>> f"{1e6 * dense_time(2 * 12288**2 * 32, 2 * 12288**2, 'bfloat16', True, CHIPS['h100']):.0f} us"  # measured: 114
    '116 us'
    """
    rate = (PLAIN_FEW if few else PLAIN) * chip.plain if dtype == "float32" else TENSOR * chip.tensor
    fixed = launches * (LAUNCH + WAVE) or LAUNCH
    return times * (fixed + max(moved / (MEMORY * chip.memory), operations / rate))


# -- the table -----------------------------------------------------------------------------------------------------

HEAD = ("work", "predicted", "bound by", "speed-up", "target", "met", "measured", "error")


def compiled(chip: Chip, *names: str) -> dict[str, Any]:
    """Compile the kernels of each row for this kind of GPU, which need not be present; return what launches do.

    All rows take half a minute. `names` selects rows, or is a layer's `asked`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("compile.py")), chip.kind, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise BlockSparseError.expected("kernels", f"ones that compile for {chip.name}", done.stderr.strip()[-500:])
    rows: dict[str, Any] = json.loads(done.stdout)
    return rows


def layer_name(spec: LinearSpec) -> str:
    """Return the name under which `compiled` gives the products of a layer."""
    return json.dumps(asdict(spec))


def table(rows: Mapping[str, Any], chip: Chip, measured: Iterable[Row] = ()) -> list[tuple[str, ...]]:
    """Return a line for each row with HEAD's columns, including times measured on such a GPU, if any."""
    seconds = {row.work: row.details.get("seconds", {}) for row in measured}
    over: dict[str, float] = {}
    lines: list[tuple[str, ...]] = []
    for name, row in rows.items():
        if any("kernel" in launch and launch["kernel"]["traps"] for launch in row["launches"]):
            lines.append((name, "-", "a trap", *["-"] * 3, "", ""))
            continue
        whole = together(row["launches"], chip)
        over[name] = sum(dense_time(**dense, chip=chip) for dense in row["dense"]) / whole.seconds
        works = [work for work in seconds if work.startswith(f"{name},") or work == name]
        times: dict[str, Any] = seconds[works[0]] if works else {}
        real = times.get("blocksparse") or times.get("hubs")
        taken = (_format_us(real["median"]), f"{whole.seconds / real['median'] - 1:+.0%}") if real else ("", "")
        lines.append(
            (name, _format_us(whole.seconds), whole.bound, f"{short(over[name])}x", *_target(name, over), *taken)
        )
    return lines


def without_empty_columns(lines: list[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return HEAD and the lines without empty columns."""
    columns = [nth for nth in range(len(HEAD)) if nth < 4 or any(line[nth] not in ("", "-") for line in lines)]
    return tuple(HEAD[nth] for nth in columns), [tuple(line[nth] for nth in columns) for line in lines]


def label(name: str) -> str:
    """Return a row's name for a narrow terminal.

    >>> label("ConvSpec(256x256 3x3, 64 images 28x28, block 32, density 0.1, bfloat16 dgrad)")
    'conv 3x3, dgrad'
    >>> label("a step, lstm language model, width 18432, Barabasi-Albert m = 8, block 32, torch-wide")
    'LSTM 18432, torch-wide'
    >>> label("training step, many tokens, block 32"), label("few tokens, bf16, density 0.5")
    ('step, many, block 32', 'few tokens, bf16, 0.5')
    """
    for long, brief in (
        (r"ConvSpec\(\S+ (\S+), .* (\w+)\)", r"conv \1, \2"),
        (r"a step, lstm language model, width (\d+), .*, (\S+)", r"LSTM \1, \2"),
        (r"gated MLP \S+, (\d+ tokens), .*", r"gated MLP, \1"),
        (r"training (step, \w+) tokens(.*)", r"\1\2"),
        (r"layout with (hubs, .*)", r"\1"),
        (r"(.*), density (\S+)", r"\1, \2"),
    ):
        name = re.sub(f"^{long}$", brief, name)
    return name


def _format_us(seconds: float) -> str:
    return f"{1e6 * seconds:.{1 if seconds < 1e-3 else 0}f} us"


# Target speed-ups over dense or over cuDNN.
_LEAST = {name: dict(target.ratios)["dense"] for name, target in GPU_REACH.items()}
_LEAST |= {
    f"{replace(CONV_REACH[0].spec, pass_=pass_)!r}": CONV_REACH[0].ratio for pass_ in ("forward", "dgrad", "wgrad")
}
_LEAST |= {target.work: target.ratio for target in LSTM_REACH}
_LEAST |= {f"{part}": least for _, part, least in TRANSFORMER if least is not None}


def _target(name: str, over: Mapping[str, float]) -> tuple[str, str]:
    """Return the target of a row, and whether it is met."""
    forward = over.get(name.removeprefix("training step, "))
    if name in _LEAST:
        least = _LEAST[name]
    elif name.startswith("training") and forward is not None:
        least = GPU_TRAINING_PART * forward
    else:
        return "-", "-"
    return f"{least:.3g}x", "yes" if over[name] >= least else "NO"
