"""Truly sparse MLPs on tables: the papers' recipes by the name of the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from blocksparse.checked import integer, number
from blocksparse.errors import BlockSparseError
from blocksparse.nn import Linear
from blocksparse.sparsity import SRSTE

from ..data.synthetic import Synthetic
from ..models.mlp import SparseMLP
from ..option import option
from ..training.memory import check_room
from ..training.settings import Settings, by_epochs
from ..training.trainer import Trainer, device_of
from .classify import ClassifyTask, Data, Importance, Topology

METHODS = ("set", "fixed", "rigl", "dense", "2:4")
_DENSE = ("dense", "2:4")  # what they store

# Steps between checkpoints at least; epochs of a small table are a few steps.
SAVE_EVERY = 500


@dataclass(frozen=True)
class Recipe:
    """A net's shape and its training."""

    epochs: int = option(500, "Of the whole run; as others below, by the data's recipe.")
    hidden: tuple[int, ...] = option((1000, 1000, 1000), "Features of the hidden layers, as 1000,1000,1000.")
    epsilon: float = option(20, "About epsilon (n_in + n_out) connections of a layer.")
    zeta: float = option(0.3, "Of set: the part that is replaced after an epoch.")
    # An epoch of few rows is too short to tell which connections are useful.
    evolve_every: int = option(1, "Of set: epochs from one evolution to the next.")
    regrow: str = option("zeros", "Of set: first values of new connections: zeros, he (as in the papers), xavier.")
    elastic: bool = option(False, "Of set: half of zeta after 9/16 of the epochs, none after 3/4 (MEST).")
    alpha: float = option(0.6, "The slope of All-ReLU.")
    dropout: float = option(0.3, "Of the hidden layers' outputs.")
    learning_rate: float = option(0.01, "The learning rate, the same throughout.", "lr")
    momentum: float = option(0.9, "Of SGD.")
    weight_decay: float = option(2e-4, "Of all weights, not multiplied by the rate.")
    l1: float = option(0.0, "Times the sum of the sizes of the first layer's weights: added to the loss.")
    batch: int = option(128, "Rows of a step.")
    clip: float = option(0.0, "The gradient's largest norm; 0 for any.")
    layout_seed: int | None = option(None, "Of the first layouts, where they are to be the same for all seeds.")
    init: str = "he"  # of the weights, as `SparseMLP` names it
    decay: str = "none"  # of the learning rate, as `Settings` names it
    optimizer: str = "sgd"  # the same


OF_SET = "zeta", "evolve_every", "regrow", "elastic"

# Curci, Mocanu, Pechenizkiy, Truly sparse neural networks at scale (2021), and its code; but new connections begin
# at 0. Random values disturb what is trained already: on Higgs, SET was worse with them than no evolution at all.
RECIPES = {
    "fashion_mnist": Recipe(),
    "cifar10": Recipe(hidden=(4000, 1000, 4000), alpha=0.75, epochs=1000),
    # Epsilon is ours, the largest whole one with fewer than 5 % of the dense net's weights.
    "madelon": Recipe(hidden=(400, 100, 400), epsilon=6, alpha=0.5),
    "higgs": Recipe(epsilon=10, alpha=0.05),
}
# A row of it has megabytes of activations. With weights drawn for millions of inputs, of which there are two, nothing
# of the input would reach the output: they are drawn by the connections that there are. Of a slope of 0.6 hardly more
# than the size of an input would come through, as neurons have one or two inputs; dropout would take most away.
EXTREME = Recipe(epsilon=1, epochs=2, batch=4, alpha=0.05, dropout=0.0, init="kaiming", decay="linear")
EXTREME_FEATURES, EXTREME_CARRIERS, EXTREME_LAYERS = 65_536, 512, 4
# The output sums over the last hidden layer: a step moves it as far as the learning rate times that layer's width.
EXTREME_RATE = 20.0


