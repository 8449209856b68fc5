"""Load models from checkpoints of runs, which may be broken or from someone else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checkpoint import part
from blocksparse.conversion import load_sparsified
from blocksparse.errors import BlockSparseError


def read_checkpoint(path: str | Path, kind: str, wanted: str) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """Return path, tensors and task of a checkpoint, or of the newest one in a run's folder."""
    path = Path(path)
    path = path / "last.safetensors" if path.is_dir() else path
    tensors, about = checkpoint.load(path)
    task = checkpoint.task_of(about)
    if task.get("kind") != kind:
        raise BlockSparseError.expected(str(path), wanted, task.get("kind", "something else"))
    return path, tensors, task


def model_config(path: Path, task: dict[str, Any], known: Collection[str], wanted: str) -> dict[str, Any]:
    """Return the configuration of a task's model."""
    config = task.get("model")
    if not isinstance(config, dict) or not config.keys() <= set(known):
        raise BlockSparseError.expected(str(path), f"the configuration of {wanted} of this version", f"{config!r:.200}")
    return config


M = TypeVar("M", bound=nn.Module)


@contextmanager
def report_bad_parameters(path: Path, config: Any) -> Iterator[None]:
    """Report errors of building a model and loading its state as faults of the checkpoint."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, BlockSparseError) as error:  # types of options too
        raise BlockSparseError.expected(str(path), f"parameters of {config}", error) from error


def load_model(
    path: str | Path,
    kind: str,
    expected: str,
    config: type,
    model: type[M],
    sizes: Callable[[dict[str, Any]], Collection[str]],
    empty: Mapping[str, Any],
) -> M:
    """Load the model of a checkpoint or run folder on the CPU, with mean parameters if there are any.

    Args:
        path, kind, expected: as for `read_checkpoint`.
        config: dataclass of the configuration.
        model: builds the model from a configuration and has the attribute `config`.
        sizes: returns the configuration entries that are sizes of some tensor.
        empty: entries for which no layout is drawn, as the tensors bring the layouts.
    """
    path, tensors, task = read_checkpoint(path, kind, expected)
    given = model_config(path, task, {field.name for field in fields(config)}, f"a {model.__name__}")
    usual = asdict(config()) | given
    checkpoint.check_sizes(path, tensors, {name: usual[name] for name in sizes(usual)})
    with report_bad_parameters(path, given):
        of = config(**given)
        with torch.device("meta"):
            made = model(replace(of, **empty, seed=0))
        made.config = of
        load_sparsified(made, part(tensors, "model.") | part(tensors, "ema."))
    return made.eval()
