"""Train one net three ways (dense, block-sparse, dense made sparse), and a wide block-sparse net beside a small one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blocksparse as bs
from blocksparse.measure import Samples, Spread, alternate

from ..data import letters
from ..data.text import Text, windows

DENSE, SPARSE, SPARSIFIED = "dense", "block-sparse", "dense made sparse"
WIDE, SMALL = "wide block-sparse", "small dense"
INPUTS = 1024
CONTEXT = 32  # bytes, each embedded in INPUTS / CONTEXT numbers
MOST_BATCHES = 500  # longer trainings repeat their batches
TURN = 5  # steps of a net before the next net's turn


@dataclass(frozen=True)
class Settings:
    """Sizes and the training recipe: AdamW with warm-up and cosine decay, the same batches for all nets.

    The learning rates were tuned on letters drawn from seed 100: half and twice of each are worse.

    Args:
        hidden, density, block: of the net that trains three ways.
        wide, wide_density, wide_block: of the block-sparse net that trains beside a dense one of equal multiply-adds.
    """

    hidden: int = 3072
    density: float = 0.05
    block: int = 32
    wide: int = 1536
    wide_density: float = 0.35
    wide_block: int = 64
    batch: int = 128
    steps: int = 200
    rates: dict[str, float] = field(
        default_factory=lambda: {DENSE: 0.004, SPARSE: 0.008, SPARSIFIED: 0.008, WIDE: 0.008, SMALL: 0.0056}
    )
    evaluate_every: int = 20
    test_size: int = 4000
    probe: int = 1000
    seconds: float = math.inf
    inference_budget: float = 1.5
    seed: int = 0


@dataclass(frozen=True)
class Data:
    """Examples with labels to train and to test on.

    Args:
        name: of the task.
        test_name: of the examples that training never sees.
        classes: number of classes.
        train, test: inputs, float32 `[n, 1024]` or int64 bytes `[n, 32]`, which the nets embed; labels int64 `[n]`.
    """

    name: str
    test_name: str
    classes: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass
class Entry:
    """A net and the record of its training.

    Args:
        name: of the net.
        net: the model.
        rate: highest learning rate.
        steps: planned.
    """

    name: str
    net: nn.Module
    rate: float
    steps: int
    step_seconds: list[float] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Steps done, and the accuracy on a fraction of the test set."""
    accuracy: float = math.nan
    bits: float = math.nan
    """Cross-entropy on the test set in bits per label."""
    memory: int = 0

    @property
    def done(self) -> int:
        """Steps done."""
        return len(self.step_seconds)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.net.parameters())

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without evaluation."""
        return sum(self.step_seconds)

    @property
    def mean_step(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.done

    @property
    def step(self) -> Spread:
        """The seconds of a step, without the first ones, which fill caches."""
        return Spread.of(self.step_seconds[min(TURN, len(self.step_seconds) - 1) :])


def letters_data(settings: Settings) -> Data:
    """Draw letters and digits; those of the test set are drawn like the others, but not trained on."""
    count = min(settings.steps, MOST_BATCHES) * settings.batch
    x, y = letters.draw(count + settings.test_size, settings.seed)
    name = f"letters and digits in {len(letters.TYPEFACES)} typefaces"
    return Data(name, "new drawings", len(letters.CLASSES), (x[:count], y[:count]), (x[count:], y[count:]))


def text_data(text: Text, settings: Settings) -> Data:
    """Cut windows out of a text, with the next byte as the label; the test set is from the held-out tail."""
    generator = torch.Generator().manual_seed(settings.seed)

    def examples(part: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return windows(part, torch.randint(CONTEXT, len(part), (count,), generator=generator), CONTEXT)

    train, test = (
        examples(text.train, min(settings.steps, MOST_BATCHES) * settings.batch),
        examples(text.held_out, settings.test_size),
    )
    return Data(f"the next byte of {text.name}", "held-out bytes", 256, train, test)


class ThreeWays:
    """The comparison. `train` yields after each turn; a caller may stop there, and the entries are up to date.

    Args:
        data: to train and to test on.
        settings: sizes and recipe.
    """

    def __init__(self, data: Data, settings: Settings):
        self.data, self.settings = data, settings
        s = settings
        self._dense = _net(data, s.seed, s.hidden)
        wide = _net(data, s.seed, s.wide, s.wide_density, s.wide_block)
        self.small_width = _width_of_equal_cost(wide, data.classes)
        nets = {
            DENSE: self._dense,
            SPARSE: _net(data, s.seed, s.hidden, s.density, s.block),
            WIDE: wide,
            SMALL: _net(data, s.seed, self.small_width),
        }
        self.entries = {name: Entry(name, net, s.rates[name], s.steps) for name, net in nets.items()}
        self.inference = Samples({}, {})

    @property
    def ways(self) -> list[str]:
        """The names of the three ways that started so far."""
        return [name for name in (DENSE, SPARSE, SPARSIFIED) if name in self.entries]

    @property
    def comparable(self) -> bool:
        """Whether at least the dense and the block-sparse net trained."""
        return self.ways[:2] == [DENSE, SPARSE]

    @property
    def complete(self) -> bool:
        """Whether every net finished its training."""
        return len(self.entries) == 5 and all(entry.done == entry.steps for entry in self.entries.values())

    @property
    def shortfall(self) -> str:
        """A sentence that says which nets did not finish their training, or "" if all did."""
        stopped = [f"{e.name} ({e.done} of {e.steps} steps)" for e in self.entries.values() if e.done < e.steps]
        if stopped:
            return f"These nets stopped early and could be more accurate: {', '.join(stopped)}."
        missing = "Training ended before the dense net was made sparse, so only two ways are shown."
        return "" if self.complete else missing

    def train(self) -> Iterator[Entry]:
        """Train; yield the entry of each turn, until the time limit.

        The first four nets take turns of a few steps, so that other load on the machine affects all equally. Then the
        trained dense net is sparsified, and trains again for all steps.
        """
        s, deadline = self.settings, time.perf_counter() + self.settings.seconds
        entries = list(self.entries.values())
        trainings = [self._train(entry) for entry in entries]
        while entries[-1].done < s.steps:
            for entry, training in zip(entries, trainings, strict=True):
                next(training)
                yield entry
            if time.perf_counter() > deadline:
                return
        net = bs.sparsify(self._dense, s.density, s.block, force=True, skip=[self._dense[-1]])
        entry = Entry(SPARSIFIED, net, s.rates[SPARSIFIED], s.steps)
        self.entries[SPARSIFIED] = entry
        for _ in self._train(entry):
            yield entry
            if time.perf_counter() > deadline:
                return

    def seconds_and_accuracy(self, name: str) -> tuple[list[float], list[float]]:
        """Return a net's curve: seconds of training and percent right on a fraction of the test set.

        The sparsified net starts with the seconds of the dense one.
        """
        entry = self.entries[name]
        before = self.entries[DENSE].seconds if name == SPARSIFIED else 0.0
        seconds = [before + entry.mean_step * done for done, _ in entry.curve]
        return seconds, [100 * right for _, right in entry.curve]

    def finish(self) -> None:
        """Measure each net that trained: on the whole test set, and the time of inference on a batch of 64, in turn."""
        self.entries = {name: entry for name, entry in self.entries.items() if entry.done}
        for entry in self.entries.values():
            entry.accuracy, entry.bits = evaluate(entry.net, *self.data.test)
        if self.entries:
            inputs = self.data.test[0][:64]
            calls = {name: partial(entry.net, inputs) for name, entry in self.entries.items()}
            with torch.no_grad():
                self.inference = alternate(calls, budget=self.settings.inference_budget)

    def _train(self, entry: Entry) -> Iterator[Entry]:
        """Train one net; yield after each turn."""
        s = self.settings
        optimizer = torch.optim.AdamW(entry.net.parameters(), entry.rate, fused=True)
        inputs, labels = self.data.train
        probe = [tensor[: s.probe] for tensor in self.data.test]
        for step in range(entry.steps):
            began = time.perf_counter()
            optimizer.param_groups[0]["lr"] = entry.rate * _schedule(step, entry.steps)
            start = step % (len(labels) // s.batch) * s.batch
            batch = slice(start, start + s.batch)
            optimizer.zero_grad()
            F.cross_entropy(entry.net(inputs[batch]), labels[batch]).backward()
            optimizer.step()
            entry.step_seconds.append(time.perf_counter() - began)
            entry.memory = entry.memory or _training_memory(optimizer)
            if entry.done % s.evaluate_every == 0 or entry.done == entry.steps:
                entry.curve.append((entry.done, evaluate(entry.net, *probe)[0]))
            if entry.done % TURN == 0 or entry.done == entry.steps:
                yield entry


@torch.no_grad()
def evaluate(net: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the fraction of examples whose label has the highest score, and the cross-entropy in bits per label."""
    scores = torch.cat([net(batch) for batch in inputs.split(500)])
    accuracy = (scores.argmax(1) == labels).double().mean().item()
    return accuracy, F.cross_entropy(scores, labels).item() / math.log(2)


