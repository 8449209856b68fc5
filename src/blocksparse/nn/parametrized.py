"""What `torch.nn.utils.parametrize` needs for a tensor that is called `values`."""

from __future__ import annotations

from typing import Any

from torch import nn


class Parametrizations(nn.ModuleDict):
    """A module's parametrizations by name, in which `values` is such a name and not the method of dictionaries."""

    def __getattribute__(self, name: str) -> Any:
        if name == "values":
            mine = self.__dict__["_modules"].get(name)
            if mine is not None:
                return mine
        return super().__getattribute__(name)

    def __setitem__(self, key: str, module: nn.Module) -> None:
        self._modules[key] = module
