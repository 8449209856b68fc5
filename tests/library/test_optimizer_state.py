"""The optimizer's state of blocks that are new, of weights that become sparse or dense, and of other optimizers."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

import blocksparse as bs

pytestmark = pytest.mark.usefixtures("one_thread")

ADAMS = {
    f"{name}-{first}-{second}": (lambda params, kind=kind, betas=(first, second): kind(params, lr=1e-3, betas=betas))
    for name, kind in (("Adam", torch.optim.Adam), ("NAdam", torch.optim.NAdam), ("RAdam", torch.optim.RAdam))
    for first, second in ((0.9, 0.999), (0.9, 0.95), (0.5, 0.9999), (0.99, 0.9))
}
OTHERS = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "AMSGrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "Adamax": lambda params: torch.optim.Adamax(params),
    "Adagrad": lambda params: torch.optim.Adagrad(params),
    "Adadelta": lambda params: torch.optim.Adadelta(params),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "RMSprop-centered": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
}


def adam_without_means(params):
    return torch.optim.Adam(params, lr=1e-3, betas=(0.0, 0.999))


CHANGES = {
    "SET": lambda layer, optimizer, seen: bs.sparsity.SET(layer, optimizer, init="zeros", on_layout_change=seen),
    "RigL": lambda layer, optimizer, seen: bs.sparsity.RigL(layer, optimizer, 9, every=1, on_layout_change=seen),
}


def draw_gradient(layer):
    layer.values.grad = torch.randn_like(layer.values)


def stepped(make):
    """A layer, and its optimizer after 200 steps by random gradients."""
    torch.manual_seed(0)
    layer = bs.nn.Linear(96, 64, density=0.25, block_size=8)
    optimizer = make(layer.parameters())
    for _ in range(200):
        draw_gradient(layer)
        optimizer.step()
    return layer, optimizer


def moves(layer, optimizer):
    """Steps, and returns how far each block has moved: the root of its mean square, in learning rates."""
    before = layer.values.detach().clone()
    optimizer.step()
    moved = (layer.values.detach() - before).square().flatten(1).mean(1).sqrt()
    return moved / float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [*ADAMS.values(), *OTHERS.values()], ids=[*ADAMS, *OTHERS])
def test_new_blocks_move_as_far_as_others(make, change):
    layer, optimizer = stepped(make)
    sources = []
    method = CHANGES[change](layer, optimizer, lambda module, source: sources.append(source))
    layer(torch.randn(16, 96)).square().mean().backward()
    method.step()
    new = sources[0] < 0
    assert new.any()
    for _ in range(60):
        draw_gradient(layer)
        moved = moves(layer, optimizer)
        assert moved[new].mean() <= 1.3
        assert moved[new].mean() <= 1.5 * moved[~new].mean() + 0.05


@pytest.mark.parametrize("ratio", [0.1, 5, 30])
@pytest.mark.parametrize("make", [*ADAMS.values(), *OTHERS.values()], ids=[*ADAMS, *OTHERS])
def test_new_blocks_with_other_gradients_do_not_move_too_far(make, ratio):
    layer, optimizer = stepped(make)
    new = changed(layer, optimizer) < 0
    for _ in range(40):
        draw_gradient(layer)
        layer.values.grad[new] *= ratio
        assert moves(layer, optimizer)[new].max() <= 1.3


def test_new_blocks_next_to_dead_ones_do_not_move_too_far():
    torch.manual_seed(0)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:, :4] = True  # the inputs of these blocks are 0
    for make in (torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adam):
        layer = bs.nn.Linear(64, 64, layout=bs.BlockLayout(mask, 8), bias=False)
        optimizer, target = make(layer.parameters(), lr=1e-3), torch.randn(64, 64)

        def step(layer=layer, optimizer=optimizer, target=target):
            x = torch.randn(32, 64)
            x[:, :32] = 0
            optimizer.zero_grad()
            (layer(x) - x @ target).square().mean().backward()
            return moves(layer, optimizer)

        for _ in range(300):
            step()
        sources = []
        method = CHANGES["RigL"](layer, optimizer, lambda _, source, sources=sources: sources.append(source))
        step()
        method.step()
        del method
        new = sources[0] < 0
        assert new.any()
        moved = torch.stack([step()[new].max() for _ in range(40)])
        assert 0.05 < moved.max() <= 1.3


@pytest.mark.parametrize("passed", ["by place", "by name"])
@pytest.mark.parametrize("make", [ADAMS["Adam-0.9-0.999"], OTHERS["RMSprop"]])
def test_a_closure_changes_no_step(make, passed):
    """Lightning computes the gradients inside the optimizer's step, by a closure."""
    (plain, first), (other, second) = stepped(make), stepped(make)
    for layer, optimizer in ((plain, first), (other, second)):
        changed(layer, optimizer)
    gradients = [10 * torch.randn_like(plain.values) for _ in range(5)]

    def closure():
        second.zero_grad()
        other.values.grad = grad.clone()
        return 7

    for grad in gradients:
        plain.values.grad = grad.clone()
        first.step()
        assert (second.step(closure) if passed == "by place" else second.step(closure=closure)) == 7
        assert torch.equal(plain.values, other.values)


