"""Weight normalisation over the fan-in that the layout stores."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..convert import block_coordinates
from ..errors import BlockSparseError
from ..layout import BlockLayout
from ..ops.checks import accumulator, without_autocast
from .module import BlockSparseModule

_DenseTransposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
_DenseConvolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | _DenseTransposed
# The least variance of an output in a batch by which it is normalised.
_MIN_VARIANCE = 1e-10
# The least sum of squares that is divided by: outputs without weights have the norm 0.
_EPSILON = 1e-12


def l2_normalize(values: Tensor, layout: BlockLayout, gain: Tensor | None = None, epsilon: float = _EPSILON) -> Tensor:
    """Divide the values by the l2 norm of their output's weights, over its stored inputs and all taps.

    Args:
        values: `[nnz, block_out, block_in]`, with a convolution's `*kernel` behind or not.
        layout: which blocks these are.
        gain: `[out_features]`, by which each output's weights are multiplied, or None.
        epsilon: the least sum of squares that is divided by.

    Returns:
        values of the same shape and dtype, those of 16 bits by way of float32; differentiable in values and gain.

    Example:
        >>> import torch, blocksparse as bs
        >>> layout = bs.patterns.random((64, 128), block_size=32, density=0.5, seed=0)
        >>> values = bs.nn.l2_normalize(torch.randn(*layout.values_shape, 3, 3), layout)
        >>> torch.allclose(bs.to_dense(values, layout).flatten(1).norm(dim=1), torch.ones(64))
        True

    Source: Salimans, Kingma, Weight normalization (2016); `l2_normalize` of openai/blocksparse (2017).
    """
    if gain is not None and tuple(gain.shape) != layout.shape[:1]:
        raise BlockSparseError.expected("gain", f"[{layout.shape[0]}] for {layout!r}", list(gain.shape))
    scale = norms(values, layout).clamp(min=epsilon**0.5).reciprocal()
    if gain is not None:
        scale = scale * gain
    rows, _ = block_coordinates(layout, values.device)
    blocks = scale.reshape(layout.grid[0], layout.block_shape[0])[rows]
    return (values * blocks.reshape(*blocks.shape, *[1] * (values.dim() - 2))).to(values.dtype)


def norms(values: Tensor, layout: BlockLayout) -> Tensor:
    """Return the l2 norm of each output's stored weights, `[out_features]`, of 16-bit values in float32.

    Differentiable also where it is 0.
    """
    layout.check_values(values)
    squares = values.to(accumulator(values.dtype)).square()
    if values.dim() > 3:
        squares = squares.flatten(3).sum(-1)
    # Sums over the blocks of a row are a product with ones: deterministic, and differentiable any number of times.
    with without_autocast(values.device):
        total = ops.linear(squares.new_ones(1, layout.shape[1]), squares, layout).squeeze(0)
    return torch.where(total > 0, total, 1).sqrt() * (total > 0)


def l2_normalize_dense(weight: Tensor, gain: Tensor, axis: int = 0) -> Tensor:
    """Return the same of a dense weight that has the outputs on this axis: torch._weight_norm gives NaN for one of zeros."""
    outputs = weight.shape[axis]
    if tuple(gain.shape) != (outputs,):
        raise BlockSparseError.expected("gain", f"[{outputs}] for a weight {list(weight.shape)}", list(gain.shape))
    others = [other for other in range(weight.dim()) if other != axis]
    lengths = torch.linalg.vector_norm(weight, dim=others, keepdim=True).clamp(min=_EPSILON**0.5)
    normalized: Tensor = weight * (gain.view_as(lengths) / lengths)
    return normalized


class Normed:
    """A module whose weights are trained as direction and length."""

    def fold(self) -> nn.Module:
        """Return a module, perhaps itself, with the effective weights as its weights."""
        raise NotImplementedError


class WeightNorm(Normed, nn.Module):
    """A module whose outputs' weights are trained as direction and length: gain * weight / |weight|.

    Args:
        module: a block-sparse module, or one of torch.nn: Linear, a convolution (in groups or not), or a transposed
            one without groups. Its weight (its `values`) stays its parameter, of which only the direction counts.
        scale: of the outputs that `initialise_from_data` gives it.

    `gain` is `[out_features]` (padded to whole blocks, as a layout is), and begins as the norms of the weights, so
    that nothing changes at first. The norm of an output is taken over its (stored) inputs and all taps.

    Shapes: those of the module, whose call this is.

    Raises:
        BlockSparseError: a module of another kind.

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
        grouped = isinstance(module, _DenseTransposed) and module.groups > 1  # its outputs are on two axes
        if grouped or not isinstance(module, BlockSparseModule | nn.Linear | _DenseConvolution):
            expected = "a block-sparse module, a linear layer, or a convolution, a transposed one without groups"
            raise BlockSparseError.expected("module", expected, type(module).__name__)
        self.module, self.scale = module, scale
        self.gain = nn.Parameter(self._norms())

    @property
    def _axis(self) -> int:
        """Of a dense weight: the one that has the outputs."""
        return 1 if isinstance(self.module, _DenseTransposed) else 0

    def _norms(self) -> Tensor:
        if isinstance(self.module, BlockSparseModule):
            values = self.module.values.detach()
            return norms(values, self.module.layout).to(values.dtype)
        weight: Tensor = self.module.weight
        found: Tensor = weight.detach().transpose(0, self._axis).flatten(1).norm(dim=1)
        return found

    @property
    def values(self) -> Tensor:
        """The weights in use."""
        if isinstance(self.module, BlockSparseModule):
            return l2_normalize(self.module.values, self.module.layout, self.gain)
        return l2_normalize_dense(self.module.weight, self.gain, self._axis)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return torch.func.functional_call(self.module, {self.name: self.values}, inputs, options)

    def fold(self) -> nn.Module:
        """Return the module itself, with the effective weights as its weights."""
        with torch.no_grad():
            getattr(self.module, self.name).copy_(self.values)
        return self.module

    @property
    def name(self) -> str:
        """Of the module's weight."""
        return "values" if isinstance(self.module, BlockSparseModule) else "weight"

    @torch.no_grad()
    def _initialise(self, *inputs: Any) -> None:
        """Gain and bias by which the outputs for these inputs have mean 0 and deviation `scale`."""
        bias = self.module.bias
        if not isinstance(bias, Tensor):
            raise BlockSparseError.expected("module", "one with a bias", repr(self.module))
        self.gain.fill_(1)
        bias.zero_()
        y = self.forward(*inputs)
        axis = y.dim() - 1 - len(getattr(self.module, "kernel_size", ()))
        variance, mean = torch.var_mean(y, [other for other in range(y.dim()) if other != axis], correction=0)
        gain = self.scale * (variance + _MIN_VARIANCE).rsqrt()
        self.gain[: len(gain)] = gain
        bias.copy_(-mean * gain)


