"""The experts of a mixture, with block-sparse weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checked import integer
from ..errors import BlockSparseError
from ..layout import BlockLayout
from .module import Weight
from .parts import Parts, Size


class Experts(Parts):
    """Experts of a mixture, gated linear units: the weighted sum of down_e (act(gate_e x) * up_e x) over a token's.

    The interface is that of the library transformers, whose experts `sparsify` replaces: those that compute what
    MixtralExperts does. The weights of all experts lie one above the other, each padded by itself.

    Args:
        num_experts, hidden_dim, intermediate_dim: sizes.
        act_fn: elementwise.
        layouts: of `gate_up_proj` `[2 intermediate, hidden]`, for each expert, or of all `[experts * 2 intermediate,
            hidden]`, and of `down_proj` `[hidden, intermediate]` or `[experts * hidden, intermediate]`.
        density: instead of layouts, the part of the blocks that random patterns store in every weight.
        block_size: of these patterns.
        device, dtype: of the parameters.

    What has no layout is dense, a parameter `[experts, out, in]`.

    Each call asks the host which experts have tokens. Where it cannot, in a graph that is exported and while a CUDA
    graph is captured, every expert takes all tokens: as many times the work as there are experts for each that a token
    has.

    Shapes: `hidden_states` `[tokens, hidden]`, `top_k_index` int64 `[tokens, k]`, the experts of each token, with
    `num_experts` for none, and `top_k_weights` `[tokens, k]`, to `[tokens, hidden]`.

    Raises:
        BlockSparseError: sizes or layouts that do not fit; in the call, shapes that do not.

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
        self.act_fn = act_fn
        inner, outer = self.intermediate_dim, self.hidden_dim
        for name, out, in_ in (("gate_up_proj", 2 * inner, outer), ("down_proj", outer, inner)):
            self._add_weight(name, self.num_experts, Size(out, out), Size(in_, in_), None)
        self._check_names()
        self._stack()
        self.reset_parameters()

    def _stack(self) -> None:
        """Makes dense weights `[experts, out, in]`."""
        for name in self.sizes:
            weight = getattr(self, name)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                stacked = weight.detach().unflatten(0, (self.num_experts, -1))
                setattr(self, name, nn.Parameter(stacked, weight.requires_grad))

    def reset_parameters(self) -> None:
        """Draws all weights again, uniform within 1 / sqrt(fan_in)."""
        self._draw_weights()
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5)

    def _weight(self, name: str) -> tuple[Tensor, BlockLayout | None]:
        weight, layout = super()._weight(name)
        return weight if layout is not None else weight.flatten(0, 1), layout

    def size_of(self, name: str) -> tuple[Size, Size | None] | None:
        return super().size_of(name) if isinstance(getattr(self, name), Weight) else None  # others have no padding

    def densified(self) -> Self:
        new = super().densified()
        new.sizes = {name: (Size(out.real, out.real), in_) for name, (out, in_) in self.sizes.items()}
        new._stack()
        return new

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self.hidden_dim:
            raise BlockSparseError.expected("hidden_states", f"[tokens, {self.hidden_dim}]", list(hidden_states.shape))
        tokens = len(hidden_states)
        for name, given in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
            if given.dim() != 2 or len(given) != tokens or given.shape != top_k_index.shape:
                raise BlockSparseError.expected(name, f"[{tokens}, k]", list(given.shape))
        y = torch.zeros_like(hidden_states)
        if torch.compiler.is_exporting() or _is_captured(hidden_states):
            for expert in range(self.num_experts):
                chosen = top_k_index == expert
                weight = (top_k_weights * chosen).sum(1, keepdim=True)
                out = self._expert(expert, hidden_states) * weight
                y = y + torch.where(chosen.any(1, keepdim=True), out, 0).to(y.dtype)
            return y
        for expert in top_k_index.unique().tolist():
            if 0 <= expert < self.num_experts:
                token, place = torch.where(top_k_index == expert)
                out = self._expert(expert, hidden_states[token])
                y = y.index_add(0, token, (out * top_k_weights[token, place, None]).to(y.dtype))
        return y

    def _expert(self, nth: int, x: Tensor) -> Tensor:
        part = slice(nth, nth + 1)
        gate, up = self._product_with(x, "gate_up_proj", part).chunk(2, -1)
        return self._product_with(self.act_fn(gate) * up, "down_proj", part)

    def extra_repr(self) -> str:
        return f"{self.num_experts}, {self.hidden_dim}, {self.intermediate_dim}"


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which cannot wait for the host."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
