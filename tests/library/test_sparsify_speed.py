"""sparsify keeps layers dense that are not faster, timed on the user's inputs, and reports them."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import blocksparse as bs
from blocksparse.conversion import speed
from blocksparse.conversion.selection import FixedSelection, Plan, ScoredSelection
from blocksparse.conversion.sparsify import survey_weights
from blocksparse.conversion.speed import densify_slower, keep_faster
from blocksparse.measure import Samples
from sparsified import mlp

pytestmark = pytest.mark.usefixtures("any_backend")


# -- speed decides -----------------------------------------------------------------------------------------------


def test_slower_layers_stay_dense_and_are_reported(speeds):
    calls = speeds(lambda layer: 0.5 if layer.out_features == 48 else 3)
    model = mlp(64, 128, 48, 64)
    with pytest.warns(
        bs.SparsityWarning, match=r"sparsify: the density is 0\.\d+, not 0\.25\n  2.weight: 0.5 times as fa"
    ):
        sparse = bs.sparsify(model, 0.25, 16)
    assert [type(sparse[at]) for at in (0, 2, 4)] == [bs.nn.Linear, nn.Linear, bs.nn.Linear]
    assert torch.equal(sparse[2].weight, model[2].weight), "and is not pruned"
    assert sum(sparse[at].layout.nnz for at in (0, 4)) == round(0.25 * (32 + 12)), "the density is that of the others"
    report = bs.report(sparse)
    assert report.dense["2.weight"].startswith("0.5 times as fast block-sparse (density 0.")
    assert report.dense["2.weight"].endswith(", blocks of 16 x 16, 64 tokens)")
    assert [row.speed_up for row in report.rows] == [3, None, 3]
    assert all(layer.__class__ is bs.nn.Linear for layer, _ in calls)
    assert bs.report(pickle.loads(pickle.dumps(copy.deepcopy(sparse)))).dense == report.dense


def test_force_measures_nothing(speeds):
    calls = speeds(lambda layer: 0.5)
    assert isinstance(bs.sparsify(nn.Linear(64, 64), 0.5, 16, force=True), bs.nn.Linear)
    assert not calls
    with pytest.warns(bs.SparsityWarning, match="nothing became block-sparse\n  weight: 0.5 times as fast"):
        dense = bs.sparsify(nn.Linear(64, 64), 0.5, 16)
    assert type(dense) is nn.Linear
    assert bs.report(dense).rows[0].note.startswith("0.5 times as fast")


def test_equal_layers_are_measured_once(speeds):
    calls = speeds(lambda layer: 2)
    model = mlp(*[64] * 8)
    bs.report(bs.sparsify(model, 0.25, 16, scope="layer"))
    assert len(calls) == 1
    bs.sparsify(model, 0.25, 16, scope="layer", tokens=7)
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measuring_all_kinds_of_layers(dtype, monkeypatch):
    monkeypatch.setattr(speed, "_measured", {})
    model = nn.ModuleList(
        [
            nn.Linear(20, 30),
            nn.Conv1d(16, 16, 3),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ConvTranspose2d(16, 16, 2),
            nn.LSTM(16, 16),
        ]
    ).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bs.SparsityWarning)  # what is slow differs from machine to machine
        bs.sparsify(model, 0.5, 16, tokens=4, scope="layer")
    report = bs.report(bs.sparsify(model, 0.5, 16, tokens=4, force=True, scope="layer"), tokens=4)
    assert len(report.rows) == 6
    assert all(row.speed_up > 0 for row in report.rows)


# -- on the user's inputs ----------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """With a recurrent layer; its inputs by name."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 64)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return self.head(self.lstm(scale * x)[0])


@pytest.mark.parametrize("example", ["tensor", "tuple", "list", "dict"])
def test_modules_are_timed_on_their_inputs_in_the_example(example, speeds):
    measured = speeds(lambda module: 2)
    x = torch.randn(3, 5, 32)
    given = {"tensor": x, "tuple": (x, 0.5), "list": [x], "dict": {"scale": 2.0, "x": x}}[example]
    model = Tagger().train()
    sparse = bs.sparsify(model, 0.5, 16, scope="layer", example=given)
    assert [(type(module).__name__, inputs[0][0][0].shape) for module, inputs in measured[:2]] == [
        ("LSTM", (3, 5, 32)),
        ("Linear", (3, 5, 32)),
    ]
    (whole, ((args, kwargs),)) = measured[2]
    assert isinstance(whole, Tagger)
    assert isinstance(whole.head, bs.nn.Linear)
    assert (args, kwargs) == {"tensor": ((x,), {}), "tuple": (given, {}), "list": ((x,), {}), "dict": ((), given)}[
        example
    ]
    assert model.calls == 0
    assert model.training
    assert not model.head._forward_pre_hooks
    report = bs.report(sparse, example=given)
    assert report.speed_up == 2
    assert [row.speed_up for row in report.rows] == [2, 2, 2]
    assert isinstance(measured[-1][0], Tagger)
    assert bs.report(sparse).speed_up is None


