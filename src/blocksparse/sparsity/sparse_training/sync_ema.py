"""Synchronization of the layouts of a model's copy, such as its moving average."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import BlockSparseError
from ...nn.module import BlockSparseModule
from ...surgery.rewire import OnLayoutChange
from ...surgery.weight_handle import handle_of


def sync_ema(model: nn.Module, other: nn.Module) -> OnLayoutChange:
    """Return an `on_layout_change` for `SET`, `RigL` or `rewire` that applies each change to a copy of the model.

    Blocks that stay keep their values in the copy. New blocks get those of the model, so an average starts with the
    first value.

    Args:
        model: the model whose layouts change.
        other: a copy of it with the same layouts, such as `torch.optim.swa_utils.AveragedModel(model)`.

    Raises:
        BlockSparseError: a model without block-sparse weights, or a copy with other layouts.

    Example:
        >>> import torch, blocksparse as bs
        >>> model = bs.nn.Linear(64, 64, density=0.25, block_size=8)
        >>> mean = torch.optim.swa_utils.AveragedModel(model)
        >>> method = bs.sparsity.SET(model, on_layout_change=bs.sparsity.sync_ema(model, mean))
        >>> method.step(), mean.module.layout == model.layout
        (True, True)
    """
    for name, each in (("model", model), ("other", other)):
        if not isinstance(each, nn.Module):
            raise BlockSparseError.expected(name, "a model", type(each).__name__)
    sparse_modules, copied_modules = (
        [module for module in each.modules() if isinstance(module, BlockSparseModule)] for each in (model, other)
    )
    if not sparse_modules:
        raise BlockSparseError.expected("model", "one with block-sparse weights", type(model).__name__)
    if [module.layout for module in sparse_modules] != [module.layout for module in copied_modules]:
        expected = (
            f"a copy of the model, with its {len(sparse_modules)} layouts: create it again, or load the model's state "
            "into it, as in other.load_state_dict(model.state_dict()), before the layouts change"
        )
        raise BlockSparseError.expected("other", expected, [module.layout for module in copied_modules])
    return _ChangeOfCopies(dict(zip(sparse_modules, copied_modules, strict=True)))


class _ChangeOfCopies:
    """A function that applies a module's change of layout to its copy. Unlike a closure, it can be copied and saved."""

    def __init__(self, copies: dict[BlockSparseModule, BlockSparseModule]):
        self.copies = copies

    @torch.no_grad()
    def __call__(self, module: BlockSparseModule, source: Tensor) -> None:
        if module not in self.copies:
            raise BlockSparseError(
                "sync_ema: a layout changed outside of `model`: pass the model that the method changes"
            )
        weight, copied = handle_of(module), handle_of(self.copies[module])
        local = torch.from_numpy(weight.local_positions)
        if not weight.is_split_like(copied):
            expected = "copies sharded as the model is (apply fully_shard to both in the same way)"
            raise BlockSparseError.expected("other", expected, type(copied.parameter).__name__)
        new = weight.local[source[local.to(source.device)] < 0]
        copied.set_layout(weight.layout, source, new)