def initialise_from_data(model: nn.Module, *inputs: Any) -> None:
    """Set gain and bias of every `WeightNorm` in a model by passing one batch through it.

    One after the other in the order of their calls they get such as give each of their outputs mean 0 and deviation
    `scale` over the batch. One that is not called is left as it is.

    Args:
        model: whose layers.
        inputs: of its call.

    Raises:
        BlockSparseError: a `WeightNorm` of a module without a bias.

    >>> import torch, blocksparse as bs
    >>> layer = bs.nn.WeightNorm(bs.nn.Linear(64, 32, density=0.5, block_size=8), scale=0.1)
    >>> x = 5 + 3 * torch.randn(1000, 64)
    >>> bs.nn.initialise_from_data(layer, x)
    >>> [round(figure.item(), 3) for figure in torch.std_mean(layer(x), dim=0)[0][:2]]
    [0.1, 0.1]

    Source: Salimans, Kingma, Weight normalization (2016), section 3.
    """
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: module._initialise(*inputs))
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
    """Copy a model with its effective weights as plain weights, for when training is over.

    Of `WeightNorm` and `MultiplicativeLSTM`, which otherwise compute them in each call: of few tokens most of its time.

    >>> import torch, blocksparse as bs
    >>> model = torch.nn.Sequential(bs.nn.WeightNorm(torch.nn.Linear(4, 3)))
    >>> bs.nn.fold(model)
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
    )
    """
    found = copy.deepcopy(model)
    folded: dict[nn.Module | None, nn.Module]
    folded = {module: module.fold() for module in list(found.modules()) if isinstance(module, Normed)}
    for parent in list(found.modules()):
        for name, child in parent._modules.items():  # under all of its names
            if child in folded:
                setattr(parent, name, folded[child])
    return folded.get(found, found)
