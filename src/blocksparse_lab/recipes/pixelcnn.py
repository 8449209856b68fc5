"""PixelCNN++ on small images: the task for the trainer, and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
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
from ..training import stored
from ..training.callback import EpochTask
from ..training.memory import check_room
from ..training.settings import Settings
from ..training.trainer import Trainer, device_of

KIND = "pixelcnn"

# The most pixels of a side: the network fits any size, so that it is read from the file.
LARGEST = 1024

# Images that gains and biases begin with.
INITIAL_BATCH = 64


@dataclass(frozen=True)
class Network:
    """The arguments of a PixelCNN by their names, and the seed of its weights; the sizes are those of the paper."""

    filters: int = option(160, "Channels of all layers; 160 in the paper.")
    resnets: int = option(5, "Gated residual layers of each resolution; 5 in the paper.")
    mixtures: int = option(10, "Logistics of a pixel.")
    dropout: float = option(0.5, "Within each gated residual layer.")
    sparse: int | None = option(None, "Groups of channels of each layer; dense unless given.")
    block_size: int | None = option(
        None, "Of groups: our kernels, in such blocks; else PyTorch's grouped convolutions."
    )
    depth: int = option(1, "Times as many gated residual layers.")
    seed: int = option(0, "Of weights, order and dropout.")

    def made(self, channels: int) -> PixelCNN:
        """The network for images of `channels`, as drawn; the global generator is left as it was."""
        for name, size in (("filters", self.filters), ("resnets", self.resnets), ("depth", self.depth)):
            integer(name, size, 1)
        # Of both streams and ways: the gated layers' convolutions, and those that halve and double the size.
        groups = self.sparse if is_int(self.sparse) and self.sparse else 1
        least = self.filters**2 * (6 * 62 * self.resnets * self.depth / groups + 40)
        check_room(f"{self.filters:,} filters, {self.resnets * self.depth:,} deep", least)
        options = asdict(self)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.pop("seed"))
            return PixelCNN(channels=channels, **options)


@dataclass(frozen=True)
class SmallNetwork(Network):
    """A network for a look, and the one of the command line unless told otherwise."""

    filters: int = option(32, "Channels of all layers; 160 in the paper.")
    resnets: int = option(1, "Gated residual layers of each resolution; 5 in the paper.")


@dataclass(frozen=True)
class PixelSettings(Settings):
    """Adam with the betas of the paper, a rate that falls by a factor per step, Polyak's means."""

    learning_rate: float = option(1e-3, "The learning rate at first.", "lr")
    warmup: int = option(0, "Steps over which it rises.")
    decay: str = option("none", "How it falls besides: linear or cosine, to 0, or none.")
    decay_per_step: float = option(0.999995, "By which the learning rate is multiplied after each step.")
    betas: tuple[float, float] = (0.95, 0.9995)
    weight_decay: float = 0.0
    ema: float = option(0.9995, "Evaluate a running mean of the weights of this decay; 0: none.")
    clip: float = option(0.0, "The gradient's largest norm; 0 for any.")
    eval_every: int = option(1000, "Steps between evaluations; 0: at the end.")
    seed: int = option(0, "Of weights, order and dropout.")
    cuda_graph: bool = False


settings = PixelSettings


@dataclass(frozen=True)
class Batches:
    """What a step and an evaluation read."""

    batch: int = option(16, "Images of a step.")
    evaluated: int = option(0, "Test images per evaluation, the first ones; 0 for all.", "eval-images")


