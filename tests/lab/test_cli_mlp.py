"""`blocksparse train mlp`, as users call it: output, interruption, resumption."""

import json
import os
import re
import signal
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.cli.options import parse_sizes
from blocksparse_lab.data.synthetic import Synthetic
from blocksparse_lab.models.mlp import SparseMLP
from blocksparse_lab.recipes import layouts, mlp
from blocksparse_lab.recipes.mlp import MLPSettings
from blocksparse_lab.training import compare
from test_cli_train import error, killed_and_whole, run
from test_data_tables import write_madelon

SMALL = ["--hidden", "40,30", "--epsilon", "6", "--epochs", "4", "--batch", "16"]

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """Write a csv file with rows around a point of each of three classes."""
    rng = np.random.default_rng(5)
    middle = rng.normal(size=(3, 12))
    rows = [[*(middle[i % 3] + 0.5 * rng.normal(size=12)), "abc"[i % 3]] for i in range(150)]
    path = tmp_path_factory.mktemp("tables") / "points.csv"
    header = ",".join([*(f"x{i}" for i in range(12)), "label"])
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def train(points, out, *more, code=0):
    return run("train", "mlp", "--data", points, "--out", out, *SMALL, *more, code=code)


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "features", "classes", "sizes", "epsilon", "alpha"),
    [
        ("fashion_mnist", 784, 10, [784, 1000, 1000, 1000, 10], 20, 0.6),
        ("cifar10", 3072, 10, [3072, 4000, 1000, 4000, 10], 20, 0.75),
        ("madelon", 500, 2, [500, 400, 100, 400, 2], 6, 0.5),
        ("higgs", 28, 2, [28, 1000, 1000, 1000, 2], 10, 0.05),
    ],
)
def test_the_papers_recipes(name, features, classes, sizes, epsilon, alpha):
    recipe = mlp.settings_for(name)
    assert (recipe.epsilon, recipe.alpha, recipe.zeta, recipe.dropout) == (epsilon, alpha, 0.3, 0.3)
    data = Synthetic(features, rows=300, tested=3, classes=tuple("abcdefghij"[:classes]))
    nets = {method: mlp.network(replace(recipe, method=method), data) for method in ("set", "fixed", "rigl")}
    assert nets["set"].sizes == sizes
    # "fixed" has SET's initial layouts.
    layouts = [[layer.layout for layer in net.layers] for net in nets.values()]
    assert layouts[0] == layouts[1] == layouts[2]
    facts = mlp.size_of(nets["set"])
    expected = sum(min(epsilon * (m + n), m * n) for m, n in pairwise(sizes))
    assert facts.connections == pytest.approx(expected, rel=0.02)
    assert facts.neurons == sum(sizes)
    made = mlp.task(recipe, nets["set"], data)
    settings = mlp.paced(recipe, made)
    assert (settings.optimizer, settings.momentum, settings.weight_decay) == ("sgd", 0.9, 2e-4)
    assert (settings.learning_rate, settings.warmup, settings.decay, settings.clip) == (0.01, 0, "none", 0)
    assert (made.batch, made.steps, made.topology.zeta) == (128, recipe.epochs * 2, 0.3)


def test_a_dense_net_of_the_same_shape():
    data = Synthetic(20, rows=16, tested=4)
    facts = mlp.size_of(mlp.network(MLPSettings(method="dense", hidden=(30,)), data))
    assert (facts.density, facts.connections, facts.parameters) == (1, 660, 692)


def test_two_of_four_weights_of_each_layer_but_the_last(points, tmp_path):
    train(points, tmp_path / "run", "--method", "2:4")
    with checkpoint.opened(tmp_path / "run" / "last.safetensors") as (tensors, _):
        weight = tensors["model.layers.0.parametrizations.weight.original"]
    assert (weight != 0).all()  # all weights are trained
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["facts"]["connections"] == (12 * 40 + 40 * 30) // 2 + 30 * 3
    assert result["parameters"] == 12 * 40 + 40 * 30 + 30 * 3 + 73
    model = mlp.network(MLPSettings(method="2:4", hidden=(40, 28)), Synthetic(12, rows=16, tested=4))
    for layer in list(model.layers)[:-1]:
        assert (layer.weight.view(layer.out_features, -1, 4) != 0).sum(-1).eq(2).all()


