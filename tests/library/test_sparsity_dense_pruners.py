"""The contract of all methods that make dense weights block-sparse during training, and the selection of blocks."""

import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse import BlockSparseError
from blocksparse.nn.module import BlockSparseModule
from blocksparse.sparsity.pruning.schedule import CubicSchedule
from blocksparse.sparsity.selection import dense_norms, top_blocks
from blocksparse.surgery.prunable import prunable
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")


class Recurrent(nn.Module):
    """Sizes that are no multiples of the block."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 10, num_layers=2, bidirectional=True), nn.Linear(20, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(0))


def mlp():
    return nn.Sequential(nn.Linear(21, 18), nn.ReLU(), nn.Linear(18, 3))


def convolutions():
    layers = nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(9, 5, 2), nn.Flatten(), nn.Linear(125, 3)
    return nn.Sequential(*layers)


MODELS = {
    "mlp": (mlp, lambda: torch.randn(32, 21, dtype=torch.float64)),
    "conv": (convolutions, lambda: torch.randn(16, 6, 4, 4, dtype=torch.float64)),
    "lstm": (Recurrent, lambda: torch.randn(4, 16, 6, dtype=torch.float64)),
}


def threshold(model, optimizer):
    q = bs.sparsity.percentiles(model, 60)
    steps = {"begin": 1, "ramp": 4, "end": 10, "every": 2}
    return bs.sparsity.ThresholdPruning(model, optimizer, q, **steps, block_size=(4, 2))


def gates(model, optimizer):
    """L0 gates, some closed from the start: the contract is not about what a few steps learn."""
    method = bs.sparsity.L0Gates(
        model, optimizer, 0.01, samples=50, weight_decay=0.1, closed=0.9, lr=0.01, block_size=4
    )
    for log_alpha in method.parameters():
        log_alpha.data.uniform_(-4, 2)
    return method


STEPS = 12
METHODS = {
    "gradual": lambda m, o: bs.sparsity.GradualPruning(m, o, 0.4, begin=1, end=10, every=2, block_size=4),
    "gradual-layer": lambda m, o: bs.sparsity.GradualPruning(
        m, o, 0.4, begin=1, end=10, every=2, block_size=(2, 4), norm="mean", scope="layer"
    ),
    "threshold": threshold,
    "proximal": lambda m, o: bs.sparsity.GroupLasso(m, o, 2.1, block_size=(2, 3)),
    "penalty": lambda m, o: bs.sparsity.GroupLasso(m, o, 0.0005, mode="penalty", threshold=0.16, block_size=2),
    "l0": gates,
    "movement": lambda m, o: bs.sparsity.MovementPruning(m, o, 0.4, begin=2, end=10, block_size=4),
}


def start(model: str, method: str):
    """A model in float64, its optimizer, a method, and inputs."""
    torch.manual_seed(0)
    make, inputs = MODELS[model]
    net = make().double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    return net, optimizer, METHODS[method](net, optimizer), inputs()


def train(model, optimizer, method, x, steps=STEPS, after=None):
    """Trains some steps towards the class of the first numbers; returns the losses."""
    labels = (x.transpose(0, 1) if isinstance(model, Recurrent) else x).flatten(1)[:, :3].argmax(1)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), labels)
        if method is not None and hasattr(method, "penalty") and getattr(method, "mode", "") != "proximal":
            loss = loss + method.penalty()
        update(optimizer, loss)
        if method is not None:
            method.step()
            if after is not None:
                after(method)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_finish_keeps_outputs_and_optimizer_state(model, method):
    net, optimizer, search, x = start(model, method)
    train(net, optimizer, search, x)
    net.eval()
    with torch.no_grad():
        before = net(x)
    layouts, density = search.layouts(), search.density
    assert set(layouts) == set(search.weights)
    assert 0.05 < density < 0.98, "the test is about something"
    weights = {name: dense.detach().clone() for name, dense in search.dense.items()}
    blocks, gates = (
        search.blocks,
        {name: gate.multiplier.detach() for name, gate in getattr(search, "gates", {}).items()},
    )
    if method == "penalty":  # what is left out was not 0
        for name, dense in search.dense.items():
            dense.data *= blocks[name].spread(layouts[name].mask())
        with torch.no_grad():
            before = net(x)
    momenta = {name: optimizer.state[dense]["exp_avg"].clone() for name, dense in search.dense.items()}
    counts = {name: optimizer.state[dense]["step"].clone() for name, dense in search.dense.items()}
    done = search.finish()
    assert done is net
    with torch.no_grad():
        torch.testing.assert_close(net(x), before, rtol=1e-9, atol=1e-11)
    # Truly sparse, with exactly these blocks; the optimizer's state has followed.
    modules = {name: m for name, m in net.named_modules() if isinstance(m, BlockSparseModule)}
    assert {name.removesuffix(".weight") for name in layouts} == set(modules)
    assert not any("parametrizations" in name for name, _ in net.named_parameters())
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in net.parameters()} == {id(p) for p in optimizer.state}
    for name, layout in layouts.items():
        module = modules[name.removesuffix(".weight")]
        assert module.layout == layout == search.layouts()[name]
        expected = weights[name] * blocks[name].spread(gates[name]) if gates else weights[name]
        for values, dense in ((module.values, expected), (optimizer.state[module.values]["exp_avg"], momenta[name])):
            folded = blocks[name].fold(dense).transpose(1, 2)
            assert torch.equal(values, folded[layout.mask()])
        assert torch.equal(optimizer.state[module.values]["step"], counts[name])
    assert search.density == density
    net.train()
    losses = train(net, optimizer, None, x, steps=20)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_resume_after_finish(model, method):
    net, optimizer, search, x = start(model, method)
    train(net, optimizer, search, x)
    search.finish()
    train(net, optimizer, None, x, steps=2)
    other, its_optimizer, its_search, _ = start(model, method)
    assert its_search.finish(search.layouts()) is other
    assert its_search.layouts() == search.layouts()
    assert not any(weights is dense for weights in other.parameters() for dense in its_search.dense.values())
    other.load_state_dict(net.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((net, optimizer), (other, its_optimizer)):
        train(one, its, None, x, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_finish_frees_dense_weights():
    net, optimizer, search, x = start("mlp", "gradual")
    dense = [weakref.ref(weight) for weight in search.dense.values()]
    train(net, optimizer, search, x)
    search.finish()
    gc.collect()
    assert [ref for ref in dense if ref() is not None] == []
    with pytest.raises(BlockSparseError, match=r"layouts: expected those of .*, got "):
        start("mlp", "gradual")[2].finish({})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["mlp", "lstm"])
def test_resume_before_finish(model, method, tmp_path):
    whole, parts, again = (start(model, method) for _ in range(3))
    torch.manual_seed(1)
    train(*whole)
    torch.manual_seed(1)
    train(*parts, steps=5)
    torch.save(([part.state_dict() for part in parts[:3]], torch.get_rng_state()), tmp_path / "saved")
    states, generator = torch.load(tmp_path / "saved", weights_only=True)
    for part, state in zip(again[:3], states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(generator)
    train(*again, steps=7)
    assert again[2].layouts() == whole[2].layouts()
    for name, tensor in whole[0].state_dict().items():
        assert torch.equal(again[0].state_dict()[name], tensor), name
    finished = [run[2].finish().state_dict() for run in (whole, again)]
    assert all(torch.equal(finished[1][name], tensor) for name, tensor in finished[0].items())


@pytest.mark.parametrize("method", METHODS)
def test_finish_returns_a_new_layer_for_a_layer(method):
    torch.manual_seed(0)
    layer = nn.Linear(16, 16).double()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    search = METHODS[method](layer, optimizer)
    train(layer, optimizer, search, torch.randn(8, 16, dtype=torch.float64))
    new = search.finish()
    assert type(new) is bs.nn.Linear
    assert new is search.model
    assert new.bias is layer.bias


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_finish_early(method, settled):
    net, optimizer, search, x = start("mlp", method)
    names = set(mlp().state_dict())
    train(net, optimizer, search, x, steps=7)
    net.eval()
    with torch.no_grad():
        before = net(x)
        weights = {name: layer.weight.clone() for name, layer in net.named_children() if hasattr(layer, "weight")}
    layouts, density = search.layouts(), search.density
    if settled:
        search.settle()
        assert set(net.state_dict()) == names
        torch.testing.assert_close(net(x), before)
        if method in ("l0", "movement"):
            message = r"step\(\) called after the gates of .* were removed, when .*early=True"
            with pytest.raises(bs.BlockSparseError, match=message):
                search.step()
    assert search.finish(early=True) is net
    assert search.density == density
    assert {name: net.get_submodule(name).layout for name in weights} == {
        name.removesuffix(".weight"): layout for name, layout in layouts.items()
    }
    if method not in ("penalty", "proximal"):  # which leave out blocks that are not 0
        torch.testing.assert_close(net(x), before)
    train(net, optimizer, None, x, steps=2)


@pytest.mark.parametrize("method", ["gradual", "l0", "movement"])
def test_finish_may_be_called_again_after_an_error(method, monkeypatch):
    net, optimizer, search, x = start("mlp", method)
    train(net, optimizer, search, x)
    net.eval()
    with torch.no_grad():
        before = net(x)
    with monkeypatch.context() as broken:
        broken.setattr("blocksparse.sparsity.pruning.dense_pruner.replace_with_sparse", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            search.finish()
    torch.testing.assert_close(net(x), before)
    torch.testing.assert_close(search.finish()(x), before)


@pytest.mark.parametrize("method", METHODS)
def test_calls_in_the_wrong_order(method):
    net, optimizer, search, x = start("mlp", method)
    if search.end is not None:
        train(net, optimizer, search, x, steps=3)
        refusal = r"finish\(\) called after 3 of 10 steps \(end=10\): call finish\(early=True\)"
        with pytest.raises(bs.BlockSparseError, match=refusal):
            search.finish()
    train(net, optimizer, search, x)
    state = search.state_dict()
    search.finish()
    for what in ("step", "finish", *(["penalty"] if hasattr(search, "penalty") else [])):
        with pytest.raises(bs.BlockSparseError, match=rf"{what}\(\) after finish\(\): use the model"):
            getattr(search, what)()
    with pytest.raises(bs.BlockSparseError, match=r"load_state_dict\(\) after finish"):
        search.load_state_dict(state)


@pytest.mark.parametrize("method", METHODS)
def test_bad_models_stay_unchanged(method):
    def refused(model, message, optimizer=None):
        before = {name: type(module) for name, module in model.named_modules()}
        optimizer = optimizer or torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(bs.BlockSparseError, match=message):
            METHODS[method](model, optimizer)
        assert {name: type(module) for name, module in model.named_modules()} == before

    refused(nn.Sequential(nn.ReLU()), "model: expected one with dense weights that can become .*, got Sequential")
    refused(nn.Sequential(bs.nn.Linear(8, 8)), "model: expected one with dense weights")
    refused(nn.Linear(8, 8, device="meta"), "model: expected parameters with values, got weight on the meta device")
    model = mlp()
    refused(model, "an optimizer with the parameter 2.weight", torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(bs.BlockSparseError, match=r"model: expected a torch.*, got list"):
        METHODS[method]([model], None)


@pytest.mark.parametrize("skip", [("1", "2"), "2.weight", "module"])
def test_skip(skip):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    skip = model[2] if skip == "module" else skip
    search = bs.sparsity.GradualPruning(model, density=0.5, end=1, block_size=2, skip=skip)
    assert list(search.weights) == ["0.weight"]
    search.step()
    assert type(search.finish()[2]) is nn.Linear
    with pytest.raises(bs.BlockSparseError, match="not all of them skipped"):
        bs.sparsity.MovementPruning(nn.Sequential(nn.Linear(8, 8)), end=1, skip="0")


def test_blocks_of_every_kind_of_weight():
    # Against indices written out: which block each number of the parameter belongs to.
    lstm = nn.LSTM(5, 6, proj_size=4)
    cases = [
        (nn.Linear(7, 5), "weight", (2, 3), lambda o, i: (o // 2, i // 3)),
        (nn.Conv2d(5, 4, (2, 3)), "weight", 2, lambda o, i: (o // 2, i // 2)),
        (nn.ConvTranspose1d(5, 4, 3), "weight", (3, 2), lambda i, o: (o // 3, i // 2)),
        (lstm, "weight_ih_l0", 4, lambda o, i: (o // 6 * 2 + o % 6 // 4, i // 4)),
        (lstm, "weight_hh_l0", 4, lambda o, i: (o // 6 * 2 + o % 6 // 4, i // 4)),
        (lstm, "weight_hr_l0", 4, lambda o, i: (o // 4, i // 4)),
    ]
    for module, name, block_size, place in cases:
        weight = next(w for w in prunable(module, block_size) if w.parameter == name)
        blocks, dense = weight.blocks, getattr(module, name).detach()
        numbers = torch.arange(math.prod(blocks.grid)).view(blocks.grid)
        expected = torch.empty(dense.shape, dtype=torch.int64)
        sums = torch.zeros(blocks.grid)
        for a in range(dense.shape[0]):
            for b in range(dense.shape[1]):
                row, column = place(a, b)
                expected[a, b] = numbers[row, column]
                sums[row, column] += dense[a, b].sum()
        assert torch.equal(blocks.spread(numbers).expand(dense.shape), expected), name
        torch.testing.assert_close(blocks.sums(dense), sums)
        folded = blocks.fold(dense).transpose(1, 2).flatten(2)
        torch.testing.assert_close(dense_norms(blocks, dense), folded.norm(dim=2))
        torch.testing.assert_close(dense_norms(blocks, dense, "max"), folded.abs().amax(2))
        torch.testing.assert_close(dense_norms(blocks, dense, "mean"), folded.abs().mean(2))
        assert blocks.size == folded.shape[2]


def test_cubic_schedule():
    schedule = CubicSchedule(density=0.2, begin=10, end=30, every=8)
    # By hand: 1 - t' = 1, 3/4, 1/2, 1/4, 0; cubes 1, 27/64, 1/8, 1/64, 0; times 0.8, plus 0.2.
    assert [schedule(t) for t in (0, 10, 15, 20, 25, 30, 99)] == pytest.approx([1, 1, 0.5375, 0.3, 0.2125, 0.2, 0.2])
    assert [t for t in range(50) if schedule.due(t)] == [10, 18, 26, 30]


@pytest.mark.parametrize("density", [0.06, 0.3, 0.5, 0.77, 1.0])
def test_top_blocks(density):
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(12, 20))
    blocks = {weight.name: weight.blocks for weight in prunable(model, (2, 4))}
    scores = {name: torch.randn(each.grid, dtype=torch.float64) for name, each in blocks.items()}
    scores["1.weight"] -= 10  # all worse than any of the first
    alone = top_blocks(scores, blocks, density, "layer")
    for name, mask in alone.items():
        count = max(1, round(density * mask.numel()))
        assert torch.equal(mask, scores[name] >= scores[name].flatten().sort(descending=True).values[count - 1])
    together = top_blocks(scores, blocks, density, "global")
    count = round(density * (48 + 30))
    assert sum(int(mask.sum()) for mask in together.values()) == count
    assert together["1.weight"].sum() == max(1, count - 48)
    assert together["1.weight"].flatten()[scores["1.weight"].argmax()]


def test_blocks_of_kernels_count_with_all_taps():
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1))
    blocks = {weight.name: weight.blocks for weight in prunable(model, 4)}
    scores = {"0.weight": torch.tensor([[0.0, 1.0], [2.0, 3.0]]), "1.weight": torch.tensor([[9.0, 8.0], [7.0, 6.0]])}
    masks = top_blocks(scores, blocks, 0.55, "global")  # of 40 parts 18 go, the first two blocks
    assert masks["0.weight"].tolist() == [[False, False], [True, True]]
    assert masks["1.weight"].all()
