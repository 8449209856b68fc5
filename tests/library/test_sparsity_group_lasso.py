"""Group lasso: penalty and proximal step by their formulas, and that training ends where the optimum is."""

import pytest
import torch
from torch import nn

from blocksparse.sparsity import GroupLasso
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_penalty():
    layer = nn.Linear(4, 2, bias=False).double()
    layer.weight.data = torch.tensor([[3.0, 4.0, 0.0, 0.0], [5.0, 12.0, -8.0, 6.0]], dtype=torch.float64)
    for weighted, factor in ((False, 1), (True, 2**0.5)):
        method = GroupLasso(layer, strength=0.1, mode="penalty", block_size=(1, 2), weighted=weighted)
        penalty = method.penalty()
        assert penalty.item() == pytest.approx(0.1 * factor * (5 + 0 + 13 + 10), rel=1e-12)
        (grad,) = torch.autograd.grad(penalty, layer.weight)
        expected = torch.tensor([[0.6, 0.8, 0, 0], [5 / 13, 12 / 13, -0.8, 0.6]], dtype=torch.float64)
        torch.testing.assert_close(grad, 0.1 * factor * expected)


def test_the_gradient_of_the_penalty():
    torch.manual_seed(0)
    lstm = nn.LSTM(5, 6).double()
    method = GroupLasso(lstm, strength=0.3, mode="penalty", block_size=4)
    weights = [lstm.weight_ih_l0, lstm.weight_hh_l0]

    def penalty(*given):
        method.dense = dict(zip(method.dense, given, strict=True))
        return method.penalty()

    assert torch.autograd.gradcheck(penalty, weights)


def test_the_proximal_step():
    layer = nn.Linear(4, 2, bias=False).double()
    # Norms 5, 0.625 (the bound itself), 0, and a little more than the bound.
    layer.weight.data = torch.tensor([[3.0, 4.0, 0.375, -0.5], [0.0, 0.0, 0.0, 0.6251]], dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.125)
    method = GroupLasso(layer, optimizer, strength=5.0, block_size=(1, 2))
    assert method.step()
    left = 1 - 0.625 / 5
    expected = torch.tensor([[3 * left, 4 * left, 0, 0], [0, 0, 0, 0.0001]], dtype=torch.float64)
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-12, atol=1e-15)
    assert (layer.weight[0, 2:] == 0).all(), "exactly"
    assert method.layouts()["weight"].mask().tolist() == [[True, False], [False, True]]


def test_each_group_of_the_optimizer_has_its_rate():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weights = [layer.weight.detach().clone() for layer in model]
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.02}]
    method = GroupLasso(model, torch.optim.SGD(groups), strength=0.5, block_size=4, weighted=True)
    method.step()
    for layer, weight, rate in zip(model, weights, (0.1, 0.02), strict=True):
        norms = weight.view(2, 4, 2, 4).norm(dim=(1, 3), keepdim=True)
        expected = weight.view(2, 4, 2, 4) * (1 - rate * 0.5 * 4 / norms).clamp(min=0)
        torch.testing.assert_close(layer.weight.detach(), expected.view(8, 8))


def test_it_converges_to_the_optimum():
    """The gradient is -strength w_g / ||w_g|| if w_g is not 0; otherwise its norm is at most the strength."""
    torch.manual_seed(0)
    x, strength = torch.randn(200, 12, dtype=torch.float64), 0.8
    target = x[:, :8] @ torch.randn(8, 8, dtype=torch.float64) * 0.4
    layer = nn.Linear(12, 8, bias=False).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.2)
    method = GroupLasso(layer, optimizer, strength, block_size=(2, 4))
    for _ in range(400):
        update(optimizer, 0.5 * (layer(x) - target).square().sum() / 200, method)
    optimizer.zero_grad()
    (0.5 * (layer(x) - target).square().sum() / 200).backward()
    grad, weight = (t.view(4, 2, 3, 4).transpose(1, 2).flatten(2) for t in (layer.weight.grad, layer.weight.detach()))
    norms = weight.norm(dim=2)
    assert 0 < (norms > 0).sum() < 12
    assert not (norms[:, 2] > 0).any(), "inputs that say nothing"
    assert (grad.norm(dim=2)[norms == 0] <= strength).all()
    expected = -strength * weight / norms[..., None]
    torch.testing.assert_close(grad[norms > 0], expected[norms > 0], rtol=1e-6, atol=1e-8)
    sparse = method.finish()
    assert sparse.layout.nnz == (norms > 0).sum()


def test_penalty_and_threshold():
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[0.5, 0.0, 0.01, -0.25]])
    method = GroupLasso(layer, strength=0.1, mode="penalty", threshold=0.25, block_size=(1, 1))
    assert not method.step()
    assert layer.weight.tolist() == [[0.5, 0.0, pytest.approx(0.01), -0.25]], "the optimizer alone changes weights"
    assert method.finish().layout.mask().tolist() == [[True, False, False, False]]


def test_density_limit():
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False))
    model[0].weight.data = torch.tensor([[5.0, 0.0, 1.0, -4.0]])
    model[1].weight.data = torch.tensor([[0.5], [3.0], [-2.0], [0.0]])

    def left(**given):
        method = GroupLasso(model, mode="penalty", block_size=1, **given)
        return [layout.mask().flatten().int().tolist() for layout in method.layouts().values()]

    assert left() == [[1, 0, 1, 1], [1, 1, 1, 0]]
    assert left(density=0.5) == [[1, 0, 0, 1], [0, 1, 1, 0]]
    assert left(density=0.25) == [[1, 0, 0, 0], [0, 1, 0, 0]], "a block of each, not both of the first"
    assert left(density=0.5, scope="layer") == [[1, 0, 0, 1], [0, 1, 1, 0]]
    assert left(density=1, scope="layer") == [[1, 0, 1, 1], [1, 1, 1, 0]], "what is 0 is not stored for that"
    assert left(density=0.5, scope="layer", threshold=4.5) == [[1, 0, 0, 0], [0, 0, 0, 0]]
