"""Byte-level transformers: what they see, their evaluation, checkpoints, runs and experiment."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from blocksparse import BlockSparseError
from blocksparse_lab import experiments
from blocksparse_lab.cli import app
from blocksparse_lab.data import text
from blocksparse_lab.experiments.transformers import Contender, TransformerExperiment
from blocksparse_lab.models.gpt import GPT, GPTConfig, least_parameters, multiply_adds, parameter_count
from blocksparse_lab.recipes import charlm, gpt, language_model
from blocksparse_lab.recipes.gpt import GPTTask
from blocksparse_lab.recipes.layouts import distances, read
from blocksparse_lab.recipes.prune import Pruning
from blocksparse_lab.recipes.trainer import Settings

DENSE = GPTConfig(width=32, layers=2, heads=2, context=16)
SPARSE = replace(DENSE, density=0.3, block_size=8)
SETTINGS = Settings(steps=6, learning_rate=0.01, warmup=2, eval_every=3, save_every=3)

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def corpus(length=4000, held_out=0.1):
    return text.split(text.python_topics()[:length], 16, held_out=held_out)


def bytes_of(steps, batch=3, seed=0):
    return torch.randint(256, (steps, batch), generator=torch.Generator().manual_seed(seed))


# -- the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_a_score_depends_on_the_bytes_before_it_alone(config):
    model, said = GPT(config), bytes_of(16)
    with torch.no_grad():
        whole, _ = model(said)
        begun, before = model(said[:9])
        rest, seen = model(said[9:], before)
    torch.testing.assert_close(torch.cat([begun, rest]), whole)
    assert torch.equal(seen, said)
    with torch.no_grad():  # beyond the context the first bytes are forgotten
        later, seen = model(bytes_of(4, seed=1), said)
        torch.testing.assert_close(later, model(torch.cat([said[4:], bytes_of(4, seed=1)]))[0][-4:])
    assert len(seen) == 16


def test_weights_depend_on_the_seed_alone():
    before = torch.get_rng_state()
    one, two, other = (GPT(replace(SPARSE, seed=seed)).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one if one[name].shape == other[name].shape)


@pytest.mark.parametrize("config", [DENSE, SPARSE, replace(SPARSE, width=64, density=0.05, layers=3)])
def test_numbers_of_a_model(config):
    model = GPT(config)
    assert parameter_count(config) == sum(parameter.numel() for parameter in model.parameters())
    assert 0.8 * parameter_count(config) < least_parameters(config) <= parameter_count(config)
    weights = 12 * config.layers * config.width**2 * config.density
    attention = config.layers * config.context * config.width
    assert multiply_adds(config) == pytest.approx(weights + attention + 256 * config.width, rel=0.05)


WRONG = [{"width": 0}, {"heads": 3}, {"density": 1.5}, {"density": 0.5, "block_size": 12}, {"method": "rigl"}]


@pytest.mark.parametrize("wrong", [*WRONG, {"method": "x"}])
def test_configurations_that_cannot_be(wrong):
    with pytest.raises(BlockSparseError, match="expected"):
        replace(DENSE, **wrong)


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(3, 2), None, torch.zeros(17, 2, dtype=torch.long)])
def test_what_is_no_text(wrong):
    with pytest.raises(BlockSparseError, match="text: expected"):
        GPT(DENSE)(wrong)


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


@pytest.mark.parametrize(("method", "ema"), [("fixed", 0.0), ("rigl", 0.5)])
def test_a_run_that_stopped_ends_with_the_same_bits(method, ema, tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "EVERY", 2)
    settings = replace(SETTINGS, ema=ema)

    def trainer(folder):
        return gpt.trainer(replace(SPARSE, method=method), corpus(), folder, settings, charlm.Batches(batch=4))

    whole = trainer(tmp_path / "whole")
    begun = [layer.mlp[0].layout for layer in GPT(SPARSE).layers]
    result = whole.train()
    part = trainer(tmp_path / "part")
    for step in part.steps():
        if step == 4:
            break
    resumed = trainer(tmp_path / "part")
    assert resumed.train()["held_out"] == result["held_out"]
    model = gpt.load(tmp_path / "whole")
    moved = [layer.mlp[0].layout for layer in model.layers] != begun
    assert moved == (method == "rigl")
    for name, tensor in gpt.load(tmp_path / "part").state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    with torch.no_grad():
        assert GPTTask(model, corpus(), 6, 4).evaluate(model) == result["held_out"]
    assert model.config == replace(SPARSE, method=method)
    assert language_model.load(tmp_path / "whole").config == model.config
    (zero, other), *_ = distances([read(tmp_path / "whole"), read(tmp_path / "part")])[0]
    assert zero == other == 0


def test_it_learns(tmp_path):
    trainer = gpt.trainer(SPARSE, corpus(20_000), tmp_path, replace(SETTINGS, steps=60, eval_every=0))
    assert trainer.train()["held_out"] < 5


def test_a_recurrent_run_is_no_transformer(tmp_path):
    gpt.trainer(DENSE, corpus(), tmp_path, replace(SETTINGS, steps=1), charlm.Batches(batch=4)).train()
    with pytest.raises(BlockSparseError, match="gpt"):
        charlm.load(tmp_path)


def test_samples_see_the_last_bytes():
    model = GPT(SPARSE)
    prompt = b"The history of the language"  # longer than the context
    written = b"".join(language_model.sample(model, prompt, 12, temperature=0))
    for end in range(12):
        with torch.no_grad():
            logits, _ = model(torch.tensor(list((prompt + written[:end])[-16:])).unsqueeze(1))
        assert logits[-1, 0].argmax() == written[end]


# -- commands ------------------------------------------------------------------------------------------------------


def invoke(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def test_from_a_text_to_a_sample(tmp_path):
    sizes = ["--width", 32, "--layers", 1, "--seq", 16, "--batch", 4, "--steps", 2]
    said = invoke("train", "gpt", "--data", "python", "--out", tmp_path / "run", *sizes, "--density", 0.5)
    assert "1 layer of width 32" in said
    assert len(invoke("sample", tmp_path / "run", "--prompt", "The ", "--length", 5)) >= 5
    invoke("sparsify", tmp_path / "run", "--out", tmp_path / "sparse", "--density", 0.5, "--force")
    assert isinstance(language_model.load(tmp_path / "sparse"), GPT)


def test_the_experiment_from_nothing_to_the_report(tmp_path, monkeypatch):
    experiment = TransformerExperiment(
        about="Tiny transformers",
        text="python",
        contenders={
            "dense": Contender(DENSE, 0.01),
            "RigL": Contender(replace(SPARSE, method="rigl"), 0.01),
            "dense to sparse": Contender(SPARSE, 0.01, Pruning("gradual", 0.3, block_size=8, search=0.5)),
        },
        settings=replace(SETTINGS, eval_every=2),
        batch=4,
        seq=16,
        evaluated=200,
        seeds=(0,),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    invoke("experiment", "tiny", "--runs", tmp_path / "runs", "--out", tmp_path)
    found = experiments.load(tmp_path / "tiny.json").runs
    assert set(found) == set(experiment.contenders)
    table = (tmp_path / "tiny.md").read_text()
    assert "8 x 8, dense at first, gradual pruning" in table
    pruned = gpt.load(tmp_path / "runs" / "tiny" / "dense to sparse-0")
    layers = [layer.mlp[0].layout.density for layer in pruned.layers]
    assert layers == pytest.approx([0.3] * 2, abs=0.05)


def test_contenders_take_as_many_multiply_adds():
    contenders = experiments.EXPERIMENTS["gpt-small"].contenders
    counts = [multiply_adds(of.config) for of in contenders.values()]
    assert max(counts) < 1.01 * min(counts)
