"""Compression of trained models: schedule, training against a teacher, bad input."""

import importlib
import itertools
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import blocksparse as bs
from blocksparse.compression import measures, stages, training
from blocksparse.compression.batches import BatchReader, Data
from blocksparse.compression.saliency import block_saliency
from blocksparse.compression.schedule import stage_densities, stage_ends
from blocksparse.conversion import speed
from blocksparse.measure import Samples
from blocksparse.nn.module import BlockSparseModule
from compressed import Classifier, labelled, options, take_all_as_faster, trained, weights_of


@pytest.fixture(autouse=True)
def fast_everywhere(monkeypatch):
    """Take all layers as faster, so that the results do not depend on the machine."""
    take_all_as_faster(monkeypatch)


def test_the_density_is_reached_and_training_helps():
    data = labelled()
    model = trained(Classifier(), data)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    inputs = [x for x, _ in data]
    result = bs.compress(model, inputs, **options(steps=400))
    untrained = bs.compress(model, inputs, **options(steps=1))
    assert len(weights_of(result.model)) == 2
    assert result.density <= 0.26
    assert [point.density for point in result.curve] == sorted((p.density for p in result.curve), reverse=True)
    pruned = bs.sparsify(model, 0.25, 8, force=True)
    with torch.no_grad():
        same = (pruned(torch.cat(inputs)).argmax(1) == model(torch.cat(inputs)).argmax(1)).double().mean()
    assert result.agreement > float(same) + 0.1
    assert result.agreement > untrained.agreement > float(same)
    assert not result.model.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items()), "the model stays"
    assert "density" in str(result)
    assert not result.is_only_fitted
    assert result.report.rows


@pytest.mark.parametrize("sizes", [(32, 1, 17, 32, 2, 32), (32, 0, 32, 32, 32), (32, 32, 32, 0)], ids=str)
def test_batches_of_several_sizes(sizes):
    result = bs.compress(Classifier().eval(), [torch.randn(size, 32) for size in sizes], **options())
    assert result.density <= 0.26


def test_the_given_model_is_not_called():
    class Counter(Classifier):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model, data = Counter(), labelled(128)
    result = bs.compress(model, data, **options(skip=[model.last]))
    bs.tradeoff(model, data, densities=[0.5], block_size=8, skip=model.last)
    assert model.calls == 0
    assert [name for name, module in result.model.named_modules() if isinstance(module, BlockSparseModule)] == ["first"]
    assert all(parameter.grad is None for parameter in result.model.parameters())


@pytest.mark.parametrize("skip", [(), "last"])
def test_layers_that_are_sparse_already_stay(skip, recwarn):
    model = Classifier().eval()
    model.last = bs.nn.Linear(64, 8, block_size=8, density=0.5)
    warnings.simplefilter("always", bs.SparsityWarning)
    result = bs.compress(model, labelled(128), **options(skip=skip))
    named = [each for each in recwarn if "dense weights only" in str(each.message)]
    assert len(named) == (not skip)
    assert all("last.weight: stays at density 0.5" in str(each.message) for each in named)
    assert result.model.last.layout.density == 0.5
    assert result.model.first.layout.density == result.density == 0.25


