"""Methods of `bs.sparsity` in the loops of other libraries, against the loop written by hand."""

import logging
import warnings

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


def by_hand(name):
    model = Net(name in SPARSE)
    method = BEFORE[name](model) if name in BEFORE else None
    optimizer = optimizer_of(model)
    method = method or {**SPARSE, **DENSE}[name](model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        if hasattr(method, "penalty") and getattr(method, "mode", "penalty") == "penalty":
            loss = loss + method.penalty()
        loss.backward()
        optimizer.step()
        method.step()
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


def callback_of(kind, name, model, **options):
    return kind(BEFORE[name](model) if name in BEFORE else {**SPARSE, **DENSE}[name], **options)


# -- transformers --------------------------------------------------------------------------------------------------


def trainer(model, folder, callback, steps=STEPS, **options):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    options = {"save_strategy": "no", **options}
    settings = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=BATCH, report_to=[], disable_tqdm=True,
        use_cpu=True, max_grad_norm=0, logging_strategy="no", lr_scheduler_type="constant", seed=2, **options,
    )  # fmt: skip
    optimizer = optimizer_of(model)
    return InOrder(
        model, settings, train_dataset=data(), callbacks=[callback],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
class TestTransformers:
    @pytest.mark.parametrize("name", NAMES)
    def test_as_by_hand(self, name, tmp_path):
        callback = pytest.importorskip("blocksparse.integrations.transformers").SparsityCallback
        model = Net(name in SPARSE)
        trainer(model, tmp_path, callback_of(callback, name, model)).train()
        same(model, by_hand(name))
        assert changed(name, model)

    @pytest.mark.parametrize("name", ["SET", "RigL", "GradualPruning"])
    def test_resumed(self, name, tmp_path):
        callback = pytest.importorskip("blocksparse.integrations.transformers").SparsityCallback
        model = Net(name in SPARSE)
        saving = {"save_strategy": "steps", "save_steps": 3}
        first = trainer(model, tmp_path, callback_of(callback, name, model), **saving)
        first.train()
        again = Net(name in SPARSE)
        second = trainer(again, tmp_path, callback_of(callback, name, again), **saving)
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        same(again, by_hand(name))

    def test_a_checkpoint_without_the_methods_is_said(self, tmp_path):
        callback = pytest.importorskip("blocksparse.integrations.transformers").SparsityCallback
        saving = {"save_strategy": "steps", "save_steps": 3}
        first = trainer(Net(True), tmp_path, callback(SPARSE["SET"]), **saving)
        first.train()
        (tmp_path / "checkpoint-3" / callback.FILE).unlink()
        with pytest.raises(bs.BlockSparseError, match=r"blocksparse_methods\.safetensors"):
            trainer(Net(True), tmp_path, callback(SPARSE["SET"]), **saving).train(
                resume_from_checkpoint=str(tmp_path / "checkpoint-3")
            )

    def test_accumulated_gradients_are_one_step(self, tmp_path):
        callback = pytest.importorskip("blocksparse.integrations.transformers").SparsityCallback
        given = callback(SPARSE["SET"])
        trainer(Net(True), tmp_path, given, steps=3, gradient_accumulation_steps=2).train()
        assert given.methods[0].calls == 3


# -- Lightning -----------------------------------------------------------------------------------------------------


def lit(model, **options):
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return optimizer_of(self)

    return Lit()


def fit(module, callback, folder, steps=STEPS, resume=None, **options):
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    runner = lightning.Trainer(
        max_steps=steps, max_epochs=9, callbacks=[callback], accelerator="cpu", logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    runner.fit(module, loader, ckpt_path=resume)
    return runner


@pytest.fixture
def lightning_callback():
    pytest.importorskip("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        from blocksparse.integrations.lightning import SparsityCallback

        yield SparsityCallback


class TestLightning:
    @pytest.mark.parametrize("name", NAMES)
    def test_as_by_hand(self, name, lightning_callback, tmp_path):
        model = Net(name in SPARSE)
        fit(lit(model), callback_of(lightning_callback, name, model), tmp_path)
        same(model, by_hand(name))
        assert changed(name, model)

    @pytest.mark.parametrize("name", ["SET", "RigL", "GradualPruning"])
    def test_resumed(self, name, lightning_callback, tmp_path):
        model = Net(name in SPARSE)
        first = fit(lit(model), callback_of(lightning_callback, name, model, finish=False), tmp_path, steps=3)
        first.save_checkpoint(tmp_path / "3.ckpt")
        again = Net(name in SPARSE)
        fit(lit(again), callback_of(lightning_callback, name, again), tmp_path, resume=tmp_path / "3.ckpt")
        same(again, by_hand(name))

    def test_accumulated_gradients_are_one_step(self, lightning_callback, tmp_path):
        given = lightning_callback(SPARSE["SET"])
        fit(lit(Net(True)), given, tmp_path, steps=3, accumulate_grad_batches=2)
        assert given.methods[0].calls == 3

    def test_training_that_ends_early_leaves_the_model_dense_and_says_so(self, lightning_callback, tmp_path):
        model = Net(False)
        with pytest.warns(UserWarning, match="GradualPruning is at step 2 of 5: the model stays dense"):
            fit(lit(model), lightning_callback(DENSE["GradualPruning"]), tmp_path, steps=2)
        assert type(model.layers[0]) is nn.Linear

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ((), "methods: expected methods of blocksparse.sparsity"),
            ((3,), "methods: expected methods of blocksparse.sparsity.*got int"),
        ],
        ids=["none", "int"],
    )
    def test_what_is_no_method(self, given, message, lightning_callback):
        with pytest.raises(bs.BlockSparseError, match=message):
            lightning_callback(*given)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda model, optimizer: 3, "functions that return a method, got int"),
            (lambda model, optimizer: bs.sparsity.L0Gates(model, optimizer, samples=9, block_size=8), "made before"),
        ],
        ids=["int", "gates"],
    )
    def test_what_makes_no_method_that_can_be_used(self, make, message, lightning_callback, tmp_path):
        with pytest.raises(bs.BlockSparseError, match=message):
            fit(lit(Net(False)), lightning_callback(make), tmp_path)


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