def _net(data: Data, seed: int, hidden: int, density: float | None = None, block: int = 32) -> nn.Sequential:
    """Build an MLP with two hidden layers, dense unless a density is given; the output layer is always dense."""

    def linear(n_in: int, n_out: int) -> nn.Module:
        return (
            nn.Linear(n_in, n_out) if density is None else bs.nn.Linear(n_in, n_out, density=density, block_size=block)
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        embed = [] if data.train[0].is_floating_point() else [nn.Embedding(256, INPUTS // CONTEXT), nn.Flatten()]
        layers = [linear(INPUTS, hidden), nn.ReLU(), linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, data.classes)]
        return nn.Sequential(*embed, *layers)


def _width_of_equal_cost(wide: nn.Sequential, classes: int) -> int:
    """Return the hidden width at which a dense net trains with as many multiply-adds per example as the wide net.

    Each weight costs three in training: forward, gradient of the weight, gradient of the input. The first layer needs
    the last one only if an embedding is before it. A dense net of width h has h (inputs + h + classes) weights;
    embeddings are look-ups.
    """
    first = 3 if isinstance(wide[0], nn.Embedding) else 2
    layers = [layer for layer in wide if isinstance(layer, (nn.Linear, bs.nn.Linear))]
    weights = [sum(p.numel() for p in layer.parameters() if p.dim() >= 2) for layer in layers]
    cost = first * weights[0] + 3 * sum(weights[1:])
    half = (first * INPUTS + 3 * classes) / 6
    return max(1, round(math.sqrt(half**2 + cost / 3) - half))


def _schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm-up over a tenth of the steps, times half a cosine."""
    return min(1.0, 10 * (step + 1) / steps) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def _training_memory(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients and optimizer state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in (*parameters, *(p.grad for p in parameters), *states))
