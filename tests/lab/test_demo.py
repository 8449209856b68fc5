"""Check `blocksparse demo` at tiny sizes: its page, its numbers, and how it ends."""

import io
import json
import re
from html.parser import HTMLParser

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from blocksparse.measure import Spread
from blocksparse_lab.cli import app, demo_page
from blocksparse_lab.cli.demo import Sizes, play, plot
from blocksparse_lab.recipes import next_byte
from browser import Browser, program

TINY = Sizes(
    hidden=128,
    batch=8,
    block=16,
    densities=(1, 0.5),
    budget=0.05,
    training={"context": 16, "steps": 12, "batch": 32, "warmup": 2, "eval_every": 4, "probe": 100},
    models={"width": 256, "depth": 1, "embedding": 8, "block_size": 8},
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
    for words in ("relative error", "density", "bits per byte, held-out text", "ms per step", "demo.html"):
        assert words in shown

    html = (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")
    parsed = Page(html)
    assert not parsed.open
    assert len(parsed.references) == 3
    assert all(one.startswith("data:image/svg+xml;base64,") for one in parsed.references)
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    assert not re.search(r"http|url\(|@import", re.sub(r'src="data:[^"]*"', "", html))
    assert "a novel &amp; &lt;more&gt;.txt" in html

    found = json.loads((tmp_path / "out" / "demo.json").read_text(encoding="utf-8"))
    dense, sparse = found["training"]["models"]
    assert found["training"]["steps"] == 12
    assert not found["interrupted"]
    assert sparse["parameters"] == pytest.approx(dense["parameters"], rel=0.01)
    for model in (dense, sparse):
        assert f"{model['held_out']:.3f}" in html
        assert f"{model['held_out']:.3f}" in shown
        assert f"{model['parameters']:,}" in html
    if program():
        browser = Browser(390)  # a phone's width
        browser.open(tmp_path / "out" / "demo.html")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        browser.close()


@pytest.mark.full  # test_next_byte.py checks the same of the training alone
def test_two_runs_give_the_same_curves(novel, tmp_path):
    curves = []
    for name in ("a", "b"):
        run(novel, tmp_path / name)
        models = json.loads((tmp_path / name / "demo.json").read_text())["training"]["models"]
        curves.append([(model["curve"]["bits"], model["held_out"]) for model in models])
    assert curves[0] == curves[1]


@pytest.mark.parametrize("steps", [0, 3])
def test_ctrl_c_writes_the_page_so_far(novel, tmp_path, monkeypatch, steps):
    loss, done = next_byte.NextByteTask.loss, []

    def interrupted(self, step):
        if len(done) == 2 * steps + 1:  # in a step of the second model
            raise KeyboardInterrupt
        done.append(step)
        return loss(self, step)

    monkeypatch.setattr(next_byte.NextByteTask, "loss", interrupted)
    with pytest.raises(typer.Exit) as caught:
        run(novel, tmp_path)
    assert caught.value.exit_code == 130
    html = (tmp_path / "demo.html").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    assert "Stopped before the end" in html
    assert found["interrupted"]
    assert found["training"]["steps"] == steps
    assert len(found["training"]["models"]) == (2 if steps else 0)
    assert not Page(html).open


def test_ctrl_c_before_the_training(novel, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "blocksparse_lab.recipes.example_2017.run", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(typer.Exit):
        run(novel, tmp_path)
    assert (tmp_path / "demo.html").read_text(encoding="utf-8").count("Not reached.") == 3


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
    assert "The 2017 example" not in result.output
    assert "Traceback" not in result.output


def outcome(name, held_out, ms):
    spread = Spread(ms / 1e3, ms / 1e3, ms / 1e3, 10)
    return next_byte.Outcome(name, 8, 100, 90, 0.1, held_out, held_out, spread, next_byte.Curve())


@pytest.mark.parametrize(
    ("dense", "sparse", "words"),
    [(2.0, 1.9, "5.0 % fewer"), (2.0, 2.1, "5.0 % more"), (2.0, 2.004, "no real difference")],
)
def test_the_verdict_names_the_better_model(dense, sparse, words):
    text = demo_page.verdict([outcome("dense", dense, 8.0), outcome("block-sparse", sparse, 10.0)])
    assert words in text
    assert "1.25 times as long" in text


def test_a_plot_fits_its_box():
    curves = [([1, 50, 100], [9.0, 3.0, 2.0]), ([1, 50], [3.0, 2.5])]
    lines = plot(curves, 60, 10, (0, 100), (1.9, 4.0)).plain.splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= 60
    assert any("\u2800" < character <= "\u28ff" for character in "".join(lines))
