"""`attn_implementation="blocksparse"` of transformers: the attention of its models by `bs.nn.attention`.

Windows come from the model (Mistral's `sliding_window`), patterns from its config. See `docs/how_to/attention.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .. import patterns
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.attention import draw_seed, run_attention
from ..ops.attention.arguments import check_operands
from ..ops.attention.rules import Rules, data_spans, window_spans

NAME = "blocksparse"
BLOCK = 64
PATTERNS = ("sliding_window", "strided_attention", "fixed_attention", "dilated", "small_world_attention", "bigbird")


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
    queries, keys = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = right = None
    if sliding_window is not None:
        # As with flash-attn: models whose windows reach this distance on both sides pass one more.
        left = right = sliding_window - 1
    right = 0 if causal else right
    config = getattr(module, "config", None)
    layout = _layout_of(getattr(config, "blocksparse_attention", None), keys, left, right)
    layouts, row = check_operands(query, key, value, layout)
    documents = cu_seq_lens_k
    if documents is None and attention_mask is None and causal and queries == keys:
        documents = _documents(position_ids, keys)
    spans = None
    if documents is not None or attention_mask is not None:
        padding = None if attention_mask is None else _check_mask(attention_mask, keys)
        spans = _spans(queries, keys, left, right, documents, padding)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    seed = draw_seed(dropout, query.device)
    rules = Rules(row, left, right, spans, scale, softcap or 0.0, dropout, seed)
    y, _ = run_attention(query, key, value, layouts, rules, s_aux, return_lse=False)
    return y.transpose(1, 2).contiguous(), None


def _layout_of(pattern: Any, keys: int, left: int | None, right: int | None) -> BlockLayout:
    """Return the layout for a number of keys: the config's pattern, or else the blocks of the window."""
    if pattern is not None and not isinstance(pattern, Mapping):
        raise BlockSparseError.expected(
            "config.blocksparse_attention", "a dict such as {'pattern': 'bigbird'}", pattern
        )
    options = dict(pattern or {})
    block = options.setdefault("block_size", BLOCK)
    name = options.pop("pattern", None)
    if name is not None and name not in PATTERNS:
        raise BlockSparseError.expected("pattern of config.blocksparse_attention", f"one of {PATTERNS}", repr(name))
    return _make_layout(name, -(-keys // block) * block, left, right, json.dumps(options, sort_keys=True))


@lru_cache(maxsize=64)
def _make_layout(name: str | None, tokens: int, left: int | None, right: int | None, options: str) -> BlockLayout:
    arguments = json.loads(options)
    if name is None:
        window = -1 if left is None else left, -1 if right is None else right
        return patterns.sliding_window(tokens, window, arguments["block_size"])
    if isinstance(arguments.get("window"), list):
        arguments["window"] = tuple(arguments["window"])
    layout: BlockLayout = getattr(patterns, name)(tokens, **arguments)
    return layout


# Dynamo calls it, because it cannot trace how a layout is made.
_make_layout._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _documents(position_ids: Tensor | None, keys: int) -> Tensor | None:
    """Return the borders of documents that are packed in one sequence, from positions that begin again at 0."""
    if torch.compiler.is_compiling() or position_ids is None or position_ids.shape != (1, keys):
        return None
    starts = (position_ids[0].diff() != 1).nonzero().flatten() + 1
    if not len(starts):
        return None
    return torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), keys)])


def _check_mask(mask: Tensor, keys: int) -> Tensor:
    """Check that a mask is that of padding, bool `[batch, keys]`."""
    if mask.dim() != 2 or mask.shape[1] != keys:
        expected = f'a mask of padding, [batch, {keys}] (for other masks, attn_implementation="sdpa")'
        raise BlockSparseError.expected("attention_mask", expected, list(mask.shape))
    return mask.bool()


def _spans(
    queries: int, keys: int, left: int | None, right: int | None, documents: Tensor | None, padding: Tensor | None
) -> Tensor:
    """Return the spans of visible keys, int32 `[2, batch or 1, queries]`, with padding on both sides hidden."""
    if documents is not None:
        spans = data_spans(queries, keys, left, right, documents, None)
    else:
        device = None if padding is None else padding.device
        spans = window_spans(queries, keys, left, right, device or torch.device("cpu"))[:, None]
    if padding is None:
        return spans
    start, end = spans
    number = torch.arange(keys, dtype=torch.int32, device=padding.device)
    first = torch.where(padding, number, keys).amin(1, keepdim=True)
    last = torch.where(padding, number + 1, 0).amax(1, keepdim=True)
    return torch.stack([start.maximum(first), end.minimum(last)]).to(torch.int32)


def padding_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, mask_function: Any = None,
    attention_mask: Tensor | None = None, use_vmap: bool = False, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Return the mask of padding `[batch, keys]`, or None without padding; `attention_forward` makes the rest.

    Raises:
        BlockSparseError: the model has a mask function of its own, or a static cache.
    """
    if use_vmap:
        raise BlockSparseError(f'attn_implementation="{NAME}" has no mask functions of its own: use "sdpa"')
    if isinstance(q_offset, Tensor) or (attention_mask is not None and attention_mask.shape[1] < kv_length):
        raise BlockSparseError(f'attn_implementation="{NAME}" needs a dynamic cache: a static one has unused keys')
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:].bool()
    return None if not torch.compiler.is_compiling() and attention_mask.all() else attention_mask


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, padding_mask)
