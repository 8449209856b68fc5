"""Experiments: their runs, their probes, their report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import blocksparse as bs
from blocksparse.cli import app
from blocksparse.models.char_lm import CharLMConfig, multiply_adds, parameter_count
from blocksparse.recipes import experiments
from blocksparse.recipes.experiments import language
from blocksparse.recipes.experiments.language import Contender, LanguageExperiment
from blocksparse.recipes.trainer import Settings


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
