"""Dense against block-sparse and wider, at equal parameters, on the same text in the same order: runs and reports.

Each experiment is a set of runs of the trainer, one per model and seed. They go on where they were stopped, and may be
run at the same time from several processes. The report is written from what is there.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..bench import report
from ..data import corpora, reviews
from ..data import text as texts
from ..errors import BlockSparseError
from ..models.char_lm import CharLM, CharLMConfig
from . import charlm, compare, sentiment
from .trainer import Settings, Trainer, device_of

PROBES = "probes.json"


@dataclass(frozen=True)
class Contender:
    """A model of an experiment, and the learning rate that suits it."""

    config: CharLMConfig
    learning_rate: float


@dataclass(frozen=True)
class Experiment:
    """What is compared, and how.

    Args:
        about: the question, in a line.
        text: a name of `data.corpora`.
        contenders: by name, the dense one first.
        settings: of all of them; each has its own learning rate, each run its own seed.
        batch, seq: streams, and bytes of each in a step.
        held_out: the part of the text, its tail, that is evaluated on.
        evaluated: bytes of it that an evaluation along the way reads.
        seeds: of pattern and weights. The order of the text is the same for all.
        reviews: labelled texts, names of `data.reviews`, on which the models' states are probed afterwards, with the
            number of texts of each part at most; None for all.
    """

    about: str
    text: str
    contenders: Mapping[str, Contender]
    settings: Settings
    batch: int = 32
    seq: int = 64
    held_out: float = 0.02
    evaluated: int = 300_000
    seeds: tuple[int, ...] = (0, 1, 2)
    reviews: Mapping[str, int | None] = field(default_factory=dict)


def _small(text: str, **other: Any) -> Experiment:
    """1.5 million parameters: ten minutes a run on one core of a CPU."""
    # The learning rates are near the best of 0.003, 0.006, 0.012, 0.024 and 0.048 in runs of 800 steps on Wikipedia;
    # longer runs want less.
    wide = CharLMConfig(width=1536, embedding=32, pattern="barabasi_albert", m=2)
    return Experiment(
        about=f"An LSTM of 1.5 million parameters, dense or block-sparse and 2.7 times as wide, on {text}",
        text=text,
        contenders={
            "dense": Contender(CharLMConfig(width=576, embedding=32), 0.016),
            "small-world": Contender(wide, 0.012),
        },
        settings=Settings(steps=3500, warmup=100, eval_every=500, save_every=500),
        **other,
    )


def _large(text: str, **other: Any) -> Experiment:
    """42 million parameters in the recurrent weights, the sizes of the paper: hours on a GPU."""
    wide = CharLMConfig(width=18432, pattern="barabasi_albert", m=8)
    return Experiment(
        about=f"LSTMs of 3,168 dense and of 18,432 block-sparse units, as in the paper of 2017, on {text}",
        text=text,
        contenders={
            "dense": Contender(CharLMConfig(width=3168), 0.0005),
            "small-world": Contender(wide, 0.001),
        },
        settings=Settings(
            steps=20_000, warmup=500, eval_every=1000, save_every=1000, dtype="bfloat16", device="cuda", cuda_graph=True
        ),
        batch=128,
        seq=256,
        evaluated=1_000_000,
        **other,
    )


EXPERIMENTS: dict[str, Experiment] = {
    "wikipedia-small": _small("wikipedia"),
    "imdb-small": _small("imdb", reviews={"sst": None, "imdb": 2000}),
    "wikipedia-large": _large("wikipedia", seeds=(0,)),
    "imdb-large": _large("imdb", seeds=(0,), reviews={"sst": None, "imdb": None}),
}


def find(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        BlockSparseError: there is none.

    >>> from blocksparse.recipes import experiments
    >>> list(experiments.find("wikipedia-small").contenders)
    ['dense', 'small-world']
    """
    if name not in EXPERIMENTS:
        raise BlockSparseError.expected("experiment", f"one of {', '.join(EXPERIMENTS)}", repr(name))
    return EXPERIMENTS[name]


