"""The arguments and inputs that modules refuse, and the messages of the errors."""

import math

import numpy as np
import pytest
import torch

import blocksparse as bs
from blocksparse.patterns import dense

LAYOUT = bs.BlockLayout([[True, True]], block_size=16)
# Valid arguments, which each case changes.
VALID = {
    bs.nn.Linear: {"in_features": 32, "out_features": 16},
    bs.nn.Conv2d: {"in_channels": 32, "out_channels": 16, "kernel_size": 3},
    bs.nn.LSTM: {"input_size": 8, "hidden_size": 16},
    bs.nn.GRU: {"input_size": 8, "hidden_size": 16},
    bs.nn.RNN: {"input_size": 8, "hidden_size": 16},
    bs.nn.SmallWorldLSTM: {"input_size": 8, "hidden_size": 16},
    bs.nn.MultiheadAttention: {"embed_dim": 16, "num_heads": 2},
    bs.nn.Experts: {"num_experts": 2, "hidden_dim": 8, "intermediate_dim": 8},
}
ARGUMENTS = [
    (bs.nn.Linear, {"in_features": 0}, "in_features: expected an int, 1 or more, got 0"),
    (bs.nn.Linear, {"out_features": -3}, "out_features: expected an int, 1 or more, got -3"),
    (bs.nn.Linear, {"out_features": 2.0}, "out_features: expected an int, 1 or more"),
    (bs.nn.Linear, {"in_features": True}, "in_features: expected an int, 1 or more, got True"),
    (bs.nn.Linear, {"in_features": 10**30}, "in_features: expected an int, 1 or more and below 2"),
    (bs.nn.Linear, {"block_size": 10**30}, "block_size: expected fewer than 2"),
    (bs.nn.Linear, {"activation": ["relu"]}, "activation: expected one of"),
    (bs.nn.Linear, {"activation": "tanh"}, "activation: expected one of"),
    (bs.nn.Linear, {"block_size": 0}, "block_size: expected"),
    (bs.nn.Linear, {"block_size": (16, 16, 16)}, "block_size: expected"),
    (bs.nn.Linear, {"density": -0.1}, "density: expected"),
    (bs.nn.Linear, {"density": 1.5}, "density: expected"),
    (bs.nn.Linear, {"density": math.nan}, "density: expected"),
    (bs.nn.Linear, {"layout": LAYOUT, "density": 0.5}, "density: expected None if a layout is given"),
    (bs.nn.Linear, {"layout": LAYOUT.T}, r"layout: expected shape \(16, 32\)"),
    (bs.nn.Linear, {"layout": LAYOUT.mask()}, "layout: expected a BlockLayout, got Tensor"),
    (bs.nn.Conv2d, {"in_channels": 0}, "in_channels: expected an int, 1 or more, got 0"),
    (bs.nn.Conv2d, {"kernel_size": 0}, "kernel_size: expected an int, 1 or more"),
    (bs.nn.Conv2d, {"kernel_size": (3, 3, 3)}, "kernel_size: expected"),
    (bs.nn.Conv2d, {"stride": 0}, "stride: expected"),
    (bs.nn.Conv2d, {"padding": -1}, "padding: expected an int, 0 or more"),
    (bs.nn.Conv2d, {"padding": "full"}, "padding: expected"),
    (bs.nn.Conv2d, {"padding": "same", "stride": 2}, 'stride: expected 1 for each axis with padding "same"'),
    (bs.nn.Conv2d, {"padding_mode": "mirror"}, "padding_mode: expected one of zeros"),
    (bs.nn.Conv2d, {"activation": "tanh"}, "activation: expected one of"),
    (bs.nn.Conv2d, {"layout": dense((16, 16), 8)}, r"layout: expected shape \(16, 32\) for \(16, 32\) channels"),
    (bs.nn.Conv2d, {"density": 2}, "density: expected"),
    (bs.nn.LSTM, {"hidden_size": 0}, "hidden_size: expected an int, 1 or more"),
    (bs.nn.LSTM, {"proj_size": 16}, "proj_size: expected an int, 0 or more and below hidden_size, 16"),
    (bs.nn.LSTM, {"dropout": 2}, "dropout: expected a number from 0 to 1"),
    (bs.nn.LSTM, {"density": 0.5, "layout": dense((16, 16), 8)}, "density: expected None if a layout is given"),
    (
        bs.nn.LSTM,
        {"layout": dense((32, 32), 8)},
        r"layout of weight_hh_l0: expected shape \[16, 16\] or \[64, 16\]",
    ),
    (bs.nn.GRU, {"layout": dense((64, 16), 8)}, "weight_hh_l0"),
    (bs.nn.RNN, {"nonlinearity": "gelu"}, "nonlinearity"),
    (bs.nn.SmallWorldLSTM, {"depth": 1}, "depth: expected an int, 2 or more"),
    (bs.nn.SmallWorldLSTM, {"stride": 16}, "of the stride, 16, and more than it, got 16"),
    (bs.nn.SmallWorldLSTM, {"stride": 3}, "of the stride, 3, and more than it, got 16"),
    (bs.nn.SmallWorldLSTM, {"stride": 32}, "of the stride, 32, and more than it, got 16"),
    (bs.nn.SmallWorldLSTM, {"stride": 0}, "stride: expected an int, 1 or more, got 0"),
    (
        bs.nn.SmallWorldLSTM,
        {"hidden_size": 15, "density": 0.5, "block_size": 8},
        "hidden_size: expected a multiple of the block",
    ),
    (
        bs.nn.SmallWorldLSTM,
        {"input_size": 16, "stride": 4, "density": 0.5, "block_size": 8},
        "layout of weight_input1_l0: expected outputs that are a multiple of its block, such as 8, got 4",
    ),
    (bs.nn.MultiheadAttention, {"embed_dim": 15}, "a multiple of num_heads"),
    (bs.nn.MultiheadAttention, {"num_heads": 0}, "num_heads"),
    (bs.nn.MultiheadAttention, {"dropout": 2}, "dropout"),
    (bs.nn.MultiheadAttention, {"layout": dense((32, 32), 8)}, "in_proj_weight"),
    (bs.nn.MultiheadAttention, {"layout": dense((16, 16), 8), "density": 0.5}, "density"),
    (bs.nn.MultiheadAttention, {"layouts": {"v_proj_weight": dense((16, 16), 8)}}, "layouts"),
    (bs.nn.MultiheadAttention, {"layouts": {"in_proj_weight": 3}}, "layout"),
    (bs.nn.Experts, {"num_experts": 0}, "num_experts"),
    (bs.nn.Experts, {"layouts": {"down_proj": dense((32, 32), 8)}}, "down_proj"),
    (bs.nn.Experts, {"layouts": {"gate": dense((8, 8), 8)}}, "layouts"),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    ARGUMENTS,
    ids=[f"{kind.__name__}-{'-'.join(each)}" for kind, each, _ in ARGUMENTS],
)
def test_arguments(kind, arguments, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        kind(**VALID[kind] | arguments)


def drawn(*shape):
    return torch.randn(shape)


def experts(hidden, index, weights, last=0):
    top_k_index = torch.zeros(index, dtype=torch.tensor(last).dtype)
    top_k_index[-1, -1] = last
    return torch.randn(hidden), top_k_index, torch.rand(weights)


SPARSE = {"density": 0.5, "block_size": 4}
MODULES = {
    "linear": lambda: bs.nn.Linear(48, 64, **SPARSE),
    "padded": lambda: bs.nn.Linear(47, 64, **SPARSE),
    "conv": lambda: bs.nn.Conv2d(31, 16, 3),
    "transposed": lambda: bs.nn.ConvTranspose2d(31, 16, 3),
    "lstm": lambda: bs.nn.LSTM(8, 16),
    "batch first": lambda: bs.nn.LSTM(8, 16, batch_first=True),
    "sparse lstm": lambda: bs.nn.LSTM(8, 64, density=0.5),
    "projected": lambda: bs.nn.LSTM(8, 16, proj_size=4),
    "gru": lambda: bs.nn.GRU(8, 16),
    "gru cell": lambda: bs.nn.GRUCell(8, 16),
    "lstm cell": lambda: bs.nn.LSTMCell(8, 16),
    "attention": lambda: bs.nn.MultiheadAttention(16, 2, **SPARSE),
    "experts": lambda: bs.nn.Experts(2, 8, 8, **SPARSE),
}
x, h, qkv = drawn(3, 2, 8), drawn(1, 2, 16), [drawn(4, 2, 16)] * 3
table = drawn(3, 8)
WIDTH, IMAGES = r"x: expected .*\[..., \d+\].*got ", r"x: expected .*\[n, 31"
NO_EXPERT = "top_k_index: expected numbers from 0 to 1, or 2 for no .* "
INPUTS = [
    *((name, (drawn(5, 46),), {}, WIDTH + r"\[5, 46\]") for name in ("linear", "padded")),
    *((name, (drawn(5, 96),), {}, WIDTH + r"\[5, 96\]") for name in ("linear", "padded")),
    *((name, (drawn(),), {}, WIDTH + r"\[\]") for name in ("linear", "padded")),
    *((name, ([[1.0] * 48],), {}, r"x: expected a .*, got list") for name in ("linear", "padded")),
    ("padded", (drawn(5, 48),), {}, r"x: expected a tensor \[..., 47\], got \[5, 48\]"),
    *(
        (name, (drawn(5, size).to(cast),), {}, f"values: expected the {what} of x, {cast}")
        for name, size in (("linear", 48), ("padded", 47))
        for cast, what in ((torch.float64, "dtype"), ("meta", "device"))
    ),
    *(
        (name, (drawn(*shape).long(),), {}, r"x: expected real numbers: x.to\(torch.float32\), got torch.int64")
        for name, shape in (("linear", (5, 48)), ("padded", (5, 47)), ("conv", (2, 31, 5, 5)))
    ),
    *((name, (drawn(2, 30, 5, 5),), {}, IMAGES) for name in ("conv", "transposed")),
    *((name, (drawn(31, 5),), {}, IMAGES) for name in ("conv", "transposed")),
    *((name, ([[1.0]],), {}, IMAGES) for name in ("conv", "transposed")),
    ("lstm", (drawn(3, 2, 9),), {}, r"input: expected \[steps, batch, 8\], at least one step, got \[3, 2, 9\]"),
    ("batch first", (drawn(2, 0, 8),), {}, r"input: expected \[batch, steps, 8\]"),
    ("lstm", ([1, 2],), {}, "input: expected a tensor or a PackedSequence"),
    ("lstm", (x, (h, drawn(1, 2, 15))), {}, r"the initial c: expected \[1, 2, 16\], got \[1, 2, 15\]"),
    ("lstm", (torch.zeros(3, 2).long(),), {"table": drawn(3, 9)}, r"table: expected \[n, 8\]"),
    ("sparse lstm", (torch.arange(4).view(4, 1),), {"table": table}, "input: expected rows of a table.* 3, got 0 to 3"),
    ("projected", (torch.tensor([[-1], [1]]),), {"table": table}, "input: expected rows of a table.* 3, got -1 to 1"),
    ("lstm", (torch.zeros(3, 2, 8).long(),), {}, "input: expected floating point"),
    ("lstm", (torch.zeros(3, 2),), {"table": table}, "input: expected int64 rows of the table"),
    ("lstm", (torch.zeros(3, 2, dtype=torch.int64),), {"table": [[0.0]]}, "table: expected .*, got list"),
    ("gru", (drawn(3, 2, 7),), {}, "input"),
    ("gru", (x, drawn(1, 3, 16)), {}, "the initial h"),
    ("gru", (x, (h, h)), {}, "hx"),
    ("gru cell", (drawn(2, 2, 8),), {}, "input"),
    ("gru cell", (drawn(2, 8), drawn(16)), {}, "the initial h"),
    ("lstm cell", (drawn(2, 8), drawn(2, 16)), {}, "hx"),
    ("lstm cell", (drawn(2, 8), (drawn(2, 16), drawn(2, 8))), {}, "the initial c"),
    ("attention", (qkv[0][..., :8], *qkv[1:]), {}, "query"),
    ("attention", (qkv[0], qkv[1][:2], qkv[2]), {}, "one batch, and a value for each key"),
    ("attention", (qkv[0], qkv[1][0], qkv[2][0]), {}, "key"),
    ("attention", (None, *qkv[1:]), {}, "query"),
    ("attention", qkv, {"attn_mask": torch.zeros(3, 3)}, "attn_mask"),
    ("attention", qkv, {"attn_mask": torch.zeros(4, 4).long()}, "attn_mask"),
    ("attention", qkv, {"key_padding_mask": torch.zeros(3, 3)}, "key_padding_mask"),
    ("attention", qkv, {"is_causal": True}, "is_causal"),
    ("experts", experts((3, 7), (3, 2), (3, 2)), {}, "hidden_states"),
    ("experts", experts((3, 8), (4, 2), (4, 2)), {}, "top_k_index"),
    ("experts", experts((3, 8), (3, 2), (3, 1)), {}, "top_k_weights"),
    ("experts", experts((3, 8), (3, 2), (3, 2), -1), {}, NO_EXPERT + "-1 to 0"),
    ("experts", experts((3, 8), (3, 2), (3, 2), 3), {}, NO_EXPERT + "0 to 3"),
    ("experts", experts((3, 8), (3, 2), (3, 2), 0.0), {}, "top_k_index: expected integers.*long.*float32"),
    ("experts", experts((3, 8), (3, 2), (3, 2), True), {}, "top_k_index: expected integers.*long.*bool"),
]


@pytest.mark.parametrize(
    ("name", "inputs", "options", "message"), INPUTS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(INPUTS)]
)
def test_inputs(name, inputs, options, message, any_backend):
    with pytest.raises(bs.BlockSparseError, match=message):
        MODULES[name]()(*inputs, **options)


def test_sizes_can_be_numpy_ints():
    layer = bs.nn.Linear(np.int64(47), np.int32(16), block_size=np.int64(16))
    assert repr(layer) == repr(bs.nn.Linear(47, 16, block_size=16))
    assert layer(torch.randn(2, 47)).shape == (2, 16)
