"""Experiments by name: training runs of several contenders and seeds, and their reports."""

from __future__ import annotations

from blocksparse.errors import BlockSparseError

from . import classifiers, finetuning, graphs, language, pixels, pruned, resnets, small_worlds, transformers, vision
from .experiment import Experiment, Results
from .report import check_no_loss, draw, load, write

__all__ = ["EXPERIMENTS", "Experiment", "Results", "check_no_loss", "draw", "find", "load", "write"]

MODULES = language, small_worlds, finetuning, transformers, classifiers, graphs, pruned, resnets, vision, pixels
EXPERIMENTS: dict[str, Experiment] = {
    name: experiment for module in MODULES for name, experiment in module.EXPERIMENTS.items()
}


def find(name: str) -> Experiment:
    """Return an experiment by its name."""
    if name not in EXPERIMENTS:
        raise BlockSparseError.expected("experiment", f"one of {', '.join(EXPERIMENTS)}", repr(name))
    return EXPERIMENTS[name]
