"""Models that a compression may return, and the score by which they are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from .result import Point


@dataclass(frozen=True)
class Candidate:
    """The best state of a stage so far, and its point of the curve."""

    state: dict[str, Tensor]
    point: Point


@dataclass(frozen=True)
class OneShot:
    """The dense model fitted in one shot at the target density.

    Args:
        model: the fitted model.
        point: its point of the curve.
        rate: the learning rate that trains it best.
        trained_loss: its held-out loss after the few steps of the range test with this rate.
    """

    model: nn.Module
    point: Point
    rate: float = 0.0
    trained_loss: float = math.inf


def score(point: Point) -> float:
    """Return the score by which models are compared: the metric of `evaluate`, or the negative loss without one."""
    if point.metric is None:
        return -math.inf if point.loss is None else -point.loss
    return -math.inf if math.isnan(point.metric) else point.metric
