"""The contract of all methods: one loop, one state, resuming, copies, frozen weights, refusals."""

import copy
import gc
import inspect
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse import SparsityWarning
from blocksparse.sparsity.selection import hash_positions
from blocksparse.sparsity.sparse_training.dynamic_sparsity import DynamicSparsity
from blocksparse.sparsity.sparse_training.set import nearest_zero
from blocksparse.sparsity.training_method import TrainingMethod
from blocksparse.surgery.weight_handle import handle_of
from loops import update


def dense():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def sparse():
    return nn.Sequential(bs.nn.Linear(16, 32, density=0.5, block_size=4), nn.ReLU(), bs.nn.Linear(32, 16, block_size=4))


METHODS = {
    "GradualBlockPruning": (
        sparse,
        lambda m, o: bs.sparsity.GradualBlockPruning(m, o, 0.3, end=4, every=1),
    ),
    "GradualBlockPruning, regrow": (
        sparse,
        lambda m, o: bs.sparsity.GradualBlockPruning(m, o, 0.3, end=4, every=1, regrow=0.5),
    ),
    "GradualBlockPruning, random": (
        sparse,
        lambda m, o: bs.sparsity.GradualBlockPruning(m, o, 0.3, end=4, every=1, regrow=0.5, growth="random"),
    ),
    "GradualBlockPruning, topology": (
        sparse,
        lambda m, o: bs.sparsity.GradualBlockPruning(
            m, o, 0.3, end=4, every=1, regrow=0.5, growth="topology", schedule="sigmoid", initial_density=0.8
        ),
    ),
    "CHTs": (sparse, lambda m, o: bs.sparsity.CHTs(m, o, end=8, every=2)),
    "GradualPruning": (dense, lambda m, o: bs.sparsity.GradualPruning(m, o, 0.5, end=4, every=1, block_size=4)),
    "GroupLasso": (dense, lambda m, o: bs.sparsity.GroupLasso(m, o, block_size=4)),
    "ImportancePruning": (sparse, lambda m, o: bs.sparsity.ImportancePruning(m, o, begin=1, every=2)),
    "L0Gates": (dense, lambda m, o: bs.sparsity.L0Gates(m, o, samples=10, block_size=4)),
    "MovementPruning": (dense, lambda m, o: bs.sparsity.MovementPruning(m, o, 0.5, end=4, block_size=4)),
    "RigL": (sparse, lambda m, o: bs.sparsity.RigL(m, o, end=8, every=2)),
    "RigL, constant fan-in": (sparse, lambda m, o: bs.sparsity.RigL(m, o, end=8, every=2, constant_fan_in=True)),
    "SET": (sparse, lambda m, o: bs.sparsity.SET(m, o, every=2)),
    "SET, constant fan-in": (sparse, lambda m, o: bs.sparsity.SET(m, o, every=2, constant_fan_in=True)),
    "SMET": (sparse, lambda m, o: bs.sparsity.SMET(m, o, end=8, every=2)),
    "SRSTE": (dense, lambda m, o: bs.sparsity.SRSTE(m)),
    "ThresholdPruning": (
        dense,
        lambda m, o: bs.sparsity.ThresholdPruning(m, o, 0.01, begin=1, ramp=2, end=4, every=1, block_size=4),
    ),
}


SPARSE = [name for name, (make, _) in METHODS.items() if make is sparse]


def test_these_are_all_methods():
    public = [getattr(bs.sparsity, name) for name in bs.sparsity.__all__]
    found = {each.__name__ for each in public if inspect.isclass(each) and hasattr(each, "step")}
    names = {name.split(",")[0] for name in METHODS}
    assert found - {"SGD"} == names
    assert all(issubclass(getattr(bs.sparsity, name), TrainingMethod) for name in names)


def start(name):
    torch.manual_seed(0)
    model, method = METHODS[name]
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, method(model, optimizer)


def train(model, optimizer, method, first, last):
    """The loop of `TrainingMethod`'s docstring."""
    for t in range(first, last):
        torch.manual_seed(t)  # L0 draws its gates
        x = torch.randn(8, 16)
        loss = model(x).square().mean() + (method.penalty() if hasattr(method, "penalty") else 0)
        update(optimizer, loss)
        assert isinstance(method.step(), bool)


