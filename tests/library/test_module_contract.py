"""The contract of all modules with block-sparse weights: one table of modules, and the properties that each has.

`test_int8_models.py` has the properties of int8 modules alone.
"""

import copy
import io
import pickle
from typing import NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import blocksparse as bs
from blocksparse.nn.layout_module import LayoutModule

pytestmark = pytest.mark.usefixtures("any_backend")


class Case(NamedTuple):
    """A kind of module, the positional arguments of its constructor, and the shapes of the inputs of a call."""

    kind: type
    sizes: tuple
    inputs: tuple
    options: dict = {}  # noqa: RUF012
    batch_axis: int = 0
    block_size: int = 8

    def make(self, density=0.5, **options):
        return self.kind(*self.sizes, density=density, block_size=self.block_size, **self.options, **options)

    def draw(self, batch=None, dtype=torch.float32):
        """Inputs of a call; experts get tokens, their experts and weights."""
        shapes = [list(shape) for shape in self.inputs]
        for shape in shapes if batch is not None else ():
            shape[self.batch_axis] = batch
        x = [torch.randn(shape, dtype=dtype) for shape in shapes]
        if self.kind is bs.nn.Experts:
            x[1] = torch.randint(self.sizes[0] + 1, shapes[1])
        return tuple(x * 3 if self.kind is bs.nn.MultiheadAttention else x)


SEQUENCES, IMAGES = ((5, 3, 12),), ((2, 13, 7, 6),)
FLOAT = {
    "Linear": Case(bs.nn.Linear, (48, 64), ((5, 48),)),
    "Linear, padded": Case(bs.nn.Linear, (47, 33), ((5, 47),), {"activation": "gelu"}),
    "Conv1d": Case(bs.nn.Conv1d, (16, 24, 5), ((2, 16, 9),), {"padding": "same"}),
    "Conv2d, padded": Case(bs.nn.Conv2d, (13, 21, 3), IMAGES, {"padding": 1, "padding_mode": "reflect"}),
    "Conv3d": Case(bs.nn.Conv3d, (16, 24, 2), ((2, 16, 3, 4, 3),), {"stride": 2, "padding": 1}),
    "ConvTranspose1d": Case(bs.nn.ConvTranspose1d, (16, 24, 3), ((2, 16, 5),)),
    "ConvTranspose2d": Case(bs.nn.ConvTranspose2d, (13, 21, 3), IMAGES, {"stride": 2}),
    "ConvTranspose3d": Case(bs.nn.ConvTranspose3d, (16, 24, 2), ((2, 16, 3, 3, 3),)),
    "LSTM": Case(bs.nn.LSTM, (12, 20), SEQUENCES, {"num_layers": 2, "bidirectional": True}, batch_axis=1),
    "LSTM, projected": Case(bs.nn.LSTM, (12, 20), SEQUENCES, {"proj_size": 11}, batch_axis=1),
    "GRU": Case(bs.nn.GRU, (12, 20), SEQUENCES, batch_axis=1),
    "RNN": Case(bs.nn.RNN, (12, 20), SEQUENCES, batch_axis=1),
    "MultiplicativeLSTM": Case(bs.nn.MultiplicativeLSTM, (12, 20), SEQUENCES, batch_axis=1),
    "SmallWorldLSTM": Case(bs.nn.SmallWorldLSTM, (12, 24), SEQUENCES, {"depth": 2}, batch_axis=1),
    "LSTMCell": Case(bs.nn.LSTMCell, (12, 20), ((3, 12),)),
    "GRUCell": Case(bs.nn.GRUCell, (12, 20), ((3, 12),)),
    "RNNCell": Case(bs.nn.RNNCell, (12, 20), ((3, 12),)),
    "MultiheadAttention": Case(bs.nn.MultiheadAttention, (12, 2), ((5, 2, 12),), batch_axis=1),
    "Experts": Case(bs.nn.Experts, (3, 12, 20), ((7, 12), (7, 2), (7, 2))),
    "GatedMLP": Case(bs.nn.GatedMLP, (30, 44), ((5, 30),), {"bias": True}),
}  # fmt: skip
INT8 = {name: FLOAT[name] for name in ("Linear, padded", "Conv1d", "Conv2d, padded", "Conv3d", "LSTM", "GatedMLP")}
RECURRENT = ["LSTM", "GRU", "RNN", "MultiplicativeLSTM", "SmallWorldLSTM"]

