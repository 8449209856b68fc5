"""Graph measures of layouts."""

from .paths import average_path_length, connected_components, degrees

__all__ = ["average_path_length", "connected_components", "degrees"]
