"""From dense to block-sparse: what each method costs in quality on one net, and what it gains in time."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blocksparse import checkpoint, sparsity
from blocksparse.conversion import report, sparsify
from blocksparse.errors import BlockSparseError
from blocksparse.topology.drawings.style import COLORS, figure_and_axes, label_points, save

from ..machine import where
from ..recipes.prune import PruneTask, Pruning, load_finished
from ..training.compare import Run
from ..training.trainer import Settings, Task, Trainer
from .equal_seconds import EqualSeconds
from .experiment import (
    PLAIN_NAMES,
    SEEDS,
    Column,
    DataDir,
    Experiment,
    Progress,
    Results,
    Table,
    read_results,
    run_folder,
)
from .inference import race

Runs = Mapping[str, Sequence[Run]]

MODEL, PROBED, RACED = "sparse.safetensors", "sparse.json", "inference.json"

BATCH = 64  # rows of the measured inference
DENSE = "dense"
NOT_RETRAINED = "one-shot, not retrained"
_MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Dense:
    """The dense net, trained for `times` the steps: a `Pruning` that prunes nothing."""

    times: int = 1
    rate: ClassVar[float] = 1.0
    method: ClassVar[str] = DENSE
    penalty: ClassVar[float] = 0.0
    search: ClassVar[float] = 1.0


@dataclass(frozen=True, kw_only=True)
class PruningExperiment(Experiment):
    """One net, trained dense and made block-sparse by several methods.

    Args:
        contenders: by name; the one named `DENSE` is the baseline.
        pruned: densities at which the trained baseline is also pruned, without further training.
        skip: weights that stay dense then.
        controls: sparse baselines to compare with too.
    """

    contenders: Mapping[str, Pruning | Dense]
    pruned: tuple[float, ...] = ()
    skip: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    caption: ClassVar[str] = (
        "Each pruned network chooses its blocks in its first steps, with dense weights, and then trains them as a "
        "sparse network; fixed has random blocks from the first step. Density counts the weights that may become "
        "sparse. The density that threshold reaches depends on its strength; group lasso and l0 may have an upper "
        "limit. Differences compare runs of the same seed. Inference is in float32, as medians of calls that take "
        "turns in one process; '-' was not timed together with the dense network."
    )

    # -- defined by subclasses --------------------------------------------------------------------------------------

    figure: ClassVar[str]  # name of the quality
    unit: ClassVar[str] = "points"  # unit of the difference to the dense net's quality
    digits: ClassVar[int] = 2  # digits of that difference
    tested: ClassVar[tuple[Column, ...]] = ()  # columns that describe the evaluation

    @property
    def in_rows(self) -> bool:
        return True

    @abstractmethod
    def dense(self, seed: int, data: Any) -> tuple[Task, Settings, dict[str, Any]]:
        """Return task and settings of the dense net, and further facts for `config.json`."""

    @abstractmethod
    def load_model(self, run: Path) -> nn.Module:
        """Load the saved model of a finished run."""

    @abstractmethod
    def inputs(self, model: Any) -> Tensor:
        """Return the inputs to measure inference with."""

    def shown(self, held_out: float) -> float:
        """Convert a held-out figure to quality."""
        return held_out

    def compared(self, quality: float, dense: float) -> float:
        """Compare a quality with that of the dense net."""
        return quality - dense

    # -- runs ----------------------------------------------------------------------------------------------------

    def trainer(self, contender: str, seed: int, run: Path, data: Any) -> Trainer:
        pruning, (task, settings, facts) = self.contenders[contender], self.dense(seed, data)
        rate = pruning.rate * settings.learning_rate
        settings = replace(settings, steps=pruning.times * settings.steps, learning_rate=rate)
        if isinstance(pruning, Pruning):
            dense = self.needs(run.parent, contender, seed)
            q = None if dense is None else self._percentiles(dense)
            task = PruneTask(task, pruning, settings.steps, seed, q)
        return Trainer(task, run, settings, facts)

    def needs(self, runs: Path, contender: str, seed: int) -> Path | None:
        return run_folder(runs, DENSE, seed) if self.contenders[contender].method == "threshold" else None

    def _percentiles(self, dense: Path) -> dict[str, float]:
        """Return the weight percentiles of a finished dense run, for "threshold"."""
        if not (dense / MODEL).is_file():
            needed = "the finished dense run of this seed, whose weights set the threshold"
            raise BlockSparseError.expected("threshold", needed, f"none in {dense}")
        return sparsity.percentiles(self.load_model(dense))

    def probe(self, run: Path, data_dir: DataDir = None, progress: Progress | None = None) -> None:
        """Save the truly sparse model and its quality."""
        if self.is_finished(run):
            return
        contender, _, seed = run.name.rpartition("-")
        trainer = self.trainer(contender, int(seed), run, self.load(data_dir))
        try:
            model = load_finished(trainer)
        except BlockSparseError as error:
            if not self.record_failure(trainer, error):
                raise
            return
        task = trainer.task
        record: dict[str, Any] = {"numbers": sum(parameter.numel() for parameter in model.parameters()), "density": 1.0}
        if isinstance(task, PruneTask):
            record["density"] = task.method.density
            record["blocks"] = {name: layout.nnz for name, layout in task.method.layouts().items()}
        with torch.no_grad():
            record["held_out"] = task.evaluate(model)
            if contender == DENSE:
                record["pruned"] = [
                    {"density": density, "held_out": task.evaluate(self._pruned(model, density))}
                    for density in self.pruned
                ]
        checkpoint.write_text(run / PROBED, json.dumps(record, indent=1) + "\n")
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        checkpoint.save(run / MODEL, tensors, {"task": task.about()})

    def is_result(self, trainer: Trainer, error: BlockSparseError) -> bool:
        """Count a penalty that leaves nothing of a weight as a result."""
        task = trainer.task
        nothing_left = isinstance(task, PruneTask) and bool(task.searched) and not task.sparse
        return nothing_left or super().is_result(trainer, error)

    def is_finished(self, run: Path) -> bool:
        """Return whether the model is saved too."""
        return super().is_finished(run) and (run / MODEL).is_file()

    def _pruned(self, dense: nn.Module, density: float) -> nn.Module:
        return sparsify(dense, density, criterion="lamp", skip=self.skip, force=True)

    def race(self, runs_by_contender: Runs) -> None:
        """Time inference of all finished models in turn, and of each layer."""
        if DENSE not in runs_by_contender:
            return
        dense, paths = (
            runs_by_contender[DENSE][0].path,
            [run.path for runs in runs_by_contender.values() for run in runs],
        )
        models: dict[str, Any] = {path.name: self.load_model(path).eval() for path in [dense, *paths]}
        for density in self.pruned:
            models[f"{density:g}"] = self._pruned(models[dense.name], density)
        samples, here = race(models, self.inputs(models[dense.name]))

        def measured(name: str) -> dict[str, Any]:
            return {
                "seconds": asdict(samples.time(name)),
                "speed_up": asdict(samples.ratio(dense.name, name)),
                "layers": report(models[name], BATCH).as_dict()["rows"],
            }

        for path in paths:
            record = measured(path.name) | {"batch": BATCH, "machine": here}
            if path == dense:
                record["pruned"] = {f"{density:g}": measured(f"{density:g}") for density in self.pruned}
            checkpoint.write_text(path / RACED, json.dumps(record, indent=1) + "\n")

    # -- the report ----------------------------------------------------------------------------------------------

    def facts(self, run: Run) -> dict[str, Any]:
        race = read_results(run.path, RACED)
        races = {"": race, **race.get("pruned", {})} if race else {}
        inference = {
            density: {"seconds": one["seconds"]["median"], "speed_up": one["speed_up"]["median"]}
            | {"layers": {row["name"]: [row["density"], row["speed_up"]] for row in one["layers"] if row["block"]}}
            for density, one in races.items()
        }
        return {
            "sparse": read_results(run.path, PROBED),
            "inference": inference.pop("", {}) | ({"pruned": inference} if inference else {}),
            "raced on": race.get("machine"),
            "cpu_seconds": (run.result or {}).get("cpu_seconds"),
        }

    @property
    def columns(self) -> Sequence[Column]:
        def milliseconds(run: Run, _: Any) -> float | None:
            return 1e3 * race["seconds"] if (race := run.facts["inference"]) else None

        def quality(run: Run, _: Any) -> float:
            return self.shown(run.facts["sparse"]["held_out"])

        inputs = any(_of_inputs(one.block_size) for one in self.contenders.values() if isinstance(one, Pruning))
        return [
            Column("density", lambda run, _: float(run.facts["sparse"]["density"]), 3),
            Column("learning rate", "settings.learning_rate"),
            Column("steps", "settings.steps"),
            Column("dense steps, %", lambda _, of: f"{100 * of.search:.0f}"),
            *([Column("inputs used", _inputs_used, 0)] if inputs else ()),
            Column("stored parameters", lambda run, _: float(run.facts["sparse"]["numbers"]), 0),
            Column(self.figure, quality, 3),
            *self.tested,
            *(
                Column(f"against {PLAIN_NAMES.get(name, name)}, {self.unit}", quality, self.digits, name, self.compared)
                for name in (DENSE, *self.controls)
            ),
            EqualSeconds(
                f"against {DENSE} at equal seconds, {self.unit}",
                digits=self.digits,
                against=DENSE,
                compared=self.compared,
                figure=self.shown,
            ),
            Column(f"ms of inference, {BATCH} at once", milliseconds, 2),
            Column("times as fast as dense", "facts.inference.speed_up", 2),
            SEEDS,
            Column("seconds of training", "seconds", 0),
            Column("seconds of a core", "facts.cpu_seconds", 0),
        ]

    def tables(self, results: Results) -> Iterator[Table]:
        results = _of_one_race(results)
        yield from super().tables(results)
        dense = results.runs[DENSE][0] if DENSE in results.runs else None
        if dense and dense.facts["sparse"].get("pruned"):
            first = self.shown(dense.facts["sparse"]["held_out"])
            yield Table(
                "The dense network pruned in one shot after its training (criterion `lamp`), without further training:",
                ("density", self.figure, f"against dense, {self.unit}", "times as fast as dense"),
                [
                    (
                        f"{one['density']:g}",
                        f"{self.shown(one['held_out']):.3f}",
                        f"{self.compared(self.shown(one['held_out']), first):+.{self.digits}f}",
                        f"{race['speed_up']:.2f}" if race else "-",
                    )
                    for one, race in _pruned_later(dense)
                ],
            )
        layers = {
            name: some for name, (run, *_) in results.runs.items() if (some := run.facts["inference"].get("layers"))
        }
        if names := list(dict.fromkeys(weight for some in layers.values() for weight in some)):
            rows = [
                (name, *(f"{some[w][0]:.3f}, {some[w][1]:.1f}x" if w in some else "dense" for w in names))
                for name, some in layers.items()
            ]
            yield Table("Density of each layer, and how many times as fast as dense it is:", ("", *names), rows)
        if dense and (machine := dense.facts["raced on"]):
            load = f"{machine['load'][0]:.1f}"
            yield Table("Inference was measured on:", ("machine", "load"), [(where(machine), load)])

    @property
    def curves(self) -> str:  # type: ignore[override]
        beyond = ", without what is far off or was not timed" if self.pruned else ""
        return f"{self.figure[0].upper()}{self.figure[1:]} against measured time of inference{beyond}"

    def picture(self, path: Path, results: Results) -> None:
        """Draw a point per model, by time and quality; without times, draw training curves."""
        results = _of_one_race(results)
        points_by_method = self._points(results.runs)
        if not points_by_method:
            super().picture(path, results)
            return
        figure, axes = figure_and_axes((8, 5.2))
        labels: list[tuple[float, float, str, str]] = []
        for nth, (name, points) in enumerate(points_by_method.items()):
            color, marker = COLORS[nth % len(COLORS)], _MARKERS[nth % len(_MARKERS)]
            x, y, densities = zip(*sorted(points), strict=True)
            axes.plot(x, y, color=color, marker=marker, ms=6)
            texts = [f"{density:.2g}" for density in densities]
            texts[-1] = f"{name} {texts[-1]}"
            labels += zip(x, y, texts, [color] * len(x), strict=True)
        axes.set(xlabel=f"ms of inference, {BATCH} at once (at the points: density)", ylabel=self.figure)
        axes.set_xscale("log", subs=[2, 3, 5])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.margins(x=0.1)
        # Models without further training may be so much worse that they would squeeze the rest.
        trained = [
            quality for name, points in points_by_method.items() if name != NOT_RETRAINED for _, quality, _ in points
        ]
        room = max(0.5 * (max(trained) - min(trained)), 1e-3)
        axes.set_ylim(min(trained) - room, max(trained) + room)
        axes.grid(color="0.9", lw=0.8)
        machine = next(iter(results.runs.values()))[0].facts["raced on"]
        figure.supxlabel(where(machine), size=7.5, color="0.4", x=0.01, ha="left")
        label_points(axes, labels)
        save(figure, path)

    def _points(self, runs_by_contender: Runs) -> dict[str, list[tuple[float, float, float]]]:
        """Return milliseconds, quality and density by method: a point per contender, the mean over seeds."""
        points_by_method: dict[str, list[tuple[float, float, float]]] = {}
        for name, runs in runs_by_contender.items():
            models = [(run.facts["sparse"], run.facts["inference"]) for run in runs]
            later = zip(*map(_pruned_later, runs), strict=True)
            groups = [(_method(self.contenders[name]), models), *((NOT_RETRAINED, some) for some in later)]
            for method, some in groups:
                points = [
                    (1e3 * race["seconds"], self.shown(sparse["held_out"]), sparse["density"])
                    for sparse, race in some
                    if race
                ]
                if points:
                    time, quality, density = map(fmean, zip(*points, strict=True))
                    points_by_method.setdefault(method, []).append((time, quality, density))
        return points_by_method


def _of_one_race(results: Results) -> Results:
    """Drop times that were not measured together with the dense net's."""
    dense = next((run.facts["raced on"] for run in results.runs.get(DENSE, ())), None)

    def here(run: Run) -> Run:
        facts = run.facts if run.facts["raced on"] == dense else run.facts | {"inference": {}}
        return replace(run, config=run.config | {"facts": facts})

    return replace(results, runs={name: [here(run) for run in runs] for name, runs in results.runs.items()})


def _pruned_later(run: Run) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield quality and inference of the baseline pruned after training."""
    raced = run.facts["inference"].get("pruned", {})
    for one in run.facts["sparse"].get("pruned", ()):
        yield one, raced.get(f"{one['density']:g}", {})


def _method(pruning: Pruning | Dense) -> str:
    name = "threshold and group lasso" if pruning.penalty else pruning.method
    return f"{name}, {pruning.times} times the steps" if pruning.times > 1 else name


def _of_inputs(block_size: int | tuple[int, int]) -> bool:
    return isinstance(block_size, tuple) and block_size[1] == 1 < block_size[0]


def _inputs_used(run: Run, _: Any) -> float | str:
    """Return the number of blocks of the pruned weight, which are inputs."""
    blocks = run.facts["sparse"].get("blocks")
    return "all" if blocks is None else float(sum(blocks.values()))
