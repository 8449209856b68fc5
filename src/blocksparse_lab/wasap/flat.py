"""A model's parameters, gradients, momentum and topology as flat tensors, which messages hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from blocksparse.indices import rows_from_starts
from blocksparse.layout import BlockLayout
from blocksparse.nn.module import BlockSparseModule


class FlatModel:
    """The tensors of a model in a fixed order, one flat tensor for each kind; evolution does not change their sizes.

    Attributes:
        numel: the number of parameters.
        dtype: the dtype that all parameters can be converted to.
        module_of: the index in `modules` of the block-sparse module with this parameter as its values.
    """

    def __init__(self, model: nn.Module):
        self.names, self.parameters = zip(*model.named_parameters(), strict=True)
        self.modules = [module for module in model.modules() if isinstance(module, BlockSparseModule)]
        self.module_of = {module.values: i for i, module in enumerate(self.modules)}
        self.numel = sum(p.numel() for p in self.parameters)
        self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters))

    # -- parameters, and tensors of their shapes ---------------------------------------------------------------------

    def values(self) -> Tensor:
        """Return a flat copy of the parameters, `[numel]`."""
        return _flatten(self.parameters)

    def load_values(self, parts: Sequence[Tensor]) -> None:
        for parameter, values in zip(self.parameters, parts, strict=True):
            parameter.data.copy_(values)

    def gradients(self) -> Tensor:
        """Return the flat gradients, 0 if there are none, then whether each exists: `[numel + parameters]`."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        present = [p.grad is not None for p in self.parameters]
        return _flatten([*parts, torch.tensor(present, dtype=self.dtype, device=parts[0].device)])

    def load_gradients(self, parts: Sequence[Tensor], present: Sequence[float]) -> None:
        """Set the gradients, None where no worker has one: a step must not change frozen or unused parameters."""
        for parameter, part, has_gradient in zip(self.parameters, parts, present, strict=True):
            parameter.grad = part.to(parameter) if has_gradient else None

    def momentum(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return the flat momentum, `[numel]`; 0 before the first step."""
        state = optimizer.state
        return _flatten([state.get(p, {}).get("momentum_buffer", torch.zeros_like(p)) for p in self.parameters])

    def load_momentum(self, optimizer: torch.optim.Optimizer, flat: Tensor) -> None:
        for parameter, momentum in zip(self.parameters, self.split(flat), strict=True):
            optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter).clone()

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor, in the parameters' shapes."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    # -- topology ----------------------------------------------------------------------------------------------------

    def layouts(self) -> list[BlockLayout]:
        return [module.layout for module in self.modules]

    def load_layouts(self, layouts: Sequence[BlockLayout]) -> None:
        """Set layouts with the same numbers of blocks. The old values remain in memory, to be overwritten."""
        for module, layout in zip(self.modules, layouts, strict=True):
            if module.layout != layout:
                module.set_layout(layout, module.values.data)

    def topology(self) -> Tensor:
        """Return the crow and col indices of all block-sparse weights, on the CPU."""
        return flat_topology(self.layouts())

    def load(self, layouts: Sequence[BlockLayout], parts: Sequence[Tensor]) -> None:
        self.load_layouts(layouts)
        self.load_values(parts)

    def layouts_of(self, topology: Tensor) -> list[BlockLayout]:
        """Return the layouts of another copy of this model, given its `topology()`."""
        layouts = []
        for layout in self.layouts():
            crow, col, topology = topology.tensor_split([layout.grid[0] + 1, layout.grid[0] + 1 + layout.nnz])
            rows = rows_from_starts(crow.numpy(), layout.nnz, layout.grid[0])
            layouts.append(BlockLayout.from_indices(rows, col.numpy(), layout.grid, layout.block_shape))
        return layouts


def flat_topology(layouts: Sequence[BlockLayout]) -> Tensor:
    """Return the crow and col indices of each layout, concatenated, on the CPU."""
    return torch.cat([index for layout in layouts for index in (layout.crow_indices(), layout.col_indices())])


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
