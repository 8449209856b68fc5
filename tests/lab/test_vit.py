"""Vision transformers: the model, training with blocks that move, and the experiment."""

from dataclasses import replace

import pytest
import torch

from blocksparse import BlockSparseError
from blocksparse_lab import experiments
from blocksparse_lab.data import images
from blocksparse_lab.data.images import Images
from blocksparse_lab.experiments import vision
from blocksparse_lab.experiments.transformers import TransformerContender
from blocksparse_lab.experiments.vision import ViTExperiment, held_back
from blocksparse_lab.models.gpt import GPTConfig
from blocksparse_lab.models.vit import ViT
from blocksparse_lab.recipes import vit
from blocksparse_lab.recipes.grow import Growth
from blocksparse_lab.recipes.vit import ViTSettings
from command import output

SPARSE = GPTConfig(width=32, layers=1, heads=2, context=4, density=0.5, block_size=8)
SETTINGS = ViTSettings(model=SPARSE, epochs=4, batch=8, learning_rate=0.01)

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def draw(n=96, size=8, brighter=90):
    """Return images whose second class is brighter."""
    labels = torch.arange(n + 16) % 2
    pixels = torch.randint(60, (n + 16, 3, size, size), dtype=torch.uint8) + brighter * labels.byte().view(-1, 1, 1, 1)
    return Images("nights", pixels[:n], labels[:n], pixels[n:], labels[n:], ("night", "day"))


def test_scores_depend_on_each_patch_and_its_place():
    model, image = ViT(SPARSE, (3, 8, 8), 2), torch.randn(1, 3, 8, 8, requires_grad=True)
    scores = model(image)
    (gradient,) = torch.autograd.grad(scores[0, 0], image)
    assert (gradient != 0).all()
    moved = image.detach().roll(4, -1)  # changes the order of the patches
    assert (model(moved) - scores).abs().max() > 1e-5
    other = model(torch.cat([torch.randn(1, 3, 8, 8), image]))
    torch.testing.assert_close(other[1:], scores)


def test_weights_depend_on_the_seed_alone():
    before = torch.get_rng_state()
    one, two, other = (ViT(replace(SPARSE, seed=seed), (3, 8, 8), 2).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["patches.weight"], other["patches.weight"])


@pytest.mark.parametrize("context", [3, 100, 16 * 64])
def test_patches_must_fill_an_image(context):
    with pytest.raises(BlockSparseError, match="square patches that fill 8 x 8 pixels"):
        ViT(replace(SPARSE, context=context), (3, 8, 8), 2)


@pytest.mark.parametrize("growth", [None, Growth("set"), Growth("smet", end=1.0)], ids=["fixed", "set", "smet"])
def test_it_learns_while_blocks_move(growth, tmp_path):
    trainer = vit.trainer(SETTINGS, draw(), tmp_path, growth)
    before = trainer.model.layers[0].mlp[0].layout
    assert trainer.train()["held_out"] <= 10
    assert (trainer.model.layers[0].mlp[0].layout == before) == (growth is None)


def test_validation_images_are_not_trained_on(monkeypatch):
    monkeypatch.setattr(vision, "VALIDATED", 20)
    data = draw()
    data.train[:, 0, 0, 0] = torch.arange(96)
    held = held_back(data)
    train, tested = (set(part[:, 0, 0, 0].tolist()) for part in (held.train, held.test))
    assert len(tested) == 20
    assert train | tested == set(range(96))
    assert not train & tested


@pytest.mark.parametrize("choosing", [False, True])
def test_the_experiment_from_nothing_to_the_report(choosing, tmp_path, monkeypatch):
    experiment = ViTExperiment(
        about="Tiny vision transformers",
        data="nights",
        contenders={
            "dense": TransformerContender(replace(SPARSE, density=1.0), 0.01),
            "fixed": TransformerContender(SPARSE, 0.01),
            "SET": TransformerContender(SPARSE, 0.01, growth=Growth("set")),
        },
        settings=SETTINGS,
        seeds=(0, 1),
        choosing=choosing,
    )
    monkeypatch.setattr(vision, "VALIDATED", 20)
    monkeypatch.setattr(images, "load", lambda *_: draw(brighter=3))
    monkeypatch.setitem(experiments.EXPERIMENTS, "tiny", experiment)
    output("experiment", "tiny", "--runs", tmp_path / "runs", "--out", tmp_path)
    table = (tmp_path / "tiny.md").read_text()
    assert "8 x 8, SET" in table
    assert ("validation error, %" in table) == choosing
    assert ("test error, against fixed" in table) != choosing


@pytest.mark.parametrize("name", vision.EXPERIMENTS)
def test_contenders_have_equal_multiply_adds(name, tmp_path):
    experiment = vision.EXPERIMENTS[name]
    data = Images("cifar10", *(torch.zeros(s, dtype=d) for s, d in SHAPES), tuple("abcdefghij"))
    counts = {
        vit.trainer(replace(experiment.settings, model=of.config), data, tmp_path).facts["multiply_adds_per_image"]
        for of in experiment.contenders.values()
    }
    assert max(counts) / min(counts) < 1.02


SHAPES = 2 * (((64, 3, 32, 32), torch.uint8), ((64,), torch.int64))
