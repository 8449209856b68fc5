"""The experts of a mixture-of-experts layer, with block-sparse weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..checked import integer, shape_of
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.checks import in_autocast
from ..ops.graph_layout import is_exporting
from .module import Weight
from .multi_weight import MultiWeightModule, Size
from .padding import pad

WEIGHTS = "gate_up_proj", "down_proj"


class Experts(MultiWeightModule):
    """Gated linear units as experts: the weighted sum of down_e (act(gate_e x) * up_e x) over the experts e of a token.

    The interface is that of MixtralExperts in transformers; `sparsify` replaces experts that compute the same. The
    weights of all experts are stacked, each padded separately.

    Args:
        num_experts, hidden_dim, intermediate_dim: sizes.
        act_fn: an elementwise function.
        layouts: layouts by weight. For `gate_up_proj` of shape `[2 intermediate, hidden]`, the same for each expert, or
            `[experts * 2 intermediate, hidden]`; for `down_proj` `[hidden, intermediate]` or
            `[experts * hidden, intermediate]`. A weight without a layout is dense, a parameter `[experts, out, in]`.
        density: fraction of each expert's weights that a random layout of its own stores, instead of layouts.
        block_size: block of these random layouts, an int or (rows, columns).
        device, dtype: of the parameters.

    Tokens are sorted by expert, and each expert computes its own. The host waits once per call for the number of tokens
    of each expert. While a CUDA graph is captured it cannot wait, so every expert computes all tokens: the work grows
    by a factor experts / `k`, and indices out of range count as no expert. The same holds for exported graphs of dense
    experts.

    Shapes: `hidden_states` `[tokens, hidden]`, `top_k_index` integers `[tokens, k]` (the experts of each token, or
    `num_experts` for none) and `top_k_weights` `[tokens, k]` to `[tokens, hidden]`.

    Raises:
        BlockSparseError: sizes or layouts do not fit, or `act_fn` is no function; in the call, shapes do not fit, or an
            index is not an integer from 0 to `num_experts`.

    >>> import torch, blocksparse as bs
    >>> experts = bs.nn.Experts(4, 64, 128, density=0.25)
    >>> experts(torch.randn(10, 64), torch.randint(4, (10, 2)), torch.rand(10, 2)).shape
    torch.Size([10, 64])
    """

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        act_fn: Callable[[Tensor], Tensor] = F.silu,
        *,
        layouts: Mapping[str, BlockLayout] | None = None,
        density: float | None = None,
        block_size: int | tuple[int, int] = 32,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(layouts, density, block_size, device, dtype)
        self._check_layouts()
        self.num_experts, self.hidden_dim = integer("num_experts", num_experts, 1), integer("hidden_dim", hidden_dim, 1)
        self.intermediate_dim = integer("intermediate_dim", intermediate_dim, 1)
        if not callable(act_fn):
            expected = "an elementwise function, such as torch.nn.functional.silu"
            raise BlockSparseError.expected("act_fn", expected, repr(act_fn))
        self.act_fn = act_fn
        inner, outer = self.intermediate_dim, self.hidden_dim
        # Layouts of dense weights: each expert is one block.
        self._stacks: dict[str, BlockLayout] = {}
        for name, out, in_ in zip(WEIGHTS, (2 * inner, outer), (outer, inner), strict=True):
            self._stacks[name] = BlockLayout([[True]] * self.num_experts, (out, in_))
            self._add_weight(name, self.num_experts, Size(out, out), Size(in_, in_), None, draw_parts=True)
        self._check_names()
        self._stack()
        self.reset_parameters()

    def _stack(self) -> None:
        """Reshape dense weights to `[experts, out, in]`."""
        for name in self.sizes:
            weight = getattr(self, name)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                stacked = weight.detach().unflatten(0, (self.num_experts, -1))
                setattr(self, name, nn.Parameter(stacked, weight.requires_grad))

    def reset_parameters(self) -> None:
        """Draw new weights, uniform within 1 / sqrt(fan_in)."""
        self._draw_weights()
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5)

    def _weight(self, name: str) -> tuple[Tensor, BlockLayout]:
        weight, layout = super()._weight(name)
        return weight, layout or self._stacks[name]

    @property
    def _is_dense(self) -> bool:
        """Return whether all weights of the experts are dense."""
        return not any(map(self._is_sparse, WEIGHTS))

    def _is_sparse(self, name: str) -> bool:
        """Return whether a weight is block-sparse."""
        return isinstance(self._modules.get(name), Weight)

    def size_of(self, name: str) -> tuple[Size, Size | None] | None:
        return super().size_of(name) if self._is_sparse(name) else None  # dense weights have no padding

    def densified(self) -> Self:
        new = super().densified()
        new.sizes = {name: (Size(out.real, out.real), in_) for name, (out, in_) in self.sizes.items()}
        new._stack()
        return new

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return for each token the sum of its k experts, weighted by `top_k_weights`.

        Args:
            hidden_states: `[tokens, hidden_dim]`.
            top_k_index: `[tokens, k]`, integers; an index of `num_experts` stands for no expert.
            top_k_weights: `[tokens, k]`.

        Returns:
            `[tokens, hidden_dim]`.
        """
        is_matrix = isinstance(hidden_states, Tensor) and hidden_states.dim() == 2
        if not is_matrix or hidden_states.shape[1] != self.hidden_dim:
            expected = f"a tensor [tokens, {self.hidden_dim}]"
            raise BlockSparseError.expected("hidden_states", expected, shape_of(hidden_states))
        tokens = len(hidden_states)
        for name, tensor in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
            is_matrix = isinstance(tensor, Tensor) and tensor.dim() == 2 and len(tensor) == tokens
            if not is_matrix or tensor.shape != top_k_index.shape:
                raise BlockSparseError.expected(name, f"a tensor [{tokens}, k]", shape_of(tensor))
        if top_k_index.dtype == torch.bool or top_k_index.is_floating_point() or top_k_index.is_complex():
            expected = "integers, the numbers of experts (write top_k_index.long())"
            raise BlockSparseError.expected("top_k_index", expected, top_k_index.dtype)
        if top_k_weights.is_complex():
            raise BlockSparseError.expected("top_k_weights", "real numbers", top_k_weights.dtype)
        exported = is_exporting() and self._is_dense  # an exported graph needs PyTorch's ops only
        if exported or _is_captured(hidden_states):
            return self._compute_all_tokens(hidden_states, top_k_index, top_k_weights)
        routes = ops.route(top_k_index, self.num_experts)
        out = self._units(
            ops.spread(hidden_states, routes),
            F.embedding(routes.order, top_k_weights.flatten()[:, None]),
            *(partial(self._product, *self._weight(name), routes.starts) for name in WEIGHTS),
        )
        return ops.collect(out, routes).to(hidden_states.dtype)

    def _units(
        self, x: Tensor, weights: Tensor, gate_up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return weighted gated linear units by these products, whose outputs may be padded.

        The weights `[rows, 1]` multiply the inner features, which are usually fewer than the outputs.
        """
        gate, up = gate_up(x)[:, : 2 * self.intermediate_dim].chunk(2, -1)
        return down((self.act_fn(gate) * up * weights).to(x.dtype))[:, : self.hidden_dim]

    @staticmethod
    def _product(weight: Tensor, layout: BlockLayout, starts: Tensor, x: Tensor) -> Tensor:
        if (x.dtype != weight.dtype and not in_autocast(x)) or x.device != weight.device:
            expected = f"the dtype and the device of the experts, {weight.dtype} and {weight.device}"
            raise BlockSparseError.expected("hidden_states", expected, f"{x.dtype} and {x.device}")
        return ops.expert_linear(pad(x, layout), weight, layout, starts)

    def _compute_all_tokens(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute all tokens in every expert, which needs no number of tokens per expert on the host."""
        y = torch.zeros_like(x)
        for expert, products in enumerate(zip(*map(self._products, WEIGHTS), strict=True)):
            chosen = top_k_index == expert
            weight = (top_k_weights * chosen).sum(1, keepdim=True)
            out = self._units(x, weight, *products)
            y = y + torch.where(chosen.any(1, keepdim=True), out, 0).to(y.dtype)
        return y

    def _products(self, name: str) -> list[Callable[[Tensor], Tensor]]:
        """Return the product with each expert's weight; one split of the weight means one join of its gradient."""
        weight, layout = self._weight(name)
        if not self._is_sparse(name):
            return [partial(F.linear, weight=own) for own in weight.unbind(0)]
        layouts = [part.layout for part in ops.parts_of(layout, self.num_experts)]
        pieces = weight.split([each.nnz for each in layouts])
        return [partial(_linear, own, each) for own, each in zip(pieces, layouts, strict=True)]

    def extra_repr(self) -> str:
        return f"{self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}"


def _linear(values: Tensor, layout: BlockLayout, x: Tensor) -> Tensor:
    return ops.linear(pad(x, layout), values, layout)


def _is_captured(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, which cannot wait for the host."""
    return not torch.compiler.is_compiling() and x.is_cuda and torch.cuda.is_current_stream_capturing()
