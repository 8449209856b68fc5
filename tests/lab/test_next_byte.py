"""Next-byte models and their race."""

import pytest
import torch

import blocksparse as bs
from blocksparse_lab.data import text
from blocksparse_lab.models.bytes import ByteMLP, dense_width, multiply_adds, parameters, small_world_layouts
from blocksparse_lab.recipes import example_2017
from blocksparse_lab.recipes.next_byte import Race, RaceSettings, bits_per_byte, contenders, outcomes

TINY = {"width": 256, "depth": 1, "embedding": 8, "block_size": 8}
RATES = {"dense": 0.004, "block-sparse": 0.01}

pytestmark = pytest.mark.usefixtures("any_backend")


def race(seed=0, **settings):
    usual = {"context": 16, "steps": 60, "batch": 64, "warmup": 5, "eval_every": 20, "probe": 200}
    how = RaceSettings(seed=seed, **usual | settings)
    models, _ = contenders(how.context, seed=seed, **TINY)
    return Race(models, RATES, text.split(text.python_topics()[:30_000], how.context), how)


@pytest.mark.parametrize("sizes", [{}, TINY, TINY | {"depth": 3, "neighbors": 6}])
def test_both_models_have_equal_parameters_and_multiply_adds(sizes):
    models, _ = contenders(**sizes)
    dense, sparse = models.values()
    assert parameters(sparse) == pytest.approx(parameters(dense), rel=0.01)
    assert multiply_adds(sparse) == pytest.approx(multiply_adds(dense), rel=0.01)
    assert sparse.width > 2 * dense.width


def test_dense_width_is_the_nearest():
    layouts = small_world_layouts(16, **TINY)

    def weights(width):
        return multiply_adds(ByteMLP(16, width, depth=1, embedding=8))

    best = dense_width(layouts, 16, embedding=8)
    off = [abs(weights(width) - layouts.weights) for width in (best - 1, best, best + 1)]
    assert min(off) == off[1]


def test_the_predicted_byte_and_what_follows_are_not_seen():
    data = text.split(text.python_topics()[:2000], 16).train
    position = torch.tensor([100])
    changed = data.clone()
    changed[100:] = 255 - changed[100:]
    before = data.clone()
    before[99] = 255 - before[99]
    for model in contenders(16, **TINY)[0].values():
        logits = model(text.windows(data, position, 16)[0])
        assert torch.equal(logits, model(text.windows(changed, position, 16)[0]))
        assert not torch.equal(logits, model(text.windows(before, position, 16)[0]))


def test_the_loss_falls_for_both():
    run = race()
    assert list(run.run()) == list(range(1, 61))
    for curve in run.curves.values():
        assert len(curve.bits) == len(curve.seconds) == 60
        assert curve.evaluated_at == [20, 40, 60]
        assert curve.held_out[-1] < curve.held_out[0] < 8
        assert sum(curve.bits[-5:]) < 0.75 * sum(curve.bits[:5])


def test_a_seed_gives_the_same_curve_and_another_seed_another():
    curves = []
    for seed in (0, 0, 1):
        run = race(seed, steps=8, eval_every=4)
        list(run.run())
        curves.append([(curve.bits, curve.held_out) for curve in run.curves.values()])
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    contenders(16, **TINY)
    assert torch.equal(torch.rand(4), expected)


def test_the_time_limit_stops_it():
    run = race(seconds=1e-9)
    assert list(run.run()) == [1]
    found = outcomes(run, at_most=50)
    assert [outcome.step.count for outcome in found] == [1, 1]


def test_bits_per_byte_of_a_model_that_knows_nothing_is_8():
    def uniform(window):
        return torch.zeros(len(window), 256)

    data = torch.arange(256, dtype=torch.uint8).repeat(10)
    assert bits_per_byte(uniform, data, context=4) == pytest.approx(8)
    assert bits_per_byte(uniform, data, context=4, at_most=10) == pytest.approx(8)


def test_mistakes_are_named():
    models, layouts = contenders(16, **TINY)
    short = text.Text("note", torch.zeros(100, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(bs.BlockSparseError, match="note: expected more than a context of 16 bytes"):
        Race(models, RATES, short, RaceSettings(context=16))
    with pytest.raises(bs.BlockSparseError, match="learning_rates"):
        Race(models, {"dense": 1.0}, short, RaceSettings(context=16))
    with pytest.raises(bs.BlockSparseError, match="window"):
        models["dense"](torch.zeros(1, 15, dtype=torch.int64))
    with pytest.raises(bs.BlockSparseError, match=r"layouts\.hidden: expected 4 for 2 layers, got 2"):
        ByteMLP(16, TINY["width"], depth=2, embedding=8, layouts=layouts)


def test_the_2017_example_is_right_at_any_size():
    example = example_2017.run(hidden=128, block=16, batch=8, rounds=2, budget=0.1)
    assert example.relative_error < 2e-6
    assert 0.3 < example.layout.density < 0.7
    assert example.samples.names == ["block-sparse", "dense"]
