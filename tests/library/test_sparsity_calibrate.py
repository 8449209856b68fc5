"""Scores and reconstructions from calibration data, against their formulas in float64 by brute force."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import blocksparse as bs
from blocksparse.sparsity.calibration import sequences, targets
from blocksparse.sparsity.calibration.batch_norms import Moments
from blocksparse.sparsity.calibration.fitting import best_columns, block_counts, least_squares
from blocksparse.sparsity.calibration.inputs import products
from blocksparse.sparsity.calibration.passes import Passes
from blocksparse.sparsity.calibration.reconstruction import products_of
from blocksparse.surgery.prunable import prunable

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def correlated(tokens, features, rank):
    return randn(tokens, rank) @ randn(rank, features) + 0.1 * randn(tokens, features)


def block_sums(matrix, block):
    """Block sums of `[out, in, ...]`, one block after the other."""
    rows, columns = -(-matrix.shape[0] // block[0]), -(-matrix.shape[1] // block[1])
    sums = torch.zeros(rows, columns, dtype=torch.float64)
    for i, j in itertools.product(range(rows), range(columns)):
        sums[i, j] = matrix[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].sum()
    return sums


# -- scores -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(4, 4), (3, 5), (1, 2)], ids=str)
@pytest.mark.parametrize(
    ("layer", "shape", "axis"),
    [
        (nn.Linear(10, 7), (3, 6, 10), -1),
        (nn.Conv2d(6, 9, 3, padding=1, stride=2), (5, 6, 8, 8), 1),
        (nn.ConvTranspose1d(6, 9, 3), (5, 6, 8), 1),
    ],
    ids=["linear", "conv2d", "conv_transpose1d"],
)
def test_scores_by_their_formula(layer, shape, axis, block):
    layer = layer.double()
    batches = [randn(*shape), randn(2, *shape[1:]), randn(*shape)[0]]
    scores = bs.sparsity.activation_scores(layer, batches, block)
    axes = [axis, axis, axis - 1 if axis > 0 else axis]  # the last one is a single sample, without a batch
    rows = torch.cat([x.movedim(at, -1).flatten(0, -2) for x, at in zip(batches, axes, strict=True)])
    (weight,) = prunable(layer, block)
    matrix = weight.matrix().detach()
    norms = torch.stack([rows[:, j].norm() for j in range(rows.shape[1])])
    expected = block_sums(matrix.abs() * norms.view(1, -1, *[1] * (matrix.dim() - 2)), block)
    torch.testing.assert_close(scores["weight"], expected, rtol=1e-12, atol=1e-12)
    assert scores.by_magnitude == {}


def test_scores_of_the_conv1d_of_transformers():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer, x = conv1d(7, 10).double(), randn(4, 5, 10)
    scores = bs.sparsity.activation_scores(layer, [x], 4)["weight"]
    expected = block_sums(layer.weight.detach().T.abs() * x.flatten(0, 1).norm(dim=0), (4, 4))
    torch.testing.assert_close(scores, expected)
    made = bs.sparsity.reconstruct(layer, [x], 1.0, 4)
    torch.testing.assert_close(made.model(x), layer(x))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_scores_of_an_lstm(packed, stateful):
    lstm = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True).double()
    x, lengths = randn(3, 4, 5), [4, 2, 1] if packed else [4, 4, 4]
    state = (randn(4, 3, 6), randn(4, 3, 6))
    arguments = (pack_padded_sequence(x, lengths, batch_first=True) if packed else x, *([state] if stateful else []))
    scores = bs.sparsity.activation_scores(lstm, [arguments], (2, 3))
    assert scores.by_magnitude == {}
    with torch.no_grad():
        for i, level in enumerate((0, 1)):
            inputs, outputs = [], []
            for direction, suffix in enumerate(("", "_reverse")):
                cell = nn.LSTMCell(x[0].shape[1], 6).double()
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                    setattr(cell, name, getattr(lstm, f"{name}_l{level}{suffix}"))
                after = torch.zeros(3, 4, 6, dtype=torch.float64)
                for sample, length in enumerate(lengths):
                    at = 2 * i + direction
                    h, c = (each[at, sample] for each in state) if stateful else (torch.zeros(6).double(),) * 2
                    for step in range(length) if direction == 0 else reversed(range(length)):
                        h, c = cell(x[sample, step], (h, c))
                        after[sample, step] = h
                inputs.append(torch.cat([x[sample, :length] for sample, length in enumerate(lengths)]))
                outputs.append(after)
                rows = torch.cat([after[sample, :length] for sample, length in enumerate(lengths)])
                for part, reached in (("ih", inputs[-1]), ("hh", rows)):
                    weight = getattr(lstm, f"weight_{part}_l{level}{suffix}").abs() * reached.norm(dim=0)
                    found = scores[f"weight_{part}_l{level}{suffix}"]
                    expected = torch.cat([block_sums(gate, (2, 3)) for gate in weight.chunk(4)])
                    torch.testing.assert_close(found, expected)
            x = torch.cat(outputs, 2)


class Network(nn.Module):
    """Called with one argument or two; of its layers one is never reached, one is reached twice."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(10, 12), nn.Dropout(0.5)
        self.twice, self.never, self.norm = nn.Linear(12, 12), nn.Linear(12, 3), nn.BatchNorm1d(12)
        self.embedding = nn.Embedding(4, 10)

    def forward(self, x, more=None, scale=1.0):
        x = self.norm(self.drop(self.first(x if more is None else x + more))) * scale
        return self.twice(self.twice(x))


