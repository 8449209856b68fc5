"""`compress` and `tradeoff` in use: wrapped models, unusable labels, interruptions, progress, advice."""

import copy
import io
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import blocksparse as bs
from blocksparse.compression import LayerShare, Point, Tradeoff, measures, stages, training
from blocksparse.compression import tradeoff as tradeoff_function
from blocksparse.compression.batches import BatchReader
from blocksparse.compression.one_shot import fit_at_densities
from blocksparse.nn.module import BlockSparseModule
from blocksparse.sparsity.calibration.reconstruction import fit
from blocksparse.surgery.prunable import prunable

tradeoff_module = sys.modules[tradeoff_function.__module__]


@pytest.fixture(autouse=True)
def fast_everywhere(monkeypatch):
    """Take all layers as faster, so that the results do not depend on the machine."""
    for module in (stages, tradeoff_module):
        monkeypatch.setattr(module, "keep_faster", lambda model, plan, example: plan)
    monkeypatch.setattr(stages, "densify_slower", lambda model, example, skip: (model, {}))
    torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def labelled(count=256, size=32):
    x, y = torch.randn(count, 32), torch.randint(8, (count,))
    return list(zip(x.split(size), y.split(size), strict=True))


OPTIONS = {"density": 0.25, "block_size": 8, "steps": 12}


# -- models and data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), nn.DataParallel])
def test_a_wrapped_model_with_labels(wrap):
    model, data = Classifier().eval(), labelled()
    result = bs.compress(wrap(model), data, teacher=wrap(copy.deepcopy(model)), **OPTIONS)
    assert type(result.model) is Classifier
    assert result.density <= 0.26
    measured = bs.tradeoff(wrap(model), data, densities=[0.5], block_size=8)
    assert {layer.name for layer in measured.layers} == {"first", "last"}


def test_a_function_is_no_model():
    for call in (bs.compress, bs.tradeoff):
        with pytest.raises(bs.BlockSparseError, match=r"model: expected a torch\.nn\.Module, got function"):
            call(lambda x: x, labelled())


class Named(Classifier):
    def forward(self, x):
        return {"scores": super().forward(x)}


UNUSED = {
    "float": (Classifier, lambda x, y: (x, y.float()), r"labels of \[32\] are not one class for each row.*\[32, 8\]"),
    "one-hot": (Classifier, lambda x, y: (x, torch.eye(8)[y]), r"labels of \[32, 8\] are not one class"),
    "out of range": (Classifier, lambda x, y: (x, y + 8), r"are not one class.* \(they are from 8 to 15\)"),
    "two": (Classifier, lambda x, y: (x, y, y), "a batch has 2 values more than the model has arguments"),
    "names": (Named, lambda x, y: (x, y), "the model returns a dict"),
}


@pytest.mark.parametrize(("model", "change", "why"), UNUSED.values(), ids=UNUSED)
def test_labels_that_cannot_be_used_are_reported_once(model, change, why):
    data = [change(*batch) for batch in labelled()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bs.compress(model().eval(), data, **OPTIONS)
    messages = [str(each.message) for each in caught if "labels" in str(each.message)]
    assert len(messages) == 1
    with pytest.warns(bs.SparsityWarning, match=f"(?s)labels are ignored, because .*{why}.*pass loss="):
        bs.compress(model().eval(), data, **OPTIONS)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compress: the labels")
        bs.compress(model().eval(), data, loss=lambda output, batch: batch[1].float().mean(), **OPTIONS)


def test_a_batch_that_differs_is_named():
    data = labelled()
    data[2] = (torch.randn(32, 17), data[2][1])
    for call in (lambda: bs.compress(Classifier().eval(), data, **OPTIONS), lambda: bs.tradeoff(Classifier(), data)):
        with pytest.raises(bs.BlockSparseError, match=r"a batch of \[32, 17\], \[32\], on which first fails"):
            call()


@pytest.mark.parametrize("shift", [100, -50])
def test_labels_that_are_no_classes_in_one_batch_are_reported(shift):
    data = labelled()
    data[3] = (data[3][0], data[3][1] + shift)
    with pytest.warns(bs.SparsityWarning, match=r"labels from -?\d+ to -?\d+, and the model has classes from 0 to 7"):
        bs.compress(Classifier().eval(), data, **OPTIONS)


@pytest.mark.parametrize("index", [0, 7])
def test_a_batch_without_known_labels_has_no_task_loss(index):
    data = labelled()
    data[index] = (data[index][0], torch.full_like(data[index][1], -100))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compress: the labels")
        assert bs.compress(Classifier().eval(), data, **OPTIONS).curve


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32)

    def forward(self, x):
        return pad_packed_sequence(self.lstm(x)[0])[0]


