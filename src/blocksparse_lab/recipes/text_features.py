"""Compute a language model's states of texts as features, and cache them next to its checkpoint."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blocksparse.errors import BlockSparseError

from ..data.reviews import encode

# Called with done and total.
Progress = Callable[[int, int], None]

STATES = ("cell", "squashed", "hidden", "fading", "mean")

# Bytes after which the weight of a hidden state in the fading mean has halved.
HALF_LIFE = 256


def features(
    model: Any, texts: Sequence[str], *, batch: int = 128, chunk: int = 64, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Compute a model's states after each text, read as by `encode`, named as in `STATES`.

    Each is float32 `[texts, width]`: the last "cell" state; "squashed", its tanh, as the hidden state sees it; the last
    "hidden" state; "fading", a mean of the hidden states whose weights halve every 256 bytes; and their "mean" over
    time. A model without `outputs` has no last two.

    Texts of similar length share a batch without padding, and a text leaves its batch where it ends. So features do not
    depend on other texts, except for rounding in products with more or fewer rows.

    Args:
        model: has `initial_state(batch)`, a tuple of tensors `[layers, batch, width]` whose first is the hidden and
            last the cell state, and either `outputs(text, state)`, which returns hidden states `[time, batch, width]`
            and the state after bytes `[time, batch]`, or `forward(text, state)`, which returns logits and that state.
        texts: an empty one is read as three bytes.
        batch: texts side by side.
        chunk: maximum number of bytes per call; larger chunks need more memory and less time.
    """
    data = [np.frombuffer(encode(text), dtype=np.uint8) for text in texts]
    order = sorted(range(len(data)), key=lambda row: len(data[row]))
    out: dict[str, np.ndarray] = {}
    read, total = 0, sum(map(len, data))
    training = model.training
    model.eval()
    try:
        # Start with the longest texts: what does not fit into memory fails at once, not after an hour.
        for start in reversed(range(0, len(order), batch)):
            rows = order[start : start + batch]
            for states, count in _read_side_by_side(model, [data[row] for row in rows], chunk):
                if states:
                    ended = len(next(iter(states.values())))
                    _write_rows(out, states, rows[:ended], len(texts))
                    rows = rows[ended:]
                read += count
                if progress is not None:
                    progress(read, total)
    finally:
        model.train(training)
    if not out:
        raise BlockSparseError.expected("texts", "one or more", "none")
    return out


