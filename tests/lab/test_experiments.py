"""Experiments: runs, probes and reports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

import blocksparse as bs
from blocksparse import checkpoint
from blocksparse_lab import experiments
from blocksparse_lab.experiments import language, queue, report, small_worlds
from blocksparse_lab.experiments.equal_seconds import EqualSeconds
from blocksparse_lab.experiments.experiment import run_folders
from blocksparse_lab.experiments.language import LanguageContender, LanguageExperiment
from blocksparse_lab.models.char_lm import CharLMConfig, multiply_adds, parameter_count
from blocksparse_lab.recipes.charlm import CharLMSettings
from blocksparse_lab.training.compare import Run
from command import output, run
from experiment_parts import RESULTS, attempt, cells, command, refused


@pytest.fixture
def tiny(monkeypatch):
    """An experiment on two language models."""
    experiment = LanguageExperiment(
        about="Two tiny models",
        text="python",
        contenders={
            "dense": LanguageContender(CharLMConfig(width=16, embedding=8), 0.01),
            "wide": LanguageContender(
                CharLMConfig(width=32, embedding=8, pattern="random", block_size=8, density=0.3), 0.01
            ),
        },
        settings=CharLMSettings(steps=3, warmup=1, eval_every=2, batch=4, seq=8, evaluated=200),
        seq=8,
        seeds=(0, 1),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    return experiment


def test_from_nothing_to_the_report(tiny, tmp_path, monkeypatch):
    path = tmp_path / "opinions.csv"
    lines = [f"{'good' if i % 2 else 'bad'} as number {i},{i % 2}" for i in range(40)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", replace(tiny, reviews={str(path): None}))
    # Committed results have all states.
    monkeypatch.setattr(language, "OTHER_STATES", {"mean": language.OTHER_STATES["mean"]})
    command(tmp_path, "--seed", "0")
    assert sorted(path.name for path in (tmp_path / "runs" / "tiny").iterdir()) == ["dense-0", "wide-0"]
    said, runs, table = command(tmp_path)
    assert said.count("this run is finished") == 2
    assert {name: [run.task["model"]["seed"] for run in of] for name, of in runs.items()} == {
        "dense": [0, 1],
        "wide": [0, 1],
    }
    probes = [probe["probe"] for run in runs["wide"] for probe in run.config["facts"]["probes"].values()]
    assert all(0 <= probe["test"] <= 1 and "coefficients" not in probe for probe in probes)
    assert cells(table, "hidden units") == ["16", "32"]
    assert "± " in table
    assert "features used" in table
    kept = cells(table, "fraction of cells that still differ by half, 64 bytes after two texts became equal")
    assert all(0 <= float(cell.split()[0]) <= 1 for cell in kept)
    wrong = f"{path}, error of the probe, mean hidden state, standardized"
    for row in (wrong, f"{path}, error of words alone (TF-IDF)"):
        assert all(0 <= float(cell.split()[0]) <= 1 for cell in cells(table, row))
    (tmp_path / "out" / "tiny.md").unlink()
    _, _, again = command(tmp_path, "--redraw")
    assert again == table


def test_all_read_the_same_text_in_the_same_order(tiny, tmp_path):
    chunks = [trainer.task.inputs(2)[0] for trainer in tiny.trainers(tmp_path)]
    assert len(chunks) == 4
    assert all((chunk == chunks[0]).all() for chunk in chunks)
    assert [trainer.run.name for trainer in tiny.trainers(tmp_path, only=["wide"], seeds=[1])] == ["wide-1"]


def test_the_queue_trains_what_is_missing(tiny, tmp_path, at_work):
    command(tmp_path, "--only", "dense", "--seed", "1")
    said, runs, _ = command(tmp_path, "--cores", "2", "--seed", "1", "--seed", "0", "--only", "dense")
    assert "1 runs are missing, some 0.2 hours of a core; 2 at a time" in said
    assert "tiny dense-0: " in said
    assert {name: len(of) for name, of in runs.items()} == {"dense": 2}
    assert {run.result["machine"]["threads"] for of in runs.values() for run in of[:1]} == {1}
    (tmp_path / "out" / "tiny.json").unlink()
    said, again, _ = command(tmp_path, "--cores", "2", "--only", "dense")
    assert "0 runs are missing" in said
    assert {name: len(of) for name, of in again.items()} == {"dense": 2}


def test_finished_runs_of_something_else_are_refused(tiny, tmp_path, at_work):
    command(tmp_path, "--only", "dense")
    runs = tmp_path / "runs" / "tiny"

    def said_of(*arguments):
        said = refused("tiny", "--runs", tmp_path / "runs", "--out", tmp_path / "new", *arguments)
        assert not list((tmp_path / "new").glob("*"))
        return said

    log = runs / "dense-1" / "log.jsonl"
    whole = log.read_text()
    log.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    assert "log.jsonl, held_out: expected" in (said := said_of("--only", "dense"))
    assert "as in result.json; delete the folder to train the run again" in said
    log.write_text(whole)
    shutil.copytree(runs / "dense-0", runs / "wide-0")
    assert "wide-0" in said_of("--cores", "2")
    shutil.rmtree(runs / "wide-0")
    shutil.copytree(runs / "dense-0", runs / "dense-2")
    assert "seed: expected 2" in said_of("--only", "dense", "--seed", "1")


def test_without_a_name_they_are_listed_and_what_wants_a_gpu_is_left_out(tiny, tmp_path, at_work, monkeypatch):
    listed = output("experiment")
    assert "tiny (0.7 hours of a core): Two tiny models." in listed
    assert "wikipedia-large (needs a GPU):" in listed
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    experiments.EXPERIMENTS["tiny"] = replace(tiny, minutes=None)
    done = attempt(tmp_path, "--cores", "1")
    assert "4 runs are left out because they need a GPU" in done.output
    assert "0 runs are missing" in done.output


def test_a_queue_that_trains_nothing_fails(tiny, tmp_path, at_work):
    experiments.EXPERIMENTS["tiny"] = replace(tiny, text="nothing", seeds=(0,))
    done = attempt(tmp_path, "--cores", "2", code=1)
    assert "2 of 2 runs are left" in done.output
    assert not list((tmp_path / "out").iterdir())


def test_a_queue_with_a_run_that_failed_fails_and_keeps_the_others(tiny, tmp_path, at_work):
    wide = tiny.contenders["wide"]
    broken = replace(wide, config=replace(wide.config, pattern="watts_strogatz", neighbors=4096))
    experiments.EXPERIMENTS["tiny"] = replace(tiny, contenders=tiny.contenders | {"wide": broken}, seeds=(0,))
    done = attempt(tmp_path, "--cores", "2", code=1)
    assert "1 of 2 runs are left" in done.output
    assert list(experiments.load(tmp_path / "out" / "tiny.json").runs) == ["dense"]


def test_a_seed_that_is_given_twice_is_one_run_and_one_report_that_is_refused_leaves_the_others(
    tiny, tmp_path, at_work, monkeypatch
):
    assert len(queue.missing({"tiny": tiny}, tmp_path, only=["dense"], seeds=[0, 0])) == 1
    monkeypatch.setitem(experiments.EXPERIMENTS, "second", replace(tiny, seeds=(0,)))
    written = experiments.write

    def write(name, *arguments):
        if name == "tiny":
            raise bs.BlockSparseError("refused")
        return written(name, *arguments)

    monkeypatch.setattr(experiments, "write", write)
    chosen = ["--only", "dense", "--seed", "0", "--cores", "2"]
    assert "refused" in attempt(tmp_path, *chosen, names=("tiny", "second"), code=1).output
    assert (tmp_path / "out" / "second.json").exists()


def test_the_queue_ends_after_a_step(tiny, tmp_path, at_work):
    long = replace(tiny, settings=replace(tiny.settings, steps=10**6), seeds=(0,))
    refused = replace(tiny, text="nothing", seeds=(0,))
    jobs = queue.missing({"long": long, "refused": refused}, tmp_path, only=["dense"])
    caught, heard = [], {}
    for job, news in queue.train(jobs, cores=2, caught=caught):
        heard.setdefault(job.name, []).append(news)
        if len(heard.get("long", ())) > 1 and len(heard.get("refused", ())) > 1:
            caught.append(2)
    assert [news.failed for news in heard["refused"]] == [False, True]
    assert "nothing" in heard["refused"][1].text
    step = checkpoint.about(tmp_path / "long" / "dense-0" / "last.safetensors")["step"]
    assert step >= heard["long"][-1].done > 0
    assert [job.run.name for job in queue.missing({"long": long}, tmp_path, only=["dense"])] == ["dense-0"]
    assert list(queue.train(jobs, cores=1, seconds=0)) == []


def test_the_queue_waits_for_what_a_run_needs(tmp_path):
    of = experiments.find("prune-charlm")
    jobs = queue.missing({"prune-charlm": of}, tmp_path, only=["dense", "threshold-1"], seeds=[0])
    assert [job.is_ready() for job in jobs] == [True, False]
    ((_, news),) = queue.train(jobs[1:], cores=1)
    assert news.failed
    assert "dense-0, which is not finished" in news.text
    for bad in (lambda: list(queue.train(jobs, 0)), lambda: queue.missing({}, tmp_path, only=["none"])):
        with pytest.raises(bs.BlockSparseError, match="expected"):
            bad()


def test_a_report_loses_no_runs(tiny, tmp_path):
    command(tmp_path, "--seed", "0", "--seed", "1", "--only", "dense")
    fresh = ["tiny", "--runs", tmp_path / "fresh", "--out", tmp_path / "out"]
    said = refused(*fresh, "--seed", "1")
    assert "out: expected a folder without another report of tiny, or --add" in said
    assert "dense, seed 0 too" in said
    assert not (tmp_path / "fresh").exists(), "nothing was trained"
    # Another seed is one more run; with --add, other runs of the report remain.
    before = experiments.load(tmp_path / "out" / "tiny.json").runs
    output("experiment", *fresh, "--seed", "7", "--add")
    after = experiments.load(tmp_path / "out" / "tiny.json").runs
    seeds = {name: [run.settings["seed"] for run in runs] for name, runs in after.items()}
    assert seeds == {"dense": [0, 1, 7], "wide": [7]}
    assert [run.evaluations for run in after["dense"][:2]] == [run.evaluations for run in before["dense"]]


def test_mistakes_are_said_before_the_training(tiny, tmp_path):
    place = ["--runs", tmp_path / "runs", "--out", tmp_path / "out"]
    assert "seed: expected an int, 0 or more and below 4294967296, got -1" in refused("tiny", *place, "--seed", "-1")
    assert "got 99999999999999999999" in refused("tiny", *place, "--seed", "99999999999999999999", "--cores", "1")
    assert "expected some of 'dense', 'wide', got 'deep'" in refused("tiny", *place, "--only", "deep")
    assert "cores: expected an int, 1 or more, got 0" in refused("tiny", *place, "--cores", "0")
    assert "--redraw: expected no --add, --only" in refused("tiny", *place, "--redraw", "--seed", "0")
    (tmp_path / "file").touch()
    assert "out: expected a folder to write to" in refused(
        "tiny", "--runs", tmp_path / "runs", "--out", tmp_path / "file"
    )
    assert not (tmp_path / "runs").exists()


def test_only_folders_that_end_in_a_seed_are_runs(tmp_path):
    for name in ("dense-10", "dense-9", "dense-00", "dense-\u00b2", "dense-1a", "dense", "wide-1"):
        (tmp_path / name).mkdir()
    assert [run.name for run in run_folders(tmp_path, "dense")] == ["dense-9", "dense-10"]


def test_what_is_damaged_is_named_and_nothing_is_lost(tiny, tmp_path):
    command(tmp_path, "--only", "dense", "--seed", "0", "--seed", "0")
    run, kept = tmp_path / "runs" / "tiny" / "dense-0", tmp_path / "out" / "tiny.json"
    log = run / "log.jsonl"
    before = log.read_bytes()
    log.write_bytes(b"#" + before[1:])
    place = ["tiny", "--runs", tmp_path / "runs", "--out", tmp_path / "out", "--only", "dense", "--seed", "0"]
    command(tmp_path, "--only", "dense", "--seed", "0")
    assert log.read_bytes() == b"#" + before[1:]
    log.write_bytes(before)
    whole = kept.read_bytes()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({key: value for key, value in result.items() if key != "machine"}))
    assert "result.json, machine: expected blocksparse, commit, cpu, isa, torch, got None" in refused(*place)
    assert kept.read_bytes() == whole
    kept.write_text('{"all": {}, "each": {}, "runs": {}}')
    assert "expected the report of tiny, got one without runs" in refused(*place[:5], "--redraw")


def test_what_was_found_of_a_shorter_run_goes_when_it_is_extended(tiny, tmp_path, monkeypatch):
    command(tmp_path, "--only", "dense", "--seed", "0")
    longer = replace(tiny, settings=replace(tiny.settings, steps=6))
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", longer)
    old = tmp_path / "runs" / "tiny" / "dense-0" / "old.json"
    old.write_text("{}")
    command(tmp_path, "--only", "dense", "--seed", "0")
    assert not old.exists()
    assert old.with_suffix(".json.old").read_text() == "{}"  # the old result is kept aside
    old.write_text("{}")
    command(tmp_path, "--only", "dense", "--seed", "0")
    assert old.exists()


def test_bad_input(tiny, tmp_path):
    with pytest.raises(bs.BlockSparseError, match="experiment: expected one of wikipedia-small"):
        experiments.find("nothing")
    with pytest.raises(bs.BlockSparseError, match="only: expected some of 'dense', 'wide', got 'narrow'"):
        list(tiny.trainers(tmp_path, only=["narrow"]))
    with pytest.raises(bs.BlockSparseError, match="runs: expected finished runs of the experiment"):
        experiments.write("tiny", tiny, tmp_path, tmp_path)
    with pytest.raises(bs.BlockSparseError, match=r"text: expected|wikipedia"):
        list(replace(tiny, text="wikipedia").trainers(tmp_path))
    (tmp_path / "tiny.json").write_text('{"runs": {"dense": [1]}}')
    with pytest.raises(bs.BlockSparseError, match=r"tiny\.json: expected the report of an experiment"):
        experiments.draw("tiny", tiny, tmp_path)
    (tmp_path / "wikipedia-cell-strided.json").write_text((RESULTS / "wikipedia-cell.json").read_text())
    with pytest.raises(bs.BlockSparseError, match="expected the report of wikipedia-cell-strided, got wikipedia-cell"):
        experiments.draw("wikipedia-cell-strided", experiments.find("wikipedia-cell-strided"), tmp_path)
    with pytest.raises(bs.BlockSparseError, match="expected the report of wikipedia-cell-strided, got wikipedia-cell"):
        report.existing_runs("wikipedia-cell-strided", tmp_path)  # `--add` would read it
    content = json.loads((RESULTS / "gpt-small.json").read_text()) | {"experiment": "tiny"}
    (tmp_path / "tiny.json").write_text(json.dumps(content))
    with pytest.raises(bs.BlockSparseError, match=r"expected the report of tiny, got runs of RigL, block-sparse"):
        experiments.draw("tiny", tiny, tmp_path)


@pytest.mark.parametrize("name", language.EXPERIMENTS)
def test_contenders_are_of_equal_size(name):
    dense, *others = (contender.config for contender in experiments.find(name).contenders.values())
    for other in (other for other in others if other != dense):  # a contender may appear at another rate
        assert other.width > dense.width
        # The wide model may be smaller by more than it may be larger: whole blocks, and the paper's sizes.
        for size in (parameter_count, multiply_adds):
            assert size(other) <= 1.2 * size(dense)


def test_widths_have_equal_parameters_and_are_compared_with_random_blocks_of_their_width(tmp_path, monkeypatch):
    experiment = experiments.find("small-worlds-widths")
    sizes = [parameter_count(contender.config) for contender in experiment.contenders.values()]
    assert max(sizes) < 1.1 * min(sizes)
    small = {
        f"{label}, {width}": LanguageContender(
            CharLMConfig(width=width, embedding=4, pattern=pattern, block_size=8, m=1, neighbors=2, density=0.4), 0.01
        )
        for width in (32, 64)
        for pattern, label in small_worlds.LAYOUTS.items()
    }
    settings = CharLMSettings(steps=2, warmup=1, batch=4, seq=8, evaluated=200)
    tiny = replace(experiment, text="python", contenders=small, settings=settings, seq=8, seeds=(0,))
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", tiny)
    _, runs, markdown = command(tmp_path)
    (header,) = [line for line in markdown.splitlines() if line.startswith("|  |")]
    column = [cell.strip() for cell in header.split("|")].index("bits per character, against random")
    for name, (made,) in runs.items():
        (line,) = [line for line in markdown.splitlines() if line.startswith(f"| {name} |")]
        random = runs[f"random, {made.task['model']['width']}"][0].held_out
        assert float(line.split("|")[column]) == pytest.approx(made.held_out - random, abs=6e-4)


def timed_run(seed, pace, figures, commit="a"):
    """A run that was evaluated every `pace` seconds."""
    log = [{"step": n + 1, "seconds": pace * (n + 1), "held_out": figure} for n, figure in enumerate(figures)]
    return Run(RESULTS, {"settings": {"seed": seed}}, log, {"machine": {"isa": "avx2", "commit": commit}})


def test_at_equal_seconds_the_slower_run_is_read_between_its_evaluations():
    runs = {
        "dense": [timed_run(seed, 1.0, [5.0, 4.0, 3.0, 2.0 + seed]) for seed in (0, 1, 2)],
        "slow": [timed_run(seed, 1.6, [5.0, 4.0, 3.0 + seed / 10, 1.0]) for seed in (0, 1, 2)],  # about 3.5 then
        "late": [timed_run(0, 5.0, [5.0, 4.0, 3.0, 1.0])],
        "few": [timed_run(0, 1.0, [5.0, 4.0, 3.0])],
        "other": [timed_run(0, 1.6, [5.0, 4.0, 3.0, 1.0], commit="b")],
    }
    column = EqualSeconds("at equal seconds", against="dense")
    paired = column.cells(dict.fromkeys(runs), runs)
    assert paired == ["-", "+0.550 ± 0.950 (p 0.42)", "-", "-", "-"]
    assert column.cells(dict.fromkeys(runs), runs, paired=False)[1].startswith("+0.550 ± 1.001 (p 0.44")
    points = EqualSeconds("at equal seconds", against="dense", figure=lambda error: 100 - error)
    assert points.cells(dict.fromkeys(runs), runs)[1].startswith("-0.550")


def test_equal_seconds_are_left_out_if_all_take_as_long():
    runs = {name: [timed_run(0, pace, [5.0, 4.0, 3.0, 2.0])] for name, pace in (("dense", 1.0), ("wide", 1.09))}
    assert EqualSeconds("", against="dense").cells(dict.fromkeys(runs), runs) is None
    assert EqualSeconds("", against="gone").cells(dict.fromkeys(runs), runs) is None


def test_seeds_of_no_experiment_are_named(tiny, tmp_path):
    folders = "--runs", tmp_path / "runs", "--out", tmp_path
    said = run("experiment", "tiny", "--only", "dense", "--seed", 9, *folders).output
    assert "tiny compares seeds 0, 1; trains 9 in addition" in " ".join(said.split())


def test_finished_runs_without_probes_are_not_done(tiny, tmp_path):
    for trainer in tiny.trainers(tmp_path / "runs" / "tiny", only=["dense"], seeds=[0]):
        trainer.train()
    jobs = queue.missing({"tiny": tiny}, tmp_path / "runs")
    assert ("dense", 0) in {(job.contender, job.seed) for job in jobs}


# -- the committed results ---------------------------------------------------------------------------------------------

COMMITTED = sorted(path for path in RESULTS.glob("*.json") if path.stem in experiments.EXPERIMENTS)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_tables_are_those_of_their_json(path, tmp_path, monkeypatch):
    (tmp_path / path.name).write_bytes(path.read_bytes())
    experiment = experiments.find(path.stem)
    monkeypatch.setattr(type(experiment), "picture", lambda *of: None)
    report.draw(path.stem, experiment, tmp_path)
    assert (tmp_path / f"{path.stem}.md").read_text() == path.with_suffix(".md").read_text()


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_table_can_have_runs_of_another_instruction_set(path):
    results = experiments.load(path)
    *_, last = results.runs.values()
    for of_last in last:
        of_last.result["machine"]["isa"] = "another"
    assert all(table.rows for table in experiments.find(path.stem).tables(results))


@pytest.mark.parametrize("name", ["prune-charlm", "sparse-madelon", "cifar10-pixels-small"])
def test_pictures_come_from_the_json_too(name, tmp_path):
    experiments.find(name).picture(tmp_path / "a.png", experiments.load(RESULTS / f"{name}.json"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_runs_are_of_clean_commits_that_are_here(path):
    machines = [run.result["machine"] for runs in experiments.load(path).runs.values() for run in runs]
    assert not any(machine["dirty"] for machine in machines)
    assert not re.search(
        r'"dirty": ?true|with changes', path.read_text()
    )  # also for earlier parts of a resumed run, and for later measurements
    git = ["git", "-C", str(RESULTS), "cat-file", "-e"]
    shallow = (RESULTS / "../../.git/shallow").exists()
    if shallow or subprocess.run([*git, "HEAD^{commit}"], capture_output=True).returncode:
        pytest.skip("no history here")
    for commit in {one for machine in machines for one in [machine["commit"], *machine.get("codes", [])]}:
        assert not subprocess.run([*git, f"{commit}^{{commit}}"], capture_output=True).returncode, commit


def test_the_committed_results_are_small():
    runs = [run for path in COMMITTED for of in experiments.load(path).runs.values() for run in of]
    assert sum(path.stat().st_size for path in COMMITTED) < 600 * len(runs)


def test_what_runs_share_is_written_once():
    records = [{"a": 1, "b": {"c": [seed], "d": {"e": 1}}, "f": {}} for seed in (0, 1)]
    common = report.shared(records)
    assert common == {"a": 1, "b": {"d": {"e": 1}}}
    assert [report.merged(common, report.without(record, common)) for record in records] == records


def test_the_help_lists_all():
    said = run("experiment", "--help").output
    for name in experiments.EXPERIMENTS:
        assert f"{name}:" in said
    assert json.dumps(said)


@pytest.mark.parametrize(
    ("machine", "kind"),
    [
        ({"isa": "avx2", "gpu": None}, "avx2"),
        ({"isa": None, "gpu": {"name": "NVIDIA H200"}}, "NVIDIA H200"),
        ({"isa": None}, "no compiled core"),
    ],
)
def test_a_report_names_what_its_runs_used(machine, kind):
    assert report._kind(machine) == kind
