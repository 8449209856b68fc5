"""The common part of distillation callbacks for training libraries: losses of a student's calls in a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..checked import number
from ..errors import BlockSparseError
from ..sparsity.distillation import Distillation
from ..surgery.model_tools import parameter_device, unwrapped_model

# Arguments of a call that only the student's own loss needs.
LABELS = ("labels", "num_items_in_batch")


class Distiller:
    """Computes the distillation loss of each call of a student in training, from `begin` to `end`.

    Args:
        teacher: the teacher; it is moved to the student's device.
        weight: factor of the loss.
        options: `output`, `hidden` and `temperature` of `Distillation`.
    """

    def __init__(self, teacher: nn.Module, weight: float, options: Mapping[str, Any]):
        Distillation(teacher, teacher, **options)  # report bad options now
        self.teacher, self.weight, self.options = teacher, number("weight", weight, 0), options
        self._stack = ExitStack()

    def begin(self, student: nn.Module, on_loss: Any) -> None:
        """Call `on_loss` with the weighted loss, the output and the keyword arguments of each call in training."""
        self.end()
        if unwrapped_model(student) is unwrapped_model(self.teacher, "teacher"):
            raise BlockSparseError("teacher: it is the model that is trained: pass a copy.deepcopy of the dense model.")
        trained = {parameter for parameter in student.parameters() if parameter.requires_grad}
        if not trained:
            raise BlockSparseError.expected("student", "parameters to train (call requires_grad_(True))", "none")
        if trained <= set(self.teacher.parameters()):
            raise BlockSparseError("teacher: it contains the trained model: pass a copy.deepcopy of the dense model.")
        self.teacher.to(parameter_device(student))
        distillation = Distillation(self.teacher, student, **self.options)
        finish = self._stack.enter_context(distillation.recording())
        is_checked = False

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            nonlocal is_checked
            if not module.training or not torch.is_grad_enabled():
                return
            inputs = {name: value for name, value in kwargs.items() if name not in LABELS}
            targets = distillation.run_teacher(*args, **inputs)
            if not is_checked and not all(bool(each.isfinite().all()) for each in targets.tensors.values()):
                raise BlockSparseError.expected("teacher", "finite outputs", "inf or nan among them")
            is_checked = True
            on_loss(self.weight * distillation.loss(finish(output), targets), output, kwargs)

        self._stack.callback(student.register_forward_hook(hook, with_kwargs=True).remove)

    def end(self) -> None:
        """Remove the hooks from the student."""
        self._stack.close()


def add_to_output(loss: Tensor, output: Any) -> None:
    """Add a loss to the `loss` of an output with names, in place; set it if there is none."""
    own = output.get("loss")
    output["loss"] = loss if own is None else own + loss
