"""The folder of a run of `compress`: the best model so far, what a run needs to resume from it, and the curve."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import checkpoint
from ..errors import BlockSparseError, warn_user
from ..files import writable_folder
from .candidates import Candidate
from .result import Point

# The file of the best model so far, with the state of the run.
BEST = "best.safetensors"

# The file of the curve.
CURVE = "curve.json"

# The file of the model fitted in one shot, which a resumed run returns if training does not improve on it.
FIT = "fit.safetensors"


class RunFolder:
    """A folder that a run writes to, and resumes from.

    Args:
        folder: where it is; it is made if there is none.

    Raises:
        BlockSparseError: it cannot be written, or it has a curve.json of another program or a damaged one.
    """

    def __init__(self, folder: str | Path):
        self.path = writable_folder("folder", folder)
        self.settings: dict[str, Any] = {}
        """Options and checksums that a run has to share with the one in the folder, to resume it."""
        self._has_warned = self._is_taken = False
        self._written: tuple[int, int] | None = None  # marks the file that this run wrote, or resumed from
        self._check_files()

    def save(self, best: Candidate, curve: list[Point], about: dict[str, Any]) -> None:
        """Write the best model so far, the curve up to it, and the state to resume from."""
        about = {"compress": self.settings, "curve": _as_dicts(curve), "best": asdict(best.point), **about}

        def write() -> None:
            try:
                checkpoint.save(self.path / BEST, best.state, about)
            finally:  # an interrupt may come right after the file was written
                self._written = self._mark()

        self._write(write)

    def save_fit(self, fit: Candidate, rate: float, trained_loss: float) -> None:
        """Write the model fitted in one shot, with the learning rate and loss of its range test."""
        about = {"compress": self.settings, "point": asdict(fit.point), "rate": rate, "trained_loss": trained_loss}
        self._write(lambda: checkpoint.save(self.path / FIT, fit.state, about))

    def save_curve(self, curve: list[Point]) -> None:
        """Write the curve of a finished run."""
        text = checkpoint.as_json({"curve": _as_dicts(curve)})
        self._write(lambda: checkpoint.write_text(self.path / CURVE, text))

    def load(self) -> tuple[Candidate, list[Point], dict[str, Any]] | None:
        """Return what `save` wrote, or None if there is nothing; raise a BlockSparseError if it is of another run."""
        self._written = self._mark()
        if self._written is None:
            return None
        state, about = checkpoint.load(self.path / BEST)
        self._check_settings(about.get("compress"))
        best = Candidate(dict[str, Tensor](state), Point(**about["best"]))
        return best, [Point(**each) for each in about["curve"]], about

    def load_fit(self) -> tuple[Candidate, float, float] | None:
        """Return what `save_fit` wrote, or None if there is nothing of this run."""
        if not (self.path / FIT).is_file():
            return None
        state, about = checkpoint.load(self.path / FIT)
        if self._differences(about.get("compress")) not in ([], ["data"]):
            return None
        return Candidate(dict[str, Tensor](state), Point(**about["point"])), about["rate"], about["trained_loss"]

    def _mark(self) -> tuple[int, int] | None:
        """Return what changes whenever somebody writes the best model; None if there is none."""
        try:
            about = os.stat(self.path / BEST)
        except OSError:
            return None
        return about.st_mtime_ns, about.st_ino

    def _write(self, write: Callable[[], None]) -> None:
        """Write a file. If that fails, warn once and continue, because the result is returned anyway."""
        try:
            self._is_taken = self._is_taken or self._mark() not in (None, self._written)
            if self._is_taken:
                expected = "no other run that writes to it (this one is not saved any more)"
                raise BlockSparseError.expected("folder", expected, f"another one in {self.path}")
            write()
        except BlockSparseError as error:
            if not self._has_warned:
                warn_user(f"compress: {error}")
            self._has_warned = True

    def _check_settings(self, stored: Any) -> None:
        """Raise a BlockSparseError unless a run with the stored settings may be resumed; older versions have fewer."""
        different = self._differences(stored)
        if different is None:
            raise BlockSparseError.expected("folder", f"no other {BEST} (use another folder)", f"one in {self.path}")
        if different == ["data"]:
            note = "which had other data (as randomly augmented data are)"
            warn_user(f"compress: resuming the run in {self.path}, {note}")
        elif different:
            mine, others = (", ".join(f"{name} {of[name]}" for name in different) for of in (self.settings, stored))
            hint = "pass these to resume that run, or use another folder; models and data are named by checksums"
            raise BlockSparseError.expected("folder", f"a run with {mine}", f"{self.path} with {others} ({hint})")

    def _differences(self, stored: Any) -> list[str] | None:
        """Return the names of settings that differ from stored ones; None if these are of another program."""
        if not isinstance(stored, dict) or "model" not in stored:
            return None
        return [name for name, value in self.settings.items() if stored.get(name, value) != value]

    def _check_files(self) -> None:
        """Raise a BlockSparseError if there is a file of another program, as it would be overwritten."""
        for name in (BEST, FIT, CURVE):
            if (self.path / name).is_dir():
                raise BlockSparseError.expected(
                    "folder", f"a file or nothing as {name}", f"a folder {self.path / name}"
                )
        if (self.path / FIT).exists() and not (self.path / BEST).exists():  # a run writes it after the best model
            expected = f"no {FIT} without {BEST}, which would be overwritten (use another folder)"
            raise BlockSparseError.expected("folder", expected, self.path / FIT)
        path = self.path / CURVE
        if not path.exists():
            return
        try:
            content = checkpoint.read_json(path)
            points = [Point(**point) for point in content["curve"]]
            is_curve = bool(points) and content.keys() == {"curve"}
        except (BlockSparseError, KeyError, TypeError):
            is_curve = False
        if not is_curve:
            expected = f"a {CURVE} of an earlier run, or none (delete it or use another folder)"
            raise BlockSparseError.expected("folder", expected, f"one of another program, or a damaged one: {path}")


def _as_dicts(curve: list[Point]) -> list[dict[str, Any]]:
    """Return the curve in a form that JSON can express."""
    return [asdict(point) for point in curve]
