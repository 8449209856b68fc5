"""Check the comparison of one net trained three ways, and the drawings that it learns."""

import math
from dataclasses import replace

import pytest
import torch

from blocksparse_lab.data import letters, text
from blocksparse_lab.recipes import example_2017, three_ways
from blocksparse_lab.recipes.three_ways import (
    DENSE,
    SMALL,
    SPARSE,
    SPARSIFIED,
    WIDE,
    Settings,
    ThreeWays,
    letters_data,
    text_data,
)

TINY = Settings(
    hidden=128,
    density=0.25,
    wide=128,
    wide_density=0.25,
    wide_block=32,
    batch=32,
    steps=24,
    evaluate_every=8,
    test_size=300,
    probe=100,
    inference_budget=0.02,
)

pytestmark = pytest.mark.usefixtures("any_backend")


def trained(settings, data=None):
    comparison = ThreeWays(data or letters_data(settings), settings)
    list(comparison.train())
    comparison.finish()
    return comparison


@pytest.fixture(scope="module")
def python_help():
    return text.split(text.python_topics()[:30_000], 32)


def test_all_nets_learn_and_are_measured(python_help):
    comparison = trained(replace(TINY, steps=60), text_data(python_help, replace(TINY, steps=60)))
    assert comparison.complete
    assert comparison.ways == [DENSE, SPARSE, SPARSIFIED]
    for name, entry in comparison.entries.items():
        assert entry.done == len(entry.step_seconds) == 60
        assert entry.curve[-1][0] == entry.done
        assert entry.accuracy > 0.05  # of 256 bytes
        assert 0 < entry.bits < 8
        assert comparison.inference.time(name).median > 0
        seconds, right = comparison.seconds_and_accuracy(name)
        assert seconds == sorted(seconds)
        assert len(seconds) == len(right)
    dense, sparse = comparison.entries[DENSE], comparison.entries[SPARSE]
    assert dense.memory >= 16 * dense.parameters  # weights, gradients and two moments of Adam
    assert sparse.memory < dense.memory
    assert comparison.seconds_and_accuracy(SPARSIFIED)[0][0] > dense.seconds


def test_the_small_net_has_equal_multiply_adds(python_help):
    settings = replace(TINY, wide=256)  # at width 128, one unit more or less is 3 %
    for data, passes in ((letters_data(settings), (2, 3, 3)), (text_data(python_help, settings), (3, 3, 3))):
        comparison = ThreeWays(data, settings)
        costs = {}
        for name in (WIDE, SMALL):
            layers = [layer for layer in comparison.entries[name].net if hasattr(layer, "in_features")]
            weights = [max(p.numel() for p in layer.parameters()) for layer in layers]
            costs[name] = sum(a * b for a, b in zip(passes, weights, strict=True))
        assert costs[SMALL] == pytest.approx(costs[WIDE], rel=0.02)
        assert comparison.small_width < 0.7 * settings.wide


def test_a_seed_gives_the_same_curves_and_another_seed_others():
    few = replace(TINY, steps=8, evaluate_every=2)
    curves = [
        [(entry.curve, entry.accuracy) for entry in trained(replace(few, seed=seed)).entries.values()]
        for seed in (0, 0, 1)
    ]
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    ThreeWays(letters_data(TINY), TINY)
    assert torch.equal(torch.rand(4), expected)


def test_the_time_limit_stops_it():
    comparison = trained(replace(TINY, seconds=1e-9))
    assert [entry.done for entry in comparison.entries.values()] == [5, 5, 5, 5]
    assert comparison.comparable
    assert not comparison.complete
    assert "dense (5 of " in comparison.shortfall


def test_the_shortfall_names_the_way_that_did_not_start():
    comparison = trained(TINY)
    assert not comparison.shortfall
    del comparison.entries[SPARSIFIED]
    assert comparison.shortfall == "Training ended before the dense net was made sparse, so only two ways are shown."


def test_more_steps_than_batches_repeat_the_batches(monkeypatch):
    monkeypatch.setattr("blocksparse_lab.recipes.three_ways.MOST_BATCHES", 2)
    data = letters_data(TINY)
    assert len(data.train[1]) == 2 * TINY.batch
    assert trained(TINY, data).complete


def test_a_text_is_split_into_windows_and_the_byte_after(python_help):
    data = text_data(python_help, TINY)
    assert data.train[0].shape == (TINY.steps * TINY.batch, 32)
    assert data.test[0].shape == (TINY.test_size, 32)
    train, held_out = (bytes(part.tolist()) for part in (python_help.train, python_help.held_out))
    for (windows, labels), part in ((data.train, train), (data.test, held_out)):
        examples = torch.cat([windows, labels.unsqueeze(1)], 1)[:20]
        assert all(bytes(example) in part for example in examples.tolist())


def test_evaluation_counts_the_highest_scores_and_bits():
    scores, labels = torch.eye(4).repeat(300, 1), torch.tensor([0, 1, 2, 0]).repeat(300)
    accuracy, bits = three_ways.evaluate(torch.nn.Identity(), scores, labels)
    assert accuracy == 0.75
    total = math.log2(math.e + 3)  # of the exponentials of a row
    assert bits == pytest.approx(total - 0.75 * math.log2(math.e))


def test_drawings_are_reproducible_and_in_patches():
    drawings, labels = letters.draw(200, seed=3)
    again, _ = letters.draw(200, seed=3)
    other, _ = letters.draw(200, seed=4)
    assert torch.equal(drawings, again)
    assert not torch.equal(drawings, other)
    assert drawings.shape == (200, 1024)
    assert labels.min() >= 0
    assert labels.max() < len(letters.CLASSES) == 47
    assert drawings.mean().abs() < 1e-4
    first_patch = letters.as_pictures(drawings)[:, :8, :4].flatten(1)
    assert torch.equal(first_patch, drawings[:, :32])


def test_every_typeface_draws_every_character_differently():
    originals = letters._originals().flatten(2).float()
    assert originals.amax(2).min() > 100
    for drawn in originals:
        apart = torch.cdist(drawn, drawn) + 1e9 * torch.eye(len(drawn))
        assert apart.min() > 0


def test_the_2017_example_is_right_at_any_size():
    example = example_2017.run(hidden=128, block=16, batch=8, rounds=2, budget=0.1)
    assert example.relative_error < 2e-6
    assert 0.3 < example.layout.density < 0.7
    assert example.samples.names == ["block-sparse", "dense"]
