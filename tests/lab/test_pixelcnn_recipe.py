"""PixelCNN++ in the trainer and on the command line: training, samples row by row, errors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import blocksparse as bs
from blocksparse_lab import experiments
from blocksparse_lab.data.images import Images
from blocksparse_lab.models import logistic_mixture
from blocksparse_lab.recipes import pixelcnn
from blocksparse_lab.recipes.pixelcnn import PixelCNNConfig, PixelCNNSettings
from blocksparse_lab.training.run_log import read
from command import output
from targets import pixelcnn as pixelcnn_bench
from test_data_tables import write_cifar10

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")

SMALL = PixelCNNConfig(filters=8, resnets=1, mixtures=2, sparse=2, depth=2)


def draw(n=24, channels=3, size=8):
    """Return images of one brightness each with some noise, so that a pixel predicts the next."""
    pixels = torch.randint(200, (n + 8, 1, 1, 1)) + torch.randint(20, (n + 8, channels, size, size))
    pixels = pixels.to(torch.uint8)
    labels = torch.arange(n + 8) % 2
    return Images("dusk", pixels[:n], labels[:n], pixels[n:], labels[n:], ("even", "odd"))


def settings(steps=8, **other):
    usual = {"learning_rate": 0.003, "warmup": 10, "ema": 0.9, "log_every": 2, "model": SMALL}
    return PixelCNNSettings(steps, **usual | other)


# -- training --------------------------------------------------------------------------------------------------------


def test_it_learns(tmp_path):
    torch.manual_seed(0)
    dense = PixelCNNConfig(8, 1, mixtures=2, dropout=0.1)
    result = pixelcnn.trainer(settings(24, eval_every=8, model=dense), draw(n=64), tmp_path).train()
    found = [line["held_out"] for line in read(tmp_path) if "held_out" in line]
    assert found == sorted(found, reverse=True)
    assert result["unit"] == "bits per dimension"
    assert found[-1] < found[0] - 0.1
    assert found[-1] < 8
    assert pixelcnn.load(tmp_path)[1] == (3, 8, 8)


def test_an_evaluation_is_the_mean_of_log_prob(tmp_path):
    data = draw()
    task = pixelcnn.trainer(settings(batch=3, evaluated=5), data, tmp_path).task
    x = logistic_mixture.scaled(data.test[:5])
    with torch.no_grad():
        model = task.model.eval()
        expected = -model.log_prob(x).mean() / 3 / torch.log(torch.tensor(2.0))
        assert task.evaluate(model) == pytest.approx(float(expected), rel=1e-5)
        assert float(task.loss(0)) == pytest.approx(float(-model.log_prob(task.take(0)).mean() / 3), rel=1e-5)


def test_every_image_is_there_once_in_an_epoch(tmp_path):
    data = draw(n=20)
    data.train[:] = torch.arange(20, dtype=torch.uint8).view(-1, 1, 1, 1)
    task, same, other = (pixelcnn.trainer(settings(seed=seed, batch=5), data, tmp_path).task for seed in (0, 0, 1))
    epochs = [[logistic_mixture.levels(task.take(e * 4 + i))[:, 0, 0, 0] for i in range(4)] for e in range(2)]
    first, second = (torch.cat(epoch) for epoch in epochs)
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(20))
    assert not torch.equal(first, second)
    assert torch.equal(task.take(6), same.take(6))
    assert not torch.equal(task.take(6), other.take(6))


# -- drawing ---------------------------------------------------------------------------------------------------------


def by_the_whole(model, count, height, width, seed):
    """Sample like `pixelcnn.sample`, but compute the whole image for each pixel."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(count, model.channels, height, width)
    for y in range(height):
        for x in range(width):
            at = (slice(None), slice(None), slice(y, y + 1), slice(x, x + 1))
            images[at] = logistic_mixture.sample(model(images)[at], model.channels, generator)
    return logistic_mixture.levels(images)


@pytest.mark.parametrize(
    ("channels", "network"),
    [
        (3, PixelCNNConfig(8, 1, mixtures=2, sparse=2)),
        pytest.param(1, PixelCNNConfig(8, 1, mixtures=2), marks=pytest.mark.full),
    ],
)
@torch.no_grad()
def test_samples_are_those_of_the_whole_image(channels, network):
    model = network.build(channels).eval()
    model.initialise(torch.rand(4, channels, 12, 4) * 2 - 1)
    told = []
    found = pixelcnn.sample(model, 2, 12, 4, seed=4, progress=lambda done, of: told.append((done, of)))
    assert torch.equal(found, by_the_whole(model, 2, 12, 4, seed=4))
    assert told == [(i + 1, 48) for i in range(48)]
    assert not torch.equal(found, pixelcnn.sample(model, 2, 12, 4, seed=5))


def test_the_layers_compute_four_rows_of_a_sample():
    model, rows = PixelCNNConfig(8, 1).build(1).eval(), []
    model.out.register_forward_hook(lambda *got: rows.append(got[1][0].shape[2]))
    pixelcnn.sample(model, 1, 8, 4)
    assert rows == [4] * (8 * 4 + 2)
    assert any(isinstance(module, bs.nn.WeightNorm) for module in model.modules())  # unchanged


