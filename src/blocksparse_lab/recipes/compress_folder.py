"""Compress a folder of the transformers library on a text: its batches, its held-out figure, and the new folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.conversion import report
from blocksparse.errors import BlockSparseError
from blocksparse.sparsity.distillation import Distillation

from ..data import text
from . import sparsify
from .compress import TrainedRun

# Tokens of a sample, samples of a batch, and the fraction of the samples that is held out.
LENGTH, BATCH, HELD_OUT = 128, 8, 0.1
MAX_BYTES = 4_000_000  # of the text
# Models that need whole samples, with their special tokens and separators.
WITHOUT_RUNNING_TEXT = ("SequenceClassification", "MultipleChoice", "NextSentencePrediction", "QuestionAnswering")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder of the transformers library; a run has a config.json too."""
    config = path / "config.json"
    return config.is_file() and "model_type" in checkpoint.read_json(config)


def open_folder(folder: Path, data: Any) -> TrainedRun:
    """Open a folder with a model and its tokenizer, and a text to compress it on.

    A causal language model is also trained on the next tokens. Others only learn to agree with the dense model.

    Raises:
        BlockSparseError: no text, one of fewer than two batches, a folder that transformers cannot load, or a model
            that needs whole samples, such as a sequence classifier.
    """
    if data is None or not Path(str(data)).is_file():
        raise BlockSparseError.expected("data", "--data FILE, a text to compress the model on", data)
    stored = sparsify.open_model(folder)
    model: Any = stored.model
    if type(model).__name__.endswith(WITHOUT_RUNNING_TEXT):
        raise BlockSparseError(
            f"{folder}: {type(model).__name__} needs whole samples with special tokens, but this command makes running "
            "text. In Python, call bs.compress(model, batches) with your own batches, such as "
            "dict(tokenizer(texts, padding=True, return_tensors='pt'))."
        )
    samples = _tokens(folder, text.read(Path(str(data)))[:MAX_BYTES], _length(model))
    held_out = samples[-max(1, int(HELD_OUT * len(samples))) :]
    trained = samples[: -len(held_out)]
    if len(trained) < 2 * BATCH:
        needed = 2 * BATCH * samples.shape[1] * 10 // 9
        raise BlockSparseError.expected("data", f"a text of {needed:,} tokens or more", f"{samples.numel():,}")
    is_causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    def batch_of(rows: Tensor) -> dict[str, Tensor]:
        return {"input_ids": rows, "labels": rows} if is_causal else {"input_ids": rows}

    def batches() -> Iterator[dict[str, Tensor]]:
        return map(batch_of, trained[torch.randperm(len(trained))].split(BATCH))

    @torch.no_grad()
    def figure(other: nn.Module) -> float:
        parts = held_out.split(BATCH)
        if is_causal:
            return sum(float(other(**batch_of(rows)).loss) * len(rows) for rows in parts) / len(held_out)
        judge = Distillation(model, other)
        agreed = [judge.agreement(judge.run_student(rows), judge.run_teacher(rows)) * len(rows) for rows in parts]
        return sum(agreed) / len(held_out)

    def save(other: nn.Module, out: Path) -> list[str]:
        sparsify.save(stored, other, report(other, 64), out)
        return [sparsify.FILE, "report.json"]

    unit = "nats per token" if is_causal else "agreement with the dense model"
    return TrainedRun(model, unit, figure, batches, save)


def _tokens(folder: Path, content: bytes, length: int) -> Tensor:
    """Return a text as samples of equal length, int64 `[samples, length]`."""
    import transformers

    if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make an empty one
        raise BlockSparseError.expected(str(folder), "the tokenizer of the model", f"none of {', '.join(TOKENIZERS)}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # depends on the files
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise BlockSparseError.expected(str(folder), "the tokenizer of the model", first[0]) from error
    ids = tokenizer(content.decode("utf-8", "replace"), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def _length(model: Any) -> int:
    """Return the number of tokens of a sample, which does not exceed the positions of the model."""
    return min(LENGTH, getattr(model.config, "max_position_embeddings", None) or LENGTH)
