"""`shrink`: equal outputs of smaller models, and the reasons for units that stay."""

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import blocksparse as bs

ACTIVATIONS = [nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Identity, lambda: nn.LeakyReLU(inplace=True)]
BOTH = pytest.mark.parametrize("traced", ["example", "found"])


def prune_units(model, seed=0, share=0.4):
    """Set rows, columns and a few gains of a model's layers to 0, and its statistics to random values."""
    draw = torch.Generator().manual_seed(seed)

    def some(size):
        return torch.rand(size, generator=draw) < share

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.running_mean.uniform_(-1, 1, generator=draw)
                module.running_var.uniform_(0.5, 2, generator=draw)
                module.bias.uniform_(-1, 1, generator=draw)
                module.weight[some(module.num_features)] = 0
            elif getattr(module, "weight", None) is not None and module.weight.dim() > 1:
                module.weight[some(len(module.weight))] = 0
                module.weight[:, some(module.weight.shape[1])] = 0
    return model.eval()


def check(model, x, example=True):
    """Shrink a model, compare the outputs in float64, and return the smaller one."""
    before = copy.deepcopy(model.state_dict())
    small = bs.shrink(model, x if example else None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "the model stays"
    with torch.no_grad():
        expected = bs.densify(model).double()(x.double())
        result = copy.deepcopy(small).double()(x.double())
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    return small


class Residual(nn.Module):
    def __init__(self, body, join):
        super().__init__()
        self.body, self.join = body, join

    def forward(self, x):
        return self.join(self.body(x), x)


def random_net(seed):
    """Return a random network and inputs: layers, norms, activations, pools and residual connections."""
    choose = random.Random(seed)
    width, layers = choose.randint(2, 9), []
    is_image = choose.random() < 0.6
    start = width
    for _ in range(choose.randint(2, 5)):
        out, bias = choose.randint(1, 12), choose.random() < 0.7
        norm = choose.random() < 0.4

        def layer(inputs, outputs, bias=bias):
            if not is_image:
                return nn.Linear(inputs, outputs, bias)
            kernel = choose.choice([1, 3])
            return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2 * choose.randint(0, 1), bias=bias)

        layers.append(layer(width, out))
        if norm:
            layers.append((nn.BatchNorm2d if is_image else nn.BatchNorm1d)(out))
        layers.append(choose.choice(ACTIVATIONS)())
        if choose.random() < 0.4:
            same = nn.Linear(out, out) if not is_image else nn.Conv2d(out, out, 3, padding=1)
            body = nn.Sequential(same, choose.choice(ACTIVATIONS[:4])())
            layers.append(Residual(body, choose.choice([torch.add, torch.mul, lambda a, b: a + 2 * b])))
        if is_image and choose.random() < 0.3:
            layers.append(choose.choice([nn.MaxPool2d(2), nn.AvgPool2d(3, 2, padding=1), nn.Dropout2d()]))
        width = out
    if is_image:
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 3)]
    return nn.Sequential(*layers), torch.randn(2, start, *(24, 24) * is_image)


@BOTH
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore:shrink. these layers keep:blocksparse.SparsityWarning")
def test_random_networks_compute_the_same(seed, traced):
    torch.manual_seed(seed)
    model, x = random_net(seed)
    small = check(prune_units(model, seed), x, traced == "example")
    assert sum(p.numel() for p in small.parameters()) <= sum(p.numel() for p in model.parameters()) + 60


@BOTH
def test_a_linear_network_loses_exactly_the_units_without_a_function(traced):
    model = nn.Sequential(
        nn.Linear(33, 40), nn.Sigmoid(), nn.Dropout(), nn.Linear(40, 20, bias=False), nn.Linear(20, 5)
    )
    with torch.no_grad():
        model[0].weight[:7] = 0  # constants
        model[3].weight[:, 5:12] = 0  # 5 more that nothing reads
        model[3].weight[:3] = 0
        model[4].weight[:, 2:4] = 0
    small = check(model.eval(), torch.randn(4, 33), traced == "example")
    assert [(type(each), each.in_features, each.out_features) for each in (small[0], small[3], small[4])] == [
        (nn.Linear, 33, 28), (nn.Linear, 28, 16), (nn.Linear, 16, 5)
    ]  # fmt: skip
    assert small[0].weight.shape == (28, 33)
    assert small[3].bias is not None, "for the constants"
    assert torch.equal(check(small, torch.randn(4, 33))[0].weight, small[0].weight), "nothing is left to remove"


