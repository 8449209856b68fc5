"""`attn_implementation="blocksparse"` of transformers: the attention of its models by `bs.nn.attention`.

Windows come from the model (Mistral's `sliding_window`), patterns from its config. See `docs/how_to/attention.md`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .. import patterns
from ..checked import integer
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.attention import draw_seed, run_attention
from ..ops.attention.arguments import check_operands
from ..ops.attention.rules import Rules, data_spans, window_spans

NAME = "blocksparse"
BLOCK = 64
MOST_LAYOUTS = 64
PATTERNS = ("sliding_window", "strided_attention", "fixed_attention", "dilated", "small_world_attention", "bigbird")

_layouts: dict[str, BlockLayout] = {}
_last_use: dict[str, int] = {}
_clock = itertools.count()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer of transformers, with the arguments of its attention interface.

    Raises:
        BlockSparseError: the mask is 4-D, there is a bias of positions, or the config's pattern is unknown.
    """
    if position_bias is not None:
        raise BlockSparseError.expected("position_bias", 'None (use attn_implementation="sdpa")', "a tensor")
    # The layout depends on the number of keys, so a graph with dynamic lengths becomes one for this number.
    queries, keys = query.shape[2], operator.index(key.shape[2])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = right = None
    config = getattr(module, "config", None)
    if sliding_window is not None:
        # As with flash-attn, models whose window has this distance on both sides pass one more. T5Gemma does not.
        passes_distance = not causal and sliding_window == getattr(config, "sliding_window", None)
        left = right = sliding_window - (0 if passes_distance else 1)
    right = 0 if causal else right
    layout = _layouts[_store_layout(getattr(config, "blocksparse_attention", None), keys, left, right)]
    layouts, row = check_operands(query, key, value, layout)
    first = None
    if cu_seq_lens_k is None and causal and queries == keys:
        first = _first_of_document(position_ids, keys)
    if attention_mask is not None and attention_mask.dtype == torch.int32:  # documents that transformers detected
        first = attention_mask if first is None else first.maximum(attention_mask)
        attention_mask = None
    spans = None
    if cu_seq_lens_k is not None or first is not None or attention_mask is not None:
        padding = None if attention_mask is None else _check_mask(attention_mask, keys)
        spans = _spans(queries, keys, left, right, cu_seq_lens_k, first, padding)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    seed = draw_seed(dropout, query.device)
    rules = Rules(row, left, right, spans, scale, softcap or 0.0, dropout, seed)
    y, _ = run_attention(query, key, value, layouts, rules, s_aux, return_lse=False)
    return y.transpose(1, 2).contiguous(), None


