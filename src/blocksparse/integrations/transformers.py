"""Callbacks of transformers' Trainer: methods of `blocksparse.sparsity`, and distillation."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from .. import checkpoint
from ..errors import BlockSparseError
from ..sparsity.training_method import TrainingMethod
from .distillation import Distiller, add_to_output
from .methods import Maker, Methods
from .pretrained import BlockSparseConfig, attach

__all__ = ["BlockSparseConfig", "DistillationCallback", "SparsityCallback", "attach"]


class SparsityCallback(TrainerCallback):
    """A callback that calls methods after each update of the Trainer's optimizer.

    Their state is saved in the Trainer's checkpoints. With `load_best_model_at_end`, the state of the best checkpoint
    is loaded, too. If a method has a penalty, its gradient is added after gradients are clipped.

    The Trainer does not pass callbacks the argument of `train(resume_from_checkpoint=folder)`. If the folder is not in
    `output_dir`, set `TrainingArguments(resume_from_checkpoint=folder)` to it, too. Otherwise the methods load the
    checkpoint of the same step in `output_dir`, or raise an error if there is none.

    Args:
        methods, finish: see `blocksparse.integrations.lightning.SparsityCallback`.

    Raises:
        BlockSparseError: methods (not functions) for a second model, or other arguments.

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
        """The methods, after training has begun."""
        return self._methods.methods

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._methods.begin(kwargs["model"], kwargs["optimizer"])
        if not state.global_step:
            return
        folder = args.resume_from_checkpoint
        try:
            self.load(folder if isinstance(folder, str) else _checkpoint_folder(args, state))
        except BlockSparseError as error:
            hint = "set TrainingArguments(resume_from_checkpoint=FOLDER) to the folder that train() resumes from"
            raise BlockSparseError(f"{error}; {hint}") from error

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        scaler = getattr(kwargs["optimizer"], "scaler", None)
        self._methods.add_penalties(1.0 if scaler is None or args.max_grad_norm else scaler.get_scale())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = _checkpoint_folder(args, state)
        if state.is_world_process_zero and os.path.isdir(folder):
            checkpoint.save(os.path.join(folder, self.FILE), self._methods.state_dict(), {"step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the methods, in the state of the best model if the Trainer has loaded that."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        try:
            if best:  # the Trainer has just loaded its weights
                self.load(best)
        except BlockSparseError as error:
            self._methods.leave_dense(f"the best model was loaded without the state of its methods ({error}).")
        else:
            self._methods.finish()

    def load(self, folder: str) -> None:
        """Load the state of the methods from a checkpoint's folder.

        Raises:
            BlockSparseError: a missing file, or the state of other methods.
        """
        self._methods.load_state_dict(checkpoint.load(os.path.join(folder, self.FILE))[0])


class DistillationCallback(TrainerCallback):
    """A callback that trains the Trainer's model against a teacher: it adds the loss of `sparsity.Distillation`.

    The teacher gets the inputs of each training batch, without labels. If the batch has labels, the model's own loss
    counts too. Evaluation does not change.

    Args:
        teacher: the dense model, such as the one that the model was sparsified from.
        weight: factor of the loss against the teacher, 1 by default.
        output, hidden, temperature: see `sparsity.Distillation`.

    Raises:
        BlockSparseError: options out of range. When training: `label_smoothing_factor`, outputs without names, or a
            teacher with other outputs.

    Example:
        >>> import torch
        >>> from blocksparse.integrations.transformers import DistillationCallback
        >>> distil = DistillationCallback(torch.nn.Linear(8, 8), temperature=2.0)

        and then `transformers.Trainer(model, callbacks=[distil])`, with a SparsityCallback or without.
    """

    def __init__(
        self,
        teacher: nn.Module,
        *,
        weight: float = 1.0,
        output: str = "auto",
        hidden: float = 0.0,
        temperature: float = 1.0,
    ):
        options = {"output": output, "hidden": hidden, "temperature": temperature}
        self._distiller = Distiller(teacher, weight, options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.label_smoothing_factor:
            message = "label_smoothing_factor makes the Trainer ignore the loss of the model's output, and with it the "
            raise BlockSparseError(f"{message}DistillationCallback's: use 0, or DistillationCallback(temperature=2)")

        def add(loss: Tensor, output: Any, inputs: dict[str, Any]) -> None:
            if not isinstance(output, MutableMapping):
                raise BlockSparseError.expected("model", "outputs by name (return_dict=True)", type(output).__name__)
            # With this argument, the Trainer adds up the losses of all accumulated batches, and of all processes.
            if inputs.get("num_items_in_batch") is not None:
                processes = args.world_size if args.average_tokens_across_devices else 1
                loss = loss / (args.gradient_accumulation_steps * processes)
            add_to_output(loss, output)

        self._distiller.begin(kwargs["model"], add)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._distiller.end()


def _checkpoint_folder(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
