"""SR-STE by its formula, and plain N:M sparse weights after `finish`."""

import pytest
import torch
from torch import nn

import blocksparse as bs
from loops import update

nm_mask = bs.sparsity.nm_mask


def model(dtype=torch.float64):
    layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3), nn.ConvTranspose2d(12, 4, 2), nn.Flatten(), nn.Linear(100, 10)
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2)])
@pytest.mark.parametrize("decay", [2e-4, 0, 0.3])
def test_forward_and_backward(n, m, decay):
    layer = nn.Linear(16, 6, dtype=torch.float64)
    weight = layer.weight
    w, x, g = weight.detach().clone(), torch.randn(5, 16).double(), torch.randn(5, 6).double()
    bs.sparsity.SRSTE(layer, n, m, decay=decay)
    assert layer.parametrizations.weight.original is weight
    mask = nm_mask(w, n, m)
    y = layer(x)
    torch.testing.assert_close(y, x @ (mask * w).T + layer.bias, rtol=1e-13, atol=1e-13)
    (y * g).sum().backward()
    expected = g.T @ x + decay * (1 - mask.double()) * w
    torch.testing.assert_close(weight.grad, expected, rtol=1e-13, atol=1e-13)


def test_masks_follow_the_weights():
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    bs.sparsity.SRSTE(layer)
    assert layer.weight.tolist() == [[4, 3, 0, 0]]
    layer.parametrizations.weight.original.data[0, 3] = -5
    assert layer.weight.tolist() == [[4, 0, 0, -5]]


def test_a_step_of_training_by_hand():
    layer, lr, decay = nn.Linear(8, 3, bias=False, dtype=torch.float64), 0.5, 0.1
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    method = bs.sparsity.SRSTE(layer, decay=decay)
    w, x = layer.parametrizations.weight.original.detach().clone(), torch.randn(4, 8).double()
    for _ in range(3):
        update(optimizer, layer(x).square().sum())
        mask = nm_mask(w)
        w = w - lr * (2 * (x @ (w * mask).T).T @ x + decay * w * ~mask)
    method.finish()
    torch.testing.assert_close(layer.weight.detach(), w * nm_mask(w), rtol=1e-12, atol=1e-12)


def test_a_whole_model():
    net = model()
    parameters = dict(net.named_parameters())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x = torch.randn(2, 3, 8, 8).double()
    method = bs.sparsity.SRSTE(net)
    assert method.weights == ("1.weight", "2.weight", "4.weight")
    assert method.left == {"0.weight": "3 inputs are no multiple of 4"}
    for _ in range(3):
        update(optimizer, net(x).square().sum())
    expected = net(x)
    method.finish()
    torch.testing.assert_close(net(x), expected)
    after = dict(net.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    for layer in (net[1], net[4], net[2]):
        weight = layer.weight.transpose(0, 1) if isinstance(layer, nn.ConvTranspose2d) else layer.weight
        groups = (weight != 0).movedim(1, -1).unflatten(-1, (-1, 4)).sum(-1)
        assert (groups == 2).all()
    with pytest.raises(bs.BlockSparseError, match=r"after finish\(\): use the model that finish returned"):
        method.finish()


@pytest.mark.parametrize("already", [True, False])
def test_frozen_masks_and_their_checkpoint(already):
    net = model()
    x = torch.randn(2, 3, 8, 8).double()
    masks = [nm_mask(net[1].weight), nm_mask(net[4].weight)]
    method = bs.sparsity.SRSTE(net)
    method.freeze()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        assert (net[4].parametrizations.weight.original.grad[~masks[1]] == 0).all()
        optimizer.step()
        assert torch.equal(net[1].weight != 0, masks[0])
        assert torch.equal(net[4].weight != 0, masks[1])
    again = model()
    other = bs.sparsity.SRSTE(again)
    if already:
        other.freeze()
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(x), net(x))
    optimizer = torch.optim.SGD(again.parameters(), lr=0.05)
    again(x).square().mean().backward()
    optimizer.step()
    assert torch.equal(again[4].weight != 0, masks[1])
    again.load_state_dict(net.state_dict())
    for each, trained in ((method, net), (other, again)):
        expected = trained(x)
        each.finish()
        assert torch.equal(trained(x), expected)
    assert set(net.state_dict()) == set(model().state_dict())


def test_a_mask_of_another_shape_is_not_loaded():
    net = nn.Linear(8, 4)
    bs.sparsity.SRSTE(net)
    state = net.state_dict() | {"parametrizations.weight.0.mask": torch.zeros(4, 4, dtype=torch.bool)}
    before = net.weight
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.mask"):
        net.load_state_dict(state)
    assert torch.equal(net.weight, before)


def test_weights_that_stay_dense():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(12, 8), nn.LSTM(8, 8)
            self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 12)
            self.head.weight = self.embedding.weight

    net = Net()
    method = bs.sparsity.SRSTE(net)
    assert method.weights == ("first.weight",)
    assert method.left["head.weight"].startswith("tied to embedding.weight: to prune it, untie it first by ")
    assert method.left["lstm.weight_hh_l0"] == "LSTM has several weights in one call"
    method.finish()
    assert bs.sparsity.SRSTE(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), skip="0").left == {"0.weight": "skipped"}
