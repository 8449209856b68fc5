"""The training loop of a compression: steps against the teacher, evaluation on held-out data, learning rates."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BlockSparseError, warn_user
from ..sparsity.calibration.calibrate import (
    COLUMNS,
    LINE_SECONDS,
    PROGRESS_DELAY,
    batch_error,
    byte_count,
    sample_count,
)
from ..sparsity.distillation import Distillation, Targets, check_same_outputs
from ..surgery.model_tools import evaluation_mode
from .batches import MAX_BYTES, BatchReader, Data, form_of, is_finite

# Batches of this number of forms are tried before training; sequences may have many lengths.
MAX_FORMS = 8

# The learning rates of the range test, its maximum number of steps with each, and its maximum share of the budget.
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
RATE_STEPS, RATE_SHARE = 30, 0.05

# A longer training gains more from a higher rate than a test does. So the highest rate is taken whose loss is at most
# this factor above the best one.
RATE_TOLERANCE = 1.05

# Without the steps for a test, this rate is used.
MIN_RATE_STEPS, DEFAULT_RATE = 5, 1e-3

# The student is evaluated this many times while the budget is used, and at the end of each stage. A stage starts with a
# linear warm-up over this fraction.
CHECKS, WARM_UP = 8, 0.05

# Blocks are dropped during this fraction of the last stage, and of a stage before.
DROP_SHARE, EARLY_DROP_SHARE = 0.2, 0.5

# After a loss that is not finite, training resumes from the last check with this fraction of the rate, a few times.
RATE_CUT, MAX_CUTS = 0.3, 3

# Batch norms use and update the statistics of batches with at least this number of samples, unless this multiplies the
# loss of a few batches by more than a factor: the channels of a pitch tracker differ more than a batch can show.
MIN_BATCH_FOR_STATISTICS, STATISTICS_BATCHES, STATISTICS_TOLERANCE = 16, 3, 1.3

# Of n steps, about the last n / (1 + this number) count in the average of the weights.
AVERAGE_DECAY = 8

# Characters of the bar in the progress line.
BAR = 10

Drop = Callable[[torch.optim.Optimizer | None], object]


@dataclass
class Budget:
    """The time or the steps of a compression, and how much of them is used.

    Args:
        minutes: the time that it may take, or None if `steps` limits it.
        steps: the training steps that it may take, or None.
        earlier_minutes: minutes that were used before an interruption; 0 if the run was not resumed.
        spent_steps: training steps so far, with those before an interruption.
    """

    minutes: float | None
    steps: int | None
    earlier_minutes: float = 0.0
    spent_steps: int = 0
    _begin: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Minutes so far, with those before an interruption."""
        return self.earlier_minutes + (time.monotonic() - self._begin) / 60

    @property
    def used(self) -> float:
        """The fraction of the budget that is used."""
        if self.steps is not None:
            return self.spent_steps / self.steps
        return self.elapsed / self.minutes if self.minutes else 1.0

    def left(self) -> str:
        """Return an estimate of the time left as text, such as "2:05 left", for the progress line."""
        used = self.used
        if self.steps is None and self.minutes is not None:
            seconds = max(0.0, 60 * (self.minutes - self.elapsed))
        else:
            seconds = 60 * (self.elapsed - self.earlier_minutes) * (1 - used) / used if used else 0.0
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


