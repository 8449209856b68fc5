"""Experiments with classifiers of tables."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from blocksparse_lab import experiments
from blocksparse_lab.experiments import classifiers
from blocksparse_lab.experiments.classifiers import ClassifierExperiment
from blocksparse_lab.experiments.experiment import Column
from blocksparse_lab.recipes import mlp
from blocksparse_lab.recipes.mlp import MLPSettings
from blocksparse_lab.training.compare import Run
from experiment_parts import cells, command
from test_data_tables import write_madelon, write_points


@pytest.fixture
def table(tmp_path, monkeypatch):
    """An experiment on three nets, with rows around a point of each of two classes."""
    recipe = MLPSettings(hidden=(20, 20), epsilon=3, batch=16)
    experiment = ClassifierExperiment(
        about="Three tiny nets",
        data=write_points(tmp_path / "points.csv"),
        contenders={
            name: replace(recipe, method=name, epochs=epochs)
            for name, epochs in (("dense", 2), ("fixed", 3), ("set", 3))
        },
        seeds=(0, 1),
        tested_on="a fifth of each class",
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    return experiment


def test_runs_of_two_instruction_sets_are_not_paired():
    def runs(isa, *figures):
        configs = [{"settings": {"seed": seed}, "facts": {"error": error}} for seed, error in enumerate(figures)]
        return [Run(Path(isa), config, [], {"machine": {"isa": isa}}) for config in configs]

    column = Column("error, against set", "facts.error", 2, against="set")
    of = {"set": runs("avx2", 1.0, 2.0, 3.0), "rigl": runs("avx2", 2.0, 3.0, 4.0), "narrow": runs("amx", 2.0, 3.0, 4.0)}
    apart = f"+1.00 ± {2**0.5:.2f} (unpaired, p 0.29)"
    assert column.cells(dict.fromkeys(of), of) == ["+0.00 ± 0.00", "+1.00 ± 0.00", apart]
    cells = ["+0.00 ± 0.00", apart.replace("unpaired, ", ""), apart.replace("unpaired", "another instruction set")]
    assert column.cells(dict.fromkeys(of), of, paired=False) == cells
    of["narrow"] = of["narrow"][:1]
    assert column.cells(dict.fromkeys(of), of)[-1] == "+0.00 (unpaired)"
    of["rigl"][1].config["facts"]["error"] = 3.5
    assert column.cells(dict.fromkeys(of), of)[1] == "+1.17 ± 0.29 (p 0.02)"


def test_a_cell_names_its_seeds_if_some_are_missing():
    def runs(*figures):
        configs = [{"settings": {"seed": seed}, "facts": {"error": error}} for seed, error in enumerate(figures)]
        return [Run(Path("run"), config, [], {"machine": {"isa": "avx2"}}) for config in configs]

    of = {"set": runs(1.0, 2.0, 3.0), "rigl": runs(2.0, None, 4.5), "narrow": runs(None, None, None)}
    column = Column("error", "facts.error", 1)
    assert column.cells(dict.fromkeys(of), of) == ["2.0 ± 1.0", "3.2 ± 1.8 (2 of 3 seeds)", "-"]
    against = replace(column, against="set")
    assert against.cells(dict.fromkeys(of), of) is None
    del of["narrow"]
    assert against.cells(dict.fromkeys(of), of) == ["+0.0 ± 0.0", "+1.2 ± 0.4 (2 of 3 seeds)"]
    assert against.cells(dict.fromkeys(of), of, paired=False)[1] == "+1.2 ± 2.0 (2 of 3 seeds)"
    of["set"] = runs(1.0, 2.0, None)
    assert against.cells(dict.fromkeys(of), of)[1] == "+1.0 (1 of 3 seeds)"
    assert against.cells(dict.fromkeys(of), of, paired=False)[1] == "+1.8 ± 1.9 (2 of 3 seeds against 2 of 3 seeds)"
    of["rigl"] = runs(None, None, 3.0)
    assert against.cells(dict.fromkeys(of), of)[1] == "-"


def test_classifiers_from_nothing_to_the_report(table, tmp_path):
    _, _, markdown = command(tmp_path, "--only", "set", "--seed", "1")
    assert "± " not in markdown
    said, runs, markdown = command(tmp_path)
    assert said.count("this run is finished") == 1
    assert cells(markdown, "topology") == ["dense", "sparse, never changed", "sparse, evolved (SET)"]
    assert cells(markdown, "epochs") == ["2", "3", "3"]
    assert cells(markdown, "density, %")[0] == "100"
    connections = [run.config["facts"]["connections"] for run in runs["set"]]
    mean = cells(markdown, "weights (and multiply-adds per row, forward)")[2].partition(" ± ")[0]
    assert mean == f"{np.mean(connections):.0f}"
    assert cells(markdown, "test rows") == 3 * ["20, a fifth of each class"]
    weights = {name: of[0].config["facts"]["connections"] for name, of in runs.items()}
    assert weights["dense"] == 8 * 20 + 20 * 20 + 20 * 2 > weights["set"] == weights["fixed"]
    # Compute all figures again from the curves.
    errors = {name: np.array([[e["held_out"] for e in run.evaluations] for run in of]) for name, of in runs.items()}
    assert {name: of.shape for name, of in errors.items()} == {"dense": (2, 2), "fixed": (2, 3), "set": (2, 3)}
    for title, figure in (
        ("test error after the last epoch, %", lambda of: of[:, -1]),
        ("test error after epoch 2, %", lambda of: of[:, 1]),
        ("lowest test error after any epoch, %", lambda of: of.min(1)),
    ):
        values = [figure(of) for of in errors.values()]
        assert cells(markdown, title) == [f"{v.mean():.2f} ± {v.std(ddof=1):.2f}" for v in values], title
    against = [of[:, -1] - errors["set"][:, -1] for of in errors.values()]
    told = [f"{difference.mean():+.2f} ± {difference.std(ddof=1):.2f}" for difference in against]
    differences = cells(markdown, "test error after the last epoch, against set")
    assert [cell.partition(" (")[0].replace("-0.00", "+0.00") for cell in differences] == [
        cell.replace("-0.00", "+0.00") for cell in told
    ]
    for run in (run for of in runs.values() for run in of):
        seconds = np.diff([0, *(e["seconds"] for e in run.evaluations)])
        rounding = 1e-4 * run.seconds  # a report keeps five digits of the curve's times
        assert run.config["facts"]["seconds_per_epoch"] == pytest.approx(np.median(seconds), abs=rounding)
        assert run.seconds == pytest.approx(seconds.sum(), abs=rounding)


def test_a_control_is_added_to_a_report_that_is_there(table, tmp_path):
    _, before, _ = command(tmp_path, "--only", "set", "--only", "dense", "--add")  # to none
    for run in (tmp_path / "runs" / "tiny").iterdir():
        run.rename(tmp_path / f"elsewhere-{run.name}")
    _, after, markdown = command(tmp_path, "--only", "fixed", "--add")
    assert list(after) == ["dense", "fixed", "set"]
    assert [run.evaluations for run in after["set"]] == [run.evaluations for run in before["set"]]
    assert cells(markdown, "seeds") == ["2", "2", "2"]


@pytest.mark.parametrize(
    "queue", [(), pytest.param(("--cores", "1"), marks=pytest.mark.full)], ids=["one by one", "side by side"]
)
def test_a_diverged_run_is_left_out_with_its_reason(table, tmp_path, queue, at_work):
    fixed = table.contenders["fixed"]
    wild = replace(fixed, learning_rate=1e30)
    contenders = {"dense": table.contenders["dense"], "wild": wild, "set": table.contenders["set"]}
    experiments.EXPERIMENTS["tiny"] = replace(table, contenders=contenders, seeds=(0,))
    _, runs, markdown = command(tmp_path, *queue)
    assert [name for name, of in runs.items() if of] == ["dense", "set"]
    left_out = re.search(r"\| wild-0 \| step \d+: expected a finite loss and gradient, got [^.]*\|", markdown)
    assert left_out
    # A report that is extended or written again keeps this note.
    for run in (tmp_path / "runs" / "tiny").iterdir():
        run.rename(tmp_path / f"elsewhere-{run.name}")
    for more in (["--only", "set", "--add"], ["--only", "set", "--only", "dense"]):
        _, _, markdown = command(tmp_path, *more)
        assert left_out.group() in markdown


@pytest.mark.filterwarnings("ignore:.* will never change a layout:blocksparse.SparsityWarning")
def test_sparse_training_with_one_thing_changed(table, tmp_path):
    of = classifiers.EXPERIMENTS["sparse-madelon"]
    recipe = replace(table.contenders["set"], epochs=3)
    shrunk = {name: replace(recipe, method=one.method, alpha=one.alpha) for name, one in of.contenders.items()}
    for name, one in of.contenders.items():
        if one.importance_from is not None:
            shrunk[name] = replace(shrunk[name], importance_from=1, importance_every=1)
    experiments.EXPERIMENTS["tiny"] = replace(table, contenders=shrunk)
    _, _, markdown = command(tmp_path)
    slopes, left, distances = (
        dict(zip(shrunk, cells(markdown, title), strict=True))
        for title in (
            "slope of All-ReLU",
            "parameters after the last epoch",
            "distance of the layout to those of other seeds (NNSTD)",
        )
    )
    assert [name for name, slope in slopes.items() if slope == "0"] == ["set, ReLU"]
    assert int(left["set, importance"].split()[0]) < int(left["set"].split()[0])
    assert all(0 < float(cell.split()[0]) < 1 for cell in distances.values() if cell != "-")
    assert distances["dense"] == distances["narrow"] == "-" not in (distances["set"], distances["fixed"])


def test_rates_are_chosen_by_rows_of_the_training_part(table):
    whole, chosen = table.load(None), replace(table, choosing=True).load(None)
    assert len(chosen.validation) == chosen.tested == 16
    assert torch.equal(chosen.test, whole.test)
    both = torch.cat([chosen.train, chosen.validation])
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, whole.train.tolist()))


def test_contenders_differ_in_their_topology_alone(table, tmp_path):
    tasks = {trainer.run.name: trainer.task for trainer in table.trainers(tmp_path)}
    assert list(tasks) == ["dense-0", "fixed-0", "set-0", "dense-1", "fixed-1", "set-1"]
    for seed in (0, 1):
        dense, fixed, evolved = (tasks[f"{name}-{seed}"] for name in table.contenders)
        assert (dense.rows_of(3) == evolved.rows_of(3)).all()
        assert [layer.layout for layer in fixed.model.layers] == [layer.layout for layer in evolved.model.layers]
        assert list(evolved.methods) == ["set"]
        assert fixed.methods == dense.methods == {}
    assert (tasks["set-0"].rows_of(0) != tasks["set-1"].rows_of(0)).any()


@pytest.mark.parametrize("own", [True, False], ids=["its own folder", "the folder of all data"])
def test_the_folder_with_the_data(own, tmp_path):
    folder = tmp_path / "madelon"
    folder.mkdir()
    write_madelon(folder, train=256, valid=20)
    chosen = experiments.find("sparse-madelon")
    trainer = next(chosen.trainers(tmp_path / "runs", folder if own else tmp_path, only=["set"]))
    assert trainer.facts["tested"] == 20
    assert trainer.settings.steps == 2 * 500


def test_words_of_texts(tmp_path, monkeypatch):
    lines = [f"{'a good' if i % 2 else 'some bad'} film number {i},{i % 2}" for i in range(60)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    of = experiments.find("words-imdb")
    assert sum(of.contenders["set"].hidden) + sum(classifiers.SIZES["imdb"]) == 1_000_000
    small = {"linear": (), "narrow": (4, 4), "fixed": (50, 50), "set": (50, 50)}
    contenders = {
        name: replace(one, hidden=small[name], epochs=4, batch=8, learning_rate=0.01)
        for name, one in of.contenders.items()
    }
    tiny = replace(of, data=str(tmp_path / "films.csv"), contenders=contenders, seeds=(0,))
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", tiny)
    _, runs, _ = command(tmp_path)
    assert all(run.settings["optimizer"] == "adam" for of in runs.values() for run in of)
    assert runs["linear"][0].held_out == 0
    whole, chosen = tiny.load(None), replace(tiny, choosing=True).load(None)
    assert (whole.tested, chosen.tested) == (len(whole.splits.test), len(whole.splits.validation))
    rows, labels = whole.take(np.array([3, 0]))
    assert rows.shape == (2, 65_536)
    assert labels.tolist() == [whole.splits.train.labels[3], whole.splits.train.labels[0]]
    assert sum(len(labels) for _, labels in whole.held_out(5)) == whole.tested


@pytest.mark.parametrize("name", [name for name in classifiers.EXPERIMENTS if name.startswith("sparse-")])
def test_sparse_ones_have_a_twentieth_of_the_weights_at_most(name):
    chosen = experiments.find(name)
    assert list(chosen.contenders)[:5] == ["dense", "narrow", "shallow", "fixed", "set"]
    assert len(chosen.seeds) >= 3
    recipe = chosen.contenders["set"]
    inputs, classes = classifiers.SIZES[chosen.data]

    def density(epsilon):
        sizes = (inputs, *recipe.hidden, classes)
        connections = sum(min(epsilon * (m + n), m * n) for m, n in pairwise(sizes))
        return connections / sum(m * n for m, n in pairwise(sizes))

    assert density(recipe.epsilon) < 0.05
    whole = sum(m * n for m, n in pairwise((inputs, *recipe.hidden, classes)))
    for one, own in (("narrow", classifiers.NARROW), ("shallow", classifiers.SHALLOW)):
        dense = chosen.contenders[one]
        weights = sum(m * n for m, n in pairwise((inputs, *dense.hidden, classes)))
        assert 0.96 * density(recipe.epsilon) < weights / whole <= density(recipe.epsilon)
        assert replace(dense, hidden=recipe.hidden) == replace(recipe, method="dense", **own.get(chosen.data, {}))
    assert name != "sparse-madelon" or density(recipe.epsilon + 1) > 0.05
    assert recipe == replace(chosen.contenders["fixed"], method="set")
    assert recipe == replace(mlp.settings_for(chosen.data), epochs=recipe.epochs)
    dense = chosen.contenders["dense"]
    own = {"epochs", "learning_rate", "init", "method"} if name == "sparse-cifar10" else {"method"}
    assert {key for key, value in asdict(dense).items() if value != getattr(recipe, key)} == own