def _store_layout(pattern: Any, keys: int, left: int | None, right: int | None) -> str:
    """Store the layout for a number of keys: the config's pattern, or else the blocks of the window. Return its key."""
    if pattern is not None and not isinstance(pattern, Mapping):
        raise BlockSparseError.expected(
            "config.blocksparse_attention", "a dict such as {'pattern': 'bigbird'}", pattern
        )
    options = dict(pattern or {})
    name = options.pop("pattern", None)
    if name is not None and name not in PATTERNS:
        raise BlockSparseError.expected("pattern of config.blocksparse_attention", f"one of {PATTERNS}", repr(name))
    block = integer("block_size of config.blocksparse_attention", options.get("block_size", BLOCK), 1)
    tokens = -(-keys // block) * block
    key = json.dumps([name, tokens, left, right, options], default=str)
    # Drop the layout whose use is longest ago, because another thread may be about to read its own.
    _last_use[key] = next(_clock)
    if key not in _layouts:
        if len(_layouts) >= MOST_LAYOUTS:
            oldest = min(list(_layouts), key=lambda each: _last_use.get(each, 0))
            _layouts.pop(oldest, None)
            _last_use.pop(oldest, None)
        _layouts[key] = _make_layout(*json.loads(key))
    return key


# Dynamo calls it, because it cannot trace how a layout is made. It takes the layout from a global dict, because it
# cannot guard an object that such a call returns.
_store_layout._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check_options(name: str | None, options: Mapping[str, Any]) -> None:
    """Raise a BlockSparseError for an option that the pattern lacks, or a missing one."""
    if name is None:
        needed, optional = [], ["block_size"]
        expected = f"'pattern', one of {PATTERNS}, beside all entries other than 'block_size'"
    else:
        arguments = list(inspect.signature(getattr(patterns, name)).parameters.values())[1:]  # the first one: tokens
        needed = [each.name for each in arguments if each.default is each.empty]
        optional = [each.name for each in arguments if each.name not in needed]
        expected = (
            f"the arguments of patterns.{name}: {', '.join([*(f'{each} (required)' for each in needed), *optional])}"
        )
    if not set(needed) <= set(options) <= {*needed, *optional}:
        raise BlockSparseError.expected("config.blocksparse_attention", expected, dict(options))


def _make_layout(
    name: str | None, tokens: int, left: int | None, right: int | None, options: dict[str, Any]
) -> BlockLayout:
    _check_options(name, options)
    options.setdefault("block_size", BLOCK)
    if name is None:
        window = -1 if left is None else left, -1 if right is None else right
        return patterns.sliding_window(tokens, window, options["block_size"])
    if isinstance(options.get("window"), list):
        options["window"] = tuple(options["window"])
    layout: BlockLayout = getattr(patterns, name)(tokens, **options)
    return layout


def _first_of_document(position_ids: Tensor | None, keys: int) -> Tensor | None:
    """Return the first key of each query's document, int32 `[batch or 1, keys]`; None for one document per sequence.

    A document begins where positions do not rise; they may skip numbers. A compiled graph cannot read positions, so
    it always computes these keys.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != keys:
        return None
    return _first_keys(position_ids.diff(dim=1) <= 0)


def _first_of_packed(mask_function: Any, batch: int, keys: int, device: Any) -> Tensor | None:
    """Return the first key of each query's document, as `_first_of_document`, by the mask function of transformers.

    Without a mask and a cache, transformers begins a document wherever a position is not the one after the last. No
    query there sees the key before it.
    """
    number = torch.arange(1, keys, device=device)[None]
    sequence = torch.arange(batch, device=device)[:, None]
    return _first_keys(~mask_function(sequence, number.new_zeros(()), number, number - 1))


def _first_keys(begins: Tensor) -> Tensor | None:
    """Return the first key of each document from where documents begin, bool `[batch or 1, keys - 1]`."""
    if not torch.compiler.is_compiling() and not begins.any():
        return None
    number = torch.arange(1, begins.shape[1] + 1, dtype=torch.int32, device=begins.device)
    return F.pad(number * begins, (1, 0)).cummax(1).values


def _check_mask(mask: Tensor, keys: int) -> Tensor:
    """Check that a mask is that of padding, bool `[batch, keys]`."""
    if mask.dim() != 2 or mask.shape[1] != keys:
        expected = f'a mask of padding, [batch, {keys}] (for other masks, attn_implementation="sdpa")'
        raise BlockSparseError.expected("attention_mask", expected, list(mask.shape))
    return mask.bool()


def _spans(
    queries: int,
    keys: int,
    left: int | None,
    right: int | None,
    documents: Tensor | None,
    first: Tensor | None,
    padding: Tensor | None,
) -> Tensor:
    """Return the spans of visible keys, int32 `[2, batch or 1, queries]`, with padding on both sides hidden.

    Documents have borders, or the first key of each query's document if attention is causal.
    """
    if documents is not None:
        start, end = data_spans(queries, keys, left, right, documents, None)
    else:
        device = next((each.device for each in (first, padding) if each is not None), torch.device("cpu"))
        start, end = window_spans(queries, keys, left, right, device)[:, None]
    if first is not None:
        start = start.maximum(first)
    if padding is not None:
        number = torch.arange(keys, dtype=torch.int32, device=padding.device)
        start = start.maximum(torch.where(padding, number, keys).amin(1, keepdim=True))
        end = end.minimum(torch.where(padding, number + 1, 0).amax(1, keepdim=True))
    return torch.stack(torch.broadcast_tensors(start, end)).to(torch.int32)


def padding_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, use_vmap: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask of padding `[batch, keys]`, or None without padding; `attention_forward` makes the rest.

    Where transformers detects packed documents, the result is the first key of each query's document, int32.

    Raises:
        BlockSparseError: the model has a mask function of its own, chunks shorter than the input, images whose tokens
            see each other, or a static cache with unused keys, or there is padding between tokens; a compiled graph
            cannot check for images and padding.
    """
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    chunked = chunk is not None and kwargs.get("local_size") == chunk and kv_offset + kv_length > chunk
    if use_vmap or chunked:
        raise BlockSparseError(f'attn_implementation="{NAME}" has no mask functions of its own: use "sdpa"')
    # Only masks of cross-attention and encoders have this argument. Their keys may outnumber the queries.
    causal = "allow_is_bidirectional_skip" not in kwargs
    # Queries end where the keys end, which the unused keys of a static cache would move.
    unused = isinstance(q_offset, Tensor) or (causal and kv_offset + kv_length > q_offset + q_length)
    if unused or (attention_mask is not None and attention_mask.shape[1] < kv_length):
        raise BlockSparseError(
            f'attn_implementation="{NAME}" needs a dynamic cache: a static one has unused keys. Omit '
            'cache_implementation, or use "sdpa"'
        )
    square = causal and mask_function is not None and q_length == kv_length
    if square and not torch.compiler.is_compiling():
        number = torch.arange(1, kv_length, device=kwargs.get("device"))[None]
        sequence = torch.arange(batch_size, device=number.device)[:, None]
        if mask_function(sequence, number.new_zeros(()), number - 1, number).any():
            raise BlockSparseError(f'attn_implementation="{NAME}" has no later keys for tokens of images: use "sdpa"')
    if attention_mask is None:
        return _first_of_packed(mask_function, batch_size, kv_length, kwargs.get("device")) if square else None
    attention_mask = attention_mask[:, -kv_length:].bool()
    if torch.compiler.is_compiling():
        return attention_mask
    if (F.pad(attention_mask.int(), (1, 0)).diff(dim=1) == 1).sum(1).gt(1).any():
        expected = f'no 0 between the 1s of a sequence (pad on the left to generate), or use "sdpa" instead of "{NAME}"'
        raise BlockSparseError.expected("attention_mask", expected, "padding inside of a sequence")
    return None if attention_mask.all() else attention_mask


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)
