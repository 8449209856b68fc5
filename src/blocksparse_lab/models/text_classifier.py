"""A classifier of texts: hidden states of a language model over bytes, pooled over time, and a linear layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blocksparse.checked import integer, number
from blocksparse.errors import BlockSparseError

from .char_lm import CharLM, CharLMConfig

END = -1  # marks positions after the end of a text


@dataclass(frozen=True)
class TextClassifierConfig(CharLMConfig):
    """Configuration of a TextClassifier: a language model's, classes, dropout of the pooled states, and `begun_with`,
    which identifies the initial weights."""

    classes: int = 2
    dropout: float = 0.5
    begun_with: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("classes", self.classes, 2)
        number("dropout", self.dropout, 0, 1)


class TextClassifier(nn.Module):
    """Scores of text classes from the last, mean and maximum of the hidden states after each byte.

    Args:
        config: the configuration, whose seed draws the language model.
        reader: a trained language model of the configuration's sizes; it becomes part of this model and loses its
            output layer.
        seed: draws the linear layer; by default the configuration's.

    Shapes: integer bytes `[texts, time]`, -1 after the end of a text, to logits `[texts, classes]`.

    Raises:
        BlockSparseError: `reader` has no output layer; a text has no bytes, bytes after its end, or bytes above 255.

    Example:
        >>> import torch
        >>> from blocksparse_lab.models.text_classifier import TextClassifier, TextClassifierConfig
        >>> model = TextClassifier(TextClassifierConfig(width=512, pattern="barabasi_albert", m=2))
        >>> model(torch.tensor([[72, 105, -1], [72, 111, 33]])).shape
        torch.Size([2, 2])

    Source: Howard, Ruder, Universal language model fine-tuning for text classification (2018), for the pooling.
    """

    def __init__(self, config: TextClassifierConfig, reader: CharLM | None = None, seed: int | None = None):
        super().__init__()
        self.config = config
        self.reader = CharLM(config) if reader is None else reader
        if not hasattr(self.reader, "outlet"):
            raise BlockSparseError.expected(
                "reader", "a language model with its output layer", "a part of a classifier"
            )
        dtype = self.reader.outlet.weight.dtype
        del self.reader.outlet
        self.dropout = nn.Dropout(config.dropout)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed if seed is None else seed)
            self.outlet = nn.Linear(3 * config.hidden, config.classes, dtype=dtype)

    @classmethod
    def of(cls, reader: CharLM, seed: int | None = None, **options: Any) -> TextClassifier:
        """Build a classifier around a language model, with options of the configuration; `seed` draws the linear
        layer."""
        return cls(TextClassifierConfig(**asdict(reader.config) | options), reader, seed)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores `[texts, classes]` for bytes `[texts, time]`, from the last, mean and largest states."""
        _check(text)
        is_byte = (text != END).T.unsqueeze(-1)
        lengths = is_byte.sum(0)
        y, _ = self.reader.outputs(text.clamp(min=0).T)
        y = y.to(self.outlet.weight.dtype)  # means need more digits than autocast's
        last = y.gather(0, (lengths - 1).unsqueeze(0).expand(1, -1, y.shape[-1])).squeeze(0)
        mean = (y * is_byte).sum(0) / lengths
        largest = y.masked_fill(~is_byte, -torch.inf).amax(0)
        return self.outlet(self.dropout(torch.cat([last, mean, largest], -1)))


def _check(text: Tensor) -> None:
    """Raise a BlockSparseError unless `text` has bytes `[texts, time]`, with END only behind them."""
    got: Any = None
    if not isinstance(text, Tensor) or text.is_floating_point() or text.dtype == torch.bool:
        got = text.dtype if isinstance(text, Tensor) else type(text).__name__
    elif text.dim() != 2 or not text.numel():
        got = list(text.shape)
    elif bool((text < END).any()):
        got = int(text.min())
    else:
        ended = text == END
        if bool(ended[:, 0].any()):
            got = "a text of none"
        elif bool((ended[:, :-1] & ~ended[:, 1:]).any()):
            got = f"bytes after {END}"
    if got is not None:
        wanted = f"integers [texts, time], one or more bytes of each text, and {END} after its end"
        raise BlockSparseError.expected("text", wanted, got)
