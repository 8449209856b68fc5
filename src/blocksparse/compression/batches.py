"""The data of a compression: batches in memory, some of them held out, and their labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..checkpoint import bytes_of
from ..errors import BlockSparseError, warn_user
from ..sparsity.calibration.calibrate import (
    Batches,
    arguments_of,
    batch_error,
    byte_count,
    check_batches,
    count_positional,
    describe,
    sample_count,
    values_of,
    warn_of_label,
)
from ..sparsity.distillation import output_tensors
from ..surgery.model_tools import parameter_device

# More data are not read: they would have to stay in memory.
MAX_BYTES = 2**30

# Every eighth batch is held out, until the held-out ones have this number of samples. Where a sample has many rows of
# outputs, such as tokens, this number of rows is enough, with at least so many samples: the held-out data are evaluated
# about twenty times.
HELD_OUT_EVERY, MAX_HELD_OUT = 8, 1024
MAX_HELD_OUT_ROWS, MIN_HELD_OUT = 8192, 128

# Weights are fitted on at most this number of samples.
MAX_CALIBRATION = 384

# The label of rows that cross-entropy ignores.
IGNORED = -100

Loss = Callable[[Any, Any], Tensor]
"""A function of (the model's output, the batch) that returns the task loss."""


# A batch counts as this number of bytes at least, so that endless ones without tensors end too.
MIN_BYTES = 2**12


@dataclass
class Data:
    """Batches to train on and held-out ones."""

    train: list[Any]
    held_out: list[Any]

    @classmethod
    def read(cls, data: Batches) -> Data:
        """Read batches up to 1 GiB without the empty ones, and hold some out.

        Raises:
            BlockSparseError: fewer than two batches.
        """
        check_batches(data, "data")
        batches, size = [], 0
        for batch in data:
            if sample_count(batch):
                batches.append(_trainable(batch))
            size += max(byte_count(batch), MIN_BYTES)
            if size >= MAX_BYTES:
                break
        if len(batches) < 2:
            expected = "two batches or more, because one is held out (split yours, say by x.split(32))"
            raise BlockSparseError.expected("data", expected, len(batches))
        train, held_out, samples = [], [], 0
        for index, batch in enumerate(batches):
            if index % HELD_OUT_EVERY == min(HELD_OUT_EVERY, len(batches)) - 1 and samples < MAX_HELD_OUT:
                held_out.append(batch)
                samples += sample_count(batch)
            else:
                train.append(batch)
        return cls(train, held_out)

    def limit_held_out(self, rows: float) -> None:
        """Move held-out batches to those to train on if fewer are enough, as each sample has `rows` rows of outputs."""
        limit, samples = max(MIN_HELD_OUT, MAX_HELD_OUT_ROWS / max(1, rows)), 0
        for count, batch in enumerate(self.held_out, 1):
            samples += sample_count(batch)
            if samples >= limit:
                self.held_out, released = self.held_out[:count], self.held_out[count:]
                self.train += released
                break

    def checksum(self) -> str:
        """Return the sum of the bytes of all tensors, in hexadecimal digits; it does not depend on their order."""
        tensors = (each for batch in (*self.train, *self.held_out) for each in values_of(batch))
        dense = (each for each in tensors if isinstance(each, Tensor) and each.layout == torch.strided)
        sums = (np.frombuffer(bytes_of(each), np.uint8).sum(dtype=np.int64) for each in dense if not each.is_nested)
        return f"{sum(map(int, sums)):x}"

    def calibration(self) -> list[Any]:
        """Return training batches from all parts of the data, with 384 samples or a few more, to fit weights on."""
        counts = [sample_count(batch) for batch in self.train]
        every = max(1, int(sum(counts) / MAX_CALIBRATION))
        chosen, samples = [], 0
        for batch, count in zip(self.train[::every], counts[::every], strict=True):
            chosen.append(batch)
            samples += count
            if samples >= MAX_CALIBRATION:
                break
        return chosen


@dataclass
class BatchReader:
    """Splits batches into a model's arguments and labels, and computes the task loss.

    Args:
        model: the model that defines the number of arguments and the device.
        loss: the task loss. None uses the `loss` in the model's output, or cross-entropy if a batch has class labels.
    """

    model: nn.Module
    loss: Loss | None = None

    def __post_init__(self) -> None:
        self._max_args = count_positional(self.model)
        self._device = parameter_device(self.model)

    def arguments(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """Return the model's positional and keyword arguments from a batch, without labels."""
        return arguments_of(batch, self._max_args, self._device)

    @torch.no_grad()
    def run(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's output for a batch.

        Raises:
            BlockSparseError: the model fails on the batch.
        """
        args, kwargs = self.arguments(batch)
        try:
            return model(*args, **kwargs)
        except Exception as error:  # the user's module may raise anything
            raise batch_error(model, batch, error, with_label=True) from error

    def output_kind(self, model: nn.Module, batch: Any, *, warn: bool = False) -> str:
        """Return how to compare outputs: "kl" if the batch has a tensor of their classes, else "auto".

        That is an int64 tensor `[...]` for an output `[..., classes]`: the labels, or the tokens of a model with an
        embedding for each class.

        Args:
            model: the model.
            batch: a batch for it.
            warn: whether to warn if the batch has labels that the task loss cannot use.
        """
        if warn:
            warn_of_label(model, batch)
        output = self.run(model, batch)
        if warn:
            self._warn_of_unused_labels(output, batch)
        has_classes = isinstance(output, Tensor) and any(
            _are_classes(each, output)
            for each in (values_of(batch) if _predicts_tokens(model, output) else self._labels(batch))
        )
        return "kl" if has_classes else "auto"

    def rows_per_sample(self, model: nn.Module, batch: Any) -> float:
        """Return how many rows the model's first output has for each sample of a batch, such as tokens."""
        output = next(iter(output_tensors(self.run(model, batch)).values()), torch.empty(0, device="cpu"))
        return output[..., 0].numel() / sample_count(batch) if output.dim() > 1 and output.numel() else 1.0

    def _warn_of_unused_labels(self, output: Any, batch: Any) -> None:
        """Warn if the labels of a batch have no part in the task loss, and say why."""
        labels = self._labels(batch)
        if not labels or self.loss is not None or _own_loss(output) is not None:
            return
        if len(labels) > 1:
            why = f"a batch has {len(labels)} values more than the model has arguments"
        elif not isinstance(output, Tensor):
            why = f"the model returns a {type(output).__name__}, not a tensor of scores"
        elif not _are_classes(labels[0], output):
            why = f"labels of {describe(labels)} are not one class for each row of scores {list(output.shape)}"
            integers = isinstance(labels[0], Tensor) and not labels[0].is_floating_point()
            if integers and labels[0].numel() and labels[0].shape == output.shape[:-1]:
                low, high = (value.item() for value in labels[0].long().aminmax())
                why += f" (they are from {low} to {high})"
        else:
            return
        warn_user(
            f"compress: the labels are ignored, because {why}. The model is trained on the teacher's outputs alone. "
            "To use the labels, pass loss=, a function of the output and the batch.",
        )

    def count_labels(self, batches: Iterable[Any]) -> int:
        """Return how many labels each batch has.

        Raises:
            BlockSparseError: batches differ in this number, and no `loss` reads them.
        """
        counts = sorted({len(self._labels(batch)) for batch in batches})
        if self.loss is None and len(counts) > 1:
            got = f"batches with {counts[0]} and with {counts[-1]} (or pass loss=, which reads each batch)"
            raise BlockSparseError.expected("data", "the same number of labels in each batch", got)
        return counts[-1]

    def _labels(self, batch: Any) -> tuple[Any, ...]:
        """Return the values of a batch that are no arguments of the model."""
        is_tuple = isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence)
        return tuple(batch)[self._max_args :] if is_tuple and self._max_args is not None else ()

    def warn_of_unknown_classes(self, model: nn.Module, batches: Sequence[Any]) -> None:
        """Warn if the labels of some batches are ignored, because not all of them are classes as in the first batch."""
        output, labels = self.run(model, batches[0]), self._labels(batches[0])
        if self.loss is not None or len(labels) != 1 or not isinstance(output, Tensor):
            return
        if not _are_classes(labels[0], output):
            return
        classes, others = output.shape[-1], list[int]()
        for (label,) in map(self._labels, batches):
            if not isinstance(label, Tensor) or label.is_floating_point():
                continue
            known = label[label != IGNORED]
            extremes = [int(value) for value in known.aminmax()] if known.numel() else [0]
            others += extremes if min(extremes) < 0 or max(extremes) >= classes else []
        if others:
            warn_user(
                f"compress: some batches have labels from {min(others)} to {max(others)}, and the model has classes "
                f"from 0 to {classes - 1}: all labels of these batches are ignored. Write {IGNORED} for rows without "
                "a label.",
            )

    def task_loss(self, output: Any, batch: Any) -> Tensor | None:
        """Return the task loss of an output, or None if the batch has no labels and the output no loss."""
        if self.loss is not None:
            try:
                loss = self.loss(output, batch)
            except Exception as error:  # the user's function may raise anything
                got = f"{type(error).__name__}: {error}, for a batch of {describe(batch)}"
                raise BlockSparseError.expected("loss", "a function of the output and the batch", got) from error
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise BlockSparseError.expected("loss", "a function that returns a tensor of one number", type(loss))
            return loss
        if (own := _own_loss(output)) is not None:
            return own
        labels = self._labels(batch)
        if not isinstance(output, Tensor) or len(labels) != 1:
            return None
        if not _are_classes(labels[0], output) or bool((labels[0] == IGNORED).all()):
            return None
        return F.cross_entropy(output.flatten(0, -2), labels[0].long().to(output.device).flatten())


def form_of(batch: Any) -> Any:
    """Return the types of a batch and its values, and the dtypes and shapes of tensors without the first axis."""
    values = [
        (type(each), getattr(each, "dtype", None), tuple(getattr(each, "shape", ())[1:])) for each in values_of(batch)
    ]
    return type(batch), tuple(batch) if isinstance(batch, Mapping) else (), tuple(values)


def is_finite(batch: Any) -> bool:
    """Return whether the floating-point tensors of a batch are finite."""
    tensors = [each for each in values_of(batch) if isinstance(each, Tensor) and each.is_floating_point()]
    return all(bool(each.isfinite().all()) for each in tensors)


def _trainable(batch: Any) -> Any:
    """Return a batch with copies of tensors that were made in inference mode, as autograd does not accept these."""

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

    if not any(isinstance(each, Tensor) and each.is_inference() for each in values_of(batch)):
        return batch
    if isinstance(batch, Mapping):
        return {name: copy(value) for name, value in batch.items()}
    return copy(batch) if isinstance(batch, Tensor) else [copy(value) for value in batch]


def _own_loss(output: Any) -> Tensor | None:
    """Return the `loss` in a model's output, as of transformers with labels; None without one."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return own if isinstance(own, Tensor) else None


def _predicts_tokens(model: nn.Module, output: Tensor) -> bool:
    """Return whether the output could be scores of the model's tokens: an embedding has a row for each score."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return any(table.num_embeddings == output.shape[-1] for table in tables)


def _are_classes(labels: Any, output: Tensor) -> bool:
    """Return whether `labels` could be the classes of the rows of an output `[..., classes]`; -100 is no class."""
    if not isinstance(labels, Tensor) or labels.dtype not in (torch.int64, torch.int32, torch.uint8):
        return False
    if output.dim() < 2 or labels.shape != output.shape[:-1]:
        return False
    classes = labels[labels != IGNORED]
    return not classes.numel() or 0 <= int(classes.min()) <= int(classes.max()) < output.shape[-1]
