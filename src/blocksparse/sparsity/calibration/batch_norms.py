"""Correction of the running statistics of batch norms after their inputs have changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .passes import Passes


def has_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch norm that normalizes by running statistics."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def correct_statistics(name: str, model: nn.Module, dense: nn.Module, passes: Passes) -> None:
    """Change a batch norm's running statistics as pruning has changed the statistics of its inputs.

    Channels whose variance was 0 keep their running variance.
    """
    module: Any = model.get_submodule(name)
    (mean, variance), (old_mean, old_variance) = (_moments(each, name, passes) for each in (model, dense))
    # Written such that equal statistics change nothing, to the bit.
    growth = (variance - old_variance) / old_variance
    growth = torch.where(growth.isfinite(), growth, 0)
    running_mean, running_var = module.running_mean.double(), module.running_var.double()
    new_var = (running_var + growth * (running_var + module.eps)).clamp(min=0)
    shift = (old_mean - running_mean) * (1 - ((new_var + module.eps) / (running_var + module.eps)).sqrt())
    module.running_mean.copy_(running_mean + (mean - old_mean + shift))
    module.running_var.copy_(new_var)


def _moments(model: nn.Module, name: str, passes: Passes) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a module's inputs, float64 `[channels]`."""
    counts, means, variances = [], [], []

    def record(args: tuple[Any, ...]) -> None:
        x = args[0].detach().transpose(0, 1).flatten(1).double()
        variance, mean = torch.var_mean(x, 1, correction=0)
        counts.append(x.shape[1])
        means.append(mean)
        variances.append(variance)

    passes.run(model, name, record)
    fractions = torch.tensor(counts, dtype=torch.float64, device=means[0].device)[:, None] / sum(counts)
    mean = (fractions * torch.stack(means)).sum(0)
    return mean, (fractions * (torch.stack(variances) + (torch.stack(means) - mean).square())).sum(0)
