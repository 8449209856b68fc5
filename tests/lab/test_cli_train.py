"""`blocksparse train charlm`, `sample` and `compare`, as users call them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch

import blocksparse as bs
from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.cli.options import parse_count
from blocksparse_lab.data import text
from blocksparse_lab.models.char_lm import CharLMConfig, parameter_count
from blocksparse_lab.recipes.charlm import CharLMTask
from blocksparse_lab.training import compare, run_log
from command import error, run

TINY = [
    "--pattern", "barabasi_albert", "--m", "1", "--block-size", "8", "--width", "64", "--embedding", "16",
    "--batch", "8", "--seq", "32", "--warmup", "10", "--ema", "0.9", "--log-every", "5",
    "--eval-bytes", "500",
]  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "topics.txt"
    path.write_bytes(text.python_topics()[:60_000])
    return path


def train(book, out, *more, code=0):
    return run("train", "charlm", "--text", book, "--out", out, *TINY, *more, code=code)


@pytest.fixture(scope="module")
def trained(book, tmp_path_factory):
    """Train two seeds of a block-sparse model and a dense one, for a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    with nullcontext() if bs.backends()["cpu"] else bs.use_backend("reference"):
        for seed in (0, 1):
            train(book, folder / f"sparse{seed}", "--steps", 20, "--eval-every", 5, "--seed", seed)
        train(book, folder / "dense", "--steps", 20, "--eval-every", 5, "--pattern", "dense")
    return folder


# -- train ---------------------------------------------------------------------------------------------------------


def test_the_output_describes_model_and_result(book, tmp_path):
    out = train(book, tmp_path / "run", "--steps", 10).stdout
    config = CharLMConfig(width=64, embedding=16, pattern="barabasi_albert", m=1, block_size=8)
    assert "lstm, Barabasi-Albert with m 1 in blocks of 8, width 64" in out
    assert f"{parameter_count(config):,} parameters" in out
    assert re.search(r"recurrent density 0\.\d+, [\d,]+ multiply-adds per byte", out)
    assert "topics.txt: 54,000 bytes to train on, 6,000 held out" in out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"held out {result['held_out']:.4f} bits per character after 10 steps" in out
    assert result["facts"]["parameters"] == result["parameters"] == parameter_count(config)
    again = train(book, tmp_path / "run", "--steps", 10).stdout
    assert "this run is finished" in again
    assert f"held out {result['held_out']:.4f}" in again


def test_a_text_by_its_name(tmp_path):
    out = run("train", "charlm", "--data", "python", "--out", tmp_path, *TINY, "--steps", 1).stdout
    assert "python: " in out
    assert json.loads((tmp_path / "config.json").read_text())["task"]["evaluated"] == 500


COMMAND = """
import blocksparse as bs
from contextlib import nullcontext
from blocksparse_lab.cli import app
with nullcontext() if bs.backends()["cpu"] else bs.use_backend("reference"):
    app()
"""


def start(*arguments):
    """Start a command in a process of its own."""
    # Two processes with one thread each do not wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, env=environment
    )


