"""`export_onnx` against onnxruntime, at other sizes than those it was traced with."""

import copy
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import blocksparse as bs

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore:.*stores dense weights:blocksparse.SparsityWarning")


class Tagger(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(16, 24, num_layers=2, **options)
        self.head = nn.Linear(48 if options.get("bidirectional") else 24, 8)

    def forward(self, x, hx=None):
        y, last = self.rnn(x, hx)
        return self.head(y), last


def sparse(model, **options):
    return bs.sparsify(model.eval(), 0.5, 8, scope="layer", force=True, **options)


def results(path, *inputs):
    session = onnxruntime.InferenceSession(str(path))
    names = [taken.name for taken in session.get_inputs()]
    return session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))


def check(path, model, *inputs):
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(*inputs))
    found = results(path, *inputs)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(nn.LSTM, {"batch_first": True}, marks=pytest.mark.full),
        (nn.LSTM, {"bidirectional": True, "bias": False}),
        pytest.param(nn.GRU, {"bidirectional": True}, marks=pytest.mark.full),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
    ids=["lstm-batch-first", "lstm-bidirectional-no-bias", "gru", "rnn-relu"],
)
def test_recurrent_layers_of_any_batch_and_time(kind, options, tmp_path):
    model = sparse(Tagger(kind, **options))
    path = bs.export_onnx(model, torch.randn(3, 7, 16), tmp_path / "m.onnx", dynamic_shapes=({0: "a", 1: "b"},))
    for shape in ((3, 7, 16), (2, 5, 16), (1, 1, 16)):
        check(path, model, torch.randn(shape))


def test_a_recurrent_layer_without_a_batch_and_with_states(tmp_path):
    model, state = sparse(Tagger(nn.LSTM)), torch.randn(2, 24)
    path = bs.export_onnx(model, (torch.randn(7, 16), (state, state)), tmp_path / "m.onnx")
    x, h, c = torch.randn(7, 16), torch.randn(2, 24), torch.randn(2, 24)
    expected = torch.utils._pytree.tree_leaves(model(x, (h, c)))
    for ours, theirs in zip(results(path, x, h, c), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=1e-5, rtol=1e-5)


def test_convolutions_and_linear_layers(tmp_path):
    net = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 16, 2, 2),
        nn.Flatten(), nn.Dropout(), nn.Linear(16 * 8 * 8, 24),
    )  # fmt: skip
    model = sparse(net).train()
    before = copy.deepcopy(model.state_dict())
    path = bs.export_onnx(model, torch.randn(2, 16, 4, 4), tmp_path / "m.onnx", dynamic_shapes=({0: "batch"},))
    assert [path.name] == [each.name for each in tmp_path.iterdir()], "one file"
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert isinstance(model[0], bs.nn.Conv2d), "the model stays as it is"
    check(path, model.eval(), torch.randn(5, 16, 4, 4))