class Training:
    """Trains a student against its teacher on batches.

    Args:
        distillation: the loss with both models.
        reader: splits batches into arguments and labels.
        data: the batches.
        budget: counts time and steps.
        seed: seed of the order of batches.
    """

    def __init__(self, distillation: Distillation, reader: BatchReader, data: Data, budget: Budget, seed: int):
        self.distillation, self.reader, self.data, self.budget = distillation, reader, data, budget
        self.generator = torch.Generator().manual_seed(seed)
        self.label = ""
        self._last: tuple[nn.Module | None, torch.optim.Optimizer | None] = None, None
        self._targets: dict[tuple[bool, int], Targets] = {}
        self._bytes = 0
        self._order: list[int] = []
        self._uses_batch_statistics = True
        self._first_step_time = self._last_shown = 0.0

    @property
    def student(self) -> nn.Module:
        """The model that is trained."""
        return self.distillation.student

    @student.setter
    def student(self, model: nn.Module) -> None:
        self.distillation.student = model

    # -- losses -----------------------------------------------------------------------------------------------

    def targets(self, index: int, *, held_out: bool) -> Targets:
        """Return what the teacher computes for a batch; cached up to 1 GiB.

        Raises:
            BlockSparseError: the teacher fails on the batch, or returns numbers that are not finite.
        """
        if (held_out, index) in self._targets:
            return self._targets[held_out, index]
        batch = (self.data.held_out if held_out else self.data.train)[index]
        args, kwargs = self.reader.arguments(batch)
        try:
            targets = self.distillation.run_teacher(*args, **kwargs)
        except BlockSparseError:
            raise
        except Exception as error:  # the user's module may raise anything
            raise batch_error(self.distillation.teacher, batch, error, with_label=True) from error
        for name, tensor in (*targets.tensors.items(), *targets.hidden.items()):
            if not tensor.isfinite().all():
                which = f"{'held-out ' * held_out}batch {index}"
                if not is_finite(batch):
                    raise BlockSparseError.expected("data", "finite numbers", f"inf or nan in {which}")
                got = f"inf or nan in {name} for {which}"
                raise BlockSparseError.expected("teacher", "finite outputs for all data", got)
        targets = Targets(None, targets.tensors, targets.hidden)
        size = byte_count(targets.tensors) + byte_count(targets.hidden)
        if self._bytes + size <= MAX_BYTES:
            self._bytes += size
            self._targets[held_out, index] = targets
        return targets

    def loss(self, index: int, *, held_out: bool = False) -> tuple[Tensor, Targets, Targets]:
        """Return (loss on a batch, the student's outputs, the teacher's outputs); the loss includes the task loss."""
        targets = self.targets(index, held_out=held_out)
        batch = (self.data.held_out if held_out else self.data.train)[index]
        result = self._run_student(batch)
        loss = self.distillation.loss(result, targets)
        task_loss = self.reader.task_loss(result.output, batch)
        return loss if task_loss is None else loss + task_loss, result, targets

    def _run_student(self, batch: Any) -> Targets:
        """Return what the student computes for a batch; raise a BlockSparseError that names the batch if it fails."""
        args, kwargs = self.reader.arguments(batch)
        try:
            return self.distillation.run_student(*args, **kwargs)
        except BlockSparseError:
            raise
        except Exception as error:  # the user's module may raise anything
            raise batch_error(self.student, batch, error, with_label=True) from error

    def forget_targets(self) -> None:
        """Clear the cache, because other layers are compared from now on."""
        self._targets, self._bytes = {}, 0

    def check(self) -> None:
        """Raise a BlockSparseError unless student and teacher return the same kind of outputs for the first batch.

        The teacher also runs on batches of other forms, on those that are not finite, and on those to fit weights on,
        so that errors in them come now and not after minutes.
        """
        with torch.no_grad(), evaluation_mode(self.student):
            result = self._run_student(self.data.held_out[0])
        check_same_outputs(result.tensors, self.targets(0, held_out=True).tensors)
        seen, calibration = set[Any](), {id(batch) for batch in self.data.calibration()}
        for held_out, batches in ((False, self.data.train), (True, self.data.held_out)):
            for index, batch in enumerate(batches):
                is_new = len(seen) < MAX_FORMS and form_of(batch) not in seen
                seen.add(form_of(batch))
                if is_new or id(batch) in calibration or not is_finite(batch):
                    self.targets(index, held_out=held_out)

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return loss and agreement on the held-out batches; infinity and 0 if the student's outputs are not finite."""
        losses, agreements, counts = [], [], []
        with evaluation_mode(self.student):
            for index, batch in enumerate(self.data.held_out):
                loss, result, targets = self.loss(index, held_out=True)
                losses.append(float(loss))
                agreements.append(self.distillation.agreement(result, targets))
                counts.append(sample_count(batch))
        total = sum(counts)
        loss_mean, agreed = (
            sum(value * count for value, count in zip(values, counts, strict=True)) / total
            for values in (losses, agreements)
        )
        return (loss_mean, agreed) if math.isfinite(loss_mean) else (math.inf, 0.0)

    # -- steps ------------------------------------------------------------------------------------------------

    def train_stage(
        self, end: float, rate: float, drops: Sequence[Drop], on_check: Callable[[float, float], bool]
    ) -> bool:
        """Train until the fraction `end` of the budget is used.

        After a warm-up, the learning rate stays constant; in the last stage, it decays by a cosine. The moments of the
        stage before are kept if it trained the same model, as later drops are based on them.

        Args:
            end: the fraction of the budget, in 0..1.
            rate: the highest learning rate.
            drops: functions that drop blocks of the student, called one after the other in the first part of the stage.
            on_check: called with held-out loss and agreement of the averaged weights, which the student then has, after
                the last drop whenever another `1 / CHECKS` of the budget is used, and at the end. At the end of the
                last stage, it is also called with the weights of the last step. If it returns True, the stage ends
                there.

        Returns:
            whether `on_check` ended the stage.
        """
        self._choose_statistics()
        begin, cuts, dropped = self.budget.used, 0, 0
        next_check = _next_check(begin)
        drop_share = DROP_SHARE if end == 1 else EARLY_DROP_SHARE
        good = copy_state(self.student)
        trained, optimizer = self._last
        if optimizer is None or trained is not self.student:
            optimizer = self._optimizer(rate)
        average = WeightAverage(self.student)
        while (used := self.budget.used) < end:
            done = (used - begin) / (end - begin)
            for group in optimizer.param_groups:
                decay = (1 + math.cos(math.pi * done)) / 2 if end == 1 else 1.0
                group["lr"] = rate * min(1.0, 0.1 + done / WARM_UP) * decay
            if dropped < len(drops) and done * len(drops) >= (dropped + 1) * drop_share:
                drops[dropped](optimizer)
                dropped += 1
                good, average, next_check = copy_state(self.student), WeightAverage(self.student), _next_check(used)
            loss = self._step(optimizer)
            if not math.isfinite(loss):
                self.student.load_state_dict(good)
                optimizer = self._optimizer(rate)
                cuts += 1
                if cuts > MAX_CUTS:
                    warn_user(
                        f"compress: this stage ends at {done:.0%}: losses or gradients are not finite, even with a "
                        f"learning rate of {rate:.1g}. Try other data, loss= or skip=.",
                    )
                    break
                rate *= RATE_CUT
                average = WeightAverage(self.student)
            else:
                average.update()
            self._show(loss)
            if dropped == len(drops) and next_check <= used < end:
                next_check = _next_check(used)
                with average.loaded():
                    if on_check(*self.evaluate()):
                        return True
                good = copy_state(self.student)
        for drop in drops[dropped:]:
            drop(optimizer)
            average = WeightAverage(self.student)
        with average.loaded():
            on_check(*self.evaluate())
        if end == 1:  # in a short run, the average may lag behind the weights of the last step
            on_check(*self.evaluate())
        self._last = self.student, optimizer
        return False

    def find_rate(self, share: float) -> tuple[float, float]:
        """Try each of RATES for a few steps; return the highest rate that is good, and the lowest held-out loss.

        The student's state is restored. If there are too few steps for a test, or no time, the default rate is returned
        untested.

        Args:
            share: fraction of the budget that this may use.
        """
        before, losses = self.evaluate()[0], {}
        too_few = self.budget.steps is not None and share * self.budget.steps < MIN_RATE_STEPS * len(RATES)
        if too_few or self.budget.used >= 1:
            return DEFAULT_RATE, before
        self._choose_statistics()
        begin, state = self.budget.used, copy_state(self.student)
        for number, rate in enumerate(RATES):
            optimizer, end = self._optimizer(rate), begin + share * (number + 1) / len(RATES)
            try:
                for step in range(RATE_STEPS):
                    for group in optimizer.param_groups:
                        group["lr"] = rate * min(1.0, (step + 1) / 5)
                    if not math.isfinite(self._step(optimizer)) or self.budget.used >= end:
                        break
                losses[rate] = self.evaluate()[0]
            finally:  # also if interrupted
                self.student.load_state_dict(state)
            if self.budget.used >= 1:
                break
        best = min(before, *losses.values())
        return max([RATES[0], *(rate for rate in RATES if losses.get(rate, math.inf) <= RATE_TOLERANCE * best)]), best

    @torch.no_grad()
    def _choose_statistics(self) -> None:
        """Choose whether batch norms use and update the statistics of batches in training, or keep theirs."""
        norms = [module for module in self.student.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self._uses_batch_statistics = True
        if not norms:
            return
        buffers = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
        indices, losses = range(min(STATISTICS_BATCHES, len(self.data.train))), []
        for is_trained in (False, True):
            for index in indices:
                samples = sample_count(self.data.train[index]) if is_trained else 0
                with training_mode(self.student, samples):
                    losses.append(float(self.loss(index)[0]))
        for buffer, value in buffers:
            buffer.copy_(value)
        kept, updated = sum(losses[: len(indices)]), sum(losses[len(indices) :])
        self._uses_batch_statistics = not updated > STATISTICS_TOLERANCE * kept

    def _optimizer(self, rate: float) -> torch.optim.Optimizer:
        """Return AdamW, without weight decay, for the student's parameters.

        Frozen ones are included, because pruning looks up the optimizer state of every weight that loses blocks.
        """
        trained = [parameter for parameter in self.student.parameters() if parameter.is_floating_point()]
        # In float16 the usual 1e-8 would be 0.
        eps = max([1e-8, *(torch.finfo(each.dtype).tiny for each in trained)])
        return torch.optim.AdamW(trained, rate, weight_decay=0.0, eps=eps, fused=True)

    def _step(self, optimizer: torch.optim.Optimizer) -> float:
        """Take an optimizer step on the next batch and return the loss.

        If the loss or a gradient is not finite, return NaN without a step.
        """
        if not self._order:
            self._order = torch.randperm(len(self.data.train), generator=self.generator, device="cpu").tolist()
        optimizer.zero_grad()
        index = self._order.pop()
        samples = sample_count(self.data.train[index]) if self._uses_batch_statistics else 0
        with torch.enable_grad(), training_mode(self.student, samples):
            loss, _, _ = self.loss(index)
            if not loss.isfinite():
                return math.nan
            if not loss.requires_grad:
                expected = "parameters to train that its outputs depend on, with gradients"
                raise BlockSparseError.expected("model", expected, "outputs without a gradient")
            loss.backward()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not norm.isfinite():  # also if finite gradients, as of a long recurrence, have squares that overflow
            largest = max(float(gradient.abs().max()) for gradient in gradients)
            if not math.isfinite(largest):
                return math.nan
            for gradient in gradients:
                gradient.div_(largest)
            norm = nn.utils.get_total_norm(gradients)
        if norm > 1:
            torch._foreach_div_(gradients, norm)
        optimizer.step()
        self.budget.spent_steps += 1
        return float(loss.detach())

    def _show(self, loss: float) -> None:
        """Show the state on stderr: in a line of the terminal, or else in a new line every 30 seconds."""
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        self._first_step_time = self._first_step_time or now
        if now - self._first_step_time < (PROGRESS_DELAY if is_terminal else LINE_SECONDS):
            return
        if now - self._last_shown > (0.5 if is_terminal else LINE_SECONDS):
            self._print(f"{self.label}, loss {loss:.3g}, {self.budget.left()}")

    def show_work(self, what: str) -> None:
        """Show on a terminal what is done before, or between, the steps."""
        if sys.stderr.isatty():
            self._print(what)

    def _print(self, text: str) -> None:
        """Print the used part of the budget with a text."""
        self._last_shown = time.monotonic()
        done = int(BAR * min(1.0, self.budget.used))
        line = f"[{'#' * done:-<{BAR}}] {text}"
        if sys.stderr.isatty():
            print(f"\r{line:<{COLUMNS}.{COLUMNS}}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def clear_line(self) -> None:
        """Remove the state from the terminal."""
        if self._last_shown and sys.stderr.isatty():
            print(f"\r{'':{COLUMNS}}\r", end="", file=sys.stderr, flush=True)


class WeightAverage:
    """The average of a model's weights and statistics over its last steps, which has less noise than its weights.

    It has the weights of the last step with the fraction 9 / (n + 8) after n steps, so that about the last tenth of all
    steps counts.

    Args:
        model: the model; its parameters must stay the same objects.

    Source: Shamir, Zhang, Stochastic gradient descent for non-smooth optimization (2013).
    """

    def __init__(self, model: nn.Module):
        tensors = [each.detach() for each in (*model.parameters(), *model.buffers()) if each.is_floating_point()]
        # The average of a mask with -inf would be NaN.
        self._tensors = [each for each in tensors if each.isfinite().all()]
        # Small updates of an average in float16 or bfloat16 would be rounded away.
        self._averages = [
            torch.empty_like(each, dtype=torch.promote_types(each.dtype, torch.float32)).copy_(each)
            for each in self._tensors
        ]
        self._steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Include the model's present weights."""
        self._steps += 1
        weight = (AVERAGE_DECAY + 1) / (self._steps + AVERAGE_DECAY)
        for average, tensor in zip(self._averages, self._tensors, strict=True):
            average.lerp_(tensor.to(average.dtype), weight)

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Load the average into the model inside the `with` block, and its own weights behind it."""
        own = [each.clone() for each in self._tensors]
        try:
            torch._foreach_copy_(self._tensors, self._averages)
            yield
        finally:
            torch._foreach_copy_(self._tensors, own)


def _next_check(used: float) -> float:
    """Return the fraction of the budget after which the student is evaluated next."""
    return (int(used * CHECKS) + 1) / CHECKS


def copy_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of a model's state dict."""
    return {
        name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in model.state_dict().items()
    }


@contextmanager
def training_mode(model: nn.Module, samples: int) -> Iterator[None]:
    """Set the modes to train a student in inside the `with` block, and restore the modes of all modules behind it.

    Most modules are in evaluation mode: the teacher has no dropout either. Batch norms update their statistics if a
    batch has 16 `samples` or more. Recurrent layers without dropout are in training mode, because GPUs need it.
    """
    large = samples >= MIN_BATCH_FOR_STATISTICS
    with evaluation_mode(model):
        for module in model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and large
            if is_norm or (isinstance(module, nn.RNNBase) and not module.dropout):
                module.training = True
        yield
