"""The modes of a model while it is evaluated, and while it is trained against a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# Batch norms update their statistics in training if batches have this number of samples at least.
MIN_BATCH_FOR_STATISTICS = 16


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and the former modes again in the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def training(model: nn.Module, samples: int) -> Iterator[None]:
    """Set the mode in which a student is trained, and the former modes again in the end.

    That is evaluation mode, without dropout, because the teacher has none. Batch norms update their statistics unless
    batches have few `samples`. Recurrent layers need training mode on GPUs.
    """
    large = samples >= MIN_BATCH_FOR_STATISTICS
    with evaluating(model):
        for module in model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and large
            if is_norm or (isinstance(module, nn.RNNBase) and not module.dropout):
                module.training = True
        yield
