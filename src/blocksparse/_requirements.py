"""A check of the versions of Python and PyTorch, which runs before any other module is imported."""

import sys

from .optional_torch import has_torch, torch

_MIN_PYTHON = (3, 11, 4)
_MIN_TORCH = (2, 10)


def check(python: tuple[int, ...], torch_version: str | None) -> None:
    """Check that these versions are supported; raise an ImportError that says what to install if one is not.

    `torch_version` is None without PyTorch.

    >>> check((3, 11, 2), "2.13.0")
    Traceback (most recent call last):
    ...
    ImportError: blocksparse needs Python 3.11.4 or newer, got 3.11.2: make an environment with a newer Python
    >>> check((3, 12, 0), "2.9.1+cu128")
    Traceback (most recent call last):
    ...
    ImportError: blocksparse needs PyTorch 2.10 or newer, got 2.9.1+cu128: pip install --upgrade "torch>=2.10"
    """
    if python < _MIN_PYTHON:
        needed, got = (".".join(map(str, version)) for version in (_MIN_PYTHON, python))
        raise ImportError(
            f"blocksparse needs Python {needed} or newer, got {got}: make an environment with a newer Python"
        )
    if torch_version and tuple(map(int, torch_version.split(".")[:2])) < _MIN_TORCH:
        needed = ".".join(map(str, _MIN_TORCH))
        raise ImportError(
            f'blocksparse needs PyTorch {needed} or newer, got {torch_version}: pip install --upgrade "torch>={needed}"'
        )


check(sys.version_info[:3], str(torch.__version__) if has_torch else None)
