"""Distillation in the loops of other libraries, against the loop written by hand."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import blocksparse as bs
import training_loops
from training_loops import (
    STEPS,
    Lightning,
    Net,
    batches,
    only_lightning,
    only_transformers,
    optimizer_of,
    same,
    two_updates_a_batch,
)

loop = training_loops.loop


class Unlabelled(Net):
    """A student whose own loss is 0, so that only the teacher trains it."""

    def forward(self, x, labels=None):
        return super().forward(x, x) | {"loss": 0 * self.layers[0].bias.sum()}


def distillation_callback(loop, teacher, **options):
    module = importlib.import_module(loop.callback.__module__)
    return module.DistillationCallback(
        teacher, **options, **({"student": "net"} if isinstance(loop, Lightning) else {})
    )


def distilled_by_hand(hidden, accumulate, labels):
    teacher, model = Net(False).eval(), (Net if labels else Unlabelled)(True)
    distillation = bs.sparsity.Distillation(teacher, model, output="mse", hidden=hidden)
    optimizer = optimizer_of(model)
    for at, batch in enumerate(list(batches()) * accumulate):
        loss = 2 * distillation(batch["x"], batch["labels"]) + (model(**batch)["loss"] if labels else 0)
        (loss / accumulate).backward()
        if at % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no labels"])
@pytest.mark.parametrize(("hidden", "accumulate"), [(0.0, 1), (0.5, 1), (0.5, 2)])
def test_distillation_trains_like_a_loop_by_hand(hidden, accumulate, labels, loop):
    teacher = Teacher()
    callback = distillation_callback(loop, teacher, weight=2.0, output="mse", hidden=hidden)
    model = (Net if labels else Unlabelled)(True)
    loop.run(model, callback, accumulate=accumulate)
    same(model, distilled_by_hand(hidden, accumulate, labels))
    assert not model._forward_hooks
    assert not any(layer._forward_hooks for layer in model.layers)
    assert teacher.calls == STEPS * accumulate


class Teacher(Net):
    """The dense net, which gets no labels."""

    calls = 0

    def __init__(self):
        super().__init__(False)

    def forward(self, x, labels=None):
        self.calls += 1
        assert labels is None or isinstance(labels, torch.Tensor)
        return {"logits": self.layers(x)}


class Counted(Unlabelled):
    """A student to which the Trainer passes the number of labels in all accumulated batches."""

    def forward(self, x, labels=None, **kwargs):
        assert "num_items_in_batch" in kwargs
        return super().forward(x)


@only_transformers
def test_distillation_with_a_loss_over_all_accumulated_batches(loop):
    model = Counted(True)
    loop.run(model, distillation_callback(loop, Teacher(), weight=2.0, output="mse"), accumulate=2)
    same(model, distilled_by_hand(0.0, 2, labels=False))


def test_distillation_and_a_method_together(loop):
    model = Net(True)
    prune = loop.callback(
        lambda model, optimizer: bs.sparsity.GradualBlockPruning(model, optimizer, 0.25, end=4, every=2, regrow=0.3)
    )
    loop.run(model, distillation_callback(loop, Teacher(), output="mse"), prune)
    assert {layer.layout.density for layer in model.layers[::2]} == {0.25}
    with pytest.raises(bs.BlockSparseError, match="temperature"):
        distillation_callback(loop, Teacher(), temperature=0)


@only_lightning
def test_a_student_that_is_not_called_is_refused(loop):
    from blocksparse.integrations.lightning import DistillationCallback

    for student, match in (("no", "student: expected one of net"), ("", "which it does not call")):
        with pytest.raises(bs.BlockSparseError, match=match):
            loop.run(Net(True), DistillationCallback(Teacher(), student))
    with pytest.raises(bs.BlockSparseError, match="automatic_optimization"):
        loop.run(Net(True), DistillationCallback(Teacher(), "net"), training_step=two_updates_a_batch)


@only_lightning
@pytest.mark.parametrize("result", ["loss", "dict", "tuple", "float", "none"])
def test_results_of_training_steps(result, loop):
    """Lightning passes only the arguments of the signature, and a step that the user has set comes back."""
    modules = []

    def training_step(batch):
        loss = modules[0].net(**batch)["loss"]
        return {"loss": loss, "dict": {"loss": loss}, "tuple": (loss,), "float": 0.0, "none": None}[result]

    def set_step(module):
        module.training_step = training_step
        modules.append(module)

    def run():
        loop.run(Net(True), distillation_callback(loop, Teacher()), on_module=set_step)

    if result in ("tuple", "float"):
        with pytest.raises(bs.BlockSparseError, match="training_step: expected a tensor, a dict or None"):
            run()
    else:
        run()
    assert vars(modules[0])["training_step"] is training_step


@only_lightning
def test_an_error_before_training_leaves_the_step_that_the_user_set(loop):
    from blocksparse.integrations.lightning import DistillationCallback

    modules = []

    def training_step(batch):
        raise AssertionError("no training")

    def set_step(module):
        module.training_step = training_step
        modules.append(module)

    with pytest.raises(bs.BlockSparseError, match="student: expected one of net"):
        loop.run(Net(True), DistillationCallback(Teacher(), "no"), on_module=set_step)
    assert vars(modules[0])["training_step"] is training_step


@pytest.mark.parametrize("kind", ["frozen", "around"])
def test_students_that_cannot_learn_are_refused(kind, loop):
    model = Net(True)
    teacher = Teacher() if kind == "frozen" else nn.Sequential(model)
    model.requires_grad_(kind != "frozen")
    expected = "parameters to train" if kind == "frozen" else "it contains the trained model"
    with pytest.raises(bs.BlockSparseError, match=expected):
        distillation_callback(loop, teacher)._distiller.begin(model, None)


def test_label_smoothing_and_distillation_are_refused():
    pytest.importorskip("transformers")
    from blocksparse.integrations.transformers import DistillationCallback

    settings = SimpleNamespace(label_smoothing_factor=0.1)
    with pytest.raises(bs.BlockSparseError, match="label_smoothing_factor"):
        DistillationCallback(Teacher()).on_train_begin(settings, None, None, model=Net(True))


@pytest.mark.parametrize("kind", ["same", "nan"])
def test_teachers_that_cannot_teach_are_refused(kind, loop):
    model = Net(True)
    teacher = model if kind == "same" else Teacher()
    if kind == "nan":
        next(teacher.parameters()).data.fill_(torch.nan)
    expected = "it is the model that is trained" if kind == "same" else "teacher: expected finite outputs"
    with pytest.raises(bs.BlockSparseError, match=expected):
        loop.run(model, distillation_callback(loop, teacher))
