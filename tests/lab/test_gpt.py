"""Byte-level transformers: causality, evaluation, checkpoints, runs and the experiment."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import blocksparse as bs
from blocksparse import BlockSparseError
from blocksparse_lab import experiments
from blocksparse_lab.data import text
from blocksparse_lab.experiments import transformers
from blocksparse_lab.experiments.transformers import TransformerContender, TransformerExperiment
from blocksparse_lab.models.gpt import GPT, GPTConfig, density, least_parameters, multiply_adds, parameter_count
from blocksparse_lab.recipes import gpt, language_model
from blocksparse_lab.recipes.gpt import GPTTask
from blocksparse_lab.recipes.prune import Pruning
from blocksparse_lab.training import compare
from blocksparse_lab.training.running_means import sync_means
from command import output, run

DENSE = GPTConfig(width=32, layers=2, heads=2, context=16)
SPARSE = replace(DENSE, density=0.3, block_size=8)
SETTINGS = gpt.GPTSettings(steps=6, learning_rate=0.01, warmup=2, eval_every=3, save_every=3, batch=4)

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def corpus(length=4000, held_out=0.1):
    return text.split(text.python_topics()[:length], 16, held_out=held_out)


def bytes_of(steps, batch=3, seed=0):
    return torch.randint(256, (steps, batch), generator=torch.Generator().manual_seed(seed))


# -- the model -----------------------------------------------------------------------------------------------------


def test_a_score_depends_on_the_places_of_the_bytes_before_it():
    model, said = GPT(DENSE), bytes_of(9)
    with torch.no_grad():
        turned = model(torch.cat([said[:8].flip(0), said[8:]]))[0]
        assert (turned[-1] - model(said)[0][-1]).abs().max() > 1e-4


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_a_score_depends_on_the_bytes_before_it_alone(config):
    model, said = GPT(config), bytes_of(16)
    with torch.no_grad():
        whole, _ = model(said)
        begun, before = model(said[:9])
        rest, seen = model(said[9:], before)
    torch.testing.assert_close(torch.cat([begun, rest]), whole)
    assert torch.equal(seen, said)
    with torch.no_grad():  # bytes beyond the context have no effect
        later, seen = model(bytes_of(4, seed=1), said)
        torch.testing.assert_close(later, model(torch.cat([said[4:], bytes_of(4, seed=1)]))[0][-4:])
    assert len(seen) == 16


def test_weights_depend_on_the_seed_alone():
    before = torch.get_rng_state()
    one, two, other = (GPT(replace(SPARSE, seed=seed)).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one if one[name].shape == other[name].shape)


NONE_ASKED = replace(SPARSE, width=64, density=0.0, layers=3)


def test_each_weight_has_blocks_in_all_rows_and_columns():
    for layer in GPT(NONE_ASKED).layers:
        for weight in (layer.queries_keys_values, layer.heads_out, layer.mlp[0], layer.mlp[2]):
            assert set(weight.layout.row_of_block) == set(range(weight.layout.grid[0]))
            assert set(weight.layout.col_of_block) == set(range(weight.layout.grid[1]))


@pytest.mark.parametrize("config", [DENSE, SPARSE, NONE_ASKED])
def test_numbers_of_a_model(config):
    model = GPT(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    assert least_parameters(config) <= parameter_count(config)
    stored = sum(weight.numel() for layer in model.layers for weight in layer.parameters() if weight.dim() > 1)
    assert density(config) == stored / (12 * config.layers * config.width**2)
    assert gpt.facts(config, "text")["density"] == density(config)
    weights = 12 * config.layers * config.width**2 * density(config)
    attention = config.layers * config.context * config.width
    assert multiply_adds(config) == pytest.approx(weights + attention + 256 * config.width, rel=0.05)


WRONG = [{"width": 0}, {"heads": 3}, {"density": 1.5}, {"density": 0.5, "block_size": 12}, {"method": "rigl"}]


@pytest.mark.parametrize("wrong", [*WRONG, {"method": "x"}, {"seed": -1}])
def test_invalid_configurations(wrong):
    with pytest.raises(BlockSparseError, match="expected"):
        replace(DENSE, **wrong)


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(3, 2), None, torch.zeros(17, 2, dtype=torch.long)])
def test_invalid_texts(wrong):
    with pytest.raises(BlockSparseError, match="text: expected"):
        GPT(DENSE)(wrong)


def test_bytes_before_are_of_as_many_texts():
    with pytest.raises(BlockSparseError, match=r"before: expected integer bytes \[steps, 3\]"):
        GPT(DENSE)(bytes_of(4), bytes_of(4, batch=2))


def test_a_model_without_room_is_refused_before_it_is_made(tmp_path):
    with pytest.raises(BlockSparseError, match="width 1,048,576, layers 2: expected a model that trains in"):
        gpt.network(replace(DENSE, width=2**20, heads=1))


# -- the task ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 9, 16, 17, 18, 25, 130])
@pytest.mark.parametrize("context", [1, 7, 16])
def test_an_evaluation_predicts_each_byte_once_from_half_a_context(length, context):
    model = GPT(replace(DENSE, context=context))
    data = corpus()
    held = data.held_out[:length].long()
    task = GPTTask(model, data, 10, 4, evaluated=length)
    step = max(1, context // 2)
    total = 0.0
    for nth in range(1, length):
        window = 0 if nth <= context else -(-(nth - context) // step)
        seen = held[window * step : nth]
        with torch.no_grad():
            logits, _ = model(seen.unsqueeze(1))
        total += float(F.cross_entropy(logits[-1].double(), held[nth : nth + 1]))
    with torch.no_grad():
        assert task.evaluate(model) == pytest.approx(total / (length - 1) / math.log(2), rel=1e-5)


def test_blocks_move_in_the_first_three_quarters_of_a_run_however_short(tmp_path):
    settings = replace(SETTINGS, steps=40, model=replace(SPARSE, method="rigl"))
    trainer = gpt.trainer(settings, corpus(), tmp_path)
    layouts = [trainer.model.layers[0].mlp[0].layout for _ in trainer.steps()]
    moved = [step for step, (before, after) in enumerate(pairwise(layouts), 2) if before != after]
    assert len(moved) > 5
    assert max(moved) < 30
    assert trainer.task.inputs(0) is None  # a CUDA graph must not capture steps that move blocks
    assert len(GPTTask(GPT(SPARSE), corpus(), 6, 4).inputs(0)) == 1


def test_running_means_follow_the_blocks():
    model = torch.nn.Sequential(bs.nn.Linear(64, 64, density=0.25, block_size=8))
    values = model[0].values
    means = {"0.values": torch.arange(len(values)).float().view(-1, 1, 1).expand_as(values).clone()}

    def by_place(of):
        return {(int(r), int(c)): x for r, c, x in zip(layout().row_of_block, layout().col_of_block, of, strict=True)}

    def layout():
        return model[0].layout

    before, sources = by_place(means["0.values"]), []

    def on_layout_change(module, source):
        sources.append(source)
        sync_means(model, means)(module, source)

    bs.sparsity.SET(model, on_layout_change=on_layout_change).step()
    after, now, came = by_place(means["0.values"]), by_place(model[0].values.detach()), by_place(sources[0] < 0)
    assert after.keys() != before.keys()
    for place, mean in after.items():  # a block may return to its old place
        assert torch.equal(mean, now[place] if came[place] else before[place])


def test_an_evaluation_sees_little_more_at_once_than_a_step():
    model, seen = GPT(replace(DENSE, context=2)), []
    model.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].numel()))
    with torch.no_grad():
        GPTTask(model, corpus(20_000, held_out=0.7), 6, 4).evaluate(model)
    assert max(seen) == gpt.AT_ONCE


def test_it_learns(tmp_path):
    trainer = gpt.trainer(replace(SETTINGS, steps=60, eval_every=0, batch=64, model=SPARSE), corpus(20_000), tmp_path)
    assert trainer.train()["held_out"] < 5


def test_samples_see_the_last_bytes():
    model = GPT(SPARSE)
    prompt = b"The history of the language"  # longer than the context
    written = b"".join(language_model.sample(model, prompt, 12, temperature=0))
    for end in range(12):
        with torch.no_grad():
            logits, _ = model(torch.tensor(list((prompt + written[:end])[-16:])).unsqueeze(1))
        assert logits[-1, 0].argmax() == written[end]


# -- commands ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.* will never change a layout:blocksparse.SparsityWarning")
def test_from_a_text_to_a_sample(tmp_path):
    sizes = ["--width", 32, "--layers", 1, "--seq", 16, "--batch", 4, "--steps", 2]
    sparse = ["--density", 0.5, "--block-size", 8, "--method", "rigl"]
    for name, options in (("run", sparse), ("other", ["--density", 0.4, *sparse[2:]]), ("dense", [])):
        said = output("train", "gpt", "--data", "python", "--out", tmp_path / name, *sizes, *options)
        assert "1 layer of width 32" in said
    runs = [tmp_path / name for name in ("run", "other", "dense")]
    assert len(compare.groups([compare.read(run) for run in runs])) == 3
    assert "density" in output("compare", *runs)
    output("compare", *runs, "--topology")
    assert len(run("sample", tmp_path / "run", "--prompt", "The ", "--length", 5).output) >= 5
    output("sparsify", tmp_path / "run", "--out", tmp_path / "sparse", "--density", 0.5, "--force")
    assert isinstance(language_model.load(tmp_path / "sparse"), GPT)


def test_the_experiment_from_nothing_to_the_report(tmp_path, monkeypatch):
    experiment = TransformerExperiment(
        about="Tiny transformers",
        text="python",
        contenders={
            "dense": TransformerContender(DENSE, 0.01),
            "RigL": TransformerContender(replace(SPARSE, method="rigl"), 0.01),
            "dense to sparse": TransformerContender(SPARSE, 0.01, Pruning("gradual", 0.3, block_size=8, search=0.25)),
        },
        settings=replace(SETTINGS, eval_every=2, evaluated=200),
        seq=16,
        seeds=(0,),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    output("experiment", "tiny", "--runs", tmp_path / "runs", "--out", tmp_path)
    found = experiments.load(tmp_path / "tiny.json").runs
    assert set(found) == set(experiment.contenders)
    table = (tmp_path / "tiny.md").read_text()
    ends, begins = multiply_adds(SPARSE), multiply_adds(DENSE)
    assert f"| {round(0.25 * begins + 0.75 * ends):,} |" in table
    assert "8 x 8, dense at first, gradual pruning" in table
    assert "Inference of 16 windows" in table
    assert set(experiments.load(tmp_path / "tiny.json").more["seconds"]) == set(experiment.contenders)
    pruned = gpt.load(tmp_path / "runs" / "tiny" / "dense to sparse-0")
    layers = [layer.mlp[0].layout.density for layer in pruned.layers]
    assert layers == pytest.approx([0.3] * 2, abs=0.05)


@pytest.mark.parametrize("name", transformers.EXPERIMENTS)
def test_contenders_take_as_many_multiply_adds(name):
    contenders = experiments.EXPERIMENTS[name].contenders
    counts = [multiply_adds(of.config) for of in contenders.values()]
    assert max(counts) < 1.01 * min(counts)