def killed_and_whole(folder, arguments, step, bounds):
    """Return the logs of a run killed with signal 9 and resumed, and of a whole run, after a comparison of their
    tensors."""
    killed, whole = folder / "killed", folder / "whole"
    uninterrupted, process = (start(*arguments, "--out", out) for out in (whole, killed))
    while not any(line["step"] >= step for line in run_log.read(killed)):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert bounds[0] <= checkpoint.load(killed / "last.safetensors")[1]["step"] < bounds[1]
    assert start(*arguments, "--out", killed).wait() == 0
    assert uninterrupted.wait() == 0
    ours, theirs = (checkpoint.load(run / "last.safetensors")[0] for run in (killed, whole))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    return [run_log.read(run) for run in (killed, whole)]


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_run_killed_with_9_and_resumed_ends_with_the_same_bits(book, tmp_path):
    more = ["--steps", "80", "--save-every", "15", "--eval-every", "35", "--cell", "mlstm"]
    found = killed_and_whole(tmp_path, ["train", "charlm", "--text", book, *TINY, *more], 40, (30, 80))
    aside = ("seconds", "bytes_per_second")
    logs = [[{k: v for k, v in line.items() if k not in aside} for line in log] for log in found]
    assert logs[0] == logs[1]
    assert logs[0][-1]["held_out"] < logs[0][0]["loss"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_resume(number, book, tmp_path, monkeypatch):
    inputs = CharLMTask.inputs

    def interrupting(self, step):
        if step == 6:
            os.kill(os.getpid(), number)
        return inputs(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(CharLMTask, "inputs", interrupting)
        out = train(book, tmp_path, "--steps", 12, code=128 + number).stdout
    assert "stopped after step 7 of 12" in out
    assert "The same command resumes." in out
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == 7
    assert "resumes after step 7" in train(book, tmp_path, "--steps", 12).stdout


def test_a_loss_that_is_not_a_number_ends_in_one_line(book, tmp_path, monkeypatch):
    loss_of = CharLMTask.loss_of
    monkeypatch.setattr(CharLMTask, "loss_of", lambda self, *inputs: loss_of(self, *inputs) * float("nan"))
    said = error("train", "charlm", "--text", book, "--out", tmp_path, *TINY)
    assert "step 1: expected a finite loss and gradient, got loss nan" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "text: expected --text FILE or --data NAME, got neither"),
        (["--text", "BOOK", "--data", "python"], "got both"),
        (["--text", "/no/such/file"], "text: expected a readable file"),
        (["--text", "EMPTY"], "text: expected a file with some bytes in it"),
        (["--text", "SHORT"], "short.txt: expected about 331 bytes or more, for a context of 32"),
        (["--text", "BOOK", "--batch", "2000"], "topics.txt: expected 64,001 bytes or more to train on"),
        (["--text", "BOOK", "--rewire", "nan"], "rewire: expected a number from 0 to 1, got nan"),
        (["--text", "BOOK", "--held-out", "1e-320"], "held_out: expected a fraction above 0 and below 1"),
        (["--text", "BOOK", "--params", "1M"], "size: expected --width or --params, got both"),
        (["--text", "BOOK", "--width", "60"], "width: expected a multiple of the block, 8, got 60"),
        (["--text", "BOOK", "--cell", "gru"], "cell: expected one of lstm, mlstm, smallworld, got 'gru'"),
        (["--text", "BOOK", "--decay", "sharp"], "decay: expected one of linear, cosine, none, got 'sharp'"),
        (["--text", "BOOK", "--device", "abacus"], "device: expected cpu, or cuda where there is a GPU"),
        (["--text", "BOOK", "--lr", "nan"], "learning_rate: expected a number, not negative, got nan"),
    ],
    ids=lambda value: " ".join(value[-2:]).replace("/", ".") if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_line(arguments, message, book, tmp_path):
    (tmp_path / "short.txt").write_text("A short text.")
    (tmp_path / "empty.txt").touch()
    places = {"BOOK": book, "SHORT": tmp_path / "short.txt", "EMPTY": tmp_path / "empty.txt"}
    given = [places.get(argument, argument) for argument in arguments]
    assert message in error("train", "charlm", "--out", tmp_path / "run", *TINY, *given)
    assert not (tmp_path / "run").exists()


def test_another_text_or_model_is_refused(trained, book, tmp_path):
    (tmp_path / "other.txt").write_bytes(text.python_topics()[-60_000:])
    arguments = ["--out", trained / "sparse0", *TINY, "--steps", 20, "--eval-every", 5]
    assert "text.sha256" in error("train", "charlm", "--text", tmp_path / "other.txt", *arguments)
    said = error("train", "charlm", "--text", book, *arguments, "--width", 72, "--batch", 4)
    assert "the run's settings: model.width 64, batch 8, got model.width 72, batch 4; use a new folder" in said


def test_an_invalid_run_folder(book, tmp_path):
    (tmp_path / "file").touch()
    assert "run: expected a folder to write to" in error("train", "charlm", "--text", book, "--out", tmp_path / "file")


@pytest.mark.parametrize(
    ("count", "options"),
    [
        ("100k", ["--pattern", "dense"]),
        ("0.05M", ["--pattern", "dense"]),
        ("100k", ["--pattern", "barabasi_albert", "--m", 1, "--block-size", 8]),
        ("60k", ["--projection", 16]),
        ("100k", ["--cell", "smallworld", "--stride", 3]),
    ],
    ids=str,
)
def test_the_width_for_a_number_of_parameters(count, options, book, tmp_path):
    small = ["--batch", 4, "--seq", 8, "--steps", 1, "--eval-bytes", 100]
    run("train", "charlm", "--text", book, "--out", tmp_path, "--params", count, *options, *small)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["parameters"] == pytest.approx(parse_count(count), rel=0.1)


def test_numbers_with_letters():
    numbers = {"10M": 10**7, "2.5m": 2_500_000, "800k": 800_000, "1G": 10**9, "1,234": 1234, "7": 7}
    assert {text: parse_count(text) for text in numbers} == numbers
    for wrong in ("", "M", "ten", "-1M", "1.2.3M", "5 apples"):
        with pytest.raises(BlockSparseError, match="params: expected a number such as"):
            parse_count(wrong)


# -- sample --------------------------------------------------------------------------------------------------------


def test_a_sample_follows_its_prompt(trained):
    out = run("sample", trained / "sparse0", "--prompt", "The caf\u00e9 ", "--length", 40, "--seed", 1).stdout
    assert out.startswith("The caf\u00e9 ")
    assert len(out.removeprefix("The caf\u00e9 ").encode()) >= 40
    assert not [c for c in out if not (c.isprintable() or c in "\n\t")]
    assert out == run("sample", trained / "sparse0" / "last.safetensors", "--prompt", "The caf\u00e9 ", "--length", 40,
                      "--seed", 1).stdout  # fmt: skip


