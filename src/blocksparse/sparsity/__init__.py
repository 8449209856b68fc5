"""Methods that train sparse networks, and never store anything dense."""

from .compact import compact
from .densities import erdos_renyi_density, erk
from .evolve import Evolve
from .importance import ImportancePruning, importance
from .nm import nm_layout, nm_mask
from .nm_permutation import nm_efficacy, nm_permutation
from .rewire import carried, rewire
from .rigl import RigL
from .semi_structured import to_semi_structured
from .sgd import SGD
from .sr_ste import SRSTE

__all__ = [
    "SGD",
    "SRSTE",
    "Evolve",
    "ImportancePruning",
    "RigL",
    "carried",
    "compact",
    "erdos_renyi_density",
    "erk",
    "importance",
    "nm_efficacy",
    "nm_layout",
    "nm_mask",
    "nm_permutation",
    "rewire",
    "to_semi_structured",
]
