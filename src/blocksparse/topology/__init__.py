"""Graph measures of layouts."""

from .clustering import clustering
from .degrees import DegreeDistribution, degree_distribution, degrees, hub_load
from .mixing import steps_from, steps_to_mix
from .paths import PathLengths, average_path_length, connected_components, diameter, path_lengths
from .small_world import SmallWorld, small_world, small_world_omega, small_world_sigma
from .spectrum import spectral_gap
from .summary import Summary, summary

__all__ = [
    "DegreeDistribution",
    "PathLengths",
    "SmallWorld",
    "Summary",
    "average_path_length",
    "clustering",
    "connected_components",
    "degree_distribution",
    "degrees",
    "diameter",
    "hub_load",
    "path_lengths",
    "small_world",
    "small_world_omega",
    "small_world_sigma",
    "spectral_gap",
    "steps_from",
    "steps_to_mix",
    "summary",
]
