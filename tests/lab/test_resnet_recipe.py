"""ResNets on images: augmentation, training, and the effect of shifts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse import BlockSparseError
from blocksparse_lab import experiments
from blocksparse_lab.data.images import Images
from blocksparse_lab.models.resnet import ResNet
from blocksparse_lab.recipes import resnet
from blocksparse_lab.recipes.resnet import ImageRows, ResNetSettings, augment
from blocksparse_lab.recipes.shifts import all_shifts, consistency
from command import output
from test_data_tables import write_cifar10

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")

# Eight channels: with fewer, PyTorch 2.13 writes past the gradient of strided 1x1 weights on CPUs without AVX-512.
SMALL = ResNetSettings(width=8, blocks=(1, 1), block_size=4, epochs=2, batch=8)


def draw(n=32, channels=3, size=8):
    """Return images with a bright row and images with a bright column."""
    pixels = torch.randint(60, (n + 8, channels, size, size), dtype=torch.uint8)
    labels = torch.arange(n + 8) % 2
    pixels[labels == 0, :, 3] += 150
    pixels[labels == 1, :, :, 3] += 150
    return Images("crosses", pixels[:n], labels[:n], pixels[n:], labels[n:], ("row", "column"))


# -- data -----------------------------------------------------------------------------------------------------------


def test_channels_are_standardised():
    data = draw(n=50)
    data.train[:, 1] = 7  # a constant channel
    rows, labels = ImageRows(data).take(np.arange(50))
    expected = data.train.double()
    expected = (expected - expected.mean((0, 2, 3), keepdim=True)) / expected.std((0, 2, 3), correction=0)[
        :, None, None
    ]
    expected[:, 1] = 0
    torch.testing.assert_close(rows, expected.float(), atol=1e-5, rtol=1e-5)
    assert rows.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(labels, data.train_labels)
    held_out = torch.cat([part for part, _ in ImageRows(data).held_out(3)])
    assert torch.equal(held_out, ImageRows(data).standardised(data.test))


def test_images_are_moved_and_mirrored():
    images = torch.arange(1.0, 41).view(1, 1, 5, 8).repeat(1200, 1, 1, 1)
    found = augment(images, np.random.default_rng(), margin=2)
    assert found.shape == images.shape
    wide = torch.nn.functional.pad(images[0, 0], (2,) * 4)
    known = {
        tuple(crop[..., ::step].flatten().tolist() if step == 1 else crop.flip(-1).flatten().tolist())
        for i in range(5)
        for j in range(5)
        for crop in [wide[i : i + 5, j : j + 8]]
        for step in (1, -1)
    }
    seen = {tuple(image.flatten().tolist()) for image in found}
    assert seen <= known
    assert len(seen) == len(known) == 50  # 1,200 draws miss one of the 50 once in 10^9 runs
    assert torch.equal(augment(images, np.random.default_rng(3)), augment(images, np.random.default_rng(3)))


# -- consistency ----------------------------------------------------------------------------------------------------


def test_all_shifts_are_unique():
    image = torch.randn(2, 3, 4)
    found = {tuple(shift.flatten().tolist()) for shift in all_shifts(image)}
    assert found == {tuple(image.roll((i, j), (1, 2)).flatten().tolist()) for i in range(3) for j in range(4)}


def test_consistency_is_that_of_two_shifts():
    """Compare with the definition over all pairs of shifts."""
    torch.manual_seed(0)
    model = ResNet(classes=4, width=4, blocks=(1, 1)).eval()
    images = torch.randn(3, 3, 4, 4)
    with torch.no_grad():
        logits = [torch.stack([model(s[None])[0] for s in all_shifts(image)]) for image in images]
        middle = torch.cat(logits).mean(0)  # an untrained network's outputs hardly differ
        model.head.bias -= middle
        logits = [one - middle for one in logits]
    classes = [one.argmax(1) for one in logits]
    agree = [(one[:, None] == one).double().mean().item() for one in classes]
    found = consistency(model, images)
    assert found.agreement == pytest.approx(sum(agree) / 3)
    assert 0 < found.agreement < 1
    assert found.difference == pytest.approx(max((one - one[0]).abs().max().item() for one in logits), rel=1e-4)
    assert (found.images, found.shifts) == (3, 16)


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", [SMALL, replace(SMALL, downsample="aps", density=0.5, epochs=3)], ids=["stride", "aps"]
)
def test_it_learns(recipe, tmp_path):
    torch.manual_seed(0)
    data = draw(n=128)
    result = resnet.trainer(recipe, data, tmp_path).train()
    assert result["unit"] == "% test error"
    assert result["held_out"] <= 25
    shifted = resnet.shift_consistency(tmp_path, data, 4)
    assert json.loads((tmp_path / "consistency.json").read_text())["images"] == 4
    if recipe.downsample == "aps":
        assert shifted.agreement == 1
        assert shifted.difference < 1e-4


def test_seeds_distinguish_runs(tmp_path):
    data = draw()
    one, same, other = (resnet.trainer(replace(SMALL, seed=seed), data, tmp_path).task for seed in (0, 0, 1))
    assert torch.equal(one.take(5)[0], same.take(5)[0])
    assert not torch.equal(one.take(5)[0], other.take(5)[0])
    assert not torch.equal(one.model.stem.weight, other.model.stem.weight)


# -- the command, the experiment ------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    write_cifar10(tmp_path)
    out = tmp_path / "run"
    command = ["train", "resnet", "--data", "cifar10", "--data-dir", tmp_path, "--out", out, "--downsample", "aps"]
    command += ["--width", "4", "--blocks", "1,1", "--epochs", "1", "--batch", "10", "--density", "0.5"]
    command += ["--block-size", "2", "--shifted", "1"]
    said = output(*command)
    assert "resnet, aps, 4-8 channels, density 0.5 in blocks of 2" in said
    assert "consistency 100.00 % over all pairs of 1,024 circular shifts, 1 test image" in said
    assert "this run is finished" in output(*command)
    command = [*command[:-1], "1000000", "--out", tmp_path / "none"]  # raised before training
    assert "shifted: expected an int from 1 to the images to test on" in output(*command, code=1)
    assert not (tmp_path / "none").exists()


def test_a_wide_sparse_network_takes_as_many_multiply_adds_as_a_narrow_dense_one(tmp_path):
    data = draw(size=32)
    contenders = experiments.find("resnet-cifar10").contenders
    facts = {name: resnet.trainer(replace(of, batch=4), data, tmp_path / name).facts for name, of in contenders.items()}
    counts = {name: of["multiply_adds_per_image"] for name, of in facts.items()}
    assert counts["sparse, wide"] == pytest.approx(counts["dense"], rel=0.05)
    assert counts["sparse"] < 0.5 * counts["dense"]
    # Pixels times weights: stem, two convolutions and short-cut of each of four blocks, head.
    convolutions = [(1024, 3 * 16 * 9), (1024, 2 * 16 * 16 * 9)]
    for stage, pixels in ((1, 256), (2, 64), (3, 16)):
        before, after = 16 << (stage - 1), 16 << stage
        convolutions.append((pixels, after * (before * 9 + after * 9 + before)))
    head = 128 * len(data.classes)
    assert counts["dense"] == head + sum(pixels * weights for pixels, weights in convolutions)


@pytest.mark.full
def test_the_experiment(tmp_path, monkeypatch):
    experiment = experiments.find("shifts-cifar10")
    data = draw()
    small = {name: replace(SMALL, downsample=experiment.contenders[name].downsample) for name in ("stride", "aps")}
    experiment = replace(experiment, contenders=small, shifted=4)
    monkeypatch.setattr(type(experiment), "load", lambda self, data_dir: data)
    for trainer in experiment.trainers(tmp_path / "runs", seeds=[0, 1]):
        trainer.train()
    paths = experiments.write("shifts-cifar10", experiment, tmp_path / "runs", tmp_path)
    assert "| consistency" not in paths[1].read_text()  # not probed yet
    told = []
    for trainer in experiment.trainers(tmp_path / "runs", seeds=[0, 1]):
        experiment.probe(trainer.run, progress=lambda *of: told.append(of))
        experiment.probe(trainer.run)  # already done
    assert told == [("shifts", done, 4) for _ in range(4) for done in range(1, 5)]
    paths = experiments.write("shifts-cifar10", experiment, tmp_path / "runs", tmp_path)
    text = paths[1].read_text()
    assert "| down-sampling | stride | aps |" in text
    assert "| 100.00 ± 0.00 |" in text.split("consistency")[1]
    found = experiments.load(paths[0]).runs["stride"]
    assert all(0 < run.config["facts"]["consistency"]["agreement"] <= 1 for run in found)


# -- mistakes -------------------------------------------------------------------------------------------------------


def test_bad_input(tmp_path):
    data = draw(size=6)
    for call, message in [
        (
            lambda: resnet.trainer(ResNetSettings(blocks=(1, 1, 1), width=4), data, tmp_path),
            "crosses: expected images whose sides divide by 4, to be halved between 3 stages, got 6 x 6",
        ),
        (lambda: resnet.trainer(ResNetSettings(blocks=()), data, tmp_path), "blocks: expected one or more in each"),
        (lambda: resnet.trainer(replace(SMALL, epochs=0), data, tmp_path), "epochs: expected a positive int"),
        (lambda: resnet.trainer(replace(SMALL, batch=99), data, tmp_path), "batch: expected an int from 1 to the"),
        (lambda: resnet.load(tmp_path), "last.safetensors"),
        (
            lambda: resnet.shift_consistency(tmp_path, data, 9),
            "shifted: expected an int from 1 to the images",
        ),
        (
            lambda: consistency(torch.nn.Identity(), torch.ones(2, 3)),
            r"images: expected \[n, channels, height, width\]",
        ),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            call()


def test_a_blurred_stride_keeps_the_first_pixel_of_four():
    torch.manual_seed(0)
    model = ResNet(width=8, blocks=(1, 1), blur=3).eval()
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(images.roll((2, 4), (2, 3))), model(images))  # the stride divides these shifts
    assert not torch.allclose(model(images.roll(1, 3)), model(images), atol=1e-3)
    with pytest.raises(BlockSparseError, match="padding_mode: expected circular with stride, blur 3, got 'zeros'"):
        ResNet(blur=3, padding_mode="zeros")
