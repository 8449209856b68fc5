"""Support of block-sparse models in transformers' `save_pretrained` and `from_pretrained`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checked import checked_block, integer
from ..conversion.densify import densify
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..nn.module import BlockSparseModule, Weight
from ..nn.quantized import QuantizedLinear
from ..state_indices import layout_of_indices
from ..surgery.prunable import survey
from ..surgery.replace import replace_with_sparse
from ..surgery.tied import forget_ties, untie_output_layers

__all__ = ["BlockSparseConfig", "BlockSparseQuantizer", "attach"]

METHOD = "blocksparse"
VERSION = 1


def attach(model: nn.Module) -> nn.Module:
    """Make `save_pretrained` list the block-sparse weights of a model in its config.json; return the model.

    `sparsify` and the pruning methods do this themselves; call it for models whose layers were replaced by hand. It
    changes the transformers models inside `model`. The layouts are those at the time of saving.

    >>> import tempfile, torch, blocksparse as bs
    >>> from transformers import AutoModel, BertConfig, BertModel
    >>> config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = bs.sparsify(BertModel(config).eval(), density=0.25, force=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save_pretrained(folder)
    ...     loaded = AutoModel.from_pretrained(folder)
    >>> tokens = torch.arange(8)[None]
    >>> torch.equal(loaded(tokens).last_hidden_state, model(tokens).last_hidden_state)
    True
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__["hf_quantizer"] = BlockSparseQuantizer(BlockSparseConfig())
    return model


def _refuse_sparse_head(resize: Callable[..., Any]) -> Callable[..., Any]:
    """Return `resize_token_embeddings` with a check that the output layer is dense.

    Without it, transformers rejects a block-sparse output layer only after it has resized the inputs.
    """

    @wraps(resize)
    def resize_token_embeddings(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        head = self.get_output_embeddings()
        if isinstance(head, BlockSparseModule):
            name = next(name for name, module in self.named_modules() if module is head)
            raise BlockSparseError(
                f"resize_token_embeddings: the output layer {name} is block-sparse. Make it dense first, "
                f'model.{name} = blocksparse.densify(model.{name}), or leave it out with sparsify(..., skip="{name}")'
            )
        return resize(self, *args, **options)

    return resize_token_embeddings


PreTrainedModel.resize_token_embeddings = _refuse_sparse_head(PreTrainedModel.resize_token_embeddings)  # type: ignore[method-assign]


@register_quantization_config(METHOD)
class BlockSparseConfig(QuantizationConfigMixin):
    """The entry `quantization_config` of a block-sparse model's config.json.

    Args:
        weights: `block_size` (rows, columns) and number of `blocks` by name of the dense weight. The checkpoint has the
            layouts and values.
        version: the version of this format.
    """

    def __init__(self, weights: Mapping[str, Any] | None = None, version: Any = VERSION, **others: Any):
        if version != VERSION or not isinstance(weights or {}, Mapping):
            got = f"version {version!r:.20}" if version != VERSION else type(weights).__name__
            raise BlockSparseError.expected("quantization_config", f"weights by name, in version {VERSION}", got)
        self.quant_method: Any = METHOD
        self.version = VERSION
        self.needs = "pip install blocksparse-torch; import blocksparse"  # for readers of the file
        self.weights = dict(weights or {})


@register_quantizer(METHOD)
class BlockSparseQuantizer(HfQuantizer):
    """Makes modules block-sparse before a checkpoint is loaded; transformers calls it."""

    quantization_config: BlockSparseConfig

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise BlockSparseError(
                "quantization_config: the folder has a dense model. Load it without the config, call "
                "blocksparse.sparsify(model), and then save_pretrained"
            )

    def preprocess_model(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files") or []
        size = sum(os.path.getsize(file) for file in files) if files else None
        layouts = _placeholder_layouts(model, self.quantization_config.weights, size)
        _check_count(self.quantization_config.weights, files)
        untie_output_layers(model, layouts)
        replace_with_sparse(model, layouts)
        forget_ties(model, layouts)
        for module in _sparse_modules(model).values():
            attributes = {"weight": _placeholder_weight(module), "finished": type(module)}
            module.__class__ = type("Loading", (type(module),), attributes)

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Finish the placeholders of a loaded model: each gets its class and its loaded layout."""
        for name, module in _sparse_modules(model).items():
            module.__class__ = module.finished
            _take_layout(name, module)
        model.config.quantization_config = self.quantization_config.to_dict()  # unchanged
        attach(model)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Describe the model's blocks in its config before it is saved.

        Returns (None, {}): transformers then saves the usual state dict.
        """
        if any(isinstance(module, QuantizedLinear) for module in model.modules()):
            raise BlockSparseError(
                f"save_pretrained: this {type(model).__name__} has layers in 8 bits. Save it before bs.quantize, and "
                "quantize the model that from_pretrained returns"
            )
        weights = _describe_blocks(model)
        if weights:
            model.config.quantization_config = BlockSparseConfig(weights).to_dict()
            if any(isinstance(module, Weight) for module in model.modules()):
                # Saving would split stacked experts, by the prefix of their names; loading accepts stacked ones, too.
                model.__dict__["_weight_conversions"] = []
        elif hasattr(model.config, "quantization_config"):  # the model was densified
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


def _placeholder_weight(module: nn.Module) -> Tensor:
    """Return the `weight` of a layer while a model loads, which transformers reads in two places.

    It draws weights by name after loading, unless the tensor is marked as initialized, and pads tied biases to the
    number of its rows.
    """
    bias = getattr(module, "bias", None)
    weight: Any = torch.empty(len(bias) if isinstance(bias, Tensor) else 0, 0, device="cpu")
    weight._is_hf_initialized = True
    return weight


def _describe_blocks(model: nn.Module) -> dict[str, Any]:
    """Return the block shape and the number of blocks of each block-sparse weight, by name, for config.json.

    Raises:
        BlockSparseError: a layer has an activation, which `from_pretrained` cannot restore.
    """
    weights = {}
    for name, module in _sparse_modules(model).items():
        if getattr(module, "activation", None):
            raise BlockSparseError(
                f"{name}: from_pretrained cannot load block-sparse layers with an activation: "
                "call blocksparse.densify, then sparsify"
            )
        layout = module.layout
        key = name if isinstance(module, Weight) else f"{name}.weight".removeprefix(".")
        weights[key] = {"block_size": list(layout.block_shape), "blocks": layout.nnz}
    return weights


def _sparse_modules(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, BlockSparseModule)}


def _check_count(weights: Mapping[str, Any], files: Sequence[str]) -> None:
    """Raise a BlockSparseError if files have more block-sparse weights than config.json lists.

    Transformers would draw those layers anew. It may give names in files another form, so only numbers are compared.
    """
    count = 0
    for file in files:
        if str(file).endswith(".safetensors"):
            with safe_open(file, "pt") as opened:
                count += sum(name.endswith(".crow_indices") for name in opened.keys())  # noqa: SIM118
    if count > len(weights):
        expected = f"an entry for each of the {count} block-sparse weights in the checkpoint"
        raise BlockSparseError.expected("quantization_config", expected, f"{len(weights)} of them")


def _placeholder_layouts(
    model: PreTrainedModel, weights: Mapping[str, Any], size: int | None
) -> dict[str, BlockLayout]:
    """Return placeholder layouts with the checkpoint's numbers of blocks, by name of the weight in this model.

    Args:
        model: the dense model.
        weights: the entries of config.json.
        size: the bytes of the checkpoint; entries with more parameters are refused before they are allocated.
    """
    own = {weight.name: weight for weight, _ in survey(model, 1, empty=True)}
    prefix = f"{model.base_model_prefix}."
    layouts: dict[str, BlockLayout] = {}
    total = 0
    for name, entry in weights.items():
        # A model may be loaded without its head, or a head be added to a model saved without one.
        key = next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in own), None)
        if key is None:
            continue
        if not isinstance(entry, Mapping) or not {"block_size", "blocks"} <= set(entry):
            raise BlockSparseError.expected(f"{name} in quantization_config", "block_size and blocks", f"{entry!r:.99}")
        weight = own[key].in_blocks(checked_block(entry["block_size"]))
        rows, columns = weight.grid
        blocks = integer(f"blocks of {name}", entry["blocks"], 0, rows * columns + 1, "one more than there are")
        height, width = weight.block_shape
        total += max(blocks * height * width, height, width)  # padding and bias may be as long as a block
        if size is not None and total > size:
            raise BlockSparseError.expected(
                "quantization_config", f"no more parameters than {size:,} bytes hold", total
            )
        first = np.divmod(np.arange(blocks), columns)  # until the layout is loaded
        layouts[key] = BlockLayout.from_indices(*first, weight.grid, weight.block_shape)
    if weights and not layouts:
        expected = f"names of weights of a {type(model).__name__}"
        raise BlockSparseError.expected("quantization_config", expected, ", ".join(map(repr, list(weights)[:3])))
    return layouts


def _take_layout(name: str, module: BlockSparseModule) -> None:
    """Set the layout that the buffers of a module were loaded with."""
    mine, crow, col = module._layout, module.crow_indices, module.col_indices
    if any(tensor.is_meta for tensor in (crow, col, module.values)):
        raise BlockSparseError(
            f"{name}: values or indices are on the meta device: they are missing in the checkpoint, or offloaded"
        )
    tensors = (*module.named_parameters(), *module.named_buffers())
    missing = [each for each, tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]
    if missing:  # transformers leaves their memory uninitialized
        raise BlockSparseError(f"{name}: the checkpoint lacks {', '.join(missing)}")
    values: Tensor = module.values.data
    try:
        module.set_layout(layout_of_indices(crow, col, mine.grid, mine.block_shape), values)
    except BlockSparseError as error:
        raise BlockSparseError(f"{name}: {error}") from error