def forms(x, y):
    return {
        "tensors": [x, y],
        "tuples": [(x, 0 * x), (y,)],
        "lists": [[x, 0 * x, 1.0], [y]],
        "dicts": [{"x": x, "scale": 1.0}, {"x": y}],
        "generator": (each for each in (x, y)),
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat([x, y])), batch_size=6),
    }


@pytest.mark.parametrize("form", ["tensors", "tuples", "lists", "dicts", "generator", "loader"])
def test_batches_of_any_form(form):
    torch.manual_seed(0)
    model = Network().double()
    x, y = randn(6, 10), randn(3, 10)
    expected = bs.sparsity.activation_scores(model, [x, y], 4)
    scores = bs.sparsity.activation_scores(model, forms(x, y)[form], 4)
    assert scores.keys() == expected.keys() == {"first.weight", "twice.weight", "never.weight"}
    for name in scores:
        torch.testing.assert_close(scores[name], expected[name])
    assert scores.by_magnitude == {"never.weight": "no batch reaches it"}
    torch.testing.assert_close(scores["never.weight"], block_sums(model.never.weight.detach().abs(), (4, 4)))
    with torch.no_grad():
        model.eval()
        before = model.norm(model.first(torch.cat([x, y])))
        both = torch.cat([before, model.twice(before)])
    expected = block_sums(model.twice.weight.detach().abs() * both.norm(dim=0), (4, 4))
    torch.testing.assert_close(scores["twice.weight"], expected)
    made = bs.sparsity.reconstruct(model, forms(x, y)[form], 0.5, 4)
    assert list(made.errors) == ["first.weight", "twice.weight"]
    assert made.by_magnitude == {"never.weight": "no batch reaches it"}


def test_scores_are_a_criterion():
    model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 8)).double()
    x = correlated(50, 20, 4)
    scores = bs.sparsity.activation_scores(model, [x], 4, skip="2")
    assert list(scores) == ["0.weight"]
    sparse = bs.sparsify(model, 0.3, 4, criterion=scores, scope="layer", skip="2", force=True)
    kept = sparse[0].layout.mask()
    assert kept.sum() == sparse[0].layout.nnz == 9
    assert scores["0.weight"][kept].min() >= scores["0.weight"][~kept].max()


