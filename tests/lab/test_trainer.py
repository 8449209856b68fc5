"""The trainer: bit-exact resumption, clean stops, and no broken checkpoints."""

import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace

import pytest
import torch

import blocksparse as bs
from blocksparse import BlockSparseError, checkpoint
from blocksparse.checkpoint import part
from blocksparse_lab import machine
from blocksparse_lab.training import run_log
from blocksparse_lab.training.optimizers import learning_rate
from blocksparse_lab.training.trainer import Callback, Settings, Task, Trainer

SETTINGS = Settings(
    steps=24, learning_rate=0.02, warmup=4, ema=0.9, clip=0.5, weight_decay=0.1, log_every=5, eval_every=8, save_every=7
)
TIMES = {"seconds", "bytes_per_second"}

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


class Killed(BaseException):
    """Ends a training like SIGKILL, without any handling."""


class Walk(Task):
    """A task with everything that may be carried over: a state, random numbers, a layout, a one-dimensional gain."""

    unit, per_nat, bytes_per_step = "nats", 1.0, 8

    def __init__(self, density=0.5, name="walk"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.model = torch.nn.Sequential(
                bs.nn.Linear(16, 16, density=density, block_size=4), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
            )
        self.name = name
        self.state = torch.zeros(8, 16)
        self.at = {}

    def loss(self, step):
        if step in self.at:
            self.at[step]()
        self.state = 0.9 * self.state + torch.randn(8, 16)
        target = self.state[:, :3].sum(1, keepdim=True)
        return (self.model(self.state) - target).square().mean() * (1 if step != self.at.get("nan") else float("nan"))

    def evaluate(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        torch.randn(3)  # random draws of an evaluation must not affect the training
        x = torch.linspace(-1, 1, 64).view(4, 16)
        return (model(x) - x[:, :3].sum(1, keepdim=True)).square().mean().item()

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state = state["state"]

    def about(self):
        return {"kind": "walk", "data": {"name": self.name}}


def fail(error):
    def raises(*_):
        raise error

    return raises


def killed(run, step, settings=SETTINGS):
    """Train a run until it is killed in a step."""
    task = Walk()
    task.at[step] = fail(Killed())
    with pytest.raises(Killed):
        Trainer(task, run, settings).train()


def tensors(run):
    return checkpoint.load(run / "last.safetensors")[0]


def lines(run):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in run_log.read(run)]


def assert_same(run, other):
    ours, theirs = tensors(run), tensors(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert lines(run) == lines(other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    run = tmp_path_factory.mktemp("whole")
    with nullcontext() if bs.backends()["cpu"] else bs.use_backend("reference"):
        Trainer(Walk(), run, SETTINGS).train()
    return run


# -- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_records_its_steps(whole):
    log = run_log.read(whole)
    assert [line["step"] for line in log if "loss" in line] == [5, 10, 15, 20, 24]
    assert [line["step"] for line in log if "held_out" in line] == [8, 16, 24]
    assert log[0].keys() == {"step", "loss", "lr", "grad_norm", "seconds", "bytes_per_second"}
    assert log[0]["lr"] == SETTINGS.learning_rate
    result = json.loads((whole / "result.json").read_text())
    assert result["held_out"] == log[-1]["held_out"]
    assert (result["unit"], result["steps"], result["bytes"]) == ("nats", 24, 192)
    assert result["parameters"] == 8 * 16 + 16 + 17
    assert result["machine"]["torch"] == torch.__version__
    assert json.loads((whole / "config.json").read_text())["settings"]["warmup"] == 4
    assert not list(whole.glob("*.part"))


def test_a_result_names_the_commits_that_its_steps_are_of(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "checkout", lambda: ("a" * 40, False))
    killed(tmp_path, 12)
    monkeypatch.setattr(machine, "checkout", lambda: ("b" * 40, False))
    later = Trainer(Walk(), tmp_path, SETTINGS)
    monkeypatch.setattr(machine, "checkout", lambda: ("c" * 40, True))  # during the run
    here = later.train()["machine"]
    assert (here["commit"], here["dirty"]) == ("b" * 40, False)
    assert here["codes"] == ["a" * 8, "b" * 8]
    assert machine.commits({"set": [here]}) == "; the runs are of commits aaaaaaaa, bbbbbbbb"
    other = here | {"codes": ["b" * 8]}
    told = "; the runs are of commits aaaaaaaa (set), bbbbbbbb"
    assert machine.commits({"set": [here], "dense": [other]}) == told
    assert "codes" not in Trainer(Walk(), tmp_path / "whole", SETTINGS).train()["machine"]


def test_the_logged_loss_is_the_mean_since_the_last_line(tmp_path):
    Trainer(Walk(), tmp_path / "1", replace(SETTINGS, steps=6, log_every=1)).train()
    Trainer(Walk(), tmp_path / "3", replace(SETTINGS, steps=6, log_every=3)).train()
    each = [line["loss"] for line in lines(tmp_path / "1") if "loss" in line]
    assert [line["loss"] for line in lines(tmp_path / "3") if "loss" in line] == pytest.approx(
        [sum(each[:3]) / 3, sum(each[3:]) / 3]
    )


def test_log_evaluation_and_save_intervals_change_no_bit(whole, tmp_path):
    Trainer(Walk(), tmp_path, replace(SETTINGS, log_every=24, eval_every=3, save_every=5)).train()
    ours, theirs = tensors(tmp_path), tensors(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "trainer.total")


def test_training_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    Trainer(Walk(), tmp_path, replace(SETTINGS, steps=2)).train()
    assert torch.equal(torch.rand(4), expected)


def test_a_finished_run_shows_its_result_again(whole):
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    task = Walk()
    task.loss = fail(AssertionError("it trains"))
    assert Trainer(task, whole, SETTINGS).train() == json.loads((whole / "result.json").read_text())
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_curves_for_tensorboard(whole):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole))
    events.Reload()
    assert {"loss", "held_out", "lr", "grad_norm"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("held_out")] == [8, 16, 24]


def test_without_tensorboard_a_note_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    notes = []
    watch = Callback()
    watch.note = notes.append
    Trainer(Walk(), tmp_path, replace(SETTINGS, steps=2)).train(watch)
    assert len(notes) == 1
    assert "TensorBoard" in notes[0]
    assert not list(tmp_path.glob("events*"))


# -- going on ------------------------------------------------------------------------------------------------------


def test_a_log_that_was_cut_is_noted(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["step"] < 16))
    notes, watch = [], Callback()
    watch.note = notes.append
    Trainer(Walk(), tmp_path / "run", SETTINGS).train(watch)
    assert len(notes) == 1
    assert "log.jsonl lacks what is after step " in notes[0]
    assert notes[0].endswith(", up to 24")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [3, 7, 8, 17, 23])