def test_an_optimizer_without_second_moments_does_not_count_as_a_step_of_new_blocks():
    layer, optimizer = stepped(OTHERS["RMSprop"])
    slow = torch.optim.SGD(layer.parameters(), lr=1e-9, momentum=0.9)
    draw_gradient(layer)
    slow.step()
    new = changed(layer, optimizer) < 0
    for _ in range(3):
        draw_gradient(layer)
        layer.values.grad *= 30
        slow.step()
        assert moves(layer, optimizer)[new].max() <= 1.3


@pytest.mark.parametrize("resumed", [True, False], ids=["resumed", "rewired"])
@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("make", [ADAMS["Adam-0.9-0.999"], adam_without_means, OTHERS["RMSprop"]])
def test_blocks_without_gradients_keep_their_age(make, block_size, resumed):
    """Old blocks whose gradients are 0 do not become new, and new ones stay new, in a resumed run or at a change."""
    torch.manual_seed(0)
    layers = [bs.nn.Linear(48, 32, density=0.25, block_size=block_size) for _ in range(2)]
    optimizers = [make(layer.parameters()) for layer in layers]
    for _ in range(20):
        draw_gradient(layers[0])
        optimizers[0].step()
    new = changed(layers[0], optimizers[0]) < 0
    silent = torch.rand(len(new)) < 0.5
    assert (new & silent).any()
    assert (new & ~silent).any()
    for _ in range(3):
        draw_gradient(layers[0])
        layers[0].values.grad[silent] = 0
        optimizers[0].step()
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    if not resumed:  # an empty change of the layout
        bs.sparsity.rewire(layers[1], [], [], [], optimizers[1])
    for _ in range(5):
        grad = torch.randn_like(layers[0].values)
        grad[new] *= 10
        for layer, optimizer in zip(layers, optimizers, strict=True):
            layer.values.grad = grad.clone()
            optimizer.step()
        assert torch.equal(layers[0].values, layers[1].values)


