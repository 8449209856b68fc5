"""The transformers library: block-sparse models in its `save_pretrained` and `from_pretrained`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checked import checked_block, integer
from ..conversion.densify import densify
from ..errors import BlockSparseError
from ..layout import BlockLayout, layout_of_indices
from ..nn.module import BlockSparseModule, Weight
from ..nn.quantized import QuantizedLinear
from ..surgery.prunable import survey
from ..surgery.replace import replace_with_sparse

__all__ = ["BlockSparseConfig", "BlockSparseQuantizer", "attach"]

METHOD = "blocksparse"
VERSION = 1

# What models find as the `weight` of a layer while it is loaded: some draw the weights of certain layers by name, after
# loading, unless the tensor says that it has its values.
_INITIALIZED: Any = torch.empty(0)
_INITIALIZED._is_hf_initialized = True


def attach(model: nn.Module) -> nn.Module:
    """Has `save_pretrained` write which weights of a model are block-sparse into its config.json.

    `sparsify` and the pruning methods do this themselves; it is for models whose layers were exchanged by hand. The
    layouts are those at the time of saving. The model is returned, and those of transformers inside of it are changed.

    >>> import tempfile, torch, blocksparse as bs
    >>> from transformers import AutoModel, BertConfig, BertModel
    >>> config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = bs.sparsify(BertModel(config).eval(), density=0.25, force=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     again = AutoModel.from_pretrained(folder)
    >>> tokens = torch.arange(8)[None]
    >>> torch.equal(again(tokens).last_hidden_state, model(tokens).last_hidden_state)
    True
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__["hf_quantizer"] = BlockSparseQuantizer(BlockSparseConfig())
    return model


def _refuse_sparse_head(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the head first: transformers refuses a head of a class unknown to it once the inputs are resized."""

    @wraps(resize)
    def resize_token_embeddings(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        head = self.get_output_embeddings()
        if isinstance(head, BlockSparseModule):
            name = next(name for name, module in self.named_modules() if module is head)
            raise BlockSparseError(
                f"resize_token_embeddings: the output layer {name} is block-sparse. Make it dense first, "
                f'model.{name} = blocksparse.densify(model.{name}), or leave it out by sparsify(..., skip="{name}")'
            )
        return resize(self, *args, **options)

    return resize_token_embeddings


PreTrainedModel.resize_token_embeddings = _refuse_sparse_head(PreTrainedModel.resize_token_embeddings)  # type: ignore[method-assign]


@register_quantization_config(METHOD)
class BlockSparseConfig(QuantizationConfigMixin):
    """What config.json says of a block-sparse model, under `quantization_config`.

    Args:
        weights: by the name of the dense weight, its `block_size` (rows, columns) and the number of `blocks`. Which
            blocks these are is in the checkpoint, with their values.
        version: of this format.
    """

    def __init__(self, weights: Mapping[str, Any] | None = None, version: Any = VERSION, **others: Any):
        if version != VERSION or not isinstance(weights or {}, Mapping):
            got = f"version {version!r:.20}" if version != VERSION else type(weights).__name__
            raise BlockSparseError.expected("quantization_config", f"weights by name, in version {VERSION}", got)
        self.quant_method: Any = METHOD
        self.version = VERSION
        self.needs = "pip install blocksparse-torch; import blocksparse"  # for who finds the folder
        self.weights = dict(weights or {})


@register_quantizer(METHOD)
class BlockSparseQuantizer(HfQuantizer):
    """Makes the modules of a model block-sparse before its checkpoint is loaded; transformers calls it."""

    quantization_config: BlockSparseConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            wanted = "a folder that save_pretrained of a sparsified model wrote; blocksparse.sparsify(model) makes one"
            raise BlockSparseError.expected("quantization_config", wanted, "a dense model's")

    def preprocess_model(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files") or []
        size = sum(os.path.getsize(file) for file in files) if files else None
        replace_with_sparse(model, _places(model, self.quantization_config.weights, size))
        for module in _sparse_modules(model).values():
            module.__class__ = type("Loading", (type(module),), {"weight": _INITIALIZED, "finished": type(module)})

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, module in _sparse_modules(model).items():
            module.__class__ = module.finished
            _take_layout(name, module)
        model.config.quantization_config = self.quantization_config.to_dict()  # as it came
        attach(model)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        if any(isinstance(module, QuantizedLinear) for module in model.modules()):
            wanted = (
                "one without layers in 8 bits: save it before bs.quantize, and quantize what from_pretrained returns"
            )
            raise BlockSparseError.expected("model", wanted, type(model).__name__)
        weights = _described(model)
        if weights:
            model.config.quantization_config = BlockSparseConfig(weights).to_dict()
            if any(isinstance(module, Weight) for module in model.modules()):
                # Saving would take stacked experts apart, by the beginning of their names; it loads them stacked too.
                model.__dict__["_weight_conversions"] = []
        elif hasattr(model.config, "quantization_config"):  # it was densified
            del model.config.quantization_config
        return None, {}

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> nn.Module:
        return densify(model, inplace=True)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def _described(model: nn.Module) -> dict[str, Any]:
    """The block-sparse weights of a model, for config.json."""
    weights = {}
    for name, module in _sparse_modules(model).items():
        if getattr(module, "activation", None):
            raise BlockSparseError.expected(
                name, "a layer as sparsify makes it, so that from_pretrained can", "one with an activation"
            )
        layout = module.layout
        key = name if isinstance(module, Weight) else f"{name}.weight".removeprefix(".")
        weights[key] = {"block_size": list(layout.block_shape), "blocks": layout.nnz}
    return weights


def _sparse_modules(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, BlockSparseModule)}


def _places(model: PreTrainedModel, weights: Mapping[str, Any], size: int | None) -> dict[str, BlockLayout]:
    """Layouts with as many blocks as those in the checkpoint, by the names that the weights have in this model.

    Args:
        size: bytes of the checkpoint: what claims to have more numbers is refused before they are allocated.
    """
    own = {weight.name: weight for weight, _ in survey(model, 1, empty=True)}
    prefix = f"{model.base_model_prefix}."
    found: dict[str, BlockLayout] = {}
    total = 0
    for name, said in weights.items():
        # A model may be loaded without its head, or a head put on one that was saved without.
        here = next((key for key in (name, name.removeprefix(prefix), prefix + name) if key in own), None)
        if here is None:
            continue
        if not isinstance(said, Mapping) or not {"block_size", "blocks"} <= set(said):
            raise BlockSparseError.expected(f"{name} in quantization_config", "block_size and blocks", f"{said!r:.99}")
        weight = own[here].in_blocks(checked_block(said["block_size"]))
        rows, columns = weight.grid
        blocks = integer(f"blocks of {name}", said["blocks"], 0, rows * columns + 1, "one more than there are")
        height, width = weight.block_shape
        total += max(blocks * height * width, height, width)  # its padding and its bias are as long as a block
        if size is not None and total > size:
            raise BlockSparseError.expected("quantization_config", f"no more numbers than {size:,} bytes hold", total)
        first = np.divmod(np.arange(blocks), columns)  # in the place of those that are not loaded yet
        found[here] = BlockLayout.from_indices(*first, weight.grid, weight.block_shape)
    if weights and not found:
        expected = f"names of weights of a {type(model).__name__}"
        raise BlockSparseError.expected("quantization_config", expected, ", ".join(map(repr, list(weights)[:3])))
    return found


def _take_layout(name: str, module: BlockSparseModule) -> None:
    """Gives a module the layout that its buffers were loaded with."""
    mine, crow, col = module._layout, module.crow_indices, module.col_indices
    if any(tensor.is_meta for tensor in (crow, col, module.values)):
        raise BlockSparseError.expected(
            name, "values and indices in memory", "them on the meta device: missing in the checkpoint, or offloaded"
        )
    tensors = (*module.named_parameters(), *module.named_buffers())
    missing = [each for each, tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]
    if missing:  # what transformers has not loaded it leaves as the memory was
        raise BlockSparseError.expected(name, "its tensors in the checkpoint", f"none of {', '.join(missing)}")
    values: Tensor = module.values.data
    try:
        module.set_layout(layout_of_indices(crow, col, mine.grid, mine.block_shape), values)
    except BlockSparseError as error:
        raise BlockSparseError(f"{name}: {error}") from error