def test_a_packed_sequence_has_no_labels():
    data = [pack_sequence([torch.randn(n, 16) for n in (7, 5, 2)]) for _ in range(8)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "compress: the labels")
        assert bs.compress(Sequences().eval(), data, **OPTIONS).curve


class Failing(nn.Module):
    """A model that fails in its second call with gradients, or for batches of 13 samples."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += torch.is_grad_enabled()
        if self.calls == 2 or len(x) == 13:
            raise ValueError("boom")
        return self.last(self.first(x).relu())


def test_a_model_that_fails_in_training_names_the_batch():
    data = list(torch.randn(256, 16).split(32))
    with pytest.raises(bs.BlockSparseError, match=r"data: .* a batch of \[32, 16\], on which Failing fails: boom"):
        bs.compress(Failing().eval(), data, **OPTIONS)
    data[2] = data[2][:13]
    with pytest.raises(bs.BlockSparseError, match=r"data: .* a batch of \[13, 16\], on which Failing fails: boom"):
        bs.compress(Failing().eval(), data, **OPTIONS)


def test_an_evaluate_that_fails_is_named():
    with pytest.raises(bs.BlockSparseError, match="evaluate: expected a function of the model, got ZeroDivisionError"):
        bs.compress(Classifier().eval(), labelled(), evaluate=lambda model: 1 / 0, **OPTIONS)


def test_arrays_of_numpy_are_refused_by_name():
    data = [x.numpy() for x, _ in labelled()]
    for call in (lambda: bs.compress(Classifier().eval(), data, **OPTIONS), lambda: bs.tradeoff(Classifier(), data)):
        with pytest.raises(bs.BlockSparseError, match=r"NumPy arrays \(pass torch\.from_numpy\(x\) instead\)"):
            call()


def test_tradeoff_names_inputs_that_are_too_large():
    with pytest.raises(bs.BlockSparseError, match=r"the inputs of first\.weight: expected numbers whose squares"):
        bs.tradeoff(Classifier().eval(), [1e30 * x for x, _ in labelled(64)], densities=[0.5], block_size=8)


class Functional(nn.Module):
    """A model that calls no module of its weights, so that their inputs cannot be observed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x):
        x = nn.functional.linear(x, self.first.weight, self.first.bias).relu()
        return nn.functional.linear(x, self.last.weight, self.last.bias)


def test_a_model_whose_layers_are_not_called():
    result = bs.compress(Functional().eval(), labelled(), **OPTIONS)
    assert result.density <= 0.26
    measured = bs.tradeoff(Functional().eval(), labelled(), densities=[0.5], block_size=8)
    assert measured.points[1].density <= 0.5


def test_densities_that_leave_a_weight_without_a_block_are_left_out():
    data = labelled()
    measured = bs.tradeoff(Classifier().eval(), data, densities=[0.5, 0.02], block_size=8)
    assert len(measured.points) == 2
    with pytest.raises(bs.BlockSparseError, match=r"density: expected 0\.0\d+ or more"):
        bs.tradeoff(Classifier().eval(), data, densities=[0.02], block_size=8)
    with pytest.raises(bs.BlockSparseError, match="densities: expected a list of numbers"):
        bs.tradeoff(Classifier().eval(), data, densities=[])
    with pytest.raises(bs.BlockSparseError, match="example: expected arguments that the model accepts"):
        bs.tradeoff(Classifier().eval(), data, torch.randn(3, 4))


@pytest.mark.parametrize("max_cost", [0, 1e12], ids=["each layer", "as sparsify"])
def test_both_ways_to_fit_reach_the_density(max_cost, monkeypatch):
    monkeypatch.setattr(tradeoff_module, "MAX_COST", max_cost)
    model, data = Classifier().eval(), labelled()
    measured = bs.tradeoff(model, data, densities=[0.5, 0.25], block_size=8)
    assert all(point.density <= target for point, target in zip(measured.points, (1, 0.5, 0.25), strict=True))
    assert all(point.agreement > 1.5 / 8 for point in measured.points), "better than chance"


def test_labels_in_some_batches_only_are_refused_unless_a_loss_reads_them():
    data = labelled()
    mixed = [x for x, _ in data[:4]] + data[4:]
    with pytest.raises(bs.BlockSparseError, match=r"data: expected the same number of labels .* with 0 and with 1 \("):
        bs.compress(Classifier().eval(), mixed, **OPTIONS)
    result = bs.compress(Classifier().eval(), mixed, loss=lambda output, batch: output.square().mean(), **OPTIONS)
    assert result.density <= 0.26


