"""Keep running means of parameters in step with connections that move."""

from __future__ import annotations

from torch import Tensor, nn

from blocksparse.nn.module import BlockSparseModule
from blocksparse.surgery.rewire import OnLayoutChange
from blocksparse.surgery.weight_handle import handle_of


def sync_means(model: nn.Module, means: dict[str, Tensor]) -> OnLayoutChange:
    """Return an `on_layout_change` that makes the means, by parameter name, fit the changed model.

    The mean of a new connection starts at its initial value.
    """
    names = {module: f"{name}.values".removeprefix(".") for name, module in model.named_modules()}

    def on_layout_change(module: BlockSparseModule, source: Tensor) -> None:
        if (name := names[module]) in means:
            means[name] = handle_of(module).remap(means[name], source)

    return on_layout_change
