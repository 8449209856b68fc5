"""Tensor parallelism: outputs and gradients are one process's, each process stores its part, mistakes have names."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import blocksparse as bs
from blocksparse.distributed import ColwiseParallel, RowwiseParallel


def whole_gradients(model, group=None):
    """Gradients of all parameters, of those that are cut as one process has them."""
    found = {}
    ranks = dist.get_world_size(group)
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        part, spread = getattr(module, "part", None), getattr(module, "cut_parameters", {}).get(key)
        every = [None] * ranks
        dist.all_gather_object(every, (parameter.grad, part and part.places(module.layout)), group)
        if spread is not None:
            whole = torch.cat([grad for grad, _ in every])
            whole[torch.from_numpy(np.concatenate(spread.index))] = whole.clone()
        elif key == "values" and part is not None:
            rows, cols = (np.concatenate(each) for each in zip(*(places for _, places in every), strict=True))
            whole = torch.cat([grad for grad, _ in every])[torch.from_numpy(np.lexsort((cols, rows)))]
        else:
            whole = parameter.grad
            assert all(torch.equal(whole, grad) for grad, _ in every), name
        found[name] = whole
    return found


def close(a, b, tolerance):
    assert a.shape == b.shape
    assert (a - b).norm() <= tolerance * max(b.norm(), 1e-30), (a - b).norm() / b.norm()


def compare(model, plan, x, tolerance=1e-12, ranks=None, parallelize=parallelize_module):
    """One process and the mesh, from the same model and input: outputs, gradients; returns the parallel model."""
    mesh = init_device_mesh("cpu", (ranks or dist.get_world_size(),))
    truth = copy.deepcopy(model)
    model = parallelize(model, mesh, plan)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = truth(a), model(b)
    close(z.detach(), y.detach(), tolerance)
    (y * y.detach().sin()).sum().backward()
    (z * z.detach().sin()).sum().backward()
    close(b.grad, a.grad, tolerance)
    for name, grad in whole_gradients(model).items():
        close(grad, truth.get_parameter(name).grad, tolerance)
    return model


class MLP(nn.Module):
    def __init__(self, features, hidden, **options):
        super().__init__()
        self.fc1 = bs.nn.Linear(features, hidden, activation="gelu", **options)
        self.fc2 = bs.nn.Linear(hidden, features, activation="silu", **options)

    def forward(self, x):
        return self.fc2(self.fc1(x))


PLAN = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


def mlp(dtype, tolerance, options):
    model = MLP(100, 200, density=0.4, block_size=8, dtype=dtype, **options)
    stored = sum(p.numel() for p in model.parameters())
    model = compare(model, PLAN, torch.randn(3, 5, 100, dtype=dtype), tolerance)
    assert sum(p.numel() for p in model.parameters()) < 0.7 * stored
    assert (model.fc1.part.axis, model.fc2.part.grid) == (0, (13, 25))
    assert list(model.state_dict()) == list(MLP(100, 200, block_size=8, **options).state_dict())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=str)
def test_mlp_equals_one_process(processes, ranks, dtype, tolerance, options):
    processes(ranks)(mlp, dtype, tolerance, options)
