"""Methods that train sparse networks or make dense networks sparse."""

from ..surgery.compact import compact
from ..surgery.rewire import rewire
from ..surgery.weight_handle import remap_blocks
from .calibration.activations import ActivationScores, activation_scores
from .calibration.reconstruction import Reconstruction, reconstruct
from .distillation import Distillation
from .feature_order import permute_features
from .nm.mask import nm_layout, nm_mask
from .nm.permutation import nm_efficacy, nm_permutation
from .nm.semi_structured import to_semi_structured
from .nm.sr_ste import SRSTE
from .pruning.gradual import GradualBlockPruning, GradualPruning
from .pruning.group_lasso import GroupLasso
from .pruning.l0 import L0Gates
from .pruning.movement import MovementPruning
from .pruning.prune_gated_blocks import prune_gated_blocks
from .pruning.threshold import ThresholdPruning, percentiles
from .selection import block_norms
from .sparse_training.block_clock import BlockClock
from .sparse_training.chts import CHTs
from .sparse_training.densities import erdos_renyi_density, erk
from .sparse_training.importance import ImportancePruning, importance
from .sparse_training.rigl import RigL
from .sparse_training.set import SET
from .sparse_training.sgd import SGD
from .sparse_training.smet import SMET, rates_by_density
from .sparse_training.sync_ema import sync_ema

__all__ = [
    "SET",
    "SGD",
    "SMET",
    "SRSTE",
    "ActivationScores",
    "BlockClock",
    "CHTs",
    "Distillation",
    "GradualBlockPruning",
    "GradualPruning",
    "GroupLasso",
    "ImportancePruning",
    "L0Gates",
    "MovementPruning",
    "Reconstruction",
    "RigL",
    "ThresholdPruning",
    "activation_scores",
    "block_norms",
    "compact",
    "erdos_renyi_density",
    "erk",
    "importance",
    "nm_efficacy",
    "nm_layout",
    "nm_mask",
    "nm_permutation",
    "percentiles",
    "permute_features",
    "prune_gated_blocks",
    "rates_by_density",
    "reconstruct",
    "remap_blocks",
    "rewire",
    "sync_ema",
    "to_semi_structured",
]


def __dir__() -> list[str]:
    return __all__
