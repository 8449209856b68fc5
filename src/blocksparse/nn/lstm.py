"""The LSTM, dense or block-sparse."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..layout import BlockLayout
from ..ops import recurrent
from ..ops.recurrent import Steps, scan
from ..ops.registry import needs_grad
from .module import Weight
from .padding import pad
from .recurrent import Recurrent, SparseOptions, State, cast, check_dtypes, check_states, to_dtype


class LSTM(Recurrent):
    """`torch.nn.LSTM` with weights that are dense or block-sparse.

        i, f, g, o = x W_ih^T + b_ih + h W_hh^T + b_hh;  c = sig(f) c + sig(i) tanh(g);  h = sig(o) tanh(c)

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size: as torch.nn.LSTM.
        layout: the blocks of each recurrent weight, `[hidden, hidden]` for all four gates or `[4 hidden, hidden]`; with
            a projection, `proj_size` replaces the last hidden. Input weights of the same shape use it too.
        input_layout: the blocks of the first layer's input weight, `[hidden, input]` or `[4 hidden, input]`.
        proj_layout: the blocks of the projection, `[proj_size, hidden]`.
        layouts: layouts of single weights by name, such as `{"weight_hh_l0": layout}`, instead of the ones above.
        density: fraction of every weight that a random layout stores, instead of layouts.
        block_size: block of these random layouts, an int or (rows, columns).
        device, dtype: of the parameters.

    Weights without a layout are dense. Without any layout and density, the parameters, their names and the results are
    those of torch.nn.LSTM. The parameter of a block-sparse weight such as `weight_hh_l0` is `weight_hh_l0.values`. The
    weight gradient of all time steps is one product. Under autocast and with 16-bit parameters, c is float32. On a GPU
    in 16 bits, a `layout` of one gate is fastest, because all four gates then load their inputs once.

    Shapes: as torch.nn.LSTM: `[steps, batch, input_size]` (or batch first, or without a batch, or packed) to
    `[steps, batch, hidden_size]` and the final h and c `[layers * directions, batch, hidden_size]`.

    Raises:
        BlockSparseError: sizes or layouts do not fit, or the input has another shape.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.barabasi_albert(1024, block_size=32, m=2, seed=0)
        >>> lstm = bs.nn.LSTM(64, 1024, layout=layout)
        >>> y, (h, c) = lstm(torch.randn(10, 3, 64))
        >>> y.shape, c.shape
        (torch.Size([10, 3, 1024]), torch.Size([1, 3, 1024]))

    Source: Hochreiter, Schmidhuber, Long short-term memory (1997); Gray, Radford, Kingma, GPU Kernels for
    Block-Sparse Weights (2017).
    """

    _kind = "lstm"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        proj_layout: BlockLayout | None = None,
        **options: Unpack[SparseOptions],
    ):
        self.proj_size, self._proj_layout = proj_size, proj_layout
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, **options)
        self.flatten_parameters()

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None, *, table: Tensor | None = None
    ) -> tuple[Any, State]:
        """Return (outputs, (h, c)) by the fastest way that can serve the call.

        These are one call of the compiled core per layer in inference, PyTorch's LSTM for dense weights, or the general
        forward pass.
        """
        if table is None and (result := self._fast_inference(input, hx)) is not None:
            y, h, c = result
            return y, (h, to_dtype(c, y.dtype if hx is None else hx[1].dtype))
        x = input.data if isinstance(input, PackedSequence) else input
        if table is not None or not isinstance(x, Tensor) or not self._uses_torch_kernels(x, hx):
            return super().forward(input, hx, table=table)
        rows, times, restore = self._rows(input, None)
        h, c = self._initial_states(hx, times.batch, rows, input)
        weights = self._flat_weights()
        check_dtypes(rows, *weights)
        options = self.bias, self.num_layers, self.dropout, self.training, self.bidirectional
        state = [h, c.to(h.dtype)]
        if isinstance(input, PackedSequence):
            y, h, c = torch._VF.lstm(rows, input.batch_sizes, state, weights, *options)
            return restore(y, h, c if hx is None else c.to(hx[1].dtype))
        # Not from `rows`: a graph with a view of them could not have any batch.
        axis = 0 if self.batch_first else 1
        batched = input if input.dim() == 3 else input.unsqueeze(axis)
        y, h, c = torch._VF.lstm(batched, state, weights, *options, self.batch_first)
        c = c if hx is None else c.to(hx[1].dtype)
        return (y, (h, c)) if input.dim() == 3 else (y.squeeze(axis), (h.squeeze(1), c.squeeze(1)))

    def _uses_torch_kernels(self, x: Tensor, hx: State | None) -> bool:
        """Return whether PyTorch's kernels are faster, for dense weights: cuDNN on a GPU, oneDNN in inference."""
        if any(isinstance(weight, Weight) for weight in self.children()):
            return False
        check_states(hx)
        return x.device.type == "cuda" or not needs_grad(x, *(hx or ()), *self.parameters())

    def _apply(self, *args: Any, **kwargs: Any) -> LSTM:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.flatten_parameters()
        return self

    def flatten_parameters(self) -> None:
        """Make dense weights on a GPU contiguous in memory, because cuDNN would copy them in every call."""
        weights = self._flat_weights()
        if any(isinstance(weight, Weight) or not weight.is_cuda for weight in weights):
            return
        first, addresses = weights[0], {weight.data_ptr() for weight in weights}
        if not torch.backends.cudnn.is_acceptable(first) or len(addresses) < len(weights):
            return
        mode = torch.backends.cudnn.rnn.get_cudnn_mode("LSTM")
        per_cell = len(weights) // (self.num_layers * self.directions)
        sizes = self.input_size, mode, self.hidden_size, self.proj_size, self.num_layers
        with torch.cuda.device_of(first), torch.no_grad():
            if torch._use_cudnn_rnn_flatten_weight():
                torch._cudnn_rnn_flatten_weight(weights, per_cell, *sizes, self.batch_first, self.bidirectional)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights and biases of each cell, as in torch.nn.LSTM; block-sparse ones as dense, read-only tensors."""
        flat = [weight.weight if isinstance(weight, Weight) else weight for weight in self._flat_weights()]
        per_cell = len(flat) // (self.num_layers * self.directions)
        return [flat[i : i + per_cell] for i in range(0, len(flat), per_cell)]

    def _flat_weights(self) -> list[Tensor]:
        names = self._cell(self._hidden)
        cells = [(layer, direction) for layer in range(self.num_layers) for direction in range(self.directions)]
        return [getattr(self, name + self._suffix(*cell)) for cell in cells for name in names]

    def _run(
        self, suffix: str, x: Tensor, index: Tensor | None, h: Tensor, c: Tensor, steps: Steps
    ) -> tuple[Tensor, ...]:
        """Run one layer in one direction; see `Recurrent._run`."""
        bias = getattr(self, f"bias_ih{suffix}") + getattr(self, f"bias_hh{suffix}") if self.bias else None
        pairs = self._weights(suffix, "ih", "hh", *(["hr"] if self.proj_size else []))
        (input_weight, *weights), (input_layout, layout, *projections) = zip(*pairs, strict=True)
        x, h, input_weight, bias, *weights = cast(x, h, input_weight, bias, *weights)
        cell = recurrent.LSTM(steps, input_layout, layout, *projections)
        return scan(cell, pad(x, input_layout), index, h, c, input_weight, bias, *weights)
