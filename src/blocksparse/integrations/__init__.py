"""Other libraries: transformers, Lightning, ONNX. None of them is imported before it is used.

Models of the transformers library need no call: once `blocksparse` is imported, `save_pretrained` of a sparsified one
writes which weights are block-sparse into its config.json, and `from_pretrained` makes it so again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from torch import nn

from ..surgery.replace import after_replacing
from .onnx import export_onnx

__all__ = ["export_onnx"]

# Has `from_pretrained`, and has imported what our method is to be registered with.
_MODELS = "transformers.modeling_utils"


class _Registering(MetaPathFinder):
    """Registers our method with transformers as soon as that is imported: importing it here would take seconds."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _MODELS else None
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register()

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _register() -> Any:
    """Our module for models of transformers; None with a version of it that nothing can be registered with.

    Such a version says itself, in `from_pretrained`, that it does not know our method.
    """
    try:
        return importlib.import_module("blocksparse.integrations.pretrained")
    except ImportError:
        return None


def _tell_transformers(model: nn.Module) -> None:
    kind = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        ours = _register()
        if ours is not None:
            ours.attach(model)


if _MODELS in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _Registering())
after_replacing.append(_tell_transformers)


def __dir__() -> list[str]:
    return __all__