def test_an_lstm_is_timed_as_a_whole_with_short_and_long_sequences(speeds):
    measured = speeds(lambda module: 0.2 if isinstance(module, bs.nn.LSTM) else 2)
    with pytest.warns(bs.SparsityWarning, match="lstm.weight_ih_l0: 0.2 times as fast"):
        sparse = bs.sparsify(Tagger(), 0.5, 16, scope="layer")
    assert type(sparse.lstm) is nn.LSTM
    assert isinstance(sparse.head, bs.nn.Linear)
    module, inputs = measured[0]
    assert isinstance(module, bs.nn.LSTM)
    assert all(type(getattr(module, name)).__name__ == "Weight" for name in ("weight_ih_l0", "weight_hh_l0"))
    assert [tuple(args[0].shape) for args, _ in inputs] == [(1, 64, 32), (16, 4, 32)]


@pytest.mark.parametrize("least", [0.9, 0.5, 0])
def test_the_whole_model_is_never_slower(least, speeds):
    """Where all layers are in, the model is slower; those that gain least go back first."""
    gains = {64: 4.0, 96: 1.5, 128: 3.0}

    def ratio(module):
        if isinstance(module, bs.nn.Linear):
            return gains[module.out_features]
        count = sum(isinstance(layer, bs.nn.Linear) for layer in module)
        return {0.9: 0.9 if count == 3 else 1.2, 0.5: 0.5 if count > 1 else 1.1, 0: 0.8}[least]

    speeds(ratio)
    model = mlp(64, 64, 96, 128)
    with pytest.warns(bs.SparsityWarning, match="but the whole model"):
        sparse = bs.sparsify(model, 0.5, 16, scope="layer", example=torch.randn(2, 64))
    kept = [layer.out_features for layer in sparse if isinstance(layer, bs.nn.Linear)]
    assert kept == {0.9: [64], 0.5: [64], 0: []}[least]
    assert (
        bs.report(sparse).dense["2.weight"].startswith("1.5 times as fast block-sparse by itself, but the whole model")
    )


def test_keep_faster_drops_slow_layers_and_selects_again(speeds):
    speeds(lambda layer: 0.5 if layer.out_features == 48 else 3)
    weights = survey_weights(model := mlp(64, 128, 48, 64), 16, ()).weights
    selection = ScoredSelection(weights, 0.25, "l2", "global")
    plan = keep_faster(model, Plan(selection, selection.layouts(weights)))
    assert plan.layouts == selection.layouts(["0.weight", "4.weight"])
    assert plan.reasons.keys() == {"2.weight"}
    full = bs.BlockLayout(torch.ones(weights["4.weight"].grid, dtype=torch.bool), 16)
    fixed = FixedSelection(weights, layouts := selection.layouts(["0.weight"]) | {"4.weight": full})
    plan = keep_faster(model, Plan(fixed, layouts))
    assert plan.layouts == {"0.weight": layouts["0.weight"]}
    assert plan.reasons == {"4.weight": "keeps all of its blocks"}
    assert type(model[0]) is nn.Linear


def test_densify_slower_leaves_faster_and_skipped_layers(speeds):
    speeds(lambda layer: 0.5 if layer.out_features == 48 else 3)
    sparse = bs.sparsify(mlp(64, 128, 48, 48, 64), 0.75, 16, scope="layer", force=True)
    x = torch.randn(5, 64)
    expected = sparse(x)
    dense, reasons = densify_slower(sparse, x, skip={"4"})
    assert [type(dense[at]) for at in (0, 2, 4, 6)] == [bs.nn.Linear, nn.Linear, bs.nn.Linear, bs.nn.Linear]
    assert reasons == {"2.weight": "0.5 times as fast block-sparse, as it kept most blocks"}
    torch.testing.assert_close(dense(x), expected)


def test_a_little_faster_is_not_faster(speeds):
    speeds(lambda module: 1.02)
    with pytest.warns(bs.SparsityWarning, match="nothing became block-sparse"):
        assert type(bs.sparsify(nn.Linear(64, 64), 0.5, 16)) is nn.Linear


