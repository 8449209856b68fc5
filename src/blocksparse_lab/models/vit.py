"""Vision transformers whose weights are dense or block-sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from blocksparse.errors import BlockSparseError

from .gpt import GPTConfig, Layer


class ViT(nn.Module):
    """Scores of an image's classes, from the mean of its square patches.

    The configuration's seed draws the weights, without use of the global generator.

    Args:
        config: of the layers; its `context` is the number of patches.
        shape: (channels, height, width) of the images.
        classes: number of classes.

    Shapes: `[n, channels, height, width]` to `[n, classes]`.

    Raises:
        BlockSparseError: `context` square patches do not fill an image.

    Example:
        >>> import torch
        >>> from blocksparse_lab.models.gpt import GPTConfig
        >>> from blocksparse_lab.models.vit import ViT
        >>> model = ViT(GPTConfig(width=128, layers=2, context=16, density=0.25), (3, 32, 32), classes=10)
        >>> model(torch.randn(5, 3, 32, 32)).shape
        torch.Size([5, 10])

    Source: Dosovitskiy et al., An image is worth 16x16 words (2021), with a mean instead of the class token.
    """

    def __init__(self, config: GPTConfig, shape: Sequence[int], classes: int):
        super().__init__()
        channels, height, width = shape
        patch = round((height * width / config.context) ** 0.5)
        if patch < 1 or height % patch or width % patch or config.context * patch**2 != height * width:
            wanted = f"a number of square patches that fill {height} x {width} pixels"
            raise BlockSparseError.expected("context", wanted, config.context)
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.patches = nn.Conv2d(channels, config.width, patch, patch)
            self.positions = nn.Embedding(config.context, config.width)
            self.layers = nn.ModuleList(Layer(config, causal=False) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.output = nn.Linear(config.width, classes)
            nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        x = self.patches(images).flatten(2).transpose(1, 2).contiguous() + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.output(self.norm(x).mean(1))
        return scores
