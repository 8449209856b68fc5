"""The folder of a run of `compress`: the best model so far, what a run needs to resume from it, and the curve."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import checkpoint
from ..errors import BlockSparseError, SparsityWarning
from ..files import writable_folder
from .candidates import Candidate
from .result import Point

# The file of the best model so far, with the state of the run.
BEST = "best.safetensors"

# The file of the curve.
CURVE = "curve.json"


class RunFolder:
    """A folder that a run writes to, and resumes from.

    Args:
        folder: where it is; it is made if there is none.

    Raises:
        BlockSparseError: it cannot be written, or it has a curve.json of another program.
    """

    def __init__(self, folder: str | Path):
        self.path = writable_folder("folder", folder)
        self.settings: dict[str, Any] = {}
        """Options and checksums that a run has to share with the one in the folder, to resume it."""
        self.is_disk_full = False
        self._check_curve()

    def save(self, best: Candidate, curve: list[Point], about: dict[str, Any]) -> None:
        """Write the best model so far, the curve up to it, and the state to resume from."""
        about = {"compress": self.settings, "curve": _as_dicts(curve), "best": asdict(best.point), **about}
        self._write(lambda: checkpoint.save(self.path / BEST, best.state, about))

    def save_curve(self, curve: list[Point]) -> None:
        """Write the curve of a finished run."""
        text = checkpoint.as_json({"curve": _as_dicts(curve)})
        self._write(lambda: checkpoint.write_text(self.path / CURVE, text))

    def load(self) -> tuple[Candidate, list[Point], dict[str, Any]] | None:
        """Return what `save` wrote, or None if there is nothing; raise a BlockSparseError if it is of another run."""
        if not (self.path / BEST).is_file():
            return None
        state, about = checkpoint.load(self.path / BEST)
        self._check_settings(about.get("compress"))
        best = Candidate(dict[str, Tensor](state), Point(**about["best"]))
        return best, [Point(**each) for each in about["curve"]], about

    def _write(self, write: Callable[[], None]) -> None:
        """Write a file. If that fails, warn once and continue, because the result is returned anyway."""
        try:
            write()
        except BlockSparseError as error:
            if not self.is_disk_full:
                warnings.warn(f"compress: {error}", SparsityWarning, stacklevel=7)
            self.is_disk_full = True

    def _check_settings(self, stored: Any) -> None:
        """Raise a BlockSparseError unless a run with the stored settings may be resumed; older ones are fewer."""
        if not isinstance(stored, dict) or "model" not in stored:
            raise BlockSparseError.expected("folder", f"no other {BEST} (use another folder)", f"one in {self.path}")
        different = [name for name, value in self.settings.items() if stored.get(name, value) != value]
        if different == ["data"]:
            note = "which had other data (as randomly augmented data are)"
            warnings.warn(f"compress: resuming the run in {self.path}, {note}", SparsityWarning, stacklevel=7)
        elif different:
            mine, others = (", ".join(f"{name} {of[name]}" for name in different) for of in (self.settings, stored))
            hint = "pass these to resume that run, or use another folder; models and data are named by checksums"
            raise BlockSparseError.expected("folder", f"a run with {mine}", f"{self.path} with {others} ({hint})")

    def _check_curve(self) -> None:
        """Raise a BlockSparseError if there is a curve.json that is not of a run, as it would be overwritten."""
        path = self.path / CURVE
        if not path.exists():
            return
        try:
            for point in checkpoint.read_json(path)["curve"]:
                Point(**point)
        except (BlockSparseError, KeyError, TypeError) as error:
            expected = f"no {CURVE} of another program, which would be overwritten (use another folder)"
            raise BlockSparseError.expected("folder", expected, path) from error


def _as_dicts(curve: list[Point]) -> list[dict[str, Any]]:
    """Return the curve in a form that JSON can express."""
    return [asdict(point) for point in curve]
