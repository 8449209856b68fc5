"""Models from the checkpoints of runs, which may be broken or from someone else."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from blocksparse import checkpoint
from blocksparse.errors import BlockSparseError


def read(path: str | Path, kind: str, wanted: str) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The path, tensors and task of a checkpoint, or of the newest one in a run's folder."""
    path = Path(path)
    path = path / "last.safetensors" if path.is_dir() else path
    tensors, about = checkpoint.load(path)
    task = checkpoint.task_of(about)
    if task.get("kind") != kind:
        raise BlockSparseError.expected(str(path), wanted, task.get("kind", "something else"))
    return path, tensors, task


def config_of(path: Path, task: dict[str, Any], known: Collection[str], wanted: str) -> dict[str, Any]:
    """The configuration of a task's model."""
    config = task.get("model")
    if not isinstance(config, dict) or not config.keys() <= set(known):
        raise BlockSparseError.expected(str(path), f"the configuration of {wanted} of this version", f"{config!r:.200}")
    return config


@contextmanager
def parameters_of(path: Path, config: Any) -> Iterator[None]:
    """Reports errors of making a model, and of loading its state, as faults of the checkpoint."""
    try:
        yield
    except (RuntimeError, TypeError, BlockSparseError) as error:  # types of options too
        raise BlockSparseError.expected(str(path), f"parameters of {config}", error) from error
