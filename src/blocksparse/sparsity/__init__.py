"""Methods that train sparse networks, and methods that make dense ones sparse."""

from .activations import ActivationScores, activation_scores
from .alongside import alongside
from .closed import drop_closed
from .compact import compact
from .densities import erdos_renyi_density, erk
from .evolve import Evolve
from .gradual import GradualPruning
from .group_lasso import GroupLasso
from .importance import ImportancePruning, importance
from .l0 import L0Gates
from .magnitude import block_norms
from .movement import MovementPruning
from .nm import nm_layout, nm_mask
from .nm_permutation import nm_efficacy, nm_permutation
from .reconstruction import Reconstruction, reconstruct
from .rewire import carried, rewire
from .rigl import RigL
from .semi_structured import to_semi_structured
from .sgd import SGD
from .sr_ste import SRSTE
from .threshold import ThresholdPruning, percentiles

__all__ = [
    "SGD",
    "SRSTE",
    "ActivationScores",
    "Evolve",
    "GradualPruning",
    "GroupLasso",
    "ImportancePruning",
    "L0Gates",
    "MovementPruning",
    "Reconstruction",
    "RigL",
    "ThresholdPruning",
    "activation_scores",
    "alongside",
    "block_norms",
    "carried",
    "compact",
    "drop_closed",
    "erdos_renyi_density",
    "erk",
    "importance",
    "nm_efficacy",
    "nm_layout",
    "nm_mask",
    "nm_permutation",
    "percentiles",
    "reconstruct",
    "rewire",
    "to_semi_structured",
]
