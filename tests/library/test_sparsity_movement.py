"""Movement pruning: the gradient of the scores, the schedule, and blocks that come back."""

import itertools

import pytest
import torch
from torch import nn

from blocksparse.sparsity import MovementPruning
from blocksparse.sparsity.pruning.movement import StraightThrough
from blocksparse.surgery.prunable import prunable
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_gradient_by_hand():
    layer = nn.Linear(2, 2, bias=False).double()
    blocks = prunable(layer, (1, 2))[0].blocks
    weight = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    scores = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    used = StraightThrough.apply(weight, scores, torch.tensor([[True], [False]]), blocks)
    assert used.tolist() == [[1, -2], [0, 0]]
    used.backward(torch.tensor([[0.5, 1.0], [-1.0, 2.0]], dtype=torch.float64))
    # 0.5 * 1 + 1 * -2; -1 * 3 + 2 * 4, though that block is not kept.
    assert scores.grad.tolist() == [[-1.5], [5.0]]
    assert weight.grad.tolist() == [[0.5, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(11, 7), (5, 11)),
        (nn.Conv2d(5, 6, 3), (2, 5, 4, 4)),
        (nn.ConvTranspose2d(5, 6, 2), (2, 5, 4, 4)),
        (nn.LSTM(5, 6), (4, 2, 5)),
    ],
    ids=["linear", "conv", "transposed", "lstm"],
)
def test_the_gradient_is_that_of_a_real_mask(layer, shape):
    """The reference is autograd with the mask as a factor."""
    torch.manual_seed(0)
    layer, x = layer.double(), torch.randn(shape, dtype=torch.float64)
    weight = prunable(layer, 4)[0]
    blocks, dense = weight.blocks, getattr(layer, weight.parameter).detach().clone().requires_grad_()
    keep = torch.rand(blocks.grid) > 0.5
    factor = keep.double().requires_grad_()
    y = torch.func.functional_call(layer, {weight.parameter: dense * blocks.spread(factor)}, x)
    y = y[0] if isinstance(y, tuple) else y
    toward = torch.randn_like(y)
    expected = torch.autograd.grad(y, [dense, factor], toward)

    method = MovementPruning(layer, density=0.5, end=10, block_size=4)
    gate = method.gates[weight.name]
    gate.keep = keep
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    found = torch.autograd.grad(y, [method.dense[weight.name], gate.scores], toward)
    torch.testing.assert_close(found, expected)


def test_schedule_and_choice():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    method = MovementPruning(model, optimizer, 0.3, begin=2, end=10, every=2, lr=0.05, block_size=4, keep_lines=False)
    x, counts, due, masks = torch.randn(16, 24), [], [], []
    for _ in range(14):
        update(optimizer, (model(x) - x[:, :12]).square().mean())
        due.append(method.step())
        layouts = method.layouts()
        counts.append(sum(layout.nnz for layout in layouts.values()))
        masks.append(torch.cat([layout.mask().flatten() for layout in layouts.values()]))
        if due[-1]:
            scores = torch.cat([gate.scores.detach().flatten() for gate in method.gates.values()])
            assert scores[masks[-1]].min() > scores[~masks[-1]].max() if not masks[-1].all() else True
    # 36 blocks; 0.3 + 0.7 (1 - (t - 2) / 8)^3 at 2, 4, 6, 8, 10: 1, 0.5953, 0.3875, 0.3109, 0.3.
    assert counts == [36] * 3 + [21] * 2 + [14] * 2 + [11] * 7
    assert [t for t, changed in enumerate(due, 1) if changed] == [2, 4, 6, 8, 10, 11, 12, 13, 14]
    assert any((~was & now).any() for was, now in itertools.pairwise(masks)), "some come back"
    assert method.density == 11 / 36


def test_weights_that_move_away_from_zero_are_kept():
    """Large weights that shrink are removed, small ones that grow stay."""
    layer = nn.Linear(8, 4, bias=False)
    layer.weight.data[:, :4], layer.weight.data[:, 4:] = 1.0, 0.05
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    method = MovementPruning(layer, optimizer, 0.5, begin=4, end=5, block_size=4, lr=1.0)
    wanted = torch.cat([torch.full((4, 4), 0.5), torch.full((4, 4), 0.4)], 1)
    for _ in range(5):
        update(optimizer, (layer.weight - wanted).square().sum(), method)
    assert method.finish().layout.mask().tolist() == [[False, True]]


def test_the_model_has_parameters_and_buffers():
    model = nn.LSTM(8, 8)
    method = MovementPruning(model, density=0.5, end=1, block_size=4, scope="layer")
    names = {f"parametrizations.weight_{kind}_l0.{key}" for kind in ("ih", "hh") for key in ("0.scores", "0.keep")}
    assert names < set(model.state_dict())
    assert {id(p) for p in method.parameters()} < {id(p) for p in model.parameters()}
    method.step()
    assert [layout.nnz for layout in method.layouts().values()] == [8, 8]
    assert not any("parametrizations" in name for name in method.finish().state_dict())