def recipe_for(name: str, rows: int | None = None) -> Recipe:
    """The recipe of a table by name; that of Fashion-MNIST for any other.

    A table that we have no recipe for has batches of a quarter of its `rows` to train on at most, and its gradient is
    clipped: a dense net on thousands of features diverges otherwise.

    >>> from blocksparse_lab.recipes.mlp import recipe_for
    >>> recipe_for("cifar10").hidden, recipe_for("genes.csv", rows=58).batch
    ((4000, 1000, 4000), 14)
    """
    if name in RECIPES or rows is None:
        return RECIPES.get(name, Recipe())
    return replace(Recipe(), batch=max(1, min(Recipe.batch, rows // 4)), clip=1.0)


def check_used(given: Iterable[str], method: str) -> None:
    """Refuses fields of a recipe that have no effect with a method.

    >>> from blocksparse_lab.recipes.mlp import check_used
    >>> check_used(["zeta", "alpha"], "fixed")
    Traceback (most recent call last):
    ...
    blocksparse.errors.BlockSparseError: zeta: expected method set, got fixed
    """
    for name in given:
        if name in OF_SET and method != "set":
            raise BlockSparseError.expected(name, "method set", method)
        if name == "layout_seed" and method in _DENSE:
            raise BlockSparseError.expected(name, "a sparse net", f"method {method}")


def extreme_hidden(neurons: int, classes: int = 2) -> tuple[int, ...]:
    """The hidden layers of a net with 65,536 inputs and about `neurons` in all, inputs and outputs included.

    >>> from blocksparse_lab.recipes.mlp import extreme_hidden
    >>> extreme_hidden(1_065_538)       # as published
    (250000, 250000, 250000, 250000)
    """
    least = EXTREME_FEATURES + classes + EXTREME_LAYERS
    if neurons < least:
        raise BlockSparseError.expected("neurons", f"{least:,} or more, with {EXTREME_FEATURES:,} inputs", neurons)
    return (round((neurons - EXTREME_FEATURES - classes) / EXTREME_LAYERS),) * EXTREME_LAYERS


def extreme(neurons: int) -> Recipe:
    """The recipe of a net of about `neurons`."""
    hidden = extreme_hidden(neurons)
    rate = EXTREME_RATE / hidden[-1]
    return replace(EXTREME, hidden=hidden, learning_rate=rate, weight_decay=rate * EXTREME.weight_decay)


def extreme_data(rows: int, tested: int, seed: int = 0) -> Synthetic:
    """Rows for such nets: noise, and the class in 512 of the inputs, with two standard deviations of the noise."""
    return Synthetic(EXTREME_FEATURES, rows, tested, seed, carriers=EXTREME_CARRIERS, strength=2.0)


def network(recipe: Recipe, data: Data, method: str = "set", seed: int = 0) -> SparseMLP:
    """The network of a recipe for some data: dense, dense in memory and 2:4 sparse in its products, or of any other
    method sparse in the same places."""
    if method not in METHODS:
        raise BlockSparseError.expected("method", f"one of {', '.join(METHODS)}", repr(method))
    if recipe.layout_seed is not None:
        check_used(["layout_seed"], method)
    sparse: dict[str, Any] = {"density": None} if method in _DENSE else {"epsilon": recipe.epsilon}
    sizes = (data.features, *recipe.hidden, len(data.classes))
    for size in sizes:
        integer("sizes", size, 1)
    least = (a * b if method in _DENSE else min(a * b, recipe.epsilon * (a + b)) for a, b in pairwise(sizes))
    # For a random layout, half as many would be far off.
    check_room(f"{sum(sizes):,} neurons", sum(least) / 2)
    model = SparseMLP(
        sizes,
        alpha=recipe.alpha,
        dropout=recipe.dropout,
        init=recipe.init,
        seed=seed,
        layout_seed=recipe.layout_seed,
        **sparse,
    )
    if method == "2:4":
        # It lives in the weights, and has nothing to do after a step.
        left = [f"{name}: {why}" for name, why in SRSTE(model, 2, 4, skip=model.output).left.items()]
        if len(left) > 1:  # the output layer comes last
            raise BlockSparseError.expected("2:4", "layers whose inputs come in fours", "; ".join(left[:-1]))
    return model


@dataclass(frozen=True)
class Facts:
    """The size of a network: connections are the weights that products see, density is that of all its layers, and the
    bytes are those of parameters and layouts."""

    neurons: int
    connections: int
    density: float
    parameters: int
    stored_bytes: int


def facts(model: SparseMLP) -> Facts:
    """Counts of a network.

    >>> from blocksparse_lab.models.mlp import SparseMLP
    >>> from blocksparse_lab.recipes.mlp import facts
    >>> facts(SparseMLP([4, 3, 2], density=None))
    Facts(neurons=9, connections=18, density=1.0, parameters=23, stored_bytes=92)
    """
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    connections = sum(_connections(layer) for layer in model.layers)
    dense = sum(n_in * n_out for n_in, n_out in zip(model.sizes, model.sizes[1:], strict=False))
    stored = sum(tensor.nbytes for tensor in model.state_dict().values())
    return Facts(sum(model.sizes), connections, connections / dense, sum(parameters.values()), stored)


def _connections(layer: nn.Module) -> int:
    weight = _weight(layer)
    return int(weight.count_nonzero()) if is_parametrized(layer) else weight.numel()


def _weight(layer: Any) -> Tensor:
    """The numbers that it stores, or all of a dense one."""
    weight: Tensor = layer.values if isinstance(layer, Linear) else layer.weight
    return weight


def task(
    recipe: Recipe,
    model: SparseMLP,
    data: Data,
    method: str = "set",
    seed: int = 0,
    device: str = "cpu",
    importance: Importance | None = None,
) -> ClassifyTask:
    """The task for the trainer, of a `network` that was made with the same method: "set", "rigl", "fixed" (sparse, and
    never changed), "dense", or "2:4" (SR-STE, but in the output layer)."""
    importance = importance or Importance()
    if method in _DENSE and importance.importance_from is not None:
        raise BlockSparseError.expected("importance pruning", "a sparse net", f"method {method}")
    topology = Topology(
        method=method if method in ("set", "rigl") else "none",
        zeta=recipe.zeta,
        evolve_every=recipe.evolve_every,
        regrow=recipe.regrow,
        elastic=recipe.elastic,
        **asdict(importance),
    )
    about: dict[str, Any] = {"method": method, "sizes": list(model.sizes)}
    about |= {"alpha": recipe.alpha, "dropout": recipe.dropout}
    if method not in _DENSE:
        about["epsilon"] = recipe.epsilon
        if recipe.layout_seed is not None:
            about["layout_seed"] = recipe.layout_seed
    if recipe.init != "he":
        about["init"] = recipe.init
    penalty = None
    if number("l1", recipe.l1, 0):
        about["l1"] = recipe.l1

        def penalty() -> Tensor:
            return recipe.l1 * _weight(model.layers[0]).abs().sum()

    return ClassifyTask(model, data, recipe.epochs, recipe.batch, topology, seed, device_of(device), about, penalty)


def settings(recipe: Recipe, of: ClassifyTask, seed: int = 0, device: str = "cpu", shard: bool = False) -> Settings:
    """How it is trained: as the recipe says, evaluated after each epoch."""
    save_every = max(of.steps_per_epoch, SAVE_EVERY)
    return by_epochs(of, recipe, warmup=0, save_every=save_every, seed=seed, device=device, shard=shard)


def trainer(
    recipe: Recipe,
    data: Data,
    run: str | Path,
    method: str = "set",
    seed: int = 0,
    device: str = "cpu",
    importance: Importance | None = None,
    shard: bool = False,
) -> Trainer:
    """A recipe's network, ready to be trained in a folder."""
    integer("seed", seed, 0, below=2**32)  # as in Settings, and before anything is drawn
    model = network(recipe, data, method, seed)
    told = {"data": data.name, "tested": data.tested, "epochs": recipe.epochs, **asdict(facts(model))}
    of = task(recipe, model, data, method, seed, device, importance)
    return Trainer(of, run, settings(recipe, of, seed, device, shard), told)
