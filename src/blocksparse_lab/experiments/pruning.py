"""From dense to block-sparse: what each method costs in quality on one net, and what it gains in time."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blocksparse import checkpoint, sparsity
from blocksparse.conversion import report, sparsify
from blocksparse.errors import BlockSparseError
from blocksparse.measure import alternate
from blocksparse.topology.drawings.style import COLORS, figure_and_axes, label_points, save

from ..machine import machine, where
from ..recipes.compare import Run
from ..recipes.prune import PruneTask, Pruning, finished
from ..recipes.trainer import Settings, Task, Trainer
from .experiment import Column, Experiment, Results, Table, folder, kept, seconds, setting

Runs = Mapping[str, Sequence[Run]]

MODEL, PROBED, RACED = "sparse.safetensors", "sparse.json", "inference.json"

BATCH = 64  # of the measured inference
SECONDS = 2.0  # for measuring each model
DENSE = "dense"
NOT_RETRAINED = "one-shot, not retrained"
_MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Dense:
    """The net as it is, trained for `times` the steps: a `Pruning` that prunes nothing."""

    times: int = 1
    method: ClassVar[str] = DENSE
    penalty: ClassVar[float] = 0.0
    search: ClassVar[float] = 1.0


@dataclass(frozen=True, kw_only=True)
class PruningExperiment(Experiment):
    """One net, trained dense, and made block-sparse by several methods.

    Args:
        contenders: how each becomes sparse; the one of the name `DENSE` is what they are measured against.
        pruned: densities at which that one is pruned after its training too, as it is.
        skip: what stays dense then.
    """

    contenders: Mapping[str, Pruning | Dense]
    seeds: tuple[int, ...] = (0,)
    pruned: tuple[float, ...] = ()
    skip: tuple[str, ...] = ()
    in_rows: ClassVar[bool] = True
    caption: ClassVar[str] = (
        "Each sparse one looks for its blocks in the first part of its steps, with dense weights, and then trains what "
        "is left, truly sparse. Density is of the weights that may become sparse, with the numbers of their stored "
        "blocks. How dense threshold comes out depends on its strength; group lasso and l0 leave no more than a "
        "density that they are given, where they are given one. Inference: all models in turn, in one process, "
        "medians, float32."
    )

    # -- defined by subclasses --------------------------------------------------------------------------------------

    figure: ClassVar[str]
    """The name of the quality."""

    unit: ClassVar[str] = "points"
    """What it is compared with that of the dense net in."""

    digits: ClassVar[int] = 2
    """Of that."""

    @abstractmethod
    def task(self, seed: int, data: Any) -> Task:
        """The training of the dense net."""

    @abstractmethod
    def settings(self, seed: int, task: Task) -> Settings:
        """How it is trained."""

    @abstractmethod
    def facts(self, task: Task) -> dict[str, Any]:
        """Further facts for `config.json`."""

    @abstractmethod
    def opened(self, run: Path) -> nn.Module:
        """The saved model of a finished run."""

    @abstractmethod
    def inputs(self, model: Any) -> Tensor:
        """The inputs to measure inference with."""

    @abstractmethod
    def shown(self, held_out: float) -> float:
        """A held-out figure as quality."""

    def compared(self, found: float, dense: float) -> float:
        """A quality, compared with that of the dense net."""
        return found - dense

    # -- runs ----------------------------------------------------------------------------------------------------

    def trainer(self, contender: str, seed: int, run: Path, data: Any) -> Trainer:
        pruning, task = self.contenders[contender], self.task(seed, data)
        settings, facts = self.settings(seed, task), self.facts(task)
        settings = replace(settings, steps=pruning.times * settings.steps)
        if isinstance(pruning, Pruning):
            q = self._percentiles(folder(run.parent, DENSE, seed)) if pruning.method == "threshold" else None
            task = PruneTask(task, pruning, settings.steps, seed, q)
        return Trainer(task, run, settings, facts)

    def _percentiles(self, dense: Path) -> dict[str, float]:
        if not (dense / MODEL).is_file():
            needed = "the dense run of this seed before it, whose weights say where its threshold ends"
            raise BlockSparseError.expected("threshold", needed, f"none in {dense}")
        return sparsity.percentiles(self.opened(dense))

    def probe(
        self,
        run: Path,
        data_dir: str | Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Saves the truly sparse model and its quality."""
        if (run / MODEL).is_file():
            return
        contender, _, seed = run.name.rpartition("-")
        trainer = self.trainer(contender, int(seed), run, self.load(data_dir))
        try:
            model = finished(trainer)
        except BlockSparseError as error:
            if not self.failed(trainer, error):
                raise
            return
        task = trainer.task
        with torch.no_grad():
            found: dict[str, Any] = {"held_out": task.evaluate(model), **_stored(model)}
            if isinstance(task, PruneTask):
                found["density"] = task.method.density
                found["blocks"] = {name: layout.nnz for name, layout in task.method.layouts().items()}
            else:
                found["density"] = 1.0
            if contender == DENSE:
                found["pruned"] = [
                    {"density": density, "held_out": task.evaluate(self._pruned(model, density))}
                    for density in self.pruned
                ]
        checkpoint.write_text(run / PROBED, json.dumps(found, indent=1) + "\n")
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        checkpoint.save(run / MODEL, tensors, {"task": task.about()})

    def failed(self, trainer: Trainer, error: BlockSparseError) -> bool:
        """Too strong a penalty leaves nothing of a weight."""
        task = trainer.task
        if not isinstance(task, PruneTask) or task.sparse or not task.searched:
            return False
        checkpoint.write_text(trainer.run / PROBED, json.dumps({"failed": str(error)}, indent=1) + "\n")
        return True

    def finished(self, runs: Path) -> dict[str, list[Path]]:
        """The folders of the finished runs whose models were kept, by contender."""
        return {name: [path for path in of if (path / MODEL).is_file()] for name, of in super().finished(runs).items()}

    def _pruned(self, dense: nn.Module, density: float) -> nn.Module:
        return sparsify(dense, density, criterion="lamp", skip=self.skip, force=True)

    def race(self, of: Runs) -> None:
        """Inference of all finished models in turn, and each layer by itself."""
        if DENSE not in of:
            return
        dense, paths = of[DENSE][0].path, [run.path for runs in of.values() for run in runs]
        models: dict[str, Any] = {path.name: self.opened(path).eval() for path in [dense, *paths]}
        for density in self.pruned:
            models[f"{density:g}"] = self._pruned(models[dense.name], density)
        x = self.inputs(models[dense.name])
        with torch.no_grad():
            calls = {name: (lambda model=model: model(x)) for name, model in models.items()}
            samples = alternate(calls, budget=SECONDS * len(calls))
        here = machine()

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

    def found(self, run: Run) -> dict[str, Any]:
        race = kept(run.path, RACED)
        races = {"": race, **race.get("pruned", {})} if race else {}
        inference = {
            density: {"seconds": one["seconds"]["median"], "speed_up": one["speed_up"]["median"]}
            | {"layers": {row["name"]: [row["density"], row["speed_up"]] for row in one["layers"] if row["block"]}}
            for density, one in races.items()
        }
        return {
            "sparse": kept(run.path, PROBED),
            "inference": inference.pop("", {}) | ({"pruned": inference} if inference else {}),
            "raced on": race.get("machine"),
        }

    def left_out(self, runs: Path) -> dict[str, str]:
        paths = [folder(runs, name, seed) for name in self.contenders for seed in self.seeds]
        reasons = {path.name: kept(path, PROBED).get("failed") for path in paths}
        return {name: why for name, why in reasons.items() if why}

    @property
    def columns(self) -> Sequence[Column]:
        def sparse(key: str) -> Callable[[Run, Any], float]:
            return lambda run, _: float(_sparse(run)[key])

        def inference(key: str, scale: float) -> Callable[[Run, Any], float | None]:
            return lambda run, _: scale * race[key] if (race := run.config["facts"]["inference"]) else None

        def quality(run: Run, _: Any) -> float:
            return self.shown(_sparse(run)["held_out"])

        inputs = any(_of_inputs(one.block_size) for one in self.contenders.values() if isinstance(one, Pruning))
        return [
            Column("density", sparse("density"), 3),
            setting("steps", "steps"),
            Column("of them dense, %", lambda _, of: f"{100 * of.search:.0f}"),
            *([Column("inputs used", lambda run, _: _inputs_used(run), 0)] if inputs else ()),
            Column("numbers stored", sparse("numbers"), 0),
            Column(self.figure, quality, 3),
            Column(f"against dense, {self.unit}", quality, self.digits, DENSE, self.compared),
            Column(f"ms of inference, {BATCH} at once", inference("seconds", 1e3), 2),
            Column("times as fast as dense", inference("speed_up", 1), 2),
            seconds(0),
        ]

    def tables(self, of: Results) -> Iterator[Table]:
        yield from super().tables(of)
        dense = of.runs[DENSE][0] if DENSE in of.runs else None
        if dense and _sparse(dense).get("pruned"):
            first = self.shown(_sparse(dense)["held_out"])
            yield Table(
                "The dense one, pruned in one shot after its training (criterion `lamp`) and not trained again:",
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
        layers = {name: runs[0].config["facts"]["inference"].get("layers") for name, runs in of.runs.items()}
        layers = {name: some for name, some in layers.items() if some}
        if names := list(dict.fromkeys(weight for some in layers.values() for weight in some)):
            cells = {
                name: [f"{some[w][0]:.3f}, {some[w][1]:.1f}x" if w in some else "dense" for w in names]
                for name, some in layers.items()
            }
            rows = [(name, *found) for name, found in cells.items()]
            yield Table("Density of each layer, and how many times as fast as dense it is:", ("", *names), rows)
        if dense and (machine := dense.config["facts"]["raced on"]):
            load = f"{machine['load'][0]:.1f}"
            yield Table("Inference was measured on:", ("machine", "load before"), [(where(machine), load)])

    @property
    def curves(self) -> str:  # type: ignore[override]
        beyond = ", what is far off left out" if self.pruned else ""
        return f"{self.figure[0].upper()}{self.figure[1:]} against measured time of inference{beyond}"

    def picture(self, path: Path, of: Results) -> None:
        """A point for each model, by its time and its quality; curves of the training where no times are known."""
        found = self._points(of.runs)
        if not found:
            super().picture(path, of)
            return
        figure, axes = figure_and_axes((8, 5.2))
        labels: list[tuple[float, float, str, str]] = []
        for nth, (name, points) in enumerate(found.items()):
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
        # Models that were not trained again may be so much worse that they would squeeze all others.
        trained = [quality for name, points in found.items() if name != NOT_RETRAINED for _, quality, _ in points]
        room = max(0.5 * (max(trained) - min(trained)), 1e-3)
        axes.set_ylim(min(trained) - room, max(trained) + room)
        axes.grid(color="0.9", lw=0.8)
        machine = next(iter(of.runs.values()))[0].config["facts"]["raced on"]
        figure.supxlabel(where(machine), size=7.5, color="0.4", x=0.01, ha="left")
        label_points(axes, labels)
        save(figure, path)

    def _points(self, of: Runs) -> dict[str, list[tuple[float, float, float]]]:
        """Milliseconds, quality and density of each model, by method."""
        found: dict[str, list[tuple[float, float, float]]] = {}
        for name, runs in of.items():
            for run in runs:
                models = [(_method(self.contenders[name]), _sparse(run), run.config["facts"]["inference"])]
                models += [(NOT_RETRAINED, one, race) for one, race in _pruned_later(run)]
                for method, sparse, race in models:
                    if race:
                        point = 1e3 * race["seconds"], self.shown(sparse["held_out"]), sparse["density"]
                        found.setdefault(method, []).append(point)
        return found


def _sparse(run: Run) -> dict[str, Any]:
    return run.config["facts"]["sparse"]


def _pruned_later(run: Run) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Quality and inference of the dense one, pruned after its training."""
    raced = run.config["facts"]["inference"].get("pruned", {})
    for one in _sparse(run).get("pruned", ()):
        yield one, raced.get(f"{one['density']:g}", {})


def _stored(model: nn.Module) -> dict[str, int]:
    return {"numbers": sum(parameter.numel() for parameter in model.parameters())}


def _method(pruning: Pruning | Dense) -> str:
    name = "threshold and group lasso" if pruning.penalty else pruning.method
    return f"{name}, {pruning.times} times the steps" if pruning.times > 1 else name


def _of_inputs(block_size: int | tuple[int, int]) -> bool:
    return isinstance(block_size, tuple) and block_size[1] == 1 < block_size[0]


def _inputs_used(run: Run) -> float | str:
    """The blocks of the one pruned weight of such a net."""
    blocks = _sparse(run).get("blocks")
    return "all" if blocks is None else float(sum(blocks.values()))