def test_grid():
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 2, 2)
    found = pixelcnn.grid(images)
    assert found.shape == (5, 8, 3)
    assert found[3, 3].tolist() == [4, 4, 4]  # the fifth image is the second of the second row
    assert found[2, 0].tolist() == found[4, 7].tolist() == [255, 255, 255]


# -- the commands ----------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path):
    write_cifar10(tmp_path)
    out = tmp_path / "run"
    command = ["train", "pixelcnn", "--data", "cifar10", "--data-dir", tmp_path, "--out", out, "--filters", 4]
    command += ["--mixtures", 1, "--sparse", 2, "--steps", 2, "--batch", 2, "--eval-images", 2]
    said = output(*command)
    assert "PixelCNN++, 2 groups of channels, 4 filters, 1 deep" in said
    assert "bits per dimension of 2 images after 2 steps" in said
    assert "this run is finished" in output(*command)
    picture = tmp_path / "samples.png"
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:  # drawing 1,024 pixels would take long
        patch.setattr(
            pixelcnn, "sample", lambda model, count, *_, **__: torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
        )
        assert "4 images of 32 x 32" in output("sample", out, "--count", 4, "--out", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "out: expected a PNG file to write" in output("sample", out, "--out", tmp_path / "none" / "x.png", code=1)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"broken")
    assert "data_batch_3: expected a batch of CIFAR-10" in output(*command, code=1)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    assert "data_batch_3" in output(*command, code=1)


@pytest.mark.full
def test_the_experiment(tmp_path, monkeypatch):
    experiment = experiments.find("cifar10-pixels-small")
    data = draw(n=12)
    small = {name: replace(of, filters=4, mixtures=1, depth=1) for name, of in experiment.contenders.items()}
    how = replace(experiment.settings, steps=2, eval_every=1, batch=4, evaluated=4)
    experiment = replace(experiment, contenders=small, settings=how)
    monkeypatch.setattr(type(experiment), "load", lambda self, data_dir: data)
    for trainer in experiment.trainers(tmp_path / "runs", seeds=[0]):
        trainer.train()
    paths = experiments.write("cifar10-pixels-small", experiment, tmp_path / "runs", tmp_path)
    text = paths[1].read_text()
    assert "|  | dense | sparse x4 | sparse x5 |" in text
    assert "| channels | 4, dense | 4, 4 shuffled groups | 4, 4 shuffled groups |" in text
    assert "| bits per dimension after 1 steps |" in text
    assert [line["step"] for line in experiments.load(paths[0]).runs["dense"][0].evaluations] == [1, 2]


def test_sparse_contenders_have_about_the_parameters_of_the_dense_one():
    contenders = experiments.find("cifar10-pixels-small").contenders.values()
    fewer, more = (parameters(network) / 147_144 for network in list(contenders)[1:])
    assert 0.85 < fewer < 1 < more < 1.05


def parameters(network):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in network.build(3).parameters())


def test_the_benchmark_in_small():
    (row,) = pixelcnn_bench.rows(0.1, quick=True)
    assert "depth x2" in row.work
    assert row.met is None
    assert json.dumps(row.details)
    assert [spec.most for spec in pixelcnn_bench.SPECS] == [1.2, 1.2, None, None, None, None]


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_bad_input(tmp_path):
    data = draw()
    pixelcnn.trainer(settings(1, batch=8), data, tmp_path / "run").train()

    def trainer(images=data, where="other", **options):
        return pixelcnn.trainer(settings(1, **{"batch": 8} | options), images, tmp_path / where)

    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((tmp_path / "run" / "last.safetensors").read_bytes()[:1000])
    model = SMALL.build(3)
    for call, message in [
        (lambda: trainer(draw(size=6)), "dusk: expected images of height and width divisible by 4"),
        (lambda: trainer(batch=25), "batch: expected an int from 1 to the images to train on, 24"),
        (lambda: trainer(batch=0), "batch: expected an int from 1"),
        (lambda: trainer(evaluated=9), "evaluated: expected an int from 0, for all, to the test images, 8"),
        (lambda: trainer(model=replace(SMALL, sparse=3)), "sparse: expected groups that divide 8 filters"),
        (lambda: pixelcnn.load(tmp_path), "checkpoint: expected a file"),
        (lambda: pixelcnn.load(broken), "expected a whole checkpoint"),
        (lambda: pixelcnn.sample(model, 0, 8, 8), "count: expected a positive int"),
        (lambda: pixelcnn.sample(model, 1, 8, 6), "size: expected positive and divisible by 4"),
        (lambda: pixelcnn.sample(model, 1, 8, 8, seed=2**64), "seed: expected an int"),
        (lambda: settings(decay_per_step=0.0), "decay_per_step"),
    ]:
        with pytest.raises(bs.BlockSparseError, match=message):
            call()
