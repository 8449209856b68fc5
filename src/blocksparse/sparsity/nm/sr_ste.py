"""N:M sparsity during training: SR-STE, and retraining with a fixed mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...checked import number
from ...errors import BlockSparseError
from ...surgery.model_tools import add_parametrization, remove_parametrization
from ...surgery.prunable import Prunable, Skip, split_refused
from ..training_method import TrainingMethod
from .mask import check_nm, nm_mask


class SRSTE(TrainingMethod):
    """SR-STE: trains a model with N:M sparse weights by the sparse-refined straight-through estimator.

    The forward pass uses mask * w with the current mask, `nm_mask(w, n, m)`. The backward pass sends its gradient g to
    all of w and decays masked weights: g + decay (1 - mask) w. So weights can come back, and masks settle. `step` only
    counts, so that training loops can call it like that of any method.

    Args:
        model: a model whose linear layers, convolutions (also transposed) and Conv1D of transformers are parametrized
            in place. Parameters stay the same objects, so the optimizer may exist already, but their order changes: to
            resume, create the optimizer at the same place of the program.
        n: weights kept in each group, 2 by default.
        m: weights in a group, n or more; 4 by default.
        decay: lambda of the paper, 2e-4 by default.
        skip: modules, or names of modules or parameters, to leave unchanged; none by default.

    Attributes:
        weights: names of the N:M sparse weights.
        left: weights that stay dense, by name, with the reason.

    In a state dict, a weight is `parametrizations.weight.original` until `finish`. A state with frozen masks freezes
    the masks of the model that loads it.

    Raises:
        BlockSparseError: n or m out of range; a decay below 0; no weight can be N:M sparse; `skip` names something that
            the model does not have. Nothing is changed then.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = torch.nn.Linear(8, 16)
        >>> method = bs.sparsity.SRSTE(layer, n=2, m=4)     # then train as usual
        >>> method.finish()
        >>> (layer.weight.detach() != 0).view(16, 2, 4).sum(-1).unique()
        tensor([2])

    Source: Zhou et al., Learning N:M fine-grained structured sparse neural networks from scratch (2021).
    """

    def __init__(self, model: nn.Module, n: int = 2, m: int = 4, *, decay: float = 2e-4, skip: Skip = ()):
        check_nm(n, m)
        decay = number("decay", decay, 0)

        def refusal(weight: Prunable) -> str | None:
            if weight.parameter != "weight":
                return f"{type(weight.module).__name__} has several weights in one call"
            inputs = weight.matrix().shape[1]
            return f"{inputs} inputs are no multiple of {m}" if inputs % m else None

        chosen, self.left = split_refused(model, skip, refusal)
        if not chosen:
            raise BlockSparseError.expected("model", f"a weight that can be {n}:{m} sparse", self.left or "no weight")
        self.weights = tuple(weight.name for weight in chosen)
        self._modules: list[Any] = [weight.module for weight in chosen]
        for weight in chosen:
            swapped = weight.matrix() is not weight.tensor
            add_parametrization(weight.module, "weight", _MaskedWeight(n, m, decay, swapped))
            parametrizations: Any = weight.module.parametrizations
            parametrizations.weight.register_load_state_dict_pre_hook(_freeze_as_saved)
        self._watch_updates()

    def freeze(self) -> None:
        """Fix the masks; the gradient is mask * g from now on.

        Called right after the constructor on a trained model, this is one-shot pruning and retraining with a fixed
        mask.

        Raises:
            BlockSparseError: `finish` was called.
        """
        self._check_unfinished("freeze")
        for module in self._modules:
            with torch.no_grad():
                module.parametrizations.weight[0].freeze(module.parametrizations.weight.original)

    def finish(self) -> None:
        """Remove the parametrizations; the weights are the same parameters as before, masked.

        Raises:
            BlockSparseError: `finish` was called before.
        """
        self._check_unfinished("finish")
        for module in self._modules:
            remove_parametrization(module, "weight", leave_parametrized=True)
        self._modules = []

    @property
    def finished(self) -> bool:
        return not self._modules

    def _named_parameters(self) -> dict[str, Tensor]:
        weights = zip(self.weights, self._modules, strict=False)  # no modules after `finish`
        return {name: module.parametrizations.weight.original for name, module in weights}


class _MaskedWeight(nn.Module):
    """A parametrization that applies a weight's N:M mask, computed in each call unless frozen.

    If `swapped`, the first axis of the weight is that of the inputs.
    """

    mask: Tensor | None

    def __init__(self, n: int, m: int, decay: float, swapped: bool):
        super().__init__()
        self.n, self.m, self.decay, self.swapped = n, m, decay, swapped
        self.register_buffer("mask", None)

    def forward(self, weight: Tensor) -> Tensor:
        if self.mask is not None:
            return weight * self.mask
        return _RefinedStraightThrough.apply(weight, self._mask(weight), self.decay)

    def plain(self, weight: Tensor) -> Tensor:
        return weight * (self._mask(weight) if self.mask is None else self.mask)

    def freeze(self, weight: Tensor) -> None:
        if self.mask is None:
            self.mask = self._mask(weight)

    def _mask(self, weight: Tensor) -> Tensor:
        """Return the N:M mask of a weight along its inputs."""
        if self.swapped:
            return nm_mask(weight.transpose(0, 1), self.n, self.m).transpose(0, 1)
        return nm_mask(weight, self.n, self.m)


def _freeze_as_saved(weight: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Allocate the mask if the state has a frozen one: PyTorch loads only what the module has."""
    mask = state.get(f"{prefix}0.mask")
    if weight[0].mask is None and mask is not None and mask.shape == weight.original.shape:
        weight[0].mask = torch.zeros_like(weight.original, dtype=torch.bool)


class _RefinedStraightThrough(torch.autograd.Function):
    """The product mask * w, with the gradient g + decay (1 - mask) w."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, decay: float) -> Tensor:
        ctx.save_for_backward(weight, mask)
        ctx.decay = decay
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, mask = ctx.saved_tensors
        return grad + ctx.decay * weight.masked_fill(mask, 0), None, None
