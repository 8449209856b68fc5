"""The pages of the documentation that messages name, for the mistakes and surprises that users meet first."""

from enum import StrEnum

__all__ = ["Page"]


class Page(StrEnum):
    """A page, by its file in the repository; the site has it under the same name.

    >>> print(f"see {Page.INSTALL}")
    see docs/start/install.md
    """

    INSTALL = "docs/start/install.md"
    LAYOUTS = "docs/understand/layouts.md"
    SPARSIFY = "docs/how_to/sparsify.md"
    CALIBRATE = "docs/how_to/calibrate.md"
    PRUNE = "docs/how_to/prune.md"
    SPARSE_TRAINING = "docs/how_to/sparse_training.md"
    TENSOR_PARALLEL = "docs/distributed/tensor_parallel.md"
