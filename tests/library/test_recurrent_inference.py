"""In inference, the fast path of a recurrent layer gives the results of the general one, from its present weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import blocksparse as bs
from blocksparse.nn.recurrent import Recurrent
from blocksparse.ops import cpu_core
from linear_backends import CPU, running

pytestmark = pytest.mark.skipif(cpu_core.unavailable() is not None, reason="the way is that to the compiled core")

INPUT, HIDDEN = 32, 64
MODULES = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "dropout": {"num_layers": 2, "dropout": 0.5},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
}
SEQUENCES = [1, 3, 32]


def of(options=None, batch=3, steps=1, layer=bs.nn.LSTM):
    """Return a module, its input, and initial states."""
    torch.manual_seed(0)
    module = layer(INPUT, HIDDEN, density=0.5, block_size=16, **(options or {})).eval()
    dtype = module.bias_ih_l0.dtype if module.bias else torch.float32
    x = torch.randn(batch, steps, INPUT) if module.batch_first else torch.randn(steps, batch, INPUT)
    states = [torch.randn(module.num_layers, batch, HIDDEN) for _ in range(2)]
    return module, x.to(dtype), tuple(state.to(dtype) for state in states)


def flat(results):
    y, states = results
    return [y, *states]


def check(module, x, hx=None, short=True):
    """The results are the long way's, through the short one or not."""
    with torch.no_grad():
        expected = flat(Recurrent.forward(module, x, hx))
        found = module._fast_inference(x, hx)
        assert (found is not None) == short
        got = flat(module(x, hx))
    for mine, wanted in zip(got, expected, strict=True):
        assert torch.equal(mine, wanted)
        assert (mine.dtype, mine.is_contiguous()) == (wanted.dtype, wanted.is_contiguous())
    return got


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("batch", SEQUENCES)
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_the_same_bits_as_the_long_way(options, batch, steps):
    module, x, (h, c) = of(options, batch, steps)
    with torch.no_grad():
        module(x)  # plans the products
    short = steps == 1 or not module.batch_first
    check(module, x, short=short)
    wide = c if c.dtype == torch.float64 else c.float()
    check(module, x, (h, wide), short)
    check(module, x, [h, c], short)  # cast first where they are of 16 bits


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("batch", SEQUENCES)
@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("layer", [bs.nn.GRU, bs.nn.RNN, partial(bs.nn.RNN, nonlinearity="relu")])
def test_layers_without_a_state_c(layer, options, batch, steps):
    module, x, (h, _) = of(options, batch, steps, layer)
    module(x)  # plans the products
    for hx in (None, h):
        states, before = None if hx is None else (hx, hx), h.clone()
        y, (final, _) = Recurrent.forward(module, x, states)
        fast = module._fast_inference(x, states)
        assert (fast is not None) == (steps == 1 or not module.batch_first)
        for mine, wanted in zip(module(x, hx), (y, final), strict=True):
            assert torch.equal(mine, wanted)
            assert (mine.dtype, mine.is_contiguous()) == (wanted.dtype, wanted.is_contiguous())
        assert torch.equal(h, before)


@pytest.mark.parametrize("steps", [5, 12])  # 12 steps transpose the blocks of the state's weight once
@pytest.mark.parametrize("layer", [bs.nn.LSTM, bs.nn.GRU, bs.nn.RNN])
@pytest.mark.parametrize("backend", CPU)
def test_several_steps_one_by_one(backend, layer, steps):
    module = layer(INPUT, HIDDEN, density=0.5, block_size=16)
    x, hx = torch.randn(steps, 3, INPUT), None
    with torch.no_grad(), running(backend):
        expected, last = module(x)
        for t in range(steps):
            y, hx = module(x[t : t + 1], hx)
            torch.testing.assert_close(y[0], expected[t])
    torch.testing.assert_close(hx, last)


# -- weights as they are ---------------------------------------------------------------------------------------------


def layout_and_values(module):
    weight = module.weight_hh_l0
    other = bs.patterns.random(weight.layout.shape, 16, density=0.25, seed=7)
    weight.set_layout(other, torch.randn(other.values_shape))


def loaded(module):
    other = bs.nn.LSTM(INPUT, HIDDEN, density=0.25, block_size=16)
    module.load_state_dict(other.state_dict())


CHANGES = {
    "in place": lambda module: module.weight_hh_l0.values.mul_(2),
    "bias in place": lambda module: module.bias_hh_l0.add_(1),
    "data": lambda module: setattr(module.weight_ih_l0.values, "data", torch.ones_like(module.weight_ih_l0.values)),
    "parameter": lambda module: setattr(
        module.weight_ih_l0, "values", torch.nn.Parameter(torch.rand_like(module.weight_ih_l0.values))
    ),
    "layout": layout_and_values,
    "state dict": loaded,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_weights_count_in_the_next_call(change):
    module, x, hx = of()
    before = check(module, x, hx)[0]
    with torch.no_grad():
        change(module)
    assert not torch.equal(before, check(module, x, hx)[0])


def test_another_dtype_and_a_parametrized_weight():
    module, x, hx = of()
    check(module.double(), x.double(), tuple(state.double() for state in hx))
    module = module.float()
    torch.nn.utils.parametrize.register_parametrization(module.weight_hh_l0, "values", torch.nn.Tanh())
    check(module, x, hx)


# -- what is given ---------------------------------------------------------------------------------------------------


def negated(tensor):
    """Return a lazily negated view of the same numbers."""
    return torch._neg_view(-tensor)


# And whether one that lies so is for the short way.
STRIDED = {
    "rows of more": (lambda t: t.new_zeros(*t.shape[:2], 2 * t.shape[2])[..., : t.shape[2]].copy_(t), False),
    "features apart": (lambda t: t.new_zeros(*t.shape, 2)[..., 0].copy_(t), False),
    "sequences first": (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), True),
    "an offset": (lambda t: torch.cat([t, t]).narrow(0, 1, 1).copy_(t), True),
    "negated": (negated, False),
}


