"""Groups of features of a model: who computes and reads them, and that their order does not change the outputs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blocksparse as bs
from blocksparse.surgery.connections import find_features


class Residual(nn.Module):
    """Convolutions with a residual connection and a gate per channel."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.inner, self.norm = nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.outer, self.head = nn.Conv2d(6, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x + self.outer(torch.relu(self.norm(self.inner(x))))
        return self.head((x * torch.sigmoid(x.mean((2, 3), keepdim=True))).mean((2, 3)))


class Attention(nn.Module):
    """Attention with one projection for queries, keys and values, and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Functional(nn.Module):
    """An MLP with a function between its layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 6), nn.Linear(6, 2), function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


class Viewed(nn.Module):
    """A flattening by `view`."""

    def forward(self, x):
        return x.view(len(x), -1)


class Auxiliary(Functional):
    """An MLP with a second head that is called in training only, as in GoogLeNet."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(6))
        self.auxiliary = nn.Linear(6, 2)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(self.function(hidden)), self.auxiliary(hidden) if self.training else None


def chunks(*functions):
    """Return a function that applies one function to each half of the features."""
    return lambda x: torch.cat([f(half) for f, half in zip(functions, x.chunk(2, -1), strict=True)], -1)


def write(x):
    x[:, :3] = 0
    return x


def write_view(x):
    x[:, :3].relu_()
    return x


def copy_through_view(x):
    copied = torch.zeros(4, 6)
    copied.view(-1, 6).add_(x)
    return x + copied.flip(-1)


def scripted(x):
    return x + torch.jit.script(flipped)(x)


def flipped(x):
    return x.flip(-1)


def convolutions():
    features = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, padding=1)]
    return nn.Sequential(*features, nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(), nn.Linear(100, 12), nn.Tanh(),
                         nn.LayerNorm(12), nn.Linear(12, 3))  # fmt: skip


CASES = {
    "mlp": (lambda: Functional(nn.GELU()), (4, 8), ["6: first > second"]),
    "convolutions": (convolutions, (2, 3, 16, 16), ["8: 0 > 4", "4: 4 > 7", "12: 7 > 10"]),
    "residual": (Residual, (2, 3, 8, 8), ["8: first outer > inner head", "6: inner > outer"]),
    "attention": (Attention, (2, 5, 8), ["8: qkv > ", "8: qkv > out", "16: gate up > down"]),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        (2, 5, 32),
        ["32: self_attn > ", "32: self_attn > self_attn.out_proj", "64: linear1 > linear2"],
    ),
    "padded": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConstantPad2d(1, 0.5), nn.Conv2d(8, 4, 3)),
        (2, 3, 8, 8),
        ["8: 0 > 2"],
    ),
    "padded channels": (lambda: Functional(lambda x: F.pad(x, (1, 1))[:, :6]), (4, 8), []),
    "softmax": (lambda: Functional(nn.Softmax(-1)), (4, 8), []),
    "unequal": (lambda: Functional(lambda x: x * torch.arange(6.0)), (4, 8), []),
    "cumulative": (lambda: Functional(lambda x: x.cumsum(-1)), (4, 8), []),
    "scaled": (lambda: Functional(lambda x: x * x.new_ones(4, 1)), (4, 8), ["6: first > second"]),
    "halves": (lambda: Functional(chunks(F.relu, torch.sigmoid)), (4, 8), ["3: first > second"] * 2),
    "written": (lambda: Functional(write), (4, 8), []),
    "written in place": (lambda: Functional(write_view), (4, 8), ["3: first > second"] * 2),
    "copied": (lambda: Functional(copy_through_view), (4, 8), []),
    "scripted": (lambda: Functional(scripted), (4, 8), []),
    "shifted": (lambda: Functional(lambda x: F.pad(x, (1, -1))), (4, 8), []),
    "pooled": (lambda: Functional(lambda x: F.max_pool1d(x, 3, 1, 1)), (4, 8), []),
    "means": (lambda: Functional(lambda x: F.adaptive_avg_pool1d(x[:, None], 2)[:, 0].repeat(1, 3)), (4, 8), []),
    "view": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Viewed(), nn.Linear(32, 4)),
        (2, 3, 4, 4),
        ["8: 0 > 2"],
    ),
    "compiled": (
        lambda: nn.Sequential(torch.compile(nn.Linear(8, 6), backend="eager"), nn.ReLU(), nn.Linear(6, 2)),
        (4, 8),
        ["6: 0._orig_mod > 2"],
    ),
    "block-sparse": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), bs.nn.Linear(64, 64, density=0.5), nn.Linear(64, 8)),
        (4, 64),
        ["64: 0 > 2", "64: 2 > 3"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_groups_and_equal_outputs_in_any_order(name):
    build, shape, expected = CASES[name]
    model, x = build().eval(), torch.randn(shape)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d | nn.LayerNorm):
            for tensor in norm.state_dict().values():
                if tensor.is_floating_point():
                    tensor.uniform_(0.5, 2)
    groups = find_features(model, x)
    listed = [
        f"{group.size}: {' '.join(port.name for port in group.producers)} > "
        f"{' '.join(port.name for port in group.consumers)}"
        for group in groups
    ]
    assert listed == expected
    if name == "block-sparse":  # its values cannot be permuted
        return
    with torch.no_grad():
        before = model(x)
        for group in groups:
            order = np.arange(group.size)
            for section in np.unique(group.sections):
                members = np.flatnonzero(group.sections == section)
                order[members] = np.random.default_rng(0).permutation(members)
            group.permute(order)
        torch.testing.assert_close(model(x), before)


def test_features_that_leave_the_model_or_meet_a_weight_again_belong_to_no_group():
    class Leaks(Functional):
        def forward(self, x):
            hidden = self.first(x)
            return self.second(hidden), {"hidden": hidden}

    class ReadsWeight(Functional):
        def forward(self, x):
            return super().forward(x) + self.first.weight.sum()

    assert find_features(Leaks(None), torch.randn(4, 8)) == []
    assert find_features(ReadsWeight(nn.ReLU()), torch.randn(4, 8)) == []


def test_heads_of_training_read_the_same_features():
    model, x = Auxiliary(), torch.randn(4, 8)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    (group,) = find_features(model, x)
    assert [port.name for port in group.consumers] == ["second", "auxiliary"]
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
