"""Pruning runs: a method in the trainer, the truly sparse result, and the experiments."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse import BlockSparseError, checkpoint
from blocksparse.nn.module import BlockSparseModule
from blocksparse_lab import experiments
from blocksparse_lab.data import text
from blocksparse_lab.data.synthetic import Synthetic
from blocksparse_lab.experiments import inference, pruned, pruning
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
from blocksparse_lab.recipes import charlm, language_model
from blocksparse_lab.recipes.classify import ClassifyTask
from blocksparse_lab.recipes.prune import FIXED, METHODS, PruneTask, Pruning, load_finished
from blocksparse_lab.training.trainer import Settings, Trainer
from command import output
from test_data_tables import write_points
from test_trainer import Killed, assert_same

STRENGTHS = {"threshold": 0.54, "group lasso": 7.0, "l0": 1e-4}
CASES = [*METHODS, "glp"]
KINDS = ["mlp", "lstm"]
STEPS = 18
SETTINGS = Settings(steps=STEPS, learning_rate=0.01, warmup=2, log_every=0, eval_every=0, save_every=0)

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def pruning_of(case, **other):
    method = "threshold" if case == "glp" else case
    density = None if method in STRENGTHS else 0.25
    other |= {"search": 0} if method == FIXED else {}
    return Pruning(method, density, STRENGTHS.get(method, 0.0), 1e-4 if case == "glp" else 0.0, block_size=4, **other)


def inner(kind):
    if kind == "lstm":
        model = CharLM(CharLMConfig(width=16, embedding=8, seed=3))
        return charlm.CharLMTask(model, text.split(text.python_topics()[:3000], 8), batch=4, seq=8, evaluated=100)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(20, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2))
    return ClassifyTask(net, Synthetic(features=20, rows=64, tested=40), epochs=3, batch=8, about={"net": "tiny"})


def trainer(kind, case, run, search=2 / 3, **settings):
    skip = ("2",) if kind == "mlp" else ("recurrent.weight_ih_l0",)
    task = inner(kind)
    q = bs.sparsity.percentiles(task.model) if case in ("threshold", "glp") else None
    pruning = pruning_of(case, skip=skip, search=search)
    made = Trainer(PruneTask(task, pruning, STEPS, q=q), run, replace(SETTINGS, **settings))
    if case == "l0":  # so few steps close no gate
        generator = torch.Generator().manual_seed(5)
        for log_alpha in made.task.method.parameters():
            log_alpha.data.uniform_(-4, 2, generator=generator)
    return made


def outputs(task):
    """Return outputs of the trainer's dense, gated or sparse model."""
    with torch.no_grad():
        task.model.eval()
        if isinstance(task.task, charlm.CharLMTask):
            return task.model(torch.arange(60).view(12, 5))[0]
        return task.model(torch.linspace(-2, 2, 200).view(10, 20))


def test_fixed_blocks_depend_on_the_seed_and_scale_with_their_inputs():
    layouts = {}
    for seed in (0, 1):
        task = inner("mlp")
        dense = task.model[0].weight.detach().clone()
        pruning = Pruning(FIXED, 0.25, block_size=4, skip=("2",), search=0)
        made = PruneTask(task, pruning, STEPS, seed)
        made.attach(torch.optim.SGD(task.model.parameters()), {})
        made.before_step(0)
        assert made.sparse
        assert made.pruning.about()["search"] == 0
        layer = task.model[0]
        layouts[seed] = layer.layout
        assert layer.layout.nnz == round(0.25 * 6 * 5)
        kept = dense * layer.layout.mask().repeat_interleave(4, 0).repeat_interleave(4, 1)
        torch.testing.assert_close(layer.weight, kept / layer.layout.density**0.5)
    assert layouts[0] != layouts[1]
    with pytest.raises(BlockSparseError, match="search: expected 0 for fixed"):
        Pruning(FIXED, 0.25)


