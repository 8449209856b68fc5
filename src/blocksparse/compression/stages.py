"""Runs a compression in stages: drops blocks and trains in turn until a density is reached."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import checkpoint
from ..conversion.load import load_sparsified
from ..conversion.sparsify import DENSITY_TOLERANCE, no_weights_error, select_blocks, sparsify, survey_weights
from ..conversion.speed import Example, keep_faster
from ..errors import BlockSparseError, SparsityWarning, format_reasons
from ..surgery.model_tools import copy_model, evaluation_mode
from ..surgery.prunable import Skip, prunable
from .measures import calls_weights, density_of, sparse_modules, speedup_of
from .result import CompressionResult, Point
from .saliency import block_saliency
from .schedule import stage_densities, stage_ends
from .training import RATE_SHARE, Drop, Training, copy_state

# The model is also fitted at the target density, in one shot, if both fits take less than this fraction of the budget.
FIT_SHARE = 0.3

# With fewer training steps at the target density, a warning is given.
MIN_STEPS = 20

# Blocks are dropped in this number of steps per stage.
DROPS = 8

# The file of a folder: the best model so far, with the state of the run.
BEST = "best.safetensors"

Evaluate = Callable[[nn.Module], float]


@dataclass(frozen=True)
class _Candidate:
    """The best state of a stage so far, and its point of the curve."""

    state: dict[str, Tensor]
    point: Point


@dataclass(frozen=True)
class _OneShot:
    """The dense model fitted in one shot at the target density, and its point of the curve."""

    model: nn.Module
    point: Point


@dataclass
class CompressionRun:
    """A run of `compress`: its settings, the current stage, the best model and the curve.

    `run` chooses the weights, then brings `student` to one density after the other. It compares the end of each stage
    with the model that is fitted in one shot at the target density, and continues with the better one.
    """

    dense_model: nn.Module
    training: Training
    target: float
    block_size: int | tuple[int, int]
    example: Example
    evaluate: Evaluate | None
    folder: Path | None
    checksum: str  # of the user's model

    def __post_init__(self) -> None:
        self.curve: list[Point] = []
        self.dense_reasons: dict[str, str] = {}
        self.weights_to_sparsify: set[str] = set()
        self.calibration: list[Any] | None = None  # to fit weights on, unless the model calls none of their layers
        self.sparse_before = sparse_modules(self.dense_model)
        self.is_disk_full = False
        self.stage, self.speedup, self.steps_before = 0, 0.0, 0
        self.best_of_stage: _Candidate | None = None
        self.model_of_last_stage: nn.Module | None = None
        self.one_shot: _OneShot | None = None

    @property
    def student(self) -> nn.Module:
        return self.training.student

    def run(self, skip: Skip) -> CompressionResult:
        """Run all stages, or those that an interrupted run has left, and return the result."""
        modes = {name: module.training for name, module in self.student.named_modules()}
        densities, resumed = stage_densities(self.target), self._resume()
        try:
            if not resumed:
                loss, agreed = self.training.evaluate()
                self.curve.append(Point(1.0, 1.0, agreed, loss, self._metric(), self.training.budget.elapsed))
                if not self._choose_weights(skip):
                    return self._result(modes)
            ends = stage_ends(len(densities), self.training.budget.used)
            while self.stage < len(densities):
                if self.stage and (one_shot := self._better_one_shot(self.curve[-1])):
                    self.stage = len(densities) - 1
                    self._start_from(one_shot)
                self._train_stage(densities[self.stage], ends[self.stage])
                self.stage += 1
            self._finish_stage()  # if the resumed run had finished: the curve in its file lacks the last point
            if one_shot := self._better_one_shot(self.curve[-1]):
                self._replace_last(one_shot)
        except KeyboardInterrupt:
            if self.best_of_stage is None and self.model_of_last_stage is not None:  # blocks were being dropped
                self.training.student = self.model_of_last_stage
            elif self.best_of_stage is None and self.one_shot is not None:
                self._start_from(self.one_shot)
            self._finish_stage()
            if len(self.curve) < 2:
                raise
            warnings.warn(
                f"compress: interrupted; this is the best model so far, of density {self.curve[-1].density:.3g}",
                SparsityWarning,
                stacklevel=3,
            )
        else:
            self._warn_if_missed()
        finally:
            self.training.clear_line()
        return self._result(modes)

    # -- stages -----------------------------------------------------------------------------------------------

    def _choose_weights(self, skip: Skip) -> bool:
        """Choose the weights that are faster block-sparse on the example, and return whether there are any."""
        model = self.dense_model
        candidates = survey_weights(model, self.block_size, skip)
        if not candidates.weights:
            raise no_weights_error(model, candidates)
        calibration = self.training.data.calibration()
        if calls_weights(model, candidates.weights.values(), self.training.reader.arguments(calibration[0])):
            self.calibration = calibration
        plan = select_blocks(model, candidates, self.target, None, "careful", None, self.calibration, limit_loss=False)
        plan = keep_faster(model, plan, self.example)
        self.dense_reasons = {name: plan.reasons[name] for name in candidates.weights if name not in plan.layouts}
        if not plan.layouts:
            listed = "\n  ".join(format_reasons(self.dense_reasons))
            warnings.warn(
                f"compress: nothing gets faster at density {self.target:.3g}; the model stays dense\n  {listed}",
                SparsityWarning,
                stacklevel=4,
            )
        self.weights_to_sparsify = set(plan.layouts)
        return bool(plan.layouts)

    def _train_stage(self, density: float, end: float) -> None:
        """Bring the student to a density, train it until the fraction `end` of the budget is used, keep the best state.

        The first stage sparsifies the dense model. Later ones drop blocks in several steps while they train.
        """
        budget, is_last = self.training.budget, end == 1.0
        if sparse_modules(self.student) == self.sparse_before:
            self._sparsify_dense(density, is_last=is_last)
        drops: list[Drop] = []
        before = self._density()
        if before > density * (1 + DENSITY_TOLERANCE):
            steps = [before * (density / before) ** ((step + 1) / DROPS) for step in range(DROPS)]
            drops = [partial(self._drop, each) for each in steps]
        else:
            self._keep_if_best(*self.training.evaluate())
        self.steps_before = budget.spent_steps
        if budget.used < end:
            rate = self._find_rate(density if drops else None)
            self.steps_before = budget.spent_steps
            if self.training.train_stage(end, rate, drops, self._check_stage) and self.one_shot is not None:
                self._start_from(self.one_shot)
                self.training.train_stage(end, self._find_rate(None), [], self._check_stage)
        else:
            for drop in drops:
                drop(None)
            self._keep_if_best(*self.training.evaluate())
        count = budget.spent_steps - self.steps_before
        if is_last and budget.minutes is not None and count < MIN_STEPS:
            was = f"only {count} training steps were" if count else "no time to train was"
            warnings.warn(
                f"compress: {was} left at density {density:.3g} after {budget.elapsed:.1f} minutes: give more "
                f"minutes than {budget.minutes:.3g}, or smaller batches",
                SparsityWarning,
                stacklevel=5,
            )
        self._finish_stage()

    def _sparsify_dense(self, density: float, *, is_last: bool) -> None:
        """Make the dense student block-sparse, and fit another copy in one shot if the budget allows."""
        budget, dense_student = self.training.budget, self.student
        begin = budget.elapsed
        self._sparsify_better(dense_student, density)
        self.training.forget_targets()
        minutes = budget.elapsed - begin
        if not is_last and (budget.minutes is None or budget.elapsed + minutes < FIT_SHARE * budget.minutes):
            student = self.student
            self._fit_one_shot(dense_student)
            self.training.student = student

    def _sparsify_better(self, dense_student: nn.Module, density: float) -> tuple[float, float]:
        """Make the student block-sparse, fitted or not, whichever is better; return its held-out loss and agreement.

        Fitted recurrent layers may be worse, as their errors add up over steps.
        """
        skip = [weight.name for weight in prunable(dense_student, 1) if weight.name not in self.weights_to_sparsify]
        results = []
        with _without_warnings():
            for batches in [self.calibration, None] if self.calibration else [None]:
                student = sparsify(dense_student, density, self.block_size, skip=skip, data=batches, force=True)
                self.training.student = student
                results.append((self.training.evaluate(), student))
        best, self.training.student = min(results, key=lambda result: result[0][0])
        return best

    def _fit_one_shot(self, dense_student: nn.Module) -> None:
        """Fit the dense model at the target density: a baseline that training in stages has to reach."""
        loss, agreed = self._sparsify_better(dense_student, self.target)
        speedup = speedup_of(self.student, self.dense_model, self.example)
        minutes = self.training.budget.elapsed
        self.one_shot = _OneShot(self.student, Point(self._density(), speedup, agreed, loss, self._metric(), minutes))

    def _better_one_shot(self, point: Point) -> _OneShot | None:
        """Return the model fitted in one shot if it is better than a point of the curve, else None."""
        return self.one_shot if self.one_shot is not None and _score(self.one_shot.point) > _score(point) else None

    def _start_from(self, one_shot: _OneShot) -> None:
        """Continue with a copy of the model fitted in one shot, which is the best of the stage so far."""
        self.training.student, self.speedup = copy_model(one_shot.model), one_shot.point.speedup
        self.steps_before = self.training.budget.spent_steps
        self.best_of_stage = _Candidate(copy_state(one_shot.model), one_shot.point)

    def _check_stage(self, loss: float, agreed: float) -> bool:
        """Keep the student's state if it is the best; return whether to continue with the one-shot model instead."""
        self._keep_if_best(loss, agreed)
        at_target = self._density() <= self.target * (1 + DENSITY_TOLERANCE)
        return (
            at_target and self.best_of_stage is not None and self._better_one_shot(self.best_of_stage.point) is not None
        )

    def _replace_last(self, one_shot: _OneShot) -> None:
        """Replace the last point of the curve, and its model, by those of the one-shot fit."""
        self.training.student, self.best_of_stage = (
            one_shot.model,
            _Candidate(copy_state(one_shot.model), one_shot.point),
        )
        self.curve.pop()
        self._save()
        self._finish_stage()

    def _density(self) -> float:
        """Return the density of the student's weights that were dense before."""
        return density_of(self.student, self.sparse_before)

    def _drop(self, density: float, optimizer: torch.optim.Optimizer | None) -> None:
        """Drop the student's blocks that matter least down to a density; the optimizer, if any, trains the others."""
        skip = [*(weight.name for weight in prunable(self.student, 1)), *self.sparse_before]
        scores = None if optimizer is None else block_saliency(self.student, optimizer, self.sparse_before)
        more: dict[str, Any] = {"optimizer": optimizer, "criterion": scores, "force": True, "inplace": True}
        with _without_warnings(), suppress(BlockSparseError):  # raised if less than a block would be dropped
            sparsify(self.student, density, skip=skip, **more)
        self.speedup, self.steps_before = 0.0, self.training.budget.spent_steps

    def _find_rate(self, density: float | None) -> float:
        """Return the learning rate that trains the student best after pruning to a density; None for no pruning."""
        share, student = RATE_SHARE * (1 - self.training.budget.used), self.student
        if density is not None:
            self.training.student = copy_model(student)
            self._drop(density, None)
        try:
            return self.training.find_rate(share)
        finally:
            self.training.student = student

    def _keep_if_best(self, loss: float, agreed: float) -> None:
        """Keep the student's state if it is the best of its stage, and save the run."""
        self.speedup = self.speedup or speedup_of(self.student, self.dense_model, self.example)
        minutes = self.training.budget.elapsed
        point = Point(self._density(), self.speedup, agreed, loss, self._metric(), minutes)
        if self.best_of_stage is None or _score(point) > _score(self.best_of_stage.point):
            self.best_of_stage = _Candidate(copy_state(self.student), point)
            self.training.label = f"density {point.density:.3g}, {point.speedup:.3g}x, agreement {agreed:.1%}"
        self._save()

    def _finish_stage(self) -> None:
        """Load the best state of the stage into the student, and add its point to the curve."""
        if self.best_of_stage is not None:
            self.student.load_state_dict(self.best_of_stage.state)
            self.curve.append(self.best_of_stage.point)
            self.model_of_last_stage = copy_model(self.student)
            self.best_of_stage = None

    def _warn_if_missed(self) -> None:
        """Warn if the density of the best model is above the target."""
        reached = self.curve[-1].density
        if reached > self.target * (1 + DENSITY_TOLERANCE):
            warnings.warn(
                f"compress: the density is {reached:.2g}, not {self.target:.2g}: each weight keeps at least "
                "one block; use a smaller block_size",
                SparsityWarning,
                stacklevel=4,
            )

    def _result(self, modes: dict[str, bool]) -> CompressionResult:
        """Restore the student's modes, write the curve, and return the result."""
        for name, module in self.student.named_modules():
            module.training = modes.get(name, module.training)
        self.student.zero_grad()
        if self.folder is not None:
            path, text = self.folder / "curve.json", checkpoint.as_json({"curve": self._curve()})
            self._write(lambda: checkpoint.write_text(path, text))
        return CompressionResult(self.student, tuple(self.curve), self.dense_reasons, self.example)

    # -- measures ---------------------------------------------------------------------------------------------

    def _metric(self) -> float | None:
        """Return what `evaluate` returns for the student, or None without it."""
        if self.evaluate is None:
            return None
        with torch.no_grad(), evaluation_mode(self.student):
            value = self.evaluate(self.student)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise BlockSparseError.expected("evaluate", "a function that returns a number", repr(value)) from error

    # -- files ------------------------------------------------------------------------------------------------

    def _curve(self) -> list[dict[str, Any]]:
        """Return the curve in a form that JSON can express."""
        return [asdict(point) for point in self.curve]

    def _save(self) -> None:
        """Write the best model and the state to resume from."""
        if self.folder is None or self.best_of_stage is None:
            return
        path, state, budget = self.folder / BEST, self.best_of_stage.state, self.training.budget
        about = {
            "compress": self._settings,
            "stage": self.stage,
            "minutes": budget.elapsed,
            "steps": budget.spent_steps,
            "dense": self.dense_reasons,
            "curve": self._curve(),
            "best": asdict(self.best_of_stage.point),
        }
        self._write(lambda: checkpoint.save(path, state, about))

    def _write(self, write: Callable[[], None]) -> None:
        """Write a file. If that fails, warn once and continue, because the result is returned anyway."""
        try:
            write()
        except BlockSparseError as error:
            if not self.is_disk_full:
                warnings.warn(f"compress: {error}", SparsityWarning, stacklevel=6)
            self.is_disk_full = True

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Settings that identify the run, with a checksum of the dense model."""
        size = self.block_size
        return {
            "density": self.target,
            "block_size": list(size) if isinstance(size, tuple | list) else size,
            "model": self.checksum,
        }

    def _resume(self) -> bool:
        """Load the best model of the folder and the state of its run; return whether there was one."""
        if self.folder is None or not (self.folder / BEST).is_file():
            return False
        state, about = checkpoint.load(self.folder / BEST)
        if about.get("compress") != self._settings:
            expected = f"a run with {self._settings}, with the model's checksum (use another folder)"
            raise BlockSparseError.expected("folder", expected, f"{self.folder} with {about.get('compress')}")
        self.training.student = load_sparsified(self.student, state)
        self.stage, self.dense_reasons = about["stage"], about["dense"]
        self.training.budget.earlier_minutes, self.training.budget.spent_steps = about["minutes"], about["steps"]
        self.curve, point = [Point(**each) for each in about["curve"]], Point(**about["best"])
        self.training.forget_targets()
        if (point.metric is None) != (self.evaluate is None):
            point = replace(point, metric=self._metric())
        self.best_of_stage = _Candidate(copy_state(self.student), point)
        return True


def _score(point: Point) -> float:
    """Return the score by which models are compared: the metric of `evaluate`, or the negative loss without one."""
    if point.metric is None:
        return -math.inf if point.loss is None else -point.loss
    return -math.inf if math.isnan(point.metric) else point.metric


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings of `sparsify` about the density, which the result reports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparsityWarning)
        yield
