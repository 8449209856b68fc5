"""Methods that train sparse networks, and never store anything dense."""

from .compact import compact
from .densities import erdos_renyi_density, erk
from .evolve import Evolve
from .importance import ImportancePruning, importance
from .rewire import carried, rewire
from .rigl import RigL
from .sgd import SGD

__all__ = [
    "SGD",
    "Evolve",
    "ImportancePruning",
    "RigL",
    "carried",
    "compact",
    "erdos_renyi_density",
    "erk",
    "importance",
    "rewire",
]
