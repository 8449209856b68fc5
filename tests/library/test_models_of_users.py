"""Models as people write them: hooks, routing by the data, weights that a hook computes, layers of other libraries."""

from __future__ import annotations

import importlib.util
import types
import weakref
from collections import UserDict, UserList
from functools import partial
from types import MappingProxyType

import pytest
import torch
from torch import nn

import blocksparse as bs
from loops import update
from processes import run_script


class Routed(nn.Module):
    """Sends each row to one of several experts, as most mixtures written by hand do."""

    def __init__(self):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(32, 32), nn.Linear(32, 3), nn.Linear(32, 16)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for nth, expert in enumerate(self.experts):
            rows = (chosen == nth).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return self.last(x + y)


def test_a_model_that_routes_by_its_data():
    model, data = Routed().eval(), [torch.randn(40, 32) for _ in range(3)]
    sparse = bs.sparsify(model, 0.5, block_size=8, force=True, data=data, skip="router")
    assert all(isinstance(expert, bs.nn.Linear) for expert in sparse.experts)
    assert sparse(data[0]).isfinite().all()


@pytest.mark.parametrize("inplace", [True, False])
def test_backward_hooks_move_along(inplace):
    seen = []
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].register_full_backward_hook(lambda *_: seen.append(1))
    sparse = bs.sparsify(model, 0.5, block_size=8, force=True, inplace=inplace)
    sparse(torch.randn(2, 32)).sum().backward()
    assert seen == [1]


# -- what a user put on a layer -----------------------------------------------------------------------------------


def own_forward(layer):
    layer.forward = types.MethodType(lambda self, x: 3 * nn.functional.linear(x, self.weight), layer)


def accelerate_hook(layer):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(layer, hooks.ModelHook())


def own_compile(layer):
    layer.compile()


OWN_CALLS = {
    own_forward: "its forward was set on the instance",
    accelerate_hook: "accelerate has hooked it: accelerate.hooks.remove_hook_from_module",
    own_compile: r"its own compile\(\) was called",
}


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("change", OWN_CALLS)
def test_a_layer_that_calls_something_else_stays_dense_and_is_named(change, inplace):
    model, x = nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 24)), torch.randn(3, 48)
    change(model[0])
    expected = model(x) if change is not own_compile else None
    with pytest.raises(bs.BlockSparseError, match=f"density: 0.weight cannot be block-sparse: {OWN_CALLS[change]}"):
        bs.sparsify(model, {"0.weight": 0.5}, 8, inplace=inplace)
    with pytest.warns(bs.SparsityWarning, match=f"stay as they are\n  0.weight: {OWN_CALLS[change]}"):
        sparse = bs.sparsify(model, 1, 8, force=True, inplace=inplace)
    assert type(sparse[0]) is nn.Linear
    assert isinstance(sparse[1], bs.nn.Linear)
    if expected is not None:
        torch.testing.assert_close(sparse(x), expected)


def test_the_error_for_an_offloaded_model_names_the_remedy():
    model = pytest.importorskip("accelerate").cpu_offload(nn.Sequential(nn.Linear(48, 40)), torch.device("cpu"))
    with pytest.raises(bs.BlockSparseError, match=r"0.weight on the meta device; accelerate .*remove_hook_from_module"):
        bs.sparsify(model, 0.5, 8, force=True)


@pytest.mark.parametrize("function", [bs.densify, bs.quantize])
def test_a_block_sparse_layer_with_a_forward_of_its_own_is_refused_by_name(function):
    model = nn.Sequential(bs.nn.Linear(48, 40, density=0.5, block_size=8))
    own_forward(model[0])
    layer = model[0]
    with pytest.raises(bs.BlockSparseError, match=r"^0 cannot be replaced: its forward was set on the instance"):
        function(model, inplace=True)
    assert model[0] is layer