def test_silent_connections_step_as_in_a_dense_weight():
    torch.manual_seed(0)
    layer = bs.nn.Linear(4, 4, block_size=1, bias=False)
    dense = nn.Parameter(layer.weight.detach().double())
    optimizer, judge = adam_without_means(layer.parameters()), adam_without_means([dense])
    for inputs in ([0.01, 0.01, 0.01, 0.01], [0.0, 0.01, 0.01, 0.01], [1.0, 1.0, 1.0, 1.0]):
        bs.sparsity.rewire(layer, [], [], [], optimizer)
        x = torch.tensor([inputs])
        for loss in (layer(x).square().sum(), (x.double() @ dense.T).square().sum()):
            loss.backward()
        optimizer.step()
        judge.step()
        optimizer.zero_grad()
        judge.zero_grad()
    torch.testing.assert_close(layer.weight.detach().double(), dense.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("damage", [lambda new: new[:-1], lambda new: new.flatten(), lambda new: "new"])
def test_damaged_marks_of_new_blocks_are_refused_before_a_step(damage):
    layer, optimizer = stepped(ADAMS["Adam-0.9-0.999"])
    changed(layer, optimizer)
    state = optimizer.state_dict()
    state["state"][0]["block_is_new"] = damage(state["state"][0]["block_is_new"])
    optimizer.load_state_dict(state)
    draw_gradient(layer)
    with pytest.raises(bs.BlockSparseError, match="block_is_new in the optimizer's state: "):
        optimizer.step()


@pytest.mark.parametrize("way", ["sparsify", "densify", "finish"])
def test_an_optimizer_that_is_not_passed_trains_the_new_weights(way):
    torch.manual_seed(0)
    layer = bs.nn.Linear(48, 48, density=0.5, block_size=8) if way == "densify" else nn.Linear(48, 48)
    model = nn.Sequential(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    method = bs.sparsity.GradualPruning(model, density=0.5, block_size=8, end=2, every=1) if way == "finish" else None

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 48)).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
        if method is not None:
            method.step()
    if way == "sparsify":
        bs.sparsify(model, 0.5, 8, force=True, inplace=True)
    elif way == "densify":
        bs.densify(model, inplace=True)
    else:
        method.finish()
    weight = model[0].weight if way == "densify" else model[0].values
    before = weight.detach().clone()
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    step()
    assert not torch.equal(weight, before)


class Bare(torch.optim.Optimizer):
    """A wrapper that leaves out the constructor of its base class, as timm's Lookahead does."""

    def __init__(self, inner):
        self.inner, self.state, self.param_groups, self.defaults = inner, inner.state, inner.param_groups, {}

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_wrapper_without_hooks_steps():
    layer = bs.nn.Linear(32, 32, density=0.5, block_size=8)
    optimizer = Bare(torch.optim.Adam(layer.parameters()))
    method = bs.sparsity.SET(layer, optimizer)
    for _ in range(3):
        draw_gradient(layer)
        optimizer.step()
        assert method.step()


def changed(layer, optimizer=None, **options):
    """Where each block was before one change by SET, -1 for new ones."""
    sources = []
    bs.sparsity.SET(layer, optimizer, on_layout_change=lambda module, source: sources.append(source), **options).step()
    return sources[0]


def test_rprop_begins_with_its_rate_and_asgd_with_the_weight():
    torch.manual_seed(0)
    for make, name in ((torch.optim.Rprop, "step_size"), (torch.optim.ASGD, "ax")):
        layer = bs.nn.Linear(40, 24, density=0.5, block_size=4)
        optimizer = make(layer.parameters(), lr=0.03)
        for _ in range(5):
            draw_gradient(layer)
            optimizer.step()
        new = changed(layer, optimizer) < 0
        expected = torch.full_like(layer.values, 0.03) if name == "step_size" else layer.values.detach()
        torch.testing.assert_close(optimizer.state[layer.values][name][new], expected[new])


def test_one_block_or_none_stays():
    torch.manual_seed(0)
    for density, zeta in ((0.25, 1.0), (0.0625, 1.0)):
        layer = bs.nn.Linear(16, 16, density=density, block_size=4)
        optimizer = torch.optim.Adam(layer.parameters())
        draw_gradient(layer)
        optimizer.step()
        before = optimizer.state[layer.values]["exp_avg_sq"].double().mean()
        source = changed(layer, optimizer, zeta=zeta)
        after = optimizer.state[layer.values]["exp_avg_sq"][source < 0]
        torch.testing.assert_close(after.double(), before.expand_as(after), rtol=1e-6, atol=0)


