"""Compression of a trained model: pruned and trained in turn, against its own outputs, until a density is reached."""

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
from ..checked import integer, number
from ..conversion.load import load_sparsified
from ..conversion.sparsify import DENSITY_TOLERANCE, no_weights_error, select_blocks, sparsify, survey_weights
from ..conversion.speed import Example, keep_faster
from ..errors import BlockSparseError, SparsityWarning, format_reasons
from ..files import writable_folder
from ..sparsity.calibration.calibrate import Batches
from ..sparsity.distillation import Distillation
from ..surgery.model_tools import copy_model, evaluation_mode, unwrapped_model
from ..surgery.prunable import Skip, prunable, skip_by_name
from .batches import BatchReader, Data, Loss
from .measures import calls_weights, density_of, first_example, reorder_features, sparse_modules, speedup_of
from .result import CompressionResult, Point
from .saliency import block_saliency
from .schedule import stage_densities, stage_ends
from .training import RATE_SHARE, Budget, Drop, Training, copy_state

DEFAULT_MINUTES = 10.0

# The model is also fitted at the target density, in one shot, if both fits take less than this fraction of the budget.
FIT_SHARE = 0.3

# With fewer training steps at the target density, a warning is given.
MIN_STEPS = 20

# Blocks are dropped in this number of steps per stage.
DROPS = 8

# The file of a folder: the best model so far, with the state of the run.
BEST = "best.safetensors"

Evaluate = Callable[[nn.Module], float]