class Dies(nn.Module):
    """Its second layer gets what is not finite."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.second(self.first(x) / 0)


SPARSIFY = {"density": 0.5, "block_size": 4, "force": True}
METHODS = {
    "activation_scores": lambda model, batches: bs.sparsity.activation_scores(model, batches, block_size=4),
    "reconstruct": lambda model, batches: bs.sparsity.reconstruct(model, batches, density=0.5, block_size=4),
    "sparsify": lambda model, batches: bs.sparsify(model, data=batches, **SPARSIFY),
    "inplace": lambda model, batches: bs.sparsify(model, data=batches, inplace=True, **SPARSIFY),
}


@pytest.mark.filterwarnings("ignore::blocksparse.SparsityWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("make", "batches", "message"),
    [
        (Network, [], "ARGUMENT: expected one or more batches, got none"),
        (Network, torch.zeros(3, 10), "ARGUMENT: expected an iterable of batches, such as .* got Tensor"),
        (Network, {"x": torch.zeros(3, 10)}, "ARGUMENT: expected an iterable of batches"),
        (Network, 7, "ARGUMENT: expected an iterable of batches"),
        (Network, [torch.full((3, 10), torch.nan)], "the inputs of first.weight: expected finite numbers"),
        (Network, [torch.full((3, 10), torch.inf)], "the inputs of first.weight: expected finite numbers"),
        (Dies, [torch.ones(3, 10)], "the inputs of second.weight: expected finite numbers"),
        (
            Network,
            [torch.zeros(3, 10), torch.zeros(3, 11)],
            r"batches: expected the model's inputs, .* a batch of \[3, 11\], on which first fails: .*(multiplied|size)",
        ),
        (Network, [{"y": 1}], "on which Network fails: .* unexpected keyword argument"),
        (
            lambda: nn.LSTM(10, 8, batch_first=True),
            [(torch.zeros(2, 6, 10), torch.zeros(6))],
            r"without labels, got a batch of \[2, 6, 10\], \[6\]",
        ),
    ],
    ids=["none", "a tensor", "a dict", "a number", "nan", "inf", "inf later", "shapes", "names", "labels as a state"],
)
def test_failures_leave_the_model_unchanged(method, make, batches, message):
    model = make()
    next(model.children(), model).eval()
    modes, text = [module.training for module in model.modules()], repr(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def is_as_before():
        assert [module.training for module in model.modules()] == modes
        assert repr(model) == text
        assert all(not module._forward_pre_hooks for module in model.modules())
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.backends.mha.get_fastpath_enabled()

    message = message.replace("ARGUMENT", "data" if method in ("sparsify", "inplace") else "batches")
    with pytest.raises(bs.BlockSparseError, match=message):
        METHODS[method](model, batches)
    is_as_before()
    if make is Network and method != "inplace":
        METHODS[method](model, [torch.randn(5, 10)])
        is_as_before()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("activation_scores", {"model": nn.ReLU()}, "model: expected dense weights that can become block-sparse"),
        ("activation_scores", {"block_size": 0}, "block_size: expected a positive int"),
        ("activation_scores", {"skip": "head"}, "skip: expected modules of the model"),
        ("activation_scores", {"model": nn.ModuleDict({"a": nn.Linear(4, 4)})}, "forward"),
        ("reconstruct", {"model": nn.ReLU()}, "model: expected dense weights that can become block-sparse"),
        ("reconstruct", {"density": 1.5}, "density: expected a number above 0 and at most 1"),
        ("reconstruct", {"density": 0}, "density: expected a number above 0 and at most 1"),
        ("reconstruct", {"density": 1e-9}, "density: expected .* that leaves weight one of its"),
        ("reconstruct", {"damping": -1}, "damping: expected a finite number, 0 or more"),
        (
            "reconstruct",
            {"damping": 0, "density": 0.5},
            "damping: expected more, so that the Hessian of weight can be inverted",
        ),
        (
            "reconstruct",
            {"batches": [torch.full((2, 8), 1e30)], "density": 0.5},
            r"the inputs of weight: expected numbers whose squares .*\(scale.*, got numbers up to 1.0e\+30",
        ),
    ],
)
def test_bad_arguments(function, arguments, message):
    given = {"model": nn.Linear(8, 8), "batches": [torch.ones(2, 8)], "block_size": 4} | arguments
    with pytest.raises((bs.BlockSparseError, NotImplementedError), match=message):
        getattr(bs.sparsity, function)(**given)


# -- least squares ------------------------------------------------------------------------------------------------


def loss(fitted, dense, hessian):
    lost = dense - fitted
    return (lost @ hessian * lost).sum().item()


def problem(rows=4, features=24, rank=8):
    x = correlated(200, features, rank)
    return randn(rows, features), x.T @ x + torch.eye(features).double()


def test_least_squares_is_optimal():
    dense, hessian = problem()
    inputs = torch.tensor([0, 3, 4, 10, 11, 23])
    fitted = torch.zeros_like(dense)
    fitted[:, inputs] = least_squares(dense @ hessian, hessian, inputs)
    # Where the error is least, its gradient is 0.
    gradient = ((fitted - dense) @ hessian)[:, inputs]
    torch.testing.assert_close(
        gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9 * (dense @ hessian).norm().item()
    )
    best = loss(fitted, dense, hessian)
    for _ in range(50):
        other = fitted.clone()
        other[:, inputs] += 10 ** -torch.rand(1).item() * randn(4, len(inputs))
        assert loss(other, dense, hessian) > best


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_each_chosen_column_reduces_the_error_most(width, count):
    dense, hessian = problem()
    target = dense @ hessian
    chosen: list[int] = []
    for _ in range(count):
        losses = {}
        for column in set(range(24 // width)) - set(chosen):
            inputs = torch.tensor([c * width + k for c in sorted([*chosen, column]) for k in range(width)])
            fitted = torch.zeros_like(dense)
            fitted[:, inputs] = least_squares(target, hessian, inputs)
            losses[column] = loss(fitted, dense, hessian)
        chosen.append(min(losses, key=losses.__getitem__))
    assert best_columns(target, hessian, width, count).tolist() == sorted(chosen)


def test_block_counts_follow_the_optimal_brain_surgeon():
    dense, hessian = problem(rows=6)
    scores = block_sums(dense.square() / torch.linalg.inv(hessian).diagonal(), (2, 4))
    best = torch.zeros(18, dtype=torch.bool)
    best[scores.flatten().topk(7).indices] = True
    assert block_counts(dense, hessian, (2, 4), 7).tolist() == best.view(3, 6).sum(1).tolist()
    dense[2:4] *= 1e-6
    assert block_counts(dense, hessian, (1, 4), 6)[2:4].tolist() == [0, 0]
    assert block_counts(dense, hessian, (1, 4), 6, parts=3)[2:4].sum() == 1, "half of an equal share, 6 / 3"
    assert block_counts(dense, hessian, (1, 4), 12)[2:4].tolist() == [1, 1], "half of an equal share, 12 / 6"


# -- reconstruction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(5, 7, 3),
        nn.Conv2d(5, 7, (3, 2), padding=(1, 2), stride=2, dilation=(1, 2)),
        nn.Conv2d(5, 7, (4, 3), padding="same", padding_mode="reflect"),
        nn.Conv2d(5, 7, 1, padding_mode="circular", padding=1),
        nn.Conv1d(5, 7, 3, stride=2, padding=1),
        nn.Conv3d(5, 7, (1, 2, 3), padding=(0, 1, 1), stride=(1, 2, 1)),
        nn.ConvTranspose1d(5, 7, 4, stride=2, padding=1),
        nn.ConvTranspose2d(5, 7, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), dilation=(2, 1)),
        nn.ConvTranspose3d(5, 7, 2, stride=2),
        nn.Linear(5, 7),
    ],
    ids=[
        "plain", "strided", "same", "circular", "1-d", "3-d", "transposed 1-d", "transposed 2-d", "transposed 3-d",
        "linear",
    ],
)  # fmt: skip
def test_products_of_observed_inputs_are_the_outputs(layer):
    layer = layer.double()
    axes = len(getattr(layer, "kernel_size", ()))
    x = randn(2, 5, *(8, 9, 4)[:axes]) if axes else randn(2, 6, 5)
    (weight,) = prunable(layer, 4)
    (product,) = products(layer, [weight])
    y = layer(x).movedim(1, -1).flatten(0, -2) if axes else layer(x).flatten(0, -2)
    assert product.rows((x,)) == len(y)
    at = torch.arange(len(y))
    rows = product.inputs((x,), at)
    torch.testing.assert_close((rows @ product.matrix().T)[:, :7] + layer.bias, y)
    assert torch.equal(product.inputs((x,), at[3::5]), rows[3::5])
    if axes:
        assert torch.equal(product.inputs((x[0],), at[: len(y) // 2]), rows[: len(y) // 2])


def error_of(layer, sparse, x):
    exact = layer(x) - layer.bias
    return ((sparse(x) - layer(x)).square().sum() / exact.square().sum()).item()


@pytest.mark.parametrize(("sizes", "block"), [((48, 32), 8), ((45, 30), 8), ((48, 32), (4, 16))], ids=str)
def test_magnitude_is_worse_than_wanda_is_worse_than_reconstruction(sizes, block):
    torch.manual_seed(0)
    layer = nn.Linear(*sizes, dtype=torch.float64)
    x = correlated(300, sizes[0], 6) * torch.linspace(0.1, 3, sizes[0]).double()
    scores = bs.sparsity.activation_scores(layer, [x], block)
    magnitude = bs.sparsify(layer, 0.3, block, scope="layer", force=True)
    wanda = bs.sparsify(layer, 0.3, block, criterion=scores, scope="layer", force=True)
    made = bs.sparsity.reconstruct(layer, [x[:100], x[100:]], 0.3, block, damping=1e-4)
    errors = [error_of(layer, each, x) for each in (magnitude, wanda, made.model)]
    assert errors[0] > errors[1] > 2 * errors[2]
    assert made.errors["weight"] == pytest.approx(errors[2])
    assert made.model.layout is made.layouts["weight"]
    assert made.model.layout.nnz == wanda.layout.nnz
    assert type(layer) is nn.Linear
    assert_best(made.model, layer.weight, layer.bias, x, layer(x), 1e-4)


def assert_best(sparse, weight, bias, x, y, damping):
    """No other values on these blocks would have been better: the residual has nothing to do with the inputs kept."""
    kept = sparse.layout.mask().repeat_interleave(sparse.layout.block_shape[0], 0)
    kept = kept.repeat_interleave(sparse.layout.block_shape[1], 1)[: weight.shape[0], : weight.shape[1]]
    fitted = bs.to_dense(sparse.values.detach(), sparse.layout)[: weight.shape[0], : weight.shape[1]]
    middle, residual = x - x.mean(0), sparse(x) - y
    damping *= middle.square().sum(0).sum() / sparse.layout.shape[1]
    gradient = residual.T @ middle + damping * (fitted - weight)
    assert gradient[kept].abs().max() < 1e-8 * (y.T @ middle).abs().max()
    assert (fitted[~kept] == 0).all()
    assert bias is None or residual.mean(0).abs().max() < 1e-10 * y.abs().max()


@torch.no_grad()
def test_layers_compensate_for_earlier_ones():
    model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    x = correlated(100, 20, 5)
    made = bs.sparsity.reconstruct(model, [x], 0.4, 4, skip=model[4])
    assert list(made.errors) == ["0.weight", "2.weight"]
    assert type(made.model[4]) is nn.Linear
    assert_best(made.model[2], model[2].weight, model[2].bias, made.model[:2](x), model[:3](x), 0.01)
    # The same network with dense weights and zeros.
    torch.testing.assert_close(bs.densify(made.model)(x), made.model(x))
    for parameter in made.model.parameters():
        assert parameter.requires_grad
    with torch.enable_grad():
        made.model(x).sum().backward()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 10, 3, padding=1, bias=False), nn.BatchNorm1d(10)
        self.up, self.lstm = nn.ConvTranspose1d(10, 8, 2, stride=2), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(self.up(self.norm(self.conv(x)).relu()).transpose(1, 2))[0])


def test_layers_of_all_kinds():
    model, x = Mixed().double().eval(), randn(12, 6, 9)
    made = bs.sparsity.reconstruct(model, [x], 0.5, 4)
    lstm = ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]
    assert list(made.errors) == ["conv.weight", "up.weight", *lstm, "head.weight"]
    assert made.by_magnitude == {}
    assert isinstance(made.model.conv, bs.nn.Conv1d)
    assert isinstance(made.model.lstm, bs.nn.LSTM)
    exact = bs.sparsity.reconstruct(model, [x], 1.0, 4)
    torch.testing.assert_close(exact.model(x), model(x))
    assert max(exact.errors.values()) < 1e-20


def test_inputs_of_zeros():
    layer = nn.Linear(16, 8)
    made = bs.sparsity.reconstruct(layer, [torch.zeros(4, 16)], 0.5, 4)
    assert made.errors == {"weight": 0.0}
    dense = bs.to_dense(made.model.values.detach(), made.model.layout)
    kept = made.model.layout.mask().repeat_interleave(4, 0).repeat_interleave(4, 1)
    torch.testing.assert_close(dense, layer.weight.detach() * kept)


def test_dependent_inputs_leave_no_row_without_blocks():
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(100, 4) @ torch.randn(4, 32)  # one block of a row can represent all inputs
        made = bs.sparsity.reconstruct(nn.Linear(32, 16), [x], 0.5, 8)
        assert made.errors["weight"] < 1e-4, seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    layer, x = nn.Linear(32, 16, dtype=dtype), correlated(100, 32, 4)
    made = bs.sparsity.reconstruct(layer, [x.to(dtype)], 0.5, 8)
    judge = bs.sparsity.reconstruct(nn.Linear(32, 16).double().requires_grad_(False), [x], 0.5, 8)
    assert made.model.values.dtype == dtype
    assert made.errors["weight"] < 0.01
    assert judge.errors["weight"] < 0.01


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@torch.no_grad()
def test_values_of_attention_keep_blocks():
    torch.manual_seed(0)
    model = SelfAttention().eval()
    model.attention.in_proj_weight[128:] *= 1e-3
    made = bs.sparsity.reconstruct(model, [torch.randn(64, 8, 64)], 0.25, 8)
    assert made.layouts["attention.in_proj_weight"].mask()[16:].sum() == 8, "half of a third of 48"


@torch.no_grad()
def test_rounding_errors_of_constant_inputs_are_not_fitted():
    torch.manual_seed(0)
    model = SelfAttention().eval()
    model.attention.in_proj_weight[128:] *= 0.1  # so small that they get none of the 5 blocks
    model.attention.in_proj_bias[128:] = 1
    made = bs.sparsity.reconstruct(model, [torch.randn(64, 8, 64)], 0.026, 8)
    assert not made.layouts["attention.in_proj_weight"].mask()[16:].any()
    assert made.model.attention.out_proj.values.abs().max() < 1


def test_moments_are_those_of_all_values_of_enough_calls():
    moments, calls = Moments(), [torch.randn(count, 3, 20, 10) + count for count in (80, 90, 100, 50)]
    for x in calls:
        moments.add((x,))
    values = torch.cat(calls[:3]).double().transpose(0, 1).flatten(1)  # 270 samples, 54,000 values of each channel
    torch.testing.assert_close(moments.result(), torch.var_mean(values, 1, correction=0)[::-1])


def test_no_more_batches_are_run_than_give_enough_rows():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 10 * 10, 16))
    batches, calls = list(torch.randn(8, 40, 3, 12, 12)), []
    found = products_of(model, {weight.name: weight for weight in prunable(model, 1)})
    passes = Passes(model, batches, found, {})
    model[0].register_forward_pre_hook(lambda module, args: calls.append(module))
    x, counts = passes.rows(model, found["0"][0], "0")
    assert (tuple(x.shape), counts, len(calls)) == ((10_000, 27), [4000] * 7, 7)  # 256 samples need seven batches
    assert passes.rows(model, found["2"][0], "2")[1] == [40] * 8


def test_the_dense_model_runs_once_for_the_targets_of_many_layers(monkeypatch):
    class Counted(nn.Identity):
        def forward(self, x):
            calls.append(self)
            return x

    torch.manual_seed(0)
    model = nn.Sequential(Counted(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16))
    x, calls, made, runs = torch.randn(300, 32), [], [], []
    for size in (2**28, 1):  # all layers in a run, or each in its own
        monkeypatch.setattr(targets, "MAX_BYTES", size)
        calls.clear()
        made.append(bs.sparsity.reconstruct(model, [x], 0.5, 16))
        runs.append(sum(module is model[0] for module in calls))
    assert runs == [2, 4]  # the first one counts rows
    assert made[0].errors == made[1].errors
    torch.testing.assert_close(made[0].model(x), made[1].model(x), rtol=0, atol=0)


class Routed(nn.Module):
    """Two experts that are called with the rows a router sends them, if there are any."""

    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(32, 64), nn.Linear(64, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, x):
        h = torch.tanh(self.first(x))
        y, chosen = h.new_zeros(len(x), 32), self.router(h).argmax(-1)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                y[chosen == number] = expert(h[chosen == number])
        return y


def test_experts_that_get_other_rows_in_the_pruned_model_are_fitted():
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(64, 32)
    made = bs.sparsity.reconstruct(model, x.split(8), 0.5, 8, jointly=True)
    assert made.model(x).isfinite().all()


def test_features_stay_where_an_example_does_not_use_all_weights():
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(256, 32)
    with torch.no_grad():
        chosen = model.router(torch.tanh(model.first(x))).argmax(-1)
    with pytest.raises(bs.BlockSparseError, match=r"^example: expected inputs for which the model uses all weights"):
        bs.sparsity.permute_features(model, x[chosen == 0][:16], 0.5, 8)
    bs.sparsify(model, 0.5, 8, data=x[chosen.argsort()].split(16), force=True, skip="router")


def test_a_batch_norm_before_a_layer_with_large_targets(monkeypatch):
    monkeypatch.setattr(targets, "MAX_BYTES", 1)
    model = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 16))
    assert set(bs.sparsity.reconstruct(model, [torch.randn(300, 32)], 0.5, 16).errors) == {"1.weight", "3.weight"}


def test_models_that_change_their_inputs_leave_the_data_as_they_are():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x.sub_(1))

    x = torch.randn(300, 32)
    before = x.clone()
    bs.sparsity.reconstruct(nn.Sequential(Shifted(32, 32), nn.Linear(32, 32)), [x], 0.5, 16)
    assert torch.equal(x, before)


def test_models_that_are_not_compiled_do_not_load_the_compiler():
    program = """
import sys, torch, blocksparse as bs
model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)), torch.randn(64, 64)
bs.sparsity.reconstruct(bs.sparsity.permute_features(model, x, 0.5), [x], 0.5)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_fitting_whole_sequences_improves_a_recurrent_layer(monkeypatch):
    torch.manual_seed(0)
    lstm = nn.LSTM(32, 64, batch_first=True).requires_grad_(False)
    lstm.weight_hh_l0.mul_(4)  # errors of states grow over steps
    x, new = torch.randn(16, 60, 32), torch.randn(16, 60, 32)

    def error() -> float:
        made = bs.sparsity.reconstruct(lstm, [x], 0.5, 8)
        return float((made.model(new)[0] - lstm(new)[0]).square().mean())

    fitted = error()
    monkeypatch.setattr(sequences, "STEPS", 1)
    assert fitted < 0.9 * error()


def test_an_empty_batch_leaves_the_statistics_of_a_batch_norm_finite():
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).eval()
    x = torch.randn(64, 8)
    made = bs.sparsify(model, 0.5, 8, data=[torch.zeros(0, 8), x], force=True)
    assert made(x).isfinite().all()