def test_frozen_weights_lose_blocks_too():
    model = Classifier().eval().requires_grad_(False)
    model.last.bias.requires_grad_(True)
    result = bs.compress(model, labelled(128), **options())
    assert result.density <= 0.26
    assert [name for name, each in result.model.named_parameters() if each.requires_grad] == ["last.bias"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    data = [(x.to(dtype), y) for x, y in labelled(128)]
    result = bs.compress(Classifier().to(dtype).eval(), data, **options())
    assert result.density <= 0.26
    assert all(each.isfinite().all() for each in result.model.state_dict().values())
    assert result.agreement > 0


@pytest.mark.parametrize("inside", [False, True])
def test_tensors_made_in_inference_mode(inside):
    with torch.inference_mode():
        model, data = Classifier().eval(), labelled(128)
    with torch.inference_mode(inside):
        result = bs.compress(model, data, **options())
    assert result.density <= 0.26
    assert not any(each.is_inference() for each in result.model.parameters())


@pytest.mark.parametrize("label", [-1, -100, 99])
def test_labels_without_a_class(label):
    data = labelled(128)
    data[0][1][3] = label
    data[1][1].fill_(label)
    data[2] = (data[2][0], data[2][1].int())
    warned = nullcontext() if label == -100 else pytest.warns(bs.SparsityWarning, match="Write -100 for rows without")
    with warned:
        result = bs.compress(Classifier().eval(), data, **options())
    assert result.density <= 0.26


def test_blocks_are_scored_by_their_values_and_the_second_moments_of_their_gradients():
    model = nn.Sequential(bs.nn.Linear(16, 24, block_size=8, density=0.5), bs.nn.Linear(24, 8, block_size=8))
    optimizer = torch.optim.AdamW(model.parameters())
    assert block_saliency(model, optimizer) is None, "no step so far"
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    scores = block_saliency(model, optimizer, without=["1"])
    layer, expected = model[0], torch.zeros(3, 2, dtype=torch.float64)
    moments = optimizer.state[layer.values]["exp_avg_sq"]
    for index, (row, column) in enumerate(layer.layout.mask().nonzero().tolist()):
        expected[row, column] = (layer.values[index].double().square() * moments[index]).mean()
    assert list(scores) == ["0.weight"]
    torch.testing.assert_close(scores["0.weight"], expected)
    moments.zero_()
    assert block_saliency(model, optimizer) is None, "moments too small for the dtype"


def test_schedules():
    assert stage_densities(0.25) == [0.5, 0.25]
    assert stage_densities(0.9) == [0.9]
    assert stage_densities(1e-320)[-1] == 1e-320
    assert stage_ends(1) == [1.0]
    assert stage_densities(0.01) == pytest.approx([0.01**0.25, 0.01**0.5, 0.01**0.75, 0.01])
    assert stage_ends(3) == pytest.approx([0.1, 0.2, 1.0])
    assert stage_ends(3, begin=0.6) == pytest.approx([0.7, 0.8, 1.0]), "a resumed run"
    assert stage_ends(500)[-2] < 1


@pytest.mark.parametrize("form", ["tensors", "lists", "dicts", "generator", "output with a loss"])
def test_forms_of_data(form):
    model, data = trained(Classifier(), labelled()), labelled(128)

    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x, labels=None):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    forms = {
        "tensors": lambda: [x for x, _ in data],
        "lists": lambda: [[x, y] for x, y in data],
        "dicts": lambda: [{"x": x} for x, _ in data],
        "generator": lambda: (x for x, _ in data),
        "output with a loss": lambda: [{"x": x, "labels": y} for x, y in data],
    }
    net = WithLoss().eval() if form == "output with a loss" else model
    result = bs.compress(net, forms[form](), **options())
    assert result.density <= 0.26
    assert 0 < result.agreement <= 1


@pytest.mark.parametrize(("shape", "held_out"), [((64, 10), 1024), ((64, 16, 10), 512), ((64, 200, 10), 128)])
def test_few_samples_with_many_rows_of_outputs_are_held_out(shape, held_out):
    batches = [torch.zeros(shape, dtype=torch.uint8) for _ in range(160)]
    data = Data.read(batches)
    data.limit_held_out(BatchReader(nn.Identity()).rows_per_sample(nn.Identity(), torch.zeros(shape)))
    assert sum(map(len, data.held_out)) == held_out
    assert len(data.train) + len(data.held_out) == 160


def test_calibration_batches_come_from_all_parts_of_the_data():
    data = Data.read([torch.full((64, 2), float(part)) for part in range(16)])
    parts = [int(batch[0, 0]) for batch in data.calibration()]
    assert (len(parts), parts[0]) == (6, 0)
    assert parts[-1] >= 10
    assert len(Data.read([torch.zeros(64, 2)] * 3).calibration()) == 2, "few data are used whole"


def test_evaluate_decides_and_is_in_the_curve():
    data, scores = labelled(), itertools.count()
    result = bs.compress(trained(Classifier(), data), data, **options(), evaluate=lambda model: -next(scores))
    metrics = [point.metric for point in result.curve]
    assert metrics[0] == 0
    assert None not in metrics
    # The first of each stage has the highest score. At the target, that is the model fitted in one shot.
    assert metrics == [0, -2, -1]


def test_the_result_is_never_worse_than_the_model_fitted_in_one_shot(monkeypatch):
    data = [x for x, _ in labelled()]
    model = trained(Classifier(), labelled())
    fitted = bs.compress(model, data, **options(steps=1))
    step = training.Training._step

    def harmful(self, optimizer):
        loss = step(self, optimizer)
        with torch.no_grad():
            for parameter in self.student.parameters():
                parameter.add_(torch.randn_like(parameter))
        return loss

    monkeypatch.setattr(training.Training, "_step", harmful)
    result = bs.compress(model, data, **options(steps=100))
    assert result.curve[-1].loss == pytest.approx(fitted.curve[-1].loss, rel=1e-3)
    assert result.is_only_fitted
    assert "training has not improved it" in str(result)