@pytest.mark.parametrize("example", [torch.randn(3, 7), (), {"y": 1}, [None]], ids=["size", "none", "name", "kind"])
def test_an_example_that_the_model_does_not_accept(example):
    model = mlp(64, 64)
    with pytest.raises(bs.BlockSparseError, match=r"example: expected arguments that the model accepts, got .*Error: "):
        bs.sparsify(model, 0.5, 16, example=example, inplace=True)
    assert type(model[0]) is nn.Linear
    with pytest.raises(bs.BlockSparseError, match=r"example: expected arguments that the model accepts, got .*Error: "):
        bs.report(bs.sparsify(model, 0.5, 16, force=True), example=example)


# -- warnings ------------------------------------------------------------------------------------------------


def test_the_warning_is_short(speeds):
    speeds(lambda layer: 0.5)
    with pytest.warns(bs.SparsityWarning) as caught:
        bs.sparsify(mlp(*[64] * 11), 0.5, 16)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    lines = str(caught[0].message).splitlines()
    assert lines[0] == "sparsify: nothing became block-sparse"
    assert lines[1].startswith("  0.weight: 0.5 times as fast")
    assert len(lines) == 9
    assert lines[-2] == "  and 4 more"
    assert lines[-1].endswith("and bs.report(model) for all weights")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_with_its_own_forward_is_refused_by_name():
    model = nn.Sequential(nn.Linear(64, 64), Doubled(64, 64))
    with pytest.warns(
        bs.SparsityWarning, match="\n  1.weight: Doubled may use its weight in another way than its base"
    ):
        sparse = bs.sparsify(model, 0.5, 16, force=True)
    assert type(sparse[1]) is Doubled
    assert type(bs.sparsify(model, 0.5, 16, force=True, skip="1")[1]) is Doubled
    with pytest.raises(bs.BlockSparseError, match="got Doubled with weight: Doubled may use"):
        bs.sparsify(model[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(bad):
    model = mlp(64, 64, 64)
    with torch.no_grad():
        model[2].weight[3, 4] = bad
    with pytest.raises(bs.BlockSparseError, match=r"the weight 2.weight: expected finite numbers"):
        bs.sparsify(model, 0.5, 16, force=True, inplace=True)
    assert type(model[0]) is nn.Linear


def test_blocks_too_large_for_the_density_are_reported():
    with pytest.warns(bs.SparsityWarning, match=r"the density is 1, not 0.25\n .*smaller block_size"):
        bs.sparsify(nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]), 0.25, 32, scope="layer", force=True)


@pytest.mark.parametrize(
    ("skip", "dense"),
    [
        ("encoder.*", ["encoder.0", "encoder.2"]),
        ("*.0", ["encoder.0", "head.0"]),
        ("encoder.?.weight", ["encoder.0", "encoder.2"]),
        (["*.2", "head"], ["encoder.2", "head.0"]),
    ],
    ids=str,
)
def test_skip_accepts_patterns(skip, dense):
    model = nn.ModuleDict({"encoder": mlp(64, 64, 64), "head": nn.Sequential(nn.Linear(64, 64))})
    sparse = bs.sparsify(model, 0.5, 16, skip=skip, force=True)
    assert [name for name, module in sparse.named_modules() if type(module) is nn.Linear] == dense
    with pytest.raises(bs.BlockSparseError, match=r"skip: expected .* patterns .*, got 'layers\.\*'"):
        bs.sparsify(model, 0.5, 16, skip="layers.*", force=True)


@pytest.mark.parametrize("width", [80, 100])
def test_a_report_fits_into_columns(width, speeds):
    speeds(lambda layer: 123.4)
    name = "bert_encoder_layer_attention_output_dense_projection_of_many_words"
    model = nn.ModuleDict({name: nn.Linear(4096, 4096), "conv": nn.Conv2d(512, 512, 3, groups=2)})
    report = bs.report(bs.sparsify(model, 0.5, force=True))
    text = report.table(width)
    assert max(map(len, text.splitlines())) <= width
    assert name[:11] in text
    assert "2 groups" in text


FIRST_TIMES = {
    "undecided": {"sparse": [1.0, 9.0, 9.0, 2.0], "dense": [3.0, 3.0, 9.0, 9.0]},
    "slower": {"sparse": [9.0, 8.0, 9.0], "dense": [3.0, 3.0, 3.0]},
    "too fast": {"sparse": [1.0, 1.0, 1.0, 1.0], "dense": [3.0, 3.0, 60.0, 70.0]},
}


