"""PixelCNN++ on small images: settings, task, trainer, and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checked import integer, is_int
from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError
from blocksparse.nn import bands, fold

from ..data.images import Images
from ..models import logistic_mixture
from ..models.pixelcnn import STRIDE, PixelCNN
from ..option import option
from ..training import saved_models
from ..training.callback import EpochTask
from ..training.memory import check_room
from ..training.settings import Settings
from ..training.trainer import Trainer, device_of

KIND = "pixelcnn"

# Largest side of an image: the network fits any size, so a checkpoint's value needs a bound.
LARGEST = 1024

# Images that initialise gains and biases.
INITIAL_BATCH = 64


@dataclass(frozen=True)
class PixelCNNConfig:
    """Arguments of a `PixelCNN` and the seed of its weights; the default sizes are those of the paper."""

    filters: int = option(160, "Channels of all layers; 160 in the paper.")
    resnets: int = option(5, "Gated residual layers of each resolution; 5 in the paper.")
    mixtures: int = option(10, "Logistic distributions per pixel.")
    dropout: float = option(0.5, "Dropout in each gated residual layer.")
    sparse: int | None = option(None, "Groups of channels of each layer; dense unless given.")
    block_size: int | None = option(
        None,
        "Blocks of this size for --sparse, not PyTorch's grouped convolutions.",
    )
    depth: int = option(1, "Multiplies the number of gated residual layers.")
    seed: int = option(0, "Random seed.")

    def build(self, channels: int) -> PixelCNN:
        """Draw the network for images of `channels`, without use of the global generator."""
        for name, size in (("filters", self.filters), ("resnets", self.resnets), ("depth", self.depth)):
            integer(name, size, 1)
        # Convolutions of the gated layers, both streams, down and up, and those that halve and double the size.
        groups = self.sparse if is_int(self.sparse) and self.sparse else 1
        least = self.filters**2 * (6 * 62 * self.resnets * self.depth / groups + 40)
        check_room(f"{self.filters:,} filters, {self.resnets * self.depth:,} deep", least)
        options = asdict(self)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.pop("seed"))
            return PixelCNN(channels=channels, **options)


@dataclass(frozen=True)
class SmallPixelCNNConfig(PixelCNNConfig):
    """A small network, the default of the command line."""

    filters: int = option(32, "Channels of all layers; 160 in the paper.")
    resnets: int = option(1, "Gated residual layers of each resolution; 5 in the paper.")


@dataclass(frozen=True)
class PixelCNNSettings(Settings):
    """A network and its training, as in the paper: Adam, a rate that falls by a factor per step, Polyak's means.

    The `seed` is that of the order of the images and of the dropout; that of the weights is in `model`.
    """

    learning_rate: float = option(1e-3, "The initial learning rate.", "lr")
    warmup: int = option(0, "Steps over which the learning rate rises.")
    decay: str = option("none", "Further decay of the learning rate: linear or cosine, to 0, or none.")
    decay_per_step: float = option(0.999995, "Factor of the learning rate after each step.")
    betas: tuple[float, float] = (0.95, 0.9995)
    weight_decay: float = 0.0
    ema: float = option(0.9995, "Evaluate a running mean of the weights with this decay; 0: the weights.")
    clip: float = option(0.0, "Clip the gradient at this norm; 0: never.")
    eval_every: int = option(1000, "Steps between evaluations; 0: only at the end.")
    cuda_graph: bool = False
    batch: int = option(16, "Images per step.")
    evaluated: int = option(0, "Test images per evaluation, the first ones; 0: all.", "eval-images")
    model: PixelCNNConfig = field(default_factory=PixelCNNConfig)


class PixelCNNTask(EpochTask):
    """Negative log-likelihood of batches of images, in a new order per epoch.

    Args:
        model: a `PixelCNN`, or any module with `log_prob(images)`.
        images: to train and to evaluate on.
        batch: images per step.
        evaluated: test images per evaluation, the first ones; 0 for all.
        about: describes the model, ready for JSON.
    """

    unit = "bits per dimension"
    per_nat = 1 / math.log(2)

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        batch: int = 16,
        evaluated: int = 0,
        seed: int = 0,
        device: torch.device | str = "cpu",
        about: dict[str, Any] | None = None,
    ):
        if not 0 <= evaluated <= len(images.test):
            wanted = f"an int from 0, for all, to the test images, {len(images.test):,}"
            raise BlockSparseError.expected("evaluated", wanted, evaluated)
        if any(size % STRIDE for size in images.shape[1:]):
            raise BlockSparseError.expected(
                images.name, f"images of height and width divisible by {STRIDE}", tuple(images.shape[1:])
            )
        super().__init__(model, device, len(images.train), batch, seed, "images", images.shape.numel())
        self._train, self._test = images.train, images.test[: evaluated or None]
        self._about = about if about is not None else {"repr": repr(model)}
        self._digest = images.digest()

    def take(self, step: int) -> Tensor:
        """Return the images of a step, `[batch, channels, height, width]` from -1 to 1."""
        return self.ready(self._train[torch.from_numpy(self.rows_of(step))])

    def ready(self, images: Tensor) -> Tensor:
        """Convert bytes to the model's input."""
        there = images.to(self.device).contiguous(memory_format=torch.channels_last)
        return logistic_mixture.scaled(there)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step in nats per colour of a pixel."""
        images = self.take(step)
        return -self.model.log_prob(images).sum() / images.numel()  # type: ignore[operator]

    def evaluate(self, model: nn.Module) -> float:
        """Return bits per dimension of the test images."""
        total = 0.0
        for images in self._test.split(4 * self.batch):
            total -= float(model.log_prob(self.ready(images)).double().sum())  # type: ignore[operator]
        return total / self._test.numel() * self.per_nat

    def about(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "model": self._about,
            "data": self._digest,
            "batch": self.batch,
            "evaluated": len(self._test),
        }


def trainer(settings: PixelCNNSettings, images: Images, run: str | Path) -> Trainer:
    """Return a trainer of a new network, whose gains and biases are initialised by some images."""
    s, config = settings, settings.model
    model = config.build(images.shape[0])
    task = PixelCNNTask(model, images, s.batch, s.evaluated, s.seed, device_of(s.device), asdict(config))
    if not (Path(run) / "last.safetensors").exists():  # a checkpoint has the initialised values
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(config.seed)
            model.initialise(task.ready(images.train[: min(INITIAL_BATCH, len(images.train))]))
    facts = {
        "data": images.name,
        "tested": s.evaluated or len(images.test),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return Trainer(task, run, settings, facts)


def load(path: str | Path) -> tuple[PixelCNN, tuple[int, int, int]]:
    """Load a network, with mean parameters if there are any, and its images' shape from a checkpoint or run folder."""
    path, tensors, task = saved_models.read_checkpoint(path, KIND, "a PixelCNN")
    config = saved_models.model_config(path, task, {one.name for one in fields(PixelCNNConfig)}, "a PixelCNN")
    data = task.get("data")
    shape = data.get("shape") if isinstance(data, dict) else None
    if not isinstance(shape, list) or len(shape) != 3:
        raise BlockSparseError.expected(str(path), "images of three dimensions", f"{shape!r:.99}")
    usual = asdict(PixelCNNConfig()) | config
    sizes = {name: usual[name] for name in ("filters", "resnets", "depth", "mixtures")} | {"channels": shape[0]}
    checkpoint.check_sizes(path, tensors, sizes)
    state = part(tensors, "model.") | part(tensors, "ema.")
    # A dense weight has filters by filters entries, and each layer has tensors.
    least = max(usual["filters"] ** 2, usual["resnets"] * usual["depth"] * usual["filters"])
    if (there := sum(tensor.numel() for tensor in state.values())) < least:
        raise BlockSparseError.expected(str(path), f"{least:,} parameters or more, for {config}", f"{there:,}")
    for side in shape[1:]:
        integer(f"{path}, a side of its images", side, 1, LARGEST + 1)
    network = PixelCNNConfig(**(config | {"seed": 0}))  # the tensors have all that it draws
    with saved_models.report_bad_parameters(path, config):
        with torch.device("meta"):
            model = network.build(shape[0])
        model.load_state_dict(state, assign=True)
    return model.eval(), (shape[0], shape[1], shape[2])


