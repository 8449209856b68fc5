"""The time of a training step of PixelCNN++, sparse in its channels and deeper, against the dense one.

Both are `models.PixelCNN`, which differ in their convolutions alone; the dense ones are PyTorch's (oneDNN). A step is
forward, the negative logarithm of the probability, backward, Adam; on the same images, channels-last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from blocksparse.measure import Call, Spread, alternate

from ..models import logistic_mixture
from ..models.pixelcnn import PixelCNN
from .report import duration
from .rows import Row, times

# A sparse step takes at most this many times as long as the dense one.
MOST = 1.2


@dataclass(frozen=True)
class PixelSpec:
    """A dense network and a sparse one with about as many parameters.

    Args:
        filters, resnets: of both.
        groups, block_size, depth: of the sparse one.
        batch, size: of images of 3 channels.
    """

    filters: int
    resnets: int = 1
    groups: int = 4
    block_size: int | None = None
    depth: int = 4
    batch: int = 16
    size: int = 32


SPECS = (
    PixelSpec(16),
    PixelSpec(32),
    PixelSpec(32, block_size=8),
    PixelSpec(16, groups=2, depth=2),
    PixelSpec(32, groups=2, depth=2),
)
# These have a target: four times the layers by the fastest way.
TARGETS = SPECS[:2]


def rows(budget: float = 16.0, quick: bool = False) -> Iterator[Row]:
    """Times a step of each spec against the dense one; `quick` uses small sizes."""
    specs = (PixelSpec(8, groups=2, depth=2, batch=2, size=8),) if quick else SPECS
    for spec in specs:
        yield row(spec, budget, 3 if quick else 15)


def row(spec: PixelSpec, budget: float, rounds: int) -> Row:
    """Times a sparse step, as a multiple of a dense one."""
    dense = PixelCNN(spec.filters, spec.resnets)
    sparse = PixelCNN(spec.filters, spec.resnets, sparse=spec.groups, block_size=spec.block_size, depth=spec.depth)
    images = _images(spec)
    samples = alternate({"dense": _step(dense, images), "sparse": _step(sparse, images)}, rounds=rounds, budget=budget)
    ratio = samples.ratio("sparse", "dense")
    parameters = {
        name: sum(p.numel() for p in model.parameters()) for name, model in (("dense", dense), ("sparse", sparse))
    }
    by = "PyTorch's grouped convolutions" if spec.block_size is None else f"ours in blocks of {spec.block_size}"
    work = (
        f"a step, PixelCNN++ of {spec.filters} filters, {spec.groups} groups ({by}), depth x{spec.depth}, "
        f"{parameters['sparse']:,} parameters against {parameters['dense']:,}, batch {spec.batch}"
    )
    ours, theirs = (duration(samples.time(name).median) for name in ("sparse", "dense"))
    found = f"{times(ratio)} dense; {ours} against {theirs}"
    details: dict[str, Any] = {**asdict(spec), "parameters": parameters, "ratio": vars(ratio)}
    details["seconds"] = {name: vars(samples.time(name)) for name in ("dense", "sparse")}
    return Row(work, f"<= {MOST:g}x dense" if spec in TARGETS else "-", found, verdict(spec, ratio), details)


def verdict(spec: PixelSpec, ratio: Spread) -> bool | None:
    """Whether the target is met; None where there is none."""
    return bool(ratio.median <= MOST) if spec in TARGETS else None


def _images(spec: PixelSpec) -> Tensor:
    shape = spec.batch, 3, spec.size, spec.size
    levels = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return logistic_mixture.scaled(levels.contiguous(memory_format=torch.channels_last))


def _step(model: PixelCNN, images: Tensor) -> Call:
    model.train()
    model.initialise(images)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (-model.log_prob(images).mean()).backward()
        optimizer.step()

    return step