def test_few_steps_at_the_target_are_reported(monkeypatch):
    data = labelled(128)
    monkeypatch.setattr(stages, "MIN_STEPS", 10**9)
    with pytest.warns(bs.SparsityWarning, match="only [0-9]+ training steps were left at density 0.5"):
        bs.compress(trained(Classifier(), data), data, 0.5, 8, minutes=0.1)


def test_an_evaluation_that_may_be_an_error_is_warned_of(monkeypatch):
    monkeypatch.setattr(stages, "DOUBTFUL", 1.01)  # any agreement
    scores = itertools.count()
    with pytest.warns(bs.SparsityWarning, match="A higher value has to be better"):
        bs.compress(Classifier().eval(), labelled(128), **options(), evaluate=lambda model: next(scores))


def test_integer_inputs_are_classes_only_for_a_model_of_tokens():
    tokens = torch.randint(8, (4, 3))
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8))
    assert BatchReader(model).output_kind(model, tokens) == "kl"
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 9))
    assert BatchReader(model).output_kind(model, tokens) == "auto"
    assert BatchReader(model).output_kind(model, (tokens, tokens)) == "kl"


def test_an_evaluation_that_is_nan_is_the_worst():
    scores = itertools.chain([0.9], itertools.cycle([torch.nan, 0.5]))
    result = bs.compress(Classifier().eval(), labelled(128), **options(), evaluate=lambda model: next(scores))
    assert [point.metric for point in result.curve[1:]] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ({"evaluate": lambda model: torch.nan}, "evaluate: expected a number for the model as it is given, got nan"),
        ({"loss": lambda output, batch: output.sum() * torch.nan}, "model: expected a finite loss on the held-out"),
    ],
    ids=["evaluate", "loss"],
)
def test_a_dense_model_without_a_finite_measure_is_refused(measure, message):
    with pytest.raises(bs.BlockSparseError, match=message):
        bs.compress(Classifier().eval(), labelled(128), **options(), **measure)


def test_a_model_that_does_not_get_faster_stays_dense(monkeypatch):
    def leave_all_dense(model, plan, example):
        return plan.leave_dense(dict.fromkeys(plan.layouts, "too slow"))

    monkeypatch.setattr(stages, "keep_faster", leave_all_dense)
    with pytest.warns(bs.SparsityWarning, match="nothing gets faster"):
        result = bs.compress(Classifier().eval(), labelled(64), **options())
    assert not weights_of(result.model)
    assert result.density == 1


def test_timings_of_a_busy_machine_are_reported(monkeypatch):
    monkeypatch.setattr(measures.os, "getloadavg", lambda: (1e6, 0.0, 0.0), raising=False)
    result = bs.compress(Classifier().eval(), labelled(64), **options(steps=1))
    assert result.is_busy
    assert str(result).endswith("\nThe machine was busy during the timings: measure again when it is idle.")


