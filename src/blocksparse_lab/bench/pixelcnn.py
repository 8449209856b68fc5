"""The time of a training step of PixelCNN++, sparse in its channels and deeper, against the dense one.

Both are `models.PixelCNN`, which differ only in their convolutions; the dense ones are PyTorch's (oneDNN). A step is
forward, the negative logarithm of the probability, backward, Adam; on the same images, channels-last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from blocksparse.measure import Call

from ..models import logistic_mixture
from ..models.pixelcnn import PixelCNN
from .case import compared
from .report import duration
from .rows import Row, judged

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
    calls = {"dense": _step(dense, images), "sparse": _step(sparse, images)}
    ratio, timed = compared(calls, "sparse", "dense", rounds, budget)
    parameters = {
        name: sum(p.numel() for p in model.parameters()) for name, model in (("dense", dense), ("sparse", sparse))
    }
    by = "PyTorch's grouped convolutions" if spec.block_size is None else f"ours in blocks of {spec.block_size}"
    work = (
        f"a step, PixelCNN++ of {spec.filters} filters, {spec.groups} groups ({by}), depth x{spec.depth}, "
        f"{parameters['sparse']:,} parameters against {parameters['dense']:,}, batch {spec.batch}"
    )
    ours, theirs = (duration(timed["seconds"][name]["median"]) for name in ("sparse", "dense"))
    details = {**asdict(spec), "parameters": parameters, **timed}
    return judged(work, ratio, "dense", most=limit(spec), more=f"; {ours} against {theirs}", details=details)


def limit(spec: PixelSpec) -> float | None:
    """How many times as long as a dense step a sparse one may take; None where there is no target."""
    return MOST if spec in TARGETS else None


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
