"""Residual networks on small images, with strides or adaptive polyphase sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checked import integer
from blocksparse.checkpoint import part
from blocksparse.conversion import load_sparsified
from blocksparse.errors import BlockSparseError

from ..data.images import Images
from ..models.resnet import ResNet
from ..option import option
from ..training import saved_models
from ..training.memory import check_room
from ..training.settings import EpochSettings
from ..training.trainer import Trainer, device_of
from .classify import KIND, ClassifyTask
from .shifts import Consistency, consistency

# Largest shift of a random crop in pixels.
MARGIN = 4

NETWORK = "resnet"

# Arguments of `ResNet`.
_OPTIONS = {"classes", "channels", "width", "blocks", "downsample", "density", "block_size", "blur", "padding_mode"}


@dataclass(frozen=True)
class ResNetSettings(EpochSettings):
    """A network and its training by AdamW, sized for minutes on one core.

    The learning rate rises over the first tenth of the steps and falls to 0 in a line.
    """

    downsample: str = option("stride", "stride, or aps: adaptive polyphase sampling.")
    width: int = option(8, "Channels of the first stage, doubled from stage to stage.")
    blocks: tuple[int, ...] = option((1, 1, 1, 1), "Residual blocks of each stage.")
    density: float | None = option(None, "Density of the convolutions' blocks; dense unless given.")
    block_size: int = option(8, "Channels of a block, with --density.")
    blur: int = option(1, "Size of a low-pass filter before downsampling; 1: none.")
    padding_mode: str | None = option(None, "zeros or circular; by default circular for aps and zeros for stride.")
    epochs: int = option(6, "Epochs.")
    batch: int = option(64, "Images per step.")
    learning_rate: float = option(0.01, "The highest learning rate.", "lr")
    weight_decay: float = option(0.01, "Decoupled weight decay.")


class ImageRows:
    """Images for `ClassifyTask`: float32, each channel standardised by the training images."""

    def __init__(self, images: Images):
        self.images, self.name, self.classes, self.digest = images, images.name, images.classes, images.digest
        self.rows, self.tested, self.features = len(images.train), len(images.test), images.shape.numel()

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(rows)
        return self.standardised(self.images.train[index]), self.images.train_labels[index]

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in zip(self.images.test.split(batch), self.images.test_labels.split(batch), strict=True):
            yield self.standardised(pixels), labels

    def standardised(self, pixels: Tensor) -> Tensor:
        """Standardise uint8 `[n, channels, height, width]` to float32, channels last."""
        mean, deviation = self._moments
        return ((pixels - mean) / deviation).contiguous(memory_format=torch.channels_last)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel over the training images."""
        # Computed from counts of the 256 values: exact, and without a float copy of all images.
        counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in self.images.train.unbind(1)])
        values, total = torch.arange(256.0, dtype=torch.float64), counts[0].sum()
        mean = (counts * values).sum(1) / total
        deviation = ((counts * (values - mean[:, None]).square()).sum(1) / total).sqrt()
        deviation[deviation == 0] = 1
        return mean.float().view(-1, 1, 1), deviation.float().view(-1, 1, 1)


class ImageTask(ClassifyTask):
    """`ClassifyTask` on images that are cropped and flipped at random, determined by seed and step."""

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        images, labels = super().take(step)
        return augment(images, np.random.default_rng([self.seed, 1, step]), (self.mine, self.batch)), labels


def augment(
    images: Tensor, rng: np.random.Generator, part: tuple[slice, int] | None = None, margin: int = MARGIN
) -> Tensor:
    """Shift each image by up to `margin` pixels along each axis, filling with 0, and mirror some.

    `part` gives the slice of a batch that these images are and the batch's size: numbers are drawn for the whole batch.
    """
    n, _, height, width = images.shape
    mine, batch = part or (slice(0, n), n)
    rows, cols = (rng.integers(2 * margin + 1, size=(batch, 1))[mine] + np.arange(size) for size in (height, width))
    mirrored = rng.random(batch)[mine] < 0.5
    cols[mirrored] = cols[mirrored, ::-1]
    wide = F.pad(images, (margin,) * 4).permute(0, 2, 3, 1)
    moved = wide[torch.arange(n)[:, None, None], torch.from_numpy(rows)[:, :, None], torch.from_numpy(cols)[:, None]]
    return moved.permute(0, 3, 1, 2)


