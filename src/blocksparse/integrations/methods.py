"""The common part of callbacks for training libraries: calls methods of `blocksparse.sparsity` in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import part
from ..errors import BlockSparseError, warn_user
from ..sparsity.pruning.dense_pruner import DensePruner
from ..sparsity.training_method import TrainingMethod
from ..sparsity.updates import was_skipped
from ..surgery.optimizer import unwrapped

Maker = Callable[[nn.Module, Optimizer], TrainingMethod]


class Methods:
    """The methods of a training; each steps after each optimizer update from `begin` to `finish`.

    Args:
        sources, finish: the arguments `methods` and `finish` of a callback.
    """

    def __init__(self, sources: tuple[TrainingMethod | Maker, ...], finish: bool):
        if not sources or not all(isinstance(each, TrainingMethod) or callable(each) for each in sources):
            expected = "methods of blocksparse.sparsity, or functions of the model and the optimizer that return one"
            got = ", ".join(type(each).__name__ for each in sources) or "none"
            raise BlockSparseError.expected("methods", expected, got)
        self.sources, self.finishing = sources, finish
        self.methods: list[TrainingMethod] = []
        self.model: nn.Module | None = None
        self._hook: Any = None

    def begin(self, model: nn.Module, optimizer: Any) -> None:
        """Make the methods for a model; methods of an earlier run with the same parameters continue.

        Raises:
            BlockSparseError: methods (not functions) for a second model; a function that returns no method; a method
                that changes the names of the model's parameters.
        """
        self.stop()
        optimizer = unwrapped(optimizer)
        if self.model is not None and set(self.model.parameters()) == set(model.parameters()):
            for method in self.methods:
                if not method.finished:
                    method.use_optimizer(optimizer)
        else:
            self._make_methods(model, optimizer)
        # Registered after the methods' own hooks, so that these see the update first.
        self._hook = optimizer.register_step_post_hook(self._after_update)

    def _make_methods(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Set the methods for a new model, after checks."""
        fixed = [type(each).__name__ for each in self.sources if isinstance(each, TrainingMethod)]
        if self.model is not None and fixed:
            raise BlockSparseError(
                f"{fixed[0]} was made for the model of an earlier run, and this is another model: make a method and a "
                "SparsityCallback for each model, or give the callback a function of the model and the optimizer that "
                "returns the method"
            )
        groups, names = len(optimizer.param_groups), set(model.state_dict())
        methods: list[TrainingMethod] = []
        for each in self.sources:
            method = each if isinstance(each, TrainingMethod) else each(model, optimizer)
            if not isinstance(method, TrainingMethod):
                raise BlockSparseError.expected("methods", "functions that return a method", type(method).__name__)
            methods.append(method)
        if len(optimizer.param_groups) != groups or set(model.state_dict()) != names:
            # Schedulers have counted the groups, and the checkpoint to resume from has been loaded already.
            raise BlockSparseError(
                f"methods: {type(methods[-1]).__name__} changes the names of the model's parameters: make it before "
                "training, without an optimizer, and give the callback the method itself"
            )
        self.model, self.methods = model, methods

    def add_penalties(self, loss_scale: float = 1.0) -> None:
        """Add the gradients of the methods' penalties."""
        for method in self.methods:
            penalty = getattr(method, "penalty", None)
            if penalty is not None and not method.finished and getattr(method, "mode", "penalty") == "penalty":
                (penalty() * loss_scale).backward()

    def _after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Step every method after an update of the optimizer that was not skipped."""
        if was_skipped(optimizer):
            return
        for method in self.methods:
            if not method.finished:
                method.step()

    def stop(self) -> None:
        """Remove the hook from the optimizer."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def finish(self) -> None:
        """Finish the methods whose schedules are over; leave the models of others dense, with a warning.

        An error in a method's `finish` becomes a warning, too, so that the trained model is not lost.
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
        """Finish no method, and warn with this reason."""
        self.stop()
        for method, name in self._unfinished():
            leave_dense(method, name, f"{reason} {_progress(method)}")

    def warn_of_interruption(self) -> None:
        """Warn of methods that an exception interrupted; they can continue in another run of the same model."""
        self.stop()
        for method, name in self._unfinished():
            _warn(method, name, f"training was interrupted. {_progress(method)}")

    def _unfinished(self) -> list[tuple[Any, str]]:
        """Return the methods to finish, with the expressions by which a user reaches them."""
        return [
            (method, f"callback.methods[{index}]")
            for index, method in enumerate(self.methods if self.finishing else ())
            if hasattr(method, "finish") and not method.finished
        ]

    def state_dict(self) -> dict[str, Tensor]:
        states = enumerate(method.state_dict() for method in self.methods)
        return {f"{at}.{key}": tensor for at, state in states for key, tensor in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for at, method in enumerate(self.methods):
            method.load_state_dict(part(state, f"{at}."))


def leave_dense(method: Any, name: str, state: str) -> None:
    """Leave a pruning method's model with plain dense weights, and warn."""
    _warn(method, name, state)
    if isinstance(method, DensePruner):
        method.settle()


def _progress(method: Any) -> str:
    """Describe how far a method's schedule is."""
    end = getattr(method, "end", None)
    return f"{type(method).__name__} is at step {method.calls}" + ("" if end is None else f" of {end}")


def _warn(method: Any, name: str, state: str) -> None:
    """Warn that the model stays dense, and how to finish it."""
    remedy = f"To finish, call {name}.finish()"
    if isinstance(method, DensePruner):
        remedy = (
            f"To store only the {method.density:.0%} of its blocks that are left, call model = "
            f"{name}.finish(early=True). To prune further, train longer, or make the method with a smaller end"
        )
    warn_user(f"{state}: the model stays dense. {remedy}")