def test_mistakes_about_a_sample(trained, tmp_path):
    assert "checkpoint: expected a file" in error("sample", tmp_path)
    assert "top_k: expected an int from 1 to 256, got 0" in error("sample", trained / "dense", "--top-k", 0)
    (tmp_path / "a.safetensors").write_text("no")
    assert "a.safetensors: expected a whole checkpoint" in error("sample", tmp_path / "a.safetensors")


# -- compare -------------------------------------------------------------------------------------------------------


def test_runs_side_by_side(trained, tmp_path):
    runs = [trained / name for name in ("dense", "sparse0", "sparse1")]
    pictured = ["--out", tmp_path / "c.png"] if pytest.importorskip("matplotlib") else []
    out = run("compare", *runs, "--json", tmp_path / "c.json", *pictured).stdout
    for name in ("dense", "sparse0", "sparse1", "barabasi_albert", "mul-adds", "over seeds"):
        assert name in out
    content = json.loads((tmp_path / "c.json").read_text())["runs"]
    figures = [one["held_out"] for one in content]
    assert all(f"{figure:.4f}" in out for figure in figures)
    assert f"{sum(figures[1:]) / 2:.4f} ± {abs(figures[1] - figures[2]) / 2**0.5:.4f}" in out
    assert [one["steps"] for one in content] == [20, 20, 20]
    assert content[0]["bytes"] == 20 * 8 * 32
    assert [point["step"] for point in content[0]["curve"]] == [5, 10, 15, 20]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_runs_on_different_texts_do_not_compare(trained, tmp_path):
    runs = [trained / name for name in ("dense", "sparse0")]
    assert "different data" not in run("compare", *runs).stdout
    for name in ("config.json", "log.jsonl"):
        (tmp_path / name).write_bytes((trained / "sparse0" / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["task"]["text"]["sha256"] = "0" * 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "these runs have different data" in " ".join(run("compare", trained / "dense", tmp_path).stdout.split())


def test_unfinished_runs_are_compared(trained, tmp_path):
    for name in ("config.json", "log.jsonl"):
        (tmp_path / name).write_bytes((trained / "dense" / name).read_bytes())
    with open(tmp_path / "log.jsonl", "r+b") as log:
        log.truncate(500)
    assert "of 20" in run("compare", tmp_path, trained / "dense").stdout
    (tmp_path / "log.jsonl").write_bytes(b"")
    run("compare", tmp_path, trained / "dense", "--json", tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text())["runs"][0]["held_out"] is None


def test_ignored_options_do_not_distinguish_runs(trained):
    dense, sparse = (compare.read(trained / name) for name in ("dense", "sparse0"))
    other = compare.read(trained / "dense")
    other.config["task"]["model"] |= {"m": 5, "depth": 2, "seed": 9}
    assert [len(group.runs) for group in compare.groups([dense, sparse, other])] == [2, 1]
    sparse_too = compare.read(trained / "sparse1")
    sparse_too.config["task"]["model"]["m"] = 5
    grouped = compare.groups([sparse, sparse_too, compare.read(trained / "sparse1")])
    assert [group.label for group in grouped] == ["m 1", "m 5"]


def test_means_leave_out_runs_that_are_behind_and_copies(trained, tmp_path):
    whole = [trained / "sparse0", trained / "sparse1"]
    expected = compare.groups([compare.read(each) for each in whole])[0].held_out
    behind, copy = tmp_path / "behind", tmp_path / "copy"
    for source, target in zip(whole, (behind, copy), strict=True):
        shutil.copytree(source, target)
    (behind / "result.json").unlink()
    config = json.loads((behind / "config.json").read_text())
    config["settings"]["seed"] = 7
    (behind / "config.json").write_text(json.dumps(config))
    lines = (behind / "log.jsonl").read_text().splitlines(keepends=True)
    evaluated = [nth for nth, line in enumerate(lines) if "held_out" in line]
    (behind / "log.jsonl").write_text("".join(lines[: evaluated[-1]]))
    (group,) = compare.groups([compare.read(each) for each in (*whole, behind, copy)])
    assert len(group.runs) == 4
    assert len(group.comparable) == 2
    assert group.held_out == expected
    said = run("compare", *whole, behind, copy).stdout
    assert "2 of 4" in said
    assert "means leave out runs that lag behind" in said
    assert "leave out" not in run("compare", *whole).stdout


def test_a_run_is_not_compared_with_itself(trained):
    said = error("compare", trained / "dense", trained / "sparse0" / ".." / "dense")
    assert "runs: expected each once" in said


def test_a_short_run_has_points_for_a_curve(book, tmp_path):
    train(book, tmp_path / "run", "--steps", 20)
    assert [point["step"] for point in compare.read(tmp_path / "run").evaluations] == list(range(2, 21, 2))


def test_mistakes_about_runs(trained, tmp_path):
    assert "run: expected a folder with a run's config.json" in error("compare", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "expected a run's, text" in error("compare", tmp_path)
    pytest.importorskip("matplotlib")
    assert "out: expected a PNG file to write" in error("compare", trained / "dense", "--out", "/no/such/folder/c.png")
