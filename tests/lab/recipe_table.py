"""A tiny run of each recipe, with a checkpoint after each step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from blocksparse_lab.data import reviews, text
from blocksparse_lab.data.images import Images
from blocksparse_lab.data.synthetic import Synthetic, growing_graph
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
from blocksparse_lab.models.gpt import GPTConfig
from blocksparse_lab.recipes import charlm, dcnn, finetune, gpt, mlp, pixelcnn, resnet
from blocksparse_lab.recipes.classify import ClassifyTask
from blocksparse_lab.recipes.prune import PruneTask, Pruning
from blocksparse_lab.training.settings import EpochSettings
from blocksparse_lab.training.trainer import Trainer

SPARSE_LSTM = CharLMConfig(cell="mlstm", width=32, embedding=8, pattern="barabasi_albert", block_size=8, m=1)


@dataclass(frozen=True)
class Recipe:
    """`build(run, **changes)` makes a trainer with changed settings; `load(run)` the model of a checkpoint, if known.

    `own` is a change of a setting that only this recipe has, `model` describes what `load` expects.
    """

    build: Callable[..., Trainer]
    load: Callable[[Path], Any] | None = None
    own: dict[str, Any] = field(default_factory=dict)
    model: str = ""


def corpus() -> text.Text:
    return text.split(bytes(random.Random(0).choices(b"a rose is ", k=4000)), context=16)


def noise(side: int = 8) -> Images:
    pixels = torch.randint(256, (40, 1, side, side), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    labels = torch.arange(40) % 2
    return Images("noise", pixels[:24], labels[:24], pixels[24:], labels[24:], ("a", "b"))


def rows() -> Synthetic:
    return Synthetic(features=40, rows=64, tested=20)


def build_charlm(run: Path, **changes: Any) -> Trainer:
    pace = {"warmup": 5, "log_every": 4, "eval_every": 10, "save_every": 1}
    settings = charlm.CharLMSettings(steps=25, ema=0.9, batch=4, seq=16, model=SPARSE_LSTM, **pace)
    return charlm.trainer(replace(settings, **changes), corpus(), run)


def build_gpt(run: Path, **changes: Any) -> Trainer:
    model = GPTConfig(width=32, layers=2, heads=2, context=16, density=0.3, block_size=8, method="rigl")
    settings = gpt.GPTSettings(
        steps=10, ema=0.5, batch=4, warmup=2, log_every=2, eval_every=4, save_every=1, model=model
    )
    return gpt.trainer(replace(settings, **changes), corpus(), run)


def build_mlp(run: Path, **changes: Any) -> Trainer:
    settings = mlp.MLPSettings(hidden=(48, 48), epsilon=4, epochs=8, batch=16)
    return mlp.trainer(replace(settings, **changes), rows(), run, save_every=1)


def build_resnet(run: Path, **changes: Any) -> Trainer:
    settings = resnet.ResNetSettings(width=8, blocks=(1, 1), density=0.5, block_size=4, epochs=3, batch=8)
    return resnet.trainer(replace(settings, **changes), noise(), run, save_every=1)


def build_pixelcnn(run: Path, **changes: Any) -> Trainer:
    model = pixelcnn.PixelCNNConfig(8, 1, sparse=2, block_size=4)
    pace = {"log_every": 2, "eval_every": 4, "save_every": 1}
    settings = pixelcnn.PixelCNNSettings(6, model=model, batch=4, evaluated=4, ema=0.9, **pace)
    return pixelcnn.trainer(replace(settings, **changes), noise(4), run)


def build_finetune(run: Path, **changes: Any) -> Trainer:
    some = reviews.Labelled(["bad", "so good", "not bad", "good", "a bad one", "the good one"] * 4, [0, 1] * 12)
    splits = reviews.Splits("opinions", ("bad", "good"), some, some, some)
    settings = finetune.FinetuneSettings(epochs=2, batch=8, longest=12)
    return finetune.trainer(CharLM(SPARSE_LSTM), splits, run, replace(settings, **changes))


def build_dcnn(run: Path, **changes: Any) -> Trainer:
    settings = dcnn.DCNNSettings(epochs=4, batch=20, threshold=0.05)
    return dcnn.trainer(replace(settings, **changes), growing_graph(nodes=120, features=16), run)


def build_prune(run: Path, **changes: Any) -> Trainer:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    inner = ClassifyTask(net, Synthetic(features=32, rows=64, tested=20), epochs=6, batch=16)
    task = PruneTask(inner, Pruning("gradual", density=0.25, block_size=8, skip=("2",)), inner.steps)
    settings = EpochSettings(steps=inner.steps, epochs=6, batch=16, log_every=5, eval_every=8, save_every=1)
    return Trainer(task, run, replace(settings, **changes))


RECIPES = {
    "charlm": Recipe(build_charlm, charlm.load, {"seq": 8}, "a recurrent language model of bytes"),
    "gpt": Recipe(build_gpt, gpt.load, {"batch": 5}, "a transformer of bytes"),
    "mlp": Recipe(build_mlp, own={"zeta": 0.2}),
    "resnet": Recipe(build_resnet, resnet.load, {"width": 16}, "a residual network"),
    "pixelcnn": Recipe(build_pixelcnn, lambda run: pixelcnn.load(run)[0], {"evaluated": 8}, "a PixelCNN"),
    "finetune": Recipe(build_finetune, finetune.load, {"longest": 11}, "a classifier of texts"),
    "dcnn": Recipe(build_dcnn, own={"threshold": 0.1}),
    "prune": Recipe(build_prune, own={"batch": 8}),
}
