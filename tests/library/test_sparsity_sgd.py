"""The published momentum rule, and how it differs from torch.optim.SGD."""

import pytest
import torch
from torch import nn

import blocksparse as bs


def run(optimizer, w, grads, lrs):
    for grad, lr in zip(grads, lrs, strict=True):
        w.grad = grad.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return w.detach()


def test_the_formula():
    torch.manual_seed(0)
    start, grads, lrs = torch.randn(5).double(), torch.randn(6, 5).double(), [0.1, 0.1, 0.05, 0.2, 0.1, 0.3]
    w, v, mu, decay = start.clone(), torch.zeros(5).double(), 0.9, 0.01
    for grad, lr in zip(grads, lrs, strict=True):
        v = mu * v - lr * grad
        w = w + v - decay * w
    parameter = nn.Parameter(start.clone())
    optimizer = bs.sparsity.SGD([parameter], lr=0.1, momentum=mu, weight_decay=decay)
    torch.testing.assert_close(run(optimizer, parameter, grads, lrs), w, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], v, rtol=1e-13, atol=1e-13)


def test_comparison_with_torch_sgd():
    torch.manual_seed(0)
    start, grads = torch.randn(5).double(), torch.randn(6, 5).double()

    def both(lrs, decay):
        found = []
        for make in (bs.sparsity.SGD, torch.optim.SGD):
            w = nn.Parameter(start.clone())
            found.append(run(make([w], lr=0.1, momentum=0.9, weight_decay=decay), w, grads, lrs))
        return found

    ours, theirs = both([0.1] * 6, 0)
    torch.testing.assert_close(ours, theirs)
    for lrs, decay in (([0.1] * 6, 0.01), ([0.1, 0.1, 0.05, 0.05, 0.01, 0.01], 0)):
        ours, theirs = both(lrs, decay)
        assert not torch.allclose(ours, theirs, rtol=1e-3)


def test_closures_and_parameters_without_gradients():
    w, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = bs.sparsity.SGD([w, other], lr=0.1)

    def closure():
        loss = w.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    assert (w < 1).all()
    assert torch.equal(other, torch.ones(2))


@pytest.mark.parametrize("arguments", [{"lr": -1}, {"momentum": 1.5}, {"weight_decay": -0.1}, {"lr": float("nan")}])
def test_bad_arguments(arguments):
    with pytest.raises(bs.BlockSparseError, match=f"{next(iter(arguments))}: expected"):
        bs.sparsity.SGD([nn.Parameter(torch.ones(1))], **arguments)


def test_bad_arguments_of_a_group():
    w = nn.Parameter(torch.ones(1))
    with pytest.raises(bs.BlockSparseError, match="lr: expected"):
        bs.sparsity.SGD([{"params": [w], "lr": -1.0}])
    optimizer = bs.sparsity.SGD([{"params": [w], "lr": 0.5}])
    with pytest.raises(bs.BlockSparseError, match="weight_decay: expected"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "weight_decay": 5.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "momentum": 0.5})
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.5, 0.9), (0.01, 0.5)]


def trained(density):
    torch.manual_seed(0)
    layer = bs.nn.Linear(64, 64, block_size=16, density=density)
    optimizer = bs.sparsity.SGD(layer.parameters(), lr=0.1)
    layer(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("first", ["module", "optimizer"])
def test_a_state_of_another_layout(first):
    small, its_optimizer = trained(0.25)
    layer, optimizer = trained(1.0)
    loads = [
        lambda: layer.load_state_dict(small.state_dict()),
        lambda: optimizer.load_state_dict(its_optimizer.state_dict()),
    ]
    loads = loads if first == "module" else loads[::-1]
    loads[0]()
    layer(torch.randn(4, 64)).sum().backward()
    with pytest.raises(
        bs.BlockSparseError, match=r"momentum_buffer in the .*: expected .* optimizer\.state\.clear\(\)"
    ):
        optimizer.step()
    loads[1]()
    layer(torch.randn(4, 64)).sum().backward()
    optimizer.step()


def test_a_state_of_torch_sgd_without_momentum_and_one_of_adam():
    w = nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    theirs = torch.optim.SGD([w], lr=0.5)
    theirs.step()
    ours = bs.sparsity.SGD([w])
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert torch.equal(w.detach(), torch.zeros(2))
    with pytest.raises(bs.BlockSparseError, match="momentum: expected"):
        ours.load_state_dict(torch.optim.Adam([w]).state_dict())
