"""Compress the model of a run: its batches, its held-out figure, and the checkpoint of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse import checkpoint, compression
from blocksparse.compression import CompressionResult
from blocksparse.conversion.sparsify import survey_weights
from blocksparse.errors import BlockSparseError

from ..data import corpora, images, tables, text
from ..models.gpt import GPT
from ..training.callback import Task
from ..training.streams import Streams
from . import charlm, classify, gpt, language_model, mlp, resnet

CHECKPOINT, PICTURE = "last.safetensors", "curve.png"

# Batches that `compress` reads from a text; more would need gigabytes for the teacher's outputs.
TEXT_BATCHES = 512


@dataclass(frozen=True)
class TrainedRun:
    """A trained model, its data and its held-out figure.

    Args:
        model: the model, in evaluation mode, as `compress` sees it: a batch's inputs to scores of classes.
        unit: the unit of the held-out figure.
        held_out: returns the held-out figure of a model.
        batches: returns batches to train on.
        save: writes a compressed model into a folder, and returns the names of the files.
    """

    model: nn.Module
    unit: str
    held_out: Callable[[nn.Module], float]
    batches: Callable[[], Iterator[Any]]
    save: Callable[[nn.Module, Path], list[str]]


class NextByte(nn.Module):
    """A language model without its state: bytes `[steps, batch]` to scores `[steps, batch, 256]`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.model(text)[0]
        return scores


def open_run(run: str | Path, data: str | Path | None = None, data_dir: str | Path | None = None) -> TrainedRun:
    """Open a finished run of `blocksparse train charlm`, `gpt`, `resnet` or `mlp`, with its data.

    Args:
        run: the folder.
        data: a file or a name of the data; by default those that the run names.
        data_dir: folder with the data's files; by default they are downloaded.

    Raises:
        BlockSparseError: a folder without a finished run of these kinds, or data that are not the run's.
    """
    run = Path(run)
    if not (run / "result.json").is_file():
        expected = "the folder of a finished run of blocksparse train charlm, gpt, resnet or mlp"
        raise BlockSparseError.expected("run", expected, f"{run}, without result.json")
    result = checkpoint.read_json(run / "result.json")
    task, facts = (result.get(name) for name in ("task", "facts"))
    if not isinstance(task, dict) or not isinstance(facts, dict):
        raise BlockSparseError.expected(str(run / "result.json"), "a task and facts", sorted(result))
    kind = task.get("kind")
    if kind in (charlm.KIND, gpt.KIND):
        return _text_run(run, task, data or facts.get("text"), data_dir)
    if kind == classify.KIND and isinstance(task.get("model"), dict):
        return _rows_run(run, task, data or facts.get("data"), data_dir)
    raise BlockSparseError.expected("run", "a run of blocksparse train charlm, gpt, resnet or mlp", kind)


def compress(
    run: TrainedRun, out: str | Path, skip: Sequence[str] = (), **options: Any
) -> tuple[CompressionResult, list[str]]:
    """Compress a run's model into a folder: its files, `curve.json`, and a picture if matplotlib is installed.

    Return the result and the names of the model's files. The options are those of `blocksparse.compress`. The same call
    resumes an interrupted one.
    """
    out = Path(out)
    prefix = "model." * isinstance(run.model, NextByte)
    skip = tuple(prefix + name for name in skip)
    result = compression.compress(run.model, run.batches(), folder=out, skip=skip, **options)
    if find_spec("matplotlib") is not None:
        result.plot(out / PICTURE)
    return result, run.save(result.model, out)


def _trained_run(
    model: nn.Module, task: Task, kind: dict[str, Any], batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
) -> TrainedRun:
    """Return a run of `blocksparse train`, whose checkpoint names the model's kind."""

    @torch.no_grad()
    def held_out(model: nn.Module) -> float:
        return task.evaluate(_inner(model))

    def save(model: nn.Module, out: Path) -> list[str]:
        tensors = {f"model.{name}": tensor for name, tensor in _inner(model).state_dict().items()}
        checkpoint.save(out / CHECKPOINT, tensors, {"task": kind, "sparsified": True})
        return [CHECKPOINT]

    survey = survey_weights(model, 1, ())
    if survey.sparse and not survey.weights:
        got = "one whose weights are all block-sparse: train it dense first"
        raise BlockSparseError.expected("run", "a run with dense weights to compress", got)
    return TrainedRun(model, task.unit, held_out, batches, save)


def _inner(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, NextByte) else model


def _text_run(run: Path, about: dict[str, Any], data: Any, data_dir: str | Path | None) -> TrainedRun:
    """Open the run of a language model."""
    model = language_model.load(run)
    content, name = _read_text(data, data_dir), str(data)
    sizes = about.get("text")
    if not isinstance(sizes, dict) or sizes.get("train", 0) + sizes.get("held_out", 0) != len(content):
        raise _other_data(name, sizes, f"{len(content):,} bytes")
    parts = text.split(content, 1, name=name, held_out=(sizes["held_out"] + 0.5) / len(content))
    batch, evaluated = about["batch"], about["evaluated"]
    task: Streams
    if isinstance(model, GPT):
        task = gpt.GPTTask(model, parts, 1, batch, evaluated)
    else:
        task = charlm.CharLMTask(model, parts, batch, about["seq"], evaluated)
    if task.about()["text"] != sizes:
        raise _other_data(name, sizes, task.about()["text"])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        count = min(TEXT_BATCHES, task.chunks // batch)
        for step in torch.randperm(task.chunks // batch, generator=torch.Generator().manual_seed(0))[:count].tolist():
            chunk = task.chunk(step)[0].long()
            yield chunk[:-1], chunk[1:]

    kind = {"kind": about["kind"], "model": asdict(model.config)}
    return _trained_run(NextByte(model).eval(), task, kind, batches)


def _read_text(data: Any, data_dir: str | Path | None) -> bytes:
    """Read a text by the path of its file or by its name."""
    if Path(str(data)).is_file():
        return text.read(Path(str(data)))
    expected = "--data FILE, the text of the run"
    if data not in corpora.NAMES:
        raise BlockSparseError.expected("data", expected, f"{data!r}, which is not here")
    try:
        return corpora.load(data, data_dir)
    except BlockSparseError as error:
        raise BlockSparseError.expected("data", expected, f"{data!r} ({error})") from error


def _rows_run(run: Path, about: dict[str, Any], data: Any, data_dir: str | Path | None) -> TrainedRun:
    """Open the run of a classifier of images or rows."""
    config, name = about["model"], str(data)
    model: nn.Module
    task: classify.ClassifyTask
    if config.get("network") == resnet.NETWORK:
        model = resnet.load(run)
        rows: classify.Data = resnet.ImageRows(images.load(name, data_dir))
        task = resnet.ImageTask(model, rows, 1, about["batch"], about=config)
    elif "sizes" in config:
        model, rows = mlp.load(run), tables.load(name, data_dir)
        task = classify.ClassifyTask(model, rows, 1, about["batch"], about=config)
    else:
        raise BlockSparseError.expected("run", "a run of blocksparse train charlm, gpt, resnet or mlp", "another one")
    if task.about()["data"] != about.get("data"):
        raise _other_data(name, about.get("data"), task.about()["data"])
    return _trained_run(
        model, task, {"kind": about["kind"], "model": config}, lambda: map(task.take, range(task.steps_per_epoch))
    )


def _other_data(name: str, expected: Any, got: Any) -> BlockSparseError:
    """Return the error for data that are not those of the run."""
    return BlockSparseError.expected("data", f"the data that the run was trained on, {expected}", f"{name}: {got}")
