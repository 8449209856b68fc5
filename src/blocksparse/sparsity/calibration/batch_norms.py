"""Correction of the running statistics of batch norms after their inputs have changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .passes import MAX_ROWS, MIN_SAMPLES, Passes


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch norm that normalizes by running statistics."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


class Moments:
    """Mean and variance of a module's inputs, float64 `[channels]`, over as many calls as are needed."""

    def __init__(self) -> None:
        self.samples = 0
        self._counts, self._means, self._variances = list[int](), list[Tensor](), list[Tensor]()

    def is_enough(self) -> bool:
        """Return whether the calls had enough samples, and values of each channel."""
        return self.samples >= MIN_SAMPLES and sum(self._counts) >= MAX_ROWS

    def add(self, args: tuple[Any, ...]) -> None:
        """Include a call with these arguments, unless there are enough or it has no samples."""
        if self.is_enough() or not args[0].numel():
            return
        x = args[0].detach().transpose(0, 1).flatten(1).double()
        variance, mean = torch.var_mean(x, 1, correction=0)
        self.samples += len(args[0])
        self._counts.append(x.shape[1])
        self._means.append(mean)
        self._variances.append(variance)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance over all calls."""
        means, variances = torch.stack(self._means), torch.stack(self._variances)
        counts = torch.tensor(self._counts, dtype=torch.float64, device=means.device)[:, None]
        fractions = counts / counts.sum()
        mean = (fractions * means).sum(0)
        return mean, (fractions * (variances + (means - mean).square())).sum(0)


def correct_statistics(name: str, model: nn.Module, dense: Moments, passes: Passes) -> None:
    """Change a batch norm's running statistics as pruning has changed the statistics of its inputs.

    Channels whose variance was 0 keep their running variance.

    Args:
        name: the name of the batch norm.
        model: the pruned model.
        dense: moments of the inputs in the dense model, in the first calls.
        passes: the calibration batches.
    """
    module: Any = model.get_submodule(name)
    pruned = Moments()
    passes.run(model, [name], lambda _, args: pruned.add(args), pruned.is_enough)
    (mean, variance), (old_mean, old_variance) = pruned.result(), dense.result()
    # Written such that equal statistics change nothing, to the bit.
    growth = (variance - old_variance) / old_variance
    growth = torch.where(growth.isfinite(), growth, 0)
    running_mean, running_var = module.running_mean.double(), module.running_var.double()
    new_var = (running_var + growth * (running_var + module.eps)).clamp(min=0)
    shift = (old_mean - running_mean) * (1 - ((new_var + module.eps) / (running_var + module.eps)).sqrt())
    module.running_mean.copy_(running_mean + (mean - old_mean + shift))
    module.running_var.copy_(new_var)
