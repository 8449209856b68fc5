"""The interface to weights that several processes hold together, which `blocksparse.distributed` implements."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from ..layout import BlockLayout
from ..nn.module import BlockSparseModule


class Sharding(Protocol):
    """The functions for sharded weights; `surgery` calls them only for tensors and modules that may be sharded."""

    def handle_of(self, module: BlockSparseModule) -> Any:
        """Return the `WeightHandle` of a weight that may be sharded."""

    def is_sharded(self, module: nn.Module, name: str) -> bool:
        """Return whether FSDP2 shards this parameter; raise for other DTensors and for gathered parameters."""

    def hand_over(self, old: nn.Module, new: nn.Module, parameters: Mapping[Tensor, nn.Parameter]) -> None:
        """Make FSDP2 gather the parameters of `old`, or their replacements, for `new`."""

    def reduce_blocks(self, blocks: Any, dense: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `reduce` of the folded blocks of a sharded dense weight, `[out_blocks, in_blocks]`, everywhere."""

    def mask_blocks_(self, blocks: Any, dense: Tensor, keep: Tensor) -> None:
        """Zero all blocks of a sharded dense weight except those to keep, `[out_blocks, in_blocks]`."""

    def values_of(self, blocks: Any, layout: BlockLayout, dense: Tensor) -> Tensor:
        """Return the values of a sharded dense weight on a layout, sharded by blocks."""


_loaders: list[Callable[[], Any]] = []


def register_sharding(load: Callable[[], Any]) -> None:
    """Set the function that imports the implementation, called when the first sharded weight appears."""
    _loaders[:] = [load]


def sharding() -> Sharding:
    """Return the implementation."""
    loaded: Sharding = _loaders[0]()
    return loaded


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, sharing its memory, or the tensor itself; call it without gradients."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def may_be_sharded(module: nn.Module) -> bool:
    """Return, after a cheap check, whether a module's own parameters may be sharded."""
    if any(is_dtensor(parameter) for parameter in module._parameters.values()):
        return True
    # While FSDP2 has gathered a parameter, only a hook after loading shows that it is sharded.
    return "torch.distributed.fsdp" in sys.modules and bool(module._load_state_dict_post_hooks)


def is_fsdp_sharded(module: nn.Module, name: str) -> bool:
    """Return whether FSDP2 shards this parameter; raise a BlockSparseError for other DTensors and gathered ones."""
    return may_be_sharded(module) and sharding().is_sharded(module, name)


def is_wrapped(module: nn.Module) -> bool:
    """Return whether `fully_shard` was applied to this module itself, not only to a parent."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def unwrapped_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class without the class that `fully_shard` puts in front of it."""
    kind = type(module)
    return kind.__bases__[-1] if is_wrapped(module) else kind


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters of a model; the root keeps them after a forward pass without a backward pass."""
    for module in model.modules():
        if is_wrapped(module):
            module.reshard()  # type: ignore[operator]
