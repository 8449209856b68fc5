"""Methods of `bs.sparsity` in the loops of other libraries, against the loop written by hand."""

import importlib
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import blocksparse as bs

SPARSE = {
    "SET": lambda model, optimizer: bs.sparsity.SET(model, optimizer, every=2),
    "RigL": lambda model, optimizer: bs.sparsity.RigL(model, optimizer, end=6, every=2),
    "ImportancePruning": lambda model, optimizer: bs.sparsity.ImportancePruning(model, optimizer, begin=2, every=2),
}
DENSE = {
    "GradualPruning": lambda model, optimizer: bs.sparsity.GradualPruning(
        model, optimizer, 0.5, block_size=8, begin=1, end=5, every=1
    ),
    "ThresholdPruning": lambda model, optimizer: bs.sparsity.ThresholdPruning(
        model, optimizer, 1e-3, block_size=8, begin=1, ramp=2, end=5, every=1
    ),
    "GroupLasso": lambda model, optimizer: bs.sparsity.GroupLasso(model, optimizer, 0.1, block_size=8, density=0.5),
    "GroupLasso-penalty": lambda model, optimizer: bs.sparsity.GroupLasso(
        model, optimizer, 0.1, mode="penalty", block_size=8, density=0.5
    ),
}
# They change the names of the model's parameters, and so are made before its optimizer.
BEFORE = {
    "SRSTE": lambda model: bs.sparsity.SRSTE(model),
    "L0Gates": lambda model: bs.sparsity.L0Gates(model, samples=24, block_size=8, density=0.5),
    "MovementPruning": lambda model: bs.sparsity.MovementPruning(model, None, 0.5, block_size=8, end=5),
}
STEPS, BATCH = 6, 4


