"""L0 gates: the published constants and formulas, samples, and gates on the inputs of a layer."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse.sparsity import L0Gates
from blocksparse.sparsity.pruning.l0 import final_gate, open_probability, sampled_gate
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def test_golden_values():
    log_alpha = torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64)
    assert [round(p, 4) for p in open_probability(log_alpha).tolist()] == [0.4010, 0.8318, 0.9734]
    # 1.2 sig(log_alpha) = 0.1 at log_alpha = -log 11 = -2.3979.
    near = torch.tensor([-5.0, -2.398, -2.3978, 0.0, 2.3978, 2.398, 9.0], dtype=torch.float64)
    assert (final_gate(near) == 0).tolist() == [True, True] + [False] * 5
    assert (final_gate(near) == 1).tolist() == [False] * 5 + [True, True]
    assert final_gate(torch.zeros(())) == pytest.approx(0.5)
    # By hand: (log 0.3/0.7 + 0) 1.5 = -1.2709, sig 0.21910, stretched 0.16292; both ends are clipped.
    u, at = torch.tensor([0.3, 0.2, 0.9, 0.5]).double(), torch.tensor([0.0, -0.5, 1.0, 0.2]).double()
    expected = [0.16292, 0.0, 1.0, 1.2 / (1 + math.exp(-0.3)) - 0.1]
    assert sampled_gate(at, u).tolist() == pytest.approx(expected, abs=1e-5)


def test_sampled_gates_have_the_open_probability():
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    method = L0Gates(layer, samples=1, block_size=1)
    (log_alpha,) = method.parameters()
    assert log_alpha.mean().item() == pytest.approx(0, abs=1e-3)
    assert log_alpha.std().item() == pytest.approx(0.01, rel=0.1)
    for value in (-2.0, 0.0, 2.0):
        log_alpha.data.fill_(value)
        gates = layer.weight / layer.parametrizations.weight.original
        p = open_probability(torch.tensor(value)).item()
        assert (gates > 0).double().mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4096))
        assert ((gates >= 0) & (gates <= 1 + 1e-6)).all()
    layer.eval()
    assert torch.equal(layer.weight, layer.weight), "nothing is drawn in evaluation"
    layer.train()
    torch.manual_seed(3)
    drawn = layer.weight
    torch.manual_seed(3)
    assert torch.equal(layer.weight, drawn), "by PyTorch's generator"
    assert not torch.equal(layer.weight, drawn)


@pytest.mark.parametrize(("closed", "mean"), [(0.2, math.log(4)), (0.9, -math.log(9))])
def test_initial_gates(closed, mean):
    torch.manual_seed(0)
    (log_alpha,) = L0Gates(nn.Linear(50, 50), samples=1, closed=closed, block_size=1).parameters()
    assert log_alpha.mean().item() == pytest.approx(mean, abs=1e-3)


def test_the_penalty():
    layer = nn.Linear(3, 2, bias=False).double()
    layer.weight.data = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 4.0]], dtype=torch.float64)
    method = L0Gates(layer, strength=0.5, weight_decay=0.1, samples=10, block_size=2)
    (log_alpha,) = method.parameters()
    log_alpha.data = torch.tensor([[-2.0, 2.0]], dtype=torch.float64)
    penalty = method.penalty()
    # The second block has two weights and padding.
    p = open_probability(log_alpha.detach())[0].tolist()
    expected = p[0] * (0.05 * 6.25 + 0.5 * 4) + p[1] * (0.05 * 25 + 0.5 * 2)
    assert penalty.item() == pytest.approx(expected / 10, rel=1e-12)
    assert penalty.item() == pytest.approx((0.4010 * 2.3125 + 0.9734 * 2.25) / 10, abs=1e-4)
    weight = layer.parametrizations.weight.original
    grads = torch.autograd.grad(penalty, [weight, log_alpha])
    both = torch.tensor([[p[0], p[0], p[1]]], dtype=torch.float64)
    torch.testing.assert_close(grads[0], both * 0.1 * weight.detach() / 10)
    prices = [0.3125 + 2, 1.25 + 1]
    slopes = [q * (1 - q) * price / 10 for q, price in zip(p, prices, strict=True)]
    assert grads[1][0].tolist() == pytest.approx(slopes)


def test_the_gradient_through_the_gates():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 5, 2).double()
    method = L0Gates(layer, samples=1, block_size=2)
    gate, (log_alpha,) = method.gates["weight"], method.parameters()
    weight, x = layer.parametrizations.weight.original, torch.randn(2, 3, 4, 4, dtype=torch.float64)

    def output(weight, log_alpha):
        torch.manual_seed(7)
        given = {"parametrizations.weight.original": weight, "parametrizations.weight.0.log_alpha": log_alpha}
        return torch.func.functional_call(layer, given, x)

    assert layer.parametrizations.weight[0] is gate
    assert torch.autograd.gradcheck(output, (weight, log_alpha))


def test_gates_on_inputs():
    """The gate of a block with all rows and one column multiplies an input."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 9)
    method = L0Gates(layer, samples=1, block_size=(9, 1))
    (log_alpha,) = method.parameters()
    log_alpha.data.uniform_(-4, 4)
    x, weight = torch.randn(5, 40), layer.parametrizations.weight.original.detach().clone()
    torch.manual_seed(1)
    y = layer(x)
    torch.manual_seed(1)
    gates = sampled_gate(log_alpha, torch.empty(1, 40).uniform_(1e-6, 1 - 1e-6))
    torch.testing.assert_close(y, F.linear(x * gates, weight, layer.bias))
    layer.eval()
    y = layer(x)
    kept = (final_gate(log_alpha) > 0).squeeze(0)
    assert method.density == kept.double().mean()
    sparse = method.finish()
    assert torch.equal(sparse.layout.mask().squeeze(0), kept)
    torch.testing.assert_close(sparse(x), y)


