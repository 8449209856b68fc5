"""PixelCNN++: a model of images, pixel by pixel; dense, or sparse in its channels and deeper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import nn as bsnn
from blocksparse import patterns
from blocksparse.checked import is_int, number
from blocksparse.errors import BlockSparseError
from blocksparse.layout import BlockLayout
from blocksparse.nn import Causal2d, Shift2d, WeightNorm, concat_elu, initialise_from_data
from blocksparse.ops.gated_sum import gated_sum

from . import logistic_mixture

# Returns the layout for a convolution's outputs and inputs.
Layouts = Callable[[int, int], BlockLayout]
# Called with inputs, outputs, kernel and shift, and the keywords `stride` and `scale`.
Conv = Callable[..., nn.Module]

KERNELS = {"down": (2, 3), "down_right": (2, 2)}
RESOLUTIONS = 3
# Height and width must be multiples of it.
STRIDE = 2 ** (RESOLUTIONS - 1)


class PixelCNN(nn.Module):
    """PixelCNN++: parameters of a mixture of logistics for each pixel, from the pixels above and to the left.

    Two streams of gated residual layers, one of the rows above and one of the row itself, go down to a quarter of the
    size and back up, with a short-cut from each layer down to its partner on the way up. Call `initialise` with a batch
    before training, as the paper does.

    Args:
        filters: channels of all layers.
        resnets: gated residual layers per resolution and stream; on the way up, the second and third have one more.
        channels: of the images, 1 or 3.
        mixtures: logistic distributions.
        dropout: in each gated residual layer.
        sparse: for the convolutions of the gated residual layers: None for dense ones; an int, the number of groups,
            with a channel shuffle after each convolution; or a function from (out, in) channels to a layout.
        block_size: of groups. None uses PyTorch's grouped convolutions and shuffles single channels. An int uses ours,
            with blocks of this many channels that the layout distributes over the groups
            (`patterns.shuffled_block_diagonal`); on a CPU this is faster, fastest with blocks of 4 or 8.
        depth: multiplies the gated residual layers. 4, with 4 groups, has about the parameters of the dense network.

    Shapes: images `[n, channels, height, width]` from -1 to 1 (`logistic_mixture.scaled`), height and width divisible
    by 4, to `[n, logistic_mixture.outputs(channels, mixtures), height, width]`.

    Example:
        >>> import torch
        >>> from blocksparse_lab.models.pixelcnn import PixelCNN
        >>> model = PixelCNN(filters=16, resnets=1, sparse=4, depth=4)
        >>> model(torch.rand(2, 3, 8, 8) * 2 - 1).shape
        torch.Size([2, 100, 8, 8])

    Source: Salimans, Karpathy, Chen, Kingma, PixelCNN++ (2017); block-sparse and deeper in Gray, Radford, Kingma, GPU
    Kernels for Block-Sparse Weights (2017).
    """

    def __init__(
        self,
        filters: int = 160,
        resnets: int = 5,
        *,
        channels: int = 3,
        mixtures: int = 10,
        dropout: float = 0.5,
        sparse: int | Layouts | None = None,
        block_size: int | None = None,
        depth: int = 1,
    ):
        super().__init__()
        for name, value in (("filters", filters), ("resnets", resnets), ("depth", depth)):
            if not is_int(value) or value < 1:
                raise BlockSparseError.expected(name, "a positive int", repr(value))
        outputs = logistic_mixture.outputs(channels, mixtures)
        self.filters, self.channels, self.mixtures = filters, channels, mixtures
        self.channels_last = callable(sparse) or (block_size or 0) > 8
        conv, dense = _factory(filters, sparse, block_size), _factory(filters, None, None)
        self.above = nn.Sequential(dense(channels + 1, filters, (2, 3), "down"), Shift2d("down"))
        self.above_in_row = nn.Sequential(dense(channels + 1, filters, (1, 3), "down"), Shift2d("down"))
        self.left = nn.Sequential(dense(channels + 1, filters, (2, 1), "down_right"), Shift2d("right"))
        # The way down to the lowest resolution, and the way up, whose layers each take a state of the way down.
        there: list[nn.Module] = []
        back: list[nn.Module] = []
        for resolution in range(RESOLUTIONS):
            there += [_Resize(dense, filters)] if resolution else []
            there += [_Layer(conv, filters, dropout, 0) for _ in range(resnets * depth)]
            back += [_Resize(_transposed, filters)] if resolution else []
            back += [_Layer(conv, filters, dropout, 1) for _ in range(resnets * depth + bool(resolution))]
        self.there, self.back = nn.ModuleList(there), nn.ModuleList(back)
        self.out = dense(filters, outputs, (1, 1), "down")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights again; set gains to 1 and biases to 0."""
        for module in self.modules():
            if isinstance(module, WeightNorm) and not module.gain.is_meta:
                inner: Any = module.module
                nn.init.normal_(getattr(inner, module.name), std=0.05)
                nn.init.ones_(module.gain)
                nn.init.zeros_(inner.bias)

    def initialise(self, images: Tensor) -> None:
        """Set gains and biases from a batch: each convolution's output gets mean 0 and deviation 1 (0.1 before a
        gate)."""
        initialise_from_data(self, images)

    def forward(self, images: Tensor) -> Tensor:
        """Return the parameters of each pixel's distribution, for images `[n, channels, height, width]` in -1..1."""
        self._check(images)
        # The channel of ones distinguishes the image from the zeros around it.
        x = F.pad(images, (0, 0, 0, 0, 0, 1), value=1.0)
        if x.device.type == "cpu":
            # Our kernels for larger blocks need channels last; oneDNN is faster on planes of few channels.
            x = x.movedim(1, -1).contiguous().movedim(-1, 1) if self.channels_last else x.contiguous()
        state = _State.of(self.above(x), self.above_in_row(x) + self.left(x))
        states = [state.active]
        for layer in self.there:
            state = layer(state)
            states.append(state.active)
        states.pop()
        for layer in self.back:
            state = layer(state, states.pop()) if isinstance(layer, _Layer) else layer(state)
        return self.out(F.elu(state.ul))

    def _check(self, images: Any) -> None:
        """Raise a BlockSparseError unless the images have the channels, and sizes that the strides divide."""
        wanted = f"[n, {self.channels}, height, width], both divisible by {STRIDE}"
        if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] != self.channels:
            got = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise BlockSparseError.expected("images", wanted, got)
        if any(size == 0 or size % STRIDE for size in images.shape[2:]):
            raise BlockSparseError.expected("images", wanted, list(images.shape))

    def log_prob(self, images: Tensor) -> Tensor:
        """Return the logarithm of the probability of each pixel in nats, `[n, height, width]`."""
        return logistic_mixture.log_prob(images, self(images))


