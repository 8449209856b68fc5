"""The transformers library: the methods of `blocksparse.sparsity` in its Trainer, and what its models are told."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from .. import checkpoint
from ..errors import BlockSparseError
from ..sparsity.training_method import TrainingMethod
from .methods import Maker, Methods
from .pretrained import BlockSparseConfig, attach

__all__ = ["BlockSparseConfig", "SparsityCallback", "attach"]


class SparsityCallback(TrainerCallback):
    """Calls methods of `blocksparse.sparsity` after each update of the Trainer's optimizer.

    Their state is written into the Trainer's checkpoints, with the model's. With `load_best_model_at_end`, the state of
    the best checkpoint is loaded too. A penalty, which a method may have, joins the loss by its gradient, after
    gradients were clipped.

    Args:
        methods: each a function of the model and its optimizer that makes one when training begins, or a method that
            was made before: L0Gates, MovementPruning and SRSTE, which change the names of the model's parameters, have
            to be, without an optimizer. A callback of functions may serve several runs: it makes methods for each
            model, and those of an earlier run of the same model continue.
        finish: whether pruning methods make the weights block-sparse when training is over. If it ends before their
            schedules, or `finish` fails, the model stays dense, and a SparsityWarning says how to finish it. With
            False nothing is finished, and another run can continue.

    Raises:
        BlockSparseError: methods for a second model; neither methods nor functions.

    Example:
        >>> import blocksparse as bs
        >>> from blocksparse.integrations.transformers import SparsityCallback
        >>> evolve = SparsityCallback(lambda model, optimizer: bs.sparsity.SET(model, optimizer, every=100))

        and then `transformers.Trainer(model, callbacks=[evolve])`.
    """

    FILE = "blocksparse_methods.safetensors"

    def __init__(self, *methods: TrainingMethod | Maker, finish: bool = True):
        self._methods = Methods(methods, finish)

    @property
    def methods(self) -> list[TrainingMethod]:
        """The methods, once training has begun."""
        return self._methods.made

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._methods.begin(kwargs["model"], kwargs["optimizer"])
        if state.global_step:
            given = args.resume_from_checkpoint
            self.load(given if isinstance(given, str) else _checkpoint_folder(args, state))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scaler = getattr(kwargs["optimizer"], "scaler", None)
        self._methods.add_penalties(1.0 if scaler is None or args.max_grad_norm else scaler.get_scale())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _checkpoint_folder(args, state)
        if state.is_world_process_zero and os.path.isdir(folder):
            checkpoint.save(os.path.join(folder, self.FILE), self._methods.state_dict(), {"step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        try:
            if best:  # the Trainer has just loaded its weights
                self.load(best)
        except BlockSparseError as error:
            self._methods.leave_dense(f"the best model was loaded without the state of its methods ({error}).")
        else:
            self._methods.finish()

    def load(self, folder: str) -> None:
        """Loads the state of the methods from a checkpoint's folder; the Trainer finds the one it resumes from.

        Raises:
            BlockSparseError: no such file, or that of other methods.
        """
        self._methods.load_state_dict(checkpoint.load(os.path.join(folder, self.FILE))[0])


def _checkpoint_folder(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
