"""Time a training step of PixelCNN++, sparse in its channels and deeper, against the dense one.

Both are `models.PixelCNN` and differ only in their convolutions; the dense ones are PyTorch's (oneDNN). A step is
forward, negative log-likelihood, backward and Adam, on the same channels-last images.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from blocksparse.measure import Call
from blocksparse_lab.bench.report import duration
from blocksparse_lab.models import logistic_mixture
from blocksparse_lab.models.pixelcnn import PixelCNN
from targets.rows import RowIterator, race, timing_options


@dataclass(frozen=True)
class PixelSpec:
    """A dense network and a sparse one with about as many parameters; a step uses images with 3 channels.

    `groups`, `block_size` and `depth` belong to the sparse one, whose step may take at most `most` times as long.
    """

    filters: int
    resnets: int = 1
    groups: int = 4
    block_size: int | None = None
    depth: int = 4
    batch: int = 16
    size: int = 32
    most: float | None = None


# The fastest way to four times the layers has a target.
SPECS = (
    PixelSpec(16, block_size=4, most=1.2),
    PixelSpec(32, block_size=8, most=1.2),
    PixelSpec(16),
    PixelSpec(32),
    PixelSpec(16, groups=2, depth=2),
    PixelSpec(32, groups=2, depth=2),
)


def rows(budget: float = 16.0, quick: bool = False) -> RowIterator:
    """Time a step of each spec as a multiple of a dense one; `quick` uses small sizes."""
    for spec in (PixelSpec(8, groups=2, depth=2, batch=2, size=8),) if quick else SPECS:
        how: dict[str, Any] = {"sparse": spec.groups, "block_size": spec.block_size, "depth": spec.depth}
        sizes = spec.filters, spec.resnets
        models = {"dense": PixelCNN(*sizes), "sparse": PixelCNN(*sizes, **how)}
        images = _make_images(spec)
        timed = race(
            {name: _training_step(model, images) for name, model in models.items()}, **timing_options(budget, quick)
        )
        parameters = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
        by = "PyTorch's grouped convolutions" if spec.block_size is None else f"ours in blocks of {spec.block_size}"
        work = (
            f"a step, PixelCNN++ of {spec.filters} filters, {spec.groups} groups ({by}), depth x{spec.depth}, "
            f"{parameters['sparse']:,} parameters against {parameters['dense']:,}, batch {spec.batch}"
        )
        ours, theirs = (duration(timed.samples.time(name).median) for name in ("sparse", "dense"))
        details = {**asdict(spec), "parameters": parameters}
        more = f"; {ours} against {theirs}"
        yield timed.row(work, "sparse", "dense", "dense", most=spec.most, more=more, details=details)


def _make_images(spec: PixelSpec) -> Tensor:
    shape = spec.batch, 3, spec.size, spec.size
    levels = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return logistic_mixture.scaled(levels.contiguous(memory_format=torch.channels_last))


def _training_step(model: PixelCNN, images: Tensor) -> Call:
    model.train()
    model.initialise(images)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        (-model.log_prob(images).mean()).backward()
        optimizer.step()

    return step