def assert_equal_models(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    for key, tensor in a.state_dict().items():
        assert torch.equal(b.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", METHODS)
def test_one_loop_trains_and_resumes(name):
    whole, first, second = start(name), start(name), start(name)
    train(*whole, 0, 5)
    train(*first, 0, 3)
    if isinstance(second[2], DynamicSparsity):  # neither the layout nor the seed need be those of the state
        bs.sparsity.rewire(second[0][0], [0], [], [])
        second[2].seed = 7
    for part, saved in zip(second, first, strict=True):
        part.load_state_dict(copy.deepcopy(saved.state_dict()))
    train(*second, 3, 5)
    assert second[2].calls == whole[2].calls == 5
    assert_equal_models(whole[0], second[0])


@pytest.mark.parametrize("name", METHODS)
def test_copies_train_to_the_same_bits(name):
    for calls in (2, 3):  # RigL records gradients after the third call only
        original = start(name)
        train(*original, 0, calls)
        copied = copy.deepcopy(original)
        for each in (original, copied):
            train(*each, calls, 5)
        assert_equal_models(original[0], copied[0])


@pytest.mark.parametrize("name", METHODS)
def test_repr_shows_the_settings(name):
    _, _, method = start(name)
    shown = repr(method)
    assert shown.startswith(f"{name.partition(',')[0]}(")
    assert shown.endswith("calls=0)")
    assert not hasattr(method, "every") or f"every={method.every}, " in shown


@pytest.mark.parametrize("name", METHODS)
def test_invalid_states_change_nothing(name):
    _, _, method = start(name)
    calls, state = method.calls, method.state_dict()
    with pytest.raises(bs.BlockSparseError, match=r"state: expected \['calls'"):
        method.load_state_dict({"epoch": torch.tensor(3)})
    values = [None, 3, torch.tensor(-1), torch.tensor(2.5), torch.tensor([1]), torch.tensor(1, device="meta")]
    for wrong in [None, [1], {3: 4}, *({**state, key: value} for key in state for value in values)]:
        with pytest.raises(bs.BlockSparseError, match="state: expected"):
            method.load_state_dict(wrong)
    if "keep.2.weight" in state:
        other = METHODS[name][1](nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), None)
        message = r"keep.2.weight in the state: expected torch.bool \[4, 8\], got torch.bool \[2, 8\]"
        with pytest.raises(bs.BlockSparseError, match=message):
            method.load_state_dict(other.state_dict())
    assert method.calls == calls
    method.load_state_dict(state)


@pytest.mark.parametrize("name", METHODS)
def test_states_of_other_methods_are_refused(name):
    method = start(name)[2]
    for other in METHODS:
        mine, others = name.split(",")[0], other.split(",")[0]
        if mine != others:
            with pytest.raises(bs.BlockSparseError, match=rf"state: expected that of {mine}, got that of {others}"):
                method.load_state_dict(start(other)[2].state_dict())
    state = method.state_dict()
    del state["method"]  # as in earlier versions
    method.load_state_dict(state)


class PerBlock(torch.optim.Optimizer):
    """An optimizer with one accumulator per block, as SM3 has, which no method knows how to move."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.dim() == 3:
                sums = self.state[parameter].setdefault("sums", torch.zeros(len(parameter), 1, 1))
                sums.add_(parameter.grad.square().amax((1, 2), keepdim=True))


@pytest.mark.parametrize("kind", [PerBlock, torch.optim.LBFGS])
@pytest.mark.parametrize("name", SPARSE)
def test_states_that_cannot_follow_are_refused_before_a_layer_changes(name, kind):
    if name == "SMET" and kind is PerBlock:
        pytest.skip("its clock refuses the optimizer")
    torch.manual_seed(0)
    model = sparse()
    optimizer = kind(model.parameters())
    # LBFGS is not given, since the constructor would refuse it.
    method = METHODS[name][1](model, optimizer if kind is PerBlock else None)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        return loss

    def layouts():
        return [layer.layout for layer in (model[0], model[2])]

    def steps():
        for _ in range(4):
            optimizer.step(closure)
            before[:] = layouts()
            method.step()

    before = []
    with pytest.raises(bs.BlockSparseError, match="cannot follow"):
        steps()
    assert layouts() == before


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_within_autocast_changes_the_same_blocks(name, dtype):
    layouts = []
    for inside in (False, True):
        model, optimizer, method = start(name)
        for t in range(4):
            torch.manual_seed(t)
            with torch.autocast("cpu", dtype):
                loss = 1e-4 * model(torch.randn(8, 16)).square().mean()
            update(optimizer, loss)
            with torch.autocast("cpu", dtype, enabled=inside):
                method.step()
        layouts.append([model[0].layout, model[2].layout])
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("name", SPARSE)
def test_a_step_within_inference_mode_leaves_trainable_values(name):
    model, optimizer, method = start(name)
    for _ in range(5):
        update(optimizer, model(torch.randn(8, 16)).square().mean())
        with torch.inference_mode():
            method.step()


@pytest.mark.parametrize("name", METHODS)
def test_an_optimizer_can_be_used_again(name):
    model, optimizer, method = start(name)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    method.use_optimizer(other)
    method.use_optimizer(optimizer)
    train(model, optimizer, method, 0, 4)
    for wrong in (None, "SGD"):
        with pytest.raises(bs.BlockSparseError, match=r"optimizer: expected a torch\.optim\.Optimizer"):
            method.use_optimizer(wrong)


def test_a_deleted_method_records_nothing():
    layer = bs.nn.Linear(32, 32, density=0.4, block_size=4)
    method = bs.sparsity.RigL(layer, None, end=90, every=1)
    watch = weakref.ref(method._watches[0])
    del method
    gc.collect()
    assert watch() is None
    layer(torch.randn(8, 32)).square().mean().backward()


@pytest.mark.parametrize("name", SPARSE)
def test_arguments_are_checked_before_training(name):
    kind = getattr(bs.sparsity, name.split(",")[0])
    more = {"density": 0.3} if kind is bs.sparsity.GradualBlockPruning else {}
    if "end" in inspect.signature(kind).parameters:
        more["end"] = 4
    make = partial(kind, sparse(), None, **more)
    for wrong, message in (
        ({"on_layout_change": 3}, "on_layout_change: expected None or a function"),
        ({"seed": 1 << 63}, "seed: expected an int, 0 or more and below 2\\^63"),
        ({"skip": torch.tensor(3)}, "skip: expected modules of the model"),
    ):
        if set(wrong) <= set(inspect.signature(kind).parameters):
            with pytest.raises(bs.BlockSparseError, match=message):
                make(**wrong)
    for wrong, got in (([], "an empty list"), (torch.tensor(3), "Tensor")):
        with pytest.raises(bs.BlockSparseError, match=f"modules: expected a model or a list of modules, got {got}"):
            kind(wrong, None, **more)


DENSE = [name for name, (make, _) in METHODS.items() if make is dense and name != "SRSTE"]


@pytest.mark.filterwarnings("ignore:.* pruned no block:blocksparse.SparsityWarning")
@pytest.mark.parametrize("name", DENSE)
def test_sixteen_bits(name):
    model = dense().bfloat16()
    method = METHODS[name][1](model, torch.optim.SGD(model.parameters(), lr=0.01))
    method.step()
    model = method.finish(early=True)
    assert [layer.values.dtype for layer in (model[0], model[2])] == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda model, optimizer: bs.sparsity.GroupLasso(model, optimizer, strength=1e-9), "a higher strength"),
        (lambda model, optimizer: bs.sparsity.L0Gates(model, optimizer, samples=10), "a higher strength"),
        (
            lambda model, optimizer: bs.sparsity.ThresholdPruning(model, optimizer, 1e-9, begin=0, ramp=1, end=2),
            "a higher q",
        ),
    ],
    ids=["GroupLasso", "L0Gates", "ThresholdPruning"],
)
def test_a_method_that_pruned_nothing_says_so(make, advice):
    model = nn.Linear(64, 64)
    method = make(model, torch.optim.SGD(model.parameters(), lr=0.1))
    method.step()
    method.step()
    with pytest.warns(
        bs.SparsityWarning, match=f"{type(method).__name__} pruned no block: use {advice}, or train longer"
    ):
        assert method.finish().layout.density == 1


def closed_gates(model, optimizer):
    method = bs.sparsity.L0Gates(model, optimizer, samples=10, block_size=4)
    for log_alpha in method.parameters():
        log_alpha.data.fill_(-3)
    return method


THRESHOLD = {"begin": 1, "ramp": 1, "end": 2, "every": 1, "block_size": 4, "keep_lines": False}


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda m, o: bs.sparsity.GroupLasso(m, o, 1e4, block_size=4, skip="0"), "a lower strength"),
        (closed_gates, "a lower strength"),
        (lambda m, o: bs.sparsity.ThresholdPruning(m, o, 10.0, **THRESHOLD), "a lower q"),
    ],
    ids=["lasso", "l0", "threshold"],
)
def test_a_weight_without_blocks_is_refused_and_nothing_changes(make, remedy):
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = make(model, optimizer)
    method.step()
    method.step()
    before = [(type(module), len(list(module.parameters()))) for module in model.modules()]
    groups = [len(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(bs.BlockSparseError, match=rf"weight would keep no block: use {remedy}, or name the weight in"):
        method.finish()
    assert [(type(module), len(list(module.parameters()))) for module in model.modules()] == before
    assert [len(group["params"]) for group in optimizer.param_groups] == groups
    method.step()


@pytest.mark.parametrize(
    "make",
    [
        bs.sparsity.SET,
        partial(bs.sparsity.RigL, end=50, every=1),
        partial(bs.sparsity.SMET, end=50, every=1),
        partial(bs.sparsity.CHTs, end=50, every=1, alpha=0.5),
        partial(bs.sparsity.ImportancePruning, begin=0, every=1),
        partial(bs.sparsity.GradualBlockPruning, end=1),
    ],
    ids=["SET", "RigL", "SMET", "CHTs", "importance", "gradual"],
)
def test_frozen_layers_keep_their_layouts(make):
    model = nn.Sequential(*(bs.nn.Linear(48, 48, density=0.4, block_size=4) for _ in range(3)))
    model[0].values.requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad])
    with pytest.warns(SparsityWarning, match=r"does not change 0\.values while frozen: call requires_grad_"):
        method = make(model, optimizer)
    model[1].requires_grad_(False)
    before = [layer.layout for layer in model]
    model(torch.randn(4, 48)).square().sum().backward()
    optimizer.step()
    with pytest.warns(SparsityWarning, match=r"does not change 1\.values while frozen"):
        assert method.step()
    assert [layer.layout == old for layer, old in zip(model, before, strict=True)] == [True, True, False]
    make([model[2]], optimizer)
    make(model, optimizer, skip=("0", "1"))
    with pytest.raises(bs.BlockSparseError, match=r"1: expected a layer that is trained: requires_grad_\(True\) first"):
        make([model[2], model[1]], optimizer)
    model.requires_grad_(False)
    with pytest.raises(bs.BlockSparseError, match="modules: expected weights that are trained"):
        make(model, optimizer)


def pruned_mask(method, size, seed):
    layer = nn.Linear(20 * size, 20 * size)
    nn.init.constant_(layer.weight, 0.5)
    pruner = method(layer, density=0.4, end=1, block_size=size, seed=seed)
    pruner.step()
    return pruner.layouts()["weight"].mask()


def set_mask(size, seed):
    layer = bs.nn.Linear(20 * size, 20 * size, block_size=size)
    layer.values.data.fill_(0.5)
    drop = nearest_zero(handle_of(layer), 0.6, "l2", partial(hash_positions, seed=seed))
    return ~torch.from_numpy(drop).view(20, 20)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "choose",
    [
        set_mask,
        partial(pruned_mask, bs.sparsity.GradualPruning),
        partial(pruned_mask, bs.sparsity.MovementPruning),
    ],
    ids=["SET", "gradual", "movement"],
)
def test_the_seed_decides_among_equal_blocks(choose, size):
    one, again, other = (choose(size, seed) for seed in (0, 0, 1))
    assert one.sum() == 160
    assert one.sum(1).max() < 16, "not whole rows"
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", METHODS)
def test_steps_have_one_name(name):
    given = inspect.signature(getattr(bs.sparsity, name.split(",")[0])).parameters
    assert not given.keys() & {"start", "stop", "t_end", "first", "last", "from_"}


# -- calls that follow no update ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("zero_first", [False, True], ids=["step first", "zero_grad first"])
def test_updates_that_a_grad_scaler_skips_do_not_count(name, zero_first):
    model, optimizer, method = start(name)
    scaler = torch.amp.GradScaler("cpu")
    if name == "SRSTE":
        pytest.skip("it has no optimizer")
    for overflow in (False, True, False, True, False):
        factor = math.inf if overflow else 1.0
        scaler.scale(model(torch.randn(8, 16)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if zero_first:
            optimizer.zero_grad()
        before = method.calls
        method.step()
        assert method.calls == before + (not overflow)
        optimizer.zero_grad()


def test_the_first_update_may_be_skipped():
    model, _, method = start("SET")
    (model(torch.randn(8, 16)).sum() * math.inf).backward()
    method.step()
    assert method.calls == 0


@pytest.mark.parametrize("name", METHODS)
def test_calls_without_a_backward_pass_count(name):
    """One that catches up with the schedule, or an optimizer in a CUDA graph, whose replays run no hooks."""
    model, optimizer, method = start(name)
    train(model, optimizer, method, 0, 2)
    if name.startswith("RigL"):
        method.end = 1
    if name.endswith("regrow"):  # it would need one
        method.regrow = 0
    for calls in (3, 4, 5):
        method.step()
        assert method.calls == calls


def test_rigl_collects_all_passes_of_an_update():
    """A call of `step` after each pass: those without an update keep what was collected."""
    results = []
    for often in (False, True):
        model, optimizer, method = start("RigL")
        for t in range(24):
            model(torch.randn(8, 16, generator=torch.Generator().manual_seed(t))).square().mean().backward()
            updated = t % 3 == 2
            if updated:
                optimizer.step()
            if updated or (often and t > 3):
                method.step()
            if updated:
                optimizer.zero_grad()
        assert method.calls == 8
        results.append(model)
    assert results[0][0].layout == results[1][0].layout
    assert torch.equal(results[0][0].values, results[1][0].values)


def test_rigl_changes_in_the_update_after_a_skipped_one():
    model, optimizer, method = start("RigL")
    train(model, optimizer, method, 0, 1)
    scaler, before = torch.amp.GradScaler("cpu"), model[0].layout
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 16)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = method.step()
    assert changed
    assert model[0].layout != before


def linears():
    return nn.Sequential(nn.Linear(80, 64), nn.Linear(64, 32))


def layers():
    return nn.Sequential(bs.nn.Linear(8, 8, density=0.5, block_size=1), bs.nn.Linear(8, 2, density=0.5, block_size=1))


OTHERS = torch.optim.SGD([nn.Parameter(torch.ones(1))])
LSTM = bs.nn.LSTM(8, 8, density=1.0, block_size=4)
# By method, its model and what else a call needs; and what is wrong with others.
BAD = {
    "SET": (layers, {}, [
        ({"zeta": -0.1}, "zeta: expected a number from 0 to 1, got -0.1"),
        ({"zeta": 1.1}, "zeta: expected a number from 0 to 1, got 1.1"),
        ({"zeta": math.nan}, "zeta: expected"),
        ({"zeta": True}, "zeta: expected"),
        ({"ramp": 0}, "ramp: expected an int, 1 or more, got 0"),
        ({"every": 0}, "every: expected an int, 1 or more, got 0"),
        ({"end": 0.5}, "end: expected an int"),
        ({"seed": -1}, "seed: expected"),
        ({"init": "ones"}, "init: expected one of zeros, he, xavier"),
        ({"norm": "min"}, "norm: expected one of l2, mean, max"),
        ({"skip": "7"}, "skip: expected modules of the model, or names or patterns of modules or parameters, got '7'"),
        ({"skip": nn.ReLU()}, "skip: expected modules of the model, or names or .*, got ReLU"),
        ({"skip": ["0", "1"]}, "skip leaves no block-sparse weight"),
        ({"skip": ["0.values", "1.*"]}, "skip leaves no block-sparse weight"),
        ({"modules": nn.Linear(2, 2)}, "modules: expected one with block-sparse weights, got Linear"),
        ({"modules": [bs.nn.Linear(2, 2), nn.Linear(2, 2)]}, "modules: expected one with block-sparse weights"),
        ({"modules": 3}, "modules: expected a model"),
        ({"modules": bs.nn.Linear(2, 2, layout=bs.BlockLayout([[0, 0], [0, 0]], 1))},
         r"modules: expected a layer with connections, got BlockLayout\(.*nnz=0"),
        ({"optimizer": OTHERS}, "expected an optimizer with the parameter 0"),
    ]),
    "RigL": (layers, {"optimizer": None, "end": 100, "every": 10}, [
        ({"end": 0}, "end: expected an int, 1 or more"),
        ({"every": 0}, "every: expected an int, 1 or more"),
        ({"alpha": 1.5}, "alpha: expected a number from 0 to 1"),
        ({"ramp": 1.5}, "ramp: expected"),
        ({"norm": "min"}, "norm: expected one of"),
        ({"modules": nn.Linear(4, 4)}, "modules: expected one with block-sparse weights, got Linear"),
        ({"modules": LSTM}, "weight_ih_l0: expected a linear layer or a conv"),
    ]),
    "SMET": (layers, {"optimizer": None, "end": 100}, [
        ({"end": 0}, "end: expected an int, 1 or more"),
        ({"alpha": 1.5}, "alpha: expected a number from 0 to 1"),
        ({"final_alpha": 0.3}, "final_alpha: expected a number from 0 to 0.2"),
        ({"warmup": -1}, "warmup: expected an int, 0 or more"),
        ({"optimizer": OTHERS}, "expected an optimizer with the parameter 0"),
        ({"modules": nn.Linear(4, 4)}, "modules: expected one with block-sparse weights, got Linear"),
    ]),
    "CHTs": (layers, {"optimizer": None, "end": 100}, [
        ({"end": 0}, "end: expected an int, 1 or more"),
        ({"alpha": -1}, "alpha: expected a number from 0 to 1"),
        ({"temperatures": 3}, r"temperatures: expected a pair of numbers \(first, last\), got 3"),
        ({"temperatures": (1, -1)}, "temperatures: expected a finite number, 0 or more"),
        ({"optimizer": OTHERS}, "expected an optimizer with the parameter 0"),
    ]),
    "GradualBlockPruning": (layers, {"end": 9, "density": 0.3}, [
        ({"growth": "magic"}, "growth: expected one of gradient, random, topology, got 'magic'"),
        ({"schedule": "linear"}, "schedule: expected one of cubic, sigmoid, got 'linear'"),
        ({"initial_density": 0.2}, "initial_density: expected a number from 0.3 to 1, got 0.2"),
        ({"regrow": 2}, "regrow: expected a number from 0 to 1"),
    ]),
    "ImportancePruning": (layers, {}, [
        ({"percentile": 101}, "percentile: expected a number from 0 to 100"),
        ({"begin": -1}, "begin: expected an int, 0 or more"),
        ({"every": 0}, "every: expected an int, 1 or more"),
        ({"modules": LSTM}, "weight_ih_l0: expected a linear layer or a conv"),
        ({"modules": nn.Linear(8, 8)}, "modules: expected one with block-sparse weights"),
    ]),
    "GradualPruning": (linears, {"end": 10, "block_size": 32}, [
        ({"density": 0.01}, "density: expected 0.25 or more, that leaves each weight a block, got 0.01"),
        ({"density": 0.1, "scope": "layer"},
         "density: expected 0.25 or more, that leaves 1.weight one of its 2 blocks"),
        ({"density": -1}, "density: expected a number above 0 and at most 1, got -1"),
        ({"scope": "erk"}, "scope: expected one of global, layer, got 'erk'"),
        ({"norm": "l1"}, "norm: expected one of l2, mean, max, got 'l1'"),
        ({"density": 1.2}, "density: expected a number above 0 and at most 1, got 1.2"),
        ({"begin": -1}, "begin: expected an int, 0 or more, got -1"),
        ({"begin": 9, "end": 9}, "end: expected an int, 10 or more, got 9"),
        ({"every": 0}, "every: expected an int, 1 or more, got 0"),
        ({"block_size": 0}, "block_size: expected a positive int"),
        ({"skip": "7"}, "skip: expected "),
    ]),
    "ThresholdPruning": (linears, {"optimizer": None, "q": 0.1, "begin": 1, "ramp": 2, "end": 3}, [
        ({"q": -0.1}, "q of 0.weight: expected a finite number, 0 or more, got -0.1"),
        ({"q": {"0.weight": 0.1}}, r"q: expected a number for 1.weight, got \['0.weight'\]"),
        ({"ramp": 0}, "ramp: expected an int, 1 or more, got 0"),
        ({"end": 2}, "end: expected an int, 3 or more, got 2"),
        ({"every": 0.5}, "every: expected an int, 1 or more, got 0.5"),
    ]),
    "GroupLasso": (lambda: nn.Linear(8, 8), {"mode": "penalty"}, [
        ({"mode": "both"}, "mode: expected one of proximal, penalty, got 'both'"),
        ({"mode": "proximal"}, "optimizer: mode=.proximal. uses its learning rate"),
        ({"strength": -1}, "strength: expected a finite number, 0 or more, got -1"),
        ({"threshold": math.nan}, "threshold: expected a finite number, 0 or more, got nan"),
        ({"density": 2}, "density: expected a number above 0 and at most 1, got 2"),
        ({"density": 0.01}, "density: expected 1 or more, that leaves each weight"),
        ({"scope": "all"}, "scope: expected one of global, layer, got 'all'"),
    ]),
    "L0Gates": (lambda: nn.Linear(8, 8), {"samples": 10}, [
        ({"samples": 0}, "samples: expected an int, 1 or more, got 0"),
        ({"strength": -1}, "strength: expected a finite number, 0 or more, got -1"),
        ({"closed": 1}, "closed: expected a number from 0.01 to 0.99, got 1"),
        ({"weight_decay": "no"}, "weight_decay: expected a finite number, 0 or more, got 'no'"),
        ({"lr": -0.1}, "lr: expected a finite number, 0 or more, got -0.1"),
        ({"density": 0.01}, "density: expected 1 or more, that leaves each weight a block, got 0.01"),
    ]),
    "MovementPruning": (lambda: nn.Linear(8, 8), {"end": 10, "block_size": 4}, [
        ({"density": 0.01}, "density: expected 0.25 or more, that leaves each weight a block, got 0.01"),
        ({"end": 0}, "end: expected an int, 1 or more, got 0"),
        ({"scope": "all"}, "scope: expected one of global, layer, got 'all'"),
        ({"lr": math.inf}, "lr: expected a finite number, 0 or more, got inf"),
    ]),
    "SRSTE": (lambda: nn.Linear(8, 8), {}, [
        ({"n": 5}, "n and m: expected ints, 0 < n <= m"),
        ({"decay": -1}, "decay: expected a finite number, 0 or more"),
        ({"model": nn.Linear(6, 4)}, "model: expected a weight that can be 2:4 sparse, got .*6 inputs are no multiple"),
        ({"model": nn.ReLU()}, "model: expected a weight that can be 2:4 sparse, got no weight"),
        ({"model": 3}, "model: expected a torch.nn.Module, got int"),
        ({"skip": "head"}, "skip: expected modules of the model"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [(name, arguments, message) for name, (_, _, cases) in BAD.items() for arguments, message in cases],
)
def test_bad_arguments_leave_the_model_as_it_was(name, arguments, message):
    make, others, _ = BAD[name]
    kind, model = getattr(bs.sparsity, name), make()
    first = next(iter(inspect.signature(kind).parameters))
    before = [type(module) for module in model.modules()]
    with pytest.raises(bs.BlockSparseError, match=message):
        kind(**{first: model, **others, **arguments})
    assert [type(module) for module in model.modules()] == before
