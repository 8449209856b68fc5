"""Truly sparse MLPs on tables, with the papers' settings by the name of the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from blocksparse.checked import integer, number
from blocksparse.checkpoint import part
from blocksparse.conversion import load_sparsified
from blocksparse.errors import BlockSparseError
from blocksparse.nn import Linear
from blocksparse.sparsity import SRSTE
from blocksparse.sparsity.sparse_training.densities import erdos_renyi_density

from ..data.synthetic import Synthetic
from ..models.mlp import SparseMLP
from ..option import option
from ..training import saved_models
from ..training.memory import check_room
from ..training.settings import EpochSettings
from ..training.trainer import Trainer, device_of
from .classify import BETWEEN_EPOCHS, KIND, ClassifyTask, Data, Importance, Topology

EVOLVED = (*BETWEEN_EPOCHS, "rigl", "gradual")
METHODS = (*EVOLVED, "fixed", "dense", "2:4")
_DENSE = ("dense", "2:4")  # methods that store dense weights

# Least number of steps between checkpoints: an epoch of a small table has few steps.
SAVE_EVERY = 500


@dataclass(frozen=True)
class MLPSettings(Importance, EpochSettings):
    """A net, how its connections evolve, and its training."""

    method: str = option("set", "set, smet, chts, rigl, gradual, fixed (never changed), dense, or 2:4 (SR-STE).")
    hidden: tuple[int, ...] = option((1000, 1000, 1000), "Features of the hidden layers, such as 1000,1000,1000.")
    epochs: int = option(500, "Epochs; its default and those below depend on the data.")
    epsilon: float = option(20, "A layer gets about epsilon (n_in + n_out) connections.")
    surplus: float = option(5.0, "gradual: begins with this times as many connections, which fall in the first half.")
    zeta: float = option(0.3, "set, smet, chts, gradual: fraction of the connections that an evolution replaces.")
    # An epoch of few rows is too short to show which connections are useful.
    evolve_every: int = option(1, "set, smet, chts, gradual: epochs between evolutions.")
    regrow: str = option("zeros", "set: initial values of new connections: zeros, he (as in the papers) or xavier.")
    elastic: bool = option(False, "set: half of zeta after 9/16 of the epochs, none after 3/4 (MEST).")
    alpha: float = option(0.6, "Slope of All-ReLU.")
    dropout: float = option(0.3, "Dropout of the hidden layers' outputs.")
    learning_rate: float = option(0.01, "The constant learning rate.", "lr")
    momentum: float = option(0.9, "Momentum of SGD.")
    weight_decay: float = option(2e-4, "Weight decay of all weights, not multiplied by the learning rate.")
    l1: float = option(0.0, "Adds this times the sum of |w| of the first layer to the loss.")
    batch: int = option(128, "Rows per step.")
    clip: float = option(0.0, "Clip the gradient at this norm; 0: never.")
    ema: float = option(0.0, "Evaluate a running mean of the weights with this decay, such as 0.999; 0: the weights.")
    layout_seed: int | None = option(None, "Seed of the initial layouts, to share them between runs of other seeds.")
    init: str = "he"  # as for `SparseMLP`
    decay: str = "none"
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        Importance.__post_init__(self)
        EpochSettings.__post_init__(self)

    @property
    def topology(self) -> Topology:
        """How `ClassifyTask` changes the connections."""
        names = {one.name for one in fields(Topology)} - {"fraction", "every", "initial_density", "density"}
        method = self.method if self.method in EVOLVED else "none"
        return Topology(**{name: getattr(self, name) for name in names} | {"method": method})


# Fields that have an effect with some methods only.
USED_BY: dict[str, tuple[str, ...]] = dict.fromkeys(("regrow", "elastic"), ("set",))
USED_BY |= dict.fromkeys(("zeta", "evolve_every"), (*BETWEEN_EPOCHS, "gradual"))
USED_BY["surplus"] = ("gradual",)

# Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021), and its code, except that new connections
# start at 0. Random values disturb trained weights: on Higgs, SET with them was worse than no evolution.
SETTINGS = {
    "fashion_mnist": MLPSettings(),
    "cifar10": MLPSettings(hidden=(4000, 1000, 4000), alpha=0.75, epochs=1000),
    # Epsilon is ours: the largest integer with fewer than 5 % of the dense net's weights.
    "madelon": MLPSettings(hidden=(400, 100, 400), epsilon=6, alpha=0.5),
    "higgs": MLPSettings(epsilon=10, alpha=0.05),
}
# A row of this net has megabytes of activations. A neuron has one or two inputs: weights drawn for millions of inputs
# would pass nothing to the output, so they are drawn by the actual connections. A slope of 0.6 would pass little more
# than the size of an input, and dropout would remove most of it.
EXTREME = MLPSettings(epsilon=1, epochs=2, batch=4, alpha=0.05, dropout=0.0, init="kaiming", decay="linear")
EXTREME_FEATURES, EXTREME_CARRIERS, EXTREME_LAYERS = 65_536, 512, 4
# The output sums over the last hidden layer: a step moves it by the learning rate times that layer's width.
EXTREME_RATE = 20.0


def settings_for(name: str, rows: int | None = None) -> MLPSettings:
    """Return the settings for a table by name, by default those of Fashion-MNIST.

    For any other table, a batch has at most a quarter of its `rows` to train on, and the gradient is clipped:
    otherwise a dense net on thousands of features diverges.

    >>> from blocksparse_lab.recipes.mlp import settings_for
    >>> settings_for("cifar10").hidden, settings_for("genes.csv", rows=58).batch
    ((4000, 1000, 4000), 14)
    """
    if name in SETTINGS or rows is None:
        return SETTINGS.get(name, MLPSettings())
    return MLPSettings(batch=max(1, min(MLPSettings.batch, rows // 4)), clip=1.0)


def check_used(given: Iterable[str], method: str) -> None:
    """Raise if a field of the settings has no effect with a method.

    >>> from blocksparse_lab.recipes.mlp import check_used
    >>> check_used(["zeta", "alpha"], "fixed")
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: zeta: expected method set or smet or chts or gradual, got fixed
    """
    for name in given:
        users = USED_BY.get(name, (method,))
        if method not in users:
            raise BlockSparseError.expected(name, f"method {' or '.join(users)}", method)
        if name == "layout_seed" and method in _DENSE:
            raise BlockSparseError.expected(name, "a sparse net", f"method {method}")


def extreme_hidden(neurons: int, classes: int = 2) -> tuple[int, ...]:
    """Return the hidden layers of a net with 65,536 inputs and about `neurons`, inputs and outputs included.

    >>> from blocksparse_lab.recipes.mlp import extreme_hidden
    >>> extreme_hidden(1_065_538)       # as published
    (250000, 250000, 250000, 250000)
    """
    least = EXTREME_FEATURES + classes + EXTREME_LAYERS
    if neurons < least:
        raise BlockSparseError.expected("neurons", f"{least:,} or more, with {EXTREME_FEATURES:,} inputs", neurons)
    return (round((neurons - EXTREME_FEATURES - classes) / EXTREME_LAYERS),) * EXTREME_LAYERS


def extreme(neurons: int) -> MLPSettings:
    """Return the settings of a net of about `neurons`."""
    hidden = extreme_hidden(neurons)
    rate = EXTREME_RATE / hidden[-1]
    return replace(EXTREME, hidden=hidden, learning_rate=rate, weight_decay=rate * EXTREME.weight_decay)


def extreme_data(rows: int, tested: int, seed: int = 0) -> Synthetic:
    """Return noise whose class shifts 512 of the inputs by two standard deviations."""
    return Synthetic(EXTREME_FEATURES, rows, tested, seed, carriers=EXTREME_CARRIERS, strength=2.0)


def network(settings: MLPSettings, data: Data) -> SparseMLP:
    """Draw the network for some data.

    The weights are dense for "dense", dense in memory and 2:4 sparse in products for "2:4", and block-sparse in the
    same places for all other methods.
    """
    method = settings.method
    if method not in METHODS:
        raise BlockSparseError.expected("method", f"one of {', '.join(METHODS)}", repr(method))
    if settings.layout_seed is not None:
        check_used(["layout_seed"], method)
    epsilon = _first_epsilon(settings)
    sparse: dict[str, Any] = {"density": None} if method in _DENSE else {"epsilon": epsilon}
    sizes = (data.features, *settings.hidden, len(data.classes))
    for size in sizes:
        integer("sizes", size, 1)
    least = (a * b if method in _DENSE else min(a * b, epsilon * (a + b)) for a, b in pairwise(sizes))
    # A random layout misses this number, but never by half.
    check_room(f"{sum(sizes):,} neurons", sum(least) / 2)
    model = SparseMLP(
        sizes,
        alpha=settings.alpha,
        dropout=settings.dropout,
        init=settings.init,
        seed=settings.seed,
        layout_seed=settings.layout_seed,
        **sparse,
    )
    if method == "2:4":
        # SR-STE is a parametrization of the weights: it does nothing after a step.
        left = [f"{name}: {why}" for name, why in SRSTE(model, 2, 4, skip=model.output).left.items()]
        if len(left) > 1:  # the output layer comes last
            raise BlockSparseError.expected("2:4", "layers whose inputs come in fours", "; ".join(left[:-1]))
    return model


@dataclass(frozen=True)
class NetworkSize:
    """Size of a network. `connections` are the weights in products, `stored_bytes` counts parameters and layouts."""

    neurons: int
    connections: int
    density: float
    parameters: int
    stored_bytes: int


def size_of(model: SparseMLP) -> NetworkSize:
    """Count a network's neurons, connections and bytes.

    >>> from blocksparse_lab.models.mlp import SparseMLP
    >>> from blocksparse_lab.recipes.mlp import size_of
    >>> size_of(SparseMLP([4, 3, 2], density=None))
    NetworkSize(neurons=9, connections=18, density=1.0, parameters=23, stored_bytes=92)
    """
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    connections = sum(_connections(layer) for layer in model.layers)
    dense = sum(n_in * n_out for n_in, n_out in zip(model.sizes, model.sizes[1:], strict=False))
    stored = sum(tensor.nbytes for tensor in model.state_dict().values())
    return NetworkSize(sum(model.sizes), connections, connections / dense, sum(parameters.values()), stored)


def _connections(layer: nn.Module) -> int:
    weight = _weight(layer)
    return int(weight.count_nonzero()) if is_parametrized(layer) else weight.numel()


def _weight(layer: Any) -> Tensor:
    """Return the stored weights of a layer, or all weights of a dense one."""
    weight: Tensor = layer.values if isinstance(layer, Linear) else layer.weight
    return weight


def _first_epsilon(settings: MLPSettings) -> float:
    """Return the epsilon of the first layouts."""
    return settings.epsilon * (number("surplus", settings.surplus, 1) if settings.method == "gradual" else 1)


def erdos_renyi_weights(sizes: Sequence[int], epsilon: float) -> float:
    """Return the number of weights of a sparse net."""
    return sum(erdos_renyi_density((n_out, n_in), epsilon) * n_in * n_out for n_in, n_out in pairwise(sizes))


def hidden_density(sizes: Sequence[int], epsilon: float) -> float:
    """Return the density of the Erdos-Renyi layouts of all layers but the last, as one number.

    >>> from blocksparse_lab.recipes.mlp import hidden_density
    >>> round(hidden_density([3072, 4000, 1000, 4000, 10], epsilon=20), 4)
    0.0168
    """
    *inner, _ = sizes
    return erdos_renyi_weights(inner, epsilon) / max(1, sum(map(math.prod, pairwise(inner))))


def task(settings: MLPSettings, model: SparseMLP, data: Data) -> ClassifyTask:
    """Return the task of a `network` that was made with the same settings."""
    s = settings
    if s.method in _DENSE and s.importance_from is not None:
        raise BlockSparseError.expected("importance pruning", "a sparse net", f"method {s.method}")
    about: dict[str, Any] = {"method": s.method, "sizes": list(model.sizes)}
    about |= {"alpha": s.alpha, "dropout": s.dropout}
    if s.method not in _DENSE:
        about["epsilon"] = s.epsilon
        if s.layout_seed is not None:
            about["layout_seed"] = s.layout_seed
    if s.init != "he":
        about["init"] = s.init
    penalty = None
    if number("l1", s.l1, 0):
        about["l1"] = s.l1

        def penalty() -> Tensor:
            return s.l1 * _weight(model.layers[0]).abs().sum()

    topology, device = s.topology, device_of(s.device)
    if s.method == "gradual":
        begins, ends = (hidden_density(model.sizes, epsilon) for epsilon in (_first_epsilon(s), s.epsilon))
        topology = replace(topology, initial_density=begins, density=ends)
    return ClassifyTask(model, data, s.epochs, s.batch, topology, s.seed, device, about, penalty)


def paced(settings: MLPSettings, task: ClassifyTask, **pace: Any) -> MLPSettings:
    """Return the settings with the steps of a task, evaluated after each epoch unless `pace` says otherwise."""
    return settings.in_epochs(task.steps_per_epoch, **{"save_every": max(task.steps_per_epoch, SAVE_EVERY)} | pace)


def trainer(settings: MLPSettings, data: Data, run: str | Path, **pace: Any) -> Trainer:
    """Return a trainer of a new network in a run folder; `pace` overrides how often it evaluates and saves."""
    model = network(settings, data)
    facts = {"data": data.name, "tested": data.tested, "epochs": settings.epochs, **asdict(size_of(model))}
    made = task(settings, model, data)
    return Trainer(made, run, paced(settings, made, **pace), facts)


def load(run: str | Path) -> SparseMLP:
    """Load the network of a checkpoint or run folder on the CPU."""
    path, tensors, task = saved_models.read_checkpoint(run, KIND, "a network of blocksparse train mlp")
    config = task.get("model")
    if not isinstance(config, dict) or not {"sizes", "alpha", "dropout"} <= config.keys():
        raise BlockSparseError.expected(str(path), "a network of blocksparse train mlp", f"{config!r:.200}")
    with saved_models.report_bad_parameters(path, config):
        if len(config["sizes"]) > len(tensors):
            raise BlockSparseError.expected("sizes", "one for each layer", config["sizes"][:8])
        with torch.device("meta"):
            model = SparseMLP(config["sizes"], density=None, alpha=config["alpha"], dropout=config["dropout"])
        load_sparsified(model, part(tensors, "model.") | part(tensors, "ema."))
    return model.eval()
