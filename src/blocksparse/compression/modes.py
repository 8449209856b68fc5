"""The modes of a model while it is evaluated, and while it is trained against a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# Batch norms update their statistics in training if batches have at least this number of samples.
MIN_BATCH_FOR_STATISTICS = 16


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the `with` block, and restore the modes of all modules behind it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def training_mode(model: nn.Module, samples: int) -> Iterator[None]:
    """Set the modes to train a student in inside the `with` block, and restore the modes of all modules behind it.

    Most modules are in evaluation mode: the teacher has no dropout either. Batch norms update their statistics if a
    batch has 16 `samples` or more. Recurrent layers without dropout are in training mode, because GPUs need it.
    """
    large = samples >= MIN_BATCH_FOR_STATISTICS
    with evaluation_mode(model):
        for module in model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and large
            if is_norm or (isinstance(module, nn.RNNBase) and not module.dropout):
                module.training = True
        yield
