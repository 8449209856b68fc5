"""The multiplicative LSTM, dense or block-sparse."""

from __future__ import annotations

from typing import Self, Unpack

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..ops import recurrent
from ..ops.recurrent import Steps, scan
from .multi_weight import Size
from .padding import pad
from .recurrent import Recurrent, SparseOptions, cast
from .weight_norm import Normed, l2_normalize, l2_normalize_dense, norms


class MultiplicativeLSTM(Normed, Recurrent):
    """An LSTM whose gates see the state multiplied elementwise by factors from the input.

        m = (x W_im^T) * (h W_hm^T);  i, f, g, o = x W_ih^T + m W_mh^T + b
        c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c)

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as torch.nn.LSTM.
        weight_norm: whether weights are normalized in each call, gain * w / |w| for each output; after training,
            `blocksparse.nn.fold` makes them plain weights.
        layout: the blocks of W_hm and of each gate in W_mh, `[hidden, hidden]`. Input weights of the same shape use it
            too.
        input_layout: the blocks of the first layer's W_im and of each gate in W_ih, `[hidden, input]`.
        layouts, density, block_size, device, dtype: as `blocksparse.nn.LSTM`.

    Weights without a layout are dense. Shapes are those of `nn.LSTM`.

    Raises:
        BlockSparseError: sizes or layouts do not fit, or the input has another shape.

    Example:
        >>> import torch, blocksparse as bs
        >>> mlstm = bs.nn.MultiplicativeLSTM(64, 256, density=0.25)
        >>> y, (h, c) = mlstm(torch.randn(10, 3, 64))
        >>> y.shape, c.shape
        (torch.Size([10, 3, 256]), torch.Size([1, 3, 256]))

    Source: Krause, Lu, Murray, Renals, Multiplicative LSTM for sequence modelling (2016); Radford, Jozefowicz,
    Sutskever, Learning to generate reviews and discovering sentiment (2017), with weight norm.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        weight_norm: bool = True,
        **options: Unpack[SparseOptions],
    ):
        self.weight_norm = bool(weight_norm)
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, **options)

    def _cell(self, inputs: Size) -> dict[str, tuple[int, Size, Size | None]]:
        """Return (gates, outputs, inputs) of each parameter; inputs are None for biases and gains."""
        hidden = self._hidden
        weights = {"ih": (4, inputs), "im": (1, inputs), "mh": (4, hidden), "hm": (1, hidden)}
        cell: dict[str, tuple[int, Size, Size | None]]
        cell = {f"weight_{name}": (gates, hidden, in_) for name, (gates, in_) in weights.items()}
        if self.bias:
            cell["bias"] = 4, hidden, None
        if self.weight_norm:
            cell |= {f"gain_{name}": (gates, hidden, None) for name, (gates, _) in weights.items()}
        return cell

    def reset_parameters(self) -> None:
        """Draw new weights and set the gains to their norms, which leaves the weights unscaled."""
        super().reset_parameters()
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.startswith("gain_"):
                    weight, layout = super()._weight(name.replace("gain", "weight"))
                    parameter.copy_(weight.norm(dim=1) if layout is None else norms(weight, layout))

    def _weight(self, name: str) -> tuple[Tensor, BlockLayout | None]:
        """Return values and layout of a weight, normalized and multiplied by its gain with weight norm."""
        weight, layout = super()._weight(name)
        if not self.weight_norm:
            return weight, layout
        gain = getattr(self, name.replace("weight", "gain"))
        if layout is not None:
            return l2_normalize(weight, layout, gain), layout
        return l2_normalize_dense(weight, gain), None

    @torch.no_grad()
    def fold(self) -> Self:
        """Set the weights to the normalized ones, remove the gains and return the module."""
        for name in [name for name, _ in self.named_parameters(recurse=False) if name.startswith("gain_")]:
            weight = name.replace("gain", "weight")
            super()._weight(weight)[0].copy_(self._weight(weight)[0])
        for name in [name for name in self._parameters if name.startswith("gain_")]:
            delattr(self, name)
        self.weight_norm = False
        return self

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        """Run one layer in one direction; see `Recurrent._run`."""
        bias = getattr(self, f"bias{suffix}") if self.bias else None
        pairs = self._weights(suffix, "ih", "im", "mh", "hm")
        weights, layouts = zip(*pairs, strict=True)
        x, h, bias, input_weight, *rest = cast(x, h, bias, *weights)
        cell = recurrent.MultiplicativeLSTM(steps, *layouts)
        return scan(cell, pad(x, layouts[0]), index, h, c, input_weight, bias, *rest)