def trainers(
    experiment: Experiment,
    runs: Path,
    data_dir: str | Path | None = None,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> Iterator[Trainer]:
    """The runs of an experiment, ready to be trained, one after the other.

    Args:
        experiment: which.
        runs: the folder for them, each in one of its own.
        data_dir: where its text lies; else it is downloaded.
        only, seeds: some of its contenders and of its seeds; all where there are none.

    Raises:
        BlockSparseError: a contender that is unknown; what loaders and trainers refuse.
    """
    unknown = set(only) - set(experiment.contenders)
    if unknown:
        raise BlockSparseError.expected("only", f"some of {', '.join(experiment.contenders)}", ", ".join(unknown))
    content = corpora.load(experiment.text, data_dir)
    parts = texts.split(content, experiment.seq, name=experiment.text, held_out=experiment.held_out)
    for seed in seeds or experiment.seeds:
        for name in only or experiment.contenders:
            contender = experiment.contenders[name]
            config = replace(contender.config, seed=seed)
            settings = replace(experiment.settings, learning_rate=contender.learning_rate, seed=seed)
            device = device_of(settings.device)
            task = charlm.CharLMTask(
                CharLM(config), parts, experiment.batch, experiment.seq, experiment.evaluated, device
            )
            yield Trainer(task, folder(runs, name, seed), settings, charlm.facts(config, experiment.text))


def folder(runs: Path, contender: str, seed: int) -> Path:
    """Where a run is."""
    return runs / f"{contender}-{seed}"


def finished(experiment: Experiment, runs: Path) -> dict[str, list[Path]]:
    """The folders of the finished runs, by contender."""
    folders = {name: [folder(runs, name, seed) for seed in experiment.seeds] for name in experiment.contenders}
    return {name: [path for path in of if (path / "result.json").is_file()] for name, of in folders.items()}


def probe(
    experiment: Experiment,
    path: Path,
    data_dir: str | Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """The sentiment probes of a finished run, kept in its folder; by data, what `sentiment` finds."""
    found, checkpoint = probes_of(path), path / "last.safetensors"
    device = experiment.settings.device
    for data, limit in experiment.reviews.items():
        if data in found:
            continue
        splits = reviews.load(data, data_dir)
        splits = splits if limit is None else splits.limited(limit)
        cache = sentiment.CachedFeatures(checkpoint)
        result = sentiment.evaluate(lambda: charlm.load(checkpoint).to(device), splits, cache=cache, progress=progress)
        found[data] = result.as_dict() | {"limit": limit}
        (path / PROBES).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def probes_of(path: Path) -> dict[str, Any]:
    """The probes of a run that were made."""
    kept = path / PROBES
    return json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}


def write_report(name: str, experiment: Experiment, runs: Path, out: Path) -> list[Path]:
    """What came out, as `NAME.json`, `NAME.md` and `NAME.png`, from the runs that are finished.

    Raises:
        BlockSparseError: no run is, or the files cannot be written.
    """
    of = {contender: [compare.read(path) for path in paths] for contender, paths in finished(experiment, runs).items()}
    if not any(of.values()):
        raise BlockSparseError.expected("runs", "finished runs of the experiment", f"none in {runs}")
    probes = {contender: [probes_of(run.path) for run in found] for contender, found in of.items()}
    paths = [out / f"{name}.{kind}" for kind in ("json", "md", "png")]
    try:
        out.mkdir(parents=True, exist_ok=True)
        content = {
            "what": experiment.about,
            "runs": {c: [run.as_dict() | {"probes": p} for run, p in zip(of[c], probes[c], strict=True)] for c in of},
        }
        paths[0].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        paths[1].write_text(_markdown(name, experiment, of, probes), encoding="utf-8")
    except OSError as error:
        raise BlockSparseError.expected("out", "a folder to write to", f"{out} ({error.strerror})") from error
    compare.picture(paths[2], [compare.Group(contender, tuple(found)) for contender, found in of.items() if found])
    return paths


def _markdown(
    name: str,
    experiment: Experiment,
    of: Mapping[str, Sequence[compare.Run]],
    probes: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    def test(data: str, key: str) -> Figure:
        return lambda run, probes: probes[data]["probe"][key] if data in probes else None

    figures: dict[str, Figure] = {"bits per character, held out": lambda run, probes: run.held_out}
    for data, limit in experiment.reviews.items():
        some = "" if limit is None else f" of {limit:,}"
        figures[f"{data}, part of test texts{some} taken wrongly"] = test(data, "test error")
        figures[f"{data}, features used"] = test(data, "used")
    figures["bytes/s"] = lambda run, probes: run.as_dict()["bytes_per_second"]
    names = [contender for contender in of if of[contender]]
    lines = [f"# {name}", "", f"{experiment.about}.", ""]
    lines += ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    facts = {c: of[c][0] for c in names}

    def row(title: str, cells: Iterator[str]) -> None:
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    row("hidden units", (f"{run.task['model']['width']:,}" for run in facts.values()))
    row("pattern", (_pattern(run.task["model"]) for run in facts.values()))
    row("density of the recurrent weights", (f"{run.config['facts']['density']:.3g}" for run in facts.values()))
    row("parameters", (f"{run.config['facts']['parameters']:,}" for run in facts.values()))
    row("multiply-adds per byte", (f"{run.config['facts']['multiply_adds_per_byte']:,}" for run in facts.values()))
    row("learning rate", (f"{run.settings['learning_rate']:g}" for run in facts.values()))
    row("seeds", (str(len(of[c])) for c in names))
    for title, figure in figures.items():
        found = {c: [figure(run, p) for run, p in zip(of[c], probes[c], strict=True)] for c in names}
        known = {c: [value for value in values if value is not None] for c, values in found.items()}
        if known == found:
            row(title, (_spread(known[c]) for c in names))
    run = next(iter(facts.values()))
    lines += [
        "",
        f"Mean and standard deviation over the seeds. {run.settings['steps']:,} steps of "
        f"{run.config['bytes_per_step']:,} bytes, {run.as_dict()['bytes'] / 1e6:.1f} MB of the text, which all read "
        f"once and in the same order; Adam with {run.settings['warmup']} steps of warm-up and a linear decay, "
        f"gradients clipped at {run.settings['clip']:g}. Bits per character of one text do not compare with those of "
        "another, nor with published figures for enwik8.",
        "",
        f"![Bits per character against steps and seconds]({name}.png)",
        "",
        report.where(run.result["machine"]) if run.result else "",
    ]
    return "\n".join(lines).rstrip() + "\n"


Figure = Callable[[compare.Run, Mapping[str, Any]], float | None]


def _pattern(model: Mapping[str, Any]) -> str:
    blocks = f", blocks of {model['block_size']}"
    return {
        "dense": "dense",
        "barabasi_albert": f"Barabasi-Albert, m {model['m']}{blocks}",
        "watts_strogatz": f"Watts-Strogatz, {model['neighbors']} neighbors{blocks}",
        "random": f"random{blocks}",
    }[model["pattern"]]


def _spread(values: Sequence[float]) -> str:
    digits = 4 if max(values) < 10 else 2 if max(values) < 100 else 0
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.{digits}f}{deviation}"
