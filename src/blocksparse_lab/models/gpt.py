"""Byte-level transformers whose weights are dense or block-sparse."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blocksparse.checked import integer, number
from blocksparse.errors import BlockSparseError
from blocksparse.nn import Linear

from ..option import option
from .bytes import check_bytes

METHODS = ("fixed", "rigl")


@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a GPT."""

    width: int = option(
        256, "Features per byte, a multiple of heads and of the block size; 4 times as many inside a layer."
    )
    layers: int = option(4, "Transformer layers.")
    heads: int = option(4, "Attention heads per layer.")
    context: int = 128  # largest number of bytes that a prediction sees
    density: float = option(1.0, "Fraction of blocks, at least one per row and column; 1: dense weights.")
    block_size: int = option(32, "Rows and columns of a block.")
    method: str = option(
        "fixed", "fixed blocks, or rigl, which moves the weakest every 100 steps for three quarters of a run."
    )
    seed: int = option(0, "Random seed.")

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "context", "block_size"):
            integer(name, getattr(self, name), 1)
        number("density", self.density, 0, 1)
        integer("seed", self.seed, 0, 2**32)
        if self.width % self.heads:
            raise BlockSparseError.expected("width", f"a multiple of the heads, {self.heads}", self.width)
        if self.density < 1 and self.width % self.block_size:
            raise BlockSparseError.expected("width", f"a multiple of the block, {self.block_size}", self.width)
        if self.method not in METHODS:
            raise BlockSparseError.expected("method", f"one of {', '.join(METHODS)}", repr(self.method))
        if self.method != "fixed" and self.density == 1:
            raise BlockSparseError.expected("density", f"below 1 for {self.method}, which moves blocks", self.density)


class Layer(nn.Module):
    """Attention, then two products with GELU between them, each added to its normalized input."""

    def __init__(self, config: GPTConfig, causal: bool = True):
        super().__init__()
        width, self.heads, self.causal = config.width, config.heads, causal

        def linear(inputs: int, outputs: int) -> nn.Module:
            if config.density == 1:
                return nn.Linear(inputs, outputs)
            fraction = max(config.density, config.block_size / min(inputs, outputs))
            return Linear(inputs, outputs, density=fraction, block_size=config.block_size)

        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.heads_out = linear(width, 3 * width), linear(width, width)
        self.mlp = nn.Sequential(linear(width, 4 * width), nn.GELU(), linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return x after attention and the MLP, each added to its input."""
        parts = self.queries_keys_values(self.norm_1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.heads_out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Scores of the next byte after each byte of a text, from the last `context` bytes.

    The configuration's seed draws the weights, without use of the global generator.

    Shapes: integer bytes `[steps, batch]`, optionally with previous bytes `[before, batch]`, to logits
    `[steps, batch, 256]` and the previous bytes for the next call.

    Raises:
        BlockSparseError: the input is not integers of these shapes, or has more than `context` bytes.

    Example:
        >>> import torch
        >>> from blocksparse_lab.models.gpt import GPT, GPTConfig
        >>> model = GPT(GPTConfig(width=128, layers=2, density=0.25))
        >>> logits, before = model(torch.randint(256, (20, 3)))
        >>> logits.shape, before.shape
        (torch.Size([20, 3, 256]), torch.Size([20, 3]))

    Source: Radford et al., Language models are unsupervised multitask learners (2019).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.embedding = nn.Embedding(256, config.width)
            self.positions = nn.Embedding(config.context, config.width)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.outlet = nn.Linear(config.width, 256)
            for table in (self.embedding, self.positions):
                nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (scores `[steps, batch, 256]` of the next bytes, the bytes seen so far up to the context).

        Args:
            text: bytes `[steps, batch]`.
            before: bytes that come before, as an earlier call returned them, or None.
        """
        check_bytes("text", text)
        if before is not None:
            check_bytes("before", before, text.shape[1])
        steps, context = len(text), self.config.context
        if steps > context:
            raise BlockSparseError.expected("text", f"{context} bytes at once, or fewer", steps)
        seen = (text if before is None else torch.cat([before, text]))[-context:]
        x = self.embedding(seen.T.long()) + self.positions.weight[: len(seen)]
        for layer in self.layers:
            x = layer(x)
        return self.outlet(self.norm(x[:, -steps:])).transpose(0, 1), seen


def parameter_count(config: GPTConfig) -> int:
    """Count the parameters of a GPT with this configuration.

    >>> from blocksparse_lab.models.gpt import GPTConfig, parameter_count
    >>> parameter_count(GPTConfig(width=768, layers=12, context=1024))
    86235904
    """
    return _counts(config)[0]


def least_parameters(config: GPTConfig) -> float:
    """Return a lower bound on a GPT's parameters, without building it."""
    return config.width * (12 * config.layers * config.width * config.density + 512 + config.context)


def multiply_adds(config: GPTConfig) -> int:
    """Count multiply-adds per byte: one per weight of a product, and the attention to half of the context."""
    return _counts(config)[1] + config.layers * config.context * config.width + 256 * config.width


def density(config: GPTConfig) -> float:
    """Return the stored fraction of the layers' weights."""
    return _counts(config)[1] / (12 * config.layers * config.width**2)


@lru_cache
def _counts(config: GPTConfig) -> tuple[int, int]:
    """Count all parameters, and the stored weights of the layers; both need the drawn layouts."""
    with torch.device("meta"):
        model = GPT(config)
    stored = sum(weight.numel() for weight in model.layers.parameters() if weight.dim() > 1)
    return sum(parameter.numel() for parameter in model.parameters()), stored
