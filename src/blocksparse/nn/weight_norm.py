"""Weight normalization over the stored inputs of each output."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..checked import check_model, number
from ..convert import block_coordinates
from ..errors import BlockSparseError
from ..layout import BlockLayout, check_layout
from ..ops.checks import accumulator, without_autocast
from ..ops.registry import can_bypass_dispatcher
from ..ops.weight_norm import can_normalize, normalize
from .module import BlockSparseModule

_DenseTransposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_DenseConvolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | _DenseTransposed
# A lower bound of the variance by which `initialise_from_data` normalizes an output.
_MIN_VARIANCE = 1e-10
# A lower bound of sums of squares in divisors, because outputs without weights have the norm 0.
_EPSILON = 1e-12


def l2_normalize(values: Tensor, layout: BlockLayout, gain: Tensor | None = None, epsilon: float = _EPSILON) -> Tensor:
    """Divide the values by the l2 norm of their output's weights, over its stored inputs and all taps.

    Args:
        values: `[nnz, block_out, block_in]`, or `[nnz, block_out, block_in, *kernel]` of a convolution.
        layout: the positions of the values' blocks.
        gain: `[out_features]`, a factor for each output's weights, or None.
        epsilon: a lower bound of the sum of squares.

    Returns:
        Values of the same shape and dtype, differentiable in values and gain. 16-bit values are computed in float32.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> values = bs.nn.l2_normalize(torch.randn(*layout.values_shape, 3, 3), layout)
        >>> torch.allclose(bs.to_dense(values, layout).flatten(1).norm(dim=1), torch.ones(64))
        True

    Source: Salimans, Kingma, Weight normalization (2016); `l2_normalize` of openai/blocksparse (2017).
    """
    check_layout(layout)
    layout.check_values(values)
    number("epsilon", epsilon, 0)
    if gain is not None and (not isinstance(gain, Tensor) or tuple(gain.shape) != layout.shape[:1]):
        raise BlockSparseError.expected("gain", f"[{layout.shape[0]}] for {layout!r}", list(getattr(gain, "shape", ())))
    least = epsilon**0.5
    if values.dim() > 2 and can_normalize(values, gain):
        return normalize(
            values, layout, gain, least, lambda values, layout, gain: _composed(values, layout, gain, least)
        )
    return _composed(values, layout, gain, least)


def _composed(values: Tensor, layout: BlockLayout, gain: Tensor | None, least: float) -> Tensor:
    """Return `l2_normalize` by operations that can be differentiated any number of times."""
    scale = norms(values, layout).clamp(min=least).reciprocal()
    if gain is not None:
        scale = scale * gain
    rows, _ = block_coordinates(layout, values.device)
    blocks = scale.reshape(layout.grid[0], layout.block_shape[0])[rows]
    return (values * blocks.reshape(*blocks.shape, *[1] * (values.dim() - 2))).to(values.dtype)


def norms(values: Tensor, layout: BlockLayout) -> Tensor:
    """Return the l2 norm of each output's stored weights, `[out_features]`; float32 for 16-bit values.

    It is differentiable, also at 0.
    """
    layout.check_values(values)
    squares = values.to(accumulator(values.dtype)).square()
    if values.dim() > 3:
        squares = squares.flatten(3).sum(-1)
    # A product with ones sums the blocks of each row: deterministic, and differentiable any number of times.
    with without_autocast(values.device):
        total = ops.linear(squares.new_ones(1, layout.shape[1]), squares, layout).squeeze(0)
    return torch.where(total > 0, total, 1).sqrt() * (total > 0)


def l2_normalize_dense(weight: Tensor, gain: Tensor, axis: int = 0) -> Tensor:
    """Normalize a dense weight whose outputs are on `axis`. For outputs of zeros torch._weight_norm would give NaN."""
    outputs = weight.shape[axis]
    if tuple(gain.shape) != (outputs,):
        raise BlockSparseError.expected("gain", f"[{outputs}] for a weight {list(weight.shape)}", list(gain.shape))
    others = [other for other in range(weight.dim()) if other != axis]
    lengths = torch.linalg.vector_norm(weight, dim=others, keepdim=True).clamp(min=_EPSILON**0.5)
    normalized: Tensor = weight * (gain.view_as(lengths) / lengths)
    return normalized


class Normed:
    """A module whose weights are trained as a direction and a length."""

    def fold(self) -> nn.Module:
        """Return a module, possibly itself, whose weights are the normalized ones."""
        raise NotImplementedError


class WeightNorm(Normed, nn.Module):
    """A module whose weights are trained as direction and length: gain * weight / |weight| for each output.

    Args:
        module: a block-sparse module, or of torch.nn a Linear, a convolution, or a transposed one without groups. Its
            weight or `values` stays its parameter, of which only the direction matters.
        scale: the standard deviation of outputs that `initialise_from_data` sets.

    `gain` `[out_features]`, padded to whole blocks, is initialised to the norms of the weights, which leaves the module
    unchanged. The norm of an output is over its stored inputs and all taps.

    Shapes: those of the module.

    Raises:
        BlockSparseError: the module is of another kind.

    Example:
        >>> import torch, blocksparse as bs
        >>> layer = bs.nn.WeightNorm(bs.nn.Conv2d(64, 64, 3, density=0.5))
        >>> layer(torch.randn(2, 64, 8, 8)).shape
        torch.Size([2, 64, 6, 6])
        >>> [name for name, _ in layer.named_parameters()]
        ['gain', 'module.values', 'module.bias']

    Source: Salimans, Kingma, Weight normalization (2016).
    """

    def __init__(self, module: nn.Module, scale: float = 1.0):
        super().__init__()
        grouped = isinstance(module, _DenseTransposed) and module.groups > 1  # with groups, the outputs are on two axes
        if grouped or not isinstance(module, BlockSparseModule | nn.Linear | _DenseConvolution):
            expected = "a block-sparse module, a linear layer, or a convolution, a transposed one without groups"
            raise BlockSparseError.expected("module", expected, type(module).__name__)
        self.module, self.scale = module, scale
        self.gain = nn.Parameter(self._norms())

    @property
    def _axis(self) -> int:
        """The axis of the outputs in a dense weight."""
        return 1 if isinstance(self.module, _DenseTransposed) else 0

    def _norms(self) -> Tensor:
        """Return the norms of the rows of the module's weight, without gradients."""
        if isinstance(self.module, BlockSparseModule):
            values = self.module.values.detach()
            return norms(values, self.module.layout).to(values.dtype)
        weight: Tensor = self.module.weight
        lengths: Tensor = weight.detach().transpose(0, self._axis).flatten(1).norm(dim=1)
        return lengths

    @property
    def values(self) -> Tensor:
        """The normalized weights."""
        if isinstance(self.module, BlockSparseModule):
            return l2_normalize(self.module.values, self.module.layout, self.gain)
        return l2_normalize_dense(self.module.weight, self.gain, self._axis)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if not (isinstance(self.module, BlockSparseModule) and can_bypass_dispatcher(*inputs, plain_call=True)):
            return torch.func.functional_call(self.module, {self.name: self.values}, inputs, options)
        # Like functional_call, in a tenth of its time.
        parameters = self.module._parameters
        own, parameters["values"] = parameters["values"], self.values  # type: ignore[assignment]
        try:
            return self.module(*inputs, **options)
        finally:
            parameters["values"] = own

    def fold(self) -> nn.Module:
        """Set the module's weights to the normalized ones and return the module."""
        with torch.no_grad():
            getattr(self.module, self.name).copy_(self.values)
        return self.module

    @property
    def name(self) -> str:
        """The name of the module's weight, "values" or "weight"."""
        return "values" if isinstance(self.module, BlockSparseModule) else "weight"

    @torch.no_grad()
    def _initialise(self, *inputs: Any, **options: Any) -> None:
        """Set gain and bias so that the outputs for these inputs have mean 0 and standard deviation `scale`."""
        bias = self.module.bias
        if not isinstance(bias, Tensor):
            raise BlockSparseError.expected("module", "one with a bias", repr(self.module))
        if getattr(self.module, "activation", None) is not None:
            expected = "one without an activation (apply it after the WeightNorm)"
            raise BlockSparseError.expected("module", expected, repr(self.module))
        self.gain.fill_(1)
        bias.zero_()
        y = self.forward(*inputs, **options)
        axis = y.dim() - 1 - len(getattr(self.module, "kernel_size", ()))
        variance, mean = torch.var_mean(y, [other for other in range(y.dim()) if other != axis], correction=0)
        gain = self.scale * (variance + _MIN_VARIANCE).rsqrt()
        self.gain[: len(gain)] = gain
        bias.copy_(-mean * gain)