@pytest.mark.parametrize(("seconds", "is_busy"), [([1.0, 1.2], False), ([1.0, 1.8, 1.0], True)])
def test_times_of_the_dense_model_that_differ_count_as_busy(seconds, is_busy, monkeypatch):
    monkeypatch.setattr(measures.os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    speedups, times = measures.SpeedUps(nn.Linear(8, 8), torch.randn(1, 8)), iter(seconds)

    def alternate(calls, **options):
        dense = next(times)
        return Samples({"sparse": [dense / 2], "dense": [dense]}, {})

    monkeypatch.setattr(measures, "alternate", alternate)
    assert not speedups.is_busy
    assert [speedups.measure(nn.Linear(8, 8)) for _ in seconds] == [2] * len(seconds)
    assert speedups.is_busy == is_busy


def test_the_report_says_why_a_layer_stays_dense(monkeypatch):
    monkeypatch.setattr(stages, "keep_faster", lambda model, plan, _: plan.leave_dense({"last.weight": "too slow"}))
    result = bs.compress(Classifier().eval(), labelled(128), **options())
    assert result.report.dense == result.dense == {"last.weight": "too slow"}


def test_a_layer_that_ends_slower_than_a_dense_one_is_dense(monkeypatch):
    monkeypatch.setattr(stages, "densify_slower", speed.densify_slower)
    monkeypatch.setattr(speed.Speed, "of_module", lambda self, module: 0.9)
    monkeypatch.setattr(speed, "MAX_UNTIMED_DENSITY", 0.0)
    result = bs.compress(Classifier().eval(), labelled(128), **options())
    assert not weights_of(result.model)
    assert result.density == 1
    assert result.dense.keys() == {"first.weight", "last.weight"}


@pytest.mark.parametrize("steps", [1, 60])
def test_weights_that_keep_all_blocks_count_towards_the_density(monkeypatch, tmp_path, steps):
    monkeypatch.setattr(stages, "keep_faster", speed.keep_faster)
    monkeypatch.setattr(speed.Speed, "of_weights", lambda self, weights: 3.0)
    monkeypatch.setattr(speed.Speed, "of_model", lambda self, layouts: 3.0)
    data = [x for x, _ in labelled()]
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    for folder in (None, tmp_path, tmp_path):  # the last run resumes
        result = bs.compress(model, data, 0.4, 8, steps=steps, folder=folder)
        assert result.dense["4.weight"] == "keeps all of its blocks"
        assert result.density == pytest.approx(0.4, abs=0.012)  # half a block
        stored = sum(module.values.numel() for module in weights_of(result.model)) + 16 * 8
        assert stored / (32 * 64 + 64 * 16 + 16 * 8) == pytest.approx(result.density)
    measured = bs.tradeoff(model, data, densities=[0.4], block_size=8)
    assert f"agreement on {measured.samples:,} held-out samples" in str(measured)
    assert measured.points[1].density == pytest.approx(0.4, abs=0.012)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_batch_norms_keep_statistics_that_batches_do_not_show(is_sorted, monkeypatch):
    """Batches of one kind of sample each have other statistics than the data."""
    x = torch.randn(1024, 32) + 6 * torch.randn(32, 32).repeat_interleave(32, 0)
    batches = x.split(32) if is_sorted else x[torch.randperm(1024)].split(256)
    model = Classifier()
    model.norm.momentum = None
    with torch.no_grad():
        model(x)
    model.norm.momentum = 0.1
    modes, training_mode = set(), training.training_mode

    @contextmanager
    def record(student, samples):
        with training_mode(student, samples):
            if torch.is_grad_enabled():
                modes.add(student.norm.training)
            yield

    monkeypatch.setattr(training, "training_mode", record)
    bs.compress(model.eval(), batches, 0.15, 8, steps=3)
    assert modes == {not is_sorted}


def test_the_global_random_state_stays():
    model, data = Classifier().eval(), labelled(128)
    before = torch.get_rng_state()
    bs.compress(model, data, **options())
    assert torch.equal(torch.get_rng_state(), before)


class Pair(nn.Module):
    def forward(self, x):
        return torch.zeros(len(x), 3), x


class Detached(Classifier):
    def forward(self, x):
        return super().forward(x).detach()


def with_value(value):
    model = Classifier().eval()
    model.last.weight.data[1, 2] = value
    return model


BAD = [
    ({"model": with_value(torch.nan)}, "model: expected finite parameters .*, got inf or nan in last.weight"),
    (
        {"model": with_value(torch.nan), "teacher": Classifier().eval()},
        "model: expected finite parameters .* in last.weight",
    ),
    ({"teacher": with_value(torch.inf)}, "teacher: expected finite parameters .*, got inf or nan in last.weight"),
    ({"model": Classifier().to("meta")}, "model: expected parameters with values, got first.weight without"),
    ({"model": nn.Sequential(nn.LazyLinear(8))}, "model: expected parameters with values, got 0.weight without"),
    ({"data": [torch.randn(8, 32)]}, "data: expected two batches or more"),
    ({"data": torch.randn(8, 32)}, r"data: expected an iterable of batches.*x\.split"),
    ({"data": TensorDataset(torch.randn(8, 32))}, r"data: expected an iterable of batches.*DataLoader\(dataset"),
    (
        {"data": [torch.randn(8, 5)] * 3},
        r"data: expected batches of the model's arguments.*a batch of .*help\(.*compress",
    ),
    ({"data": [torch.full((8, 32), torch.nan)] * 3}, "data: expected finite numbers, got inf or nan in held"),
    ({"teacher": nn.Sequential(Classifier(), nn.Threshold(99, torch.nan)).eval()}, "teacher: expected finite outputs"),
    (
        {"data": [torch.randn(8, 32)] * 3 + [torch.full((8, 32), torch.nan)] + [torch.randn(8, 32)] * 8, "steps": 1},
        "data: expected finite numbers, got inf or nan in batch 3",
    ),
    ({"data": [torch.full((8, 32), 1e30)] * 3}, r"the inputs of first.weight: .* \(scale the data, .* up to 1\.0e\+30"),
    ({"density": 0}, "density"),
    ({"density": 1.5}, "density"),
    ({"steps": 0}, "steps"),
    ({"minutes": -1, "steps": None}, "minutes"),
    ({"minutes": 1}, "give one of them"),
    ({"teacher": Pair()}, "teacher: expected outputs of the model's shapes"),
    ({"teacher": lambda x: x}, "teacher: expected a torch.nn.Module"),
    ({"loss": lambda output, batch: batch[1].missing}, "loss: expected a function of the output and the batch"),
    ({"loss": lambda output, batch: 3.0}, "loss: expected a function that returns a tensor"),
    ({"evaluate": lambda model: "good"}, "evaluate: expected a function that returns a number"),
    ({"model": nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)}, "requires_grad_"),
    ({"model": Detached().eval()}, "model: expected parameters to train that its outputs depend on"),
    ({"model": nn.Sequential(bs.nn.Linear(32, 32, density=1))}, r"call bs\.densify\(model\) first"),
    ({"model": nn.Sequential(nn.Conv1d(32, 32, 1, groups=4))}, "weights that can become block-sparse|batch"),
]