def tagged(layer, seen, weight):
    """A layer with all that a user may put on it."""
    layer.tag, layer.adapter = "mine", nn.Linear(5, 5)
    layer.register_buffer("scale", torch.tensor(3.0))
    layer.register_buffer("cache", torch.zeros(2), persistent=False)
    layer.gain = nn.Parameter(torch.ones(3))
    layer.register_forward_hook(lambda module, inputs, output: seen.append("forward") or output * module.scale)
    layer.register_full_backward_pre_hook(lambda *_: seen.append("backward"))
    layer.register_state_dict_pre_hook(lambda *_: seen.append("before saving"))
    layer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    layer.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    layer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    parameter = getattr(layer, weight)
    parameter.no_decay = True
    parameter.register_hook(lambda grad: seen.append(list(grad.shape)))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p))


def check_tagged(layer, weight, seen, shape, x):
    assert (layer.tag, type(layer.adapter).__name__, float(layer.scale), len(layer.gain)) == ("mine", "Linear", 3, 3)
    seen.clear()
    layer(x.clone().requires_grad_()).sum().backward()
    state = layer.state_dict()
    layer.load_state_dict(state)
    assert getattr(layer, weight).no_decay
    assert {"scale", "gain"} < state.keys()
    assert "cache" not in state
    assert seen[:3] == ["forward", "backward", shape]
    assert seen[3] is getattr(layer, weight)
    assert seen[4:6] == ["before saving", "saved"]
    assert layer in seen[6:]
    assert "loaded" in seen
    seen.clear()  # or the hooks would refer to the layer


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Linear(50, 42), torch.randn(3, 50)),
        (lambda: nn.Conv2d(20, 12, 3), torch.randn(2, 20, 5, 5)),
        (lambda: nn.ConvTranspose1d(20, 12, 3), torch.randn(2, 20, 5)),
    ],
    ids=["linear", "conv2d", "conv_transpose1d"],
)
def test_additions_of_users_move_along_there_and_back(make, x, inplace):
    seen, model = [], nn.Sequential(make())
    shape = list(model[0].weight.shape)
    tagged(model[0], seen, "weight")
    sparse = bs.sparsify(model, {"0.weight": 0.5}, 8, force=True, inplace=inplace)
    assert isinstance(sparse[0], bs.nn.module.BlockSparseModule)
    check_tagged(sparse[0], "values", seen, shape, x)
    dense = bs.densify(sparse, inplace=inplace)
    assert type(dense[0]) is type(make())
    check_tagged(dense[0], "weight", seen, shape, x)


def test_a_mask_of_the_gradient_masks_the_same_weights_and_can_be_removed():
    model, mask = nn.Sequential(nn.Linear(30, 20)), torch.rand(20, 30) > 0.5
    handle = model[0].weight.register_hook(lambda grad: grad * mask)
    sparse = bs.sparsify(model, 0.5, 8, force=True, inplace=True)
    sparse(torch.randn(7, 30)).sum().backward()
    assert not sparse[0].dense_of(sparse[0].values.grad)[~mask].any()
    handle.remove()
    sparse(torch.randn(7, 30)).sum().backward()
    assert sparse[0].dense_of(sparse[0].values.grad)[~mask].any()


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNNCell, nn.MultiheadAttention])
def test_additions_to_a_layer_of_several_weights_move_along(make):
    layer = make(*((20, 30) if make is not nn.MultiheadAttention else (48, 4)))
    layer.tag, layer.gain, layer.adapter = "mine", nn.Parameter(torch.ones(3)), nn.Identity()
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.mark = name
    sparse = bs.sparsify(nn.ModuleList([layer]), 0.5, 16, force=True)
    dense = bs.densify(sparse)
    assert not isinstance(sparse[0], make)
    for made in (sparse[0], dense[0]):
        assert (made.tag, len(made.gain), type(made.adapter)) == ("mine", 3, nn.Identity)
        own = {n.removesuffix(".values"): p for n, p in made.named_parameters() if not n.startswith("out_proj")}
        assert {name: parameter.mark for name, parameter in own.items()} == {name: name for name in own}


@pytest.mark.parametrize(
    "make", [partial(bs.nn.Linear, 64, 32), partial(bs.nn.Conv2d, 32, 32, 3), partial(bs.nn.LSTM, 32, 32)]
)
def test_additions_of_users_move_along_into_8_bits(make):
    made = make(density=0.5, block_size=16)
    made.tag, made.adapter = "mine", nn.Identity()
    made.register_buffer("scale", torch.tensor(3.0))
    small = bs.quantize(nn.ModuleList([made]))[0]
    assert (small.tag, type(small.adapter), float(small.scale)) == ("mine", nn.Identity, 3)


