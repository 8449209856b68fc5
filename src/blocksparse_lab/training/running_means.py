"""Keeps the running means of a model's parameters in step with connections that move."""

from __future__ import annotations

from torch import Tensor, nn

from blocksparse.nn.module import BlockSparseModule
from blocksparse.surgery.rewire import OnLayoutChange
from blocksparse.surgery.weight_handle import handle_of


def follow(model: nn.Module, means: dict[str, Tensor]) -> OnLayoutChange:
    """An `on_layout_change` after which the means, by the parameters' names, fit the model again.

    The mean of a new connection begins with its first value.
    """
    names = {module: f"{name}.values".removeprefix(".") for name, module in model.named_modules()}

    def on_layout_change(module: BlockSparseModule, source: Tensor) -> None:
        if (name := names[module]) in means:
            means[name] = handle_of(module).remap(means[name], source)

    return on_layout_change