class PixelCNNTask(EpochTask):
    """The negative logarithm of the probability of batches of images, in another order in each epoch.

    Args:
        model: a `PixelCNN`; or any module with its `log_prob(images)`.
        images: to train and to evaluate on.
        batch: images of a step.
        evaluated: test images that an evaluation takes, the first ones; 0 for all.
        about: what the model is, ready for JSON.
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
        """The images of a step, `[batch, channels, height, width]` from -1 to 1."""
        return self.ready(self._train[torch.from_numpy(self.rows_of(step))])

    def ready(self, images: Tensor) -> Tensor:
        """Bytes as the model takes them."""
        there = images.to(self.device).contiguous(memory_format=torch.channels_last)
        return logistic_mixture.scaled(there)

    def loss(self, step: int) -> Tensor:
        """The loss of a step, in nats per colour of a pixel."""
        images = self.take(step)
        return -self.model.log_prob(images).sum() / images.numel()  # type: ignore[operator]

    def evaluate(self, model: nn.Module) -> float:
        """Bits per dimension of the test images."""
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


def trainer(
    network: Network, images: Images, run: str | Path, how: Settings, batch: int = 16, evaluated: int = 0
) -> Trainer:
    """A network, begun by some of the images, ready to be trained in a folder; the seed of `how` is that of the images'
    order and of the dropout."""
    model = network.made(images.shape[0])
    about = asdict(network)
    task = PixelCNNTask(model, images, batch, evaluated, how.seed, device_of(how.device), about)
    if not (Path(run) / "last.safetensors").exists():  # else all of it is there
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(network.seed)
            model.initialise(task.ready(images.train[: min(INITIAL_BATCH, len(images.train))]))
    facts = {
        "data": images.name,
        "tested": evaluated or len(images.test),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return Trainer(task, run, how, facts)


def load(path: str | Path) -> tuple[PixelCNN, tuple[int, int, int]]:
    """The network of a checkpoint, or of a run's folder, and the shape of its images, on the CPU; with the mean
    parameters if there are any."""
    path, tensors, task = stored.read(path, KIND, "a PixelCNN")
    config, data = (
        stored.config_of(path, task, {field.name for field in fields(Network)}, "a PixelCNN"),
        task.get("data"),
    )
    shape = data.get("shape") if isinstance(data, dict) else None
    if not isinstance(shape, list) or len(shape) != 3:
        raise BlockSparseError.expected(str(path), "images of three dimensions", f"{shape!r:.99}")
    usual = asdict(Network()) | config
    sizes = {name: usual[name] for name in ("filters", "resnets", "depth", "mixtures")} | {"channels": shape[0]}
    checkpoint.check_sizes(path, tensors, sizes)
    state = part(tensors, "model.") | part(tensors, "ema.")
    # Of the filters by the filters there is a dense weight, and of each layer there are tensors.
    least = max(usual["filters"] ** 2, usual["resnets"] * usual["depth"] * usual["filters"])
    if (there := sum(tensor.numel() for tensor in state.values())) < least:
        raise BlockSparseError.expected(str(path), f"{least:,} parameters or more, for {config}", f"{there:,}")
    for side in shape[1:]:
        integer(f"{path}, a side of its images", side, 1, LARGEST + 1)
    network = Network(**(config | {"seed": 0}))  # all that it draws is in the tensors
    with stored.parameters_of(path, config):
        with torch.device("meta"):
            model = network.made(shape[0])
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
    """Images drawn pixel by pixel, in the order of reading: uint8 `[count, channels, height, width]`.

    For each pixel only the four rows are computed that it lies in: each layer keeps its results for those above
    (`bs.nn.bands`), those below are not there yet. So of 32 rows 28 are not computed again.
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
            drawing(band)  # all of it, for the layers to keep its last rows
            below.next()
    return logistic_mixture.levels(images)


def grid(images: Tensor, gap: int = 1) -> np.ndarray:
    """Images side by side in rows, about as many as columns, with white pixels between them, as one.

    Shapes: uint8 `[n, 1 or 3, height, width] -> [height, width, 3]`.
    """
    n, _, height, width = images.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    found = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for nth, image in enumerate(images.permute(0, 2, 3, 1).cpu().numpy()):
        y, x = nth // columns * (height + gap), nth % columns * (width + gap)
        found[y : y + height, x : x + width] = image
    return found
