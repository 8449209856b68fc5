"""Runs of `compress` that are interrupted, killed, short of disk, time or finite numbers; tied output layers."""

import io
import itertools
import math
import os
import signal
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import blocksparse as bs
from blocksparse import checkpoint
from blocksparse.compression import stages, training
from blocksparse.surgery.tied import tie, untie_output_layers
from compressed import Classifier, labelled, options, take_all_as_faster, trained, weights_of
from processes import CONTEXT


@pytest.fixture(autouse=True)
def fast_everywhere(monkeypatch):
    """Take all layers as faster, so that the results do not depend on the machine."""
    take_all_as_faster(monkeypatch)


def test_an_interruption_returns_the_best_so_far_and_a_folder_resumes(tmp_path, monkeypatch):
    data = labelled()
    model = trained(Classifier(), data)
    calls = itertools.count()
    step = training.Training._step

    def interrupted(self, optimizer):
        if next(calls) == 150:
            raise KeyboardInterrupt
        return step(self, optimizer)

    monkeypatch.setattr(training.Training, "_step", interrupted)
    with pytest.warns(bs.SparsityWarning, match="interrupted"):
        partial = bs.compress(model, data, **options(steps=600, folder=tmp_path))
    monkeypatch.setattr(training.Training, "_step", step)
    assert weights_of(partial.model)
    assert (tmp_path / "best.safetensors").is_file()
    loaded = bs.load_sparsified(Classifier(), load_file(tmp_path / "best.safetensors")).eval()
    torch.testing.assert_close(loaded(data[0][0]), partial.model(data[0][0]))
    result = bs.compress(model, data, **options(steps=600, folder=tmp_path))
    assert result.density <= 0.26
    assert len(result.curve) == 3
    assert (tmp_path / "curve.json").is_file()
    with pytest.raises(bs.BlockSparseError, match="folder: expected a run with"):
        bs.compress(model, data, **options(density=0.5, folder=tmp_path))
    with pytest.raises(bs.BlockSparseError, match="folder: expected a run with"):
        bs.compress(Classifier().eval(), data, **options(steps=600, folder=tmp_path))
    evaluated = bs.compress(model, data, **options(steps=600, folder=tmp_path, evaluate=lambda model: -5.0))
    assert evaluated.metric == -5
    assert "metric" in str(evaluated)


def test_a_folder_of_another_teacher_or_options_is_refused(tmp_path):
    data, model = labelled(128), Classifier().eval()
    bs.compress(model, data, **options(folder=tmp_path))
    for name, others in {
        "teacher": {"teacher": Classifier().eval()},
        "hidden": {"hidden": 1.0},
        "skip": {"skip": "first"},
    }.items():
        given = options(folder=tmp_path, data=data) | others
        message = rf"folder: expected a run with {name} .*, got .* with {name} .* \(pass these .* or use another folder"
        with pytest.raises(bs.BlockSparseError, match=message):
            bs.compress(model, **given)
    resumed = bs.compress(model, data[::-1], **options(folder=tmp_path, teacher=model))
    assert resumed.density <= 0.26, "an equal teacher, and the same batches in another order"
    changed = [(x + 1, y) for x, y in data]
    with pytest.warns(bs.SparsityWarning, match=r"resuming the run in .*, which had other data"):
        bs.compress(model, changed, **options(folder=tmp_path))


def test_a_folder_of_a_run_without_a_checksum_of_the_data_is_resumed(tmp_path):
    data, model = labelled(128), Classifier().eval()
    bs.compress(model, data, **options(folder=tmp_path))
    tensors, about = checkpoint.load(tmp_path / "best.safetensors")
    about["compress"] = {name: about["compress"][name] for name in ("density", "block_size", "model")}
    checkpoint.save(tmp_path / "best.safetensors", tensors, about)
    resumed = bs.compress(model, data, **options(folder=tmp_path))
    assert resumed.curve[0].minutes == about["curve"][0]["minutes"], "the dense model is not measured again"


def test_an_unknown_module_to_skip_is_refused_with_a_folder(tmp_path):
    with pytest.raises(bs.BlockSparseError, match="skip: expected modules of the model"):
        bs.compress(Classifier().eval(), labelled(128), **options(folder=tmp_path, skip=nn.Linear(2, 2)))


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    checkpoint.save(tmp_path / "best.safetensors", {}, {"step": 3})
    with pytest.raises(bs.BlockSparseError, match=r"folder: expected no other best.safetensors \(use another folder"):
        bs.compress(Classifier().eval(), labelled(128), **options(folder=tmp_path))


