"""Block-sparse multi-head attention: as torch.nn's, alone and inside of PyTorch's layers, with each of its options."""

import warnings

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.nn.module import Weight


@pytest.fixture(autouse=True)
def backend():
    with bs.use_backend("cpu" if bs.backends()["cpu"] else "reference"):
        yield


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_without_layouts_it_is_torchs():
    options = {"add_bias_kv": True, "batch_first": True, "dtype": torch.float64}
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 4, **options)
    ours = bs.nn.MultiheadAttention(24, 4, **options)
    assert [(name, p.shape) for name, p in ours.named_parameters()] == [
        (name, p.shape) for name, p in theirs.named_parameters()
    ]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    close(ours(x, x, x), theirs(x, x, x))


# 12 heads' features are no multiple of the blocks of 8 rows: each projection is padded.
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "fused"])
@pytest.mark.parametrize("masks", ["none", "bool", "float", "heads", "padding", "both", "causal"])
@pytest.mark.parametrize("form", ["self", "cross", "sizes", "values", "unbatched"])
def test_masks_and_forms(form, masks, need_weights):
    torch.manual_seed(0)
    sizes = {"kdim": 20, "vdim": 9} if form == "sizes" else {}
    kv = {"add_bias_kv": True, "add_zero_attn": True} if form in ("cross", "unbatched") else {}
    dense = nn.MultiheadAttention(12, 3, batch_first=form == "cross", **sizes, **kv, dtype=torch.float64)
    sparse = bs.sparsify(dense, 0.6, (8, 4), force=True)
    dense = bs.densify(sparse)
    assert type(dense) is nn.MultiheadAttention
    target, source, batch = (6, 6, 2) if form in ("self", "unbatched") or masks == "causal" else (4, 7, 2)
    lead = (
        (lambda n: (n,)) if form == "unbatched" else (lambda n: (batch, n)) if form == "cross" else lambda n: (n, batch)
    )
    query = torch.randn(*lead(target), 12, dtype=torch.float64)
    key = torch.randn(*lead(source), dense.kdim, dtype=torch.float64)
    value = torch.randn(*lead(source), dense.vdim, dtype=torch.float64)
    if form == "self":
        key = value = query
    elif form == "cross":
        value = key
    options = {"need_weights": need_weights, "average_attn_weights": form != "cross"}
    mask = torch.rand(target, source) < 0.3
    mask[:, 0] = False
    padding = torch.zeros(batch, source, dtype=torch.bool)
    padding[0, -2:] = True
    padding = padding[0] if form == "unbatched" else padding
    if masks in ("bool", "both"):
        options["attn_mask"] = mask
    if masks == "float":
        options["attn_mask"] = torch.randn(target, source, dtype=torch.float64)
    if masks == "heads":
        options["attn_mask"] = mask.expand(3 * (1 if form == "unbatched" else batch), -1, -1).clone()
    if masks in ("padding", "both"):
        options["key_padding_mask"] = padding
    if masks == "causal":
        causal = nn.Transformer.generate_square_subsequent_mask(target, dtype=torch.float64)
        options |= {"attn_mask": causal, "is_causal": not kv}
    inputs = [each.requires_grad_() for each in dict.fromkeys((query, key, value))]
    found, expected = sparse(query, key, value, **options), dense(query, key, value, **options)
    close(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None) == (not need_weights)
    if need_weights:
        close(found[1], expected[1])
    grads = [torch.autograd.grad(y[0].square().sum(), inputs) for y in (found, expected)]
    close(*grads)
    sparse(query, key, value, **options)[0].square().sum().backward()
    assert all(parameter.grad is not None for name, parameter in sparse.named_parameters())


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_do_not_fuse_what_is_sparse_and_say_nothing(norm_first):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors and norm_first
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first, dtype=torch.float64)
        encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    for skip in ([], ["layers.0.linear1", "layers.0.linear2", "layers.1"], ["layers.0.self_attn", "layers.1"]):
        sparse = bs.sparsify(encoder, 0.5, 8, skip=skip, force=True)
        dense = bs.densify(sparse)
        assert isinstance(dense.layers[0].self_attn, nn.MultiheadAttention)
        for options in ({}, {"src_key_padding_mask": padding}):
            with torch.no_grad():
                close(sparse(x, **options), unfused(dense, x, options))