def test_keyword_arguments_and_a_fused_activation(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = bs.nn.Linear(20, 12, block_size=8, density=0.5, activation="gelu")

        def forward(self, x, scale):
            return {"y": self.layer(x) * scale}

    model = Net()
    x, scale = torch.randn(3, 20), torch.randn(())
    path = bs.export_onnx(model, {"x": x, "scale": scale}, tmp_path / "m.onnx", output_names=["y"])
    torch.testing.assert_close(torch.from_numpy(results(path, x, scale)[0]), model(x, scale)["y"].detach())


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8)

    def forward(self, x):
        return self.rnn(nn.utils.rnn.pack_sequence([x[0], x[1]]))[0].data


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.LSTM(16, 8, proj_size=4), "an LSTM without proj_size, got 4"),
        (lambda: bs.nn.MultiplicativeLSTM(16, 8), "an LSTM, GRU or RNN for ONNX, got MultiplicativeLSTM"),
        (lambda: "net", "a torch.nn.Module, got str"),
    ],
    ids=["projection", "multiplicative", "no-module"],
)
def test_models_that_cannot_be_exported(model, message, tmp_path):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.export_onnx(model(), torch.randn(2, 3, 16), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_layers_in_8_bits_are_refused(tmp_path):
    small = bs.quantize(nn.Sequential(bs.nn.Linear(16, 32, density=0.5, block_size=8)))
    with pytest.raises(bs.BlockSparseError, match=r"model: layers in 8 bits cannot be exported to ONNX .0."):
        bs.export_onnx(small, torch.randn(2, 16), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_a_packed_sequence_is_refused(tmp_path):
    with pytest.raises(bs.BlockSparseError, match="input: expected a tensor, for ONNX, got PackedSequence"):
        bs.export_onnx(Packed(), torch.randn(2, 5, 8), tmp_path / "m.onnx")


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_the_error_without_the_packages_says_what_to_install(missing, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(bs.BlockSparseError, match=f"ONNX files need {missing}: pip install onnx onnxscript"):
        bs.export_onnx(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx")


def test_a_file_that_computes_something_else_is_found(monkeypatch, tmp_path):
    model = nn.Linear(4, 4)

    class Off(onnxruntime.InferenceSession):
        def run(self, *args):
            return [result + 1 for result in super().run(*args)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Off)
    with pytest.raises(bs.BlockSparseError, match=r"expected the results of the model.*in output 0"):
        bs.export_onnx(model, torch.randn(2, 4), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_disk_names_the_file(tmp_path):
    file = tmp_path / "missing" / "model.onnx"
    with pytest.raises(bs.BlockSparseError, match=r"file: expected a file that can be written, got .*missing"):
        bs.export_onnx(nn.Linear(4, 4), torch.randn(2, 4), file)


@pytest.mark.parametrize("opset", [18, pytest.param(21, marks=pytest.mark.full), None])
def test_the_opset_is_that_of_the_file(opset, tmp_path):
    model, x = sparse(nn.Sequential(nn.Linear(24, 16), nn.ReLU())), torch.randn(3, 24)
    path = bs.export_onnx(model, x, tmp_path / "m.onnx", opset=opset)
    (version,) = [each.version for each in pytest.importorskip("onnx").load(path).opset_import if not each.domain]
    assert version == opset or opset is None
    check(path, model, x)


@pytest.mark.parametrize("opset", [11, 99, 18.0, "18", True])
def test_other_opsets_are_refused(opset, tmp_path):
    with pytest.raises(bs.BlockSparseError, match=r"opset: expected an int from 18 to \d+, or None"):
        bs.export_onnx(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx", opset=opset)
    assert not any(tmp_path.iterdir())


def test_a_warning_says_that_the_file_is_dense_and_how_large(tmp_path):
    model, x = nn.Sequential(bs.nn.Linear(160, 320, density=0.25, block_size=8)), torch.randn(2, 160)
    with pytest.warns(
        bs.SparsityWarning, match=r"m\.onnx stores dense weights.* 0\.20\d MB.*0\.205 MB .*0\.0512 MB"
    ) as said:
        bs.export_onnx(model, x, tmp_path / "m.onnx")
    assert said[0].filename == __file__
    with warnings.catch_warnings(action="error", category=bs.SparsityWarning):
        bs.export_onnx(bs.densify(model), x, tmp_path / "dense.onnx")
        bs.export_onnx(nn.Sequential(bs.nn.Linear(16, 16, block_size=8)), x[:, :16], tmp_path / "full.onnx")


@pytest.mark.filterwarnings("ignore")  # PyTorch's exporters warn of themselves
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_the_export_of_torch_names_ours(kind, dynamo, tmp_path):
    model, x = bs.nn.Linear(24, 40, density=0.5, block_size=8), torch.randn(3, 24)
    if kind == "recurrent":
        model, x = Tagger(partial(bs.nn.LSTM, density=0.5, block_size=8)), torch.randn(3, 2, 16)
    with pytest.raises(Exception, match=r"torch\.onnx\.export: expected blocksparse\.export_onnx\(model, args, file\)"):
        torch.onnx.export(model.eval(), (x,), str(tmp_path / "m.onnx"), dynamo=dynamo)


def kernel(channels, out, **options):
    return bs.nn.Conv2d(channels, out, 1, density=0.4, block_size=8, **options)


def uneven_layout():
    """Return a layout with empty rows, a full row and rows of several lengths."""
    mask = torch.rand(9, 7) < torch.linspace(0, 1, 9).unsqueeze(1)
    mask[0], mask[4], mask[8] = False, False, True
    return bs.BlockLayout(mask, block_size=(8, 16))


GATHERED = {
    "padded": (lambda: bs.nn.Linear(33, 50, density=0.5, block_size=16), (5, 33)),
    "uneven": (lambda: bs.nn.Linear(112, 72, layout=uneven_layout(), bias=False), (5, 112)),
    "empty": (lambda: bs.nn.Linear(32, 16, density=0, block_size=8), (5, 32)),
    "3-D": (lambda: bs.nn.Linear(64, 48, density=0.3, block_size=8, activation="gelu"), (5, 3, 64)),
    "1x1": (lambda: kernel(32, 24), (5, 32, 6, 4)),
    "1x1-no-bias": (lambda: kernel(20, 12, bias=False), (5, 20, 3, 2)),
}


@pytest.mark.filterwarnings("error:.*:blocksparse.SparsityWarning")
@pytest.mark.parametrize("kind", GATHERED)
def test_gathers_compute_the_same_for_any_batch(kind, tmp_path):
    make, shape = GATHERED[kind]
    model, batch = nn.Sequential(make(), nn.ReLU()), ({0: "batch"},)
    path = bs.export_onnx(model, torch.randn(shape), tmp_path / "m.onnx", dynamic_shapes=batch, sparse="gather")
    assert type(model[0]).__module__.startswith("blocksparse.nn"), "the model stays as it is"
    for tokens in (5, 1, 0, 40):
        check(path, model, torch.randn(tokens, *shape[1:]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gathers_of_other_dtypes(dtype, tmp_path):
    model = nn.Sequential(bs.nn.Linear(64, 48, density=0.5, block_size=8), bs.nn.Linear(48, 32, density=0.5)).to(dtype)
    path = bs.export_onnx(model, torch.randn(3, 64, dtype=dtype), tmp_path / "m.onnx", sparse="gather")
    assert path.exists()


def test_gathers_make_the_size_follow_the_density(tmp_path):
    net = nn.Sequential(*(bs.nn.Linear(1024, 1024, density=0.1) for _ in range(2)))
    x = torch.randn(2, 1024)
    dense = bs.export_onnx(net, x, tmp_path / "dense.onnx", check=False).stat().st_size
    assert bs.export_onnx(net, x, tmp_path / "m.onnx", sparse="gather").stat().st_size < 0.12 * dense


def test_gathers_serve_a_layer_that_is_used_twice(tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = self.same = bs.nn.Linear(512, 512, density=0.25)

        def forward(self, x):
            return self.same(self.layer(x))

    model, x = Twice(), torch.randn(2, 512)
    path = bs.export_onnx(model, x, tmp_path / "m.onnx", sparse="gather")
    check(path, model, x)
    assert path.stat().st_size < 1.3 * 4 * model.layer.values.numel()


def test_gathers_name_the_layers_that_stay_dense(tmp_path):
    model = nn.Sequential(
        bs.nn.Conv2d(16, 16, 3, padding=1, density=0.5, block_size=8), kernel(16, 32), nn.Flatten(),
        bs.nn.Linear(128, 64, density=0.5, block_size=4), bs.nn.GatedMLP(64, 64, density=0.5, block_size=16),
        nn.Linear(64, 4),
    )  # fmt: skip
    x = torch.randn(3, 16, 2, 2)
    with pytest.warns(bs.SparsityWarning, match=r"stores dense weights.*blocks from 8 x 8, not 0, 3$") as caught:
        path = bs.export_onnx(model, x, tmp_path / "m.onnx", sparse="gather")
    assert caught[0].filename == __file__
    check(path, model, x)


@pytest.mark.parametrize("sparse", ["dense", True, 1])
def test_other_forms_of_sparse_weights_are_refused(sparse, tmp_path):
    with pytest.raises(bs.BlockSparseError, match='sparse: expected "gather", or None for dense weights, got'):
        bs.export_onnx(nn.Linear(4, 4), torch.randn(2, 4), tmp_path / "m.onnx", sparse=sparse)
