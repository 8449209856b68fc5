"""Recurrent cells, which compute one step per call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from torch import Tensor

from ..checked import shape_of
from ..errors import BlockSparseError
from .gru import GRU, RNN
from .lstm import LSTM
from .recurrent import Recurrent, SparseOptions


class Cell(Recurrent):
    """A mixin before a recurrent layer's class that turns it into a cell."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, **options: Unpack[SparseOptions]):
        self._refuse_layers(options)
        super().__init__(input_size, hidden_size, bias=bias, **options)

    def _refuse_layers(self, options: Iterable[str]) -> None:
        """Raise a TypeError for options that only layers have, such as `num_layers`."""
        for name in options:
            if name not in SparseOptions.__annotations__:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")

    def _suffix(self, layer: int, direction: int) -> str:
        return ""

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        """Check shapes, run one time step, and return the new states without the axis of time."""
        if not isinstance(input, Tensor) or input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            raise BlockSparseError.expected(
                "input", f"[batch, {self.input_size}] or [{self.input_size}]", shape_of(input)
            )
        states = hx if isinstance(hx, tuple | list) else () if hx is None else (hx,)
        for name, state in zip("hc", states, strict=False):
            shape = [*input.shape[:-1], self.hidden_size]
            if not isinstance(state, Tensor) or list(state.shape) != shape:
                raise BlockSparseError.expected(f"the initial {name}", shape, shape_of(state))
        steps = tuple(state.unsqueeze(0) for state in states)
        _, new = super().forward(input.unsqueeze(0), steps[0] if isinstance(hx, Tensor) else steps or None)
        return new.squeeze(0) if isinstance(new, Tensor) else tuple(state.squeeze(0) for state in new)


class LSTMCell(Cell, LSTM):  # type: ignore[misc]
    """`torch.nn.LSTMCell` with weights that are dense or block-sparse: one step of `blocksparse.nn.LSTM`.

    Args:
        input_size, hidden_size, bias: as in torch.nn.LSTMCell.
        layout, input_layout, layouts, density, block_size, device, dtype: as in `blocksparse.nn.LSTM`; the names of the
            weights are `weight_ih` and `weight_hh`.

    Shapes: `[batch, input_size]` or `[input_size]`, and (h, c) `[batch, hidden_size]` or `[hidden_size]`, to (h, c).

    Raises:
        BlockSparseError: sizes or layouts do not fit, or an input has another shape.

    >>> import torch, blocksparse as bs
    >>> cell = bs.nn.LSTMCell(64, 256, density=0.25)
    >>> h, c = cell(torch.randn(3, 64))
    >>> h.shape, c.shape
    (torch.Size([3, 256]), torch.Size([3, 256]))
    """


class GRUCell(Cell, GRU):  # type: ignore[misc]
    """`torch.nn.GRUCell` with weights that are dense or block-sparse: one step of `blocksparse.nn.GRU`.

    Args:
        input_size, hidden_size, bias: as in torch.nn.GRUCell.
        layout, input_layout, layouts, density, block_size, device, dtype: as in `LSTMCell`.

    Shapes: `[batch, input_size]` or `[input_size]`, and h `[batch, hidden_size]` or `[hidden_size]`, to h.

    Raises:
        BlockSparseError: sizes or layouts do not fit, or an input has another shape.

    >>> import torch, blocksparse as bs
    >>> bs.nn.GRUCell(64, 256, density=0.25)(torch.randn(3, 64)).shape
    torch.Size([3, 256])
    """


class RNNCell(Cell, RNN):  # type: ignore[misc]
    """`torch.nn.RNNCell` with weights that are dense or block-sparse: one step of `blocksparse.nn.RNN`.

    Args:
        input_size, hidden_size, bias, nonlinearity: as torch.nn.RNNCell.
        layout, input_layout, layouts, density, block_size, device, dtype: as in `LSTMCell`.

    Shapes and errors are those of `GRUCell`.

    >>> import torch, blocksparse as bs
    >>> bs.nn.RNNCell(64, 256, density=0.25)(torch.randn(3, 64)).shape
    torch.Size([3, 256])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        **options: Unpack[SparseOptions],
    ):
        self._refuse_layers(options)
        # Skips Cell.__init__, which has no nonlinearity.
        super(Cell, self).__init__(input_size, hidden_size, bias=bias, nonlinearity=nonlinearity, **options)
