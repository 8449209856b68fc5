"""A language model of bytes, trained further to tell two classes of texts apart: end to end, not by a probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError

from ..data.reviews import Labelled, Splits, encode
from ..models.char_lm import CharLM
from ..models.text_classifier import END, TextClassifier, TextClassifierConfig
from ..option import option
from . import stored
from .classify import KIND, ClassifyTask
from .settings import by_epochs
from .text_features import digest
from .trainer import Trainer, device_of

PARTS = ("test", "validation")


@dataclass(frozen=True)
class Recipe:
    """Adam, whose rate rises over the first tenth of the steps and falls to 0 in a line."""

    epochs: int = option(2, "Of the whole run.")
    batch: int = option(32, "Texts of a step.")
    longest: int = option(512, "Bytes of a text that are read at most: its last ones.")
    dropout: float = option(0.5, "The part of the pooled states that is left out.")
    learning_rate: float = option(0.001, "The highest learning rate.", "lr")
    evaluated: str = option("test", "The part that is evaluated on: test; or validation, to choose settings.")

    def __post_init__(self) -> None:
        integer("longest", self.longest, 1)
        if self.evaluated not in PARTS:
            raise BlockSparseError.expected("evaluated", f"one of {', '.join(PARTS)}", repr(self.evaluated))


class Rows:
    """Texts as `ClassifyTask` takes them: bytes `[n, time]`, as `encode` gives them, the last `longest` of each."""

    def __init__(self, splits: Splits, longest: int, evaluated: str = "test"):
        self._train, self._held_out = splits.train, getattr(splits, evaluated)
        self.name, self.classes = splits.name, splits.classes
        self.rows, self.tested, self.features = len(self._train), len(self._held_out), longest
        self._about = {"evaluated": evaluated}

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._padded(self._train.take(rows.tolist()))

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        texts = self._held_out.texts
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # little is read beyond an end
        for start in range(0, len(order), batch):
            yield self._padded(self._held_out.take(order[start : start + batch]))

    def digest(self) -> dict[str, Any]:
        said = {"name": self.name, "classes": list(self.classes), "longest": self.features, **self._about}
        parts = {"train": self._train, "held out": self._held_out}
        return said | {name: digest(*part.texts, bytes(part.labels)) for name, part in parts.items()}

    def _padded(self, some: Labelled) -> tuple[Tensor, Tensor]:
        data = [np.frombuffer(encode(text)[-self.features :], np.uint8) for text in some.texts]
        found = np.full((len(data), max(map(len, data))), END, np.int64)
        for row, one in zip(found, data, strict=True):
            row[: len(one)] = one
        return torch.from_numpy(found), torch.tensor(some.labels)


def trainer(
    reader: CharLM,
    splits: Splits,
    run: str | Path,
    recipe: Recipe | None = None,
    seed: int = 0,
    device: str = "cpu",
    shard: bool = False,
    begun_with: str = "",
) -> Trainer:
    """A classifier that begins with a language model's weights, ready to be trained in a folder.

    Args:
        reader: the language model, which becomes a part of the classifier.
        begun_with: what its weights are; a run goes on only with the same.
    """
    recipe = recipe or Recipe()
    model = TextClassifier.of(reader, dropout=recipe.dropout, seed=seed, begun_with=begun_with)
    rows = Rows(splits, recipe.longest, recipe.evaluated)
    task = ClassifyTask(
        model, rows, recipe.epochs, recipe.batch, seed=seed, device=device_of(device), about=asdict(model.config)
    )
    task.bytes_per_step = recipe.batch * recipe.longest  # bytes, and not numbers of four
    settings = by_epochs(
        task, recipe, warmup=task.steps // 10, save_every=0, save_minutes=2.0, seed=seed, device=device, shard=shard
    )
    facts = {
        "data": splits.name,
        "tested": rows.tested,
        "epochs": recipe.epochs,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    return Trainer(task, run, settings, facts)


def load(path: str | Path) -> TextClassifier:
    """The classifier of a checkpoint, or of a run's folder, on the CPU."""

    def sizes(of: dict[str, Any]) -> tuple[str, ...]:
        return ("width", "embedding", "layers", "classes", *(("depth",) if of["cell"] == "smallworld" else ()))

    # The tensors bring the layouts.
    empty = {"pattern": "dense", "layouts": "shared", "init": "uniform"}
    return stored.load(path, KIND, "a classifier of texts", TextClassifierConfig, TextClassifier, sizes, empty)