def test_a_run_killed_in_a_step_ends_with_the_same_bits(step, dtype, whole, tmp_path):
    settings = replace(SETTINGS, dtype=dtype)
    killed(tmp_path, step, settings)
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == step // 7 * 7
    Trainer(Walk(), tmp_path, settings).train()
    if dtype == "bfloat16":
        whole = tmp_path / "whole"
        Trainer(Walk(), whole, settings).train()
    assert_same(tmp_path, whole)


def test_checkpoints_have_a_largest_age(tmp_path):
    killed(tmp_path, 5, replace(SETTINGS, save_every=0, save_minutes=1e-9))
    assert checkpoint.load(tmp_path / "last.safetensors")[1]["step"] == 5


def test_tensorboard_forgets_what_was_trained_twice(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed(tmp_path, 12)
    Trainer(Walk(), tmp_path, SETTINGS).train()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("held_out")] == [8, 16, 24]
    assert [event.step for event in events.Scalars("loss")] == [5, 10, 15, 20, 24]


@pytest.mark.parametrize("nth", range(5))
@pytest.mark.parametrize("moment", ["before", "in", "after"])
def test_a_run_killed_in_a_save_ends_with_the_same_bits(moment, nth, whole, tmp_path, monkeypatch):
    own, calls = checkpoint.save, []

    def save(path, *arguments):
        calls.append(path)
        if len(calls) <= nth:
            return own(path, *arguments)
        if moment == "in":
            path.with_name(f"{path.name}.part").write_bytes(b"half a checkp")
        if moment == "after":
            own(path, *arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        with pytest.raises(Killed):
            Trainer(Walk(), tmp_path, SETTINGS).train()
    # The last line may also be cut.
    log = tmp_path / "log.jsonl"
    if log.read_bytes():
        log.write_bytes(log.read_bytes() + b'{"step": 24, "los')
    Trainer(Walk(), tmp_path, SETTINGS).train()
    assert_same(tmp_path, whole)
    assert (tmp_path / "result.json").exists()


def test_a_run_killed_before_its_result_writes_it_later(whole, tmp_path):
    (tmp_path / "last.safetensors").write_bytes((whole / "last.safetensors").read_bytes())
    result = Trainer(Walk(), tmp_path, SETTINGS).train()
    assert result["held_out"] == json.loads((whole / "result.json").read_text())["held_out"]


def test_a_changed_layout_is_restored(tmp_path):
    task, other = Walk(), Walk(density=0.25)
    task.at[15] = fail(Killed())
    sparser = other.model[0]

    def prune():
        # Change layout, values and Adam's and the mean's state, as a method of sparse training does.
        weight = trainer.parameters["0.values"]
        weight.grad = None
        task.model[0].load_state_dict(sparser.state_dict())
        trainer.optimizer.state[weight] |= {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        trainer.ema["0.values"] = weight.detach().clone()

    task.at[10] = prune
    trainer = Trainer(task, tmp_path, SETTINGS)
    with pytest.raises(Killed):
        trainer.train()
    resumed = Walk()
    trainer = Trainer(resumed, tmp_path, SETTINGS)
    trainer.train()
    assert resumed.model[0].layout == sparser.layout
    assert trainer.ema["0.values"].shape == sparser.values.shape
    assert trainer.step == 24


def test_a_task_receives_the_optimizer_and_the_means(tmp_path):
    task, given = Walk(), []
    task.attach = lambda optimizer, ema: given.append((optimizer, ema))
    trainer = Trainer(task, tmp_path, replace(SETTINGS, steps=2))
    assert given == [(trainer.optimizer, trainer.ema)]
    trainer.train()
    Trainer(task, tmp_path, replace(SETTINGS, steps=2)).train()
    assert given[1][1].keys() == trainer.ema.keys()


SGD = replace(SETTINGS, optimizer="sgd", momentum=0.8, clip=0, ema=0, weight_decay=0.01, warmup=0, decay="none")


def test_old_gradients_are_not_added(whole, tmp_path):
    task = Walk()
    for parameter in task.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    Trainer(task, tmp_path, SETTINGS).train()
    assert_same(tmp_path, whole)
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_momentum_sgd_follows_its_formula(tmp_path):
    task = Walk()
    w = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    v = {name: torch.zeros_like(p) for name, p in w.items()}
    gradients = []
    loss = task.loss
    task.loss = lambda step: note(loss(step))

    def note(value):
        named = dict(task.model.named_parameters())
        gradients.append(dict(zip(named, torch.autograd.grad(value, named.values(), retain_graph=True), strict=True)))
        return value

    Trainer(task, tmp_path, replace(SGD, steps=3)).train()
    for g in gradients:
        for name in w:
            v[name] = 0.8 * v[name] - 0.02 * g[name]
            w[name] = w[name] + v[name] - 0.01 * w[name]
    for name, p in task.model.named_parameters():
        torch.testing.assert_close(p.detach(), w[name])


@pytest.mark.parametrize("step", [3, 17])
def test_a_killed_run_of_momentum_sgd_ends_with_the_same_bits(step, tmp_path):
    Trainer(Walk(), tmp_path / "whole", SGD).train()
    killed(tmp_path / "killed", step, SGD)
    Trainer(Walk(), tmp_path / "killed", SGD).train()
    assert "optimizer.0.values.momentum_buffer" in tensors(tmp_path / "killed")
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_a_run_of_a_version_without_optimizer_settings_resumes(whole, tmp_path):
    killed(tmp_path, 16)
    path = tmp_path / "last.safetensors"
    content, about = checkpoint.load(path)
    del about["settings"]["optimizer"], about["settings"]["momentum"]
    checkpoint.save(path, content, about)
    with pytest.raises(BlockSparseError, match="optimizer adam, got optimizer sgd; use a new folder"):
        Trainer(Walk(), tmp_path, replace(SETTINGS, optimizer="sgd")).train()
    Trainer(Walk(), tmp_path, SETTINGS).train()
    assert_same(tmp_path, whole)


@dataclass(frozen=True)
class WalkSettings(Settings):
    """Settings of a recipe, with a field of its own."""

    stride: int = 1


def test_the_settings_of_a_recipe_identify_its_run(tmp_path):
    """All are saved. A run of an older version has only the settings that all runs share, and resumes."""
    settings = WalkSettings(**asdict(SETTINGS), stride=3)
    Trainer(Walk(), tmp_path, settings).train()
    saved = json.loads((tmp_path / "config.json").read_text())["settings"]
    assert saved == json.loads(json.dumps(asdict(settings)))
    with pytest.raises(BlockSparseError, match="the run's settings: stride 3, got stride 2; use a new folder"):
        Trainer(Walk(), tmp_path, replace(settings, stride=2)).train()
    values, about = checkpoint.load(tmp_path / "last.safetensors")
    del about["settings"]["stride"]
    checkpoint.save(tmp_path / "last.safetensors", values, about)
    Trainer(Walk(), tmp_path, replace(settings, steps=30, decay=SETTINGS.decay)).train()
    assert checkpoint.about(tmp_path / "last.safetensors")["settings"]["stride"] == 3
    with pytest.raises(BlockSparseError, match="the run's settings: warmup 4, got warmup 5; use a new folder"):
        Trainer(Walk(), tmp_path, replace(settings, steps=30, warmup=5)).train()


def test_a_finished_run_is_extended(tmp_path):
    """At a constant rate, an extended run ends with the bits of a run that started with as many steps."""
    settings = replace(SETTINGS, decay="none")
    Trainer(Walk(), tmp_path / "extended", settings).train()
    result = Trainer(Walk(), tmp_path / "extended", replace(settings, steps=40)).train()
    assert result["steps"] == 40
    Trainer(Walk(), tmp_path / "whole", replace(settings, steps=40)).train()
    assert checkpoint.load(tmp_path / "extended" / "last.safetensors")[1]["step"] == 40
    ours, theirs = (checkpoint.load(tmp_path / name / "last.safetensors")[0] for name in ("extended", "whole"))
    for name, tensor in theirs.items():
        if name.startswith(("model.", "optimizer.", "ema.")):
            assert torch.equal(ours[name], tensor), name


def test_a_stopped_extension_is_not_finished(tmp_path):
    Trainer(Walk(), tmp_path, SETTINGS).train()
    for step in Trainer(Walk(), tmp_path, replace(SETTINGS, steps=40)).steps():
        if step == 30:
            break
    assert not (tmp_path / "result.json").exists()
    assert Trainer(Walk(), tmp_path, replace(SETTINGS, steps=40)).train()["steps"] == 40


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ({"name": "talk"}, {}, "the run's settings: data.name walk, got data.name talk; use a new folder"),
        ({}, {"learning_rate": 0.1, "clip": 1.0}, "learning_rate 0.02, clip 0.5, got learning_rate 0.1, clip 1.0"),
        ({}, {"steps": 20}, "steps 24, got steps 20"),
    ],
)
def test_another_task_or_other_settings_are_refused(task, changes, message, whole):
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    with pytest.raises(BlockSparseError) as error:
        Trainer(Walk(**task), whole, replace(SETTINGS, **changes)).train()
    assert message in str(error.value)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_a_broken_checkpoint_and_a_log_without_one_are_refused(tmp_path):
    Trainer(Walk(), tmp_path, replace(SETTINGS, steps=2)).train()
    path = tmp_path / "last.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BlockSparseError, match="expected a whole checkpoint"):
        Trainer(Walk(), tmp_path, replace(SETTINGS, steps=2)).train()
    path.unlink()
    with pytest.raises(BlockSparseError, match=r"expected last\.safetensors beside log\.jsonl"):
        Trainer(Walk(), tmp_path, replace(SETTINGS, steps=2)).train()
    assert lines(tmp_path)


