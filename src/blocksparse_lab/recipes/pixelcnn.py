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
from .memory import check_room
from .settings import Settings
from .trainer import Trainer, device_of

KIND = "pixelcnn"

# The most pixels of a side: the network fits any size, so that it is read from the file.
LARGEST = 1024

# Images that gains and biases begin with.
INITIAL_BATCH = 64


@dataclass(frozen=True)
class Network:
    """The arguments of a PixelCNN by their names, and the seed of its weights."""

    filters: int = 160
    resnets: int = 5
    mixtures: int = 10
    dropout: float = 0.5
    sparse: int | None = None
    block_size: int | None = None
    depth: int = 1
    seed: int = 0

    def made(self, channels: int) -> PixelCNN:
        """The network for images of `channels`, as drawn; the global generator is left as it was.

        Raises:
            BlockSparseError: as `PixelCNN`; more than there is memory for.
        """
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


class PixelCNNTask:
    """The negative logarithm of the probability of batches of images, in another order in each epoch.

    The order, and so each batch, is determined by the seed and the step; images that do not fill a batch are left out
    of their epoch.

    Args:
        model: a `PixelCNN`; or any module with its `log_prob(images)`.
        images: to train and to evaluate on.
        batch: images of a step.
        evaluated: test images that an evaluation takes, the first ones; 0 for all.
        seed: of the order.
        device: of model and data.
        about: what the model is, ready for JSON.

    Raises:
        BlockSparseError: a batch larger than the data, fewer test images than are to be evaluated on, images whose
            height or width is not divisible by 4.

    >>> import torch
    >>> from blocksparse_lab.data.images import Images
    >>> from blocksparse_lab.recipes.pixelcnn import Network, PixelCNNTask
    >>> pixels, labels = torch.randint(256, (20, 1, 8, 8)).to(torch.uint8), torch.zeros(20, dtype=torch.int64)
    >>> noise = Images("noise", pixels, labels, pixels, labels, ("a", "b"))
    >>> task = PixelCNNTask(Network(8, 1).made(channels=1), noise, batch=4)
    >>> task.loss(0).item() > 4  # nats; log(256) = 5.5 at best, for noise
    True
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
        if not 1 <= batch <= len(images.train):
            wanted = f"an int from 1 to the images to train on, {len(images.train):,}"
            raise BlockSparseError.expected("batch", wanted, batch)
        if not 0 <= evaluated <= len(images.test):
            wanted = f"an int from 0, for all, to the test images, {len(images.test):,}"
            raise BlockSparseError.expected("evaluated", wanted, evaluated)
        if any(size % STRIDE for size in images.shape[1:]):
            raise BlockSparseError.expected(
                images.name, f"images of height and width divisible by {STRIDE}", tuple(images.shape[1:])
            )
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.batch, self.seed = batch, seed
        self.steps_per_epoch = len(images.train) // batch
        self.bytes_per_step = batch * images.shape.numel()
        self._train, self._test = images.train, images.test[: evaluated or None]
        self._about = about if about is not None else {"repr": repr(model)}
        self._digest = images.digest()
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def take(self, step: int) -> Tensor:
        """The images of a step, `[batch, channels, height, width]` from -1 to 1."""
        epoch, nth = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self._train))
        rows = self._order[1][nth * self.batch : (nth + 1) * self.batch]
        return self.ready(self._train[torch.from_numpy(rows)])

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

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass

    def about(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "model": self._about,
            "data": self._digest,
            "batch": self.batch,
            "evaluated": len(self._test),
        }


def settings(steps: int, **other: Any) -> Settings:
    """How it is trained: Adam with the betas of the paper, a rate that falls by a factor per step, Polyak's means.

    Args:
        steps: of the run.
        other: further settings, by the names of `Settings`.

    >>> from blocksparse_lab.recipes import pixelcnn
    >>> pixelcnn.settings(1000).ema
    0.9995
    """
    usual: dict[str, Any] = {
        "learning_rate": 1e-3, "warmup": 0, "decay": "none", "decay_per_step": 0.999995, "betas": (0.95, 0.9995),
        "ema": 0.9995, "clip": 0.0,
    }  # fmt: skip
    return Settings(steps=steps, **(usual | other))


def trainer(
    network: Network, images: Images, run: str | Path, how: Settings, batch: int = 16, evaluated: int = 0
) -> Trainer:
    """A network, begun by some of the images, ready to be trained in a folder.

    Args:
        network: what it is.
        images: to train and to test on.
        run: the folder.
        how: it is trained. Its seed is that of the images' order and of the dropout.
        batch, evaluated: of `PixelCNNTask`.

    Raises:
        BlockSparseError: as `PixelCNN` and `PixelCNNTask`.
    """
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
    parameters if there are any.

    Raises:
        BlockSparseError: no such checkpoint, a broken one, one of something else.
    """
    path = Path(path)
    path = path / "last.safetensors" if path.is_dir() else path
    tensors, about = checkpoint.load(path)
    task = checkpoint.task_of(about)
    if task.get("kind") != KIND:
        raise BlockSparseError.expected(str(path), "a PixelCNN", task.get("kind", "something else"))
    config, data = task.get("model"), task.get("data")
    shape = data.get("shape") if isinstance(data, dict) else None
    names = {field.name for field in fields(Network)}
    if not isinstance(config, dict) or not config.keys() <= names or not isinstance(shape, list) or len(shape) != 3:
        raise BlockSparseError.expected(
            str(path), "the configuration of a PixelCNN of this version", f"{config!r:.200}, images {shape!r:.99}"
        )
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
    try:
        with torch.device("meta"):
            model = network.made(shape[0])
        model.load_state_dict(state, assign=True)
    except (RuntimeError, TypeError, BlockSparseError) as error:
        raise BlockSparseError.expected(str(path), f"parameters of {config}", error) from error
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
    """Images drawn pixel by pixel, in the order of reading.

    For each pixel only the four rows are computed that it lies in: each layer keeps its results for those above
    (`bs.nn.bands`), those below are not there yet. So of 32 rows 28 are not computed again.

    Args:
        model: what draws.
        count: images.
        height, width: of them, divisible by 4.
        seed: of the draws.
        progress: called after each pixel with the number done and the total.

    Returns:
        uint8 `[count, channels, height, width]`.

    Raises:
        BlockSparseError: no image, a size that is not divisible by 4.

    >>> from blocksparse_lab.models.pixelcnn import PixelCNN
    >>> from blocksparse_lab.recipes.pixelcnn import sample
    >>> sample(PixelCNN(8, 1).eval(), count=2, height=4, width=4).shape
    torch.Size([2, 3, 4, 4])
    """
    if count < 1:
        raise BlockSparseError.expected("count", "a positive int", count)
    if height < 1 or width < 1 or height % STRIDE or width % STRIDE:
        raise BlockSparseError.expected("size", f"positive and divisible by {STRIDE}", (height, width))
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
    """Images side by side in rows, about as many as columns, as one: uint8 `[height, width, 3]`.

    Args:
        images: uint8 `[n, 1 or 3, height, width]`.
        gap: white pixels between them.

    >>> import torch
    >>> from blocksparse_lab.recipes.pixelcnn import grid
    >>> grid(torch.zeros(6, 1, 8, 8, dtype=torch.uint8)).shape
    (17, 26, 3)
    """
    n, _, height, width = images.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    found = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for nth, image in enumerate(images.permute(0, 2, 3, 1).cpu().numpy()):
        y, x = nth // columns * (height + gap), nth % columns * (width + gap)
        found[y : y + height, x : x + width] = image
    return found