@pytest.mark.parametrize(("name", "value"), [("activation", "relu"), ("layout", "NHWC"), ("used", 3)])
def test_an_attribute_with_a_name_of_ours_is_refused(name, value):
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    setattr(model[1], name, value)
    before = list(model.modules())
    with pytest.raises(bs.BlockSparseError, match=rf"^1\.{name} on a .* uses this name itself"):
        bs.sparsify(model, 0.5, 8, force=True, inplace=True)
    assert list(model.modules()) == before


def test_a_module_on_a_layer_with_an_activation_is_refused_by_name():
    model = nn.Sequential(bs.nn.Linear(40, 40, block_size=8, activation="relu"))
    model[0].adapter = nn.Identity()
    with pytest.raises(bs.BlockSparseError, match=r"^0\.adapter: a layer with an activation becomes nn.Sequential"):
        bs.densify(model)


def test_hooks_of_a_layer_with_an_activation_get_its_outputs():
    model, seen, x = nn.Sequential(bs.nn.Linear(40, 40, block_size=8, activation="relu")), [], torch.randn(5, 40)
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    expected = model(x)
    torch.testing.assert_close(bs.densify(model)(x), expected)
    torch.testing.assert_close(*seen)


# -- layers that a model also holds outside of its tree ------------------------------------------------------------


class Runner:
    def __init__(self, layer):
        self.layer = layer

    def run(self, x):
        return self.layer(x)


