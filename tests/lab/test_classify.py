"""Classifiers whose topology changes during training: batches, figures, and bit-exact resumption."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.data.synthetic import Synthetic
from blocksparse_lab.data.table import Table
from blocksparse_lab.models.mlp import SparseMLP
from blocksparse_lab.recipes import mlp
from blocksparse_lab.recipes.classify import ClassifyTask, Topology
from blocksparse_lab.training.trainer import Settings, Trainer
from test_trainer import Killed, assert_same

SGD = Settings(
    learning_rate=0.02, warmup=0, decay="none", weight_decay=2e-4, clip=0, log_every=3, eval_every=4, save_every=5,
    optimizer="sgd",
)  # fmt: skip
ADAM = replace(SGD, optimizer="adam", ema=0.9, learning_rate=0.005)
TOPOLOGIES = {
    "set": Topology("set"),
    "fixed": Topology(),
    "rigl": Topology("rigl", every=3),
    "smet": Topology("smet"),
    "chts": Topology("chts"),
    "gradual": Topology("gradual", initial_density=0.29, density=0.15),
    "elastic": Topology("set", elastic=True),
    "pruned": Topology("set", importance_from=1, importance_every=2),
}

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def table(n=70, classes=3):
    """Return rows around a point of each class."""
    rng = np.random.default_rng(5)
    points = rng.normal(size=(classes, 20))
    labels = np.arange(n + 30) % classes
    rows = torch.from_numpy((points[labels] + 0.7 * rng.normal(size=(n + 30, 20))).astype(np.float32))
    labels = torch.from_numpy(labels)
    return Table("points", rows[:n], labels[:n], rows[n:], labels[n:], tuple("abc"[:classes]))


def task(topology="set", epochs=6, dense=False, **arguments):
    model = SparseMLP([20, 30, 30, 3], epsilon=4, dropout=0.2, seed=1, **({"density": None} if dense else {}))
    return ClassifyTask(model, table(), epochs, 16, TOPOLOGIES[topology], seed=2, **arguments)


def train(run, made, settings):
    trainer = Trainer(made, run, replace(settings, steps=made.steps))
    return trainer, trainer.train()


# -- batches and figures -----------------------------------------------------------------------------------------------


def test_an_epoch_has_each_row_once_in_another_order():
    made = task()
    assert (made.steps_per_epoch, made.steps, made.bytes_per_step) == (4, 24, 16 * 20 * 4)
    epochs = [np.concatenate([made.rows_of(step) for step in range(4 * e, 4 * e + 4)]) for e in range(3)]
    assert all(len(set(rows)) == 64 for rows in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    # A step's rows do not depend on previous calls.
    assert np.array_equal(task().rows_of(9), made.rows_of(9))
    assert np.array_equal(made.rows_of(0), epochs[0][:16])


def test_the_figure_is_the_error_in_percent():
    class Constant(torch.nn.Module):
        def forward(self, rows):
            return torch.tensor([0.0, 1.0, 0.0]).expand(len(rows), 3)

    made = task()
    assert made.unit == "% test error"
    assert made.evaluate(Constant()) == pytest.approx(100 * 20 / 30)
    data = made.data
    made.data = Table(
        "v", data.train, data.train_labels, data.test, data.test_labels, data.classes,
        validation=data.test[:2], validation_labels=torch.tensor([1, 1]),
    )  # fmt: skip
    assert made.evaluate(Constant()) == 0


def test_a_penalty_is_added_to_the_loss():
    for method in ("set", "dense"):
        recipe = mlp.MLPSettings(method=method, hidden=(30, 30), epsilon=4, dropout=0.0, batch=16)
        model = mlp.network(recipe, table())
        plain, penalized = (mlp.task(replace(recipe, l1=l1), model, table()) for l1 in (0.0, 0.5))
        weight = model.layers[0].values if method == "set" else model.layers[0].weight
        torch.testing.assert_close(penalized.loss(0) - plain.loss(0), 0.5 * weight.abs().sum())
        penalized.loss(0).backward()
        assert weight.grad is not None
        assert ("l1" in plain.about()["model"], penalized.about()["model"]["l1"]) == (False, 0.5)
    with pytest.raises(BlockSparseError, match="l1: expected a finite number, 0 or more, got -1"):
        mlp.task(replace(recipe, l1=-1), model, table())


@pytest.mark.parametrize(
    ("topology", "dense"),
    [
        ("set", False),
        ("smet", False),
        ("chts", False),
        ("gradual", False),
        ("fixed", False),
        ("rigl", False),
        ("fixed", True),
    ],
)
def test_it_learns(topology, dense, tmp_path):
    made = task(topology, epochs=12, dense=dense)
    before = made.evaluate(made.model)
    _, result = train(tmp_path, made, SGD)
    assert result["held_out"] < 15 < before
    assert result["unit"] == "% test error"
    assert result["task"]["topology"].get("method", "none") == TOPOLOGIES[topology].method


def test_rows_made_when_they_are_asked_for(tmp_path):
    data = Synthetic(features=400, rows=64, tested=32)
    made = ClassifyTask(SparseMLP([400, 60, 2], epsilon=5), data, 3, 16, Topology("set"))
    assert train(tmp_path, made, SGD)[1]["task"]["data"] == data.digest()


# -- the topology ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "changes"), [("set", 5), ("smet", 5), ("chts", 5), ("fixed", 0), ("rigl", 6)])
def test_when_the_topology_changes(topology, changes, tmp_path):
    made = task(topology)
    seen = []
    loss = made.loss

    def noting(step):
        found = loss(step)
        layouts = tuple(layer.layout for layer in made.model.layers)
        if not seen or seen[-1][1] != layouts:
            seen.append((step, layouts))
        return found

    made.loss = noting
    train(tmp_path, made, SGD)
    # RigL changes at every third of the first 18 steps except the last, seen one step later; others between epochs.
    steps = {"fixed": [0], "rigl": [0, 3, 6, 9, 12, 15]}.get(topology, [0, 4, 8, 12, 16, 20])
    assert [step for step, _ in seen] == steps
    assert len({tuple(layout.nnz for layout in layouts) for _, layouts in seen}) == 1
    assert len({layouts[-1] for _, layouts in seen}) == 1


def test_gradual_pruning_ends_after_half_of_the_steps(tmp_path):
    made = task("gradual")
    counts = []
    update = made.after_update

    def noting():
        update()
        counts.append(sum(layer.layout.nnz for layer in made.model.layers[:-1]))

    made.after_update = noting
    train(tmp_path, made, SGD)
    assert [step for step in range(1, 24) if counts[step] != counts[step - 1]] == [3, 7, 11]
    assert counts[-1] == round(0.15 * (20 * 30 + 30 * 30))


def test_gradual_pruning_begins_with_more_connections_and_ends_with_as_many():
    recipe = mlp.MLPSettings(method="gradual", hidden=(30, 30), epsilon=2, surplus=2.0, batch=16)
    model = mlp.network(recipe, table())
    topology = mlp.task(recipe, model, table()).topology
    stored = sum(layer.layout.nnz for layer in model.layers[:-1]) / (20 * 30 + 30 * 30)
    assert stored == pytest.approx(topology.initial_density, rel=0.2)
    assert topology.initial_density == pytest.approx(2 * topology.density)


def test_elastic_mutation_moves_half_as_much_and_then_nothing(tmp_path):
    made = task("elastic", epochs=16)
    moved = []
    change = made._change

    def noting(*names):
        before = made.model.layers[0].layout.keys_of_blocks()
        change(*names)
        moved.append(len(np.setdiff1d(before, made.model.layers[0].layout.keys_of_blocks())))

    made._change = noting
    made.after_update = lambda: None
    train(tmp_path, made, SGD)
    early, later, last = moved[:8], moved[8:11], moved[11:]
    assert len(moved) == 15
    assert not any(last)
    assert 0 < 1.5 * max(later) < min(early)


def test_new_connections_have_no_momentum_and_survivors_keep_theirs():
    made = task()
    optimizer = bs.sparsity.SGD(made.model.parameters())
    ema = {name: p.detach().clone() + 1 for name, p in made.model.named_parameters()}
    made.attach(optimizer, ema)
    made.loss(0).backward()
    optimizer.step()
    layer = made.model.layers[0]
    before = {key: (v, m) for key, v, m in state(layer, optimizer, ema)}
    made.before_step(4)
    after = state(layer, optimizer, ema)
    # A dropped place may be drawn again.
    grown = [(momentum, mean) for key, momentum, mean in after if (momentum, mean) != before.get(key)]
    assert len(grown) == pytest.approx(0.3 * len(after), abs=2)
    assert all(momentum == 0 and mean != 0 for momentum, mean in grown)


def state(layer, optimizer, ema):
    places = layer.layout.mask().nonzero().tolist()
    momentum = optimizer.state[layer.values]["momentum_buffer"].flatten().tolist()
    return list(zip(map(tuple, places), momentum, ema["layers.0.values"].flatten().tolist(), strict=True))


@pytest.mark.filterwarnings("ignore:.* will never change a layout:blocksparse.SparsityWarning")
def test_in_a_step_of_rigl_no_weight_moves(tmp_path):
    made = task("rigl", epochs=1)
    trainer, _ = train(tmp_path, made, replace(SGD, weight_decay=0))
    made = task("rigl")
    trainer = Trainer(made, tmp_path / "b", replace(SGD, steps=made.steps))
    for _ in range(2):
        trainer._step()
    before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    trainer._step()
    assert torch.equal(trainer.parameters["layers.0.bias"], before["layers.0.bias"])
    assert torch.equal(trainer.parameters["layers.2.values"], before["layers.2.values"])
    kept = before["layers.0.values"][torch.isin(before["layers.0.values"], trainer.parameters["layers.0.values"])]
    assert 0 < len(kept) < len(before["layers.0.values"])


def test_importance_pruning_takes_connections_for_good(tmp_path):
    made = task("pruned")
    before = [layer.layout.nnz for layer in made.model.layers]
    _, result = train(tmp_path, made, SGD)
    after = [layer.layout.nnz for layer in made.model.layers]
    assert all(now < then for now, then in zip(after[:2], before[:2], strict=True))
    assert after[2] == before[2]
    assert result["parameters"] < sum(p.numel() for p in task("pruned").model.parameters())


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_killed_it_ends_with_the_same_bits(topology, settings, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, task(topology), settings)
    # Within an epoch, at its first step, and after the checkpoint at the end of an epoch (20).
    for step in (3, 8, 11, 21):
        made = task(topology)
        take = made.data.take

        def kill(rows, step=step, made=made, take=take):
            if np.array_equal(rows, made.rows_of(step)):
                raise Killed
            return take(rows)

        made.data = type("Data", (), {"take": staticmethod(kill), "rows": 70, "held_out": made.data.held_out})
        with pytest.raises(Killed):
            train(killed, made, settings)
    assert checkpoint.load(killed / "last.safetensors")[1]["step"] == 20
    train(killed, task(topology), settings)
    assert_same(killed, whole)


def test_another_topology_order_or_data_is_refused(tmp_path):
    train(tmp_path, task(), SGD)
    with pytest.raises(
        BlockSparseError, match=r"topology\.method set, topology\.zeta 0\.3, .* got topology\.method rigl"
    ):
        train(tmp_path, task("rigl"), SGD)
    made = task()
    other = made.data.train.clone()
    other[0, 0] += 1
    data = replace(made.data, train=other)
    with pytest.raises(BlockSparseError, match=r"data\.sha256"):
        train(tmp_path, ClassifyTask(made.model, data, 6, 16, Topology("set"), seed=2), SGD)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 71}, "batch: expected an int from 1 to the rows to train on, 70, got 71"),
        ({"batch": 0}, "batch: expected an int from 1"),
        ({"epochs": 0}, "epochs: expected a positive int, got 0"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(BlockSparseError, match=message):
        ClassifyTask(SparseMLP([20, 3], epsilon=4), table(), **({"epochs": 1, "batch": 16} | arguments))


def test_an_unknown_method():
    with pytest.raises(BlockSparseError, match=r"method: expected one of set, .*, gradual, none, got 'best'"):
        Topology("best")
