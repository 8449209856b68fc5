"""Integrations with transformers, Lightning and ONNX; none of them is imported before it is used.

Models of the transformers library need no call: once `blocksparse` is imported, `save_pretrained` of a sparsified model
lists its block-sparse weights in config.json, and `from_pretrained` loads them again. With
`attn_implementation="blocksparse"` they compute attention by `bs.nn.attention`.
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

# This module has `from_pretrained`; when it is imported, our format can be registered.
_MODELS = "transformers.modeling_utils"


def _register() -> Any:
    """Import our module for transformers; return None if the installed version cannot register formats.

    `from_pretrained` of such a version raises an error that it does not know our format.
    """
    try:
        importlib.import_module("blocksparse.integrations.attention")
        return importlib.import_module("blocksparse.integrations.pretrained")
    except ImportError:
        return None


def _attach_to_transformers(model: nn.Module) -> None:
    """Make transformers' models save and load the block-sparse modules that a model now has."""
    kind = getattr(sys.modules.get(_MODELS), "PreTrainedModel", None)
    if kind is not None and any(isinstance(module, kind) for module in model.modules()):
        ours = _register()
        if ours is not None:
            ours.attach(model)


when_imported(_MODELS, lambda module: _register())
after_replacing.append(_attach_to_transformers)


def __dir__() -> list[str]:
    return __all__
