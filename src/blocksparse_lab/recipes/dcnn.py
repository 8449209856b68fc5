"""Diffusion-convolutional networks on a citation graph: the published protocol, with and without weak transitions."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np
import torch

from blocksparse.nn import Diffusion

from ..data.planetoid import Graph
from ..data.table import Table
from ..models.dcnn import DCNN
from ..training.settings import EpochSettings
from ..training.trainer import Trainer
from .classify import ClassifyTask

HOPS = 2


@dataclass(frozen=True)
class DCNNSettings(EpochSettings):
    """Published training without transitions up to `threshold`. With `at_random`, random edges are dropped instead,
    until the rest needs the same memory."""

    threshold: float = 0.0
    at_random: bool = False
    # On the validation third of Cora, the error is lowest after 8 to 20 epochs and then rises slowly.
    epochs: int = 15
    batch: int = 100
    learning_rate: float = 0.05
    decay: str = "none"
    clip: float = 0.0
    optimizer: str = "adagrad"


def table(graph: Graph, diffusion: Diffusion, seed: int = 0) -> Table:
    """Return random thirds of a graph's nodes to train and to test on; a row is all that a node sees.

    The last third is for validation.
    """
    rows = diffusion(graph.features).flatten(1)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows)))
    train, _, test = (part.sort().values for part in order.tensor_split(3))
    classes = tuple(map(str, range(graph.classes)))
    labels = graph.labels
    return Table(graph.name, rows[train], labels[train], rows[test], labels[test], classes)


def trainer(settings: DCNNSettings, graph: Graph, run: str | Path) -> Trainer:
    """Return a trainer on a third of a graph's nodes that evaluates on another third."""
    s = settings
    diffusion = Diffusion(graph.edges, len(graph.labels), HOPS, s.threshold)
    if s.at_random:
        diffusion = random_diffusion(graph, diffusion.nbytes, s.seed)
    data = table(graph, diffusion, s.seed)
    with torch.random.fork_rng([]):
        torch.manual_seed(s.seed)
        model = DCNN(graph.features.shape[1], graph.classes, HOPS)
    about = {"kind": "dcnn", "hops": HOPS, "threshold": s.threshold}
    about |= {"at random": True} if s.at_random else {}
    task = ClassifyTask(model, data, s.epochs, min(s.batch, data.rows), seed=s.seed, about=about)
    facts = {
        "nodes": len(graph.labels),
        "nnz": list(diffusion.nnz),
        "bytes": diffusion.nbytes,
        "epochs": s.epochs,
        "tested": data.tested,
    }
    return Trainer(task, run, s.in_epochs(task.steps_per_epoch, save_every=0), facts)


def random_diffusion(graph: Graph, nbytes: int, seed: int = 0) -> Diffusion:
    """Return the diffusion over the most random edges (in steps of a 500th) whose powers fit into `nbytes`."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(graph.edges.shape[1]))

    def of(edges: int) -> Diffusion:
        return Diffusion(graph.edges[:, order[:edges]], len(graph.labels), HOPS)

    numbers = range(1, len(order) + 1, max(1, len(order) // 500))
    fitting = bisect_right(numbers, nbytes, key=lambda edges: of(edges).nbytes)
    return of(numbers[max(0, fitting - 1)])


def growth(
    nodes: tuple[int, ...] = (1_000, 10_000, 100_000), m: int = 4, threshold: float = 0.05, seed: int = 0
) -> list[tuple[int, int, int]]:
    """Return (nodes, entries of P and P^2, their bytes) for Barabasi-Albert graphs, whose hubs grow with their size.

    >>> from blocksparse_lab.recipes import dcnn
    >>> per_node = [entries / n for n, entries, _ in dcnn.growth((500, 2000))]
    >>> 0.8 < per_node[1] / per_node[0] < 1.25
    True
    """
    rows = []
    for n in nodes:
        edges = np.array(nx.barabasi_albert_graph(n, m, seed=seed).edges).T
        diffusion = Diffusion(torch.from_numpy(edges.copy()), n, HOPS, threshold)
        rows.append((n, sum(diffusion.nnz), diffusion.nbytes))
    return rows