@pytest.mark.parametrize("operand", ["x", "h", "c"])
@pytest.mark.parametrize(("lay", "short"), STRIDED.values(), ids=STRIDED)
def test_operands_that_lie_otherwise(lay, short, operand):
    module, x, (h, c) = of()
    expected = check(module, x, (h, c))
    given = {"x": x, "h": h, "c": c}
    given[operand] = lay(given[operand])
    got = check(module, given["x"], (given["h"], given["c"]), short)
    torch.testing.assert_close(got, expected)


def test_states_of_other_dtypes():
    module, x, (h, c) = of()
    check(module, x, (h.double(), c.double()))


def test_a_state_that_all_sequences_share():
    module, x, (h, c) = of()
    shared = h[:, :1].expand(-1, 3, -1), c[:, :1].expand(-1, 3, -1)
    check(module, x, shared, short=False)


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


BAD = {
    "input: expected": lambda module, x, hx: module(x[..., :-1], hx),
    "input: expected the dtype of the weights": lambda module, x, hx: module(x.double(), hx),
    "input: expected floating point": lambda module, x, hx: module(x.long(), hx),
    "the initial h: expected": lambda module, x, hx: module(x, (hx[0][:, :2], hx[1])),
    "the initial c: expected": lambda module, x, hx: module(x, (hx[0], hx[1][..., :-1])),
    "hx: expected": lambda module, x, hx: module(x, hx[0]),
    "(?i)device": lambda module, x, hx: module(x.to("meta"), hx),
    "device|CPU": lambda module, x, hx: module(x, (hx[0].to("meta"), hx[1])),
    "storage was freed": lambda module, x, hx: module(freed(x), hx),
}


@torch.no_grad()
@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_as_on_the_long_way(message):
    module, x, hx = of()
    module(x, hx)
    with pytest.raises(bs.BlockSparseError, match=message):
        BAD[message](module, x, hx)


@torch.no_grad()
@pytest.mark.parametrize("state", [0, 1], ids=["h", "c"])
def test_states_with_freed_storages_are_refused(state):
    module, x, hx = of()
    module(x, hx)
    freed(hx[state])
    with pytest.raises(RuntimeError, match="out of bounds for storage"):  # PyTorch's own
        module(x, hx)


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 4])
def test_results_have_memory_of_their_own(steps):
    module, x, hx = of({"num_layers": 2}, steps=steps)
    given = [x.clone(), *(state.clone() for state in hx)]
    first = flat(module(x, hx))
    kept = [tensor.clone() for tensor in first]
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*first, x, *hx)}) == 6
    second = flat(module(x, tuple(first[1:])))
    assert all(torch.equal(mine, wanted) for mine, wanted in zip([*first, x, *hx], [*kept, *given], strict=True))
    for tensor in first:
        tensor.zero_()
    again = flat(module(x, tuple(kept[1:])))
    assert all(torch.equal(mine, wanted) for mine, wanted in zip(again, second, strict=True))


# -- what the long way has to see ------------------------------------------------------------------------------------


LONG = {
    "two directions": {"bidirectional": True},
    "a projection": {"proj_size": 16},
    "padding": {"block_size": 24},
    "dense weights": {"density": None},
    "single weights": {"block_size": 1},
}


@torch.no_grad()
@pytest.mark.parametrize("options", LONG.values(), ids=LONG)
def test_modules_without_a_short_way(options):
    module = bs.nn.LSTM(INPUT, HIDDEN, **{"density": 0.5, "block_size": 16, **options}).eval()
    x = torch.randn(1, 3, INPUT)
    module(x)
    assert module._fast_inference(x, None) is None
    y, (h, c) = module(x)
    assert y.shape[:2] == (1, 3)
    assert h.shape[1] == c.shape[1] == 3


@torch.no_grad()
@pytest.mark.parametrize("layer", [bs.nn.LSTM, bs.nn.GRU, bs.nn.RNN])
def test_an_input_with_features_in_the_padding_is_refused(layer):
    module = layer(20, HIDDEN, density=0.5, block_size=16).eval()
    module(torch.randn(1, 3, 20))  # the first call takes the long way
    with pytest.raises(bs.BlockSparseError, match="steps, batch, 20"):
        module(torch.randn(1, 3, 32))


def test_calls_without_a_short_way():
    module, x, hx = of({"num_layers": 2, "dropout": 0.5})
    assert module._fast_inference(x, hx) is None  # gradients
    with torch.no_grad():
        for other in (x[0], x[:0], x[:, :0], torch.nn.utils.rnn.pack_sequence([x[0]])):
            assert module._fast_inference(other, None) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert module._fast_inference(x, hx) is None
        with bs.use_backend("reference"):
            assert module._fast_inference(x, hx) is None
        assert module.train()._fast_inference(x, hx) is None
        batched = torch.vmap(module.eval())(torch.stack([x, 2 * x]))[0]
        torch.testing.assert_close(batched, torch.stack([module(x)[0], module(2 * x)[0]]))
