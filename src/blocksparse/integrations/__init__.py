"""Other libraries: transformers, Lightning, ONNX. None of them is imported before it is used.

Models of the transformers library need no call: once `blocksparse` is imported, `save_pretrained` of a sparsified one
writes which weights are block-sparse into its config.json, and `from_pretrained` makes it so again.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from ..import_hook import when_imported
from ..surgery.replace import after_replacing
from .onnx import export_onnx

__all__ = ["export_onnx"]

# Has `from_pretrained`, and has imported what our method is to be registered with.
_MODELS = "transformers.modeling_utils"


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


when_imported(_MODELS, lambda module: _register())
after_replacing.append(_tell_transformers)


def __dir__() -> list[str]:
    return __all__