def _initialise_before(module: WeightNorm, inputs: Any, options: Any) -> None:
    module._initialise(*inputs, **options)


def initialise_from_data(model: nn.Module, *inputs: Any) -> None:
    """Set gain and bias of every `WeightNorm` in a model from one batch.

    Each output gets mean 0 and standard deviation `scale` over the batch, layer by layer in the order of their calls.
    Layers that are not called stay unchanged.

    Args:
        model: a model with `WeightNorm` modules.
        inputs: the arguments of its call.

    Raises:
        BlockSparseError: the module of a `WeightNorm` has no bias, or it has an activation.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.WeightNorm(bs.nn.Linear(64, 32, density=0.5, block_size=8), scale=0.1)
    >>> x = 5 + 3 * torch.randn(1000, 64)
    >>> bs.nn.initialise_from_data(layer, x)
    >>> [round(figure.item(), 3) for figure in torch.std_mean(layer(x), dim=0)[0][:2]]
    [0.1, 0.1]

    Source: Salimans, Kingma, Weight normalization (2016), section 3.
    """
    check_model(model)
    hooks = [
        module.register_forward_pre_hook(_initialise_before, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, WeightNorm)
    ]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()


def fold(model: nn.Module) -> nn.Module:
    """Copy a model and replace normalized weights by plain ones, for use after training.

    `WeightNorm` and `MultiplicativeLSTM` otherwise compute them in each call, most of its time for few tokens.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.WeightNorm(torch.nn.Linear(4, 3)))
    >>> bs.nn.fold(model)
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
    )
    """
    check_model(model)
    new = copy.deepcopy(model)
    folded: dict[nn.Module | None, nn.Module]
    folded = {module: module.fold() for module in list(new.modules()) if isinstance(module, Normed)}
    for parent in list(new.modules()):
        for name, child in parent._modules.items():  # including shared modules, which have several names
            if child in folded:
                setattr(parent, name, folded[child])
    return folded.get(new, new)