@torch.inference_mode()
def _read_side_by_side(model: Any, texts: Sequence[np.ndarray], chunk: int) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Read texts, ordered by length. After each call, yield states of the texts that end there, and bytes read."""
    lengths = [len(text) for text in texts]
    side = np.zeros((lengths[-1], len(texts)), dtype=np.int64)
    for column, text in enumerate(texts):
        side[: len(text), column] = text
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    side_by_side = torch.from_numpy(side).to(device)
    state = tuple(part.to(device) for part in model.initial_state(len(texts)))
    with_means = hasattr(model, "outputs")
    means = [_Mean("fading", 0.5 ** (1 / HALF_LIFE)), _Mean("mean", 1.0)] if with_means else []
    ended = 0
    for begin, end in pairwise(_call_bounds(lengths, chunk)):
        # Skip the scores of 256 bytes if the model can.
        y, state = (model.outputs if with_means else model)(side_by_side[begin:end, ended:], state)
        for mean in means:
            mean.add(y)
        count = (end - begin) * (len(texts) - ended)
        ending = bisect_right(lengths, end) - ended
        if not ending:
            yield {}, count
            continue
        cell, hidden = (state[nth][-1, :ending] for nth in (-1, 0))
        states = {"cell": cell, "squashed": cell.float().tanh(), "hidden": hidden}
        states |= {mean.name: mean.take(ending) for mean in means}
        # Copy, so that further work has the memory layout of a batch of its own.
        state = tuple(part[:, ending:].contiguous() for part in state)
        ended += ending
        yield states, count


class _Mean:
    """Mean of hidden states over time, whose weights decay by a factor per byte."""

    def __init__(self, name: str, decay: float):
        self.name, self.decay = name, decay
        self.sum: Any = 0.0
        self.weights = 0.0

    def add(self, y: Tensor) -> None:
        """Add hidden states `[time, batch, width]`."""
        weights = self.decay ** torch.arange(len(y) - 1, -1, -1.0, device=y.device)
        decayed = self.decay ** len(y)
        self.sum = self.sum * decayed + torch.tensordot(weights, y.float(), 1)
        self.weights = self.weights * decayed + float(weights.sum())

    def take(self, count: int) -> Tensor:
        """Return the means of the first texts, and remove these."""
        means, self.sum = self.sum[:count] / self.weights, self.sum[count:]
        return means


def _write_rows(out: dict[str, np.ndarray], done: dict[str, Tensor], rows: Sequence[int], texts: int) -> None:
    """Write the states of some texts into the rows of all."""
    for name, of in done.items():
        values = of.float().cpu().numpy()
        if not np.isfinite(values).all():
            raise BlockSparseError.expected("model", "a finite state after a text", "infinity or NaN")
        if name not in out:
            out[name] = np.empty((texts, values.shape[1]), dtype=np.float32)
        out[name][rows] = values


def _call_bounds(lengths: Iterable[int], chunk: int) -> list[int]:
    """Return where calls start and end: at the end of every text, and at most a chunk apart."""
    cuts = [0]
    for end in sorted(set(lengths)):
        cuts += [*range(cuts[-1] + chunk, end, chunk), end]
    return cuts


def digest(*parts: bytes | str | Path) -> str:
    """Return 16 hexadecimal digits that identify strings and contents of files."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            try:
                with open(part, "rb") as file:
                    own = hashlib.file_digest(file, "sha256").digest()
            except OSError as error:
                raise BlockSparseError.expected("checkpoint", "a readable file", f"{part}: {error.strerror}") from error
        else:
            own = hashlib.sha256(part if isinstance(part, bytes) else part.encode(errors="replace")).digest()
        sha.update(own)
    return sha.hexdigest()[:16]


class CachedFeatures:
    """Cache of `features` in the folder `features` next to a checkpoint.

    Features of older checkpoints with the same name are removed. `note` says why features could not be saved.
    """

    def __init__(self, checkpoint: Path):
        # Increase it when features change for the same checkpoint and text.
        self.state = digest("3", checkpoint)
        self.folder = checkpoint.parent / "features"
        self.name = checkpoint.stem
        self.note: str | None = None

    def path(self, texts: Sequence[str]) -> Path:
        """Return the path for the features of these texts."""
        return self.folder / f"{self.name}-{self.state}-{digest(*texts)}.safetensors"

    def load(self, texts: Sequence[str]) -> dict[str, np.ndarray] | None:
        """Return the features of these texts, if they are complete in the cache."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            features = load_file(self.path(texts))
        except (OSError, SafetensorError):
            return None
        whole = all(of.ndim == 2 and len(of) == len(texts) for of in features.values())
        return features if "cell" in features and whole else None

    def save(self, texts: Sequence[str], states: Mapping[str, np.ndarray]) -> None:
        """Save the features of these texts."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        path = self.path(texts)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self.folder.mkdir(exist_ok=True)
            for old in self.folder.glob(f"{self.name}-*-*.safetensors"):
                name, state, _ = old.stem.rsplit("-", 2)
                if name == self.name and state != self.state:
                    old.unlink(missing_ok=True)
            save_file({name: np.ascontiguousarray(of) for name, of in states.items()}, part)
            part.replace(path)
        except (OSError, SafetensorError) as error:
            self.note = f"the features could not be kept in {self.folder}: {error}"
            with suppress(OSError):
                part.unlink()
