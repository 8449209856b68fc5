"""Training a transformer whose blocks move by each method, and the experiment that compares them."""

from dataclasses import replace

import pytest
import torch

from blocksparse import BlockSparseError
from blocksparse_lab import experiments
from blocksparse_lab.data import text
from blocksparse_lab.experiments.transformers import TransformerContender, TransformerExperiment
from blocksparse_lab.models.gpt import GPT, GPTConfig
from blocksparse_lab.recipes import gpt
from blocksparse_lab.recipes.gpt import GPTTask
from blocksparse_lab.recipes.grow import FIXED, METHODS, GrowTask, Growth, divide_rates
from blocksparse_lab.training.trainer import Trainer
from command import output

SPARSE = GPTConfig(width=32, layers=1, heads=2, context=16, density=0.5, block_size=8)
SETTINGS = gpt.GPTSettings(steps=24, learning_rate=0.01, warmup=2, eval_every=0, save_every=5, batch=4, model=SPARSE)
GROWTHS = {
    **{method: Growth(method, density=0.3) for method in METHODS},
    "topology": Growth("gradual", density=0.3, growth="topology", clock=True),
    "clock": Growth("rigl", clock=True, by_density=True),
}

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def corpus():
    return text.split(text.python_topics()[:4000], 16, held_out=0.1)


def trainer_of(growth, run, **changes):
    settings = replace(SETTINGS, **changes)
    task = GPTTask(GPT(SPARSE), corpus(), settings.steps, settings.batch)
    return Trainer(GrowTask(task, growth, settings.steps, settings.seed), run, settings)


@pytest.mark.parametrize("name", GROWTHS)
def test_a_stopped_run_ends_with_the_same_bits(name, tmp_path):
    whole = trainer_of(GROWTHS[name], tmp_path / "whole")
    whole.train()
    for done in trainer_of(GROWTHS[name], tmp_path / "stopped").steps():
        if done == 17:
            break
    resumed = trainer_of(GROWTHS[name], tmp_path / "stopped")
    resumed.train()
    states = [trainer.model.state_dict() for trainer in (whole, resumed)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", GROWTHS)
def test_blocks_move_until_the_end_of_the_schedule(name, tmp_path):
    trainer = trainer_of(GROWTHS[name], tmp_path)
    layouts = [trainer.model.layers[0].mlp[0].layout for _ in trainer.steps()]
    moved = [step for step in range(1, len(layouts)) if layouts[step] != layouts[step - 1]]
    end = GROWTHS[name].end * SETTINGS.steps
    assert max(moved, default=0) <= end
    if name == FIXED:
        assert not moved
        assert trainer.task.inputs(0) is not None
        return
    assert len(moved) > 5
    assert trainer.task.inputs(0) is None  # a CUDA graph must not capture steps that move blocks
    expected = 0.3 if GROWTHS[name].method == "gradual" else 0.5
    assert trainer.model.layers[0].mlp[0].layout.density == pytest.approx(expected, abs=0.02)


def test_rates_of_sparse_weights_are_divided_by_the_density():
    model = GPT(SPARSE)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=0.01)
    divide_rates(model, optimizer)
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert rates.keys() == set(model.parameters())
    assert all(group["weight_decay"] == 0.1 for group in optimizer.param_groups)
    layer = model.layers[0].mlp[0]
    assert rates[layer.values] == pytest.approx(0.01 / layer.layout.density)
    assert rates[model.embedding.weight] == rates[layer.bias] == 0.01


WRONG = [{"method": "x"}, {"every": 0}, {"fraction": 1.5}, {"end": -1}, {"method": "gradual", "density": 0.8}]


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_methods_are_refused(wrong):
    with pytest.raises(BlockSparseError, match="expected"):
        Growth(**({"method": "set"} | wrong))


def test_the_mean_density_is_that_of_the_schedule(tmp_path):
    growth = Growth("gradual", density=0.25, every=1)
    trainer = trainer_of(growth, tmp_path, steps=100)
    densities = [trainer.model.layers[0].mlp[0].layout.density for _ in trainer.steps()]
    assert growth.mean_density(0.25) == pytest.approx(sum(densities) / 100, abs=0.01)
    assert Growth("set").mean_density(0.25) == 0.25


def test_the_experiment_from_nothing_to_the_report(tmp_path, monkeypatch):
    final = replace(SPARSE, density=0.3)
    experiment = TransformerExperiment(
        about="Tiny transformers",
        text="python",
        contenders={
            "dense": TransformerContender(replace(SPARSE, density=1.0), 0.01),
            "SMET": TransformerContender(final, 0.01, growth=Growth("smet", by_density=True)),
            "prune and regrow": TransformerContender(final, 0.01, growth=GROWTHS["topology"]),
        },
        settings=replace(SETTINGS, evaluated=200),
        seq=16,
        seeds=(0,),
    )
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    output("experiment", "tiny", "--runs", tmp_path / "runs", "--out", tmp_path)
    table = (tmp_path / "tiny.md").read_text()
    assert "8 x 8, SMET, rates divided by density" in table
    assert "8 x 8, gradual pruning from density 0.5, growth by topology, clock per block" in table
    facts = [run.config["facts"] for run in experiments.load(tmp_path / "tiny.json").runs["prune and regrow"]]
    assert facts[0]["density"] == pytest.approx(0.3, abs=0.03)