class _State(NamedTuple):
    """Both streams, and both after `concat_elu`, which several layers use."""

    u: Tensor
    ul: Tensor
    active: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, u: Tensor, ul: Tensor) -> _State:
        return cls(u, ul, (concat_elu(u), concat_elu(ul)))


class _Layer(nn.Module):
    """A gated residual layer of both streams; the row stream also takes the other's output."""

    def __init__(self, conv: Conv, filters: int, dropout: float, others: int):
        super().__init__()
        self.u = GatedResnet(conv, "down", filters, dropout, others)
        self.ul = GatedResnet(conv, "down_right", filters, dropout, others + 1)

    def forward(self, state: _State, other: tuple[Tensor, Tensor] | None = None) -> _State:
        """Return both streams after a gated layer each; `other` is the state of the same size on the way down."""
        u = self.u(state.u, state.active[0], None if other is None else other[0])
        active = concat_elu(u)
        beside = active if other is None else torch.cat([active, other[1]], 1)
        ul = self.ul(state.ul, state.active[1], beside)
        return _State(u, ul, (active, concat_elu(ul)))


class _Resize(nn.Module):
    """Both streams at half or twice the height and width."""

    def __init__(self, conv: Conv, filters: int):
        super().__init__()
        self.u, self.ul = (conv(filters, filters, KERNELS[shift], shift, stride=2) for shift in KERNELS)

    def forward(self, state: _State) -> _State:
        return _State.of(self.u(state.u), self.ul(state.ul))


class GatedResnet(nn.Module):
    """x + a sigmoid(b), computed by convolutions of x; a 1x1 convolution adds other states of the same size."""

    def __init__(self, conv: Conv, shift: str, filters: int, dropout: float, others: int):
        super().__init__()
        self.first = conv(2 * filters, filters, KERNELS[shift], shift)
        self.other = conv(2 * others * filters, filters, (1, 1), shift="down_right") if others else None
        self.dropout = number("dropout", dropout, 0, below=1)
        self.second = conv(2 * filters, 2 * filters, KERNELS[shift], shift, scale=0.1)

    def forward(self, x: Tensor, active: Tensor, other: Tensor | None = None) -> Tensor:
        """Apply the layer; `active` is concat_elu(x), which others need too, and `other` the states, after
        concat_elu."""
        y = self.first(active)
        if self.other is not None:
            y = y + self.other(other)
        return gated_sum(x, self.second(concat_elu(y, self.dropout if self.training else 0.0)))


def _factory(filters: int, sparse: int | Layouts | None, block_size: int | None) -> Conv:
    """Return a function that builds weight-normalised causal convolutions, dense or sparse."""
    layouts, groups = (sparse, None) if callable(sparse) else (None, sparse)
    if groups is not None and (not is_int(groups) or groups < 1 or filters % groups):
        raise BlockSparseError.expected("sparse", f"groups that divide {filters} filters", repr(groups))
    if block_size is not None:
        if groups is None:
            raise BlockSparseError.expected("block_size", "None without groups", block_size)

        def layouts(outputs: int, inputs: int) -> BlockLayout:
            return patterns.shuffled_block_diagonal((outputs, inputs), block_size, groups)

    def conv(
        inputs: int, outputs: int, kernel: tuple[int, int], shift: str, stride: int = 1, scale: float = 1.0
    ) -> nn.Module:
        if layouts is not None:
            layout = layouts(outputs, inputs)
            return Causal2d(WeightNorm(bsnn.Conv2d(inputs, outputs, kernel, stride, layout=layout), scale), shift)
        dense = nn.Conv2d(inputs, outputs, kernel, stride, groups=groups or 1)
        causal = Causal2d(WeightNorm(dense, scale), shift)
        return causal if groups is None else nn.Sequential(causal, nn.ChannelShuffle(groups))

    return conv


def _transposed(
    inputs: int, outputs: int, kernel: tuple[int, int], shift: str, stride: int = 1, scale: float = 1.0
) -> nn.Module:
    """Build a causal transposed convolution."""
    # For an odd width, cut the same number of columns on both sides.
    around = (0, kernel[1] // 2) if shift == "down" else (0, 0)
    more = (0, 1) if shift == "down" else (0, 0)
    return WeightNorm(nn.ConvTranspose2d(inputs, outputs, kernel, stride, around, more), scale)


def parameter_count(*args: Any, **options: Any) -> int:
    """Count the parameters of a PixelCNN with these arguments, such as the published one's:

    >>> from blocksparse_lab.models.pixelcnn import parameter_count
    >>> parameter_count(filters=160, resnets=5)
    53659080
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in PixelCNN(*args, **options).parameters())
