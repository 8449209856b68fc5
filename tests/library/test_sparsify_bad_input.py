"""Models and arguments that sparsify, densify and report refuse: the message, and that nothing is changed."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, spectral_norm

import blocksparse as bs
from blocksparse.nn.module import BlockSparseModule
from blocksparse.sparsity.calibration import fitting
from sparsified import assert_refused, layouts_of, mlp

pytestmark = pytest.mark.usefixtures("any_backend")


@pytest.fixture
def data():
    torch.manual_seed(0)
    return [torch.randn(50, 32)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, "density: expected a number above 0 and at most 1, got 0"),
        ({"density": 1.5}, "density: expected a number above 0 and at most 1, got 1.5"),
        ({"density": True}, "density: expected a number above 0 and at most 1, got True"),
        ({"density": 0.01}, r"density: expected 0\.\d+ or more, that leaves each weight a block, got 0.01"),
        ({"density": {"0.weight": 0.01}}, "density: expected .* that leaves 0.weight one of its 16 blocks"),
        ({"density": {"1.weight": 0.5}}, "density: expected names out of 0.weight, 2.weight, got '1.weight'"),
        ({"density": {0: 0.5}}, "density: expected names out of 0.weight, 2.weight, got 0"),
        ({"density": 0.01, "scope": "erk"}, "density: expected enough for one block of a layer"),
        ({"block_size": 0}, "block_size: expected a positive int"),
        (
            {"criterion": "l1"},
            "criterion: expected one of l2, magnitude, max, lamp, scores by name or a function, got 'l1'",
        ),
        ({"criterion": 3}, "criterion: expected .*, got 3"),
        ({"criterion": {"0.weight": torch.ones(4, 4)}}, "criterion: expected scores of 2.weight"),
        ({"criterion": lambda name, matrix: matrix}, r"the scores of 0.weight: expected finite numbers, \[4, 4\], got"),
        ({"criterion": lambda name, matrix: 1}, r"the scores of 0.weight: expected .*, got int"),
        ({"scope": "model"}, "scope: expected one of careful, global, layer, erk, got 'model'"),
        ({"skip": "9"}, "skip: expected modules of the model, or names or patterns of .*, got '9'"),
        ({"skip": ["0", "2"]}, "model: expected dense weights that can .* 0.weight: skipped; 2.weight: skipped"),
        ({"layouts": {"9": None}}, "layouts: expected names out of 0.weight, 2.weight, got '9'"),
        ({"layouts": {"0.weight": None}}, "layout: expected a BlockLayout, got NoneType"),
        ({"layouts": {}}, "layouts: expected names out of 0.weight, 2.weight, got none"),
        ({"tokens": 0}, "tokens: expected an int, 1 or more and below 1048577, got 0"),
        ({"tokens": 2**70}, "tokens: expected an int, 1 or more and below 1048577, got 1180591620717411303424"),
        ({"criterion": {}}, r"criterion: expected scores of 0.weight, got those of \[\]"),
        ({"criterion": ""}, "criterion: expected one of l2, .*, got ''"),
        ({"criterion": {}, "data": [torch.zeros(4, 64)]}, "criterion: expected scores of 0.weight"),
        ({"skip": None}, "skip: expected modules of the model, or names or patterns of .*, got None"),
        ({"skip": 5}, "skip: expected modules of the model, or names or patterns of .*, got 5"),
        ({"skip": [["0"]]}, r"skip: expected modules of the model, or names or patterns of .*, got \['0'\]"),
        ({"layouts": 5}, "layouts: expected BlockLayouts by name of the weight, got int"),
        ({"layouts": ["0.weight"]}, "layouts: expected BlockLayouts by name of the weight, got list"),
        ({"data": [torch.zeros(0, 64)]}, "data: expected a sample or more, got only empty batches"),
        (
            {"data": [torch.zeros(0, 64)], "density": {"0.weight": 0.5}},
            "data: expected a sample or more, got only empty batches",
        ),
        ({"block_size": (2**62, 2)}, r"block_size: expected fewer than 2\^63 elements, .* got \(4611"),
        (
            {"block_size": (2**31, 2)},
            "model: .* 0.weight: blocks of 2147483648 x 2 would pad its 4096 parameters to 137438953472;",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_argument_changes_nothing(options, message):
    model = mlp(64, 64, 32)
    options = {
        "block_size": 16,
        "density": 0.5,
        "inplace": True,
        "optimizer": torch.optim.Adam(model.parameters()),
    } | options
    assert_refused(message, bs.sparsify, model, **options)


class OfAUser(bs.nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def inference_model():
    with torch.inference_mode():
        return mlp(32, 64, 32)


def tied(shared="values"):
    layouts = [bs.BlockLayout(mask, 8) for mask in ([[1, 0], [0, 1]], [[0, 1], [1, 0]])]
    model = nn.Sequential(*(bs.nn.Linear(16, 16, layout=layout) for layout in layouts))
    if shared == "own":
        model[1] = nn.Linear(16, 16)
    setattr(model[1], shared, model[0].values)
    return model


def half():
    return nn.Sequential(bs.nn.Linear(32, 32, density=0.5, block_size=8))


def twice_the_same():
    model = nn.Sequential(*half(), *half())
    model[1].set_layout(model[0].layout, model[1].values.detach())
    model[1].values = model[0].values
    return model


OTHER = torch.optim.SGD([torch.zeros(3, requires_grad=True)])
IN_PLACE = {"force": True, "inplace": True}
SCRIPTED = "RecursiveScriptModule has no block-sparse counterpart"
REFUSALS = {
    "meta": (lambda: nn.Linear(4, 4, device="meta"), bs.sparsify, {}, "on the meta device"),
    "meta, densify": (lambda: nn.Linear(4, 4, device="meta"), bs.densify, {}, "on the meta device"),
    "no weight": (nn.ReLU, bs.sparsify, {}, r"model: expected dense weights .*, got ReLU with none"),
    "scripted": (lambda: torch.jit.script(mlp(32, 32)), bs.sparsify, {}, f"0.weight: {SCRIPTED}"),
    "inference": (
        inference_model,
        bs.sparsify,
        IN_PLACE | {"data": [torch.randn(50, 32)]},
        r"got 0\.weight, made under torch\.inference_mode\(\)",
    ),
    "copy with optimizer": (lambda: mlp(32, 32), bs.sparsify, {"optimizer": OTHER}, "optimizer= requires inplace=True"),
    "copy with optimizer, densify": (half, bs.densify, {"optimizer": OTHER}, "optimizer= requires inplace=True"),
    "other optimizer, densify": (
        half,
        bs.densify,
        {"inplace": True, "optimizer": OTHER},
        "optimizer: expected an optimizer with parameters of the model",
    ),
    "other optimizer, sparser": (
        half,
        bs.sparsify,
        IN_PLACE | {"density": 0.25, "optimizer": OTHER},
        "optimizer: expected an optimizer with parameters of the model",
    ),
    "no sparser": (
        half,
        bs.sparsify,
        IN_PLACE | {"density": 0.5},
        r"blocksparse.densify\(model\) makes them dense again.*got 0.5 for 0.weight 0.5",
    ),
    "data, sparser": (
        half,
        bs.sparsify,
        IN_PLACE | {"density": 0.25, "data": [torch.randn(3, 32)]},
        r"data= applies to dense weights.*blocksparse.densify\(model\) first",
    ),
    "layouts, sparser": (
        half,
        bs.sparsify,
        IN_PLACE | {"layouts": {"0.weight": bs.patterns.dense((32, 32), 8)}},
        r"layouts= applies to dense weights.*blocksparse.densify\(model\) first",
    ),
    "tied, sparser": (
        twice_the_same,
        bs.sparsify,
        IN_PLACE | {"density": 0.25},
        "1.weight: expected values of its own .*, got those of 0.weight",
    ),
    "tied, densify": (tied, bs.densify, {"inplace": True}, "1.values is tied to 0.values, but their layouts"),
    "tied to a dense layer": (lambda: tied("own"), bs.densify, {"inplace": True}, "1.own is tied to 0.values"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_model_is_not_changed(case):
    make, function, options, message = REFUSALS[case]
    assert_refused(message, function, make(), **options)


def test_a_model_that_was_not_initialized_has_no_report():
    model = nn.Sequential(bs.nn.Linear(64, 64, density=0.5), nn.LazyLinear(8))
    with pytest.raises(bs.BlockSparseError, match=r"call the model once first.*got 1\.weight without"):
        bs.report(model)


@pytest.mark.parametrize("function", [bs.sparsify, bs.densify, bs.report])
def test_a_model_must_be_a_module(function):
    with pytest.raises(bs.BlockSparseError, match=r"model: expected a torch.nn.Module, got int"):
        function(3)


# -- in place -----------------------------------------------------------------------------------------------------


def test_inference_tensors_can_be_copied_or_changed_in_inference_mode(data):
    model = inference_model()
    assert layouts_of(bs.sparsify(model, 0.5, 8, force=True, data=data))
    with torch.inference_mode():
        assert layouts_of(bs.sparsify(model, 0.5, 8, force=True, data=data, inplace=True))


def test_a_tensor_that_cannot_be_written_leaves_the_model_as_it_was(data):
    model = mlp(32, 64, 64, 32)
    model[2].bias = nn.Parameter(torch.zeros(1).expand(64))  # all of its elements share memory
    options = IN_PLACE | {"data": data, "optimizer": torch.optim.Adam(model.parameters())}
    assert_refused("single memory location", bs.sparsify, model, 0.5, 8, error=RuntimeError, **options)


@pytest.mark.parametrize("with_data", [False, True])
def test_a_module_that_refuses_a_replacement_leaves_the_model_as_it_was(with_data, data):
    class Frozen(nn.Sequential):
        def __setattr__(self, name, value):
            if isinstance(value, BlockSparseModule) and self is model[1]:  # not its copy, which is fitted
                raise RuntimeError("frozen")
            super().__setattr__(name, value)

    model = nn.Sequential(nn.Linear(32, 32), Frozen(nn.Linear(32, 32)))
    options = IN_PLACE | {"optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}
    options |= {"data": data} if with_data else {}
    assert_refused("frozen", bs.sparsify, model, 0.5, 8, error=RuntimeError, **options)


def test_a_criterion_may_write_to_its_argument():
    model = mlp(32, 64)
    before = copy.deepcopy(model.state_dict())
    sparse = bs.sparsify(
        model, 0.5, 8, force=True, criterion=lambda _, w: w.zero_().add_(1).unfold(0, 8, 8).unfold(1, 8, 8).sum((2, 3))
    )
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert bs.to_dense(sparse[0].values, sparse[0].layout).abs().max() < 1


# -- models with layers that stay dense ------------------------------------------------------------------------


def test_a_weight_without_numbers_stays_dense():
    without_numbers = nn.Linear(32, 1)
    without_numbers.weight = nn.Parameter(torch.zeros(0, 32))
    without_numbers.bias = nn.Parameter(torch.zeros(0))
    made = bs.sparsify(nn.Sequential(nn.Linear(32, 32), without_numbers), 0.5, 8, force=True)
    assert list(layouts_of(made)) == ["0.weight"]
    assert bs.report(made).dense == {"1.weight": "it is empty, [0, 32]"}
    with pytest.raises(bs.BlockSparseError, match=r"got Linear with weight: it is empty, \[0, 32\]"):
        bs.sparsify(without_numbers, 0.5, 8, force=True)


COMPUTED = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "spectral norm": spectral_norm,
    "spectral norm by a hook": nn.utils.spectral_norm,
    "weight norm by a hook": nn.utils.weight_norm,
    "pruned bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PyTorch: its older parametrizations
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_layer_that_computes_its_weight_stays_dense(kind, inplace, data):
    model = mlp(32, 64, 32)
    COMPUTED[kind](model[0])
    model.eval()(data[0])  # with a graph
    expected = bs.sparsify(copy.deepcopy(model[2:]), 1, 8, force=True)(model[:2](data[0]))
    why = f"its module computes {'bias' if 'bias' in kind else 'weight'} from other parameters in each call"
    with pytest.warns(bs.SparsityWarning, match=f"stay as they are\n  0.weight.*: {why}"):
        made = bs.sparsify(model, 1, 8, force=True, inplace=inplace)
    assert list(layouts_of(made)) == ["2.weight"]
    torch.testing.assert_close(made(data[0]), expected)
    reasons = bs.report(made).dense.values()  # of a norm's direction and length, two
    assert reasons
    assert all(reason.startswith(why) for reason in reasons)


def test_the_weight_of_a_weight_norm_stays_dense(data):
    model = nn.Sequential(bs.nn.WeightNorm(nn.Linear(32, 30)), nn.Linear(30, 32))
    made = bs.sparsify(model, 1, 8, force=True)
    assert list(layouts_of(made)) == ["1.weight"]
    torch.testing.assert_close(made(data[0]), model(data[0]))
    with pytest.raises(bs.BlockSparseError, match=r"inside a WeightNorm, .*call blocksparse.nn.fold first"):
        bs.sparsify(model[:1], 0.5, 8, force=True)


COMPUTED_VALUES = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "values", 0.5),
    "weight norm": lambda layer: nn.utils.weight_norm(layer, "values"),
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "values", nn.Tanh()),
    "pruned bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("kind", [*COMPUTED_VALUES, "a user's class", "an LSTM's weight"])
def test_a_layer_without_a_dense_counterpart_is_refused(kind, data):
    options = {"density": 0.5, "block_size": 8}
    model = nn.Sequential(bs.nn.Linear(32, 32, **options), nn.ReLU(), bs.nn.Linear(32, 32, **options))
    name, expected = "0", "`values` that are a parameter"
    if kind == "a user's class":
        model[0], expected = OfAUser(32, 32, **options), "a layer of a class of blocksparse.nn itself, got OfAUser"
    elif kind == "an LSTM's weight":
        model, name = nn.Sequential(bs.nn.LSTM(32, 32, **options)), "0.weight_hh_l0"
        prune.l1_unstructured(model[0].weight_hh_l0, "values", 0.5)
    else:
        COMPUTED_VALUES[kind](model[0])
    for inplace in (False, True):
        assert_refused(f"^{name}: expected {expected}", bs.densify, model, inplace=inplace)
    made = bs.report(model, example=data[0])
    row = next(row for row in made.rows if name in row.name)
    assert expected in row.note or kind == "pruned bias"  # another layer like it was measured
    assert made.speed_up is None


@pytest.mark.parametrize("make", [bs.sparsify, bs.from_zeros])
def test_an_example_without_timing_is_refused(make):
    with pytest.raises(bs.BlockSparseError, match="example= has no effect with force=True"):
        make(mlp(32, 32), force=True, example=torch.randn(4, 32))


def test_a_scripted_module_stays_dense():
    model = nn.Sequential(nn.Linear(32, 32), torch.jit.script(mlp(32, 32)))
    assert list(layouts_of(bs.sparsify(model, 0.5, 8, force=True))) == ["0.weight"]


def test_a_model_that_cannot_be_copied(data):
    model = mlp(32, 64, 32)
    model.lock = threading.Lock()
    expected = (
        r"model: expected a module that copy.deepcopy can copy, or {}, got Sequential: cannot pickle '_thread.lock'"
    )
    for options in ({"force": True}, {"force": True, "data": data}, {"force": True, "data": data, "inplace": True}):
        with pytest.raises(bs.BlockSparseError, match=expected.format("inplace=True without data=")):
            bs.sparsify(model, 0.5, 8, **options)
    with pytest.raises(bs.BlockSparseError, match=expected.format("force=True without example=")):
        bs.sparsify(model, 0.5, 8, example=data[0], inplace=True)
    with pytest.raises(bs.BlockSparseError, match=r"a module that copy.deepcopy can copy, got Sequential"):
        bs.sparsity.reconstruct(model, data, 0.5, 8)
    assert not layouts_of(model)
    assert layouts_of(bs.sparsify(model, 0.5, 8, force=True, inplace=True))
    with pytest.raises(bs.BlockSparseError, match=expected.format("inplace=True")):
        bs.densify(model)
    assert not layouts_of(bs.densify(model, inplace=True))


# -- data -----------------------------------------------------------------------------------------------------------


def test_a_layer_that_gets_no_rows_is_not_fitted(data):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

        def forward(self, x):
            return torch.cat([self.experts[0](x), self.experts[1](x[:0])])

    model = Routed()
    made = bs.sparsity.reconstruct(model, data, 0.5, 8)
    assert made.by_magnitude == {"experts.1.weight": "no batch reaches it"}
    assert list(made.errors) == ["experts.0.weight"]
    with pytest.warns(bs.SparsityWarning, match="the data do not reach experts.1.weight"):
        sparse = bs.sparsify(model, 0.5, 8, data=data, force=True)
    assert sparse.experts[1].layout.density == 0.5


@pytest.mark.parametrize("many", [False, True], ids=["few inputs", "many inputs"])
@pytest.mark.parametrize("strong", ["ih", "hh"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN, nn.LSTMCell], ids=lambda kind: kind.__name__)
def test_each_weight_of_a_recurrent_layer_keeps_its_number_of_blocks(kind, strong, many, monkeypatch):
    if many:
        monkeypatch.setattr(fitting, "MAX_INPUTS", 8)
    torch.manual_seed(0)
    layer = kind(32, 32)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("weight"):
                parameter.mul_(10 if strong in name else 1e-4)
    x = torch.randn(20, 32) if kind is nn.LSTMCell else torch.randn(9, 4, 32)
    given = (torch.randn(20, 32), torch.randn(20, 32)) if kind is nn.LSTMCell else None
    made = bs.sparsity.reconstruct(layer, [(x, given)], 0.25, 8)
    layouts = {name.split("_")[1]: layout for name, layout in made.layouts.items()}
    count = layer.weight_hh.numel() if kind is nn.LSTMCell else layer.weight_hh_l0.numel()
    assert layouts["ih"].nnz == layouts["hh"].nnz == count // 64 // 4


def test_blocks_of_a_block_sparse_model_keep_their_size():
    sparse = bs.sparsify(torch.nn.Linear(64, 64), 0.5, force=True)
    assert bs.sparsify(sparse, 0.25, 32, force=True).layout.block_shape == (32, 32)
    with pytest.raises(bs.BlockSparseError, match="block_size=16 applies to dense weights"):
        bs.sparsify(sparse, 0.25, 16, force=True)