floats = pytest.mark.parametrize("case", FLOAT.values(), ids=FLOAT)
int8s = pytest.mark.parametrize("case", INT8.values(), ids=INT8)
every = pytest.mark.parametrize(
    ("case", "change"),
    [(case, lambda module: module) for case in FLOAT.values()] + [(case, bs.quantize) for case in INT8.values()],
    ids=[*FLOAT, *(f"{name} in int8" for name in INT8)],
)


def outputs(module, x):
    return [each for each in tree_leaves(module(*x)) if isinstance(each, Tensor)]


def close(found, expected, bound):
    """Compare outputs by their relative errors."""
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


def layouts_of(module):
    return [each.layout for each in module.modules() if isinstance(each, LayoutModule)]


def with_other_layouts(module, make):
    """Draw modules until one has other layouts."""
    return next(other for other in iter(make, None) if layouts_of(other) != layouts_of(module))


def through_a_file(state, how, path):
    if how == "safetensors":
        safetensors.torch.save_file(state, path)
        return safetensors.torch.load_file(path)
    if how == "torch":
        torch.save(state, path)
        return torch.load(path, weights_only=True)
    return state


# -- states and copies -----------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("how", ["memory", "torch", "safetensors"])
def test_a_state_dict_brings_its_layouts(case, change, how, tmp_path):
    source, x = change(case.make()), case.draw()
    target = with_other_layouts(source, lambda: change(case.make()))
    trained = [parameter for parameter in target.parameters() if parameter.requires_grad]
    if trained:
        outputs(target, x)[0].sum().backward()
    target.load_state_dict(through_a_file(source.state_dict(), how, tmp_path / "state"))
    assert layouts_of(target) == layouts_of(source)
    for new, old in zip(target.parameters(), source.parameters(), strict=True):
        assert new.grad is None or new.grad.shape == old.shape, "no gradient for the old layout"
    for a, b in zip(outputs(target, x), outputs(source, x), strict=True):
        assert torch.equal(a, b)
    if trained:
        target.zero_grad()
        outputs(target, x)[0].sum().backward()
        assert [p.grad is None for p in target.parameters()].count(False) > 0


@floats
def test_a_meta_module_takes_a_state_by_assignment(case):
    source, x = case.make(), case.draw()
    with torch.device("meta"):
        target = case.make()
    target.load_state_dict(source.state_dict(), assign=True)
    close(outputs(target, x), outputs(source, x), 1e-6)


