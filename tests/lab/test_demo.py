"""Check `blocksparse demo` at tiny sizes: its page, its numbers, and how it ends."""

import errno
import io
import json
import os
import re
from html.parser import HTMLParser

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from blocksparse import BlockSparseError
from blocksparse.measure import Samples
from blocksparse_lab.cli import app, demo_page
from blocksparse_lab.cli.demo import Sizes, play, plot
from blocksparse_lab.recipes import three_ways
from browser import Browser, program

TINY = Sizes(
    hidden=128,
    batch=8,
    block=16,
    densities=(1, 0.5),
    budget=0.05,
    training={
        "hidden": 128,
        "density": 0.25,
        "wide": 128,
        "wide_block": 32,
        "batch": 16,
        "steps": 12,
        "evaluate_every": 4,
        "test_size": 60,
        "probe": 20,
        "inference_budget": 0.02,
        "seconds": 600.0,
    },
)

pytestmark = pytest.mark.usefixtures("any_backend")


@pytest.fixture
def novel(tmp_path):
    path = tmp_path / "a novel & <more>.txt"
    path.write_bytes("It was a dark and stormy night; \xe9t\xe9.\n".encode("latin-1") * 100)
    return path


def run(novel, out, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    play(console, TINY, novel, 60.0, out, 0)
    return console.file.getvalue()


class Page(HTMLParser):
    """Parser that collects the references of a page, and its tags that are not closed."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.references, self.tags, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.full)])
def test_a_run_leaves_a_page_and_its_numbers(novel, tmp_path, width):
    shown = run(novel, tmp_path / "out", width)
    assert max(len(line) for line in shown.splitlines() if "demo.html" not in line) <= width
    for words in (
        "times as fast",
        "density",
        "right, held-out bytes",
        "memory to train",
        "relative error",
        "demo.html",
    ):
        assert words in shown

    html = (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")
    parsed = Page(html)
    assert not parsed.open
    assert len(parsed.references) == 2
    assert all(one.startswith("data:image/svg+xml;base64,") for one in parsed.references)
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    assert not re.search(r"http|url\(|@import", re.sub(r'src="data:[^"]*"', "", html))
    assert "a novel &amp; &lt;more&gt;.txt" in html

    found = json.loads((tmp_path / "out" / "demo.json").read_text(encoding="utf-8"))
    assert not found["interrupted"]
    models = {model["name"]: model for model in found["training"]["models"]}
    assert [model["done"] for model in models.values()] == [12] * 5
    for name in ("dense", "block-sparse", "dense made sparse"):
        accuracy = f"{100 * models[name]['accuracy']:.1f} %"
        assert accuracy in html
        assert accuracy in shown
    if program():
        browser = Browser(390)  # a phone's width
        browser.open(tmp_path / "out" / "demo.html")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        browser.close()


@pytest.mark.full  # test_three_ways.py checks the same of the training alone
def test_two_runs_give_the_same_curves(novel, tmp_path):
    curves = []
    for name in ("a", "b"):
        run(novel, tmp_path / name)
        models = json.loads((tmp_path / name / "demo.json").read_text())["training"]["models"]
        curves.append([(model["curve"], model["accuracy"]) for model in models])
    assert curves[0] == curves[1]


@pytest.mark.parametrize(("load", "warned"), [(0.2, False), (9.06, True)])
def test_the_page_warns_of_other_programs(load, warned):
    html = demo_page.render(demo_page.Story({"load before": load}, 0))
    assert ("Other programs were running" in html) == warned


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_ctrl_c_writes_the_page_so_far(novel, tmp_path, monkeypatch, turns):
    train = three_ways.ThreeWays.train

    def interrupted(self):
        for done, entry in enumerate(train(self), 1):
            yield entry
            if done > turns:
                raise KeyboardInterrupt

    monkeypatch.setattr(three_ways.ThreeWays, "train", interrupted)
    with pytest.raises(typer.Exit) as caught:
        run(novel, tmp_path)
    assert caught.value.exit_code == 130
    html = (tmp_path / "demo.html").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert "Stopped before the end" in html
    assert found["interrupted"]
    if turns:  # the dense and the block-sparse net have trained
        assert [model["done"] for model in found["training"]["models"]] == ([5, 5] if turns == 1 else [5, 5, 5, 5])
    else:
        assert "training" not in found
    trained = [model["name"] for model in found.get("training", {"models": []})["models"]]
    assert ("The third net is" in html) == ("dense made sparse" in trained)
    assert not Page(html).open


def test_ctrl_c_before_the_training(novel, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "blocksparse_lab.recipes.three_ways.text_data", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(typer.Exit):
        run(novel, tmp_path)
    assert (tmp_path / "demo.html").read_text(encoding="utf-8").count("Not reached.") == 3


def test_a_full_disk_leaves_no_partial_page(novel, tmp_path, monkeypatch):
    def fsync(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        "blocksparse_lab.recipes.three_ways.text_data", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(BlockSparseError, match=r"demo\.html: expected a file to write to, got No space left"):
        run(novel, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.txt"], "readable file"),
        (["--text", "short.txt"], "short.txt: expected about 331 bytes or more"),
        (["--text", "empty.txt"], "which is empty"),
        (["--seconds", "0"], "seconds: expected a positive number"),
        (["--seconds", "inf"], "seconds: expected a positive number"),
        (["--seconds", "nan"], "seconds: expected a positive number"),
        (["--seed", "-1"], "seed: expected"),
        (["--out", "short.txt"], "out: expected a folder"),
    ],
)
def test_mistakes_end_in_one_line_before_anything_runs(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_bytes(b"hello")
    (tmp_path / "empty.txt").touch()
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 1
    assert message in result.output
    assert "One net" not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("accuracy", "seconds", "words"),
    [
        (0.9, 2.0, "trains 5.0 times as fast as the dense one, at 90.0 against 90.0 % right"),
        (0.8, 2.0, "trains 5.0 times as fast as the dense one, but is less accurate: 80.0 against 90.0 % right"),
        (0.9, 10.0, "does not train faster here: 1.00 times as fast"),
    ],
)
def test_the_headline_is_honest(accuracy, seconds, words):
    comparison = finished({"dense": (0.9, 10.0), "block-sparse": (accuracy, seconds)})
    assert words in demo_page.headline(comparison)


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.9, "more"), (0.705, "as"), (0.5, "less")])
def test_the_wide_net_is_compared_at_equal_cost(accuracy, verdict):
    comparison = finished({"wide block-sparse": (accuracy, 2.5), "small dense": (0.7, 2.0)})
    comparison.entries["wide block-sparse"].bits, comparison.entries["small dense"].bits = 0.5, 0.75
    text = demo_page.equal_cost(comparison)
    assert f"It is {verdict} accurate: {100 * accuracy:.1f} against 70.0 % right, 0.50 against 0.75 bits" in text
    assert "1.25 times as long" in text
    del comparison.entries["small dense"]
    assert "did not train" in demo_page.equal_cost(comparison)


def finished(results):
    """Return a comparison whose nets have these accuracies and seconds per step."""
    settings = three_ways.Settings(hidden=64, density=0.25, steps=1, test_size=4)
    comparison = three_ways.ThreeWays(three_ways.letters_data(settings), settings)
    for name, (accuracy, seconds) in results.items():
        comparison.entries[name].accuracy, comparison.entries[name].step_seconds = accuracy, [seconds]
    comparison.inference = Samples({name: [0.1] for name in results}, dict.fromkeys(results, 1))
    return comparison


def test_a_plot_fits_its_box():
    curves = [([1, 50, 100], [9.0, 3.0, 2.0]), ([1, 50], [3.0, 2.5])]
    lines = plot(curves, 60, 10, (0, 100), (1.9, 4.0)).plain.splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 60
    assert any("\u2800" < character <= "\u28ff" for character in "".join(lines))
