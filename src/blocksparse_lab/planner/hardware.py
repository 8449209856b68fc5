"""Devices and the links between them: named machines, and files of measured rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blocksparse.errors import BlockSparseError
from blocksparse.files import read_json

from .formulas import ring_bytes, ring_steps


@dataclass(frozen=True)
class Link:
    """Seconds per message, and bytes per second that each rank sends and receives at the same time."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Network:
    """A link for each collective; over NVLink they are equal, gloo's differ by their algorithms."""

    all_reduce: Link
    all_gather: Link
    reduce_scatter: Link
    broadcast: Link

    @classmethod
    def uniform(cls, latency: float, bandwidth: float) -> Network:
        return cls(*[Link(latency, bandwidth)] * 4)


@dataclass(frozen=True)
class Hardware:
    """The rates that determine the time of a step.

    Args:
        name: for titles.
        memory: bytes of a device.
        devices: devices per node.
        inside, between: networks inside a node and between nodes.
        bandwidth: bytes per second of a device's memory.
        rates: FLOP/s on stored blocks by (bytes of an element, block size), over a training step's three products.
        dense: FLOP/s of dense work such as attention, by bytes of an element.
        overlap: whether a device computes while it sends; processes that share cores do not.
        cores: the real number of devices if there are more ranks, which then take turns.
        source: where the rates come from.
    """

    name: str
    memory: float
    devices: int
    inside: Network
    between: Network
    bandwidth: float
    rates: Mapping[tuple[int, int], float]
    dense: Mapping[int, float]
    overlap: bool = True
    cores: int | None = None
    source: str = ""

    def turns(self, ranks: int) -> float:
        """Return how many times longer a rank computes than with a device of its own.

        >>> replace(PRESETS["h100"], cores=2).turns(4), PRESETS["h100"].turns(4)
        (2.0, 1.0)
        """
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def rate(self, bytes_each: int, block: int) -> float:
        """Return FLOP/s on stored blocks of this size, else of the largest smaller measured one, else the smallest."""
        known = sorted(size for each, size in self.rates if each == bytes_each)
        if not known:
            raise BlockSparseError.expected("dtype", f"one whose rate {self.name} has", f"{bytes_each} bytes")
        fitting = [size for size in known if size <= block] or known[:1]
        return self.rates[bytes_each, fitting[-1]]

    def seconds(self, collective: str, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of one collective over `size` bytes by ranks that are `stride` apart; the slowest link
        decides.

        >>> PRESETS["h100"].seconds("all_reduce", 1e9, 8) < PRESETS["h100"].seconds("all_reduce", 1e9, 16)
        True
        """
        if ranks == 1:
            return 0.0
        inside, between = getattr(self.inside, collective), getattr(self.between, collective)
        sent = ring_bytes(collective, size, ranks)
        nodes = -(-ranks * stride // self.devices)
        if nodes == 1:
            return ring_steps(collective, ranks) * inside.latency + sent / inside.bandwidth
        # Between nodes, NCCL reduces over trees (Sanders, Speck, Traeff, Two-tree algorithms, 2009); gathers and
        # scatters use a ring, with a message between nodes for each node.
        groups = min(nodes, ranks)
        messages = ring_steps(collective, groups)
        if collective in ("all_reduce", "broadcast"):
            messages = min(messages, 2 * math.ceil(math.log2(groups)))
        latency = messages * between.latency + ring_steps(collective, ranks // groups) * inside.latency
        return latency + sent / min(inside.bandwidth, between.bandwidth)


GB, TFLOPS, US = 1e9, 1e12, 1e-6

# Products in bfloat16 and float32 on an H100, forward, dgrad and wgrad together: docs/results/gpu.md, column "since",
# with 8192 features, 8192 tokens and density 0.1. The dense rates are cuBLAS's.
_RATES = {
    (2, 32): 198 * TFLOPS, (2, 64): 355 * TFLOPS, (2, 128): 464 * TFLOPS,
    (4, 32): 62 * TFLOPS, (4, 64): 78 * TFLOPS, (4, 128): 83 * TFLOPS,
}  # fmt: skip
_DENSE = {2: 650 * TFLOPS, 4: 51.8 * TFLOPS}

_H100 = Hardware(
    name="h100",
    memory=80 * GB,
    devices=8,
    inside=Network.uniform(3 * US, 450 * GB),  # NVLink 4: 900 GB/s, half in each direction
    between=Network.uniform(10 * US, 50 * GB),  # InfiniBand NDR: 400 Gb/s per GPU
    bandwidth=2.87e12,  # of a copy, measured
    rates=_RATES,
    dense=_DENSE,
    source="nominal links, assumed latencies, kernels measured on one H100",
)
_H200_SOURCE = _H100.source.replace("links", "links and memory")
PRESETS = {
    "h100": _H100,
    "h200": replace(_H100, name="h200", memory=141 * GB, bandwidth=4.8e12, source=_H200_SOURCE),
}


def as_json(hardware: Hardware) -> dict[str, Any]:
    """Return the content of a file that `read` reads."""
    numbers = asdict(hardware)
    numbers["rates"] = [[*key, rate] for key, rate in hardware.rates.items()]
    numbers["dense"] = [[key, rate] for key, rate in hardware.dense.items()]
    return numbers


def read(path: Path) -> Hardware:
    """Read rates that `blocksparse plan --measure --json FILE` wrote.

    Raises:
        BlockSparseError: the file has no rates.
    """
    found = read_json(path, "hardware")
    try:
        numbers = dict(found["hardware"])
        for side in ("inside", "between"):
            numbers[side] = Network(**{name: Link(**link) for name, link in numbers[side].items()})
        numbers["rates"] = {(int(each), int(block)): float(rate) for each, block, rate in numbers["rates"]}
        numbers["dense"] = {int(each): float(rate) for each, rate in numbers["dense"]}
        return Hardware(**numbers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BlockSparseError.expected(str(path), "rates that plan --measure wrote", repr(error)) from error


def find(name: str) -> Hardware:
    """Return the preset of this name, or the rates in a file."""
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).exists():
        raise BlockSparseError.expected("--machine", f"one of {sorted(PRESETS)} or a file of rates", repr(name))
    return read(Path(name))