class Net(nn.Module):
    """With a loss as its first output, as the Trainer has it."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        if sparse:
            self.layers = bs.sparsify(self.layers, 0.5, 8, scope="layer", force=True)

    def forward(self, x, labels=None):
        torch.manual_seed(7)  # what L0Gates draw is the same in all loops
        y = self.layers(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


def data():
    # The second half is like the first, as Lightning resumes within an epoch but begins the data again.
    x = torch.randn(STEPS // 2 * BATCH, 32, generator=torch.Generator().manual_seed(1)).repeat(2, 1)
    return [{"x": row, "labels": row.flip(0)} for row in x]


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches():
    rows = data()
    for at in range(0, len(rows), BATCH):
        part = rows[at : at + BATCH]
        yield {key: torch.stack([row[key] for row in part]) for key in ("x", "labels")}


def by_hand(name, accumulate=1):
    model = Net(name in SPARSE)
    method = BEFORE[name](model) if name in BEFORE else None
    optimizer = optimizer_of(model)
    method = method or {**SPARSE, **DENSE}[name](model, optimizer)
    for at, batch in enumerate(list(batches()) * accumulate):
        loss = model(**batch)["loss"] / accumulate
        if hasattr(method, "penalty") and getattr(method, "mode", "penalty") == "penalty":
            loss = loss + method.penalty() / accumulate
        loss.backward()
        if at % accumulate == accumulate - 1:
            optimizer.step()
            method.step()
            optimizer.zero_grad()
    if hasattr(method, "finish"):
        method.finish()
    return model


def same(model, expected):
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, msg=lambda said, name=name: f"{name}: {said}")


def changed(name, model):
    """Whether the method has done its work, so that the comparison says something."""
    if name == "SRSTE":
        return bool((model.layers[0].weight == 0).any())
    layouts = [layer.layout for layer in model.layers if isinstance(layer, bs.nn.Linear)]
    return bool(layouts) and layouts != [layer.layout for layer in Net(True).layers if isinstance(layer, bs.nn.Linear)]


NAMES = [*SPARSE, *DENSE, *BEFORE]


def method_of(name, model):
    return BEFORE[name](model) if name in BEFORE else {**SPARSE, **DENSE}[name]


class Transformers:
    """The Trainer; the checkpoint of step 3 is written on the way."""

    def __init__(self, folder):
        self.callback = pytest.importorskip("blocksparse.integrations.transformers").SparsityCallback
        pytest.importorskip("accelerate")
        self.folder, self.saved = folder, folder / "checkpoint-3"

    def run(self, model, *callbacks, steps=STEPS, resume=False, accumulate=1, trainer=(), **options):
        import transformers

        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, *args):
                return torch.utils.data.SequentialSampler(self.train_dataset)

        options = {"save_strategy": "steps" if resume else "no", "save_steps": 3} | options
        settings = transformers.TrainingArguments(
            str(self.folder), max_steps=steps, per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True,
            use_cpu=True, max_grad_norm=0, logging_strategy="no", lr_scheduler_type="constant", seed=2,
            gradient_accumulation_steps=accumulate, **options,
        )  # fmt: skip
        optimizer = optimizer_of(model)
        optimizers = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
        trainer = InOrder(
            model, settings, train_dataset=data(), callbacks=list(callbacks), optimizers=optimizers, **dict(trainer)
        )
        trainer.train(resume_from_checkpoint=str(self.saved) if resume else None)

    def save(self, name, model):
        self.run(model, self.callback(method_of(name, model)), save_strategy="steps")


class Lightning:
    def __init__(self, folder):
        pytest.importorskip("lightning")
        from blocksparse.integrations.lightning import SparsityCallback

        self.callback, self.folder, self.saved = SparsityCallback, folder, folder / "3.ckpt"

    def module(self, net, training_step=None):
        import lightning

        class Lit(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net, self.automatic_optimization = net, training_step is None

            def training_step(self, batch, index):
                return training_step(self, batch) if training_step else self.net(**batch)["loss"]

            def configure_optimizers(self):
                return optimizer_of(self)

        return Lit()

    def run(self, model, *callbacks, steps=STEPS, accumulate=1, resume=False, training_step=None):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = lightning.Trainer(
            max_steps=steps, max_epochs=9, callbacks=list(callbacks), accelerator="cpu", logger=False,
            default_root_dir=self.folder, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
        trainer.fit(self.module(model, training_step), loader, ckpt_path=self.saved if resume else None)
        return trainer

    def save(self, name, model):
        trainer = self.run(model, self.callback(method_of(name, model), finish=False), steps=3)
        trainer.save_checkpoint(self.saved)


@pytest.fixture(params=[Lightning, Transformers], ids=lambda kind: kind.__name__)
def loop(request, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their own
        yield request.param(tmp_path)


only_lightning = pytest.mark.parametrize("loop", [Lightning], indirect=True)
only_transformers = pytest.mark.parametrize("loop", [Transformers], indirect=True)
ACCUMULATING = ["SET", "RigL", "GradualPruning", "L0Gates"]


@pytest.mark.parametrize(
    ("name", "accumulate"), [(name, 1) for name in NAMES] + [(name, count) for name in ACCUMULATING for count in (2, 3)]
)
def test_callbacks_train_like_a_loop_by_hand(name, accumulate, loop):
    model = Net(name in SPARSE)
    loop.run(model, loop.callback(method_of(name, model)), accumulate=accumulate)
    same(model, by_hand(name, accumulate))
    assert changed(name, model)


@pytest.mark.parametrize("name", ["SET", "RigL", "GradualPruning"])
def test_resuming_gives_the_same_bits(name, loop):
    loop.save(name, Net(name in SPARSE))
    again = Net(name in SPARSE)
    loop.run(again, loop.callback(method_of(name, again)), resume=True)
    same(again, by_hand(name))


def test_accumulated_gradients_are_one_step(loop):
    given = loop.callback(SPARSE["SET"])
    loop.run(Net(True), given, steps=3, accumulate=2)
    assert given.methods[0].calls == 3


@only_transformers
def test_a_checkpoint_without_the_methods_is_refused(loop):
    loop.save("SET", Net(True))
    (loop.saved / loop.callback.FILE).unlink()
    with pytest.raises(bs.BlockSparseError, match=r"blocksparse_methods\.safetensors"):
        loop.run(Net(True), loop.callback(SPARSE["SET"]), resume=True)


def two_updates_a_batch(module, batch):
    optimizer = module.optimizers()
    for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        optimizer.zero_grad()
        module.manual_backward(module.net(**{key: rows[half] for key, rows in batch.items()})["loss"])
        optimizer.step()


@only_lightning
@pytest.mark.parametrize("name", ["SET", "RigL"])
def test_manual_optimization_with_two_updates_a_batch(name, loop):
    model, callback = Net(True), loop.callback(SPARSE[name])
    loop.run(model, callback, steps=2 * STEPS, training_step=two_updates_a_batch)
    assert callback.methods[0].calls == 2 * STEPS
    assert changed(name, model)


@only_lightning
@pytest.mark.parametrize("name", ["SET", "GradualPruning"])
def test_averages_of_lightning_are_refused_where_they_would_mix_blocks(name, loop):
    from lightning.pytorch.callbacks import EMAWeightAveraging

    model = Net(name in SPARSE)
    message = "moves blocks. Use torch" if name == "SET" else "put EMAWeightAveraging before SparsityCallback"
    with pytest.raises(bs.BlockSparseError, match=message):
        loop.run(model, loop.callback(method_of(name, model)), EMAWeightAveraging(decay=0.9))
    if name == "GradualPruning":
        loop.run(model, EMAWeightAveraging(decay=0.9), loop.callback(method_of(name, model)))
        assert changed(name, model)


# -- training that ends early, or by an error ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GradualPruning", "ThresholdPruning", "MovementPruning"])
def test_training_that_ends_early_leaves_a_dense_model_to_finish(name, loop):
    model = Net(False)
    callback = loop.callback(method_of(name, model))
    with pytest.warns(bs.SparsityWarning, match=rf"{name} is at step 3 of 5: the model stays dense.*early=True"):
        loop.run(model, callback, steps=3)
    again = Net(False)
    again.load_state_dict(model.state_dict())
    x = next(batches())
    expected = model.eval()(**x)["logits"]
    assert torch.equal(again.eval()(**x)["logits"], expected)
    callback.methods[0].finish(early=True)
    assert changed(name, model)
    torch.testing.assert_close(model(**x)["logits"], expected)


def broken(method):
    """A method whose `finish` fails after it has taken off what it put on the model."""
    finish = method.finish

    def fail(*_):
        method.settle()
        raise OSError("no space")

    method.finish = fail
    return method, finish


@pytest.mark.parametrize("name", ["L0Gates", "MovementPruning", "GroupLasso"])
def test_an_error_in_finish_leaves_the_trained_model(name, loop):
    model, kept = Net(False), []

    def with_error(method):
        method, finish = broken(method)
        kept.append(finish)
        return method

    given = method_of(name, model)
    given = with_error(given) if name in BEFORE else (lambda m, o: with_error(DENSE[name](m, o)))
    with pytest.warns(bs.SparsityWarning, match=rf"{name} could not finish \(no space\): the model stays dense"):
        loop.run(model, loop.callback(given))
    assert set(model.state_dict()) == set(Net(False).state_dict())
    kept[0]()
    same(model, by_hand(name))


class Stop(Exception):
    pass


def test_an_error_of_others_leaves_a_model_that_loads(loop, monkeypatch):
    """Gates are still on the model, and its checkpoints load without them."""
    model = Net(False)
    method = BEFORE["MovementPruning"](model)
    step, kind = method.step, type(method)

    def fail():
        step()
        if method.calls == 4:
            raise Stop

    monkeypatch.setattr(method, "step", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(Stop):
            loop.run(model, loop.callback(method))
    messages = [str(each.message) for each in caught if each.category is bs.SparsityWarning]
    expected = [f"training was interrupted. {kind.__name__} is at step 4 of 5"] if type(loop) is Lightning else []
    assert [message.split(":")[0] for message in messages] == expected
    again, x = Net(False), next(batches())
    assert not again.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert torch.equal(again(**x)["logits"], model(**x)["logits"])
    monkeypatch.undo()
    method.finish(early=True)
    torch.testing.assert_close(again(**x)["logits"], model(**x)["logits"])


# -- several runs with one callback --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SET", "RigL", "GradualPruning", "GroupLasso"])
def test_one_callback_for_several_models(name, loop):
    callback = loop.callback(method_of(name, None))
    for _ in range(3):
        model = Net(name in SPARSE)
        loop.run(model, callback)
        same(model, by_hand(name))


@pytest.mark.parametrize("name", BEFORE)
def test_a_method_for_one_model_is_refused_for_another(name, loop):
    model = Net(False)
    callback = loop.callback(BEFORE[name](model))
    loop.run(model, callback)
    with pytest.raises(bs.BlockSparseError, match=rf"{name} was made for the model of an earlier run.*a function of"):
        loop.run(Net(False), callback)


@pytest.mark.parametrize("name", ["SET", "RigL", "GradualPruning"])
def test_a_second_run_of_one_model_continues_with_its_optimizer(name, loop):
    callback = loop.callback(method_of(name, None), finish=False)
    model, optimizers = Net(name in SPARSE), []
    for steps in (3, 2):
        loop.run(model, callback, steps=steps)
        optimizers.append(callback.methods[0].optimizer)
    assert callback.methods[0].calls == 5
    assert optimizers[0] is not optimizers[1]
    assert all(value in optimizers[1].state for value in model.parameters())


def test_a_second_run_without_its_gates_is_refused(loop):
    model = Net(False)
    callback = loop.callback(BEFORE["MovementPruning"](model))
    loop.run(model, callback, steps=2)
    with pytest.raises(bs.BlockSparseError, match=r"after the gates of MovementPruning were removed"):
        loop.run(model, callback, steps=2)


# -- the best of several checkpoints ---------------------------------------------------------------------------------


@only_transformers
@pytest.mark.parametrize("name", ["GradualPruning", "MovementPruning", "SET"])
@pytest.mark.parametrize("with_state", [True, False])
def test_the_best_model_has_its_own_pattern(name, with_state, loop):
    import transformers

    model, patterns = Net(name in SPARSE), {}

    class Note(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, model, **_):
            patterns[state.global_step] = [layer.weight.detach().clone() for layer in model.layers[::2]]

        def on_save(self, args, state, control, **_):
            if not with_state:
                (loop.folder / f"checkpoint-{state.global_step}" / loop.callback.FILE).unlink()

    scores = iter([3.0, 1.0, 4.0, 4.0, 4.0, 4.0])  # the second is the best
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.run(
            model, loop.callback(method_of(name, model)), Note(), save_strategy="steps", eval_strategy="steps",
            save_steps=1, eval_steps=1, load_best_model_at_end=True, metric_for_best_model="score",
            greater_is_better=False,
            trainer={"eval_dataset": data(), "compute_metrics": lambda _: {"score": next(scores)}},
        )  # fmt: skip
    messages = [str(each.message) for each in caught if each.category is bs.SparsityWarning]
    for layer, best in zip(model.layers[::2], patterns[2], strict=True):
        assert torch.equal(layer.weight, best)
    if name != "SET":
        start = f"{name} is at step 2 of 5" if with_state else "the best model was loaded without the state"
        assert [message.startswith(start) for message in messages] == [True]


@only_lightning
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "methods: expected methods of blocksparse.sparsity"),
        ((3,), "methods: expected methods of blocksparse.sparsity.*got int"),
        ((lambda model, optimizer: 3,), "functions that return a method, got int"),
        ((lambda model, optimizer: bs.sparsity.L0Gates(model, optimizer, samples=9, block_size=8),), "make it before"),
    ],
    ids=["none", "int", "makes an int", "makes gates"],
)
def test_arguments_that_are_no_methods(given, message, loop):
    with pytest.raises(bs.BlockSparseError, match=message):
        loop.run(Net(False), loop.callback(*given))


# -- accelerate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SET", "RigL", "GradualPruning", "GroupLasso"])
def test_accelerate(name):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net(name in SPARSE)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    method = {**SPARSE, **DENSE}[name](model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        method.step()
    if hasattr(method, "finish"):
        method.finish()
    same(accelerator.unwrap_model(model), by_hand(name))


@pytest.mark.parametrize("name", ["SET", "RigL", "GradualPruning", "MovementPruning"])
@pytest.mark.parametrize("prepared_first", [True, False])
def test_accelerate_with_accumulation(name, prepared_first):
    """`step` after each call of the optimizer's, as without accumulation; the optimizer steps in every third."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = Net(name in SPARSE)
    make = {**SPARSE, **DENSE}.get(name)
    method = BEFORE[name](model) if make is None else None
    optimizer = optimizer_of(model)
    if make and not prepared_first:
        method = make(model, optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    method = method or make(model, optimizer)
    for batch in list(batches()) * 3:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            collected = any(parameter.grad is not None for parameter in model.parameters())
            method.step()
            assert collected == any(parameter.grad is not None for parameter in model.parameters())
    assert method.calls == STEPS
    if hasattr(method, "finish"):
        method.finish()
    same(accelerator.unwrap_model(model), by_hand(name, 3))


# -- distillation ----------------------------------------------------------------------------------------------------


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


def test_label_smoothing_and_distillation_are_refused():
    pytest.importorskip("transformers")
    from blocksparse.integrations.transformers import DistillationCallback

    settings = SimpleNamespace(label_smoothing_factor=0.1)
    with pytest.raises(bs.BlockSparseError, match="label_smoothing_factor"):
        DistillationCallback(Teacher()).on_train_begin(settings, None, None, model=Net(True))
