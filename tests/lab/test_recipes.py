"""The contract of recipes: runs resume with the same bits, are recorded completely, and refuse other settings."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch

from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.training import compare, run_log
from blocksparse_lab.training.settings import Settings
from blocksparse_lab.training.trainer import Callback, Interrupted
from recipe_table import RECIPES
from test_trainer import assert_same

pytestmark = pytest.mark.usefixtures("one_thread")


class StopAfter(Callback):
    """Interrupts a training as a signal would, without a checkpoint of that step."""

    def __init__(self, step):
        self.step = step

    def after_step(self, step):
        if step == self.step:
            raise Interrupted(2, step)


@pytest.fixture(scope="module", params=RECIPES)
def trained(request, tmp_path_factory):
    """Name, run folder and trainer of a finished run of each recipe."""
    run = tmp_path_factory.mktemp(request.param)
    trainer = RECIPES[request.param].build(run)
    trainer.train()
    return request.param, run, trainer


def test_a_stopped_run_resumes_to_the_same_bits(trained, tmp_path):
    name, whole, trainer = trained
    for step in (2, trainer.settings.steps - 1):
        with pytest.raises(Interrupted):
            RECIPES[name].build(tmp_path).train(StopAfter(step))
    assert RECIPES[name].build(tmp_path).train()["held_out"] == trainer.held_out
    assert_same(tmp_path, whole)


def test_a_run_is_recorded(trained):
    _, run, trainer = trained
    config, result = (json.loads((run / f"{name}.json").read_text()) for name in ("config", "result"))
    assert config["settings"] == result["settings"] == json.loads(json.dumps(asdict(trainer.settings)))
    assert config["task"] == json.loads(json.dumps(trainer.task.about()))
    assert result["unit"] == config["unit"] == trainer.task.unit
    assert result["steps"] == trainer.settings.steps == compare.read(run).steps
    lines = run_log.read(run)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert {"loss", "lr", "grad_norm", "bytes_per_second"} <= lines[0].keys()
    assert lines[-1]["held_out"] == result["held_out"] == trainer.held_out


def test_the_model_of_a_checkpoint_is_the_trained_one(trained):
    name, run, trainer = trained
    if (load := RECIPES[name].load) is None:
        pytest.skip("read by `layouts` only")
    model = load(run)
    assert not model.training
    expected = trainer.model.state_dict() | trainer.ema
    assert model.state_dict().keys() == expected.keys()
    assert [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, expected[key])] == []
    with torch.no_grad():
        assert trainer.task.evaluate(model) == trainer.held_out


def test_runs_of_other_recipes_do_not_load(trained):
    name, run, trainer = trained
    kind = trainer.task.about()["kind"]
    for other, recipe in RECIPES.items():
        if recipe.load is not None and other != name:
            message = f"expected {recipe.model}, got {kind}"
            if other == "finetune" and kind == "classify":
                message = "expected the configuration of a TextClassifier"
            with pytest.raises(BlockSparseError, match=message):
                recipe.load(run)


def test_other_settings_are_refused(trained, tmp_path):
    name, run, _ = trained
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for change in ({"learning_rate": 0.123}, RECIPES[name].own):
        (key,) = change
        with pytest.raises(BlockSparseError, match=f"expected the run's settings: .*{key} .*, got .*{key} "):
            RECIPES[name].build(run, **change).train()
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_run_of_an_older_version_resumes(trained, tmp_path):
    """It recorded only the settings that all runs share."""
    name, run, trainer = trained
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "last.safetensors"
    tensors, about = checkpoint.load(path)
    about["settings"] = {key: about["settings"][key] for key in asdict(Settings())}
    checkpoint.save(path, tensors, about)
    assert RECIPES[name].build(tmp_path / "run").train()["held_out"] == trainer.held_out
