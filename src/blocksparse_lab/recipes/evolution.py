"""How the topology of a net evolves while it is trained: some runs on handwritten digits, each epoch recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from blocksparse.errors import BlockSparseError
from blocksparse.sparsity import SET
from blocksparse.topology import Trajectory

from ..models.mlp import SparseMLP

SIZES = (64, 96, 96, 10)
BATCH = 64


@dataclass(frozen=True)
class Evolution:
    """The record of `evolve`."""

    trajectory: Trajectory
    """Its labels are the epochs, those of one run after those of another."""
    runs: tuple[str, ...]
    """The run of each moment."""
    errors: tuple[float, ...]
    """The errors of each run on unseen digits, in percent."""


def evolve(epochs: int = 12, runs: int = 3, zeta: float = 0.3, seed: int = 0) -> Evolution:
    """Trains sparse MLPs by sparse evolutionary training (SET) on scikit-learn's 1,797 digits of 8 x 8 pixels.

    The first two begin with the same connections, and draw different ones later; the others begin with their own.

    Args:
        epochs: after each the weakest connections move.
        runs: how many nets.
        zeta: of the connections that move.
        seed: of all that is drawn.

    Raises:
        BlockSparseError: scikit-learn is not installed.

    Source: Liu, van der Lee, Yaman, Atashgahi, Ferraro, Sokar, Pechenizkiy, Mocanu, Topological insights into sparse
    neural networks (2020).
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        needs = f"the digits need scikit-learn ({error}): pip install 'blocksparse-torch[lab]'"
        raise BlockSparseError(needs) from error
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1400], order[1400:]
    trajectory, names, errors = Trajectory(), [], []
    for run in range(runs):
        begins = seed + max(run - 1, 0)  # the same for the first two
        model = SparseMLP(SIZES, epsilon=8, dropout=0, seed=begins)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        method = SET(model, optimizer, zeta=zeta, seed=seed + 1000 + run)
        generator = torch.Generator().manual_seed(seed + 2000 + run)
        trajectory.record(model, 0)
        for epoch in range(1, epochs + 1):
            for batch in train[torch.randperm(len(train), generator=generator)].split(BATCH):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            method.step()
            trajectory.record(model, epoch)
        model.eval()
        with torch.no_grad():
            errors.append(100 * float((model(x[test]).argmax(-1) != y[test]).float().mean()))
        names += [f"run {run + 1}"] * (epochs + 1)
    return Evolution(trajectory, tuple(names), tuple(errors))