@pytest.mark.parametrize("content", ['{"curve": [{"x": 1}]}', '{"points": []}', '{"curve": []}', "[1, 2]", "no JSON"])
def test_a_curve_of_another_program_is_not_overwritten(tmp_path, content):
    (tmp_path / "curve.json").write_text(content)
    with pytest.raises(bs.BlockSparseError, match=r"expected a curve\.json of an earlier run.*use another folder"):
        bs.compress(Classifier().eval(), labelled(128), **options(folder=tmp_path))
    assert (tmp_path / "curve.json").read_text() == content


def test_a_fit_of_another_program_is_not_overwritten(tmp_path):
    checkpoint.save(tmp_path / "fit.safetensors", {}, {"step": 3})
    with pytest.raises(bs.BlockSparseError, match=r"folder: expected no fit\.safetensors without best\.safetensors"):
        bs.compress(Classifier().eval(), labelled(128), **options(folder=tmp_path))


def test_a_folder_that_cannot_hold_the_files_is_refused(tmp_path):
    (tmp_path / "best.safetensors").mkdir()
    for folder, match in ((tmp_path, "a file or nothing as best.safetensors"), (f"{tmp_path}/run\0", "a path")):
        with pytest.raises(bs.BlockSparseError, match=match):
            bs.compress(Classifier().eval(), labelled(128), **options(folder=folder))


def die_after_saves(count, model, data, folder):
    calls = itertools.count(1)
    stages.keep_faster, save = (lambda model, plan, example: plan), checkpoint.save
    stages.densify_slower = lambda model, example, skip: (model, {})

    def save_and_die(*args):
        save(*args)
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save = save_and_die
    bs.compress(model, data, **options(folder=folder))


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
@pytest.mark.parametrize(
    ("saves", "stage", "points"), [(1, -1, 3), (2, -1, 3), (3, 0, 3)], ids=["fitted", "rates tested", "first stage"]
)
def test_a_run_killed_with_9_resumes_from_its_folder(tmp_path, saves, stage, points):
    data = labelled(128)
    model = trained(Classifier(), data)
    process = CONTEXT.Process(target=die_after_saves, args=(saves, model, data, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    _, saved = checkpoint.load(tmp_path / "best.safetensors")
    assert saved["stage"] == stage
    result = bs.compress(model, data, **options(folder=tmp_path))
    assert result.curve[0].minutes == saved["curve"][0]["minutes"], "the dense model is not measured again"
    assert len(result.curve) == points
    assert result.density <= 0.26
    assert (tmp_path / "fit.safetensors").is_file()


def test_an_interrupted_test_of_rates_leaves_the_fit_as_it_was(tmp_path, monkeypatch):
    def interrupted(self, optimizer):
        with torch.no_grad():
            next(self.student.parameters()).fill_(1e9)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Training, "_step", interrupted)
    with pytest.warns(bs.SparsityWarning, match="interrupted"):
        partial = bs.compress(Classifier().eval(), labelled(128), **options(steps=600, folder=tmp_path))
    assert all(parameter.abs().max() < 1e3 for parameter in partial.model.parameters())
    assert not (tmp_path / "fit.safetensors").exists()


def test_a_run_that_is_resumed_with_evaluate_measures_the_dense_model_too(tmp_path):
    data, model = labelled(128), Classifier().eval()
    bs.compress(model, data, **options(folder=tmp_path))
    result = bs.compress(model, data, **options(folder=tmp_path, evaluate=lambda model: 1.0))
    assert result.curve[0].metric == result.metric == 1


def test_a_run_with_labels_is_not_resumed_without(tmp_path):
    data, model = labelled(128), Classifier().eval()
    bs.compress(model, data, **options(folder=tmp_path))
    with pytest.raises(bs.BlockSparseError, match=r"expected a run with labels 0, data .* with labels 1"):
        bs.compress(model, [x for x, _ in data], **options(folder=tmp_path))


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
@pytest.mark.parametrize("is_augmented", [False, True])
def test_a_resumed_run_still_returns_the_fit_if_it_is_better(tmp_path, is_augmented):
    data = labelled(128)
    model = trained(Classifier(), data)
    process = CONTEXT.Process(target=die_after_saves, args=(3, model, data, tmp_path))
    process.start()
    process.join()
    fit, about = checkpoint.load(tmp_path / "fit.safetensors")
    about["point"]["loss"] = -1.0  # better than all others
    checkpoint.save(tmp_path / "fit.safetensors", fit, about)
    again = [(x + 0.01, y) for x, y in data] if is_augmented else data
    with pytest.warns(bs.SparsityWarning, match="other data") if is_augmented else nullcontext():
        result = bs.compress(model, again, **options(folder=tmp_path))
    assert result.curve[-1].loss == -1
    assert result.is_only_fitted
    state = result.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in fit.items())