def options(settings: ResNetSettings, images: Images) -> dict[str, Any]:
    """Return the arguments of the `ResNet` for some images."""
    blocks = settings.blocks
    if not blocks or min(blocks) < 1:
        raise BlockSparseError.expected("blocks", "one or more in each of one or more stages", blocks)
    parts = 2 ** (len(blocks) - 1)
    channels, *size = images.shape
    if any(side % parts for side in size):
        wanted = f"images whose sides divide by {parts}, to be halved between {len(blocks)} stages"
        raise BlockSparseError.expected(images.name, wanted, " x ".join(map(str, size)))
    own = {name: value for name, value in asdict(settings).items() if name in _OPTIONS}
    return {"classes": len(images.classes), "channels": channels, **own}


def trainer(settings: ResNetSettings, images: Images, run: str | Path, **pace: Any) -> Trainer:
    """Return a trainer of a new network in a run folder; `pace` overrides how often it evaluates and saves."""
    s, about = settings, options(settings, images)
    integer("width", s.width, 1)
    stages = [(s.width << stage, count) for stage, count in enumerate(s.blocks)]
    density = 1 if s.density is None else max(0, s.density)
    check_room(f"width {s.width:,}", sum(density * count * 13 * width**2 for width, count in stages))
    with torch.random.fork_rng([]):
        torch.manual_seed(s.seed)
        model = _network(about)
    facts = {
        "data": images.name,
        "tested": len(images.test),
        "epochs": s.epochs,
        "parameters": sum(p.numel() for p in model.parameters()),
        "multiply_adds_per_image": multiply_adds(model, images),
    }
    device, about = device_of(s.device), {"network": NETWORK, **about}
    task = ImageTask(model, ImageRows(images), s.epochs, s.batch, seed=s.seed, device=device, about=about)
    pace = {"warmup": task.steps // 10, "save_minutes": 2.0} | pace
    return Trainer(task, run, s.in_epochs(task.steps_per_epoch, **pace), facts)


def multiply_adds(model: nn.Module, images: Images) -> int:
    """Count multiply-adds of a network per image: each weight once per pixel."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, *images.shape))
    model.train()
    return counter.get_total_flops() // 2


def load(run: str | Path) -> ResNet:
    """Load the network of a run's newest checkpoint."""
    path, tensors, task = saved_models.read_checkpoint(Path(run) / "last.safetensors", KIND, "a residual network")
    config = task.get("model")
    if not isinstance(config, dict) or config.get("network") != NETWORK:
        raise BlockSparseError.expected(str(path), "a residual network", task["kind"])
    known = {key: value for key, value in config.items() if key not in ("network", "seed")}
    blocks = known.get("blocks")
    if not isinstance(blocks, list) or known.keys() != _OPTIONS:
        raise BlockSparseError.expected(str(path), "the configuration of a residual network", f"{config!r:.200}")
    sizes = {name: known[name] for name in ("classes", "channels", "width")} | {"stages": len(blocks)}
    checkpoint.check_sizes(path, tensors, sizes | {f"blocks {nth}": count for nth, count in enumerate(blocks)})
    with saved_models.report_bad_parameters(path, config):
        with torch.device("meta"):
            # The tensors bring the layouts; until then each row and column has one block.
            model = _network(known | {"density": None if known["density"] is None else 1e-9})
        state = part(tensors, "model.")
        if known["density"] is None:  # some layers may have become block-sparse after training
            load_sparsified(model, state)
        else:
            model.load_state_dict(state, assign=True)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.eval()


def shift_consistency(
    run: str | Path, images: Images, count: int = 64, progress: Callable[[int, int], None] | None = None
) -> Consistency:
    """Measure the consistency of a run's network on all shifts of the first `count` test images.

    The result is also saved in the run as `consistency.json`.
    """
    check_shifted(count, images)
    result = consistency(load(run), ImageRows(images).standardised(images.test[:count]), progress)
    checkpoint.write_text(Path(run) / "consistency.json", f"{json.dumps(asdict(result), indent=1)}\n")
    return result


def check_shifted(count: int, images: Images) -> None:
    """Raise if `count` test images cannot be shifted."""
    if not 1 <= count <= len(images.test):
        wanted = f"an int from 1 to the images to test on, {len(images.test):,}"
        raise BlockSparseError.expected("shifted", wanted, count)


def _network(config: dict[str, Any]) -> ResNet:
    model = ResNet(**config)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model