def test_block_sparse_layers_become_small_dense_ones():
    mask = torch.rand(8, 8) < 0.4
    mask[2:5] = False
    layout = bs.BlockLayout(mask, block_size=8)
    model = nn.Sequential(bs.nn.Linear(64, 64, layout=layout, activation="gelu"), bs.nn.Linear(64, 10, density=0.9))
    small = check(model.eval(), torch.randn(3, 64))
    assert small[0][0].out_features <= 40
    assert not any("blocksparse" in type(module).__module__ for module in small.modules())


@BOTH
def test_a_chain_of_removals_reaches_the_first_layer(traced):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).eval()
    with torch.no_grad():
        model[3].weight[:, 1:] = 0
        for layer in model[1:3]:
            layer.weight.copy_(torch.eye(6))
    small = check(model, torch.randn(3, 6), traced == "example")
    assert [layer.out_features for layer in small] == [1, 1, 1, 6]


def test_one_unit_stays_if_none_is_needed():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    nn.init.zeros_(model[0].weight)
    small = check(model, torch.randn(2, 4))
    assert small[0].out_features == small[2].in_features == 1
    assert check(small, torch.randn(2, 4))[0].out_features == 1


def test_a_padded_convolution_keeps_constants_other_than_0():
    def net(bias, **padding):
        model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, **padding)).eval()
        with torch.no_grad():
            model[0].weight[2:6] = 0
            model[0].bias.fill_(bias)
        return model

    x = torch.randn(2, 3, 6, 6)
    with pytest.warns(bs.SparsityWarning, match="0: 4 of 8 units: they are constants that 2, padded or") as caught:
        assert check(net(0.5, padding=1), x)[0].out_channels == 8
    assert caught[0].filename == __file__
    assert check(net(-0.5, padding=1), x)[0].out_channels == 4
    assert check(net(0.5, padding="valid"), x)[0].out_channels == 4
    assert check(net(0.5, padding=1, padding_mode="circular"), x)[0].out_channels == 4


