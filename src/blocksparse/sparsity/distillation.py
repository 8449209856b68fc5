"""A loss that trains a sparse model to compute what a dense one computes: knowledge distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checked import check_model, number
from ..errors import BlockSparseError
from ..nn.module import BlockSparseModule, Weight
from ..surgery.model_tools import evaluation_mode

KINDS = ("auto", "kl", "probabilities", "binary", "cosine", "mse")

# Values of `config.problem_type` of transformers for logits without a softmax.
WITHOUT_SOFTMAX = ("regression", "multi_label_classification")

# Outputs count as probabilities, or as unit vectors, if sums or norms of all rows differ from 1 by less than this.
UNIT_TOLERANCE = 1e-3

# A target counts as constant if its variance is a smaller fraction of its mean square.
CONSTANT = 1e-12


@dataclass(frozen=True)
class Targets:
    """The outputs and hidden activations of a model for a batch.

    Args:
        output: what the model returned.
        tensors: its floating-point tensors by name, without a `loss`.
        hidden: outputs of the compared layers by name.
    """

    output: Any
    tensors: Mapping[str, Tensor]
    hidden: Mapping[str, Tensor] = field(default_factory=dict)


class Distillation:
    """A loss that compares a student with its teacher, for your own training loop.

    Calling it with a batch runs both models, the teacher without gradients and in evaluation mode, and returns the
    loss. `output` then has what the student returned, for a loss on labels. The loss is 0 if both compute the same.

    Args:
        teacher: the dense model; it is not changed.
        student: the model to train, such as a sparsified copy of the teacher.
        output: how outputs are compared.
            "auto" (default): "kl" for outputs named `logits` and for log-probabilities; it recognizes probabilities,
            and unit vectors for "cosine", by their values, and takes "mse" for all others. Logits are also compared by
            "mse" if they have one class or four axes, as of segmentation, or if the `config.problem_type` of a teacher
            of transformers is "regression" or "multi_label_classification".
            "kl": Kullback-Leibler divergence of the softmax of logits.
            "probabilities": the same for outputs of a softmax.
            "binary": binary cross-entropy of outputs of a sigmoid.
            "cosine": 1 - cosine.
            "mse": squared error, divided by the teacher's mean square.
        hidden: weight of the mean squared error of hidden layers, each divided by the teacher's mean square
            (SquareHead); 0 by default. Compared are the outputs of block-sparse layers of the student.
        temperature: divisor of the logits for "kl", 1 by default.

    Raises:
        BlockSparseError: options out of range; when called, outputs that differ in names or shapes, a `hidden` layer
            that the teacher does not have, and a whole batch as one argument that the teacher does not accept.

    Example:
        >>> import torch, blocksparse as bs
        >>> teacher = torch.nn.Linear(64, 64)
        >>> student = bs.sparsify(teacher, density=0.25, force=True)
        >>> distillation = bs.sparsity.Distillation(teacher, student)
        >>> loss = distillation(torch.randn(8, 64))
        >>> loss.backward()
        >>> distillation.output.shape, bool(loss > 0)
        (torch.Size([8, 64]), True)

    Source: Hinton, Vinyals, Dean, Distilling the knowledge in a neural network (2015); Kurtic et al., Sparse
    fine-tuning for inference acceleration of large language models (2023), for SquareHead.
    """

    output: Any = None
    """The return value of the student in the last call."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        *,
        output: str = "auto",
        hidden: float = 0.0,
        temperature: float = 1.0,
    ):
        if output not in KINDS:
            raise BlockSparseError.expected("output", f"one of {', '.join(KINDS)}", repr(output))
        for argument, model in (("teacher", teacher), ("student", student)):
            check_model(model, argument)
        self.teacher, self.student, self.kind = teacher, student, output
        self.hidden, self.temperature = number("hidden", hidden, 0), number("temperature", temperature, 1e-6)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        try:
            targets = self.run_teacher(*args, **kwargs)
        except TypeError as error:
            if batches := [type(each).__name__ for each in args if isinstance(each, tuple | list | Mapping)]:
                expected = "the model's arguments one by one, without labels, as in distillation(x) or (**batch)"
                raise BlockSparseError.expected("batch", expected, f"a {batches[0]}: {error}") from error
            raise
        result = self.run_student(*args, **kwargs)
        self.output = result.output
        return self.loss(result, targets)

    @torch.no_grad()
    def run_teacher(self, *args: Any, **kwargs: Any) -> Targets:
        """Return the targets of a batch, to keep for several calls of `loss`."""
        with evaluation_mode(self.teacher):
            return _run(self.teacher, self._layers(), args, kwargs)

    def run_student(self, *args: Any, **kwargs: Any) -> Targets:
        """Return what the student computes for a batch."""
        return _run(self.student, self._layers(), args, kwargs)

    @contextmanager
    def recording(self) -> Iterator[Callable[[Any], Targets]]:
        """Record hidden layers of the student inside the `with` block, where others call it.

        Yields:
            A function that makes the student's result from the return value of its last call.
        """
        hidden: dict[str, Tensor] = {}
        with _recorded(self.student, self._layers(), hidden):
            yield lambda output: Targets(output, output_tensors(output), dict(hidden))

    def loss(self, result: Targets, targets: Targets) -> Tensor:
        """Return the loss of a student's result."""
        check_same_outputs(result.tensors, targets.tensors)
        losses = [
            compare(result.tensors[name], target, self.kind_of(name, target), self.temperature)
            for name, target in targets.tensors.items()
        ]
        total = torch.stack(losses).mean()
        if self.hidden and targets.hidden:
            errors = [_normalized_error(result.hidden[name], target) for name, target in targets.hidden.items()]
            total = total + self.hidden * torch.stack(errors).mean()
        return total

    def kind_of(self, name: str, target: Tensor) -> str:
        """Return how an output with this name and value of the teacher is compared."""
        return output_kind(name, target, self.teacher) if self.kind == "auto" else self.kind

    def agreement(self, result: Targets, targets: Targets) -> float:
        """Return how well a student's result agrees with the teacher's, at most 1: the lowest agreement of an output.

        If outputs are named logits, only they count.
        """
        names = [name for name in targets.tensors if name.endswith("logits")] or list(targets.tensors)
        return min(
            output_agreement(result.tensors[name], targets.tensors[name], self.kind_of(name, targets.tensors[name]))
            for name in names
        )

    def _layers(self) -> list[str]:
        """Return the names of the student's block-sparse layers whose outputs are compared."""
        if not self.hidden:
            return []
        names = [
            name
            for name, module in self.student.named_modules()
            if isinstance(module, BlockSparseModule) and not isinstance(module, Weight)
        ]
        known = dict(self.teacher.named_modules())
        if missing := [name for name in names if name not in known]:
            raise BlockSparseError.expected("teacher", f"a layer {missing[0]} for hidden=", "none (use hidden=0)")
        return names