class Held(nn.Module):
    """Calls its first layer by another way than its name."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last = nn.Linear(40, 48), nn.Linear(48, 24)
        self.__dict__["held"] = WAYS[way](self.first)
        self.way = way

    def forward(self, x):
        held = self.held
        if self.way in ("list", "tuple", "nested", "user list", "class"):
            held = (held.layers if self.way == "class" else held)[0]
        if self.way == "nested":
            (held,) = held["x"]
        if self.way in ("set", "key", "weak set"):
            (held,) = held
        if self.way == "weak":
            held = held()
        if self.way in ("user dict", "read-only"):
            held = held["x"]
        return self.last(held(x))


WAYS = {
    "attribute": lambda layer: layer,
    "list": lambda layer: [layer],
    "tuple": lambda layer: (layer, 3),
    "set": lambda layer: {layer},
    "key": lambda layer: {layer: 3},
    "nested": lambda layer: [{"x": (layer,)}],
    "bound method": lambda layer: layer.forward,
    "partial": lambda layer: partial(layer),
    "object": lambda layer: Runner(layer).run,
    "weak": weakref.ref,
    "closure": lambda layer: lambda x: layer(x),
    "default": lambda layer: lambda x, layer=layer: layer(x),
    "module": lambda layer: nn.Sequential(layer),
    "user list": lambda layer: UserList([layer]),
    "user dict": lambda layer: UserDict(x=layer),
    "read-only": lambda layer: MappingProxyType({"x": layer}),
    "weak set": lambda layer: weakref.WeakSet([layer]),
    "class": lambda layer: type("Registry", (), {"layers": [layer], "__module__": __name__}),
}
CARRIED = "attribute", "list", "tuple", "set", "key", "nested"
SHARED = "weak", "closure", "default", "weak set", "class"


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_with_other_references(way):
    model, x = Held(way), torch.randn(3, 40)
    if way in SHARED:
        with pytest.raises(bs.BlockSparseError, match=r"inplace=True.*: held refers to a part of the model"):
            bs.sparsify(model, 0.5, 8, force=True)
    if way in CARRIED:
        copied = bs.sparsify(model, 0.5, 8, force=True)
        sparse = bs.sparsify(model, 0.5, 8, force=True, inplace=True)
        torch.testing.assert_close(copied(x), sparse(x))
        dense = bs.densify(sparse)
        torch.testing.assert_close(dense(x), sparse(x))
        assert isinstance(sparse.first, bs.nn.Linear)
    else:
        with pytest.raises(bs.BlockSparseError, match=r"density: first.weight cannot be .*: held refers to it too"):
            bs.sparsify(model, {"first.weight": 0.5}, 8, force=True, inplace=True)
        with pytest.warns(bs.SparsityWarning, match=r"first.weight: held refers to it too"):
            sparse = bs.sparsify(model, 0.5, 8, force=True, inplace=True)
        assert type(sparse.first) is nn.Linear
    sparse(x).sum().backward()
    assert all(parameter.grad is not None for parameter in sparse.parameters())


@pytest.mark.parametrize("way", [way for way in WAYS if way not in CARRIED])
@pytest.mark.parametrize("function", [bs.densify, bs.quantize])
def test_a_block_sparse_layer_with_other_references(function, way):
    model = Held(way)
    model.first = bs.nn.Linear(40, 48, density=0.5, block_size=8)
    model.__dict__["held"] = WAYS[way](model.first)
    with pytest.raises(bs.BlockSparseError, match=r"^first cannot be replaced: held refers to it too"):
        function(model, inplace=True)
    assert isinstance(model.first, bs.nn.Linear)


def test_a_hook_that_refers_to_another_layer_or_a_weight_keeps_that_dense():
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    other, weights = model[0], {model[1].weight: 3}
    model[2].register_forward_hook(lambda module, inputs, output: output + other(inputs[0]))
    model[1].weight.register_post_accumulate_grad_hook(lambda p: weights.pop(p) and None)
    with pytest.warns(bs.SparsityWarning, match=r"0.weight: a hook of 2 .*\n  1.weight: a hook of 1 "):
        sparse = bs.sparsify(model, 0.5, 8, force=True, inplace=True)
    assert [type(layer) for layer in sparse] == [nn.Linear, nn.Linear, bs.nn.Linear]
    sparse(torch.randn(3, 40)).sum().backward()


def test_a_model_that_was_compiled_in_place_is_copied_as_before():
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU())
    model.compile()
    assert isinstance(bs.sparsify(model, 0.5, 8, force=True)[0], bs.nn.Linear)


# -- dense without a word ------------------------------------------------------------------------------------------


class Plain(nn.Linear):
    """A subclass without a forward of its own."""


def test_plain_subclasses_and_layers_of_another_density_are_named():
    sparse = bs.nn.Linear(64, 48, density=0.75, block_size=8)
    model = nn.Sequential(nn.Linear(48, 64), sparse, Plain(48, 40), nn.LazyLinear(8))
    with pytest.warns(bs.SparsityWarning) as caught:
        bs.sparsify(model, 0.25, 8, force=True)
    (message,) = [str(each.message) for each in caught]
    assert "2.weight: Plain is a subclass of Linear" in message
    assert "3.weight: not initialized yet" in message
    assert "1.weight: block-sparse already, with density 0.75" in message
    quiet = bs.sparsify(model, 0.25, 8, force=True, skip=["1", "2", "3"])
    assert isinstance(quiet[0], bs.nn.Linear)


# -- dense again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
def test_the_optimizer_follows_densify(make):
    model = nn.Sequential(
        bs.nn.Linear(40, 48, density=0.5, block_size=8, activation="relu"),
        nn.Unflatten(1, (48, 1)),
        bs.nn.Conv1d(48, 20, 1, density=0.5, block_size=8),
        nn.Flatten(),
        bs.nn.LSTM(20, 18, density=0.5, block_size=8),
    )
    optimizer, x = make(model.parameters()), torch.randn(5, 40)

    update(optimizer, model(x)[0].square().sum())
    state = {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    layer = model[0]
    dense = bs.densify(model, inplace=True, optimizer=optimizer)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in dense.parameters()}
    for key, value in state["0.values"].items():
        now = optimizer.state[dense[0][0].weight][key]
        torch.testing.assert_close(now, layer.dense_of(value) if value.dim() else value)
    before = [parameter.clone() for parameter in dense.parameters()]
    update(optimizer, dense(x)[0].square().sum())
    assert all(not torch.equal(a, b) for a, b in zip(before, dense.parameters(), strict=True))


def test_weights_that_are_tied_stay_tied():
    first = bs.nn.Linear(40, 40, density=0.5, block_size=8)
    second = bs.nn.Linear(40, 40, layout=first.layout)
    second.values = first.values
    model = nn.Sequential(first, second)
    optimizer = torch.optim.Adam(model.parameters())
    dense = bs.densify(model, inplace=True, optimizer=optimizer)
    assert dense[0].weight is dense[1].weight
    assert len(optimizer.param_groups[0]["params"]) == 3
    lstms = [bs.nn.LSTM(16, 16, layouts={"weight_hh_l0": bs.patterns.dense((64, 16), 8)}) for _ in range(2)]
    lstms[1].weight_hh_l0.values = lstms[0].weight_hh_l0.values
    first, second = bs.densify(nn.ModuleList(lstms))
    assert first.weight_hh_l0 is second.weight_hh_l0


def test_a_stored_weight_of_its_own_unties_an_output_layer_and_is_refused_elsewhere():
    def tied(first):
        model = nn.Sequential(first, nn.Linear(16, 40, bias=False), nn.Linear(40, 16))
        model[1].weight = model[0].weight
        return model

    model = tied(nn.Embedding(40, 16))
    model[1].weight = nn.Parameter(torch.randn(40, 16))
    ids = torch.arange(5)
    loaded = bs.load_sparsified(tied(nn.Embedding(40, 16)), model.state_dict())
    assert torch.equal(loaded(ids), model(ids))
    loaded = bs.load_sparsified(loaded, tied(nn.Embedding(40, 16)).state_dict())
    assert torch.equal(loaded[0].weight, loaded[1].weight)
    model, state = tied(nn.Linear(16, 40)), tied(nn.Linear(16, 40)).state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state["1.weight"] = state["1.weight"] + 1
    with pytest.raises(bs.BlockSparseError, match=r"0.weight: expected the weight that .* 1.weight, got 1.weight with"):
        bs.load_sparsified(model, state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- from sparse to sparser ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [True, False])
def test_a_block_sparse_model_becomes_sparser_with_its_best_blocks(inplace):
    model = nn.Sequential(nn.Linear(56, 72), nn.ReLU(), nn.Linear(72, 40))
    sparse = bs.sparsify(model, 0.5, 8, force=True)
    optimizer = torch.optim.Adam(sparse.parameters()) if inplace else None
    if optimizer is not None:
        sparse(torch.randn(3, 56)).sum().backward()
        optimizer.step()
    squares = {at: sparse[at].values.square().sum((1, 2)) for at in (0, 2)}
    values = {at: sparse[at].values.detach().clone() for at in (0, 2)}
    sparser = bs.sparsify(sparse, 0.2, criterion="l2", scope="layer", force=True, inplace=inplace, optimizer=optimizer)
    assert (sparser is sparse) == inplace
    for at, square in squares.items():
        layer = sparser[at]
        assert abs(layer.layout.density - 0.2) <= 0.5 / layer.layout.mask().numel()
        best = square.topk(layer.layout.nnz).indices.sort().values
        torch.testing.assert_close(layer.values, values[at][best])
        if optimizer is not None:
            assert optimizer.state[layer.values]["exp_avg"].shape == layer.values.shape
            assert any(layer.values is parameter for parameter in optimizer.param_groups[0]["params"])


def test_blocks_that_a_trained_weight_needs_are_dropped_only_by_force():
    sparse = nn.Sequential(bs.nn.Linear(64, 64, density=0.5, block_size=8))
    sparse[0].values.data.abs_()  # no longer like random numbers
    with pytest.raises(bs.BlockSparseError, match=r"\(force=True .*got 0.25 for 0.weight 0.5\n  0.weight: it needs "):
        bs.sparsify(sparse, 0.25)
    assert bs.sparsify(sparse, 0.25, force=True)[0].layout.density == 0.25


def test_a_weight_that_stores_too_few_blocks_for_its_share_is_named():
    sizes = {"0.weight": 0.5, "1.weight": 0.25}
    sparse = bs.sparsify(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 32)), sizes, 8, force=True)
    with pytest.warns(bs.SparsityWarning, match=r"the density is 0\.23, not 0\.3\n  1\.weight: stores no more blocks"):
        bs.sparsify(sparse, 0.3, scope="erk", force=True)
    with pytest.raises(
        bs.BlockSparseError, match=r"density of 1\.weight: expected 0\.25 at most, as it has now \(.*\), got 0\.9"
    ):
        bs.sparsify(sparse, {"0.weight": 0.25, "1.weight": 0.9}, force=True)


@pytest.mark.parametrize("scope", ["careful", "global"])
def test_blocks_that_are_not_stored_take_no_share_of_the_density(scope):
    sparse = nn.Sequential(
        bs.nn.Linear(256, 256, density=0.05, block_size=8), bs.nn.Linear(256, 256, density=0.95, block_size=8)
    )
    sparser = bs.sparsify(sparse, 0.4, scope=scope, force=True)
    assert sum(layer.layout.nnz for layer in sparser) == pytest.approx(0.4 * 2 * 32**2, abs=1)


def test_skip_may_be_an_iterator():
    sparse = bs.sparsify(nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64))), 0.5, 8, force=True)
    sparser = bs.sparsify(sparse, 0.25, force=True, skip=sparse[1].modules())
    assert (sparser[0].layout.density, sparser[1][0].layout.density) == (0.25, 0.5)
    dense = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    made = bs.sparsify(dense, 0.25, 8, force=True, skip=iter([dense[2]]), data=torch.randn(40, 64).split(10))
    assert type(made[2]) is nn.Linear


def test_a_sparser_model_is_not_told_to_calibrate():
    sparse = bs.sparsify(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), 0.5, 8, force=True, scope="layer")
    with torch.no_grad():
        sparse[0].values.abs_()  # no longer like random numbers
        sparse[1].values[1:] *= 1e-3
    with pytest.warns(
        bs.SparsityWarning, match=r"(?s)the density is .*to go lower, pass force=True and fine-tune"
    ) as warned:
        bs.sparsify(sparse, 0.1)
    assert "data=" not in str(warned[0].message)


def test_weights_of_a_layer_become_sparser_by_name():
    sparse = bs.sparsify(nn.ModuleList([nn.LSTM(24, 24)]), 0.5, 8, force=True, scope="layer")
    sparser = bs.sparsify(sparse, {"0.weight_hh_l0": 0.25}, force=True)[0]
    assert (sparser.weight_ih_l0.layout.density, sparser.weight_hh_l0.layout.density) == (0.5, 0.25)


def test_densify_returns_the_conv1d_of_transformers():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(64, 64))
    sparse = bs.sparsify(model, 0.5, block_size=8, force=True)
    dense = bs.densify(sparse)
    assert type(dense[0]) is conv1d
    x = torch.randn(3, 64)
    torch.testing.assert_close(dense(x), sparse(x))
    model.load_state_dict(dense.state_dict())
    torch.testing.assert_close(model(x), sparse(x))


def printed(code, folder):
    (folder / "program.py").write_text(code)
    return run_script(1, folder / "program.py", folder=folder).split()


def test_find_spec_does_not_stop_import_hooks(tmp_path):
    code = """
import importlib.util, sys, torch, blocksparse as bs
assert "torch.utils.flop_counter" not in sys.modules
assert importlib.util.find_spec("torch.utils.flop_counter")
from torch.utils.flop_counter import FlopCounterMode
layer = bs.nn.Linear(32, 32, block_size=8)
with FlopCounterMode(display=False) as counter:
    layer(torch.randn(5, 32))
print(counter.get_total_flops())
"""
    assert printed(code, tmp_path) == [str(2 * 5 * 32 * 32)]


@pytest.mark.full
def test_find_spec_does_not_stop_the_import_hook_for_transformers(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    code = """
import importlib.util, blocksparse
assert importlib.util.find_spec("transformers.modeling_utils")
import transformers.modeling_utils
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
print("blocksparse" in AUTO_QUANTIZER_MAPPING)
"""
    assert printed(code, tmp_path) == ["True"]
