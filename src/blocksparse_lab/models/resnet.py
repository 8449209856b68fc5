"""Residual networks for small images, dense or block-sparse in their channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse import nn as bsnn
from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError
from blocksparse.nn.research.circular import circular_pad

# Ways to downsample, with the paddings that each allows.
PADDING_MODES = {"stride": ("zeros", "circular"), "aps": ("circular",)}


class ResNet(nn.Module):
    """A residual network, by default ResNet-18: stem, stages of residual blocks, mean over space, linear layer.

    Args:
        classes: outputs.
        channels: of the images.
        width: channels of the first stage; each stage has twice the channels of the previous one.
        blocks: residual blocks of each stage.
        density: of the channel blocks in all convolutions except the stem; None for a dense network. A layer has at
            least one block per row and column, so narrow layers are denser.
        block_size: channels of a block.
        downsample: between stages: "stride", every second pixel; or "aps", `bs.nn.AdaptivePolyphaseDownsample` with
            circular padding throughout: a circular shift of the image does not change the output.
        blur: size of a low-pass filter before downsampling; 1 for none.
        padding_mode: "zeros" or "circular"; None for the one that `downsample` needs.

    Shapes: `[n, channels, height, width]` to `[n, classes]`; height and width are halved between stages.

    Example:
        >>> import torch
        >>> from blocksparse_lab.models.resnet import ResNet
        >>> model = ResNet(width=16, blocks=(1, 1, 1), downsample="aps").eval()
        >>> x = torch.randn(2, 3, 32, 32)
        >>> torch.allclose(model(x.roll((5, 3), dims=(2, 3))), model(x), atol=1e-5)
        True

    Source: He et al., Deep residual learning for image recognition (2016); Chaman, Dokmanic, Truly shift-invariant
    convolutional neural networks (2021); Zhang, Making convolutional networks shift-invariant again (2019).
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        width: int = 64,
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        *,
        density: float | None = None,
        block_size: int = 16,
        downsample: str = "stride",
        blur: int = 1,
        padding_mode: str | None = None,
    ):
        super().__init__()
        for name, value in (("classes", classes), ("channels", channels), ("width", width), ("blur", blur)):
            integer(name, value, 1)
        if downsample not in PADDING_MODES:
            raise BlockSparseError.expected("downsample", f"one of {', '.join(PADDING_MODES)}", repr(downsample))
        aps = downsample == "aps"
        circular = aps or blur > 1  # the filter pads circularly
        padding_mode = padding_mode or ("circular" if circular else "zeros")
        modes = ("circular",) if circular else PADDING_MODES[downsample]
        if padding_mode not in modes:
            how = downsample if blur == 1 else f"{downsample}, blur {blur}"
            raise BlockSparseError.expected("padding_mode", f"{' or '.join(modes)} with {how}", repr(padding_mode))
        about: dict[str, Any] = {
            "density": density, "block_size": block_size, "aps": aps, "blur": blur, "padding_mode": padding_mode,
        }  # fmt: skip
        self.stem = _dense_conv(channels, width, 3, 1, padding_mode)
        self.norm = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        before = width
        for stage, count in enumerate(blocks):
            after = width << stage
            for i in range(count):
                layers.append(Residual(before, after, half=stage > 0 and i == 0, **about))
                before = after
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    """Two 3x3 convolutions and a short-cut around them; adaptive downsampling selects the same pixels for both."""

    def __init__(
        self,
        channels: int,
        out: int,
        *,
        half: bool,
        density: float | None,
        block_size: int,
        aps: bool,
        blur: int,
        padding_mode: str,
    ):
        super().__init__()
        sampled = half and (aps or blur > 1)  # a separate module after a convolution of stride 1
        stride = 2 if half and not sampled else 1

        def conv(before: int, kernel: int, stride: int = 1) -> nn.Module:
            if density is None:
                return _dense_conv(before, out, kernel, stride, padding_mode)
            least = max(density, min(1.0, block_size / min(before, out)))
            return bsnn.Conv2d(
                before, out, kernel, stride, kernel // 2, density=least, block_size=block_size, bias=False,
                padding_mode=padding_mode,
            )  # fmt: skip

        self.conv1, self.norm1 = conv(channels, 3, stride), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = conv(out, 3), nn.BatchNorm2d(out)
        self.down = bsnn.AdaptivePolyphaseDownsample(blur) if sampled else None
        self.aps = aps
        self.around: nn.Module | None = None
        if half or channels != out:
            self.around = nn.Sequential(conv(channels, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        if self.down is not None:
            first = None if self.aps else torch.zeros(len(y), dtype=torch.long, device=y.device)
            y, index = self.down(y, first)
            x, _ = self.down(x, index)
        shortcut = x if self.around is None else self.around(x)
        return F.relu(self.norm2(self.conv2(y)) + shortcut)


class _CircularConv2d(nn.Conv2d):
    """A dense convolution with circular padding."""

    def forward(self, input: Tensor) -> Tensor:
        margin = self.kernel_size[0] // 2
        return super().forward(circular_pad(input, (margin,) * 4))


def _dense_conv(before: int, out: int, kernel: int, stride: int, padding_mode: str) -> nn.Conv2d:
    if padding_mode == "circular":
        return _CircularConv2d(before, out, kernel, stride, bias=False)
    return nn.Conv2d(before, out, kernel, stride, kernel // 2, bias=False)
