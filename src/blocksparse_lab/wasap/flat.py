"""A model's parameters, gradients, momentum and topology as flat tensors: what the messages hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from blocksparse.indices import rows_of
from blocksparse.layout import BlockLayout
from blocksparse.nn.module import BlockSparseModule


class Flat:
    """The numbers of a model in a fixed order, one tensor of each kind; their counts do not change as it evolves."""

    def __init__(self, model: nn.Module):
        self.names, self.parameters = zip(*model.named_parameters(), strict=True)
        self.modules = [module for module in model.modules() if isinstance(module, BlockSparseModule)]
        self.module_of = {module.values: i for i, module in enumerate(self.modules)}
        self.numbers = sum(p.numel() for p in self.parameters)
        self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters))

    # -- parameters and what is of their shape -----------------------------------------------------------------

    def values(self) -> Tensor:
        """The parameters, a copy `[numbers]`."""
        return self._joined(self.parameters)

    def load_values(self, parts: Sequence[Tensor]) -> None:
        for parameter, values in zip(self.parameters, parts, strict=True):
            parameter.data.copy_(values)

    def gradients(self) -> Tensor:
        """The gradients, 0 where there are none, and whether each parameter has one: `[numbers + parameters]`."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        there = [p.grad is not None for p in self.parameters]
        return self._joined([*parts, torch.tensor(there, dtype=self.dtype, device=parts[0].device)])

    def load_gradients(self, parts: Sequence[Tensor], there: Sequence[float]) -> None:
        """Sets the gradients; None where nobody had one, as steps leave what is frozen or unused as it is."""
        for parameter, part, has in zip(self.parameters, parts, there, strict=True):
            parameter.grad = part.to(parameter) if has else None

    def momentum(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """The momentum of each parameter `[numbers]`; 0 before the first step."""
        state = optimizer.state
        return self._joined([state.get(p, {}).get("momentum_buffer", torch.zeros_like(p)) for p in self.parameters])

    def load_momentum(self, optimizer: torch.optim.Optimizer, flat: Tensor) -> None:
        for parameter, momentum in zip(self.parameters, self.split(flat), strict=True):
            optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter).clone()

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat tensor, in the parameters' shapes."""
        parts = flat.split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])

    # -- topology ----------------------------------------------------------------------------------------------

    def layouts(self) -> list[BlockLayout]:
        return [module.layout for module in self.modules]

    def load_layouts(self, layouts: Sequence[BlockLayout]) -> None:
        """Gives each weight its layout, of as many blocks as it has; the values in memory stay, for others to come."""
        for module, layout in zip(self.modules, layouts, strict=True):
            if module.layout != layout:
                module.set_layout(layout, module.values.data)

    def topology(self) -> Tensor:
        """The crow and col indices of each block-sparse weight, on the CPU."""
        return topology_of(self.layouts())

    def load(self, layouts: Sequence[BlockLayout], parts: Sequence[Tensor]) -> None:
        self.load_layouts(layouts)
        self.load_values(parts)

    def layouts_of(self, topology: Tensor) -> list[BlockLayout]:
        """The layouts that `topology` made such a tensor of."""
        layouts = []
        for layout in self.layouts():
            crow, col, topology = topology.tensor_split([layout.grid[0] + 1, layout.grid[0] + 1 + layout.nnz])
            rows = rows_of(crow.numpy(), layout.nnz, layout.grid[0])
            layouts.append(BlockLayout.from_indices(rows, col.numpy(), layout.grid, layout.block_shape))
        return layouts


def topology_of(layouts: Sequence[BlockLayout]) -> Tensor:
    """The crow and col indices of each layout, one after the other, on the CPU."""
    return torch.cat([index for layout in layouts for index in (layout.crow_indices(), layout.col_indices())])