@pytest.mark.parametrize(("changed", "match"), BAD, ids=[match for _, match in BAD])
def test_bad_input(changed, match):
    call = {"model": Classifier().eval(), "data": [x for x, _ in labelled(128)], **options(), **changed}
    with pytest.raises(bs.BlockSparseError, match=match):
        bs.compress(call.pop("model"), call.pop("data"), **call)


def test_tradeoff_counts_equal_classes_if_the_data_have_labels(monkeypatch):
    kinds = []
    module = importlib.import_module("blocksparse.sparsity.distillation")
    monkeypatch.setattr(module, "output_agreement", lambda result, target, kind: kinds.append(kind) or 1.0)
    data, model = labelled(128), nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)).eval()
    for batches, kind in ((data, "kl"), ([x for x, _ in data], "mse")):
        bs.tradeoff(model, batches, densities=[0.5], block_size=8)
        assert set(kinds) == {kind}
        kinds.clear()


class Routed(nn.Module):
    """Calls its second expert without rows."""

    def __init__(self):
        super().__init__()
        self.first = bs.nn.Linear(32, 32, density=0.25, block_size=8)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        return self.experts[0](x) + self.experts[1](x[:0]).sum()


def test_tradeoff_leaves_out_what_was_sparse_and_experts_without_rows(monkeypatch):
    module = importlib.import_module("blocksparse.compression.tradeoff")
    monkeypatch.setattr(module, "keep_faster", lambda model, plan, example: plan)
    monkeypatch.setattr(module, "_limit", lambda reader, batches, seconds: batches[:1])  # as for a slow model
    with pytest.warns(bs.SparsityWarning, match=r"tradeoff changes dense weights only[^$]*first.weight: stays"):
        measured = bs.tradeoff(Routed().eval(), torch.randn(64, 32).split(16), densities=[0.5], block_size=8, skip=[])
    assert measured.points[1].density == 0.5
    assert measured.options == ", block_size=8, skip=skip"


def test_tradeoff_lists_densities_and_layers(tmp_path):
    data = labelled()
    measured = bs.tradeoff(trained(Classifier(256), data), data, densities=[0.5, 0.25], block_size=8)
    assert measured.points[0].density == 1
    assert len(measured.points) == 3
    assert {layer.name for layer in measured.layers} == {"first", "last"}
    assert all(0 < layer.time < 1 and layer.agreement <= 1 for layer in measured.layers)
    assert "of the time" in measured.recommendation
    assert measured.recommendation in str(measured)
    pytest.importorskip("matplotlib")
    measured.plot(tmp_path / "tradeoff.png")
    assert (tmp_path / "tradeoff.png").is_file()


def test_tradeoff_names_a_parameter_that_is_not_finite():
    with pytest.raises(bs.BlockSparseError, match=r"model: expected finite parameters .* in last\.weight"):
        bs.tradeoff(with_value(torch.nan), labelled(64))


def test_densities_are_lists():
    with pytest.raises(bs.BlockSparseError, match=r"densities: expected a list of numbers, such as \[0.25\], got 0.5"):
        bs.tradeoff(Classifier(), labelled(64), densities=0.5)