# -- budgets ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_fit_that_is_stopped_leaves_the_other_layers_as_they_are():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(200, 32)
    layouts = {"0.weight": bs.patterns.random((64, 32), 8, 0.5), "2.weight": bs.patterns.random((32, 64), 8, 0.5)}
    answers, copied = iter([False, True]), copy.deepcopy(model)
    chosen, errors = fit(copied, model, [x], layouts, stop=lambda: next(answers))
    assert errors.keys() == {"0.weight"}
    assert not torch.equal(copied[0].weight, model[0].weight)
    assert torch.equal(copied[2].weight, model[2].weight)
    assert chosen["2.weight"] is layouts["2.weight"]


def test_a_fit_that_takes_most_of_the_time_is_stopped_and_reported(monkeypatch):
    monkeypatch.setattr(stages, "FIT_END", 0.0)
    with pytest.warns(bs.SparsityWarning, match=r"fitting was stopped after \d.* minutes, so that some weights"):
        result = bs.compress(Classifier().eval(), labelled(), 0.25, 8, minutes=0.1)
    assert result.density <= 0.26
    assert result.curve[-1].minutes < 0.15


# -- interruptions and progress --------------------------------------------------------------------------------------


def test_an_interruption_at_any_moment_loses_nothing(monkeypatch, tmp_path):
    data, model = labelled(), Classifier().eval()
    state = copy.deepcopy(model.state_dict())
    loss, outcomes = training.Training.loss, []
    for moment in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        calls = 0

        def interrupted(self, index, moment=moment, **options):
            nonlocal calls
            calls += 1
            if calls == moment:
                raise KeyboardInterrupt
            return loss(self, index, **options)

        monkeypatch.setattr(training.Training, "loss", interrupted)
        folder = tmp_path / str(moment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bs.SparsityWarning)
            try:
                result = bs.compress(model, data, folder=folder, **OPTIONS)
            except KeyboardInterrupt:
                outcomes.append("raised")
            else:
                outcomes.append("returned" if calls >= moment else "finished")
                assert any(isinstance(module, BlockSparseModule) for module in result.model.modules())
                assert result.model(data[0][0]).isfinite().all()
            monkeypatch.setattr(training.Training, "loss", loss)
            assert bs.compress(model, data, folder=folder, **OPTIONS).density <= 0.26, "it resumes"
    assert outcomes == sorted(outcomes, key=["raised", "returned", "finished"].index)
    assert {"raised", "returned"} <= set(outcomes)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_progress_line_has_80_columns_and_goes_at_the_end(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(training, "PROGRESS_DELAY", -1.0)
    clock = iter(range(10**6))
    monkeypatch.setattr(training.time, "monotonic", lambda: float(next(clock)))
    bs.compress(Classifier().eval(), labelled(), **OPTIONS)
    lines = terminal.getvalue().replace("\n", "\r").split("\r")
    assert all(len(line) < 80 for line in lines)
    assert any(all(word in line for word in ("density 0.5", "x, agreement", "loss", "left", "[#")) for line in lines)
    assert lines[-2].strip() == lines[-1] == ""


# -- fits of several densities ---------------------------------------------------------------------------------------


def layouts_of(model, density):
    sparse = bs.sparsify(model, density, 8, scope="layer", force=True)
    named = {name: module.layout for name, module in sparse.named_modules() if isinstance(module, BlockSparseModule)}
    return {weight.name: named[weight.name.removesuffix(".weight")] for weight in prunable(model, 8)}


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_fitted_as_by_sparsify(bias):
    model = nn.Sequential(nn.Linear(32, 24, bias=bias))
    batches = [(torch.randn(50, 4) @ torch.randn(4, 32) + 1) for _ in range(3)]
    layouts = [layouts_of(model, density) for density in (0.5, 0.25)]
    for made, each in zip(fit_at_densities(model, batches, layouts), layouts, strict=True):
        expected = bs.sparsify(model, layouts=each, data=batches, force=True)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(made.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_fits_share_recurrent_inputs_and_correct_batch_norms():
    model = nn.Sequential(nn.LSTM(16, 16, batch_first=True))
    sparse = bs.sparsify(model, 0.5, 8, scope="layer", force=True)
    layouts = {f"0.{name}": getattr(sparse[0], name).layout for name in ("weight_ih_l0", "weight_hh_l0")}
    x = torch.randn(20, 12, 16)
    made = fit_at_densities(model, list(x.split(10)), [layouts, {}])
    dense, fitted, unfitted = (net(x)[0] for net in (model, made[0], sparse))
    assert (fitted - dense).norm() < (unfitted - dense).norm()
    assert torch.equal(made[1](x)[0], dense)

    model, data = Classifier().eval(), [x for x, _ in labelled()]
    (made,) = fit_at_densities(model, data, [{"first.weight": layouts_of(model, 0.25)["first.weight"]}])
    with torch.no_grad():
        inputs = made.first(torch.cat(data))
    torch.testing.assert_close(made.norm.running_mean, inputs.mean(0))
    torch.testing.assert_close(made.norm.running_var, inputs.var(0), rtol=0.05, atol=1e-6)
    assert made.norm.momentum == 0.1
    assert not made.norm.training


def test_samples_are_left_out_until_a_run_is_short(monkeypatch):
    clock = iter([0.0, 2.0] * 9)
    monkeypatch.setattr(tradeoff_module, "_now", lambda: next(clock))
    batches = [torch.randn(10, 32) for _ in range(8)]
    reader = BatchReader(Classifier())
    limit = tradeoff_module._limit
    assert limit(reader, batches, 6.0) == batches[:3]
    assert limit(reader, batches, 99.0) == batches
    assert [len(batch) for batch in limit(reader, batches, 0.5)] == [2]
    assert [len(batch[0]) for batch in limit(reader, [(batches[0], torch.zeros(10))], 0.01)] == [1]
    odd = (batches[0], torch.zeros(3))
    assert limit(reader, [odd], 0.5) == [odd], "which samples belong together is unknown"


# -- advice ----------------------------------------------------------------------------------------------------------


def advice(*points, layers=(("body", 0.9, 0.95), ("head", 0.01, 0.3))):
    dense = Point(1.0, 1.0, 1.0)
    return Tradeoff((dense, *points), tuple(LayerShare(name, 1000, time, kept) for name, time, kept in layers))


def test_the_recommendation():
    text = advice(Point(0.5, 1.5, 0.995), Point(0.1, 4.0, 0.5)).recommendation
    assert "1 of 2 layers takes 90% of the time: body." in text
    assert "Density 0.5 gives 1.5 times the speed at 99.5% agreement, without training:\n    bs.sparsify(model" in text
    assert "Density 0.1 gives 4.0 times the speed at 50.0% agreement, and needs training:\n    bs.compress" in text
    assert "Keep dense, by skip=: head." in text
    assert "Keep it dense" in advice(Point(0.5, 0.9, 1.0)).recommendation
    with_options = replace(advice(Point(0.5, 1.5, 0.995), Point(0.1, 4.0, 0.5)), options=", block_size=8, skip=skip")
    assert "bs.sparsify(model, 0.5, data=data, block_size=8, skip=skip)" in with_options.recommendation
    assert "bs.compress(model, data, 0.1, block_size=8, skip=skip)" in with_options.recommendation
    assert "bs.compress" not in advice(Point(0.5, 1.5, 0.995)).recommendation


def test_a_row_says_which_density_was_asked_for():
    lines = str(advice(Point(1.0, 1.0, 1.0, asked=0.5), Point(0.097, 4.0, 0.5, asked=0.1))).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["asked", "density", "speed-up", "agreement"],
        ["1", "1.00", "1.0000"],
        ["0.5", "1", "1.00", "1.0000"],
        ["0.1", "0.097", "4.00", "0.5000"],
    ]


@pytest.mark.parametrize("name", ["mlp.up", "attention.output.dense.projection"])
def test_many_layers_fit_into_80_columns(tmp_path, name):
    names = [f"transformer.layers.{index}.{name}" for index in range(40)]
    measured = advice(Point(0.5, 1.5, -3.0), layers=[(name, 0.02, 0.5) for name in names])
    lines = str(measured).splitlines()
    assert max(map(len, lines)) < 80
    assert len(lines) < 40
    assert "28 more" in str(measured)
    assert f".11.{name}" in lines[17]
    assert "-" not in lines[2], "an agreement below 0 is shown as 0"
    pytest.importorskip("matplotlib")
    measured.plot(tmp_path / "tradeoff.png")
    assert (tmp_path / "tradeoff.png").is_file()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 32), (torch.float64, 32)])
def test_the_size_of_blocks_by_default(dtype, size):
    assert measures.default_block_size(nn.Linear(8, 8, dtype=dtype)) == size
    assert measures.default_block_size(nn.Linear(8, 8, dtype=dtype, device="meta")) == 32


def test_a_float32_model_gets_blocks_of_16():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).eval()
    result = bs.compress(model, torch.randn(64, 64).split(16), 0.25, steps=2)
    assert result.model[0].layout.block_shape == (16, 16)
