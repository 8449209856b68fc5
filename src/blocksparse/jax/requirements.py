"""A check of JAX's version, which runs before any other module of `blocksparse.jax` is imported."""

from __future__ import annotations

MIN_JAX = (0, 7, 2)  # its interface for foreign functions is the one that the core is compiled for
_INSTALL = 'pip install --upgrade "jax>=0.7.2"'


def check(version: tuple[int, ...] | None) -> None:
    """Raise an ImportError unless this version of JAX is supported; None if JAX is not installed.

    >>> check((0, 6, 1))
    Traceback (most recent call last):
    ...
    ImportError: blocksparse.jax needs JAX 0.7.2 or newer, got 0.6.1: pip install --upgrade "jax>=0.7.2"
    """
    if version is None or version < MIN_JAX:
        got = ".".join(map(str, version)) if version else "none"
        raise ImportError(f"blocksparse.jax needs JAX 0.7.2 or newer, got {got}: {_INSTALL}")


try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    check(None)
check(jax.__version_info__)
