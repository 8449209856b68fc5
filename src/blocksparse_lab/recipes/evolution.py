"""Record how a net's topology evolves while it is trained on handwritten digits."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass

import torch

from blocksparse.errors import BlockSparseError
from blocksparse.topology import Trajectory

from ..data.table import Table
from ..models.mlp import SparseMLP
from ..training.settings import EpochSettings
from ..training.trainer import Callback, Trainer
from .classify import ClassifyTask, Topology

SIZES = (64, 96, 96, 10)
BATCH = 64


@dataclass(frozen=True)
class Evolution:
    """Trajectory of several runs: epoch and run of each moment, and each run's error."""

    trajectory: Trajectory
    """Its labels are the epochs, those of one run after those of another."""
    runs: tuple[str, ...]
    """The run of each moment."""
    errors: tuple[float, ...]
    """The errors of each run on unseen digits, in percent."""


def evolve(epochs: int = 12, runs: int = 3, zeta: float = 0.3, seed: int = 0) -> Evolution:
    """Train sparse MLPs by sparse evolutionary training (SET) on scikit-learn's 1,797 digits of 8 x 8 pixels.

    After each epoch the weakest fraction `zeta` of the connections moves. The first two runs start with the same
    connections and draw different ones later; each other run starts with its own.

    Source: Liu, van der Lee, Yaman, Atashgahi, Ferraro, Sokar, Pechenizkiy, Mocanu, Topological insights into sparse
    neural networks (2020).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        needs = f"the digits need scikit-learn ({error}): pip install scikit-learn"
        raise BlockSparseError(needs) from error
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split([1400, len(x) - 1400])
    data = Table("digits", x[train], y[train], x[test], y[test], tuple("0123456789"))
    trajectory, names, errors = Trajectory(), [], []
    for run in range(runs):
        model = SparseMLP(SIZES, epsilon=8, dropout=0, seed=seed + max(run - 1, 0))  # the first two runs share a seed
        # Connections move before the first step of an epoch, so the last change needs one more epoch.
        task = ClassifyTask(model, data, epochs + 1, BATCH, Topology("set", zeta=zeta), seed + 1000 + run)
        settings = EpochSettings(
            epochs=epochs + 1, batch=BATCH, learning_rate=0.05, decay="none", clip=0.0, optimizer="sgd", seed=seed
        )
        settings = settings.in_epochs(task.steps_per_epoch, log_every=0, save_every=0)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(task, folder, settings)
            with closing(trainer.steps(_Recorder(task, trajectory))) as steps:
                for step in steps:
                    if step > epochs * task.steps_per_epoch:
                        break
        errors.append(trainer.held_out or 0.0)
        names += [f"run {run + 1}"] * (epochs + 1)
    return Evolution(trajectory, tuple(names), tuple(errors))


class _Recorder(Callback):
    """Records the model at the start and after each change of its connections."""

    def __init__(self, task: ClassifyTask, trajectory: Trajectory):
        self.task, self.trajectory = task, trajectory

    def before_step(self, step: int) -> None:
        epoch, within = divmod(step, self.task.steps_per_epoch)
        if within == 0:
            self.trajectory.record(self.task.model, epoch)