def sample(
    model: PixelCNN,
    count: int,
    height: int,
    width: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Draw images pixel by pixel in reading order: uint8 `[count, channels, height, width]`.

    For each pixel only the band of four rows that contains it is computed: layers cache their results for the rows
    above (`bs.nn.bands`).
    """
    if count < 1:
        raise BlockSparseError.expected("count", "a positive int", count)
    if height < 1 or width < 1 or height % STRIDE or width % STRIDE:
        raise BlockSparseError.expected("size", f"positive and divisible by {STRIDE}", (height, width))
    integer("seed", seed, 0, below=2**64)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    images = torch.zeros(count, model.channels, height, width, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    drawing = fold(model)
    with torch.no_grad(), bands(drawing) as below:
        for top in range(0, height, STRIDE):
            band = images[:, :, top : top + STRIDE]
            for y in range(STRIDE):
                for x in range(width):
                    at = (slice(None), slice(None), slice(y, y + 1), slice(x, x + 1))
                    band[at] = logistic_mixture.sample(drawing(band)[at], model.channels, generator)
                    if progress:
                        progress((top + y) * width + x + 1, height * width)
            drawing(band)  # the layers cache its last rows
            below.next()
    return logistic_mixture.levels(images)


def grid(images: Tensor, gap: int = 1) -> np.ndarray:
    """Join images to one, in a grid with white lines between them.

    Shapes: uint8 `[n, 1 or 3, height, width] -> [height, width, 3]`.
    """
    n, _, height, width = images.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    canvas = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for nth, image in enumerate(images.permute(0, 2, 3, 1).cpu().numpy()):
        y, x = nth // columns * (height + gap), nth % columns * (width + gap)
        canvas[y : y + height, x : x + width] = image
    return canvas
