"""Methods on modules with several weights, compared with the densified model."""

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.nn.module import BlockSparseModule
from loops import update

pytestmark = pytest.mark.usefixtures("any_backend")


class Net(nn.Module):
    """30 features are no multiple of the blocks."""

    def __init__(self, kind):
        super().__init__()
        self.layer = kind(30, 2, batch_first=True) if kind is nn.MultiheadAttention else kind(30, 30)

    def forward(self, x):
        y = self.layer(x, x, x) if hasattr(self.layer, "num_heads") else self.layer(x)
        return y[0] if isinstance(y, tuple) else y


KINDS = {kind.__name__: kind for kind in (nn.LSTM, nn.GRU, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.MultiheadAttention)}


@pytest.fixture(params=KINDS)
def net(request):
    torch.manual_seed(0)
    model = Net(KINDS[request.param]).double()
    shape = (5, 30) if "Cell" in request.param else (5, 3, 30)
    return model, torch.randn(shape, dtype=torch.float64)


def train(model, x, optimizer, method, steps=6):
    for _ in range(steps):
        update(optimizer, model(x).square().mean(), method)


def is_as_densified(model, x):
    assert any(isinstance(module, BlockSparseModule) for module in model.modules())
    torch.testing.assert_close(model(x), bs.densify(model)(x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gradual", "lasso"])
def test_dense_weights_are_pruned(net, name):
    model, x = net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if name == "gradual":
        method = bs.sparsity.GradualPruning(model, optimizer, 0.4, begin=1, end=4, every=1, block_size=8)
    else:
        method = bs.sparsity.GroupLasso(model, optimizer, 130.0, block_size=8)
    train(model, x, optimizer, method)
    assert 0 < method.density < 1
    is_as_densified(method.finish(), x)


def test_topologies_evolve(net):
    model, x = net
    sparse = bs.sparsify(model, 0.5, 8, scope="layer", force=True)
    before = [module.layout for module in sparse.modules() if isinstance(module, BlockSparseModule)]
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.01, momentum=0.9)
    train(sparse, x, optimizer, bs.sparsity.SET(sparse, optimizer, 0.3))
    assert before != [module.layout for module in sparse.modules() if isinstance(module, BlockSparseModule)]
    is_as_densified(sparse, x)


def test_states_load_into_dense_models(net):
    model, x = net
    sparse = bs.sparsify(model, 0.5, 8, scope="layer", force=True)
    torch.testing.assert_close(bs.load_sparsified(model, sparse.state_dict())(x), sparse(x))


def test_they_are_timed_as_a_whole_and_reported(net):
    model, _ = net
    sparse = bs.sparsify(model, 0.5, 8, scope="layer", force=True)
    rows = [row for row in bs.report(sparse, tokens=4).rows if row.block is not None]
    assert rows
    assert all(row.speed_up > 0 for row in rows)
    assert {row.name for row in rows} <= {name for name, _ in model.named_parameters()}


def test_calibration_data_are_taken(net):
    model, x = net
    is_as_densified(bs.sparsify(model, 0.5, 8, data=[x, x + 1], force=True), x)