@every
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_tensors_of_their_own(case, change, how):
    module, x = change(case.make()), case.draw()
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    expected = outputs(module, x)
    assert layouts_of(other) == layouts_of(module)
    for a, b in zip(outputs(other, x), expected, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            if tensor.is_floating_point():
                tensor.zero_()
    assert not torch.equal(outputs(other, x)[0], expected[0])
    assert torch.equal(outputs(module, x)[0], expected[0])


@every
def test_modules_made_and_copied_in_inference_mode(case, change):
    x = case.draw()
    with torch.inference_mode():
        module = change(case.make()).eval()
        other = copy.deepcopy(module)
        expected = outputs(module, x)
        close(outputs(other, x), expected, 1e-6)
    with torch.no_grad():
        close(outputs(other, x), expected, 1e-3)


# -- devices and dtypes ----------------------------------------------------------------------------------------------


@every
def test_meta_modules_compute_shapes(case, change):
    module, x = change(case.make()), case.draw()
    expected = [each.shape for each in outputs(module, x)]
    found = outputs(module.to("meta"), [each.to("meta") for each in x])
    assert [each.shape for each in found] == expected
    assert all(each.is_meta for each in found)
    if any(parameter.requires_grad for parameter in module.parameters()):
        found[0].sum().backward()
        assert all(p.grad.is_meta for p in module.parameters() if p.grad is not None)


@floats
def test_initialization_can_be_deferred(case):
    with torch.device("meta"):
        module = case.make()
    module.to_empty(device="cpu")
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    for each in module.modules():
        if isinstance(each, LayoutModule):
            assert torch.equal(each.crow_indices, each.layout.crow_indices())
            assert torch.equal(each.col_indices, each.layout.col_indices())
    x = case.draw()
    found = outputs(module, x)
    assert all(each.isfinite().all() for each in found)
    dense = bs.densify(module)
    if not isinstance(module, bs.nn.Experts):  # dense experts stay our own module
        close(found, outputs(dense, x), 1e-5)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_casts_change_floating_point_tensors_only(case, change, dtype):
    module, x = change(case.make()), case.draw()
    int8 = change is bs.quantize
    if int8 and dtype == torch.float64:
        pytest.skip("int8 layers refuse float64")
    module.to(dtype)
    for name, tensor in module.state_dict().items():
        if name.endswith("indices"):
            assert tensor.dtype == torch.int32
        elif int8 and name.endswith(("values", "scales")):
            assert tensor.dtype == (torch.int8 if name.endswith("values") else torch.float32)
        else:
            assert tensor.dtype == dtype
    x = [each.to(dtype) if each.is_floating_point() else each for each in x]
    found = outputs(module, x)
    assert all(each.dtype == dtype for each in found)
    wide = torch.float32 if int8 else torch.float64
    expected = outputs(
        copy.deepcopy(module).to(wide), [each.to(wide) if each.is_floating_point() else each for each in x]
    )
    close(found, expected, {torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype])


@floats
def test_parameters_are_made_in_a_dtype(case):
    assert {each.dtype for each in case.make(dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


@every
def test_autocast_computes_in_16_bits_and_gradients_have_the_dtype_of_parameters(case, change):
    module, x = change(case.make()).eval(), case.draw()
    with torch.no_grad():
        expected = outputs(module, x)
    if change is bs.quantize:  # these do not cast float32 inputs
        x = [each.bfloat16() for each in x]
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs(module, x)
    # Experts return the dtype of their input. Under autocast, PyTorch's reflection padding returns float32.
    if not isinstance(module, bs.nn.Experts | bs.nn.QuantizedConv2d):
        assert found[0].dtype == torch.bfloat16
    close(found[:1], expected[:1], 3e-2)
    if change is not bs.quantize:
        found[0].float().sum().backward()
        assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}


# -- inputs ----------------------------------------------------------------------------------------------------------


@every
def test_inputs_have_any_strides(case, change):
    module, x = change(case.make()), case.draw()
    expected = outputs(module, x)
    strided = [each.repeat_interleave(2, -1)[..., ::2] for each in x]
    reverse = [each.mT.contiguous().mT for each in x]
    for given in (strided, reverse):
        close(outputs(module, given), expected, 2e-6 if change is not bs.quantize else 1e-3)


@every
def test_a_batch_can_be_empty(case, change):
    for density in (0.5, None) if change is not bs.quantize else (0.5,):
        module = change(case.make(density))
        found, expected = outputs(module, case.draw(batch=0)), outputs(module, case.draw(batch=19))
        for a, b in zip(found, expected, strict=True):
            assert a.shape == tuple(0 if size == 19 else size for size in b.shape)
        if any(parameter.requires_grad for parameter in module.parameters()):
            found[0].sum().backward()
            assert all((p.grad == 0).all() for p in module.parameters() if p.grad is not None)
        with torch.no_grad():
            assert [each.shape for each in outputs(module, case.draw(batch=0))] == [each.shape for each in found]


# -- gradients and transforms ----------------------------------------------------------------------------------------


@floats
def test_gradients_of_first_and_second_order(case):
    module, x = case.make(dtype=torch.float64), case.draw(dtype=torch.float64)
    names = [name for name, _ in module.named_parameters()]
    count = sum(each.is_floating_point() for each in x)

    def run(*leaves):
        rest = iter(leaves[:count])
        inputs = [next(rest) if each.is_floating_point() else each for each in x]
        y = torch.func.functional_call(module, dict(zip(names, leaves[count:], strict=True)), tuple(inputs))
        return tree_leaves(y)[0]

    given = [each.requires_grad_() for each in x if each.is_floating_point()]
    leaves = [*given, *module.parameters()]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@floats
def test_transforms_checkpoints_and_batched_gradients(case):
    if case.kind is bs.nn.Experts:
        pytest.skip("the number of tokens per expert is data, which vmap has none of")
    module = case.make(dtype=torch.float64)
    x = [torch.randn(3, *each.shape, dtype=torch.float64) for each in case.draw()]
    first = lambda *x: outputs(module, x)[0]  # noqa: E731
    with torch.no_grad():
        close([torch.vmap(first)(*x)], [torch.stack([first(*each) for each in zip(*x, strict=True)])], 1e-6)
    one = [each[0].clone().requires_grad_() for each in x]
    y = first(*one)
    upstream = torch.randn_like(y)
    expected = torch.autograd.grad(y, one[0], upstream, retain_graph=True)[0]
    loss = lambda first_input: (first(first_input, *one[1:]) * upstream).sum()  # noqa: E731
    close([torch.func.grad(loss)(one[0])], [expected], 1e-6)
    close(torch.autograd.grad(checkpoint(loss, one[0], use_reentrant=False), one[0]), [expected], 1e-6)
    twice = torch.stack([upstream, 2 * upstream])
    close(torch.autograd.grad(y, one[0], twice, is_grads_batched=True), [torch.stack([expected, 2 * expected])], 1e-6)


@int8s
def test_int8_modules_refuse_states_that_miss_something_and_stay_as_they_are(case):
    small = bs.quantize(case.make())
    before = {name: tensor.clone() for name, tensor in small.state_dict().items() if "bias" not in name}
    other = with_other_layouts(small, lambda: bs.quantize(case.make()))
    state = other.state_dict()
    missing = {"values": "values", "scales": "scales", ("values", "scales"): "values|scales"}
    missing |= dict.fromkeys(
        ("crow_indices", "col_indices", "indices"), "layout: expected crow_indices and col_indices"
    )
    for strict in (True, False):
        for names, message in missing.items():
            rest = {name: tensor for name, tensor in state.items() if not name.endswith(names)}
            with pytest.raises(RuntimeError, match=message):
                small.load_state_dict(rest, strict=strict)
        for changed in ("values", "scales", "crow_indices"):
            wrong = {name: tensor[1:] if name.endswith(changed) else tensor for name, tensor in state.items()}
            with pytest.raises(RuntimeError, match=changed):
                small.load_state_dict(wrong, strict=strict)
            wrong = {name: "x" if name.endswith(changed) else tensor for name, tensor in state.items()}
            with pytest.raises(RuntimeError, match=f"{changed}: expected a dense tensor, got str"):
                small.load_state_dict(wrong, strict=strict)
        with pytest.raises(RuntimeError, match=r"of blocksparse\.quantize"):
            small.load_state_dict(case.make().state_dict(), strict=strict)
        assert all(torch.equal(small.state_dict()[name], tensor) for name, tensor in before.items())
    with pytest.raises(RuntimeError, match="values: expected real numbers, not those of an int8 layer"):
        case.make().load_state_dict(state, strict=False)


@pytest.mark.parametrize("name", RECURRENT)
def test_dropout_between_layers_acts_in_training_only(name):
    case = FLOAT[name]
    module, x = case.make(dropout=0.9, **({} if "num_layers" in case.options else {"num_layers": 2})), case.draw()
    assert not torch.equal(outputs(module, x)[0], outputs(module, x)[0])
    module.eval()
    assert torch.equal(outputs(module, x)[0], outputs(module, x)[0])


@floats
def test_training_lowers_a_loss(case):
    module, x = case.make(), case.draw()
    target = torch.randn_like(outputs(module, x)[0])
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = nn.functional.mse_loss(outputs(module, x)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
