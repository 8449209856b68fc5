"""Measure how a classifier's answer depends on circular shifts of an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blocksparse.errors import BlockSparseError

_AT_ONCE = 256


@dataclass(frozen=True)
class Consistency:
    """`agreement` is the mean probability that two shifts of an image get the same class, `difference` the largest
    change of a logit by a shift."""

    agreement: float
    difference: float
    images: int
    shifts: int


@torch.no_grad()
def consistency(model: nn.Module, images: Tensor, progress: Callable[[int, int], None] | None = None) -> Consistency:
    """Measure the consistency of a model on images, each at all of its height * width circular shifts.

    Nothing is drawn: if n_k of the S shifts of an image get class k, two shifts agree with probability
    sum_k (n_k / S)^2.

    Args:
        model: maps `[n, channels, height, width]` to logits `[n, classes]`; put in evaluation mode.
        images: `[n, channels, height, width]`, one or more, as the model's input.

    Source: Zhang, Making convolutional networks shift-invariant again (2019), and Chaman, Dokmanic, Truly
    shift-invariant convolutional neural networks (2021), who sample the shifts.
    """
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.numel():
        got = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise BlockSparseError.expected("images", "[n, channels, height, width], one or more", got)
    model.eval()
    shifts = images.shape[2] * images.shape[3]
    agreement = difference = 0.0
    for done, image in enumerate(images, start=1):
        logits = torch.cat([model(some) for some in all_shifts(image).split(_AT_ONCE)])
        counts = logits.argmax(1).bincount().double()
        agreement += float((counts / shifts).square().sum()) / len(images)
        difference = max(difference, float((logits - logits[0]).abs().max()))
        if progress:
            progress(done, len(images))
    return Consistency(agreement, difference, len(images), shifts)


def all_shifts(image: Tensor) -> Tensor:
    """Return all circular shifts of an image `[channels, height, width]`, the image itself first.

    The shape is `[height * width, channels, height, width]`.

    >>> import torch
    >>> from blocksparse_lab.recipes.shifts import all_shifts
    >>> all_shifts(torch.arange(3).view(1, 1, 3)).flatten(1)
    tensor([[0, 1, 2],
            [1, 2, 0],
            [2, 0, 1]])
    """
    _, height, width = image.shape
    windows = image.repeat(1, 2, 2)[:, :-1, :-1].unfold(1, height, 1).unfold(2, width, 1)
    # Channels last is the fastest memory format.
    return windows.permute(1, 2, 3, 4, 0).flatten(0, 1).permute(0, 3, 1, 2)
