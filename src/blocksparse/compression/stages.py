"""Runs a compression in stages: drops blocks and trains in turn until a density is reached."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..conversion.load import load_sparsified
from ..conversion.selection import Plan
from ..conversion.sparsify import (
    DENSITY_TOLERANCE,
    Survey,
    fit_values,
    no_weights_error,
    replace_weights,
    select_blocks,
    sparsify,
    survey_weights,
    warn_of_sparse_weights,
)
from ..conversion.speed import KEEPS_ALL, Example, densify_slower, keep_faster
from ..errors import BlockSparseError, SparsityWarning, format_reasons, warn_user
from ..sparsity.selection import least_density
from ..surgery.carry import record_reasons
from ..surgery.model_tools import copy_model, evaluation_mode
from ..surgery.prunable import Skip, prunable
from ..surgery.tied import forget_ties, tie, tied_names
from .candidates import Candidate, OneShot, score
from .measures import SpeedUps, calls_weights, dense_size, density_of, sparse_modules
from .result import CompressionResult, Point
from .run_folder import RunFolder
from .saliency import block_saliency
from .schedule import stage_densities, stage_ends
from .training import RATE_SHARE, Drop, Training, copy_state

# If the fit at the target density takes more than this fraction of the budget, training starts from it. Otherwise the
# model is also fitted at the density of the first stage.
FIT_SHARE = 0.15

# Fitting ends when this fraction of the budget is used, so that some time is left to train the layers that it has not
# reached.
FIT_END = 0.75

# With fewer training steps at the target density, a warning is given.
MIN_STEPS = 20

# A result that agrees less with the dense model, and has a higher metric, may be the worst instead of the best.
DOUBTFUL = 0.9

# Blocks are dropped in this number of steps per stage.
DROPS = 8

# The stage of a run that has fitted the model at the target density, and nothing else so far.
FITTED = -1

Evaluate = Callable[[nn.Module], float]


@dataclass
class CompressionRun:
    """A run of `compress`: its settings, the current stage, the best model and the curve.

    `run` chooses the weights and fits the dense model at the target density, in one shot. Then it brings `student` to
    one density after the other. If the one-shot model promises more once the target is reached, training resumes from
    that one.
    """

    dense_model: nn.Module
    training: Training
    target: float
    block_size: int | tuple[int, int]
    example: Example
    evaluate: Evaluate | None
    folder: RunFolder | None
    has_steps: bool  # whether there are several rows of outputs for each sample, such as tokens
    untied: dict[str, str]  # names of output layers' weights that were those of embeddings, and the embeddings' names

    def __post_init__(self) -> None:
        self.curve: list[Point] = []
        self.dense_reasons: dict[str, str] = {}
        self.weights_to_sparsify: set[str] = set()
        self.full_parameters = 0  # of weights that stay dense because they keep all, or most, of their blocks
        self.calibration: list[Any] | None = None  # to fit weights on, unless the model calls none of their layers
        self.sparse_before = sparse_modules(self.dense_model)
        self.stage, self.speedup, self.steps_before = FITTED, 0.0, 0
        self.speedups = SpeedUps(self.dense_model, self.example)
        self.best_of_stage: Candidate | None = None
        self.model_of_last_stage: nn.Module | None = None
        self.one_shot: OneShot | None = None
        self.started_from_one_shot = False
        self.fit_minutes = 0.0  # of the fit at the target density
        self.is_fit_cut = False

    @property
    def student(self) -> nn.Module:
        return self.training.student

    def run(self, skip: Skip) -> CompressionResult:
        """Run all stages, or those that an interrupted run has left, and return the result."""
        modes = {name: module.training for name, module in self.student.named_modules()}
        try:
            if not self._begin(skip):
                return self._result(modes)
            self._train_all_stages(stage_densities(self.target))
        except KeyboardInterrupt:
            self._return_to_best()
            if len(self.curve) < 2:
                raise
            warn_user(f"compress: interrupted; this is the best model so far, of density {self.curve[-1].density:.3g}")
        else:
            self._warn_if_missed()
        finally:
            self.training.clear_line()
        return self._result(modes)

    # -- stages -----------------------------------------------------------------------------------------------

    def _begin(self, skip: Skip) -> bool:
        """Measure the dense model and fit it in one shot, or resume; return whether there is anything to train."""
        if self._resume():
            if self.stage == FITTED:
                self.weights_to_sparsify = self._find_candidates(skip).weights.keys() - self.dense_reasons.keys()
            return True
        loss, agreed = self.training.evaluate()
        metric = self._metric(self.student)
        if math.isinf(loss):
            got = "inf or nan (check loss= and the labels)"
            raise BlockSparseError.expected("model", "a finite loss on the held-out data", got)
        if metric is not None and math.isnan(metric):
            raise BlockSparseError.expected("evaluate", "a number for the model as it is given", "nan")
        self.curve.append(Point(1.0, 1.0, agreed, loss, metric, self.training.budget.elapsed))
        plan = self._choose_weights(self._find_candidates(skip))
        if plan.layouts:
            self._fit_in_one_shot(plan)
        return bool(plan.layouts)

    def _train_all_stages(self, densities: list[float]) -> None:
        """Bring the student to one density after the other; take the one-shot model instead where that is better."""
        if self.stage == FITTED and self.one_shot is not None:
            self._begin_stages(densities, self.one_shot)
        ends = stage_ends(len(densities), self.training.budget.used)
        while self.stage < len(densities):
            may_restart = self.stage > 0 and not self.started_from_one_shot
            if may_restart and (one_shot := self._better_one_shot(self.curve[-1])):
                self.stage = len(densities) - 1
                self._start_from(one_shot)
            self._train_stage(densities[self.stage], ends[self.stage])
            self.stage += 1
        self._finish_stage()  # if the resumed run had finished: the curve in its file lacks the last point
        if one_shot := self._better_one_shot(self.curve[-1]):
            self._replace_last(one_shot)

    def _return_to_best(self) -> None:
        """Take the best model so far as the student, after an interrupt, and save it."""
        if self.best_of_stage is None and self.model_of_last_stage is not None:  # blocks were being dropped
            self.training.student = self.model_of_last_stage
        elif self.best_of_stage is None and self.one_shot is not None:
            self.stage = FITTED
            self._return_to(self.one_shot)
        if self.best_of_stage is not None:
            self._save(self.best_of_stage, self.stage)
        self._finish_stage()

    def _find_candidates(self, skip: Skip) -> Survey:
        """Return the weights that can become block-sparse, and note whether they can be fitted to data."""
        candidates = survey_weights(self.dense_model, self.block_size, skip)
        if not candidates.weights:
            raise no_weights_error(self.dense_model, candidates)
        warn_of_sparse_weights("compress", candidates)
        calibration = self.training.data.calibration()
        arguments = self.training.reader.arguments(calibration[0])
        is_observed = calls_weights(self.dense_model, candidates.weights.values(), arguments)
        self.calibration = calibration if is_observed else None
        return candidates

    def _choose_weights(self, candidates: Survey) -> Plan:
        """Choose the weights that are faster block-sparse on the example, and return their layouts at the target."""
        model = self.dense_model
        self.training.show_work("choosing weights by their speed")
        plan = select_blocks(model, candidates, self.target, None, "careful", None, self.calibration, limit_loss=False)
        plan = keep_faster(model, plan, self.example)
        self.dense_reasons = {name: plan.reasons[name] for name in candidates.weights if name not in plan.layouts}
        if not plan.layouts:
            listed = "\n  ".join(format_reasons(self.dense_reasons))
            warn_user(
                f"compress: nothing gets faster at density {self.target:.3g}; no weight becomes block-sparse\n"
                f"  {listed}",
            )
        self._tie_others(plan.layouts)
        self._count_full_weights()
        return plan

    def _tie_others(self, sparse: Container[str]) -> None:
        """Tie output layers to embeddings again, as in the user's model, unless their weights become block-sparse."""
        again = {name: embedding for name, embedding in self.untied.items() if name not in sparse}
        for model in (self.student, self.dense_model):
            tie(model, again)
        forget_ties(self.student, self.untied.keys() - again.keys())

    def _count_full_weights(self, names: Collection[str] = ()) -> None:
        """Count the parameters of weights that stay dense because they keep all blocks, and of those with a name."""
        full = {*names, *(name for name, reason in self.dense_reasons.items() if reason.startswith(KEEPS_ALL))}
        sizes = [weight.tensor.numel() for weight in prunable(self.dense_model, 1) if weight.name in full]
        self.full_parameters = sum(sizes)

    def _train_stage(self, density: float, end: float) -> None:
        """Bring the student to a density, train it until the fraction `end` of the budget is used, keep the best state.

        If the student is denser, blocks are dropped in several steps while it trains.
        """
        budget, is_last = self.training.budget, end == 1.0
        drops: list[Drop] = []
        before = self._density()
        if before > density * (1 + DENSITY_TOLERANCE):
            steps = [before * (density / before) ** ((step + 1) / DROPS) for step in range(DROPS)]
            drops = [partial(self._drop, each) for each in steps]
        else:
            self._keep_if_best(*self.training.evaluate())
        self.steps_before = budget.spent_steps
        if budget.used < end:
            rate = self._test_rates()[0] if self.one_shot is None else self.one_shot.rate  # None in a resumed run
            self.steps_before = budget.spent_steps
            if self.training.train_stage(end, rate, drops, self._check_stage) and self.one_shot is not None:
                self._start_from(self.one_shot)
                self.training.train_stage(end, self.one_shot.rate, [], self._check_stage)
        else:
            for drop in drops:
                drop(None)
            self._keep_if_best(*self.training.evaluate())
        count = budget.spent_steps - self.steps_before
        if is_last and budget.minutes is not None and count < MIN_STEPS:
            was = f"only {count} training steps were" if count else "no time to train was"
            warn_user(
                f"compress: {was} left at density {density:.3g} after {budget.elapsed:.1f} minutes, of which fitting "
                f"took {self.fit_minutes:.1f}: give more minutes than {budget.minutes:.3g}, or smaller batches",
            )
        self._finish_stage()

    def _fit_in_one_shot(self, plan: Plan) -> None:
        """Fit the dense model in one shot at the target, by the layouts of a plan."""
        budget = self.training.budget
        begin = budget.elapsed
        self.weights_to_sparsify = set(plan.layouts)
        loss, agreed = self._sparsify_better(self.target, plan)
        self.training.forget_targets()
        self.fit_minutes = budget.elapsed - begin
        speedup = self.speedups.measure(self.student)
        point = Point(self._density(), speedup, agreed, loss, self._metric(self.student), budget.elapsed)
        self.one_shot = OneShot(self.student, point)
        self._save(Candidate(copy_state(self.student), point), FITTED)

    def _begin_stages(self, densities: list[float], one_shot: OneShot) -> None:
        """Test the learning rate of the one-shot model, and choose the first stage.

        If there is time, the dense model is also fitted at the density of that stage. Otherwise it is the last stage,
        in which the one-shot model is trained.
        """
        budget = self.training.budget
        if not one_shot.rate:
            rate, trained_loss = self._test_rates()
            one_shot = self.one_shot = replace(one_shot, rate=rate, trained_loss=trained_loss)
            if self.folder is not None:
                self.folder.save_fit(Candidate(self.student.state_dict(), one_shot.point), rate, trained_loss)
        is_slow = budget.minutes is not None and self.fit_minutes > FIT_SHARE * budget.minutes
        if is_slow or len(densities) == 1:
            self.stage = len(densities) - 1
            self._start_from(one_shot)
        else:
            self._sparsify_better(densities[0])
            self.stage = 0

    @torch.no_grad()
    def _sparsify_better(self, density: float, plan: Plan | None = None) -> tuple[float, float]:
        """Make the student from the dense model, fitted or not, whichever is better; return its loss and agreement.

        Fitted recurrent layers may be worse, as their errors add up over steps. If a model has outputs for each step,
        they are not fitted over whole sequences: this would take minutes, in which training gains more.

        Args:
            density: the density of the chosen weights.
            plan: their layouts if they are selected already.
        """
        self.training.show_work(f"fitting to density {density:.3g}")
        skip = [weight.name for weight in prunable(self.dense_model, 1) if weight.name not in self.weights_to_sparsify]
        results = []
        with _without_warnings():
            for batches in [self.calibration, None] if self.calibration else [None]:
                if plan is None or batches is not self.calibration:
                    candidates = survey_weights(self.dense_model, self.block_size, skip)
                    size = sum(weight.tensor.numel() for weight in candidates.weights.values())
                    least = least_density({name: weight.blocks for name, weight in candidates.weights.items()})
                    options = (max(self._without_full(density, size), least), None, "careful", None, batches)
                    plan = select_blocks(self.dense_model, candidates, *options, limit_loss=False)
                more: dict[str, Any] = {
                    "choose": True,
                    "inplace": False,
                    "states": not self.has_steps,
                    "stop": self._end_fit,
                }
                fitted, chosen = fit_values(self.dense_model, plan, batches, **more)
                student = replace_weights(self.dense_model, fitted, chosen, None, inplace=False)
                self.training.student = student
                results.append((self.training.evaluate(), student))
        best, self.training.student = min(results, key=lambda result: result[0][0])
        return best

    def _end_fit(self) -> bool:
        """Return whether fitting has to end, to leave time for training."""
        self.is_fit_cut = self.training.budget.minutes is not None and self.training.budget.used > FIT_END
        return self.is_fit_cut

    def _better_one_shot(self, point: Point) -> OneShot | None:
        """Return the model fitted in one shot if it is better than a point of the curve, else None."""
        if self.one_shot is None:
            return None
        fitted = self.one_shot.point
        if fitted.metric is None or point.metric is None:  # resumed with another `evaluate`: compare the losses
            fitted, point = replace(fitted, metric=None), replace(point, metric=None)
        return self.one_shot if score(fitted) > score(point) else None

    def _start_from(self, one_shot: OneShot) -> None:
        """Train a copy of the model fitted in one shot from now on."""
        self._return_to(one_shot)
        self.steps_before = self.training.budget.spent_steps
        self.started_from_one_shot = True

    def _return_to(self, one_shot: OneShot) -> None:
        """Take a copy of the model fitted in one shot as the student, and as the best of the stage so far."""
        self.training.student, self.speedup = copy_model(one_shot.model), one_shot.point.speedup
        self.best_of_stage = Candidate(copy_state(one_shot.model), one_shot.point)

    def _check_stage(self, loss: float, agreed: float) -> bool:
        """Keep the student's state if it is the best; return whether to continue with the one-shot model instead."""
        self._keep_if_best(loss, agreed)
        if self.one_shot is None or self.started_from_one_shot:
            return False
        at_target = self._density() <= self.target * (1 + DENSITY_TOLERANCE)
        return at_target and not loss <= self.one_shot.trained_loss

    def _replace_last(self, one_shot: OneShot) -> None:
        """Replace the last point of the curve, and its model, by those of the one-shot fit."""
        self.training.student, best = one_shot.model, Candidate(copy_state(one_shot.model), one_shot.point)
        self.best_of_stage = best
        self.curve.pop()
        self._save(best, self.stage)
        self._finish_stage()

    def _density(self) -> float:
        """Return the density of the student's weights that were dense before, with those that keep all blocks."""
        return density_of(self.student, self.sparse_before, self.full_parameters)

    def _without_full(self, density: float, size: float) -> float:
        """Return the density of block-sparse weights of this dense size if all weights have `density`."""
        return max(density - (1 - density) * self.full_parameters / size, 1 / size)

    def _drop(self, density: float, optimizer: torch.optim.Optimizer | None) -> None:
        """Drop the student's blocks that matter least down to a density; the optimizer, if any, trains the others."""
        skip = [*(weight.name for weight in prunable(self.student, 1)), *self.sparse_before]
        scores = None if optimizer is None else block_saliency(self.student, optimizer, self.sparse_before)
        more: dict[str, Any] = {"optimizer": optimizer, "criterion": scores, "force": True, "inplace": True}
        size = dense_size(self.student, self.sparse_before)
        with _without_warnings(), suppress(BlockSparseError):  # raised if less than a block would be dropped
            sparsify(self.student, self._without_full(density, size), skip=skip, **more)
        self.speedup, self.steps_before = 0.0, self.training.budget.spent_steps

    def _test_rates(self) -> tuple[float, float]:
        """Return the learning rate that trains the student best, and the held-out loss after the test."""
        self.training.show_work("testing learning rates")
        return self.training.find_rate(RATE_SHARE * (1 - self.training.budget.used))

    def _keep_if_best(self, loss: float, agreed: float) -> None:
        """Keep the student's state if it is the best of its stage, and save the run."""
        self.speedup = self.speedup or self.speedups.measure(self.student)
        minutes = self.training.budget.elapsed
        point = Point(self._density(), self.speedup, agreed, loss, self._metric(self.student), minutes)
        if self.best_of_stage is None or score(point) > score(self.best_of_stage.point):
            self.best_of_stage = Candidate(copy_state(self.student), point)
            self.training.label = f"density {point.density:.3g}, {point.speedup:.3g}x, agreement {agreed:.1%}"
        self._save(self.best_of_stage, self.stage)

    def _finish_stage(self) -> None:
        """Load the best state of the stage into the student, and add its point to the curve."""
        if self.best_of_stage is not None:
            self.student.load_state_dict(self.best_of_stage.state)
            self.curve.append(self.best_of_stage.point)
            self.model_of_last_stage = copy_model(self.student)
            self.best_of_stage = None

    def _warn_if_missed(self) -> None:
        """Warn if the fit was stopped, the density of the best model is above the target, or its metric is doubtful."""
        dense, best = self.curve[0], self.curve[-1]
        before, after = dense.metric, best.metric
        if before is not None and after is not None and best.agreement < DOUBTFUL and after > before:
            warn_user(
                f"compress: evaluate returned {after:.4g} for the result and {before:.4g} for the dense "
                f"model, though they agree by {best.agreement:.1%} only. A higher value has to be better: for an "
                "error, return its negative",
            )
        if self.is_fit_cut:
            warn_user(
                f"compress: fitting was stopped after {self.fit_minutes:.1f} minutes, so that some weights kept their "
                "largest blocks unchanged before training: give more minutes or less data",
            )
        reached = self.curve[-1].density
        if reached > self.target * (1 + DENSITY_TOLERANCE):
            warn_user(
                f"compress: the density is {reached:.2g}, not {self.target:.2g}: each weight keeps at least "
                "one block; use a smaller block_size",
            )

    def _result(self, modes: dict[str, bool]) -> CompressionResult:
        """Restore the student's modes, write the curve, and return the result."""
        # Before layers become dense again, which changes the point.
        is_fit = self.one_shot is not None and self.curve[-1] == self.one_shot.point
        self._densify_slower()
        tied = tied_names(self.student)  # `report` explains these itself
        record_reasons(self.student, {name: why for name, why in self.dense_reasons.items() if name not in tied})
        for name, module in self.student.named_modules():
            module.training = modes.get(name, module.training)
        self.student.zero_grad()
        if self.folder is not None:
            self.folder.save_curve(self.curve)
        return CompressionResult(
            model=self.student,
            curve=tuple(self.curve),
            dense=self.dense_reasons,
            example=self.example,
            is_busy=self.speedups.is_busy,
            is_only_fitted=is_fit,
        )

    def _densify_slower(self) -> None:
        """Make layers dense again that are slower block-sparse, because they kept more blocks than planned."""
        self.training.student, reasons = densify_slower(self.student, self.example, self.sparse_before)
        if reasons:
            self.dense_reasons |= reasons
            self._count_full_weights(reasons)
            speedup = self.speedups.measure(self.student)
            self.curve[-1] = replace(self.curve[-1], density=self._density(), speedup=speedup)

    # -- measures ---------------------------------------------------------------------------------------------

    def _metric(self, model: nn.Module) -> float | None:
        """Return what `evaluate` returns for a model, or None without it."""
        if self.evaluate is None:
            return None
        with torch.no_grad(), evaluation_mode(model):
            try:
                value = self.evaluate(model)
            except Exception as error:  # the user's function may raise anything
                got = f"{type(error).__name__}: {error}"
                raise BlockSparseError.expected("evaluate", "a function of the model", got) from error
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise BlockSparseError.expected("evaluate", "a function that returns a number", repr(value)) from error

    # -- files ------------------------------------------------------------------------------------------------

    def _save(self, best: Candidate, stage: int) -> None:
        """Write the best model so far and the state to resume from, which continues in a stage."""
        if self.folder is None:
            return
        budget = self.training.budget
        about = {
            "stage": stage,
            "minutes": budget.elapsed,
            "steps": budget.spent_steps,
            "dense": self.dense_reasons,
            "fit_minutes": self.fit_minutes,
            "from_fit": self.started_from_one_shot,
        }
        self.folder.save(best, self.curve, about)

    def _resume(self) -> bool:
        """Load the best model of the folder and the state of its run; return whether there was one."""
        saved = None if self.folder is None else self.folder.load()
        if saved is None:
            return False
        best, self.curve, about = saved
        self._tie_others([name for name in self.untied if name not in best.state])
        self.curve[0] = self._with_metric(self.curve[0], self.dense_model)
        if self.folder is not None and (fitted := self.folder.load_fit()) is not None:
            fit, rate, trained_loss = fitted
            model = load_sparsified(copy_model(self.student), fit.state)
            self.one_shot = OneShot(model, self._with_metric(fit.point, model), rate, trained_loss)
            self.started_from_one_shot = about.get("from_fit", False)
        self.training.student = load_sparsified(self.student, best.state)
        self.stage, self.dense_reasons = about["stage"], about["dense"]
        self.fit_minutes = about.get("fit_minutes", 0.0)
        self._count_full_weights()
        self.training.budget.earlier_minutes, self.training.budget.spent_steps = about["minutes"], about["steps"]
        self.training.forget_targets()
        point = self._with_metric(best.point, self.student)
        if self.stage != FITTED:
            self.best_of_stage = Candidate(copy_state(self.student), point)
        elif self.one_shot is None:
            self.one_shot = OneShot(self.student, point)
        return True

    def _with_metric(self, point: Point, model: nn.Module) -> Point:
        """Return the point of a model with a metric if `evaluate` is given now, and without one otherwise."""
        has_metric = (point.metric is None) == (self.evaluate is None)
        return point if has_metric else replace(point, metric=self._metric(model))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings of `sparsify` about the density, which the result reports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SparsityWarning)
        yield
