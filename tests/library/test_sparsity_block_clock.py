"""A clock per block: new blocks train as new parameters, in every supported optimizer, after any interruption."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.checked import BLOCK_AGE
from blocksparse.sparsity import BlockClock
from blocksparse.sparsity.sparse_training import block_clock
from loops import update

pytestmark = pytest.mark.usefixtures("one_thread")

BETAS = ((0.9, 0.999), (0.9, 0.95), (0.5, 0.9999), (0.99, 0.9))
ADAMS = {
    f"{kind.__name__}-{first}-{second}": (
        lambda params, kind=kind, betas=(first, second): kind(params, lr=1e-3, betas=betas)
    )
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
    for first, second in BETAS
}
FORMS = {
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AMSGrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "decay": lambda params: torch.optim.Adam(params, weight_decay=0.1),
    "maximize": lambda params: torch.optim.NAdam(params, weight_decay=0.1, maximize=True),
    "decoupled": lambda params: torch.optim.NAdam(params, weight_decay=0.1, decoupled_weight_decay=True),
}


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for each in self.param_groups[0]["params"] if each.grad is not None):
            mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            parameter.sub_(torch.sign(mean.lerp(parameter.grad, 0.1)), alpha=self.param_groups[0]["lr"])
            mean.lerp_(parameter.grad, 0.01)


WARMED = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "bs.sparsity.SGD": lambda params: bs.sparsity.SGD(params, lr=1e-3),
    "Lion": Lion,
}


def draw_gradient(layer, new=None, ratio=1.0):
    layer.values.grad = torch.randn_like(layer.values)
    if new is not None:
        layer.values.grad[new] *= ratio


def grown(make, warmup, steps=200):
    """A layer with an optimizer under a clock, after some steps and a change; and which blocks are new."""
    torch.manual_seed(0)
    layer = bs.nn.Linear(96, 64, density=0.25, block_size=8)
    clock = BlockClock(make(layer.parameters()), warmup)
    for _ in range(steps):
        draw_gradient(layer)
        clock.step()
    sources = []
    bs.sparsity.SET(layer, clock, init="zeros", on_layout_change=lambda _, source: sources.append(source)).step()
    return layer, clock, sources[0] < 0


def moves(layer, optimizer):
    """Steps, and returns how far each block has moved: the root of its mean square, in learning rates."""
    before = layer.values.detach().clone()
    optimizer.step()
    moved = (layer.values.detach() - before).square().flatten(1).mean(1).sqrt()
    return moved / float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize("ratio", [0.1, 1, 30])
@pytest.mark.parametrize("name", ADAMS)
def test_new_blocks_move_by_1_2_learning_rates_at_most(name, ratio, warmup):
    layer, clock, new = grown(ADAMS[name], warmup)
    assert new.any()
    largest = []
    for _ in range(150):
        draw_gradient(layer, new, ratio)
        largest.append(float(moves(layer, clock)[new].max()))
    assert (0.01 if "RAdam" in name else 0.2) < max(largest) <= 1.2
    if warmup:
        assert largest[0] <= 1.2 / warmup


@pytest.mark.parametrize("make", [*ADAMS.values(), *FORMS.values()], ids=[*ADAMS, *FORMS])
def test_new_blocks_train_as_new_parameters(make):
    layer, clock, new = grown(make, 0, steps=30)
    plain, without = copy.deepcopy((layer, clock.optimizer))
    del without.state[plain.values][BLOCK_AGE]
    alone = nn.Parameter(layer.values.detach()[new].clone())
    optimizer = make([alone])
    for _ in range(60):
        draw_gradient(layer)
        plain.values.grad, alone.grad = layer.values.grad.clone(), layer.values.grad[new].clone()
        before = alone.detach().clone()
        for each in (clock, without, optimizer):
            each.step()
        if isinstance(optimizer, torch.optim.RAdam) and optimizer.state[alone]["step"] < 6:
            alone.data.copy_(before)  # RAdam's steps without its second moment are left out
        torch.testing.assert_close(layer.values.detach()[new], alone.detach(), rtol=1e-5, atol=1e-7)
        assert torch.equal(layer.values[~new], plain.values[~new]), "other blocks train as without a clock"


@pytest.mark.parametrize("name", WARMED)
def test_the_learning_rate_of_new_blocks_rises_linearly(name):
    layer, clock, new = grown(WARMED[name], 10, steps=3)
    plain = copy.deepcopy((layer, clock.optimizer))
    del plain[1].state[plain[0].values][BLOCK_AGE]
    for age in range(1, 15):
        before = layer.values.detach().clone()
        plain[0].values.data.copy_(before)
        draw_gradient(layer)
        plain[0].values.grad = layer.values.grad.clone()
        clock.step()
        plain[1].step()
        expected = before + (plain[0].values.detach() - before) * torch.where(new, min(age / 10, 1), 1.0).view(-1, 1, 1)
        torch.testing.assert_close(layer.values.detach(), expected, rtol=1e-5, atol=1e-7)


def test_ages_follow_blocks_and_stop_at_the_largest():
    layer, clock, new = grown(ADAMS["AdamW-0.9-0.999"], 5)
    ages = clock.state[layer.values][BLOCK_AGE]
    assert ages[~new].tolist() == [[255, 255]] * int((~new).sum())
    ages[new] = torch.tensor([255.0, 0.0])
    draw_gradient(layer)
    clock.step()
    assert ages[new].tolist() == [[0, 1]] * int(new.sum()), "256 in digits"
    source = bs.sparsity.rewire(layer, [0], [], [], clock)
    assert torch.equal(clock.state[layer.values][BLOCK_AGE], ages[source])
    assert BLOCK_AGE not in bs.densify(nn.Sequential(layer), inplace=True, optimizer=clock)[0].state_dict()
    clock.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_resumes_at_a_change_with_the_same_bits(dtype):
    def start():
        torch.manual_seed(0)
        layer = bs.nn.Linear(48, 32, density=0.25, block_size=8).to(dtype)
        clock = BlockClock(torch.optim.AdamW(layer.parameters(), lr=0.01), warmup=400)
        return layer, clock, bs.sparsity.SET(layer, clock, init="zeros", every=150)

    def train(layer, clock, method, first, last):
        for t in range(first, last):
            x = torch.randn(8, 48, generator=torch.Generator().manual_seed(t)).to(dtype)
            update(clock, (layer(x) - 1).square().mean(), method)

    for stop in (150, 151, 460):  # 460: a block of age 310, which bfloat16 cannot keep in one number
        whole, first, second = start(), start(), start()
        train(*whole, 0, 470)
        train(*first, 0, stop)
        for loaded, saved in zip(second, first, strict=True):
            loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
        train(*second, stop, 470)
        assert whole[0].layout == second[0].layout
        assert torch.equal(whole[0].values, second[0].values)


def test_a_loaded_state_with_ages_and_no_clock_is_warned_of():
    layer, clock, _ = grown(ADAMS["AdamW-0.9-0.999"], 10)
    clock.load_state_dict(clock.state_dict())
    for wrapped in (True, False):
        optimizer = torch.optim.AdamW(layer.parameters())
        optimizer.load_state_dict(clock.state_dict())
        draw_gradient(layer)
        if wrapped:
            BlockClock(optimizer).step()
            continue
        with pytest.warns(bs.SparsityWarning, match="AdamW has ages of blocks but no BlockClock.* wrap the optimizer"):
            optimizer.step()
        optimizer.step()
    clock.step()


@pytest.mark.parametrize("prepared", [True, False])
def test_a_clock_around_a_prepared_optimizer_accumulates_with_accelerate(prepared):
    accelerate = pytest.importorskip("accelerate")
    layer = bs.nn.Linear(32, 32, density=0.5, block_size=8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    try:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        clock = BlockClock(accelerator.prepare(optimizer)) if prepared else accelerator.prepare(BlockClock(optimizer))
        updates = []
        optimizer.register_step_post_hook(lambda *_: updates.append(1))
        warned = pytest.warns(bs.SparsityWarning, match=r"BlockClock\(accelerator.prepare\(")
        with nullcontext() if prepared else warned:
            for _ in range(8):
                with accelerator.accumulate(layer):
                    accelerator.backward(layer(torch.randn(4, 32)).square().mean())
                    clock.step()
                    clock.zero_grad()
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
    assert len(updates) == (2 if prepared else 8)


def test_copies_have_a_clock_of_their_own():
    layer, clock, new = grown(ADAMS["Adam-0.9-0.999"], 10)
    other, copied = copy.deepcopy((layer, clock))
    assert copied.warmup == 10
    for each, own in ((layer, clock), (other, copied)):
        torch.manual_seed(1)
        for _ in range(3):
            draw_gradient(each)
            own.step()
    assert torch.equal(layer.values, other.values)
    assert new.any()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fused", [True, False])
def test_a_grad_scaler_accepts_the_clock_as_the_optimizer(kind, fused):
    def train(passed):
        """Train with an overflow; return the values, and the ages of new blocks."""
        layer, clock, new = grown(lambda params: kind(params, lr=0.01, fused=fused), 5)
        scaler = torch.amp.GradScaler("cpu")
        for t, factor in enumerate((1.0, math.inf, 1.0, math.nan, 1.0)):
            before = layer.values.detach().clone()
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(t))
            scaler.scale(layer(x).square().mean() * factor).backward()
            if t == 4:
                scaler.unscale_(passed(clock))
            scaler.step(passed(clock))
            scaler.update()
            clock.zero_grad()
            assert torch.equal(before, layer.values) == (factor != 1), "an overflow moves nothing"
            assert (layer.values - before).abs().max() < 0.02
        assert not hasattr(clock.optimizer, "found_inf")
        assert not hasattr(clock.optimizer, "grad_scale")
        return layer.values.detach(), clock.state[layer.values][BLOCK_AGE][new].tolist()

    (values, ages), (expected, _) = train(lambda clock: clock), train(lambda clock: clock.optimizer)
    assert torch.equal(values, expected)
    assert ages == [[3, 0]] * len(ages), "skipped updates do not count"
    assert ages


def test_attributes_that_are_set_on_a_clock_are_the_optimizers():
    _, clock, _ = grown(WARMED["SGD"], 5, steps=1)
    clock.note = 3
    assert clock.optimizer.note == clock.note == 3
    del clock.note
    assert not hasattr(clock.optimizer, "note")
    clock.warmup = 7
    assert clock.warmup == 7
    assert not hasattr(clock.optimizer, "warmup")


@pytest.mark.parametrize(
    "kind",
    [getattr(torch.optim, name) for name in ("Adafactor", "Adagrad", "Adamax", "LBFGS", "RMSprop", "Muon")],
)
def test_other_optimizers_are_refused_by_name(kind):
    parameters = [nn.Parameter(torch.ones(4, 4))]
    with pytest.raises(bs.BlockSparseError, match=f"supports Adam, .* not {kind.__name__}: use one of them"):
        BlockClock(kind(parameters))


def test_bad_arguments():
    parameters = [nn.Parameter(torch.ones(4, 4))]
    adam = torch.optim.Adam(parameters)
    with pytest.raises(bs.BlockSparseError, match="warmup: expected an int, 0 or more and below 65536, got -1"):
        BlockClock(adam, warmup=-1)
    with pytest.raises(bs.BlockSparseError, match=r"warmup: .* got 65536"):
        BlockClock(adam, warmup=65_536)
    BlockClock(torch.optim.SGD(parameters), warmup=65_535)
    with pytest.raises(bs.BlockSparseError, match=r"betas: expected 0.9999 or less, .* 65,535 steps, got 0.99999"):
        BlockClock(torch.optim.AdamW(parameters, betas=(0.9, 0.99999)))
    with pytest.raises(bs.BlockSparseError, match=r"optimizer: expected a torch.optim.Optimizer, got list"):
        BlockClock(parameters)
    with pytest.raises(bs.BlockSparseError, match=r"capturable=True, but a CUDA graph runs no hooks"):
        BlockClock(torch.optim.Adam(parameters, capturable=True))
    BlockClock(adam)
    with pytest.raises(bs.BlockSparseError, match="this Adam has a BlockClock already"):
        BlockClock(adam)


def test_bias_corrections_of_many_blocks_are_those_of_each():
    ages = torch.randint(1, 50, (200, 1, 1)).double()
    for count in (1, 10, 200):
        found = block_clock._bias_correction(0.999, ages[:count], torch.float32)
        torch.testing.assert_close(found, (1 - 0.999 ** ages[:count]).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda ages: -ages.float() - 1, "two digits from 0 to 255"),
        (lambda ages: ages.float() * torch.nan, "two digits from 0 to 255"),
        (lambda ages: ages.float() + 0.5, "two digits from 0 to 255"),
        (lambda ages: ages.flatten(), r"numbers of all blocks, \[\d+, 2\]"),
        (lambda ages: ages[:-1], "load the state that was saved with these layouts"),
        (lambda ages: torch.cat([ages, ages], 1), "numbers of all blocks"),
        (lambda ages: "old", "got str"),
    ],
    ids=["negative", "nan", "fraction", "flat", "fewer", "wide", "text"],
)
def test_damaged_ages_are_refused_before_a_step(damage, message):
    layer, clock, _ = grown(ADAMS["AdamW-0.9-0.999"], 10)
    state = clock.optimizer.state[layer.values]
    state["block_age"] = damage(state["block_age"])
    before = layer.values.detach().clone()
    draw_gradient(layer)
    with pytest.raises(bs.BlockSparseError, match=f"block_age in the optimizer's state: .*{message}"):
        clock.step()
    assert torch.equal(layer.values, before)


@pytest.mark.parametrize("setting", [{"betas": (0.9, 0.99999)}, {"capturable": True}], ids=["betas", "capturable"])
def test_groups_that_are_added_later_are_checked_too(setting):
    layer = bs.nn.Linear(16, 16, density=0.5, block_size=8)
    clock = BlockClock(torch.optim.AdamW([layer.bias]))
    clock.add_param_group({"params": [layer.values], **setting})
    layer(torch.randn(2, 16)).sum().backward()
    with pytest.raises(bs.BlockSparseError, match=next(iter(setting))):
        clock.step()
