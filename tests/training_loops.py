"""Training loops of transformers and Lightning with a method of `bs.sparsity`, and the same by hand."""

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

    def run(
        self, model, *callbacks, steps=STEPS, accumulate=1, resume=False, training_step=None, on_module=lambda _: None
    ):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = lightning.Trainer(
            max_steps=steps, max_epochs=9, callbacks=list(callbacks), accelerator="cpu", logger=False,
            default_root_dir=self.folder, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
        on_module(module := self.module(model, training_step))
        trainer.fit(module, loader, ckpt_path=self.saved if resume else None)
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


def two_updates_a_batch(module, batch):
    optimizer = module.optimizers()
    for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        optimizer.zero_grad()
        module.manual_backward(module.net(**{key: rows[half] for key, rows in batch.items()})["loss"])
        optimizer.step()