def unfused(model, x, options):
    """The result of PyTorch's own layers without what they fuse in evaluation."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return model(x, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def test_a_layer_with_it_put_in_by_hand_is_right_in_evaluation():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    layer.self_attn = bs.nn.MultiheadAttention(16, 4, batch_first=True, density=0.5, block_size=4)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected.detach())


def test_one_weight_alone_can_become_sparse():
    dense = nn.MultiheadAttention(16, 4)
    only = bs.sparsify(dense, {"out_proj.weight": 0.5}, 8, force=True)
    assert isinstance(only, bs.nn.MultiheadAttention)
    assert isinstance(only.in_proj_weight, nn.Parameter)
    assert isinstance(only.out_proj, bs.nn.Linear)
    both = bs.sparsify(only, {"in_proj_weight": 0.5}, 8, force=True)
    assert isinstance(both.in_proj_weight, Weight)
    x = torch.randn(5, 2, 16)
    back = bs.densify(both)
    torch.testing.assert_close(both(x, x, x), back(x, x, x))
    assert type(back.out_proj) is type(dense.out_proj)
    assert {row.name: row.shape for row in bs.report(both).rows}["in_proj_weight"] == (48, 16)


def test_layouts_by_hand_and_at_random():
    layout = bs.patterns.random((16, 16), 8, density=0.5, seed=0)
    ours = bs.nn.MultiheadAttention(16, 2, layout=layout)
    assert torch.equal(ours.in_proj_weight.layout.mask(), layout.mask().repeat(3, 1))
    assert ours.out_proj.layout == layout
    other = bs.nn.MultiheadAttention(12, 2, kdim=20, density=0.5, block_size=8)
    assert other.q_proj_weight.layout.shape == (16, 16)
    assert other.k_proj_weight.layout.shape == (16, 24)


def test_dropout_only_in_training():
    torch.manual_seed(0)
    ours = bs.nn.MultiheadAttention(16, 2, dropout=0.9, density=0.5, block_size=8)
    x = torch.randn(20, 2, 16)
    for need_weights in (True, False):
        made = [ours(x, x, x, need_weights=need_weights)[0] for _ in range(2)]
        assert not torch.equal(*made)
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_state_of_the_optimizer_follows():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(5, 2, 16)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
    model = bs.sparsify(model, 0.5, 8, force=True, inplace=True, optimizer=optimizer)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()}
    assert optimizer.state[model.self_attn.in_proj_weight.values]["exp_avg"].abs().sum() > 0
    model(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("form", ["self", "keys", "all"])
def test_compiled_in_one_graph(form):
    torch.manual_seed(0)
    ours = bs.nn.MultiheadAttention(12, 2, density=0.5, block_size=8, dtype=torch.float64)
    with torch.no_grad():
        ours.in_proj_bias.normal_()
    x, k = torch.randn(5, 2, 12, dtype=torch.float64), torch.randn(6, 2, 12, dtype=torch.float64)
    given = {"self": (x, x, x), "keys": (x, k, k), "all": (x, k, k.clone())}[form]
    close(torch.compile(ours, backend="eager", fullgraph=True)(*given), ours(*given))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_an_input_of_another_dtype_or_device_is_refused_by_name(name):
    attention = bs.nn.MultiheadAttention(16, 2, density=0.5, block_size=8)
    for other in (torch.float64, "meta"):
        inputs = {each: torch.randn(3, 16) for each in ("query", "key", "value")}
        inputs[name] = inputs[name].to(other)
        expected = f"{name}: expected the dtype and the device of the module, torch.float32 and cpu, got"
        with pytest.raises(bs.BlockSparseError, match=expected):
            attention(**inputs)