@torch.inference_mode(False)
def compress(
    model: nn.Module,
    data: Batches,
    density: float = 0.1,
    block_size: int | tuple[int, int] = 32,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    evaluate: Evaluate | None = None,
    folder: str | Path | None = None,
    skip: Skip = (),
    example: Example | None = None,
    hidden: float = 0.0,
    seed: int = 0,
) -> CompressionResult:
    """Make a trained model block-sparse and fast, and train it to compute what it computed before.

    Weights are pruned in stages, from about half of their blocks to `density`. The first stage fits them to the data,
    as `sparsify` does; each is then trained against the teacher's outputs, and on labels if there are any. Layers that
    are not faster block-sparse on the example stay dense. Hidden features are reordered first, as by
    `sparsity.permute_features`, unless `hidden` is given. An eighth of the data, at most 1,024 samples, is held out;
    the model that is best on it at the target density is returned. If the time allows, that is never worse than the
    model fitted at this density in one shot. A short test finds the learning rates.

    Args:
        model: a trained model; it stays as it is. If it is compiled or parallel, the model inside counts.
        data: two batches of its inputs or more: tensors, tuples or lists of arguments, or dicts of arguments by name.
            One value more than the model has arguments is the label. Batches up to 1 GiB are read once and kept.
        density: fraction of their parameters that weights keep, 0.1 by default, without those that stay dense.
        block_size: an int or (rows, columns), 32 by default.
        minutes: time to use, 10 by default.
        steps: number of training steps instead of a time.
        teacher: the model to agree with; by default the model itself.
        loss: a function of the model's output and the batch that returns a loss to add. By default the `loss` in the
            output, as of transformers with labels, or cross-entropy if the label has one class per row of the output.
        evaluate: a function of a model that returns a number, higher for better ones. It then decides which model is
            the best, and its results are in the curve.
        folder: folder for the best model so far, `best.safetensors` (see `load_sparsified`), and `curve.json`. If it
            has a model of an interrupted run of the same model, the run resumes from it.
        skip: modules, names or shell patterns of weights that stay dense, as for `sparsify`.
        example: inputs to measure speeds on, as for `sparsify`; by default the first held-out batch.
        hidden: weight of the error of hidden layers; see `sparsity.Distillation`.
        seed: seed of the order of batches, 0 by default.

    Returns:
        The model with its curve. After a KeyboardInterrupt, the best so far.

    Raises:
        BlockSparseError: options out of range, both `minutes` and `steps`, fewer than two batches, data that a model
            does not accept, a teacher with other outputs or with outputs that are not finite, a model without weights
            to train, or a folder of another run or one that cannot be written. A `SparsityWarning` says if nothing
            became sparse, the density was not reached, the budget was too short to train, or the disk is full.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
        >>> result = bs.compress(model, torch.randn(256, 512).split(32), density=0.25, steps=20)
        >>> result.model(torch.randn(3, 512)).shape, result.curve[0].density
        (torch.Size([3, 512]), 1.0)

    Source: Kurtic et al., Sparse fine-tuning for inference acceleration of large language models (2023).
    """
    if not number("density", density, 0, 1):
        raise BlockSparseError.expected("density", "a number above 0 and at most 1", density)
    if minutes is not None and steps is not None:
        raise BlockSparseError("minutes and steps: give one of them, the other follows from it.")
    if steps is not None:
        integer("steps", steps, 1)
    else:
        minutes = number("minutes", DEFAULT_MINUTES if minutes is None else minutes, 0)
    model = unwrapped_model(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BlockSparseError.expected("model", "parameters to train (call model.requires_grad_(True))", "none")
    output_folder = None if folder is None else writable_folder("folder", folder)
    budget = Budget(minutes, steps)
    read = Data.read(data)
    reader = BatchReader(model, loss)
    example = first_example(reader, read) if example is None else example
    skip, original = skip_by_name(model, skip), model
    if not hidden:  # the hidden layers of another teacher, or of an earlier run, may have another order
        model = reorder_features(model, example, density, block_size, skip)
    dense_model = copy_model(model).eval()
    teacher = dense_model if teacher is None else unwrapped_model(teacher, "teacher")
    kind = reader.output_kind(dense_model, read.held_out[0], warn=True)
    distillation = Distillation(teacher, copy_model(model), output=kind, hidden=hidden)
    run = _Run(
        dense_model=dense_model,
        training=Training(distillation, reader, read, budget, integer("seed", seed, 0)),
        target=density,
        block_size=block_size,
        example=example,
        evaluate=evaluate,
        folder=output_folder,
        checksum=checkpoint.checksum_of([each for each in original.state_dict().values() if isinstance(each, Tensor)]),
    )
    run.training.check()
    return run.run(skip)


@dataclass(frozen=True)
class _Candidate:
    """The best state of a stage so far, and its point of the curve."""

    state: dict[str, Tensor]
    point: Point


@dataclass(frozen=True)
class _Fitted:
    """The dense model fitted in one shot at the target density, and its point of the curve."""

    model: nn.Module
    point: Point


@dataclass
class _Run:
    """A run of `compress`: its settings, the current stage, the best model and the curve."""

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
        self.chosen_names: set[str] = set()
        self.calibration: list[Any] | None = None  # to fit weights on, unless the model calls none of their layers
        self.sparse_before = sparse_modules(self.dense_model)
        self.is_disk_full = False
        self.stage, self.speedup, self.steps_before = 0, 0.0, 0
        self.best: _Candidate | None = None  # of the current stage
        self.finished: nn.Module | None = None
        self.fitted: _Fitted | None = None

    @property
    def student(self) -> nn.Module:
        return self.training.student

    def run(self, skip: Skip) -> CompressionResult:
        """Run the stages that are left and return the result."""
        modes = {name: module.training for name, module in self.student.named_modules()}
        densities, resumed = stage_densities(self.target), self._resume()
        try:
            if not resumed:
                loss, agreed = self.training.evaluate()
                self.curve.append(Point(1.0, 1.0, agreed, loss, self._metric(), self.training.budget.elapsed))
                if not self._choose(skip):
                    return self._result(modes)
            ends = stage_ends(len(densities), self.training.budget.used)
            while self.stage < len(densities):
                if self.stage and (fitted := self._better_fitted(self.curve[-1])):
                    self.stage = len(densities) - 1
                    self._start_from(fitted)
                self._train(densities[self.stage], ends[self.stage])
                self.stage += 1
            self._finish_stage()  # of a finished run, whose last point is not in the curve of its file
            if fitted := self._better_fitted(self.curve[-1]):
                self._replace_last(fitted)
        except KeyboardInterrupt:
            if self.best is None and self.finished is not None:  # blocks were being dropped
                self.training.student = self.finished
            elif self.best is None and self.fitted is not None:
                self._start_from(self.fitted)
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

    def _choose(self, skip: Skip) -> bool:
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
        self.chosen_names = set(plan.layouts)
        return bool(plan.layouts)

    def _train(self, density: float, end: float) -> None:
        """Bring the student to a density, train it until a fraction of the budget is used, and keep the best state.

        The first stage fits weights of the dense model to the data. Later ones drop blocks in several steps while they
        train.
        """
        budget, is_last = self.training.budget, end == 1.0
        if sparse_modules(self.student) == self.sparse_before:
            dense_student, begin = self.student, budget.elapsed
            self._sparsify(dense_student, density)
            self.training.forget_targets()
            minutes = budget.elapsed - begin
            if not is_last and (budget.minutes is None or budget.elapsed + minutes < FIT_SHARE * budget.minutes):
                student = self.student
                self._fit_at_target(dense_student)
                self.training.student = student
        drops: list[Drop] = []
        before = self._density()
        if before > density * (1 + DENSITY_TOLERANCE):
            steps = [before * (density / before) ** ((step + 1) / DROPS) for step in range(DROPS)]
            drops = [partial(self._drop, each) for each in steps]
        else:
            self._record(*self.training.evaluate())
        self.steps_before = budget.spent_steps
        if budget.used < end:
            rate = self._find_rate(density if drops else None)
            self.steps_before = budget.spent_steps
            if self.training.train_stage(end, rate, drops, self._check) and self.fitted is not None:
                self._start_from(self.fitted)
                self.training.train_stage(end, self._find_rate(None), [], self._check)
        else:
            for drop in drops:
                drop(None)
            self._record(*self.training.evaluate())
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

    def _sparsify(self, dense_student: nn.Module, density: float) -> tuple[float, float]:
        """Make the student block-sparse, fitted or not, whichever is better; return its held-out loss and agreement.

        Fitted recurrent layers may be worse, as their errors add up over steps.
        """
        skip = [weight.name for weight in prunable(dense_student, 1) if weight.name not in self.chosen_names]
        results = []
        with _without_warnings():
            for batches in [self.calibration, None] if self.calibration else [None]:
                student = sparsify(dense_student, density, self.block_size, skip=skip, data=batches, force=True)
                self.training.student = student
                results.append((self.training.evaluate(), student))
        best, self.training.student = min(results, key=lambda result: result[0][0])
        return best

    def _fit_at_target(self, dense_student: nn.Module) -> None:
        """Fit the dense model at the target density, as a lower bound for what training in stages has to reach."""
        loss, agreed = self._sparsify(dense_student, self.target)
        speedup = speedup_of(self.student, self.dense_model, self.example)
        minutes = self.training.budget.elapsed
        self.fitted = _Fitted(self.student, Point(self._density(), speedup, agreed, loss, self._metric(), minutes))

    def _better_fitted(self, point: Point) -> _Fitted | None:
        """Return the model fitted at the target density if it is better than a point of the curve."""
        return self.fitted if self.fitted is not None and _score(self.fitted.point) > _score(point) else None

    def _start_from(self, fitted: _Fitted) -> None:
        """Train the fitted model from now on; it is the best of the stage so far."""
        self.training.student, self.speedup = copy_model(fitted.model), fitted.point.speedup
        self.steps_before = self.training.budget.spent_steps
        self.best = _Candidate(copy_state(fitted.model), fitted.point)

    def _check(self, loss: float, agreed: float) -> bool:
        """Keep the student's state if it is the best; return whether to start from the fitted model instead."""
        self._record(loss, agreed)
        at_target = self._density() <= self.target * (1 + DENSITY_TOLERANCE)
        return at_target and self.best is not None and self._better_fitted(self.best.point) is not None

    def _replace_last(self, fitted: _Fitted) -> None:
        """Replace the last point of the curve, and its model, by the fitted one."""
        self.training.student, self.best = fitted.model, _Candidate(copy_state(fitted.model), fitted.point)
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
        """Return the learning rate that trains the student best after it is pruned to a density."""
        share, student = RATE_SHARE * (1 - self.training.budget.used), self.student
        if density is not None:
            self.training.student = copy_model(student)
            self._drop(density, None)
        try:
            return self.training.find_rate(share)
        finally:
            self.training.student = student

    def _record(self, loss: float, agreed: float) -> None:
        """Keep the student's state if it is the best of its stage, and save the run."""
        self.speedup = self.speedup or speedup_of(self.student, self.dense_model, self.example)
        minutes = self.training.budget.elapsed
        point = Point(self._density(), self.speedup, agreed, loss, self._metric(), minutes)
        if self.best is None or _score(point) > _score(self.best.point):
            self.best = _Candidate(copy_state(self.student), point)
            self.training.label = f"density {point.density:.3g}, {point.speedup:.3g}x, agreement {agreed:.1%}"
        self._save()

    def _finish_stage(self) -> None:
        """Continue with the best state of the stage, and add it to the curve."""
        if self.best is not None:
            self.student.load_state_dict(self.best.state)
            self.curve.append(self.best.point)
            self.finished = copy_model(self.student)
            self.best = None

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
        return [asdict(point) for point in self.curve]

    def _save(self) -> None:
        """Write the best model and the state to resume from."""
        if self.folder is None or self.best is None:
            return
        path, state, budget = self.folder / BEST, self.best.state, self.training.budget
        about = {
            "compress": self._settings,
            "stage": self.stage,
            "minutes": budget.elapsed,
            "steps": budget.spent_steps,
            "dense": self.dense_reasons,
            "curve": self._curve(),
            "best": asdict(self.best.point),
        }
        self._write(lambda: checkpoint.save(path, state, about))

    def _write(self, write: Callable[[], None]) -> None:
        """Write a file; warn if it fails for the first time, because the run may take its time to the end."""
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
        self.best = _Candidate(copy_state(self.student), point)
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
