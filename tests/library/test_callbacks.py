"""Methods of `bs.sparsity` in the loops of other libraries, against the loop written by hand."""

import warnings

import pytest
import torch

import blocksparse as bs
import training_loops
from training_loops import (
    BEFORE,
    DENSE,
    NAMES,
    SPARSE,
    STEPS,
    Lightning,
    Net,
    batches,
    by_hand,
    changed,
    data,
    method_of,
    only_lightning,
    only_transformers,
    optimizer_of,
    same,
    two_updates_a_batch,
)

loop = training_loops.loop
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


@only_transformers
def test_resuming_from_another_folder(loop, tmp_path):
    loop.save("SET", Net(True))
    loop.folder, again = tmp_path / "other", Net(True)
    loop.run(again, loop.callback(SPARSE["SET"]), resume=True, resume_from_checkpoint=str(loop.saved))
    same(again, by_hand("SET"))


def test_accumulated_gradients_are_one_step(loop):
    given = loop.callback(SPARSE["SET"])
    loop.run(Net(True), given, steps=3, accumulate=2)
    assert given.methods[0].calls == 3


@only_transformers
def test_a_checkpoint_without_the_methods_is_refused(loop):
    loop.save("SET", Net(True))
    (loop.saved / loop.callback.FILE).unlink()
    with pytest.raises(bs.BlockSparseError, match=r"blocksparse_methods\.safetensors.*resume_from_checkpoint=FOLDER"):
        loop.run(Net(True), loop.callback(SPARSE["SET"]), resume=True)


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
