"""Whole comparisons, by name: sets of training runs, one for each contender and seed, and their results."""

from __future__ import annotations

from blocksparse.errors import BlockSparseError

from . import classifiers, graphs, language, pixels, pruned, shifted
from .experiment import Experiment
from .report import draw, load, write

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "classifiers",
    "draw",
    "find",
    "graphs",
    "language",
    "load",
    "pixels",
    "pruned",
    "shifted",
    "write",
]

EXPERIMENTS: dict[str, Experiment] = {
    **language.EXPERIMENTS,
    **classifiers.EXPERIMENTS,
    **graphs.EXPERIMENTS,
    **pruned.EXPERIMENTS,
    **shifted.EXPERIMENTS,
    **pixels.EXPERIMENTS,
}


def find(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        BlockSparseError: no such experiment.

    >>> from blocksparse_lab import experiments
    >>> list(experiments.find("imdb-small").contenders)
    ['dense', 'small-world']
    """
    if name not in EXPERIMENTS:
        raise BlockSparseError.expected("experiment", f"one of {', '.join(EXPERIMENTS)}", repr(name))
    return EXPERIMENTS[name]
