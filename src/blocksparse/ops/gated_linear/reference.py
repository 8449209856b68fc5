"""The definition of the gated pair: two dense products."""

from __future__ import annotations

from torch import Tensor

from ...convert import to_dense
from ...layout import BlockLayout
from ..activations import ACTIVATIONS
from ..checks import accumulator, always_supported

unsupported_reason = always_supported


def gated_linear(
    x: Tensor, gate: Tensor, gate_layout: BlockLayout, up: Tensor, up_layout: BlockLayout, gate_bias: Tensor | None,
    up_bias: Tensor | None, activation: str | None,
) -> Tensor:  # fmt: skip
    """Return activation(x G^T + gate_bias) * (x U^T + up_bias): `[tokens, in] -> [tokens, out]`."""
    wide = accumulator(x.dtype)
    products = [
        x.to(wide) @ to_dense(values.to(wide), layout).T + (0 if bias is None else bias.to(wide))
        for values, layout, bias in ((gate, gate_layout, gate_bias), (up, up_layout, up_bias))
    ]
    return (ACTIVATIONS[activation](products[0]) * products[1]).to(x.dtype)
