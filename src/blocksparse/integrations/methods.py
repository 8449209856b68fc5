"""What callbacks of training libraries share: the methods of `blocksparse.sparsity`, at their places in a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import part
from ..errors import BlockSparseError, SparsityWarning
from ..sparsity.pruning.dense_pruner import DensePruner
from ..sparsity.sparse_training.rigl import RigL
from ..sparsity.training_method import TrainingMethod
from ..sparsity.updates import was_skipped
from ..surgery.optimizer import unwrapped

Maker = Callable[[nn.Module, Optimizer], TrainingMethod]


class Methods:
    """Methods in training: each update of the optimizer, from `begin` to `finish`, is followed by their steps.

    Args:
        given: methods, or functions of the model and the optimizer that make them when training begins.
        finish: whether pruning methods put block-sparse modules in place once training is over.
    """

    def __init__(self, given: tuple[TrainingMethod | Maker, ...], finish: bool):
        if not given or not all(isinstance(each, TrainingMethod) or callable(each) for each in given):
            expected = "methods of blocksparse.sparsity, or functions of the model and the optimizer that make them"
            raise BlockSparseError.expected("methods", expected, ", ".join(type(each).__name__ for each in given) or 0)
        self.given, self.finishing = given, finish
        self.made: list[TrainingMethod] = []
        self.model: nn.Module | None = None
        self._hook: Any = None

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Makes the methods for a model; those of an earlier run with the same parameters continue.

        Raises:
            BlockSparseError: methods, not functions that make them, for a second model; a function that makes no
                method, or one that changes the names of the model's parameters.
        """
        self.stop()
        optimizer = unwrapped(optimizer)
        if self.model is not None and set(self.model.parameters()) == set(model.parameters()):
            for method in self.made:
                if not method.finished:
                    method.use_optimizer(optimizer)
        else:
            self._make(model, optimizer)
        # After the methods' own hooks, by which they see the same update.
        self._hook = optimizer.register_step_post_hook(self._after_update)

    def _make(self, model: nn.Module, optimizer: Optimizer) -> None:
        fixed = [type(each).__name__ for each in self.given if isinstance(each, TrainingMethod)]
        if self.model is not None and fixed:
            raise BlockSparseError(
                f"{fixed[0]} was made for the model of an earlier run, and this is another model: make the method and "
                "its SparsityCallback anew for each model, or give the callback a function of the model and the "
                "optimizer that makes the method"
            )
        groups, names = len(optimizer.param_groups), set(model.state_dict())
        made: list[TrainingMethod] = []
        for each in self.given:
            method = each if isinstance(each, TrainingMethod) else each(model, optimizer)
            if not isinstance(method, TrainingMethod):
                raise BlockSparseError.expected("methods", "functions that return a method", type(method).__name__)
            made.append(method)
        if len(optimizer.param_groups) != groups or set(model.state_dict()) != names:
            # Schedulers count the groups, and a checkpoint to resume from has been loaded already.
            expected = "it made before, without an optimizer, as it changes the names of the model's parameters"
            raise BlockSparseError.expected("methods", expected, type(made[-1]).__name__)
        self.model, self.made = model, made

    def hold_weights(self) -> None:
        """Clears the gradients of RigL's iteration, for an optimizer that computes them within its step."""
        for method in self.made:
            if isinstance(method, RigL):
                method.hold_weights()

    def add_penalties(self, loss_scale: float = 1.0) -> None:
        """Adds the gradients of what belongs into the loss."""
        for method in self.made:
            penalty = getattr(method, "penalty", None)
            if penalty is not None and not method.finished and getattr(method, "mode", "penalty") == "penalty":
                (penalty() * loss_scale).backward()

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        if was_skipped(optimizer):
            return
        for method in self.made:
            if not method.finished:
                method.step()

    def stop(self) -> None:
        """Leaves the optimizer alone."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def finish(self) -> None:
        """Finishes the methods whose schedules are over; leaves the models of others dense, with a warning.

        An error in a method's `finish` becomes a warning too, so that the trained model is not lost.
        """
        self.stop()
        for method, name in self._unfinished():
            if method.calls < (getattr(method, "end", None) or 0):
                leave_dense(method, name, _progress(method))
                continue
            try:
                method.finish()
            except Exception as error:
                leave_dense(method, name, f"{type(method).__name__} could not finish ({error})")

    def leave_dense(self, reason: str) -> None:
        """Finishes no method, for the reason that the warnings begin with."""
        self.stop()
        for method, name in self._unfinished():
            leave_dense(method, name, f"{reason} {_progress(method)}")

    def warn_of_interruption(self) -> None:
        """Warns of methods that an exception interrupted; they can continue in another run of the same model."""
        self.stop()
        for method, name in self._unfinished():
            _warn(method, name, f"training was interrupted. {_progress(method)}")

    def _unfinished(self) -> list[tuple[Any, str]]:
        """The methods that are to be finished, and what the user calls them."""
        made = enumerate(self.made if self.finishing else ())
        return [
            (method, f"callback.methods[{at}]")
            for at, method in made
            if hasattr(method, "finish") and not method.finished
        ]

    def state_dict(self) -> dict[str, Tensor]:
        states = enumerate(method.state_dict() for method in self.made)
        return {f"{at}.{key}": tensor for at, state in states for key, tensor in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for at, method in enumerate(self.made):
            method.load_state_dict(part(state, f"{at}."))


def leave_dense(method: Any, name: str, state: str) -> None:
    """Leaves a pruning method's model with plain dense weights, and warns."""
    _warn(method, name, state)
    if isinstance(method, DensePruner):
        method.settle()


def _progress(method: Any) -> str:
    end = getattr(method, "end", None)
    return f"{type(method).__name__} is at step {method.calls}" + ("" if end is None else f" of {end}")


def _warn(method: Any, name: str, state: str) -> None:
    remedy = f"To finish, call {name}.finish()"
    if isinstance(method, DensePruner):
        remedy = (
            f"To store only the {method.density:.0%} of its blocks that are left, call model = "
            f"{name}.finish(early=True). To prune further, train longer, or make the method with a smaller end"
        )
    warnings.warn(f"{state}: the model stays dense. {remedy}", SparsityWarning, stacklevel=2)