@pytest.mark.parametrize("first", FIRST_TIMES)
def test_a_doubtful_timing_is_repeated_with_the_shortest_times(monkeypatch, first):
    calls = []

    def alternate(named, rounds, budget, clock):
        calls.append(rounds)
        if rounds == 7:
            return Samples(FIRST_TIMES[first], {"sparse": 1, "dense": 1})
        # The quickest call of the sparse module takes a third; most are held up by something else.
        return Samples({"sparse": [1.0, 9.0, 9.0, 2.0], "dense": [3.0, 3.0, 9.0, 9.0]}, {"sparse": 1, "dense": 1})

    monkeypatch.setattr(speed, "alternate", alternate)
    monkeypatch.setattr(speed, "_measured", {})
    measured = speed.Speed(nn.Linear(8, 8), 4)
    assert measured.of_module(bs.nn.Linear(8, 8, density=0.5, block_size=4)) == 3
    assert measured.is_busy
    assert measured.of_module(bs.nn.Linear(8, 8, density=0.5, block_size=4)) == 3
    assert calls == [7, 35]
    speed.Speed(nn.Linear(8, 8), 4).of_module(bs.nn.Linear(8, 8, density=0.5, block_size=4))
    assert calls == [7, 35, 7, 35]  # another call measures again


def test_blocks_larger_than_the_weight_are_reported():
    model = nn.ModuleDict({"conv": nn.Conv1d(1, 32, 5), "linear": nn.Linear(256, 128)})
    with pytest.warns(bs.SparsityWarning, match="conv.weight: stores 5,120 parameters or more, 160 when dense"):
        sparse = bs.sparsify(model, 0.25, force=True)
    assert isinstance(sparse["conv"], nn.Conv1d)
    assert isinstance(sparse["linear"], bs.nn.Linear)
    with pytest.warns(bs.SparsityWarning, match="stores 5,120 parameters, 320 when dense: use"):
        assert isinstance(bs.sparsify(nn.Conv1d(1, 64, 5), 0.5, force=True), bs.nn.Conv1d)


@pytest.mark.filterwarnings("error")
def test_an_output_layer_that_padding_makes_larger_stays_dense():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    with pytest.warns(bs.SparsityWarning, match="2.weight: stores [0-9,]* parameters, 5,120 when dense, so it stays"):
        sparse = bs.sparsify(model, 0.1, force=True)
    assert type(sparse[2]) is nn.Linear
    assert sparse[0].layout.density == pytest.approx(0.1, abs=0.002)
    with pytest.warns(bs.SparsityWarning, match="2.weight: stores 16,384 parameters, 5,120 when dense: use"):
        named = bs.sparsify(model, {"0.weight": 0.1, "2.weight": 1.0}, force=True)
    assert isinstance(named[2], bs.nn.Linear)
    bs.sparsify(model, 0.1, force=True, skip="2")


@pytest.mark.filterwarnings("error")
def test_a_first_convolution_that_padding_slows_down_stays_dense():
    layers = nn.Conv2d(3, 64, 3, padding=1), *(nn.Conv2d(64, 128, 3) for _ in range(4)), nn.Linear(100, 32)
    model = nn.ModuleList(layers)
    with pytest.warns(
        bs.SparsityWarning, match=r"^sparsify: some .*\n  0.weight: stores 9,216 .* 1,728 when dense, so it stays dense"
    ) as caught:
        sparse = bs.sparsify(model, 0.5, scope="layer", force=True)
    assert type(sparse[0]) is nn.Conv2d
    assert isinstance(sparse[1], bs.nn.Conv2d)
    with pytest.warns(bs.SparsityWarning, match=r"0.weight: stores 9,216 .* when dense: use"):
        named = bs.sparsify(model, {"0.weight": 0.5, "1.weight": 0.5}, force=True)
    assert isinstance(named[0], bs.nn.Conv2d)
    assert str(caught[0].message).count("when dense") == 1
    bs.sparsify(model, 0.5, scope="layer", force=True, skip="0")


@pytest.mark.filterwarnings("error")
def test_a_density_counts_no_convolution_that_is_smaller_than_a_block():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3))
    with pytest.warns(bs.SparsityWarning, match="0.weight: stores 9,216 parameters or more, 1,728 when dense, so it"):
        sparse = bs.sparsify(model, 0.25, force=True)
    assert type(sparse[0]) is nn.Conv2d
    assert sparse[2].layout.nnz == 1
    assert isinstance(bs.sparsify(model[:1], 1.0, force=True)[0], bs.nn.Conv2d)


def test_a_convolution_is_timed_on_an_image():
    (((image,), _),) = speed.random_inputs(bs.nn.Conv2d(16, 16, 3, stride=2, block_size=8), 64)
    assert image.shape == (1, 16, 64, 64)  # outputs 32 x 32
    (((image,), _),) = speed.random_inputs(bs.nn.Conv3d(16, 16, 1, block_size=8), speed.MAX_TOKENS)
    assert image.numel() < 1.1 * 16 * speed.MAX_TOKENS