# -- outputs -----------------------------------------------------------------------------------------------------


def output_tensors(output: Any, name: str = "") -> dict[str, Tensor]:
    """Return the floating-point tensors in what a model returned by name, without those named `loss`."""
    if isinstance(output, Tensor):
        return {name or "output": output} if output.is_floating_point() else {}
    if isinstance(output, Mapping):
        parts: Iterable[tuple[Any, Any]] = output.items()
    elif isinstance(output, tuple | list):
        names = getattr(output, "_fields", range(len(output)))
        parts = zip(names, output, strict=True)
    elif is_dataclass(output):
        parts = ((field.name, getattr(output, field.name)) for field in fields(output))
    else:
        return {}
    tensors: dict[str, Tensor] = {}
    for key, value in parts:
        if key not in ("loss", "past_key_values"):
            tensors |= output_tensors(value, f"{name}.{key}".lstrip("."))
    return tensors


def check_same_outputs(mine: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Raise a BlockSparseError unless a model and its teacher return tensors of the same names and shapes."""
    shapes, expected = ({name: list(each.shape) for name, each in outputs.items()} for outputs in (others, mine))
    if shapes != expected:
        raise BlockSparseError.expected("teacher", f"outputs of the model's shapes, {expected}", shapes)
    if not expected:
        raise BlockSparseError.expected("model", "floating-point tensors among its outputs", "none")


def output_kind(name: str, target: Tensor, model: nn.Module | None = None) -> str:
    """Return how to compare outputs with this name and value: "kl", "probabilities", "cosine", "binary" or "mse".

    Args:
        name: the output's name.
        target: its value.
        model: the model that computes it, whose config may say that its logits are not those of one class.
    """
    if target.dim() < 2 or target.shape[-1] < 2 or not target.numel():
        return "mse"
    if name.split(".")[-1].endswith("logits"):
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        return "mse" if target.dim() > 3 or problem in WITHOUT_SOFTMAX else "kl"
    rows = target.detach().double().flatten(0, -2)
    low, high = float(rows.min()), float(rows.max())
    if low >= 0 and _all_near_one(rows.sum(1)):
        return "probabilities"
    if high <= 0 and _all_near_one(rows.exp().sum(1)):
        return "kl"
    if _all_near_one(rows.norm(dim=1)):
        return "cosine"
    return "binary" if low >= 0 and high <= 1 else "mse"


def compare(result: Tensor, target: Tensor, kind: str, temperature: float = 1.0) -> Tensor:
    """Return the loss of one output; 0 if it equals the target."""
    result, target = (each if each.dtype == torch.float64 else each.float() for each in (result, target))
    if kind == "cosine":
        return (1 - F.cosine_similarity(result, target, dim=-1)).mean()
    if kind == "mse":
        return _normalized_error(result, target)
    tiny = torch.finfo(result.dtype).eps
    if kind == "binary":
        target = target.to(result.dtype)
        result, target = result.clamp(tiny, 1 - tiny), target.clamp(0, 1)
        entropy = F.binary_cross_entropy(target.clamp(tiny, 1 - tiny), target)
        return (F.binary_cross_entropy(result, target) - entropy) * target.shape[-1]
    if kind == "probabilities":
        logs, target_logs = result.clamp(min=tiny).log(), target.clamp(min=tiny).log()
    else:
        logs, target_logs = ((each / temperature).log_softmax(-1) for each in (result, target))
    return (target_logs.exp() * (target_logs - logs)).sum(-1).mean() * temperature**2


def output_agreement(result: Tensor, target: Tensor, kind: str) -> float:
    """Return how well one output agrees with its target, at most 1.

    This is the fraction of equal largest classes for classes, the mean cosine for "cosine", and otherwise 1 - squared
    error / variance of the target, or / its mean square if the target is constant.
    """
    result, target = result.double(), target.double()
    if kind == "cosine":
        return float(F.cosine_similarity(result, target, dim=-1).mean())
    if kind == "mse":
        square = target.square().mean().clamp(min=torch.finfo(target.dtype).tiny)
        variance = (target - target.mean()).square().mean()
        if variance < CONSTANT * square:
            variance = square
        return float(1 - (result - target).square().mean() / variance)
    return float((result.argmax(-1) == target.argmax(-1)).double().mean())


def _normalized_error(result: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error, divided by the mean square of the target."""
    target = target.to(result.dtype)
    return (result - target).square().mean() / target.square().mean().clamp(min=torch.finfo(result.dtype).tiny)


def _all_near_one(values: Tensor) -> bool:
    return bool(((values - 1).abs() < UNIT_TOLERANCE).all())


# -- runs --------------------------------------------------------------------------------------------------------


def _run(model: nn.Module, layers: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Targets:
    """Run a model, and record the outputs of layers."""
    hidden: dict[str, Tensor] = {}
    with _recorded(model, layers, hidden):
        output = model(*args, **kwargs)
    return Targets(output, output_tensors(output), hidden)


@contextmanager
def _recorded(model: nn.Module, layers: Iterable[str], hidden: dict[str, Tensor]) -> Iterator[None]:
    """Record the first tensor that each of these layers returns in its last call."""

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden[name] = next(iter(output_tensors(output).values()))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(hook_of(name)) for name in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
