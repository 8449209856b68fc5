"""Lightning callbacks: methods of `blocksparse.sparsity`, and distillation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment]

from ..errors import BlockSparseError
from ..sparsity.sparse_training.dynamic_sparsity import DynamicSparsity
from ..sparsity.training_method import TrainingMethod
from .distillation import Distiller, add_to_output
from .methods import Maker, Methods

__all__ = ["DistillationCallback", "SparsityCallback"]

# Callbacks of Lightning that average weights.
AVERAGING_CALLBACKS = "WeightAveraging", "StochasticWeightAveraging"


class SparsityCallback(Callback):
    """A callback that calls methods after each optimizer update and stores their state in checkpoints.

    If a method has a penalty, its gradient is added. Gradients may be accumulated, optimization may be manual, and
    updates that a GradScaler skips do not count.

    Args:
        methods: functions that take the model and its optimizer and return a method when training begins, or methods
            made earlier. L0Gates, MovementPruning and SRSTE change the names of parameters, so they must be made
            earlier, without an optimizer. With functions, a callback can serve several runs: it makes methods for each
            new model, and the methods of the same model continue.
        finish: whether pruning methods make the weights block-sparse at the end of training (default True). If training
            ends before their schedules, or `finish` fails, the model stays dense, and a SparsityWarning says how to
            finish it. With False, another run can continue.

    Raises:
        BlockSparseError: methods (not functions) for a second model; other arguments; several optimizers; a Lightning
            callback that averages weights while blocks move, or after this one.

    Example:
        >>> import blocksparse as bs
        >>> from blocksparse.integrations.lightning import SparsityCallback
        >>> evolve = SparsityCallback(lambda model, optimizer: bs.sparsity.SET(model, optimizer, every=100))

        and then `lightning.Trainer(callbacks=[evolve])`.
    """

    def __init__(self, *methods: TrainingMethod | Maker, finish: bool = True):
        super().__init__()
        self._methods = Methods(methods, finish)
        self._loaded: dict[str, Tensor] | None = None

    @property
    def methods(self) -> list[TrainingMethod]:
        """The methods, after training has begun."""
        return self._methods.methods

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise BlockSparseError.expected("the model", "one optimizer", len(trainer.optimizers))
        self._methods.begin(pl_module, trainer.optimizers[0])
        self._check_averages(trainer.callbacks)
        if self._loaded is not None:
            self._methods.load_state_dict(self._loaded)
            self._loaded = None

    def _check_averages(self, callbacks: Sequence[Any]) -> None:
        """Raise a BlockSparseError for callbacks that would average blocks of different positions."""
        for position, callback in enumerate(callbacks):
            if not any(kind.__name__ in AVERAGING_CALLBACKS for kind in type(callback).__mro__):
                continue
            name = type(callback).__name__
            for method in self.methods:
                if isinstance(method, DynamicSparsity):
                    raise BlockSparseError(
                        f"callbacks: {name} averages weights by position, but {type(method).__name__} moves blocks. "
                        "Use torch.optim.swa_utils.AveragedModel instead, and give the method "
                        "on_layout_change=blocksparse.sparsity.sync_ema(model, averaged)"
                    )
            if position > callbacks.index(self):
                raise BlockSparseError(
                    f"callbacks: put {name} before SparsityCallback, which changes shapes of weights when training ends"
                )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._methods.add_penalties()  # gradients are unscaled here, but not clipped yet

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._methods.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._methods.warn_of_interruption()

    def state_dict(self) -> dict[str, Any]:
        return self._methods.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


class DistillationCallback(Callback):
    """A callback that trains a model against a teacher: it adds the loss of `sparsity.Distillation` to each step's.

    The teacher gets the inputs of each call of the student in `training_step`. If there are several calls, their losses
    are averaged.

    Args:
        teacher: the dense model, such as the one that the student was sparsified from.
        student: name of the student in the LightningModule, such as "net"; "" (default) for the LightningModule itself.
        weight: factor of the loss against the teacher, 1 by default.
        output, hidden, temperature: see `sparsity.Distillation`.

    Raises:
        BlockSparseError: options out of range. When training: an unknown student or one that `training_step` does not
            call, manual optimization, or a teacher with other outputs.

    Example:
        >>> import torch
        >>> from blocksparse.integrations.lightning import DistillationCallback
        >>> distil = DistillationCallback(torch.nn.Linear(8, 8), student="net", output="mse")

        and then `lightning.Trainer(callbacks=[distil])`, with a SparsityCallback or without.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: str = "",
        *,
        weight: float = 1.0,
        output: str = "auto",
        hidden: float = 0.0,
        temperature: float = 1.0,
    ):
        super().__init__()
        options = {"output": output, "hidden": hidden, "temperature": temperature}
        self.student, self._distiller = student, Distiller(teacher, weight, options)
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        names = [name for name, _ in pl_module.named_modules()]
        if self.student not in names:
            raise BlockSparseError.expected("student", f"one of {', '.join(names[1:9])}", repr(self.student))
        if not pl_module.automatic_optimization:
            raise BlockSparseError(
                "DistillationCallback needs automatic_optimization. With a loop of your own, add the loss of "
                "blocksparse.sparsity.Distillation(teacher, student) yourself."
            )
        self._distiller.begin(pl_module.get_submodule(self.student), lambda loss, *_: self._losses.append(loss))
        training_step = pl_module.training_step
        set_by_user = getattr(training_step, "set_by_user", vars(pl_module).get("training_step"))

        @functools.wraps(training_step)  # Lightning passes the arguments of its signature
        def with_distillation(*args: Any, **kwargs: Any) -> Any:
            self._losses.clear()
            result = training_step(*args, **kwargs)
            if not self._losses:
                expected = "the name of the module that training_step calls"
                raise BlockSparseError.expected("student", expected, f"{self.student!r}, which it does not call")
            loss = torch.stack(self._losses).mean()
            self._losses.clear()
            if isinstance(result, dict):
                add_to_output(loss, result)
                return result
            if result is None:  # skips the batch
                return None
            if not isinstance(result, Tensor):
                raise BlockSparseError.expected("training_step", "a tensor, a dict or None as its result", type(result))
            return result + loss

        with_distillation.set_by_user = set_by_user  # type: ignore[attr-defined]
        pl_module.training_step = with_distillation

    def _end(self, pl_module: Any) -> None:
        training_step = vars(pl_module).get("training_step")
        if hasattr(training_step, "set_by_user"):  # Lightning also reports exceptions before training
            del pl_module.training_step
            if training_step.set_by_user is not None:
                pl_module.training_step = training_step.set_by_user
        self._distiller.end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(pl_module)
