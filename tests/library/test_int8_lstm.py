"""LSTMs in 8 bits: what each product rounds, sequences of all kinds, models of them."""

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import blocksparse as bs
from blocksparse.nn.quantized_lstm import QuantizedWeight
from linear_backends import CPU, assert_close, running

BACKENDS = ["reference", *CPU]
# A state next to the middle between two integers may be rounded to either: of float32, too, the bound is not its own.
DTYPES = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
OPTIONS = {
    "one layer": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "layers and directions": {"num_layers": 2, "bidirectional": True},
    "projection": {"proj_size": 20},
    "reverse projection": {"proj_size": 19, "bidirectional": True, "num_layers": 2},
    "odd blocks": {"block_size": (5, 7)},
    "dense inputs": {"density": None, "layout": bs.patterns.random((80, 80), 16, density=0.4, seed=0)},
    "empty": {"density": 0.0},
}


def lstm(**options):
    return bs.nn.LSTM(50, 70, **({"density": 0.5, "block_size": 16} | options))


def by_hand(lstm, x, h, c):
    """Compute the definition with rounded weights in float64, step by step: y, h, c; all padded away."""
    dense, dtype = lstm.dequantized().double().densified(), x.dtype

    def product(x, name):
        if isinstance(getattr(lstm, name), QuantizedWeight):
            x = x.float()
            largest = x.abs().amax(-1, keepdim=True)
            numbers = (x * torch.where(largest > 0, 127 / largest, 0)).round().double()
            x = numbers * (largest / 127).double()
        return x.double() @ getattr(dense, name).T

    data, finals = x, []
    for layer in range(lstm.num_layers):
        found = []
        for direction in range(lstm.directions):
            suffix, cell = lstm._suffix(layer, direction), len(finals)
            now, state, ys = h[cell].to(dtype), c[cell].double(), []
            for step in reversed(data) if direction else data:
                z = product(step, f"weight_ih{suffix}") + product(now, f"weight_hh{suffix}")
                if lstm.bias:
                    z = z + getattr(dense, f"bias_ih{suffix}") + getattr(dense, f"bias_hh{suffix}")
                i, f, g, o = z.chunk(4, -1)
                state = f.sigmoid() * state + i.sigmoid() * g.tanh()
                now = (o.sigmoid() * state.tanh()).to(dtype)
                now = product(now, f"weight_hr{suffix}").to(dtype) if lstm.proj_size else now
                ys.append(now)
            found.append(torch.stack(ys[::-1] if direction else ys))
            finals.append((now, state))
        data = torch.cat(found, -1)
    return data, *(torch.stack(states) for states in zip(*finals, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_definition(backend, dtype, options):
    small = bs.nn.QuantizedLSTM.of(lstm(**OPTIONS[options])).to(dtype)
    x = torch.randn(4, 3, 50, dtype=dtype)
    cells = small.num_layers * small.directions
    h = torch.randn(cells, 3, small.proj_size or 70, dtype=dtype) / 3
    c = torch.randn(cells, 3, 70, dtype=dtype)
    given = x.transpose(0, 1) if small.batch_first else x
    with running(backend):
        y, (h_n, c_n) = small(given, (h, c))
        assert y.dtype == h_n.dtype == c_n.dtype == dtype
        y = y.transpose(0, 1) if small.batch_first else y
        for mine, expected in zip((y, h_n, c_n), by_hand(small, x, h, c), strict=True):
            assert_close(mine, expected, DTYPES[dtype], options)
        zero = small(given)
        assert_close(zero[0], small(given, (0 * h, 0 * c))[0].double(), 1e-6, "no state")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_equal_single_ones(backend, reverse):
    small = bs.nn.QuantizedLSTM.of(lstm(bidirectional=reverse, proj_size=20))
    sequences = [torch.randn(steps, 50) for steps in (2, 5, 1, 5)]
    with running(backend):
        y, (h, c) = small(pack_sequence(sequences, enforce_sorted=False))
        padded, lengths = pad_packed_sequence(y)
        assert lengths.tolist() == [2, 5, 1, 5]
        for i, sequence in enumerate(sequences):
            alone, (h_i, c_i) = small(sequence)
            # To the bit, but for the number of tokens at once.
            torch.testing.assert_close(padded[: len(sequence), i], alone, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close((h[:, i], c[:, i]), (h_i, c_i), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_table(backend):
    small = bs.nn.QuantizedLSTM.of(lstm())
    table, index = torch.randn(9, 50), torch.randint(9, (5, 3))
    with running(backend):
        torch.testing.assert_close(small(index, table=table)[0], small(table[index])[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_a_sequence_that_is_not_finite_gives_nan_from_then_on(backend):
    small = bs.nn.QuantizedLSTM.of(lstm())
    x = torch.randn(5, 3, 50)
    with running(backend):
        expected, _ = small(x)
        x[2, 1, 7] = torch.nan
        y, _ = small(x)
    assert y[2:, 1].isnan().all()
    assert (y[:2] == expected[:2]).all()
    assert (y[:, ::2] == expected[:, ::2]).all()


def test_accuracy(any_backend):
    net, x = lstm(num_layers=2), torch.randn(6, 4, 50)
    with torch.no_grad():
        y, z = net(x)[0], bs.quantize(net)(x)[0]
    assert (y - z).norm() < 0.03 * y.norm()


# -- modules and models ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(9, 50)
        self.lstm = lstm(**options)
        self.head = bs.nn.Linear(70, 9, density=0.5, block_size=8)
        self.dense = bs.nn.LSTM(9, 9)

    @torch.no_grad()
    def forward(self, index):
        return self.dense(self.head(self.lstm(self.embedding(index))[0]))[0]


def test_a_model_in_8_bits(any_backend):
    net, x = Model(), torch.randint(9, (5, 3))
    small = bs.quantize(net)
    assert type(small.lstm) is bs.nn.QuantizedLSTM
    assert type(small.head) is bs.nn.QuantizedLinear
    assert type(small.dense) is type(net.lstm) is bs.nn.LSTM
    assert not list(small.lstm.parameters())
    assert type(bs.quantize(net, skip="lstm").lstm) is bs.nn.LSTM
    assert type(bs.quantize(net, skip=net.head).head) is bs.nn.Linear
    with torch.no_grad():
        assert (small(x) - net(x)).norm() < 0.05 * net(x).norm()
        dense = bs.densify(small)
        assert type(dense.lstm) is bs.nn.LSTM
        assert type(dense.lstm.weight_hh_l0) is nn.Parameter
        torch.testing.assert_close(dense.lstm.weight_hh_l0.shape, (280, 70))
        assert (small(x) - dense(x)).norm() < 0.05 * dense(x).norm()
    with pytest.raises(bs.BlockSparseError, match=r"to quantize \(Linear, .*LSTM\)"):
        bs.quantize(bs.nn.LSTM(3, 3))
    with pytest.raises(bs.BlockSparseError, match="to quantize"):
        bs.quantize(small)


def test_the_repr_has_the_layouts():
    text = repr(bs.nn.QuantizedLSTM.of(lstm()))
    assert "(weight_hh_l0): QuantizedWeight((320, 80), block_size=(16, 16), nnz=50, density=0.5)" in text


def test_steps_may_be_open_in_a_graph(any_backend):
    small = bs.quantize(lstm())
    steps = torch.export.Dim("steps", min=2, max=99)
    exported = torch.export.export(small, (torch.randn(4, 3, 50),), dynamic_shapes=({0: steps},)).module()
    x = torch.randn(7, 3, 50)
    torch.testing.assert_close(exported(x), small(x), rtol=1e-3, atol=1e-3)


def test_refused_arguments(any_backend):
    small, x = bs.quantize(lstm()), torch.randn(4, 3, 50)
    dense_inputs = bs.quantize(lstm(**OPTIONS["dense inputs"]))
    h = torch.randn(1, 3, 70)
    for wrong, message in (
        (lambda: small(x.double()), "input: expected one of torch.float32"),
        (lambda: dense_inputs(x.double()), "input: expected one of torch.float32"),
        (lambda: small(x[..., 1:]), r"input: expected \[steps, batch, 50\]"),
        (lambda: small(x, (h, h[:, :2])), "the initial c: expected"),
        (lambda: small(x, h), "hx: expected None or two tensors"),
        (lambda: small(x.clone().requires_grad_()), "tensors without gradients"),
        (lambda: small(x, (h.clone().requires_grad_(), h)), "tensors without gradients"),
        (lambda: bs.nn.QuantizedLSTM.of(small), "layer: expected a block-sparse blocksparse.nn.LSTM"),
        (lambda: bs.nn.QuantizedLSTM.of(bs.nn.LSTM(3, 4)), "layer: expected a block-sparse"),
        (lambda: bs.nn.QuantizedLSTM.of(bs.nn.LSTMCell(32, 32, density=0.5)), "layer: expected a block-sparse"),
        (lambda: bs.nn.QuantizedLSTM.of(lstm().double()), "expected a blocksparse.nn.Weight of torch.float32"),
    ):
        with pytest.raises(bs.BlockSparseError, match=message):
            wrong()
