"""Read and check what a run's folder records. Its files may be broken, or written by someone else."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blocksparse import checkpoint
from blocksparse.checked import integer, is_state_of_blocks, number
from blocksparse.checkpoint import part
from blocksparse.errors import BlockSparseError

from .settings import Settings

_AGAIN = "delete this file and run again to rewrite it"


class Progress(NamedTuple):
    """Progress of a run: `logged` is step and seconds of the newest log line, `codes` name the versions that ran."""

    step: int
    seconds: float
    cpu_seconds: float
    logged: tuple[int, float]
    held_out: float | None
    codes: frozenset[str]


def read_progress(path: Path, about: Mapping[str, Any], steps: int) -> Progress:
    """Read the progress of a run of `steps` steps from its checkpoint's metadata."""
    logged, held_out, codes = about.get("logged"), about.get("held_out"), about.get("codes", [])
    if not isinstance(logged, list) or len(logged) != 2:
        raise BlockSparseError.expected(f"{path}, logged", "a step and seconds", f"{logged!r:.99}")
    if held_out is not None and not isinstance(held_out, float | int):
        raise BlockSparseError.expected(f"{path}, held_out", "a number or null", f"{held_out!r:.99}")
    if not isinstance(codes, list) or not all(isinstance(one, str) for one in codes):
        raise BlockSparseError.expected(f"{path}, codes", "a list of strings", f"{codes!r:.99}")
    step = integer(f"{path}, step", about.get("step"), 0, steps + 1, "the steps")
    seconds = number(f"{path}, seconds", about.get("seconds"), 0)
    cpu_seconds = number(f"{path}, cpu_seconds", about.get("cpu_seconds", 0.0), 0)
    at = integer(f"{path}, logged step", logged[0], 0, step + 1), number(f"{path}, logged seconds", logged[1], 0)
    return Progress(step, seconds, cpu_seconds, at, held_out, frozenset(codes))


def check_tensors(path: Path, tensors: Mapping[str, Tensor], model: nn.Module, means: Collection[str]) -> None:
    """Check that a checkpoint's tensors fit a model, its running means and its optimizer's state."""
    stored, own = part(tensors, "model."), model.state_dict()

    def check(name: str, shape: list[int | None], dtype: torch.dtype | None) -> None:
        tensor = tensors.get(name)
        wanted = f"{str(shape).replace('None', 'any')}{f', {dtype}' if dtype else ''}"
        if tensor is None:
            raise BlockSparseError.expected(f"{path}, {name}", wanted, "none")
        fits = tensor.dim() == len(shape) and all(
            size is None or size == there for size, there in zip(shape, tensor.shape, strict=True)
        )
        if not fits or dtype not in (None, tensor.dtype):
            raise BlockSparseError.expected(f"{path}, {name}", wanted, f"{list(tensor.shape)}, {tensor.dtype}")

    for unknown in stored.keys() - own.keys():
        raise BlockSparseError.expected(str(path), "only tensors of the model", f"model.{unknown}")
    for name, tensor in own.items():
        module, _, last = name.rpartition(".")
        if last in ("values", "crow_indices", "col_indices") and f"{module}.col_indices".removeprefix(".") in own:
            # The module checks the layout that the checkpoint brings.
            check(f"model.{name}", [None, *tensor.shape[1:]], tensor.dtype if last == "values" else None)
        else:
            check(f"model.{name}", list(tensor.shape), tensor.dtype)
    stored_means = part(tensors, "ema.")
    if stored_means.keys() != set(means):
        one = sorted(stored_means.keys() ^ set(means))[0]
        raise BlockSparseError.expected(str(path), "the running means of the run", f"ema.{one} only in one of them")
    for name in stored_means:
        check(f"ema.{name}", list(stored[name].shape), stored[name].dtype)
    for name in part(tensors, "optimizer."):
        parameter, _, key = name.rpartition(".")
        if parameter not in stored:
            raise BlockSparseError.expected(str(path), "states of the model's parameters", f"optimizer.{name}")
        if not is_state_of_blocks(key, tensors[f"optimizer.{name}"], stored[parameter].shape):
            check(f"optimizer.{name}", [] if key == "step" else list(stored[parameter].shape), None)
    check("trainer.total", [], torch.float64)
    check("rng.cpu", list(torch.get_rng_state().shape), torch.uint8)


@contextmanager
def report_faults(path: Path) -> Iterator[None]:
    """Report errors within it as faults of the checkpoint."""
    try:
        yield
    except BlockSparseError:
        raise
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError) as error:
        got = f"{type(error).__name__}: {str(error).strip()}"
        raise BlockSparseError.expected(str(path), "the state of this task", got) from error


def read_result(path: Path) -> dict[str, Any]:
    """Read `result.json` without a check of its content."""
    try:
        return checkpoint.read_json(path)
    except BlockSparseError as error:
        raise BlockSparseError(f"{error}; {_AGAIN}") from error


def checked_result(path: Path) -> dict[str, Any]:
    """Read `result.json` and check the numbers that every result has."""
    content = read_result(path)
    for name in ("held_out", "steps", "seconds", "bytes_per_second"):
        if not isinstance(content.get(name), int | float):
            wanted = f"a number; {_AGAIN}"
            raise BlockSparseError.expected(f"{path}, {name}", wanted, f"{content.get(name)!r:.99}")
    return content


def with_defaults(settings: dict[str, Any], own: Settings) -> dict[str, Any]:
    """Return saved settings, completed by the defaults of settings that did not exist when the run began.

    Older versions saved only the settings that all runs share. The recipe's own fields then count as equal, since the
    task's description has always been compared too.
    """
    mine, shared = asdict(own), asdict(Settings())
    is_old = not settings.keys() & (mine.keys() - shared.keys())
    usual = (mine if is_old else asdict(type(own)())) | shared
    return {name: usual[name] for name in mine} | settings


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to values by dotted keys, as they come back from JSON."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = json.loads(json.dumps(value))
    return leaves
