"""Measures of layouts as graphs, and distances between networks."""

from .clustering import clustering
from .degrees import DegreeDistribution, degree_distribution, degrees, hub_load
from .mixing import steps_from, steps_to_mix
from .nnstd import Matching, nnstd, nnstd_matching
from .paths import PathLengths, average_path_length, connected_components, diameter, path_lengths
from .proposals import Proposal, Proposals, design
from .small_world import SmallWorld, small_world, small_world_omega, small_world_sigma
from .spectrum import spectral_gap
from .summary import Summary, summary
from .trajectory import Trajectory, distances, embedding, linkage

__all__ = [
    "DegreeDistribution",
    "Matching",
    "PathLengths",
    "Proposal",
    "Proposals",
    "SmallWorld",
    "Summary",
    "Trajectory",
    "average_path_length",
    "clustering",
    "connected_components",
    "degree_distribution",
    "degrees",
    "design",
    "diameter",
    "distances",
    "embedding",
    "hub_load",
    "linkage",
    "nnstd",
    "nnstd_matching",
    "path_lengths",
    "small_world",
    "small_world_omega",
    "small_world_sigma",
    "spectral_gap",
    "steps_from",
    "steps_to_mix",
    "summary",
]


def __dir__() -> list[str]:
    return __all__