def test_sizes_of_the_extreme_net():
    assert sum(mlp.extreme_hidden(50_000_000)) + 65_538 == pytest.approx(50_000_000, abs=4)
    with pytest.raises(BlockSparseError, match="neurons: expected 65,542 or more, with 65,536 inputs, got 1000"):
        mlp.extreme_hidden(1000)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_output_describes_model_and_result(points, tmp_path):
    out = train(points, tmp_path / "run", "--lr", 0.05, "--epochs", 8).stdout
    model = SparseMLP([12, 40, 30, 3], epsilon=6)
    connections = sum(layer.layout.nnz for layer in model.layers)
    assert "set, 12-40-30-3, All-ReLU 0.6" in out
    assert f"85 neurons, {connections:,} connections, density {connections / 1770:.3g}, 0.0 MB" in out
    assert "points.csv: 120 rows to train on, 3 classes; 8 epochs of 7 steps" in out
    assert re.search(r"epoch 1 of 8: \d\.\d+ nats, [\d,]+ rows/s", out)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"held out {result['held_out']:.4f} % test error of 30 rows after 8 epochs" in out
    assert result["held_out"] < 20
    assert result["unit"] == "% test error"
    assert result["facts"]["connections"] == connections
    assert result["parameters"] == result["facts"]["parameters"] == connections + 73
    assert result["settings"]["optimizer"] == "sgd"
    again = train(points, tmp_path / "run", "--lr", 0.05, "--epochs", 8).stdout
    assert "this run is finished" in again


def test_madelon_by_its_name(tmp_path):
    write_madelon(tmp_path, train=40, valid=20)
    arguments = ["--data-dir", tmp_path, "--epochs", 1, "--batch", 20, "--out", tmp_path / "run"]
    out = run("train", "mlp", "--data", "madelon", *arguments).stdout
    assert "set, 500-400-100-400-2, All-ReLU 0.5" in out


def test_many_neurons(tmp_path):
    arguments = ["--neurons", "70k", "--rows", 8, "--epochs", 2, "--out", tmp_path]
    out = run("train", "mlp", *arguments).stdout
    assert "set, 65,536-1,116-1,116-1,116-1,116-2" in out
    assert "70,002 neurons" in out
    assert "synthetic: 8 rows to train on, 2 classes; 2 epochs of 2 steps" in out
    result = json.loads((tmp_path / "result.json").read_text())
    # A layer has about epsilon (n_in + n_out) connections, with an epsilon of 1.
    assert result["facts"]["connections"] == pytest.approx(65_536 + 7 * 1116 + 1118, rel=0.02)


@pytest.mark.filterwarnings("ignore:.* will never change a layout:blocksparse.SparsityWarning")
def test_methods_and_seeds_side_by_side(points, tmp_path):
    for method in mlp.METHODS:
        train(points, tmp_path / method, "--method", method)
    train(points, tmp_path / "set1", "--seed", 1)
    train(points, tmp_path / "fixed1", "--method", "fixed", "--seed", 1)
    train(points, tmp_path / "pruned", "--importance-from", 1, "--importance-every", 2, "--importance-percentile", 25)
    runs = [tmp_path / name for name in (*mlp.METHODS, "set1", "fixed1", "pruned")]
    out = run("compare", *runs, "--json", tmp_path / "c.json").stdout
    for word in ("% test", "error", *mlp.METHODS, "set1", "12-40-30-3", "over seeds"):
        assert word in out
    content = {one["run"]: one for one in json.loads((tmp_path / "c.json").read_text())["runs"]}
    assert {one["unit"] for one in content.values()} == {"% test error"}
    assert len(content["set"]["curve"]) == 4
    tensors = checkpoint.load(tmp_path / "pruned" / "last.safetensors")[0]
    whole = checkpoint.load(tmp_path / "set" / "last.safetensors")[0]
    assert len(tensors["model.layers.0.values"]) < len(whole["model.layers.0.values"])
    # Two seeds of SET form one group.
    shown = out[out.index("over seeds") :]
    assert re.search(r"^set\b.* 2 +\d+\.\d+ ± \d", shown, re.MULTILINE)
    ends = {name: content[name]["held_out"] for name in ("set", "set1", "fixed", "fixed1")}
    off = (ends["fixed"] - ends["set"] + ends["fixed1"] - ends["set1"]) / 2
    assert f" {off:+.4f} ± " in shown
    assert "different data" not in out