@pytest.mark.parametrize("search", [2 / 3, 1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_truly_sparse(kind, case, search, tmp_path):
    run = trainer(kind, case, tmp_path / "run", search)
    result = run.train()
    before = outputs(run.task)
    layouts = run.task.method.layouts()
    assert 0.01 < run.task.method.density < 0.98, "the test is about something"
    assert run.task.sparse == (search < 1 or case == FIXED)
    again = trainer(kind, case, tmp_path / "run", search)
    model = load_finished(again)
    assert not model.training
    sparse = {name: module.layout for name, module in model.named_modules() if isinstance(module, BlockSparseModule)}
    assert sorted(layout.nnz for layout in sparse.values()) == sorted(layout.nnz for layout in layouts.values())
    torch.testing.assert_close(outputs(again.task), before, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert again.task.evaluate(model) == pytest.approx(result["held_out"], rel=1e-4)
    if case in ("one-shot", "gradual", "movement"):
        for layout in layouts.values():
            assert abs(layout.nnz - 0.25 * np.prod(layout.grid)) <= 0.5


@pytest.mark.parametrize("at", [pytest.param(5, marks=pytest.mark.full), 12, pytest.param(15, marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_ends_with_the_same_bits(case, at, tmp_path):
    kind = "lstm" if case in ("l0", "gradual") else "mlp"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trainer(kind, case, whole, save_every=at).train()
    stopped = trainer(kind, case, parts, save_every=at)
    loss = stopped.task.loss

    def until(step):
        if step == at + 2:
            raise Killed
        return loss(step)

    stopped.task.loss = until
    with pytest.raises(Killed):
        stopped.train()
    assert checkpoint.load(parts / "last.safetensors")[1]["step"] == at
    trainer(kind, case, parts, save_every=at).train()
    assert_same(whole, parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_steps_after_the_search_are_sparse(kind, case, tmp_path):
    run = trainer(kind, case, tmp_path)
    task, seen, search = run.task, [], 0 if case == FIXED else 12
    loss = task.loss

    def watched(step):
        sparse = [m for m in run.model.modules() if isinstance(m, BlockSparseModule)]
        assert bool(sparse) == task.sparse == (step >= search)
        assert {id(p) for p in run.model.parameters()} == {id(p) for p in run.parameters.values()}
        assert {id(p) for group in run.optimizer.param_groups for p in group["params"]} >= {
            id(p) for p in run.model.parameters()
        }
        seen.append([m.layout for m in sparse])
        return loss(step)

    task.loss = watched
    run.train()
    assert task.search == search
    assert all(layouts == seen[search] for layouts in seen[search:])
    stored = sum(blocks.size * task.method.layouts()[name].nnz for name, blocks in task.method.blocks.items())
    kept = checkpoint.load(run.path)[0]
    moments = [tensor.numel() for name, tensor in kept.items() if name.endswith("values.exp_avg")]
    assert sum(moments) == stored, "the optimizer keeps nothing of what is left out"


def test_gates_have_a_rate_of_their_own(tmp_path):
    run = trainer("mlp", "l0", tmp_path, search=1)
    run.train()
    groups = run.optimizer.param_groups
    assert groups[-1]["lr"] == pytest.approx(10 * groups[0]["lr"])
    assert groups[-1]["params"] == run.task.method.parameters()
    assert any("log_alpha" in name for name in checkpoint.load(run.path)[0] if name.startswith("optimizer."))


def test_dense_runs_stay_dense(tmp_path):
    task = inner("mlp")
    run = Trainer(task, tmp_path, SETTINGS)
    run.train()
    model = load_finished(Trainer(inner("mlp"), tmp_path, SETTINGS))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), task.model.parameters(), strict=True))


def test_only_effective_settings_are_described():
    assert "density" not in Pruning("l0", strength=1.0).about()
    assert Pruning("l0", 0.5, strength=1.0).about()["density"] == 0.5
    assert "density" not in Pruning("threshold", 0.5, strength=1.0).about()
    assert "strength" not in Pruning("gradual", 0.1).about()
    assert Pruning("threshold", penalty=0.1).about()["penalty"] == 0.1
    assert "penalty" not in Pruning("group lasso").about()
    assert "times" not in Pruning("gradual", 0.1).about()
    assert Pruning("gradual", 0.1, times=2).about()["times"] == 2


def test_bad_input(tmp_path):
    with pytest.raises(BlockSparseError, match=r"method: expected one of one-shot, gradual, .*, got 'none'"):
        Pruning("none")
    with pytest.raises(BlockSparseError, match="search: expected a number above 0 and at most 1, got 0"):
        Pruning("l0", search=0)
    with pytest.raises(BlockSparseError, match="times: expected an int, 1 or more, got 0"):
        Pruning("gradual", 0.1, times=0)
    with pytest.raises(BlockSparseError, match="density: expected a number for movement, got None"):
        Pruning("movement")
    with pytest.raises(BlockSparseError, match="ema: expected 0 where a model is pruned"):
        trainer("mlp", "gradual", tmp_path, ema=0.9)
    with pytest.raises(BlockSparseError, match="checkpoint: expected a file"):
        load_finished(trainer("mlp", "gradual", tmp_path / "none"))
    with pytest.raises(BlockSparseError, match="q: expected percentiles of a trained dense model, for threshold"):
        PruneTask(inner("mlp"), Pruning("threshold"), STEPS)
    begun = trainer("mlp", "gradual", tmp_path / "begun")
    with pytest.raises(BlockSparseError, match=r"finish\(\) called after 0 of 12 steps"):
        begun.task.finish()


# -- experiments -------------------------------------------------------------------------------------------------------


@pytest.fixture
def points(tmp_path):
    return write_points(tmp_path / "points.csv")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(inference, "SECONDS", 0.02)


def table_of(markdown):
    lines = [line for line in markdown.split("\n\n")[3].splitlines() if not line.startswith("|---")]
    head, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


@pytest.mark.filterwarnings("ignore:sparsify. some layers stay as they are:blocksparse.SparsityWarning")
@pytest.mark.filterwarnings("ignore:.* pruned no block:blocksparse.SparsityWarning")
def test_nets_from_nothing_to_the_report(points, quick, monkeypatch, tmp_path):
    small = {"block_size": 4, "skip": ("layers.2",)}
    experiment = pruned.ClassifierPruning(
        about="Tiny nets",
        data=points,
        hidden=(64, 64),
        epochs=3,
        batch=16,
        contenders={
            "dense": pruning.Dense(),
            "dense x2": pruning.Dense(times=2),
            "gradual": Pruning("gradual", 0.25, search=1 / 3, times=2, **small),
            "l0": Pruning("l0", strength=1e-4, **small),
        },
        seeds=(0, 1),
        pruned=(0.5, 0.75),
        skip=("layers.2",),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    runs, out = tmp_path / "runs", tmp_path / "out"
    # Without the dense run, nothing is compared.
    output("experiment", "tiny", "--runs", runs, "--out", out, "--only", "gradual", "--seed", 0)
    assert list(table_of((out / "tiny.md").read_text())) == ["gradual"]
    assert "times as fast" not in (out / "tiny.md").read_text()
    assert (out / "tiny.png").read_bytes().startswith(b"\x89PNG")
    said = output("experiment", "tiny", "--runs", runs, "--out", out)
    assert said.count("this run is finished") == 1
    table, found = table_of((out / "tiny.md").read_text()), experiments.load(out / "tiny.json").runs
    assert list(table) == list(found) == ["dense", "dense x2", "gradual", "l0"]
    for name, of in found.items():
        assert [run.settings["seed"] for run in of] == [0, 1]
        facts = [run.config["facts"] for run in of]
        accuracy = [100 - one["sparse"]["held_out"] for one in facts]
        assert table[name]["test accuracy, %"] == f"{np.mean(accuracy):,.3f} ± {np.std(accuracy, ddof=1):,.3f}"
        for run, one in zip(of, facts, strict=True):
            assert one["sparse"]["held_out"] == pytest.approx(run.held_out, rel=1e-5)
            assert one["inference"]["speed_up"] > 0
            layers = {layer.replace("values", "weight") for layer in one["inference"]["layers"]}
            assert layers == (set() if name.startswith("dense") else {"layers.0.weight", "layers.1.weight"})
            assert ("pruned" in one["sparse"]) == (name == "dense"), "what the others are measured against"
    assert table["gradual"]["density"] == "0.250 ± 0.000"
    steps = {name: int(row["steps"]) for name, row in table.items()}
    assert steps == {name: steps["dense"] * times for name, times in zip(table, (1, 2, 2, 1), strict=True)}
    assert {name: row["dense steps, %"] for name, row in table.items()} == {
        "dense": "100",
        "dense x2": "100",
        "gradual": "33",
        "l0": "67",
    }
    assert len(found["dense"][0].config["facts"]["sparse"]["pruned"]) == 2
    markdown = (out / "tiny.md").read_text()
    assert "pruned in one shot after its training" in markdown
    assert "| gradual | 0.250, " in markdown
    assert (out / "tiny.png").read_bytes().startswith(b"\x89PNG")
    # Times measured at another time are not shown next to the dense net's.
    results = experiments.load(out / "tiny.json")
    elsewhere = [
        replace(run, config=run.config | {"facts": run.facts | {"raced on": run.facts["raced on"] | {"load": [9.0]}}})
        for run in results.runs["gradual"]
    ]
    first, *_ = experiments.find("tiny").tables(replace(results, runs=results.runs | {"gradual": elsewhere}))
    milliseconds = {row[0]: row[first.head.index("ms of inference, 64 at once")] for row in first.rows}
    assert {name for name, cell in milliseconds.items() if cell == "-"} == {"gradual"}


def test_a_method_that_leaves_nothing_is_reported(points, quick, monkeypatch, tmp_path):
    small = {"block_size": 4, "skip": ("layers.2",)}
    experiment = pruned.ClassifierPruning(
        about="Tiny nets",
        data=points,
        hidden=(8, 8),
        epochs=2,
        batch=16,
        contenders={"dense": pruning.Dense(), "group lasso": Pruning("group lasso", strength=1e4, **small)},
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    for _ in range(2):
        output("experiment", "tiny", "--runs", tmp_path / "runs", "--out", tmp_path)
    markdown = (tmp_path / "tiny.md").read_text()
    assert list(table_of(markdown)) == ["dense"]
    assert "| group lasso-0 | layers.0.weight would keep no block: use a lower strength" in markdown


def test_inputs(points, quick, monkeypatch, tmp_path):
    columns = {"block_size": (8, 1), "skip": ("layers.1", "layers.2")}
    experiment = pruned.ClassifierPruning(
        about="Tiny inputs",
        seeds=(0,),
        data=points,
        hidden=(8, 8),
        epochs=2,
        batch=16,
        contenders={"dense": pruning.Dense(), "half": Pruning("gradual", 0.5, **columns)},
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    output("experiment", "tiny", "--runs", tmp_path / "runs", "--out", tmp_path)
    table = table_of((tmp_path / "tiny.md").read_text())
    assert {name: row["inputs used"] for name, row in table.items()} == {"dense": "all", "half": "4"}


@pytest.mark.filterwarnings("ignore:sparsify. some layers stay as they are:blocksparse.SparsityWarning")
@pytest.mark.filterwarnings("ignore:.* pruned no block:blocksparse.SparsityWarning")
def test_language_models_from_nothing_to_the_report(quick, monkeypatch, tmp_path):
    small = {"block_size": 4, "skip": ("recurrent.weight_ih_l0",)}
    threshold = Pruning("threshold", strength=0.2, **small)
    experiment = pruned.LanguagePruning(
        about="Tiny LSTMs",
        seeds=(0,),
        text="python",
        trained=charlm.CharLMSettings(
            steps=6,
            learning_rate=0.01,
            warmup=1,
            eval_every=3,
            batch=4,
            seq=8,
            evaluated=200,
            model=CharLMConfig(width=16, embedding=8),
        ),
        seq=8,
        contenders={"dense": pruning.Dense(), "gradual": Pruning("gradual", 0.25, **small), "threshold": threshold},
        pruned=(0.5,),
        skip=("recurrent.weight_ih_l0",),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    with pytest.raises(BlockSparseError, match="threshold: expected the finished dense run of this seed"):
        list(experiment.trainers(tmp_path / "runs" / "tiny", only=["threshold"]))
    output("experiment", "tiny", "--runs", tmp_path / "runs", "--out", tmp_path)
    table, found = (
        table_of((tmp_path / "tiny.md").read_text()),
        experiments.load(tmp_path / "tiny.json").runs,
    )
    bits = {name: of[0].config["facts"]["sparse"]["held_out"] for name, of in found.items()}
    assert table["gradual"]["bits per character, held out"] == f"{bits['gradual']:.3f}"
    assert table["gradual"]["against dense, %"] == f"{100 * (bits['gradual'] / bits['dense'] - 1):+.1f}"
    assert bits["gradual"] == pytest.approx(found["gradual"][0].held_out, rel=1e-4)
    dense = charlm.load(tmp_path / "runs" / "tiny" / "dense-0" / pruning.MODEL)
    assert found["threshold"][0].task["pruning"]["q"] == pytest.approx(bs.sparsity.percentiles(dense), rel=1e-5)
    # The saved model loads like any language model.
    model = charlm.load(tmp_path / "runs" / "tiny" / "gradual-0" / pruning.MODEL)
    assert b"".join(language_model.sample(model, b"The ", 5))


@pytest.mark.parametrize("name", pruned.EXPERIMENTS)
def test_definitions(name):
    experiment = experiments.find(name)
    assert next(iter(experiment.contenders.items())) == ("dense", pruning.Dense())
    assert len(set(map(str, experiment.contenders.values()))) == len(experiment.contenders)
    for title, of in experiment.contenders.items():
        longer = f" x{of.times}" * (of.times > 1) + f", rate x{of.rate:g}" * (of.rate != 1)
        longer += ", dense outlet" * (isinstance(of, Pruning) and "outlet" in of.skip)
        assert title.endswith(longer)
        name = title.removesuffix(longer)
        if isinstance(of, Pruning):
            by = of.strength if of.density is None else of.density
            assert by > 0
            assert name in (of.method, f"{of.method}-{by:g}", "threshold-glp")
        else:
            assert name == "dense"