# -- the pieces ----------------------------------------------------------------------------------------------------


def test_the_mean_of_the_parameters_is_what_is_evaluated(tmp_path):
    seen = []

    class Seen(Walk):
        def evaluate(self, model):
            seen.append(model[2].weight.clone())
            return super().evaluate(model)

    task = Seen()
    expected, history = task.model[2].weight.detach().clone(), []
    watch = Callback()
    watch.after_step = lambda step: history.append(task.model[2].weight.detach().clone())
    Trainer(task, tmp_path, replace(SETTINGS, steps=12, ema=0.7, eval_every=0)).train(watch)
    for step, weight in enumerate(history):
        decay = min(0.7, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
    assert torch.allclose(seen[0], expected, atol=1e-6)
    assert not torch.allclose(seen[0], history[-1], atol=1e-6)
    assert torch.equal(task.model[2].weight, history[-1])
    assert torch.equal(part(tensors(tmp_path), "ema.")["2.weight"], seen[0])


def test_the_update_is_that_of_adamw(tmp_path):
    class Square(Walk):
        def loss(self, step):
            return (self.model[2].weight - 3).square().sum() * 100

    task, plain = Square(), Square().model[2].weight
    settings = Settings(steps=8, learning_rate=0.1, warmup=3, weight_decay=0.2, clip=2.0)
    optimizer = torch.optim.AdamW([plain], weight_decay=0.2, fused=False)
    for step in range(8):
        optimizer.zero_grad()
        ((plain - 3).square().sum() * 100).backward()
        torch.nn.utils.clip_grad_norm_([plain], 2.0)
        optimizer.param_groups[0]["lr"] = learning_rate(settings, step)
        optimizer.step()
    Trainer(task, tmp_path, settings).train()
    assert torch.allclose(task.model[2].weight, plain, atol=1e-6)


def test_an_unknown_device(tmp_path):
    with pytest.raises(BlockSparseError, match="device: expected cpu, or cuda where there is a GPU, got 'abacus'"):
        Trainer(Walk(), tmp_path, replace(SETTINGS, device="abacus"))
