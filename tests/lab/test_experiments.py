"""Experiments: their runs, their probes, their report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

import blocksparse as bs
from blocksparse_lab import experiments
from blocksparse_lab.cli import app
from blocksparse_lab.experiments import classifiers, language
from blocksparse_lab.experiments.classifiers import ClassifierExperiment
from blocksparse_lab.experiments.language import Contender, LanguageExperiment
from blocksparse_lab.models.char_lm import CharLMConfig, multiply_adds, parameter_count
from blocksparse_lab.recipes import mlp
from blocksparse_lab.recipes.trainer import Settings
from test_data_tables import write_madelon


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "opinions.csv"
    lines = [f"{'good' if i % 2 else 'bad'} as number {i},{i % 2}" for i in range(40)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return str(path)


@pytest.fixture
def tiny(reviews, monkeypatch):
    experiment = LanguageExperiment(
        about="Two tiny models",
        text="python",
        contenders={
            "dense": Contender(CharLMConfig(width=16, embedding=8), 0.01),
            "wide": Contender(CharLMConfig(width=32, embedding=8, pattern="random", block_size=8, density=0.3), 0.01),
        },
        settings=Settings(steps=3, warmup=1, eval_every=2),
        batch=4,
        seq=8,
        evaluated=200,
        seeds=(0, 1),
        reviews={reviews: None},
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    return experiment


def test_from_nothing_to_the_report(tiny, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "results"
    arguments = ["experiment", "tiny", "--runs", str(runs), "--out", str(out)]
    first = CliRunner().invoke(app, [*arguments, "--seed", "0"])
    assert first.exit_code == 0, first.output
    assert sorted(path.name for path in (runs / "tiny").iterdir()) == ["dense-0", "wide-0"]
    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0, second.output
    assert second.output.count("this run is finished") == 2
    found = json.loads((out / "tiny.json").read_text())
    assert {name: len(of) for name, of in found["runs"].items()} == {"dense": 2, "wide": 2}
    seeds = [run["task"]["model"]["seed"] for run in found["runs"]["wide"]]
    assert seeds == [0, 1]
    assert all(0 <= probe["probe"]["test"] <= 1 for run in found["runs"]["wide"] for probe in run["probes"].values())
    table = (out / "tiny.md").read_text()
    assert "| hidden units | 16 | 32 |" in table
    assert "± " in table
    assert "features used" in table
    assert (out / "tiny.png").read_bytes().startswith(b"\x89PNG")


def test_all_read_the_same_text_in_the_same_order(tiny, tmp_path):
    chunks = [trainer.task.inputs(2)[0] for trainer in tiny.trainers(tmp_path)]
    assert len(chunks) == 4
    assert all((chunk == chunks[0]).all() for chunk in chunks)


def test_some_of_the_runs(tiny, tmp_path):
    chosen = tiny.trainers(tmp_path, only=["wide"], seeds=[1])
    assert [trainer.run.name for trainer in chosen] == ["wide-1"]


def test_bad_input(tiny, tmp_path):
    with pytest.raises(bs.BlockSparseError, match="experiment: expected one of wikipedia-small"):
        experiments.find("nothing")
    with pytest.raises(bs.BlockSparseError, match="only: expected some of dense, wide, got narrow"):
        list(tiny.trainers(tmp_path, only=["narrow"]))
    with pytest.raises(bs.BlockSparseError, match="runs: expected finished runs of the experiment"):
        experiments.write("tiny", tiny, tmp_path, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(bs.BlockSparseError, match=r"text: expected|wikipedia"):
        list(replace(tiny, text="wikipedia").trainers(tmp_path))


@pytest.mark.parametrize("name", language.EXPERIMENTS)
def test_contenders_are_of_equal_size(name):
    dense, *others = (contender.config for contender in experiments.find(name).contenders.values())
    for other in others:
        assert other.width > dense.width
        # The wide one may be the smaller by more than it is the larger: whole blocks, and the paper's sizes.
        for size in (parameter_count, multiply_adds):
            assert size(other) <= 1.2 * size(dense)


# -- classifiers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def points(tmp_path):
    """A csv file with rows around a point of each of two classes."""
    rng = np.random.default_rng()
    middle = rng.normal(size=(2, 8))
    rows = [[*(middle[i % 2] + rng.normal(size=8)), i % 2] for i in range(100)]
    path = tmp_path / "points.csv"
    header = ",".join([*(f"x{i}" for i in range(8)), "label"])
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


@pytest.fixture
def table(points, monkeypatch):
    recipe = mlp.Recipe(hidden=(20, 20), epsilon=3, batch=16)
    epochs = {"dense": 2, "fixed": 3, "set": 3}
    experiment = ClassifierExperiment(
        about="Three tiny nets",
        data=points,
        contenders={
            name: classifiers.Contender(name, replace(recipe, epochs=epochs[name]))
            for name in ("dense", "fixed", "set")
        },
        seeds=(0, 1),
        tested_on="a fifth of each class",
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    return experiment


def cells(markdown, title):
    """The cells of a row, as numbers where they are."""
    row = next(line for line in markdown.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_classifiers_from_nothing_to_the_report(table, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "results"
    arguments = ["experiment", "tiny", "--runs", str(runs), "--out", str(out)]
    first = CliRunner().invoke(app, [*arguments, "--only", "set", "--seed", "1"])
    assert first.exit_code == 0, first.output
    # With one contender there is nothing to compare.
    assert "points" not in (out / "tiny.md").read_text()
    assert "± " not in (out / "tiny.md").read_text()
    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0, second.output
    assert second.output.count("this run is finished") == 1
    found = json.loads((out / "tiny.json").read_text())["runs"]
    assert {name: len(of) for name, of in found.items()} == {"dense": 2, "fixed": 2, "set": 2}
    markdown = (out / "tiny.md").read_text()
    assert cells(markdown, "topology") == ["dense", "sparse, never changed", "sparse, evolved (SET)"]
    assert cells(markdown, "epochs") == ["2", "3", "3"]
    assert cells(markdown, "density")[0] == "100 %"
    weights = {name: of[0]["connections"] for name, of in found.items()}
    assert weights["dense"] == 8 * 20 + 20 * 20 + 20 * 2 > weights["set"] == weights["fixed"]
    # All figures once more, from the curves.
    errors = {name: np.array([[e["held_out"] for e in run["curve"]] for run in of]) for name, of in found.items()}
    assert {name: of.shape for name, of in errors.items()} == {"dense": (2, 2), "fixed": (2, 3), "set": (2, 3)}
    for title, figure in (
        ("test error after the last epoch, %", lambda of: of[:, -1]),
        ("test error after epoch 2, %", lambda of: of[:, 1]),
        ("lowest test error after any epoch, %", lambda of: of.min(1)),
    ):
        values = [figure(of) for of in errors.values()]
        assert cells(markdown, title) == [f"{v.mean():.2f} ± {v.std(ddof=1):.2f}" for v in values], title
    for name in ("dense", "fixed"):
        difference = errors["set"][:, -1] - errors[name][:, -1]
        than = "lower" if difference.mean() < 0 else "higher"
        said = f"{abs(difference.mean()):.2f} ± {difference.std(ddof=1):.2f} points {than} than that of {name}"
        assert said in markdown
    assert "After the last epoch (3 epochs of set, 2 of dense) the test error of set is" in markdown
    assert "80 rows of 8 features to train on, 20 to test on, a fifth of each class." in markdown
    for run in (run for of in found.values() for run in of):
        seconds = np.diff([0, *(e["seconds"] for e in run["curve"])])
        assert run["seconds_per_epoch"] == pytest.approx(np.median(seconds))
        assert run["seconds"] == pytest.approx(seconds.sum())
        assert run["lowest"] == min(e["held_out"] for e in run["curve"])
    assert (out / "tiny.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.parametrize("name", classifiers.EXPERIMENTS)
def test_sparse_ones_have_a_twentieth_of_the_weights_at_most(name):
    chosen = experiments.find(name)
    assert list(chosen.contenders) == ["dense", "fixed", "set"]
    assert chosen.seeds == (0, 1, 2)
    recipe = chosen.contenders["set"].recipe
    features, classes = {"fashion_mnist": (784, 10), "cifar10": (3072, 10), "madelon": (500, 2), "higgs": (28, 2)}[
        chosen.data
    ]

    def density(epsilon):
        sizes = (features, *recipe.hidden, classes)
        connections = sum(min(epsilon * (m + n), m * n) for m, n in pairwise(sizes))
        return connections / sum(m * n for m, n in pairwise(sizes))

    assert density(recipe.epsilon) < 0.05
    assert name != "sparse-madelon" or density(recipe.epsilon + 1) > 0.05
    assert recipe == chosen.contenders["fixed"].recipe == replace(mlp.recipe_for(chosen.data), epochs=recipe.epochs)
    dense = chosen.contenders["dense"].recipe
    own = {"epochs", "learning_rate", "init"} if name == "sparse-cifar10" else set()
    assert {key for key, value in asdict(dense).items() if value != getattr(recipe, key)} == own


def test_what_the_dense_net_has_of_its_own_is_told(table):
    recipe = table.contenders["set"].recipe
    assert classifiers._unlike(replace(recipe, epochs=9), recipe) == ""
    told = " The dense one has learning rate 0.002 and weights drawn as xavier: it diverges with those of the others."
    assert classifiers._unlike(replace(recipe, learning_rate=0.002, init="xavier"), recipe) == told


def test_the_help_lists_all():
    said = CliRunner().invoke(app, ["experiment", "--help"]).output
    for name in experiments.EXPERIMENTS:
        assert f"{name}:" in said
