"""The trainer stops cleanly: signals, values that are not finite, and full disks."""

import os
import signal
import sys

import pytest
import torch

from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.training.trainer import Callback, Interrupted, Trainer
from test_trainer import SETTINGS, Walk, assert_same, fail

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_saves_and_stops(number, tmp_path):
    run = tmp_path / "run"
    task = Walk()
    task.at[9] = lambda: os.kill(os.getpid(), number)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stop:
        Trainer(task, run, SETTINGS).train()
    assert (stop.value.number, stop.value.step) == (number, 10)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert checkpoint.load(run / "last.safetensors")[1]["step"] == 10
    assert not (run / "result.json").exists()
    for folder in (run, tmp_path / "whole"):
        Trainer(Walk(), folder, SETTINGS).train()
    assert_same(run, tmp_path / "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_a_second_signal_stops_at_once(tmp_path):
    task = Walk()
    task.at[9] = lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        Trainer(task, tmp_path, SETTINGS).train()
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == 7


def test_an_infinite_loss_stops_before_the_update(tmp_path):
    task = Walk()
    task.at["nan"] = 9
    trainer = Trainer(task, tmp_path, SETTINGS)
    with pytest.raises(BlockSparseError) as error:
        trainer.train()
    said = str(error.value)
    assert said.startswith("step 10: expected a finite loss and gradient, got loss nan, gradient of norm nan.")
    assert "last.safetensors is intact" in said
    assert "a lower learning rate than 0.02" in said
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == 7
    assert all(p.isfinite().all() for p in trainer.parameters.values())


def test_an_infinite_gradient_stops_the_run(tmp_path):
    task = Walk()
    task.at[3] = lambda: task.model[2].weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(BlockSparseError, match=r"step 4: expected a finite loss and gradient, got loss [0-9.]+, grad"):
        Trainer(task, tmp_path, SETTINGS).train()


def test_infinite_parameters_are_never_saved(tmp_path):
    task, watch = Walk(), Callback()
    watch.after_step = lambda step: step == 7 and torch.nn.init.constant_(task.model[0].bias, float("inf"))
    with pytest.raises(
        BlockSparseError, match=r"step 7: expected finite parameters, got values that are not in 0\.bias"
    ):
        Trainer(task, tmp_path, SETTINGS).train(watch)
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == 0


def test_a_disk_that_is_full_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail(OSError(28, "No space left on device")))
    task = Walk()
    task.loss = fail(AssertionError("it trains"))
    with pytest.raises(BlockSparseError, match="No space left on device"):
        Trainer(task, tmp_path, SETTINGS).train()
    monkeypatch.undo()
    Trainer(Walk(), tmp_path, SETTINGS).train()
