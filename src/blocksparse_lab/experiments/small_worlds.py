"""Language models of equal parameters that differ in width and in the graph of their recurrent blocks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, ClassVar, cast

from blocksparse.layout import BlockLayout
from blocksparse.topology import path_lengths, spectral_gap
from blocksparse.topology.drawings.style import COLORS, figure_and_axes, save

from ..bench.report import spread
from ..models.char_lm import CharLMConfig
from ..recipes.charlm import CharLMSettings
from ..training.compare import Run
from .experiment import SEEDS, Column, Experiment, Results
from .language import READ, CharLMExperiment, LanguageContender

RANDOM = "random"
LAYOUTS = {
    RANDOM: "random",
    "random_diagonal": "random and diagonal",
    "barabasi_albert": "Barabasi-Albert",
    "watts_strogatz": "Watts-Strogatz",
    "block_diagonal": "block-diagonal",
}


@dataclass(frozen=True)
class AgainstLayout(Column):
    """The difference to another layout of the same width; `against` is its key in `LAYOUTS`."""

    against: str = RANDOM

    def cells(
        self, contenders: Mapping[str, Any], runs: Mapping[str, Sequence[Run]], paired: bool = True
    ) -> list[str] | None:
        cells: dict[str, str] = {}
        for width in dict.fromkeys(contender.config.width for contender in contenders.values()):
            same_width = {name: some for name, some in runs.items() if contenders[name].config.width == width}
            column = Column(self.title, self.of, self.digits, against=_name(self.against, width))
            differences = column.cells(contenders, same_width, paired)
            cells |= dict(zip(same_width, differences or ["-"] * len(same_width), strict=True))
        return [cells[name] for name in runs]


@dataclass(frozen=True, kw_only=True)
class WidthExperiment(CharLMExperiment):
    """Language models of several widths and layouts with the same number of parameters, none of them dense."""

    curves: ClassVar[str] = "Bits per character against width"
    caption: ClassVar[str] = (
        "All LSTMs have about as many parameters, so wider ones are sparser. Paths and gaps are those of the graph of "
        "blocks. Figures are means and standard deviations over the seeds. All models read the text once, in the same "
        "order, with Adam whose learning rate decays linearly after the warm-up."
    )

    def facts(self, run: Run) -> dict[str, Any]:
        layout = cast(BlockLayout, CharLMConfig(**run.task["model"]).layout)
        paths = path_lengths(layout)
        return {"path": paths.mean, "components": paths.components, "gap": spectral_gap(layout)}

    @property
    def in_rows(self) -> bool:
        return True

    @property
    def columns(self) -> Sequence[Column]:
        return [
            Column("hidden units", "task.model.width"),
            Column("layout", lambda run, _: LAYOUTS[run.task["model"]["pattern"]]),
            Column("blocks of units", lambda run, _: run.task["model"]["width"] // run.task["model"]["block_size"]),
            Column("density of the recurrent weights", lambda run, _: f"{run.facts['density']:.3g}"),
            Column("parameters", "facts.parameters"),
            Column(
                "mean path between two blocks of units, steps",
                lambda run, _: run.facts["path"] if run.facts["components"] == 1 else inf,
                show=lambda values: "not connected" if inf in values else spread(values, 2),
            ),
            Column("spectral gap", "facts.gap", 3),
            Column("learning rate", "settings.learning_rate"),
            Column("steps", "settings.steps"),
            Column("bytes per step", lambda run, _: run.config["bytes_per_step"]),
            SEEDS,
            READ,
            Column("bits per character, held out", "held_out", 3),
            AgainstLayout("bits per character, against random", "held_out", 3),
            AgainstLayout("bits per character, against random and diagonal", "held_out", 3, "random_diagonal"),
            Column("bytes/s", lambda run, _: run.as_dict()["bytes_per_second"]),
        ]

    def picture(self, path: Path, results: Results) -> None:
        """Draw bits and path lengths against width, with a line for each layout."""
        figure, (bits, paths) = figure_and_axes((11, 4.4), columns=2)
        for color, (pattern, label) in zip(COLORS, LAYOUTS.items(), strict=False):
            groups = [
                (some[0].task["model"]["width"], some)
                for some in results.runs.values()
                if some and some[0].task["model"]["pattern"] == pattern
            ]
            widths = [width for width, _ in groups]
            held_out = [[run.held_out or 0.0 for run in some] for _, some in groups]
            means = [statistics.fmean(values) for values in held_out]
            errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in held_out]
            bits.errorbar(widths, means, errors, color=color, marker="o", ms=4, lw=1.8, capsize=3, label=label)
            connected = [(width, some) for width, some in groups if all(run.facts["components"] == 1 for run in some)]
            lengths = [statistics.fmean(run.facts["path"] for run in some) for _, some in connected]
            paths.plot([width for width, _ in connected], lengths, color=color, marker="o", ms=4, lw=1.8)
        ticks = sorted({contender.config.width for contender in self.contenders.values()})
        of_paths = "mean path between blocks, if connected, steps"
        for axes, title in ((bits, "bits per character, held out"), (paths, of_paths)):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{width:,}" for width in ticks])
            axes.minorticks_off()
            axes.set(xlabel="hidden units, at equal parameters", ylabel=title)
            axes.grid(color="0.9", lw=0.8)
        paths.set_yscale("log", base=2)
        paths.set_yticks([2**power for power in range(4)], [str(2**power) for power in range(4)])
        bits.legend(frameon=False, fontsize=9)
        save(figure, path)


def _name(pattern: str, width: int) -> str:
    return f"{LAYOUTS[pattern]}, {width:,}"


def _contenders(rate: float) -> dict[str, LanguageContender]:
    """Return LSTMs of about 2.5 million parameters, by layout and width.

    Input and output weights alone would need more at 8,192 units. At 4,096 units, the graph has as many blocks and as
    large a density as the widest nets of Gray, Radford, Kingma (2017): 512 blocks, and a density of .018.
    """
    contenders = {}
    for width, m, neighbors, density in (
        (1024, 37, 64, 0.5),
        (2048, 14, 26, 0.109),
        (4096, 4, 8, 0.0176),
        (6144, 1, 2, 0.0039),
    ):
        config = CharLMConfig(width=width, embedding=16, block_size=8, m=m, neighbors=neighbors, density=density)
        for pattern in LAYOUTS:
            if pattern == "random_diagonal" and density > 0.1:
                continue  # the diagonal is a small part of the blocks
            contenders[_name(pattern, width)] = LanguageContender(replace(config, pattern=pattern), rate)
    return contenders


EXPERIMENTS: dict[str, Experiment] = {
    "small-worlds-widths": WidthExperiment(
        about="An LSTM of 2.5 million parameters on Wikipedia, wide or narrow, with small worlds, random blocks, or "
        "blocks on the diagonal",
        text="wikipedia",
        seq=32,
        # In runs of 250 steps, random blocks at 4,096 units need 3.34 bits at 0.016 and 3.46 at 0.008.
        contenders=_contenders(0.012),
        settings=CharLMSettings(
            steps=600, warmup=50, batch=8, seq=32, eval_every=300, save_every=100, evaluated=60_000
        ),
        minutes=2,
    ),
}
