"""Replacing dense weights by block-sparse ones: equal results, names, optimizers; all or nothing."""

import copy

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.nn.recurrent import Recurrent
from blocksparse.surgery.prunable import prunable, survey
from blocksparse.surgery.replace import replace_with_sparse
from masked import masked
from sparsified import assert_refused


class Conv1D(nn.Module):
    """Conv1D of the transformers library: a linear layer with a weight `[in, out]`."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, out, in_):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(in_, out)), nn.Parameter(torch.randn(out))

    def forward(self, x):
        return x @ self.weight + self.bias


def random_layouts(model, block_size, density=0.5, skip=()):
    return {
        weight.name: bs.BlockLayout(torch.rand(weight.grid) < density, weight.block_shape)
        for weight in prunable(model, block_size, skip)
    }


CASES = {
    "linear": (lambda: nn.Linear(64, 48), (5, 64)),
    "linear-padded": (lambda: nn.Linear(61, 35, bias=False), (2, 5, 61)),
    "conv1d": (lambda: nn.Conv1d(32, 48, 3, padding=1), (2, 32, 11)),
    "conv2d": (lambda: nn.Conv2d(20, 48, 3, stride=2, padding=1, dilation=2), (2, 20, 9, 9)),
    "conv2d-same": (lambda: nn.Conv2d(16, 16, (3, 2), padding="same", padding_mode="circular"), (2, 16, 6, 7)),
    "conv3d": (lambda: nn.Conv3d(16, 32, 2, bias=False), (2, 16, 4, 4, 4)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(32, 16, 2, stride=2), (2, 32, 7)),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(48, 20, 3, stride=2, padding=1, output_padding=1, dilation=2),
        (2, 48, 5, 6),
    ),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(16, 32, 2), (2, 16, 3, 3, 3)),
    "transformers-conv1d": (lambda: Conv1D(48, 64), (2, 5, 64)),
    "sequential": (lambda: nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 10)), (5, 32)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True), 2),
        (2, 7, 32),
    ),
}
LSTMS = {
    "lstm": {"input_size": 32, "hidden_size": 48},
    "lstm-padded": {"input_size": 21, "hidden_size": 35, "num_layers": 2, "bidirectional": True, "batch_first": True},
    "lstm-projected": {"input_size": 32, "hidden_size": 40, "num_layers": 2, "proj_size": 20, "bias": False},
}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block_size", [16, (8, 16)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_layers_compute_what_masked_ones_do(name, block_size):
    make, shape = CASES[name]
    model = make().double()
    layouts = random_layouts(model, block_size)
    expected = masked(model, layouts)
    new = replace_with_sparse(model, layouts)
    x = torch.randn(shape, dtype=torch.float64)
    close(new(x), expected(x))
    with torch.no_grad():
        close(new.eval()(x), expected.eval()(x))
    assert not prunable(new, block_size)


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize("which", ["all", "hh", "l0"])
@pytest.mark.parametrize("name", LSTMS)
def test_lstms_compute_what_masked_ones_do(name, which, ours):
    dense = nn.LSTM(**LSTMS[name], dtype=torch.float64)
    model = bs.nn.LSTM(**LSTMS[name], dtype=torch.float64) if ours else dense
    model.load_state_dict(dense.state_dict())
    layouts = random_layouts(model, (8, 16))
    layouts = {key: layout for key, layout in layouts.items() if which == "all" or which in key}
    expected = masked(dense, layouts)
    new = replace_with_sparse(model, layouts)
    assert isinstance(new, bs.nn.LSTM)
    x = torch.randn(3, 5, dense.input_size, dtype=torch.float64)
    for actual, wanted in zip(new(x)[1], expected(x)[1], strict=True):
        close(actual, wanted)
    close(new(x)[0], expected(x)[0])


@pytest.mark.parametrize("make", [bs.nn.MultiplicativeLSTM, bs.nn.SmallWorldLSTM], ids=lambda make: make.__name__)
def test_other_recurrent_layers_of_ours(make):
    model = make(32, 48, dtype=torch.float64)
    weights = prunable(model, 16)
    assert {weight.name for weight in weights} == set(model.sizes)
    layouts = {w.name: bs.patterns.random(w.shape, 16, density=0.5, seed=0) for w in weights}
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for weight, twin in zip(weights, prunable(expected, 16), strict=True):
            values = bs.from_dense(weight.matrix(), layouts[weight.name])
            twin.matrix().copy_(bs.to_dense(values, layouts[weight.name]))
    new = replace_with_sparse(model, layouts)
    x = torch.randn(4, 3, 32, dtype=torch.float64)
    close(new(x)[0], expected(x)[0])
    assert all("not multiples" in reason for _, reason in survey(make(30, 40), 16) if reason)


def test_prunable_lists_weights_by_their_names():
    model = nn.Sequential(nn.Conv2d(3, 64, 7), nn.Sequential(nn.Linear(64, 40), nn.LSTM(40, 50)))
    weights = prunable(model, 32)
    assert [(w.name, w.parameter, w.grid) for w in weights] == [
        ("0.weight", "weight", (2, 1)),
        ("1.0.weight", "weight", (2, 2)),
        ("1.1.weight_ih_l0", "weight_ih_l0", (8, 2)),
        ("1.1.weight_hh_l0", "weight_hh_l0", (8, 2)),
    ]
    for weight in weights:
        assert weight.matrix().data_ptr() == getattr(weight.module, weight.parameter).data_ptr()
        assert weight.padded().shape[:2] == weight.shape
        assert weight.padded().sum().item() == pytest.approx(weight.matrix().sum().item(), abs=1e-3)
    replace_with_sparse(model, random_layouts(model, 32))
    assert {weight.values_name for weight in weights} <= dict(model.named_parameters()).keys()
    assert [w.name for w in prunable(nn.Linear(3, 4), 2)] == ["weight"]


def test_skip():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8)))
    for skip, left in (
        ("1", ["0.weight"]),
        (model[1], ["0.weight"]),
        (["0", "1.1.weight_hh_l0"], ["1.0.weight", "1.1.weight_ih_l0"]),
    ):
        assert [weight.name for weight in prunable(model, 4, skip)] == left
    for skip in ("2", nn.Linear(8, 8), ["0", "1.2.weight"]):
        with pytest.raises(bs.BlockSparseError, match="skip: expected modules of the model, or names"):
            prunable(model, 4, skip)


def test_weights_that_stay_dense_have_a_reason():
    class Own(nn.Linear):
        pass

    class Attention(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(40, 32),
            "tied": nn.Linear(32, 40),
            "first": nn.Linear(32, 32),
            "second": nn.Linear(32, 32),
            "grouped": nn.Conv2d(32, 32, 3, groups=4),
            "own": Own(32, 32),
            "attention": Attention(32, 2),
            "bilinear": nn.Bilinear(32, 32, 8),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            "lazy": nn.LazyLinear(3),
            "good": nn.Linear(32, 32),
        }
    )
    model["tied"].weight = model["embedding"].weight
    model["second"].weight = model["first"].weight
    reasons = {weight.name: reason for weight, reason in survey(model)}
    assert reasons.pop("good.weight") is None
    assert reasons.pop("tied.weight").startswith("tied to embedding.weight: to prune it, untie it first by ")
    assert reasons.pop("first.weight").startswith("tied to second.weight: to prune it, untie it first by ")
    assert reasons.pop("second.weight").startswith("tied to first.weight: to prune it, untie it first by ")
    assert reasons.pop("grouped.weight") == "4 groups"
    assert reasons.pop("lazy.weight") == "not initialized yet: call the model once first"
    own = reasons.pop("own.weight")
    assert own == "Own is a subclass of Linear, which would be lost: use Linear itself"
    assert reasons.pop("attention.in_proj_weight") == "Attention may use its weight in another way than its base class"
    assert reasons.pop("attention.out_proj.weight") == "inside Attention, a subclass of MultiheadAttention"
    assert reasons["bilinear.weight"] == "Bilinear has no block-sparse counterpart: it multiplies two inputs"
    remove = "parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    assert [reasons.pop(f"normed.parametrizations.weight.original{part}") for part in (0, 1)] == [remove] * 2
    assert {"embedding.weight"} <= reasons.keys()
    assert all("counterpart" in reason for reason in reasons.values()), reasons
    assert [weight.name for weight in prunable(model)] == ["good.weight"]


def test_a_module_with_two_parents_is_exchanged_once():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared, nn.ReLU()))
    assert [weight.name for weight in prunable(model, 8)] == ["0.0.weight"]
    replace_with_sparse(model, random_layouts(model, 8))
    assert isinstance(model[0][0], bs.nn.Linear)
    assert model[0][0] is model[1][0]


def test_additions_of_users_move_along():
    model = nn.Sequential(nn.Linear(16, 16)).eval()
    model[0].weight.requires_grad_(False)
    bias, seen, layouts = model[0].bias, [], random_layouts(model, 8)
    model[0].register_forward_hook(lambda *given: seen.append(given[0]))
    state = torch.get_rng_state()
    replace_with_sparse(model, layouts)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"
    assert model[0].bias is bias
    assert not model[0].training
    assert not model[0].values.requires_grad
    model(torch.randn(2, 16))
    assert seen == [model[0]]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD], ids=lambda make: make.__name__)
def test_the_optimizer_continues_like_that_of_the_masked_model(make):
    model = nn.ModuleList([nn.Linear(20, 24), nn.LSTM(24, 20), nn.ConvTranspose1d(20, 16, 2)]).double()

    def loss(model, x):
        return model[2](model[1](model[0](x))[0].transpose(1, 2)).square().mean()

    options = {"lr": 0.05, **({"momentum": 0.9} if make is torch.optim.SGD else {})}
    layouts = random_layouts(model, 8)
    twin = copy.deepcopy(model)
    optimizers = [
        make([{"params": m[0].parameters()}, {"params": m[1:].parameters()}], **options) for m in (model, twin)
    ]
    masks = {name: masked_ones(twin, name, layout) for name, layout in layouts.items()}
    parameters = dict(twin.named_parameters())
    for step in range(6):
        if step == 3:
            replace_with_sparse(model, layouts, optimizers[0])
            assert [len(group["params"]) for group in optimizers[0].param_groups] == [2, 6]
        x = torch.randn(3, 4, 20, dtype=torch.float64)
        with torch.no_grad():
            for name, mask in masks.items() if step >= 3 else ():
                parameters[name].mul_(mask)
        losses = [loss(m, x) for m in (model, twin)]
        close(losses[0], losses[1])
        for optimizer, value in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            value.backward()
        optimizers[0].step()
        optimizers[1].step()


def masked_ones(model, name, layout):
    ones = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in ones.parameters():
            parameter.fill_(1)
    return dict(masked(ones, {name: layout}).named_parameters())[name].detach()


@pytest.mark.parametrize("root", [False, True], ids=["inner", "root"])
def test_a_refusal_changes_nothing(root):
    model = nn.Linear(16, 16) if root else nn.Sequential(nn.Linear(16, 16), nn.Embedding(4, 16), nn.LSTM(16, 16))
    name = "weight" if root else "0.weight"
    good = {name: bs.patterns.dense((16, 16), 8)}
    wrong = [
        ({**good, "9.weight": bs.patterns.dense((16, 16), 8)}, None, "9.weight cannot be .*: the model has no"),
        ({name: bs.patterns.dense((16, 24), 8)}, None, r"the layout of .*weight: expected shape \(16, 16\)"),
        ({name: "dense"}, None, "layout: expected a BlockLayout"),
        (good, "adam", "optimizer: expected a torch.optim.Optimizer, got str"),
        (good, torch.optim.SGD(nn.Linear(2, 2).parameters()), "expected an optimizer with parameters of the"),
    ]
    if not root:
        wrong.append(({**good, "1.weight": bs.patterns.dense((8, 16), 8)}, None, "1.weight cannot .* Embedding has"))
    odd = torch.optim.Adam(model.parameters())
    odd.state[model.get_parameter(name)]["pieces"] = torch.zeros(7)
    wrong.append((good, odd, "pieces in the optimizer's state: expected"))
    for layouts, optimizer, message in wrong:
        assert_refused(message, replace_with_sparse, model, layouts, optimizer=optimizer)


def test_lstms_accept_layouts_by_name():
    layout = bs.patterns.dense((4 * 48, 48), 16)
    lstm = bs.nn.LSTM(20, 40, 2, layouts={"weight_hh_l1": layout})
    assert lstm.weight_hh_l1.layout is layout
    assert isinstance(lstm, Recurrent)
    assert lstm.weight_hh_l0.shape == (4 * 48, 48)
    with pytest.raises(bs.BlockSparseError, match=r"layouts: expected names out of .*, got \['weight_xx'\]"):
        bs.nn.LSTM(20, 40, layouts={"weight_xx": layout})
