"""What callbacks of training libraries share: the methods of `blocksparse.sparsity`, at their places in a loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import part
from ..errors import BlockSparseError
from ..sparsity.sparse_training.rigl import RigL
from ..sparsity.training_method import TrainingMethod
from ..surgery.optimizer import unwrapped

Maker = Callable[[nn.Module, Optimizer], TrainingMethod]


class Methods:
    """Methods in training.

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

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Makes the methods, unless they are there from an earlier call."""
        if self.made:
            return
        optimizer = unwrapped(optimizer)
        groups, names = len(optimizer.param_groups), set(model.state_dict())
        for each in self.given:
            method = each if isinstance(each, TrainingMethod) else each(model, optimizer)
            if not isinstance(method, TrainingMethod):
                raise BlockSparseError.expected("methods", "functions that return a method", type(method).__name__)
            self.made.append(method)
        if len(optimizer.param_groups) != groups or set(model.state_dict()) != names:
            # Schedulers count the groups, and a checkpoint to resume from has been loaded already.
            expected = "it made before, without an optimizer, as it changes the names of the model's parameters"
            raise BlockSparseError.expected("methods", expected, type(self.made[-1]).__name__)

    def hold_weights(self) -> None:
        """What RigL has its optimizer call before a step, for one that computes the gradients within the step."""
        for method in self.made:
            if isinstance(method, RigL):
                method.hold_weights()

    def add_penalties(self, loss_scale: float = 1.0) -> None:
        """Adds the gradients of what belongs into the loss."""
        for method in self.made:
            penalty = getattr(method, "penalty", None)
            if penalty is not None and getattr(method, "mode", "penalty") == "penalty":
                (penalty() * loss_scale).backward()

    def step(self) -> None:
        for method in self.made:
            if not method.finished:
                method.step()

    def finish(self) -> None:
        for method in self.made if self.finishing else ():
            finish = getattr(method, "finish", None)
            if finish is None or method.finished:
                continue
            end = getattr(method, "end", None)
            if end is not None and method.calls < end:
                warnings.warn(
                    f"{type(method).__name__} is at step {method.calls} of {end}: the model stays dense. Train longer, "
                    "or make the method with a smaller end",
                    stacklevel=2,
                )
                continue
            finish()

    def state_dict(self) -> dict[str, Tensor]:
        states = enumerate(method.state_dict() for method in self.made)
        return {f"{at}.{key}": tensor for at, state in states for key, tensor in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for at, method in enumerate(self.made):
            method.load_state_dict(part(state, f"{at}."))
