"""Lightning: the methods of `blocksparse.sparsity` as a callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment]

from ..errors import BlockSparseError
from ..sparsity.sparse_training.dynamic_sparsity import DynamicSparsity
from ..sparsity.training_method import TrainingMethod
from .methods import Maker, Methods

__all__ = ["SparsityCallback"]

# Lightning's callbacks that average weights.
AVERAGES = "WeightAveraging", "StochasticWeightAveraging"


class SparsityCallback(Callback):
    """Calls methods of `blocksparse.sparsity` after each update of the optimizer; their state is in the checkpoints.

    A penalty, which a method may have, joins the loss by its gradient. Gradients may be accumulated; updates that a
    GradScaler skips do not count; optimization may be manual.

    Args:
        methods: each a function of the model and its optimizer that makes one when training begins, or a method that
            was made before: L0Gates, MovementPruning and SRSTE, which change the names of the model's parameters, have
            to be, without an optimizer. A callback of functions may serve several runs: it makes methods for each
            model, and those of an earlier run of the same model continue.
        finish: whether pruning methods make the weights block-sparse when training is over. If it ends before their
            schedules, or `finish` fails, the model stays dense, and a SparsityWarning says how to finish it. With
            False nothing is finished, and another run can continue.

    Raises:
        BlockSparseError: methods for a second model; neither methods nor functions; more optimizers than one; a
            callback of Lightning that averages weights while blocks move, or behind this one.

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
        """The methods, once training has begun."""
        return self._methods.made

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise BlockSparseError.expected("the model", "one optimizer", len(trainer.optimizers))
        self._methods.begin(pl_module, trainer.optimizers[0])
        self._check_averages(trainer.callbacks)
        if self._loaded is not None:
            self._methods.load_state_dict(self._loaded)
            self._loaded = None

    def _check_averages(self, callbacks: Sequence[Any]) -> None:
        """Raises a BlockSparseError for callbacks that would average weights of blocks at different places."""
        for position, callback in enumerate(callbacks):
            if not any(kind.__name__ in AVERAGES for kind in type(callback).__mro__):
                continue
            name = type(callback).__name__
            for method in self.methods:
                if isinstance(method, DynamicSparsity):
                    raise BlockSparseError(
                        f"callbacks: {name} averages weights by their positions, and {type(method).__name__} moves "
                        "blocks. Average by torch.optim.swa_utils.AveragedModel instead, with "
                        "on_layout_change=blocksparse.sparsity.sync_ema(model, averaged) of the method"
                    )
            if position > callbacks.index(self):
                raise BlockSparseError(
                    f"callbacks: put {name} before SparsityCallback, which makes the weights smaller when training ends"
                )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._methods.add_penalties()  # gradients are unscaled here, and not clipped yet
        # Lightning computes the gradients within the step, but where it scales the loss.
        if pl_module.automatic_optimization and getattr(trainer.precision_plugin, "scaler", None) is None:
            self._methods.hold_weights()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._methods.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._methods.warn_of_interruption()

    def state_dict(self) -> dict[str, Any]:
        return self._methods.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
