"""The stages of the pipeline example equal one process: outputs, gradients, and 50 steps with SET."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage

from blocksparse.distributed import balanced_cuts

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed" / "pipeline.py"


def example():
    spec = importlib.util.spec_from_file_location("pipeline", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_step(schedule):
    """Return this stage's gradients by the layer's place in the net, and the output on the last stage."""
    net, rank, stages = example(), dist.get_rank(), dist.get_world_size()
    cuts = balanced_cuts([layout.nnz for layout in net.layouts()], stages)
    part = net.stage(cuts[rank], cuts[rank + 1])
    stage = PipelineStage(part, rank, stages, torch.device("cpu"))
    run = net.SCHEDULES[schedule](stage, net.MICROBATCHES, loss_fn=F.cross_entropy)
    x, target = net.batch(0)
    output = run.step(*((x,) if rank == 0 else ()), target=target if rank == stages - 1 else None)
    gradients = {cuts[rank] + i: (layer.values.grad, layer.bias.grad) for i, layer in enumerate(part)}
    return gradients, None if output is None else output.detach()


def trained(schedule, steps):
    part, losses = example().train(steps, schedule)
    return [(layer.layout, layer.values.detach()) for layer in part], losses


def close(actual, expected):
    assert (actual - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
def test_outputs_and_gradients_equal_those_of_one_process(processes, stages, schedule):
    net = example()
    whole = net.stage(0, len(net.DENSITY))
    x, target = net.batch(0)
    expected = whole(x)
    F.cross_entropy(expected, target).backward()
    results = processes(stages)(one_step, schedule)
    gradients = {layer: pair for part, _ in results for layer, pair in part.items()}
    assert sorted(gradients) == list(range(len(whole)))
    close(results[-1][1], expected)
    for index, layer in enumerate(whole):
        close(gradients[index][0], layer.values.grad)
        close(gradients[index][1], layer.bias.grad)


@pytest.fixture(scope="module")
def alone():
    """Train the whole net in this process, in a loop over micro-batches; return it and the loss of each step."""
    net = example()
    whole, losses = net.stage(0, len(net.DENSITY)), []
    optimizer = torch.optim.Adam(whole.parameters(), lr=net.LEARNING_RATE)
    methods = net.evolution(whole, 0, optimizer)
    for step in range(50):
        parts = zip(*(tensor.chunk(net.MICROBATCHES) for tensor in net.batch(step)), strict=True)
        loss = torch.stack([F.cross_entropy(whole(x), target) for x, target in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for method in methods:
            method.step()
        losses.append(loss.item())
    return whole, losses


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.full)])
def test_fifty_steps_with_set_equal_those_of_one_process(processes, alone, stages):
    whole, losses = alone
    assert losses[-1] < 0.8 * losses[0]
    results = processes(stages)(trained, "1f1b", 50)
    layers = [layer for part, _ in results for layer in part]
    torch.testing.assert_close(torch.tensor(results[-1][1]), torch.tensor(losses), rtol=1e-4, atol=0)
    for layer, first, (layout, values) in zip(whole, example().layouts(), layers, strict=True):
        assert layout == layer.layout != first
        torch.testing.assert_close(values, layer.values.detach(), rtol=1e-3, atol=1e-4)
