"""The result of a compression: the model, the curve of densities, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from ..conversion.report import Report, report
from ..topology.drawings.style import COLORS, figure_and_axes, save

BUSY_SENTENCE = "The machine was busy during the timings: measure again when it is idle."
FIT_SENTENCE = "This is the model as fitted at the start: training has not improved it. More data or time may help."


@dataclass(frozen=True)
class Point:
    """A model at one density, on the held-out data.

    Args:
        density: fraction of their parameters that weights store, without those that stay dense for another reason than
            that they keep all of their blocks; 1 for the dense model.
        speedup: dense time / block-sparse time of a call of the whole model.
        agreement: agreement with the teacher, at most 1: the fraction of equal predicted classes for classifiers, the
            mean cosine for unit vectors, and otherwise 1 - squared error / variance. Of several outputs the lowest,
            or of those named logits if there are any.
        loss: the training loss; None in a `Tradeoff`, which trains nothing.
        metric: the result of `evaluate`, or None without one.
        minutes: minutes since the start.
        asked: the density that was asked for, in a `Tradeoff`. Weights that would not get faster stay dense.
    """

    density: float
    speedup: float
    agreement: float
    loss: float | None = None
    metric: float | None = None
    minutes: float = 0.0
    asked: float | None = None


@dataclass(frozen=True)
class CompressionResult:
    """The result of `compress`.

    Args:
        model: the block-sparse model, in the mode of the given one.
        curve: the dense model and the best model of each density, in the order of training.
        dense: why weights stayed dense, by name.
        example: the inputs that speeds were measured on.
        is_busy: whether other programs seemed to use the machine during the timings.
        is_only_fitted: whether this is the model as fitted at the start, which training has not improved.
    """

    model: nn.Module
    curve: tuple[Point, ...]
    dense: dict[str, str] = field(default_factory=dict)
    example: Any = field(default=None, repr=False)
    is_busy: bool = False
    is_only_fitted: bool = False

    @property
    def density(self) -> float:
        """The fraction of their parameters that weights store; see `Point`."""
        return self.curve[-1].density

    @property
    def speedup(self) -> float:
        """Dense time / block-sparse time of the whole model on the example."""
        return self.curve[-1].speedup

    @property
    def agreement(self) -> float:
        """The agreement with the teacher on held-out data, at most 1; see `Point`."""
        return self.curve[-1].agreement

    @property
    def metric(self) -> float | None:
        """The result of `evaluate` for the model, or None without one."""
        return self.curve[-1].metric

    @cached_property
    def report(self) -> Report:
        """The report on the weights of the model, timed when it is first used."""
        return report(self.model, example=self.example)

    def table(self) -> str:
        """Return the curve as text; sentences below say if training was in vain or the machine busy during timings."""
        return curve_table(self.curve) + f"\n{FIT_SENTENCE}" * self.is_only_fitted + f"\n{BUSY_SENTENCE}" * self.is_busy

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw agreement and speed-up over density.

        Args:
            path: a PNG file to write; by default nothing is written.

        Returns:
            The matplotlib figure.

        Raises:
            BlockSparseError: matplotlib is not installed, or the file cannot be written.
        """
        return plot_curve(self.curve, path)

    def __str__(self) -> str:
        return self.table()


def curve_table(points: Sequence[Point], *, minutes: bool = True) -> str:
    """Return points as the text of a table, with a column of minutes or without."""
    columns = {
        "asked": ["" if point.asked is None else f"{point.asked:.3g}" for point in points],
        "density": [f"{point.density:.3g}" for point in points],
        "speed-up": [f"{point.speedup:.2f}" for point in points],
        "agreement": [f"{max(0.0, point.agreement):.4f}" for point in points],
        "minutes": [f"{point.minutes:.1f}" * minutes for point in points],
        "metric": ["" if point.metric is None else f"{point.metric:.4g}" for point in points],
    }
    shown = [[name, *cells] for name, cells in columns.items() if any(cells)]
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in shown]
    return "\n".join(" " + "  ".join(row) for row in zip(*aligned, strict=True))


def plot_curve(points: Sequence[Point], path: str | Path | None = None) -> Any:
    """Draw agreement and speed-up over density, write the picture unless `path` is None, and return the figure."""
    figure, (left, right) = figure_and_axes((7.2, 3.2), columns=2)
    draw_curve(left, right, points)
    if path is not None:
        save(figure, path)
    return figure


def draw_curve(left: Any, right: Any, points: Sequence[Point]) -> None:
    """Draw agreement and speed-up over density into two matplotlib axes."""
    densities = [point.density for point in points]
    left.plot(densities, [100 * max(0.0, point.agreement) for point in points], "o-", color=COLORS[0])
    left.set_ylabel("agreement with the dense model, %")
    right.plot(densities, [point.speedup for point in points], "o-", color=COLORS[1])
    right.set_ylabel("times as fast as the dense model")
    right.axhline(1, color="0.7", linewidth=0.8, zorder=0)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(densities, [f"{density:.2g}" for density in densities])
        axes.minorticks_off()
        axes.set_xlabel("density")
