"""Lightning: the methods of `blocksparse.sparsity` as a callback."""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment]

from ..errors import BlockSparseError
from ..sparsity.training_method import TrainingMethod
from .methods import Maker, Methods

__all__ = ["SparsityCallback"]


class SparsityCallback(Callback):
    """Calls methods of `blocksparse.sparsity` after each step of the optimizer; their state is in the checkpoints.

    A penalty, which a method may have, joins the loss by its gradient.

    Args:
        methods: each a function of the model and its optimizer that makes one when training begins, or a method that
            was made before: L0Gates, MovementPruning and SRSTE, which change the names of the model's parameters, have
            to be, without an optimizer.
        finish: whether pruning methods make the weights block-sparse when training is over.

    Raises:
        BlockSparseError: neither methods nor functions; more optimizers than one.

    Example:
        >>> import blocksparse as bs
        >>> from blocksparse.integrations.lightning import SparsityCallback
        >>> evolve = SparsityCallback(lambda model, optimizer: bs.sparsity.SET(model, optimizer, every=100))

        and then `lightning.Trainer(callbacks=[evolve])`.
    """

    def __init__(self, *methods: TrainingMethod | Maker, finish: bool = True):
        super().__init__()
        self._methods = Methods(methods, finish)
        self._steps = 0
        self._loaded: dict[str, Tensor] | None = None

    @property
    def methods(self) -> list[TrainingMethod]:
        """The methods, once training has begun."""
        return self._methods.made

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise BlockSparseError.expected("the model", "one optimizer", len(trainer.optimizers))
        self._methods.begin(pl_module, trainer.optimizers[0])
        self._steps = trainer.global_step
        if self._loaded is not None:
            self._methods.load_state_dict(self._loaded)
            self._loaded = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._methods.add_penalties()  # gradients are unscaled here, and not clipped yet
        # Lightning computes the gradients within the step, but where it scales the loss.
        if pl_module.automatic_optimization and getattr(trainer.precision_plugin, "scaler", None) is None:
            self._methods.hold_weights()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > self._steps:  # else gradients are still being collected
            self._steps = trainer.global_step
            self._methods.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._methods.finish()

    def state_dict(self) -> dict[str, Any]:
        return self._methods.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict
