"""Multi-head attention with block-sparse projections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checked import integer, number
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.checks import in_autocast
from .linear import Linear
from .multi_weight import MultiWeightModule, Size
from .padding import padded_to


class MultiheadAttention(MultiWeightModule):
    """`torch.nn.MultiheadAttention` whose projections are dense or block-sparse.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first: as
            torch.nn.MultiheadAttention.
        layout: the blocks of the projections of queries, keys and values, `[embed_dim, embed_dim]` for all three or
            `[3 embed_dim, embed_dim]`. The output projection uses a layout of one projection too.
        layouts: layouts of single weights by name, instead of `layout`: `in_proj_weight` and `out_proj.weight`, or, if
            keys or values have another size, `q_proj_weight`, `k_proj_weight` and `v_proj_weight`.
        density: fraction of every weight that a random layout stores, instead of layouts.
        block_size: block of these random layouts, an int or (rows, columns).
        device, dtype: of the parameters.

    Weights without a layout are dense. Without any layout and density, the parameters, their names and the results are
    those of torch.nn.MultiheadAttention. The parameter of a block-sparse weight is `in_proj_weight.values`. The heads
    are dense and use PyTorch's kernels. `torch.nn.TransformerEncoderLayer` and similar layers accept this module in
    place of theirs, and do not fuse it.

    Shapes: `query` `[target, batch, embed_dim]`, `key` `[source, batch, kdim]`, `value` `[source, batch, vdim]`, or
    batch first, or without a batch. Returns the output in the shape of the query, and the weights
    `[batch, target, source]`, per head `[batch, heads, target, source]`, or None. Masks are those of
    torch.nn.MultiheadAttention.

    Raises:
        BlockSparseError: sizes or layouts do not fit; in the call, shapes do not fit, or `is_causal` has no mask.

    Example:
        >>> import torch, blocksparse as bs
        >>> attention = bs.nn.MultiheadAttention(256, 8, batch_first=True, density=0.25)
        >>> x = torch.randn(2, 10, 256)
        >>> y, weights = attention(x, x, x)
        >>> y.shape, weights.shape
        (torch.Size([2, 10, 256]), torch.Size([2, 10, 10]))

    Source: Vaswani et al., Attention is all you need (2017).
    """

    # False makes PyTorch's encoder layers call this module. Their fused kernels would read its weights instead.
    _qkv_same_embed_dim = False
    out_proj: Any
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        layout: BlockLayout | None = None,
        layouts: Mapping[str, BlockLayout] | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
    ):
        super().__init__(layouts, density, block_size, device, dtype)
        self._check_layouts(layout)
        self.embed_dim, self.num_heads = integer("embed_dim", embed_dim, 1), integer("num_heads", num_heads, 1)
        self.kdim = self.embed_dim if kdim is None else integer("kdim", kdim, 1)
        self.vdim = self.embed_dim if vdim is None else integer("vdim", vdim, 1)
        self.head_dim, rest = divmod(self.embed_dim, self.num_heads)
        if rest:
            raise BlockSparseError.expected("embed_dim", f"a multiple of num_heads, {num_heads}", embed_dim)
        self.dropout, self.batch_first = number("dropout", dropout, 0, 1), bool(batch_first)
        self.add_zero_attn = bool(add_zero_attn)
        self._build(layout)
        self.in_proj_bias = nn.Parameter(torch.empty(3 * self.embed_dim, **self._options)) if bias else None
        self.out_proj = self._output(bool(bias), layout)
        self._check_names()
        for name in ("bias_k", "bias_v"):
            vector = nn.Parameter(torch.empty(1, 1, self.embed_dim, **self._options)) if add_bias_kv else None
            setattr(self, name, vector)
        self.reset_parameters()

    def _build(self, layout: BlockLayout | None) -> None:
        """Add the weights of query, key and value, stacked in one if their inputs have one size."""
        size = Size(self.embed_dim, self.embed_dim)
        if self.kdim == self.vdim == self.embed_dim:
            parts = {"in_proj_weight": (3, size)}
        else:
            inputs = self.embed_dim, self.kdim, self.vdim
            names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
            parts = {name: (1, Size(each, each)) for name, each in zip(names, inputs, strict=True)}
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if name in parts:
                count, of = parts[name]
                self._add_weight(name, count, size, of, layout if of == size else None)
            else:
                setattr(self, name, None)

    def _output(self, bias: bool, layout: BlockLayout | None) -> nn.Module:
        """Return the output layer, dense if it has neither a layout nor a density."""
        of_one = layout is not None and layout.shape[0] == padded_to(self.embed_dim, layout.block_shape[0])
        layout = self._layouts.pop("out_proj.weight", layout if of_one else None)
        if layout is None and self._density is None:
            return nn.Linear(self.embed_dim, self.embed_dim, bias=bias, **self._options)
        sparse = {"layout": layout} if layout is not None else {"density": self._density}
        return Linear(self.embed_dim, self.embed_dim, bias=bias, block_size=self._block_size, **sparse, **self._options)

    def reset_parameters(self) -> None:
        """Draw new parameters: dense weights as torch.nn.MultiheadAttention does; biases are 0."""
        self.out_proj.reset_parameters()
        self._draw_weights()
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name in ("bias_k", "bias_v"):
                    nn.init.xavier_normal_(parameter)
                elif name in self.sizes:
                    nn.init.xavier_uniform_(parameter)
            if self.in_proj_bias is not None:
                self.in_proj_bias.zero_()
                self.out_proj.bias.zero_()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (outputs, attention weights or None), with the arguments of `torch.nn.MultiheadAttention`."""
        batched = self._check(query, key, value)
        query, key, value = self._project(query, key, value)
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        (batch, target, _), source, appended = query.shape, key.shape[1], 0
        if is_causal and attn_mask is None:
            raise BlockSparseError.expected("attn_mask", "the mask that is_causal=True describes", None)
        if not is_causal or key_padding_mask is not None or need_weights:
            is_causal = False
            mask = self._mask(key_padding_mask, attn_mask, query, source)
        else:
            mask = None
        if self.bias_k is not None and self.bias_v is not None:
            key, value = (
                torch.cat([x, bias.to(x.dtype).expand(batch, 1, -1)], 1)
                for x, bias in ((key, self.bias_k), (value, self.bias_v))
            )
            appended += 1
        query, key, value = (x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, value))
        if self.add_zero_attn:
            key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
            appended += 1
        mask = None if mask is None else F.pad(mask, (0, appended))
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (query / math.sqrt(self.head_dim)) @ key.transpose(2, 3)
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout)
            heads = weights @ value
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal)
        y: Tensor = self.out_proj(heads.transpose(1, 2).reshape(batch, target, self.embed_dim))
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Return whether the inputs have a batch axis; check shapes, dtypes and devices."""
        inputs = {"query": (query, self.embed_dim), "key": (key, self.kdim), "value": (value, self.vdim)}
        own = next(self.parameters())
        for name, (x, size) in inputs.items():
            if not isinstance(x, Tensor) or x.is_nested:
                raise BlockSparseError.expected(name, "a dense tensor", type(x).__name__)
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
                axes = "2 or 3 axes" if x is query else f"{query.dim()} axes"
                raise BlockSparseError.expected(name, f"{axes}, the last of {size}", list(x.shape))
            if (x.dtype != own.dtype and not in_autocast(x)) or x.device != own.device:
                expected = f"the dtype and the device of the module, {own.dtype} and {own.device}"
                raise BlockSparseError.expected(name, expected, f"{x.dtype} and {x.device}")
        batch = slice(0) if query.dim() == 2 else 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or query.shape[batch] != key.shape[batch]:
            got = ", ".join(str(list(x.shape)) for x in (query, key, value))
            raise BlockSparseError.expected("query, key and value", "one batch, and a value for each key", got)
        return query.dim() == 3

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return the projections of query, key and value; equal inputs share a product."""
        bias = self.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        if self.in_proj_weight is None:
            inputs = zip((query, key, value), "qkv", biases, strict=True)
            return tuple(self._product_with(x, f"{name}_proj_weight", slice(0, 1), b) for x, name, b in inputs)
        if query is key and key is value:
            return self._product_with(query, "in_proj_weight", slice(0, 3), bias).chunk(3, -1)
        first = self._product_with(query, "in_proj_weight", slice(0, 1), biases[0])
        if key is value:
            both = None if bias is None else bias[self.embed_dim :]
            return first, *self._product_with(key, "in_proj_weight", slice(1, 3), both).chunk(2, -1)
        others = ((key, slice(1, 2), biases[1]), (value, slice(2, 3), biases[2]))
        return first, *(self._product_with(x, "in_proj_weight", part, b) for x, part, b in others)

    def _mask(self, padding: Tensor | None, mask: Tensor | None, query: Tensor, source: int) -> Tensor | None:
        """Merge both masks into one to add to the scores, `[batch or 1, heads or 1, target or 1, source]`, or None."""
        batch, target, _ = query.shape
        merged = None
        if mask is not None:
            shapes = [target, source], [batch * self.num_heads, target, source]
            if list(mask.shape) not in shapes:
                expected = " or ".join(map(str, shapes)) + " (for shorter inputs, pass mask[:target, :source])"
                raise BlockSparseError.expected("attn_mask", expected, list(mask.shape))
            mask = _additive("attn_mask", mask, query.dtype)
            merged = mask if mask.dim() == 2 else mask.unflatten(0, (batch, self.num_heads))
        if padding is not None:
            if list(padding.shape) != [batch, source]:
                raise BlockSparseError.expected("key_padding_mask", [batch, source], list(padding.shape))
            additive = _additive("key_padding_mask", padding, query.dtype).view(batch, 1, 1, source)
            merged = additive if merged is None else merged + additive
        return merged

    def extra_repr(self) -> str:
        shown = [f"{self.embed_dim}, {self.num_heads}"]
        weights = {name: getattr(self, name) for name in self.sizes}
        shown += [f"{name}=dense" for name, weight in weights.items() if isinstance(weight, nn.Parameter)]
        return ", ".join(shown)


def _additive(name: str, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores; a bool mask becomes -inf where it is True, else 0."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
    if not mask.is_floating_point():
        raise BlockSparseError.expected(name, "a mask of bools or floating-point numbers", mask.dtype)
    return mask.to(dtype)