def test_a_setting_that_there_was_not_yet_sets_no_runs_apart(points, tmp_path):
    train(points, tmp_path / "now")
    now, before = compare.read(tmp_path / "now"), compare.read(tmp_path / "now")
    before.config["settings"] |= {"optimizer": "adam"}
    now.config["settings"] |= {"optimizer": "adam"}
    del before.config["settings"]["optimizer"], before.config["settings"]["momentum"]
    assert [len(group.runs) for group in compare.groups([now, before])] == [2]


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_run_killed_with_9_and_resumed_ends_with_the_same_bits(points, tmp_path):
    arguments = ["train", "mlp", "--data", points, *SMALL, "--epochs", "100"]
    arguments += ["--importance-from", "60", "--importance-every", "15"]
    logs = killed_and_whole(tmp_path, arguments, 550, (500, 700))
    figures = [[line["held_out"] for line in log if "held_out" in line] for log in logs]
    assert figures[0] == figures[1]
    assert len(figures[0]) == 100


def test_a_signal_saves_and_says_how_to_resume(points, tmp_path, monkeypatch):
    take = mlp.ClassifyTask.rows_of

    def interrupting(self, step):
        if step == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return take(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(mlp.ClassifyTask, "rows_of", interrupting)
        out = train(points, tmp_path, code=130).stdout
    assert "stopped after epoch 1.429 of 4" in out
    assert "resumes after epoch 1.429" in train(points, tmp_path).stdout


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "data: expected --data NAME, --data FILE.csv or --neurons, got neither"),
        (["--data", "CSV", "--neurons", "1M"], "got both"),
        (["--neurons", "1M", "--hidden", "5"], "size: expected --neurons or --hidden, got both"),
        (["--neurons", "many"], "neurons: expected a number such as 800k"),
        (["--data", "mnist"], "data: expected one of fashion_mnist, cifar10, madelon, higgs, or a csv file, got mnist"),
        (["--data", "madelon", "--data-dir", "HERE"], "madelon: expected HERE/madelon/madelon_train.data or"),
        (["--data", "CSV", "--hidden", "5,,5"], "hidden: expected positive ints with commas between"),
        (["--data", "CSV", "--hidden", "5,0"], "hidden: expected positive ints with commas between"),
        (
            ["--data", "CSV", "--method", "best"],
            "method: expected one of set, smet, chts, rigl, gradual, fixed, dense, 2:4, got 'best'",
        ),
        (
            ["--data", "CSV", "--method", "2:4", "--hidden", "30,8"],
            "2:4: expected layers whose inputs come in fours, got layers.1",
        ),
        (["--data", "CSV", "--batch", "121"], "batch: expected an int from 1 to the rows to train on, 120, got 121"),
        (["--data", "CSV", "--batch", "60", "--epochs", "0"], "epochs: expected a positive int, got 0"),
        (
            ["--data", "CSV", "--batch", "60", "--epsilon", "0.0001"],
            "epsilon: expected enough for one block of a layer",
        ),
        (["--data", "CSV", "--batch", "60", "--zeta", "1.5"], "zeta: expected a number from 0 to 1, got 1.5"),
        (["--data", "CSV", "--batch", "60", "--dropout", "1"], "dropout: expected a number from 0 to below 1"),
        (["--data", "CSV", "--batch", "60", "--lr", "nan"], "learning_rate: expected a number, not negative"),
        (["--data", "CSV", "--rows", "8"], "rows: expected --neurons beside --rows, got --data"),
        (["--data", "CSV", "--importance-every", "0"], "importance_every: expected an int, 1 or more"),
        (["--data", "CSV", "--seed", "9999999999999999999999"], "seed: expected an int, 0 or more and below"),
        (["--data", "CSV", "--method", "dense", "--importance-from", "1"], "importance pruning: expected a sparse net"),
        (["--data", "CSV", "--method", "dense", "--layout-seed", "1"], "layout_seed: expected a sparse net"),
        (
            ["--data", "CSV", "--layout-seed", "-1"],
            "layout_seed: expected an int, 0 or more and below 4294967296",
        ),
        (
            ["--data", "CSV", "--method", "fixed", "--zeta", "0.2"],
            "zeta: expected method set or smet or chts or gradual, got fixed",
        ),
        (["--data", "HOLES"], "holes.csv, line 3, column b: expected a finite number, got a hole"),
        (["--data", "ONE"], "one.csv: expected labels of two classes or more, got only 1 down to line 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_line(arguments, message, points, tmp_path):
    (tmp_path / "holes.csv").write_text("a,b,label\n1,2,0\n1,,1\n")
    (tmp_path / "one.csv").write_text("a,label\n1,1\n")
    places = {"CSV": points, "HOLES": tmp_path / "holes.csv", "ONE": tmp_path / "one.csv", "HERE": tmp_path}
    given = [places.get(argument, argument) for argument in arguments]
    assert message.replace("HERE", str(tmp_path)) in error("train", "mlp", "--out", tmp_path / "run", *given)
    assert not (tmp_path / "run").exists()


def test_seeds_may_begin_with_one_layout(points, tmp_path):
    outs = [tmp_path / name for name in ("0", "1")]
    for seed, out in enumerate(outs):
        train(points, out, "--method", "fixed", "--seed", seed, "--layout-seed", 7)
    nets = [layouts.read(out) for out in outs]
    assert layouts.distances(nets)[0] == [[0, 0], [0, 0]]
    first, second = (SparseMLP([12, 40, 3], epsilon=6, seed=seed, layout_seed=7).layers[0].values for seed in (0, 1))
    assert not torch.equal(first, second)
    said = error("train", "mlp", "--data", points, "--out", outs[0], *SMALL, "--method", "fixed")
    assert "model.layout_seed 7" in said


def test_sizes_as_one_types_them():
    assert parse_sizes("1000") == (1000,)
    for wrong in ("", "a", "1,-2", "1.5", "1 000"):
        with pytest.raises(BlockSparseError, match="hidden: expected positive ints"):
            parse_sizes(wrong)


def test_a_table_of_few_rows_and_many_columns(tmp_path):
    """A batch fits 72 samples of thousands of genes, and the dense net stays finite."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 72)
    rows = (1000 * rng.normal(size=(72, 7129)) + 500 * labels[:, None]).astype(int)
    lines = [",".join([*(f"g{i}" for i in range(7129)), "label"])]
    lines += [",".join(map(str, [*row, label])) for row, label in zip(rows, labels, strict=True)]
    (tmp_path / "genes.csv").write_text("\n".join(lines))

    def train(name, *how):
        return run("train", "mlp", "--data", tmp_path / "genes.csv", "--out", tmp_path / name, *how).stdout

    out = train("set", "--epochs", "1", "--hidden", "100,100")
    assert "58 rows to train on, 2 classes; 1 epoch of 4 steps of 14 rows" in out
    train("dense", "--method", "dense", "--epochs", "8")
