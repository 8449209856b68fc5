"""Load byte-level language models of any kind, and sample text from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from blocksparse import checkpoint
from blocksparse.checked import integer
from blocksparse.errors import BlockSparseError

from ..models.char_lm import CharLM
from ..models.gpt import GPT
from . import charlm, gpt


def load(path: str | Path) -> CharLM | GPT:
    """Load the language model of a checkpoint or run folder on the CPU, with mean parameters if there are any."""
    path = Path(path)
    path = path / "last.safetensors" if path.is_dir() else path
    transformer = checkpoint.task_of(checkpoint.about(path)).get("kind") == gpt.KIND
    return gpt.load(path) if transformer else charlm.load(path)


def sample(
    model: nn.Module, prompt: bytes, length: int, *, temperature: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Iterator[bytes]:
    """Generate `length` bytes after a prompt, one by one.

    Args:
        model: a `CharLM` or a `GPT`; a `GPT` sees the last `context` bytes.
        prompt: the text before; if empty, a newline.
        temperature: below 1 prefers likely bytes; 0 takes the likeliest byte.
        top_k: draw only from the k likeliest bytes.
    """
    if not 0 <= temperature < math.inf:
        raise BlockSparseError.expected("temperature", "a number, not negative", temperature)
    if top_k is not None and not 1 <= top_k <= 256:
        raise BlockSparseError.expected("top_k", "an int from 1 to 256", top_k)
    if length < 0:
        raise BlockSparseError.expected("length", "an int, not negative", length)
    integer("seed", seed, 0, below=2**64)
    if isinstance(model, GPT):
        prompt = prompt[-model.config.context :]
    return _sample(model.eval(), prompt or b"\n", length, temperature, top_k, seed)


def _sample(
    model: nn.Module, prompt: bytes, length: int, temperature: float, top_k: int | None, seed: int
) -> Iterator[bytes]:
    """Yield `length` bytes after the prompt, drawn one by one from the model; temperature 0 takes the likeliest."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(prompt), device=device).unsqueeze(1)
    state = None
    for _ in range(length):
        with torch.no_grad():
            logits, state = model(text, state)
            scores = logits[-1, 0].double().cpu()
            if not bool(scores.isfinite().all()):
                raise BlockSparseError.expected("model", "finite scores", scores[~scores.isfinite()][0].item())
            if top_k is not None:
                scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -math.inf)
            if temperature == 0:
                byte = int(scores.argmax())
            else:
                # Subtract the maximum, so that no temperature overflows.
                odds = ((scores - scores.max()) / temperature).softmax(0)
                byte = int(torch.multinomial(odds, 1, generator=generator))
        text = torch.tensor([[byte]], device=device)
        yield bytes([byte])