class Functions(nn.Module):
    """Functions instead of modules, and an optional argument."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.up = nn.ConvTranspose2d(12, 10, 2, 2)
        self.first, self.second = nn.Linear(10 * 36, 16), nn.Linear(16, 2)

    def forward(self, x, scale=None):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2)
        x = F.avg_pool2d(self.up(x), 2).relu_()
        x = x.view(x.size(0), -1) if scale is None else x.flatten(1) * scale
        return self.second(F.dropout(0.5 * F.silu(self.first(x)), 0.5, self.training))


@BOTH
@pytest.mark.filterwarnings("ignore:shrink. these layers keep:blocksparse.SparsityWarning")
def test_functions_between_the_layers(traced):
    model = prune_units(Functions())
    small = check(model, torch.randn(2, 3, 12, 12), traced == "example")
    assert small.conv.out_channels < 12
    assert small.norm.num_features == small.conv.out_channels
    assert small.up.out_channels < 10
    assert small.first.in_features == 36 * small.up.out_channels
    assert small.first.out_features < 16


@BOTH
def test_tensors_that_are_added_keep_a_unit_that_one_of_them_needs(traced):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.a(x) + self.b(x).relu())

    model = Net().eval()
    with torch.no_grad():
        model.a.weight[:4] = 0
        model.b.weight[2:] = 0
        model.head.weight[:, 5] = 0
    small = check(model, torch.randn(3, 5), traced == "example")
    assert small.a.out_features == small.b.out_features == small.head.in_features == 3


class Joined(nn.Module):
    """Convolutions whose channels are concatenated and scaled by gates."""

    def __init__(self):
        super().__init__()
        self.first, self.down, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 9, 2, 2), nn.Linear(6, 17)
        self.back, self.squeeze, self.last = nn.ConvTranspose2d(9, 9, 2, 2), nn.Linear(17, 6), nn.Conv2d(17, 2, 1)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = torch.cat([x, F.relu(self.back(F.relu(self.down(x))))], 1)
        gates = self.up(F.relu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return self.last(x * gates[:, :, None, None])


class Gated(nn.Module):
    """A gated MLP whose halves come from one layer; or halves with another function each, which need their sizes."""

    def __init__(self, function=None):
        super().__init__()
        self.both, self.function = nn.Linear(5, 24), function
        self.down = nn.Linear(12 if function is None else 24, 4)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        hidden = F.silu(gate) * up if self.function is None else torch.cat([F.silu(gate), self.function(up)], -1)
        return self.down(hidden)


class ChangedThroughView(nn.Sequential):
    """Its constants are not those that its biases say."""

    def forward(self, x):
        hidden = self[0](x)
        hidden.transpose(0, 1).sigmoid_()
        return self[1](hidden)


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 12, 1), nn.BatchNorm2d(12), nn.ReLU6(), nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False),
        nn.BatchNorm2d(12), nn.ReLU6(), nn.Conv2d(12, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 2),
    )  # fmt: skip


@BOTH
@pytest.mark.parametrize(
    ("make", "shape", "most"),
    [
        (depthwise, (2, 3, 8, 8), 0.5),
        (Joined, (2, 3, 8, 8), 0.5),
        (lambda: nn.Sequential(torch.compile(nn.Linear(6, 20), backend="eager"), nn.Linear(20, 4)), (2, 6), 0.5),
        (lambda: nn.DataParallel(nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4))), (2, 6), 0.5),
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=4), nn.Conv2d(8, 2, 1)), (2, 3, 8, 8), 1),
        (Gated, (2, 5), 0.7),
        (lambda: Gated(torch.tanh), (2, 5), 1),
        (lambda: ChangedThroughView(nn.Linear(6, 20), nn.Linear(20, 4)), (2, 6), 1),
    ],
    ids=["depthwise", "joined", "compiled", "parallel", "grouped", "gated", "chunks", "changed"],
)
@pytest.mark.filterwarnings("ignore:shrink. these layers keep:blocksparse.SparsityWarning")
def test_architectures_compute_the_same(make, shape, most, traced):
    model = prune_units(make())
    small = check(model, torch.randn(shape), traced == "example")
    assert sum(p.numel() for p in small.parameters()) <= most * sum(p.numel() for p in model.parameters())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.shared(self.shared(self.first(x))))


class Attention(nn.Module):
    def __init__(self, heads=4, count=-1, mask=None, bias=True):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(16, 4 * heads, bias) for _ in range(3))
        self.out = nn.Linear(4 * heads, 16)
        self.count, self.mask = count, mask

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:2], self.count, 4).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        y = F.scaled_dot_product_attention(q, k, v, self.mask)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


@torch.no_grad()
def test_attention_loses_heads_that_are_not_read_or_constant():
    model = Attention().eval()
    model.out.weight[:, 4:8] = 0
    model.values.weight[12:] = 0  # their values are the bias
    small = check(model, torch.randn(2, 5, 16))
    assert [each.out_features for each in (small.queries, small.keys, small.values)] == [8, 8, 8]
    assert small.out.in_features == 8
    torch.testing.assert_close(small.queries.weight, model.queries.weight[[0, 1, 2, 3, 8, 9, 10, 11]])


@torch.no_grad()
def test_one_head_stays_if_none_is_read():
    model = Attention().eval()
    model.out.weight.zero_()
    with pytest.warns(bs.SparsityWarning, match="whole heads only"):
        assert check(model, torch.randn(2, 5, 16)).values.out_features == 4


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Attention(count=4), "depends on their number"),
        (Attention(mask=torch.zeros(4, 5, 5)), "a mask for each head"),
        (nn.MultiheadAttention(16, 4, batch_first=True), r"\(MultiheadAttention\) reads them"),
    ],
    ids=["fixed-number", "mask", "torch"],
)
@torch.no_grad()
def test_heads_that_must_stay_are_named(model, reason):
    model.eval()
    (model.out_proj if isinstance(model, nn.MultiheadAttention) else model.out).weight[:, 4:8] = 0
    x = torch.randn(2, 5, 16)
    with pytest.warns(bs.SparsityWarning, match=reason):
        small = bs.shrink(model, (x, x, x) if isinstance(model, nn.MultiheadAttention) else x)
    assert sum(each.numel() for each in small.parameters()) == sum(each.numel() for each in model.parameters())


class FreeSize(Attention):
    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.queries, self.keys, self.values))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Scaled(Attention):
    def forward(self, x):
        return super().forward(x) / self.values(x).shape[-1]


class NotTransposed(Attention):  # heads are tokens
    def forward(self, x):
        q, k, v = (layer(x).view(*x.shape[:2], -1, 4) for layer in (self.queries, self.keys, self.values))
        return self.out(F.scaled_dot_product_attention(q, k, v).reshape(*x.shape[:2], -1))


@pytest.mark.filterwarnings("ignore:shrink")
@pytest.mark.parametrize("kind", [FreeSize, Scaled, NotTransposed])
@torch.no_grad()
def test_models_that_depend_on_the_number_of_heads_keep_them(kind):
    model = kind().eval()
    model.out.weight[:, 4:8] = 0
    assert check(model, torch.randn(2, 4, 16)).out.in_features == 16


@torch.no_grad()
def test_a_model_with_an_unused_layer_loses_heads():
    model = Attention().eval()
    model.unused = nn.Linear(3, 3)  # so that a call in training mode is followed too
    model.out.weight[:, 4:8] = 0
    assert check(model, torch.randn(2, 5, 16)).out.in_features == 12


@torch.no_grad()
def test_the_dtype_of_another_tensor_does_not_connect_features():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 2)

        def forward(self, x):
            hidden = self.a(x).relu()
            return self.b(hidden) * torch.ones(3).to(hidden).sum()

    model = Net().eval()
    model.a.weight[:7] = 0
    assert check(model, torch.randn(2, 4)).a.out_features == 9


@pytest.mark.filterwarnings("ignore:shrink")
@torch.no_grad()
def test_half_a_head_stays():
    model = Attention().eval()
    model.out.weight[:, 4:6] = 0
    assert check(model, torch.randn(2, 5, 16)).out.in_features == 16


@torch.no_grad()
def test_heads_of_a_mask_that_hides_all_tokens_stay_unless_they_are_0():
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    model = Attention(mask=mask).eval()
    model.values.weight[:8] = 0
    model.values.bias[:4] = 0
    with pytest.warns(bs.SparsityWarning, match="whole heads only"):
        assert check(model, torch.randn(2, 5, 16)).out.in_features == 12


@pytest.mark.parametrize("kind", ["bert", "vit", "llama"])
@torch.no_grad()
def test_models_of_transformers_lose_heads(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    tokens = torch.randint(50, (2, 7))
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))
        inputs, name = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, "attention.output.dense"
        inputs["attention_mask"][0, 4:] = 0
    elif kind == "vit":
        model = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **sizes))
        inputs, name = {"pixel_values": torch.randn(2, 3, 32, 32)}, "o_proj"
    else:  # two heads of queries share keys and values
        config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
        model, inputs, name = transformers.LlamaModel(config), {"input_ids": tokens, "use_cache": False}, "o_proj"
    layers = [module for each, module in model.eval().named_modules() if each.endswith(name)]
    assert len(layers) == 2
    for layer in layers:
        layer.weight[:, :16] = 0
    small = bs.shrink(model, inputs)
    read = [module.in_features for each, module in small.named_modules() if each.endswith(name)]
    assert read == [16, 16]
    torch.testing.assert_close(small(**inputs)[0], model(**inputs)[0], atol=1e-5, rtol=1e-5)


def with_tied_weights():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))
    model[1].weight = model[0].weight
    return model


def with_a_mask():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    prune.ln_structured(model[0], "weight", 0.5, 2, 0)
    return model


def with_a_hook():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    return model


class Reader(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + self[0].weight.sum()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Twice, "shared: 2 of 5 units: the model calls it several times"),
        (with_tied_weights, "it shares a parameter with"),
        (with_a_mask, "remove the parametrization first"),
        (with_a_hook, "it has forward hooks"),
        (lambda: Reader(nn.Linear(5, 5), nn.Linear(5, 2)), "also calls sum on its weight"),
        (lambda: nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 2)), r"1 \(LayerNorm\) reads them"),
        (lambda: nn.Sequential(nn.Linear(5, 5), nn.Softmax(-1), nn.Linear(5, 2)), r"1 \(Softmax\) reads them"),
    ],
    ids=["twice", "tied", "mask", "hook", "read", "layer-norm", "softmax"],
)
@BOTH
def test_units_that_others_use_stay_and_are_named(make, reason, traced):
    model, x = make().eval(), torch.randn(3, 5)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight[1:3] = 0
                module.weight[:, 1:3] = 0
    size = sum(p.numel() for p in model.parameters())
    with pytest.warns(bs.SparsityWarning, match=reason):
        small = bs.shrink(model, x if traced == "example" else None)
    assert sum(p.numel() for p in small.parameters()) == size
    torch.testing.assert_close(small(x), model(x))


def test_control_flow_needs_an_example():
    class Flow(nn.Sequential):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model = Flow(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    nn.init.zeros_(model[0].weight[:5])
    with pytest.raises(bs.BlockSparseError, match=r"no inputs were found that it accepts .*: pass example="):
        bs.shrink(model)
    assert check(model, torch.randn(3, 5))[0].out_features == 3


@pytest.mark.parametrize(
    "example",
    [torch.randn(2, 5), (torch.randn(2, 5),), [torch.randn(2, 5)], {"x": torch.randn(2, 5)}],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_forms_of_examples(example):
    class Net(Residual):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 5)), torch.add)

        def forward(self, x):
            return super().forward(x)

    model = Net().eval()
    nn.init.zeros_(model.body[0].weight[:4])
    assert bs.shrink(model, example).body[0].out_features == 5


def test_a_transformer_layer_loses_hidden_units():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.linear1.weight[:20] = 0
    small = check(model, torch.randn(2, 5, 16))
    assert [layer.linear2.in_features for layer in small.layers] == [12, 12]
    assert small.layers[0].self_attn.embed_dim == 16


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_models_of_transformers_lose_hidden_units(kind):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "bert":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
        layers = [(each.intermediate.dense, each.output.dense) for each in model.encoder.layer]
    else:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, **sizes)).eval()
        layers = [(each.mlp.c_fc, each.mlp.c_proj) for each in model.transformer.h]
    with torch.no_grad():
        for first, second in layers:
            (first.weight[:, :20] if kind == "gpt2" else first.weight[:20]).zero_()
            (second.weight[30:40] if kind == "gpt2" else second.weight[:, 30:40]).zero_()
            first.bias.uniform_()
    tokens = torch.randint(50, (2, 7))
    result = bs.shrink(model, {"input_ids": tokens})
    torch.testing.assert_close(result(tokens)[0], model(tokens)[0], atol=1e-5, rtol=1e-5)
    hidden = [
        module.bias.numel() for name, module in result.named_modules() if name.endswith(("c_fc", "mediate.dense"))
    ]
    assert hidden == ([98, 98] if kind == "gpt2" else [34, 34])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_stay(dtype):
    model = prune_units(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).to(dtype))
    small = bs.shrink(model, torch.randn(3, 16, dtype=dtype))
    assert {each.dtype for each in small.parameters()} == {dtype}
    assert small[0].out_features < 24


def test_inference_mode_changes_nothing():
    model, x = prune_units(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))), torch.randn(3, 16)
    with torch.inference_mode():
        small = bs.shrink(model, torch.randn(3, 16))
    assert small[0].out_features == bs.shrink(model, x)[0].out_features < 24
    small(x).sum().backward()


def test_modes_and_frozen_weights_stay():
    model = prune_units(nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2)))
    model.train()
    model[0].eval().requires_grad_(False)
    small = bs.shrink(model, torch.randn(4, 6))
    assert [small.training, small[0].training, small[1].training] == [True, False, True]
    assert [each.requires_grad for each in small.parameters()] == [False, False, True, True, True, True]
    small(torch.randn(4, 6)).sum().backward()


def test_a_full_model_stays_as_it_is():
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)).eval()
    with warnings.catch_warnings(action="error"):
        small = bs.shrink(model, torch.randn(0, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), small.parameters(), strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bs.shrink("net"), "model: expected a torch.nn.Module, got str"),
        (lambda: bs.shrink(nn.Linear(4, 4), torch.randn(2, 5)), "example: expected inputs that the model accepts"),
        (lambda: bs.shrink(nn.LazyLinear(3), torch.randn(2, 5)), "not initialized yet: call the model once first"),
        (lambda: bs.shrink(bs.quantize(bs.nn.Linear(16, 16, density=0.5, block_size=8))), "8 bits cannot be shrunk"),
    ],
    ids=["no-module", "size", "lazy", "8-bits"],
)
def test_bad_arguments(call, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        call()


def test_outputs_that_would_differ_are_refused():
    class Sized(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x)) * self[0].weight.shape[0]

    model = prune_units(Sized(nn.Linear(6, 30), nn.Linear(30, 2)))
    with pytest.raises(bs.BlockSparseError, match="equal outputs on the example"):
        bs.shrink(model, torch.randn(3, 6))


def test_looking_for_inputs_leaves_the_random_state_alone():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    state = torch.get_rng_state()
    bs.shrink(model)
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_that_fails_without_a_message():
    class Asserts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, y, z, v):
            assert x.dim() == 7
            return self.layer(x)

    with pytest.raises(bs.BlockSparseError, match=r"no inputs were found .*AssertionError.*pass example="):
        bs.shrink(nn.Sequential(*(nn.Linear(8 + i, 8 + i) for i in range(20)), Asserts())[-1])