def test_two_runs_in_one_folder_do_not_overwrite_each_other(tmp_path):
    data, model = labelled(128), Classifier().eval()
    other = tmp_path / "other"
    bs.compress(Classifier().eval(), data, **options(folder=other))
    written = (other / "best.safetensors").read_bytes()
    calls = itertools.count()

    def evaluate(_):
        if next(calls) == 2:  # the first run has saved a model
            os.replace(other / "best.safetensors", tmp_path / "best.safetensors")
        return 0.0

    with pytest.warns(bs.SparsityWarning, match="expected no other run that writes to it") as warned:
        bs.compress(model, data, **options(folder=tmp_path, evaluate=evaluate))
    assert len(warned) == 1
    assert (tmp_path / "best.safetensors").read_bytes() == written


@pytest.mark.parametrize("is_written", [False, True])
def test_an_interrupt_around_a_file_loses_nothing(tmp_path, monkeypatch, is_written):
    save, interrupts = checkpoint.save, iter([True])

    def interrupted(path, *args):
        is_first = path.name == "best.safetensors" and next(interrupts, False)
        if is_written or not is_first:
            save(path, *args)
        if is_first:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", interrupted)
    with pytest.warns(bs.SparsityWarning) as caught:
        result = bs.compress(Classifier().eval(), labelled(128), **options(folder=tmp_path))
    assert [str(each.message)[:21] for each in caught] == ["compress: interrupted"]
    assert (tmp_path / "curve.json").is_file()
    state = checkpoint.load(tmp_path / "best.safetensors")[0]
    assert all(torch.equal(state[name], value) for name, value in result.model.state_dict().items())


def test_settings_of_equal_meaning_resume_a_run(tmp_path):
    data, model = labelled(128), Classifier().eval()
    size = np.int64(8)
    bs.compress(model, data, **options(folder=tmp_path, block_size=size, density=np.float32(0.25), skip=["last"]))
    assert (tmp_path / "best.safetensors").is_file()
    again = options(folder=tmp_path, block_size=(8, 8), density=float(np.float32(0.25)), skip=["last", "last"])
    assert bs.compress(model, data, **again).curve


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    def save(path, tensors, about):
        raise bs.BlockSparseError(f"{path}: no space left")

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.warns(bs.SparsityWarning, match="no space left") as warned:
        result = bs.compress(Classifier().eval(), labelled(128), **options(folder=tmp_path))
    assert len(warned) == 1
    assert result.density <= 0.26


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(bs.BlockSparseError, match="folder: expected a folder to write to"):
            bs.compress(Classifier().eval(), labelled(128), **options(folder=folder))


def test_a_loss_that_is_not_finite_takes_the_training_back(monkeypatch):
    data = labelled()
    calls = itertools.count()
    step = training.Training._step
    monkeypatch.setattr(
        training.Training, "_step", lambda self, opt: float("nan") if next(calls) % 70 == 69 else step(self, opt)
    )
    result = bs.compress(trained(Classifier(), data), data, **options(steps=200))
    assert all(each.isfinite().all() for each in result.model.state_dict().values())


def test_gradients_that_are_never_finite_are_reported(monkeypatch):
    data = labelled(128)
    monkeypatch.setattr(training.Training, "_step", lambda self, optimizer: float("nan"))
    with pytest.warns(bs.SparsityWarning, match="losses or gradients are not finite"):
        result = bs.compress(trained(Classifier(), data), data, 0.5, 8, steps=40)
    assert result.density <= 0.51


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_averaged_over_the_last_tenth_of_the_steps(dtype):
    model = nn.BatchNorm1d(1).to(dtype)
    average, values = training.WeightAverage(model), torch.arange(1.0, 201.0)
    for value in values:
        model.weight.data.fill_(value)
        model.running_mean.fill_(-value)
        average.update()
    with average.loaded():
        assert model.weight.item() == pytest.approx(200 * 9 / 10, rel=0.01)
        assert model.running_mean.item() == -model.weight.item()
    assert model.weight.item() == 200


def test_a_mask_of_minus_infinity_is_not_averaged():
    model = nn.BatchNorm1d(1)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    average = training.WeightAverage(model)
    for _ in range(3):
        average.update()
    with average.loaded():
        assert model.mask.tolist() == [0, -math.inf]


