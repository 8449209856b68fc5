"""Modules answer to the names that torch.nn gives to what they have."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

import blocksparse as bs

MODULES = {
    "Linear": (lambda: bs.nn.Linear(40, 24, density=0.5, block_size=8), (3, 40)),
    "Linear, padded": (lambda: bs.nn.Linear(37, 21, density=0.5, block_size=8), (3, 37)),
    "Conv1d": (lambda: bs.nn.Conv1d(16, 24, 3, density=0.5, block_size=8), (2, 16, 9)),
    "Conv2d": (lambda: bs.nn.Conv2d(16, 24, 3, density=0.5, block_size=8), (2, 16, 9, 9)),
    "Conv3d": (lambda: bs.nn.Conv3d(13, 21, 2, density=0.5, block_size=8), (2, 13, 4, 4, 4)),
    "ConvTranspose1d": (lambda: bs.nn.ConvTranspose1d(16, 24, 3, density=0.5, block_size=8), (2, 16, 9)),
    "ConvTranspose2d": (lambda: bs.nn.ConvTranspose2d(13, 21, 3, density=0.5, block_size=8), (2, 13, 5, 5)),
    "ConvTranspose3d": (lambda: bs.nn.ConvTranspose3d(16, 24, 2, density=0.5, block_size=8), (2, 16, 3, 3, 3)),
    "LSTM": (lambda: bs.nn.LSTM(16, 24, density=0.5, block_size=8), (5, 2, 16)),
    "MultiplicativeLSTM": (lambda: bs.nn.MultiplicativeLSTM(16, 24, density=0.5, block_size=8), (5, 2, 16)),
    "SmallWorldLSTM": (lambda: bs.nn.SmallWorldLSTM(16, 24, density=0.5, block_size=8), (5, 2, 16)),
    "AllReLU": (lambda: bs.nn.AllReLU(0.5, layer=1), (3, 4)),
    "Dropout": (lambda: bs.nn.Dropout(0.5).eval(), (3, 4)),
    "Causal2d": (lambda: bs.nn.Causal2d(bs.nn.Conv2d(8, 8, (2, 3), block_size=8), "down"), (1, 8, 4, 4)),
    "Shift2d": (lambda: bs.nn.Shift2d("down"), (1, 2, 4, 4)),
    "EdgeBias": (lambda: bs.nn.EdgeBias(4, (6, 6), 3), (2, 4, 4, 4)),
    "AdaptivePolyphaseDownsample": (bs.nn.AdaptivePolyphaseDownsample, (1, 2, 4, 4)),
    "DiffusionConv": (lambda: bs.nn.DiffusionConv(4, 2), (5, 3, 4)),
    "WeightNorm": (lambda: bs.nn.WeightNorm(bs.nn.Linear(16, 8, block_size=8)), (3, 16)),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_argument_of_a_call_is_input(name):
    make, shape = MODULES[name]
    layer, x = make(), torch.randn(shape)
    torch.testing.assert_close(layer(input=x), layer(x))


with torch.device("meta"):  # without kernels, which a machine with a GPU need not have for its CPU
    WEIGHTED = [name for name in MODULES if hasattr(MODULES[name][0](), "weight") and name != "DiffusionConv"]


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_dense_weight_is_that_of_the_dense_module(name):
    make, shape = MODULES[name]
    layer = make()
    dense, x = bs.densify(layer), torch.randn(shape)
    assert isinstance(layer.weight, torch.Tensor)
    assert torch.equal(layer.weight, dense.weight)
    assert (layer.weight.shape, layer.weight.dtype) == (dense.weight.shape, dense.weight.dtype)
    assert layer.weight.stride() == dense.weight.stride()
    assert (layer.weight.requires_grad, layer.weight.is_leaf) == (True, False)
    upstream = torch.randn_like(dense.weight)
    (layer.weight * upstream).sum().backward()
    gradient = layer.values.grad.clone()
    assert torch.equal(layer.weight.grad, torch.where(layer.dense_of(torch.ones_like(layer.values)) > 0, upstream, 0))
    layer.zero_grad()
    assert layer.weight.grad is None
    # The gradient of the forward pass, through the weight of the dense module.
    dense(x).sum().backward()
    layer(x).sum().backward()
    stored = layer.dense_of(torch.ones_like(layer.values)) > 0
    torch.testing.assert_close(layer.weight.grad, dense.weight.grad * stored)
    assert gradient.shape == layer.values.shape
    assert set(dict(layer.named_parameters())) == {"values", "bias"}
    assert set(layer.state_dict()) == {"values", "bias", "crow_indices", "col_indices"}


def test_dtype_device_and_shape_of_the_weight_cost_no_dense_matrix(monkeypatch):
    layer = bs.nn.Linear(64, 64, density=0.5, block_size=8)
    monkeypatch.setattr("blocksparse.nn.module.to_dense", lambda *_: pytest.fail("the dense weight was made"))
    weight = layer.weight
    assert (weight.dtype, weight.device.type, weight.shape, weight.ndim) == (torch.float32, "cpu", (64, 64), 2)
    assert (weight.size(0), weight.numel(), len(weight), weight.is_meta, weight.layout) == (
        64, 4096, 64, False, torch.strided,
    )  # fmt: skip
    assert (torch.is_floating_point(weight), weight.requires_grad, torch.is_tensor(weight)) == (True, True, True)
    # A weight that would not fit in memory answers too.
    huge = bs.BlockLayout.from_indices([0], [0], (2**22, 2**22), block_size=1)
    assert bs.nn.Linear(2**22, 2**22, layout=huge, bias=False).weight.shape == (2**22, 2**22)


WRITES = {
    "method": lambda layer: layer.weight.zero_(),
    "item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "view": lambda layer: layer.weight[0].fill_(1),
    "transposed": lambda layer: layer.weight.T.mul_(2),
    "detached": lambda layer: layer.weight.detach().add_(1),
    "data": lambda layer: layer.weight.data.normal_(),
    "data set": lambda layer: setattr(layer.weight, "data", torch.ones(24, 40)),
    "requires_grad set": lambda layer: setattr(layer.weight, "requires_grad", False),
    "out": lambda layer: torch.add(torch.ones(24, 40), 1, out=layer.weight),
    "init": lambda layer: torch.nn.init.xavier_uniform_(layer.weight),
    "kaiming": lambda layer: torch.nn.init.kaiming_uniform_(layer.weight),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 2.0),
    "same dtype": lambda layer: layer.weight.float().zero_(),
    "in C++": lambda layer: without_function(lambda: torch.ops.aten.zero_(layer.weight)),
    "address": lambda layer: layer.weight.data_ptr(),
    "relu in place": lambda layer: F.relu(layer.weight.detach(), inplace=True),
    "dropout in place": lambda layer: F.dropout(layer.weight.detach(), 0.9, True, inplace=True),
    "dropout in place, by position": lambda layer: F.dropout(layer.weight.detach(), 0.9, True, True),
    "hardtanh in place": lambda layer: F.hardtanh(layer.weight.detach(), inplace=True),
    "module in place": lambda layer: torch.nn.ReLU(inplace=True)(layer.weight.detach()),
    "embedding, renormed": lambda layer: F.embedding(torch.tensor([1]), layer.weight, max_norm=0.1),
    "dlpack": lambda layer: torch.from_dlpack(layer.weight.detach()).fill_(1),
    "dlpack, numpy": lambda layer: np.from_dlpack(layer.weight.detach()).fill(1),
    "gradient": lambda layer: layer.weight.grad.zero_(),
    "gradient's row": lambda layer: layer.weight.grad[0].zero_(),
    "gradient's norm": lambda layer: torch.nn.utils.clip_grad_norm_([layer.weight], 1.0),
    "gradient's norm, one by one": lambda layer: torch.nn.utils.clip_grad_norm_([layer.weight], 1.0, foreach=False),
    "gradient's size": lambda layer: torch.nn.utils.clip_grad_value_([layer.weight], 0.1),
    "hook": lambda layer: layer.weight.register_hook(torch.zeros_like),
    "hook after": lambda layer: layer.weight.register_post_accumulate_grad_hook(torch.zeros_like),
    "gradient kept": lambda layer: layer.weight.retain_grad(),
    "assigned": lambda layer: setattr(layer, "weight", torch.ones(24, 40)),
    "tied": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(24, 40))),
}


def without_function(call):
    with torch._C.DisableTorchFunctionSubclass():
        return call()


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_the_weight_is_refused_not_lost(name):
    layer = bs.nn.Linear(40, 24, density=0.5, block_size=8)
    layer(torch.randn(3, 40)).sum().backward()
    before, gradient = layer.values.detach().clone(), layer.values.grad.clone()
    with torch.no_grad(), pytest.raises(bs.BlockSparseError, match=r"weight: expected .*values"):
        WRITES[name](layer)
    assert torch.equal(layer.values, before)
    assert torch.equal(layer.values.grad, gradient)


def test_what_is_made_of_the_weight_can_be_written_to():
    layer = bs.nn.Linear(40, 24, density=0.5, block_size=8)
    with torch.no_grad():
        assert layer.weight.clone().zero_().sum() == 0
        assert (layer.weight * 2).fill_(1).sum() == 24 * 40
        assert layer.weight.double().zero_().sum() == 0
    numbers = layer.weight.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        numbers[0, 0] = 1


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_capsule_of_the_weight_has_numbers_or_is_refused(frozen):
    layer = bs.nn.Linear(40, 24, density=0.5, block_size=8).requires_grad_(not frozen)
    for weight in (layer.weight.detach(), layer.weight.detach().T):
        shared = torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight))
        address = shared.data_ptr()  # to show a tensor at address 0 would end the process
        assert address != 0
        assert torch.equal(shared, weight)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(layer.weight)
    assert torch.equal(torch.from_dlpack(layer.weight.detach(), copy=True), layer.weight)


def test_the_weight_can_be_copied_saved_and_compiled():
    layer = bs.nn.Linear(37, 21, density=0.5, block_size=8)
    dense = layer.weight.clone()
    for copied in (copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer.weight.detach()))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, dense)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, dense)
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file), dense)

    def cast(x):
        return layer(x.to(layer.weight.dtype)) + layer.weight.sum()

    x = torch.randn(3, 37)
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), cast(x))
    assert bs.nn.Linear(8, 8, block_size=4, device="meta").weight.is_meta


class CastsAsT5(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wo = bs.nn.Linear(16, 8, density=0.5, block_size=4)

    def forward(self, x):
        if isinstance(self.wo.weight, torch.Tensor) and x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


def test_a_module_that_reads_the_weights_dtype_runs_and_exports():
    model, x = CastsAsT5(), torch.randn(3, 16, dtype=torch.float64)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    assert model(x).dtype == torch.float32


def test_lstms_answer_for_their_weights_as_torchs():
    options = {"num_layers": 2, "bidirectional": True, "proj_size": 10}
    ours, theirs = bs.nn.LSTM(19, 21, density=0.5, block_size=8, **options), torch.nn.LSTM(19, 21, **options)
    dense = bs.densify(ours)
    ours.flatten_parameters()
    for mine, plain, torchs in zip(ours.all_weights, dense.all_weights, theirs.all_weights, strict=True):
        assert [weight.dtype for weight in mine] == [torch.float32] * 5
        assert [weight.shape for weight in plain] == [weight.shape for weight in torchs]
        for number in (0, 1, 4):  # biases of block-sparse layers are padded
            assert mine[number].shape == torchs[number].shape
            assert torch.equal(mine[number], plain[number])
    assert ours.weight_hh_l0.shape == theirs.weight_hh_l0.shape
    assert ours.weight_hh_l0.dtype == torch.float32
    assert ours.weight_hh_l0.device == torch.device("cpu")


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, module, name):
        return module.__module__.startswith("blocksparse.") or super().is_leaf_module(module, name)


@pytest.mark.parametrize("name", ["Linear", "Conv2d", "LSTM"])
def test_fx_traces_models_with_these_leaves(name):
    make, shape = MODULES[name]
    model, x = torch.nn.Sequential(make()), torch.randn(shape)
    traced = torch.fx.GraphModule(model, Leaves().trace(model))
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "LSTM"])
def test_torch_jit_script_is_refused(name):
    for model in (MODULES[name][0](), torch.nn.Sequential(MODULES[name][0]())):
        with pytest.raises(
            bs.BlockSparseError, match=r"torch\.jit\.script: expected torch\.export\.export\(model, args\)"
        ):
            torch.jit.script(model)


ON_META = MODULES | {
    "SmallWorldLSTM, even": (lambda: bs.nn.SmallWorldLSTM(48, 48, block_size=16), (3, 2, 48)),
    "GRU": (lambda: bs.nn.GRU(16, 24, density=0.5, block_size=8), (5, 2, 16)),
    "GatedMLP": (lambda: bs.nn.GatedMLP(16, 24, density=0.5, block_size=8), (5, 16)),
    "attention": (lambda: lambda q: bs.nn.attention(q, q, q, bs.patterns.butterfly(48, 8)), (2, 3, 48, 4)),
}


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "autocast of another device"])
@pytest.mark.parametrize("name", ON_META)
def test_modules_run_on_the_meta_device_as_on_others(name, mixed):
    make, shape = ON_META[name]
    expected = torch.utils._pytree.tree_leaves(make()(torch.randn(shape)))
    with torch.device("meta"), torch.autocast("cpu", enabled=mixed):
        found = torch.utils._pytree.tree_leaves(make()(torch.randn(shape)))
    assert [(y.shape, y.is_meta) for y in found] == [(y.shape, True) for y in expected]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: bs.nn.Linear(40, 24, density=0.5, block_size=8), "weight"),
        (lambda: bs.nn.Conv2d(16, 24, 3, density=0.5, block_size=8), "weight"),
        (lambda: bs.nn.LSTM(16, 24, density=0.5, block_size=8), "weight_hh_l0"),
    ],
)
def test_pruning_of_torch_is_told_to_prune_values(make, name):
    layer = make()
    before = layer.state_dict()
    for call in (
        lambda: prune.l1_unstructured(layer, name, 0.5),
        lambda: prune.identity(layer, name),
        lambda: prune.custom_from_mask(layer, name, torch.ones(24, 40)),
    ):
        with pytest.raises(bs.BlockSparseError, match=rf'^{name}: .*l1_unstructured\(layer, "values", amount\)'):
            call()
    assert layer.state_dict().keys() == before.keys()
    target = layer if name == "weight" else getattr(layer, name)
    prune.l1_unstructured(target, "values", 0.5)
    assert (target.values == 0).float().mean() > 0.4