@pytest.mark.parametrize("keeps_axis", [True, False])
def test_factors_follow_blocks(keeps_axis):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layer = bs.nn.Linear(24, 40, density=0.5, block_size=(8, 4))
    kind = torch.optim.Adafactor if keeps_axis else transformers.Adafactor
    optimizer = kind(layer.parameters())
    names = ("row_var", "col_var") if keeps_axis else ("exp_avg_sq_row", "exp_avg_sq_col")
    for _ in range(3):
        draw_gradient(layer)
        optimizer.step()
    before = {name: optimizer.state[layer.values][name].clone() for name in names}
    source = changed(layer, optimizer)
    stays = source >= 0
    for name in names:
        after = optimizer.state[layer.values][name]
        assert torch.equal(after[stays], before[name][source[stays]])
        mean = before[name][source[stays]].double().mean().float()
        torch.testing.assert_close(after[~stays], mean.expand_as(after[~stays]))
    draw_gradient(layer)
    optimizer.step()


@pytest.mark.parametrize("module", ["linear", "conv"])
@pytest.mark.parametrize("keeps_axis", [True, False])
def test_factors_of_a_dense_weight_become_those_of_blocks_and_come_back(module, keeps_axis):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    layer, x = {
        "linear": (nn.Linear(24, 40), torch.randn(5, 24)),
        "conv": (nn.Conv2d(8, 16, (2, 3)), torch.randn(2, 8, 5, 5)),
    }[module]
    model = nn.Sequential(layer)
    kind = torch.optim.Adafactor if keeps_axis else transformers.Adafactor
    optimizer = kind(list(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def squares(parameter):
        kept = optimizer.state[parameter]
        row, col = (
            kept[name] for name in (("row_var", "col_var") if keeps_axis else ("exp_avg_sq_row", "exp_avg_sq_col"))
        )
        row, col = (row, col) if keeps_axis else (row.unsqueeze(-1), col.unsqueeze(-2))
        return row * col / row.mean(-2, keepdim=True)

    before = squares(layer.weight)
    layout = bs.patterns.dense((40, 24) if module == "linear" else (16, 8), 8)
    model = bs.sparsify(model, layouts={"0.weight": layout}, force=True, inplace=True, optimizer=optimizer)
    assert any(given is model[0].values for group in optimizer.param_groups for given in group["params"])
    # A product of a row and a column stays one in each of its blocks.
    torch.testing.assert_close(model[0].dense_of(squares(model[0].values)), before, rtol=1e-4, atol=0)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_weights_that_densify_adds_begin_as_new_blocks_do(kind):
    torch.manual_seed(0)
    layer = (
        bs.nn.Linear(36, 20, density=0.4, block_size=8)
        if kind == "linear"
        else bs.nn.Conv2d(12, 20, 3, density=0.4, block_size=4)
    )
    model = nn.Sequential(layer)
    optimizer = torch.optim.Adam(model.parameters())
    draw_gradient(layer)
    optimizer.step()
    there = layer.dense_of(torch.ones_like(layer.values)).bool()
    before = {name: layer.dense_of(optimizer.state[layer.values][name]) for name in ("exp_avg", "exp_avg_sq")}
    model = bs.densify(model, inplace=True, optimizer=optimizer)
    after = optimizer.state[model[0].weight]
    for name, kept in before.items():
        assert torch.equal(after[name][there], kept[there])
    assert (after["exp_avg"][~there] == 0).all()
    mean = before["exp_avg_sq"][there].double().mean().float()
    torch.testing.assert_close(after["exp_avg_sq"][~there], mean.expand_as(after["exp_avg_sq"][~there]))


class Lookahead(torch.optim.Optimizer):
    """Keeps another optimizer inside, and copies of the weights."""

    def __init__(self, params):
        super().__init__(params, {})
        self.inner = {"fast": torch.optim.Adam(self.param_groups)}

    def step(self, closure=None):
        self.inner["fast"].step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.detach().clone()).lerp_(parameter, 0.5)


@pytest.mark.parametrize("given", ["wrapper", "inner", "another of the same parameters", "none"])
def test_all_optimizers_that_step_on_a_weight_follow(given):
    torch.manual_seed(0)
    layer = bs.nn.Linear(48, 24, density=0.25, block_size=8)
    wrapper, other = Lookahead(layer.parameters()), torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    inner = wrapper.inner["fast"]
    for _ in range(2):
        draw_gradient(layer)
        wrapper.step()
        other.step()
    states = [each.state[layer.values] for each in (wrapper, inner, other)]
    before = [{name: kept.clone() for name, kept in state.items()} for state in states]
    chosen = {"wrapper": wrapper, "inner": inner, "another of the same parameters": other, "none": None}[given]
    source = changed(layer, chosen)
    new = source < 0
    for state, old in zip(states, before, strict=True):
        for name, before_change in old.items():
            kept = state[name]
            if kept.dim():
                assert torch.equal(kept[~new], before_change[source[~new]])
                if name != "exp_avg_sq":
                    assert torch.equal(kept[new], layer.values.detach()[new] * (name == "slow"))


def test_copies_of_weights_outside_of_the_state_are_refused():
    layer = bs.nn.Linear(48, 24, density=0.25, block_size=8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.slow = [parameter.detach().clone() for parameter in layer.parameters()]
    with pytest.raises(bs.BlockSparseError, match="SGD keeps tensors for values in its attribute slow"):
        bs.sparsity.SET(layer, optimizer)
    dense = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
    optimizer.slow = [parameter.detach().clone() for parameter in dense.parameters()]
    with pytest.raises(bs.BlockSparseError, match="in its attribute slow"):
        bs.sparsify(dense, 0.5, 8, force=True, inplace=True, optimizer=optimizer)


def test_queues_of_gradients_are_refused():
    layer = bs.nn.Linear(48, 24, density=0.25, block_size=8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.values]["queue"] = deque([torch.zeros_like(layer.values)])
    with pytest.raises(bs.BlockSparseError, match=r"queue in the optimizer's.*the state of SGD cannot follow blocks"):
        bs.sparsity.rewire(layer, [0], [], [], optimizer)


def test_schedule_free_optimizers_follow():
    schedulefree = pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    for make in (
        schedulefree.AdamWScheduleFree,
        lambda params: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(params, lr=1e-2), momentum=0.9),
    ):
        layer = bs.nn.Linear(48, 24, density=0.25, block_size=8)
        optimizer = make(layer.parameters())
        optimizer.train()
        for _ in range(3):
            draw_gradient(layer)
            optimizer.step()
        source = changed(layer, optimizer)
        assert torch.equal(optimizer.state[layer.values]["z"][source < 0], layer.values.detach()[source < 0])
        draw_gradient(layer)
        optimizer.step()
        optimizer.eval()
        assert layer.values.isfinite().all()


def test_a_layout_set_by_hand_leaves_no_state_behind():
    torch.manual_seed(0)
    layer = bs.nn.Linear(32, 32, density=0.25, block_size=8)
    other = bs.nn.Linear(32, 32, density=0.25, block_size=8)
    optimizer = torch.optim.Adam(layer.parameters())
    message = "exp_avg in the state of Adam belongs to the blocks that a weight had before"
    for load in (
        lambda: layer.load_state_dict(other.state_dict()),
        lambda: layer.set_layout(other.layout, layer.values),
    ):
        layer.set_layout(bs.patterns.block_diagonal((32, 32), 8), torch.randn(4, 8, 8))
        optimizer.state.clear()
        draw_gradient(layer)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        load()
        draw_gradient(layer)
        before = layer.values.detach().clone()
        with pytest.raises(bs.BlockSparseError, match=message):
            optimizer.step()
        assert torch.equal(layer.values, before)
        optimizer.load_state_dict(saved)  # that of the same time, for all that anybody knows
        optimizer.step()


def test_an_optimizer_may_be_loaded_before_the_model():
    torch.manual_seed(0)
    layer = bs.nn.Linear(32, 32, density=0.25, block_size=8)
    other = bs.nn.Linear(32, 32, density=0.25, block_size=8)
    optimizer, saved = torch.optim.Adam(layer.parameters()), torch.optim.Adam(other.parameters())
    for each, of in ((layer, optimizer), (other, saved)):
        draw_gradient(each)
        of.step()
    optimizer.load_state_dict(saved.state_dict())
    layer.load_state_dict(other.state_dict())
    draw_gradient(layer)
    optimizer.step()


def test_lbfgs_is_refused_by_its_name_before_training():
    dense, sparse = nn.Linear(32, 32), bs.nn.Linear(32, 32, density=0.5, block_size=8)
    for model, make in (
        (sparse, lambda model, lbfgs: bs.sparsity.SET(model, lbfgs)),
        (sparse, lambda model, lbfgs: bs.sparsity.RigL(model, lbfgs, end=3)),
        (sparse, lambda model, lbfgs: bs.sparsity.GradualBlockPruning(model, lbfgs, 0.25, end=3)),
        (dense, lambda model, lbfgs: bs.sparsity.GradualPruning(model, lbfgs, 0.25, block_size=8, end=3)),
        (
            dense,
            lambda model, lbfgs: bs.sparsity.GroupLasso(model, lbfgs, block_size=8),
        ),
        (dense, lambda model, lbfgs: bs.sparsify(model, 0.25, 8, force=True, inplace=True, optimizer=lbfgs)),
    ):
        with pytest.raises(bs.BlockSparseError, match="optimizer: LBFGS keeps one vector for all parameters"):
            make(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_is_refused_for_weights_that_become_blocks():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    muon = torch.optim.Muon([model[0].weight])
    with pytest.raises(
        bs.BlockSparseError, match=r"Muon trains matrices, and 0.weight becomes .* give this weight to Adam"
    ):
        bs.sparsity.GradualPruning(model, muon, 0.25, block_size=8, end=3, skip="1")
    # Muon for the dense weights, AdamW for the rest: block-sparse values are among the rest.
    model = nn.Sequential(bs.nn.Linear(32, 32, density=0.5, block_size=8), nn.Linear(32, 32))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    muon, adam = torch.optim.Muon(matrices), torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2])
    method = bs.sparsity.SET(model, adam)
    for _ in range(3):
        model(torch.randn(4, 32)).square().mean().backward()
        muon.step()
        adam.step()
        assert method.step()


class Quantized(torch.optim.Optimizer):
    """Keeps a state in pieces of 256 numbers, as optimizers of 8 bits do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["absmax"] = torch.zeros(-(-parameter.numel() // 256), 7)


def test_a_state_that_cannot_follow_is_refused_at_the_first_step():
    for make in (
        lambda model, optimizer: bs.sparsity.GradualPruning(model, optimizer, 0.25, block_size=8, end=10),
        lambda model, optimizer: bs.sparsity.GroupLasso(model, optimizer, block_size=8),
    ):
        model = nn.Linear(64, 64)
        optimizer = Quantized(model.parameters())
        method = make(model, optimizer)
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        with pytest.raises(bs.BlockSparseError, match="absmax in the optimizer's state: expected the shape of weight"):
            method.step()


def test_weights_that_stay_dense_unexpectedly_are_named():
    class Mine(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(64, 64), Mine(64, 64))
    with pytest.warns(bs.SparsityWarning, match=r"GradualPruning leaves some weights dense .*: 1.weight: Mine is a"):
        bs.sparsity.GradualPruning(model, density=0.25, block_size=8, end=10)