def test_gradients_whose_squares_overflow_are_clipped(monkeypatch):
    data, loss, step, losses = labelled(128), training.Training.loss, training.Training._step, []

    def huge(self, index, **more):
        value, *others = loss(self, index, **more)
        return value * 1e30 if value.requires_grad else value, *others

    monkeypatch.setattr(training.Training, "loss", huge)
    monkeypatch.setattr(training.Training, "_step", lambda self, opt: losses.append(step(self, opt)) or losses[-1])
    bs.compress(Classifier().eval(), data, **options())
    assert losses
    assert all(math.isfinite(each) for each in losses)


def test_a_budget_without_time_to_train_is_reported():
    data = labelled(128)
    no_training = pytest.warns(bs.SparsityWarning, match=r"no time to train .* of which fitting took \d")
    with pytest.warns(bs.SparsityWarning, match="fitting was stopped after"), no_training:
        result = bs.compress(trained(Classifier(), data), data, 0.5, 8, minutes=1e-6)
    assert result.density <= 0.51


class TiedWords(nn.Module):
    """Predicts the next word; the output layer shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(96, 32), nn.Linear(32, 32), nn.Linear(32, 96, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.inner(self.words(ids)).relu())


def test_a_block_sparse_output_layer_is_untied_from_its_embedding(tmp_path):
    model, data = TiedWords().eval(), [torch.randint(96, (16, 8)) for _ in range(6)]
    before = model.words.weight.clone()
    result = bs.compress(model, data, **options(folder=tmp_path))
    assert len(weights_of(result.model)) == 2
    assert type(result.model.words) is nn.Embedding
    assert model.head.weight is model.words.weight
    assert torch.equal(model.words.weight, before)
    loaded = bs.load_sparsified(TiedWords(), load_file(tmp_path / "best.safetensors")).eval()
    torch.testing.assert_close(loaded(data[0]), result.model(data[0]))
    resumed = bs.compress(model, data, **options(folder=tmp_path))
    torch.testing.assert_close(resumed.model(data[0]), result.model(data[0]))


def test_two_output_layers_of_one_embedding_are_untied():
    model = TiedWords()
    model.second = nn.Linear(32, 96, bias=False)
    model.second.weight = model.words.weight
    assert untie_output_layers(model) == {"head.weight": "words.weight", "second.weight": "words.weight"}
    assert model.second.weight is not model.head.weight
    tie(model, {"head.weight": "words.weight"})
    assert model.head.weight is model.words.weight


def test_tradeoff_counts_an_output_layer_that_is_tied_to_an_embedding():
    model, data = TiedWords().eval(), [torch.randint(96, (16, 8)) for _ in range(6)]
    measured = bs.tradeoff(model, data, densities=[0.5], block_size=8)
    assert {layer.name for layer in measured.layers} == {"inner", "head"}
    assert model.head.weight is model.words.weight


def test_an_output_layer_that_stays_dense_stays_tied(tmp_path):
    model, data = TiedWords().eval(), [torch.randint(96, (16, 8)) for _ in range(6)]
    for _ in ("a run", "a resumed run"):
        result = bs.compress(model, data, **options(folder=tmp_path, skip=["head"]))
        assert len(weights_of(result.model)) == 1
        assert result.model.head.weight is result.model.words.weight


def test_a_terminal_shows_what_is_done_before_training(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    bs.compress(Classifier().eval(), labelled(128), **options())
    for work in ("choosing weights", "fitting to density 0.25", "testing learning rates"):
        assert f"] {work}" in stream.getvalue()
    assert stream.getvalue().endswith("\r"), "the line is removed at the end"


def test_a_run_that_is_resumed_with_evaluate_keeps_its_stages(tmp_path, monkeypatch):
    data = labelled(128)
    model = trained(Classifier(), data)
    calls, step = itertools.count(), training.Training._step

    def interrupted(self, optimizer):
        if next(calls) == 150:
            raise KeyboardInterrupt
        return step(self, optimizer)

    monkeypatch.setattr(training.Training, "_step", interrupted)
    with pytest.warns(bs.SparsityWarning, match="interrupted"):
        bs.compress(model, data, **options(steps=600, folder=tmp_path))
    fit, about = checkpoint.load(tmp_path / "fit.safetensors")
    about["point"]["loss"] = 100.0  # worse than all others
    checkpoint.save(tmp_path / "fit.safetensors", fit, about)
    monkeypatch.setattr(training.Training, "_step", step)
    result = bs.compress(model, data, **options(steps=600, folder=tmp_path, evaluate=lambda model: 0.5))
    assert not result.is_only_fitted
    assert result.curve[-1].loss < 100
