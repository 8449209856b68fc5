"""Keeps what batch norms put out: their running statistics follow those of their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .passes import Passes


def has_statistics(module: nn.Module) -> bool:
    """Whether it is a batch norm that normalizes by running statistics."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def follow(name: str, model: nn.Module, dense: nn.Module, passes: Passes) -> None:
    """Changes a batch norm's running statistics as pruning changed its inputs': where nothing was, they stay."""
    module: Any = model.get_submodule(name)
    (mean, variance), (old_mean, old_variance) = (_moments(each, name, passes) for each in (model, dense))
    # In such a way that nothing changes where both are the same, to the bit.
    grown = (variance - old_variance) / old_variance
    grown = torch.where(grown.isfinite(), grown, 0)
    known, spread = module.running_mean.double(), module.running_var.double()
    new = (spread + grown * (spread + module.eps)).clamp(min=0)
    apart = (old_mean - known) * (1 - ((new + module.eps) / (spread + module.eps)).sqrt())
    module.running_mean.copy_(known + (mean - old_mean + apart))
    module.running_var.copy_(new)


def _moments(model: nn.Module, name: str, passes: Passes) -> tuple[Tensor, Tensor]:
    """Mean and variance of what reaches a module, float64 `[channels]`."""
    counts, means, variances = [], [], []

    def see(args: tuple[Any, ...]) -> None:
        x = args[0].detach().transpose(0, 1).flatten(1).double()
        variance, mean = torch.var_mean(x, 1, correction=0)
        counts.append(x.shape[1])
        means.append(mean)
        variances.append(variance)

    passes.run(model, name, see)
    parts = torch.tensor(counts, dtype=torch.float64, device=means[0].device)[:, None] / sum(counts)
    mean = (parts * torch.stack(means)).sum(0)
    return mean, (parts * (torch.stack(variances) + (torch.stack(means) - mean).square())).sum(0)