def test_it_learns_which_inputs_matter():
    torch.manual_seed(0)
    x = torch.randn(500, 20)
    target = x[:, :4] @ torch.randn(4, 6)
    model = nn.Linear(20, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    method = L0Gates(model, optimizer, strength=1.0, samples=500, lr=0.1, block_size=(6, 1))
    for _ in range(150):
        update(optimizer, (model(x) - target).square().mean() + 5 * method.penalty(), method)
    assert method.layouts()["weight"].mask().int().tolist() == [[1] * 4 + [0] * 16]


def test_density_limit():
    layer = nn.Linear(5, 1)
    method = L0Gates(layer, samples=1, block_size=1, density=0.4)
    (log_alpha,) = method.parameters()
    log_alpha.data = torch.tensor([[1.0, -3.0, 3.0, 2.0, -2.0]])
    assert method.layouts()["weight"].mask().int().tolist() == [[0, 0, 1, 1, 0]]
    log_alpha.data = torch.tensor([[-4.0, -3.0, 3.0, -4.0, -3.0]])
    assert method.layouts()["weight"].mask().int().tolist() == [[0, 0, 1, 0, 0]], "what is shut stays so"
    expected = layer.eval()(torch.eye(5)).detach()
    sparse = method.finish()
    torch.testing.assert_close(sparse(torch.eye(5)), expected)


def test_another_optimizer_needs_the_gates():
    model = nn.Linear(8, 8)
    weights = list(model.parameters())
    method = L0Gates(model, torch.optim.SGD(weights, lr=0.1), samples=10, block_size=4)
    with pytest.raises(bs.BlockSparseError, match=r"an optimizer with the parameter weight\.log_alpha"):
        method.use_optimizer(torch.optim.SGD(weights, lr=0.1))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    method.use_optimizer(other)
    assert method.optimizer is other


def test_log_alpha_stays_in_its_range():
    layer = nn.Linear(4, 4)
    method = L0Gates(layer, samples=1, block_size=2)
    (log_alpha,) = method.parameters()
    log_alpha.data = torch.tensor([[-9.0, 9.0], [0.5, -1.0]])
    method.step()
    torch.testing.assert_close(log_alpha.detach(), torch.tensor([[math.log(0.01), math.log(100)], [0.5, -1.0]]))


@pytest.mark.filterwarnings("ignore:.* pruned no block:blocksparse.SparsityWarning")
def test_the_optimizer_has_the_gates_until_finish():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    method = L0Gates(model, optimizer, samples=10, lr=0.5, block_size=4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
    group = optimizer.param_groups[1]
    assert {id(p) for p in group["params"]} == {id(p) for p in method.parameters()}
    assert (group["lr"], group["weight_decay"]) == (0.5, 0)
    assert {id(p) for p in method.parameters()} < {id(p) for p in model.parameters()}
    (model(torch.randn(2, 8)).sum() + method.penalty()).backward()
    optimizer.step()
    scheduler.step()
    model = method.finish()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0]
    assert len(optimizer.state) == 4
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    scheduler.step()
    # Without one it is the user who gives them.
    model = nn.Linear(8, 8)
    method = L0Gates(model, samples=10, block_size=4, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in method.parameters()]
    method.penalty().backward()
    optimizer.step()
    assert all((p < was).all() for p, was in zip(method.parameters(), before, strict=True))


@pytest.mark.filterwarnings("ignore:.* pruned no block:blocksparse.SparsityWarning")
def test_sixteen_bits_copies_and_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    method = L0Gates(model, samples=10, block_size=4)
    assert {p.dtype for p in method.parameters()} == {torch.float32}
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    (model(x).sum() + method.penalty()).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert method.finish()[0].values.dtype == torch.bfloat16
    model = nn.Linear(16, 16)
    method = L0Gates(model, samples=10, block_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x.float()).dtype == torch.bfloat16


def test_the_penalty_follows_the_model_to_its_device():
    layer = nn.Linear(300, 300).half()
    method = L0Gates(layer, samples=9, block_size=300)
    assert method.penalty().isfinite(), "the block has more weights than the largest float16"
    layer.to("meta")
    assert method.penalty().is_meta
