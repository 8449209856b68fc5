"""Fine-tune a language model of bytes end to end to classify texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse import checkpoint
from blocksparse.checked import integer, number

from ..data.reviews import Labelled, Splits, encode
from ..models.char_lm import CharLM
from ..models.text_classifier import END, TextClassifier, TextClassifierConfig
from ..option import option
from ..training import saved_models
from ..training.settings import EpochSettings
from ..training.trainer import Trainer, device_of
from .classify import KIND, ClassifyTask
from .text_features import Progress, digest

TESTED = "tested.json"


@dataclass(frozen=True)
class FinetuneSettings(EpochSettings):
    """Adam, whose rate rises over three tenths of the first epoch and falls to 0 in a line."""

    epochs: int = option(3, "Epochs.")
    batch: int = option(32, "Texts per step.")
    longest: int = option(512, "Read at most this many bytes of a text, its last ones.")
    dropout: float = option(0.5, "Dropout of the pooled states.")
    learning_rate: float = option(0.002, "The highest learning rate.", "lr")
    dtype: str = option("float32", "float32, or bfloat16 by autocast.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch", "longest"):
            integer(name, getattr(self, name), 1)
        for name in ("dropout", "learning_rate"):
            number(name, getattr(self, name), 0)


class TextRows:
    """Texts for `ClassifyTask`: the last `longest` bytes of each, `[n, time]`; the validation part is held out."""

    def __init__(self, splits: Splits, longest: int):
        self._splits, self.name, self.classes = splits, splits.name, splits.classes
        self.rows, self.tested, self.features = len(splits.train), len(splits.validation), longest

    def take(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return padded(self._splits.train.take(rows.tolist()), self.features)

    def held_out(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return in_batches(self._splits.validation, self.features, batch)

    def digest(self) -> dict[str, Any]:
        parts = {name: getattr(self._splits, name) for name in ("train", "validation", "test")}
        digests = {name: digest(*part.texts, bytes(part.labels)) for name, part in parts.items()}
        return {"name": self.name, "classes": list(self.classes), "longest": self.features, **digests}


def in_batches(some: Labelled, longest: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield texts of similar length together, to avoid padding, with their labels."""
    order = sorted(range(len(some)), key=lambda row: len(some.texts[row]))
    for start in range(0, len(order), batch):
        yield padded(some.take(order[start : start + batch]), longest)


def padded(some: Labelled, longest: int) -> tuple[Tensor, Tensor]:
    """Return the last bytes of texts, `[texts, time]`, and their labels."""
    data = [np.frombuffer(encode(text)[-longest:], np.uint8) for text in some.texts]
    filled = np.full((len(data), max(map(len, data))), END, np.int64)
    for row, one in zip(filled, data, strict=True):
        row[: len(one)] = one
    return torch.from_numpy(filled), torch.tensor(some.labels)


def trainer(
    reader: CharLM,
    splits: Splits,
    run: str | Path,
    settings: FinetuneSettings | None = None,
    begun_with: str = "",
) -> Trainer:
    """Return a trainer of a classifier that starts with a language model's weights.

    Args:
        reader: the language model; it becomes a part of the classifier, in float32.
        begun_with: identifies its weights; a run resumes only with the same ones.
    """
    s = settings or FinetuneSettings()
    model = TextClassifier.of(reader.float(), s.seed, dropout=s.dropout, begun_with=begun_with)
    rows = TextRows(splits, s.longest)
    device, about = device_of(s.device), asdict(model.config)
    task = ClassifyTask(model, rows, s.epochs, s.batch, seed=s.seed, device=device, about=about)
    task.unit, task.samples = "% validation error", "texts"
    task.bytes_per_step = s.batch * s.longest  # bytes, not floats
    facts = {"data": splits.name, "epochs": s.epochs, "parameters": sum(p.numel() for p in model.parameters())}
    epoch = task.steps_per_epoch
    s = s.in_epochs(epoch, warmup=3 * epoch // 10, save_every=0, save_minutes=2.0)
    return Trainer(task, run, s, facts)


def evaluate(run: str | Path, splits: Splits, device: str = "cpu", progress: Progress | None = None) -> float:
    """Return the error rate of a finished run on the test part in %, and save it in the run as `tested.json`.

    Training evaluates on the validation part, by which settings are chosen.
    """
    wrong, count = 0, 0
    model = load(run).to(device_of(device))
    task = checkpoint.task_of(checkpoint.about(Path(run) / "last.safetensors"))
    with torch.inference_mode():
        for text, labels in in_batches(splits.test, task["data"]["longest"], 4 * task["batch"]):
            predicted = model(text.to(device)).argmax(1).cpu()
            wrong, count = wrong + int((predicted != labels).sum()), count + len(labels)
            if progress is not None:
                progress(count, len(splits.test))
    results = {"test error": 100 * wrong / count, "texts": count}
    checkpoint.write_text(Path(run) / TESTED, f"{json.dumps(results)}\n")
    return results["test error"]


def load(path: str | Path) -> TextClassifier:
    """Load the classifier of a checkpoint or run folder on the CPU."""

    def sizes(config: dict[str, Any]) -> tuple[str, ...]:
        return ("width", "embedding", "layers", "classes", *(("depth",) if config["cell"] == "smallworld" else ()))

    # The tensors bring the layouts.
    empty = {"pattern": "dense", "layouts": "shared", "init": "uniform"}
    return saved_models.load_model(
        path, KIND, "a classifier of texts", TextClassifierConfig, TextClassifier, sizes, empty
    )
