"""The benchmark of `bs.compress`: its nets, and all ways with few steps."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import compress
from blocksparse.compression.measures import density_of
from blocksparse_lab.models.resnet import ResNet
from trained_nets import Sequences, Voices


def images(count, side=32):
    return torch.randn(count, 3, side, side), torch.randint(10, (count,))


def texts(count):
    return torch.randint(256, (count, 16)), torch.randint(2, (count,))


def next_bytes(count):
    return torch.randint(256, (count, 16)), torch.randint(256, (count, 16))


NETS = {
    "vit": (lambda divisor: compress.ViT(4 * round(16 / divisor), layers=1), images),
    "bert": (lambda divisor: compress.WordBert(256, 4 * round(16 / divisor), layers=1), texts),
    "lstm": (lambda divisor: Sequences("lstm", round(64 / divisor), 1), next_bytes),
    "resnet": (lambda divisor: ResNet(width=round(32 / divisor), blocks=(1, 1)), partial(images, side=16)),
}


def task_of(net):
    torch.manual_seed(0)
    make, batch = NETS[net]
    return compress.Task(make, [batch(16) for _ in range(4)], [batch(16)], epochs=1, in_bits=net == "lstm")


@pytest.mark.parametrize("net", NETS)
def test_compress_runs_on_every_kind_of_net(net):
    task = task_of(net)
    row = compress.outcome(task, task.make(1.0).eval(), "compress", density=0.6, steps=3, seed=0)
    assert row.metric >= 0
    assert row.density <= 1
    assert row.speedup > 0


@pytest.mark.filterwarnings("ignore:sparsify")  # of blocks that are larger than small weights
@pytest.mark.parametrize("way", [way for way in compress.WAYS if way != "compress"])
def test_every_way_trains_and_reaches_its_density(way):
    task = task_of("vit")
    model, steps = compress.WAYS[way](task, task.make(1.0).eval(), 0.5, 10, 0)
    assert steps == 10
    assert 0 <= task.metric(model) <= 100
    assert density_of(model) == pytest.approx(0.5 if way in ("gradual", "scratch") else 1, rel=0.15)


@pytest.mark.filterwarnings("ignore:sparsify")
@pytest.mark.parametrize("way", ["compress", "gradual", "scratch", "smaller dense"])
def test_ways_learn_from_the_outputs_of_a_pretrained_net(way):
    dense = Voices(divisor=4).eval()
    with torch.no_grad():
        train = [(x, dense(x)) for x in torch.randn(4, 16, 20, 40)]
    make, accuracy = (lambda divisor: Voices(4 * divisor)), (lambda model: 75.0)
    task = compress.Task(make, train, train[:1], pretrained=dense, loss=F.mse_loss, accuracy=accuracy)
    assert compress.dense_net(task, file=None) is dense
    model, _ = compress.WAYS[way](task, dense, 0.5, 4, 0)
    assert task.metric(model) == 75
    assert model(train[0][0]).shape == (16, 256)


@pytest.mark.parametrize("steps", [1, 2, 10, 11])
def test_nets_are_trained_for_any_number_of_steps(steps):
    task = task_of("bert")
    model = task.make(1.0)
    before = model.classes.weight.clone()
    compress.fit(task, model, steps, seed=0)
    assert not torch.equal(model.classes.weight, before)


@pytest.mark.parametrize("way", ["gradual", "smaller dense"])
def test_ways_take_the_time_that_they_get(way):
    task = replace(task_of("vit"), seconds=1.2)
    row = compress.outcome(task, task.make(1.0).eval(), way, density=0.5, steps=1, seed=0)
    assert 0 <= row.metric <= 100
    assert row.steps > 1
    assert row.seconds > 0.3


def test_dense_nets_are_stored(tmp_path):
    task = task_of("vit")
    first, again = (compress.dense_net(task, tmp_path / "vit.pt") for _ in range(2))
    assert torch.equal(first.classes.weight, again.classes.weight)
