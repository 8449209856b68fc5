"""The sentiment protocol: features of texts, probe, cache and command."""

import json
import sys
import types

import numpy as np
import pytest
import torch

import command
from blocksparse import BlockSparseError
from blocksparse_lab.data import reviews
from blocksparse_lab.data.reviews import Labelled, Splits, encode
from blocksparse_lab.recipes import sentiment
from blocksparse_lab.recipes.text_features import HALF_LIFE
from command import error

WIDTH = 24


class Bytes(torch.nn.Module):
    """A small recurrent language model with state (h, c), each [layers, batch, width]."""

    def __init__(self, width=WIDTH, layers=2, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = torch.nn.Embedding(256, 8)
            self.lstm = torch.nn.LSTM(8, width, layers)
            self.out = torch.nn.Linear(width, 256)
        self.calls = []

    def initial_state(self, batch):
        return tuple(torch.zeros(self.lstm.num_layers, batch, self.lstm.hidden_size) for _ in range(2))

    def forward(self, text, state):
        assert not self.training
        self.calls.append(tuple(text.shape))
        y, state = self.lstm(self.embedding(text), state)
        return self.out(y), state


class Running(Bytes):
    """A model that can skip the scores."""

    def outputs(self, text, state):
        self.calls.append(tuple(text.shape))
        return self.lstm(self.embedding(text), state)

    def forward(self, text, state):
        raise AssertionError("the scores are not needed")


def words(count, seed=0):
    """Return texts of very different lengths, some empty, some equal, with letters of several bytes."""
    rng = np.random.default_rng(seed)
    alphabet = list("abc de \u00e9\n&<")
    return ["", "", "same", "same"] + ["".join(rng.choice(alphabet, rng.integers(0, 90))) for _ in range(count)]


def alone(model, text):
    """Compute the definition: one text, byte after byte."""
    state, hidden = model.initial_state(1), []
    with torch.no_grad():
        for byte in encode(text):
            state = Bytes.forward(model, torch.tensor([[byte]]), state)[1]
            hidden.append(state[0][-1, 0])
    hidden, cell = torch.stack(hidden), state[1][-1, 0]
    weights = 0.5 ** (torch.arange(len(hidden) - 1, -1, -1) / HALF_LIFE)
    fading = (weights[:, None] * hidden).sum(0) / weights.sum()
    return {"cell": cell, "squashed": cell.tanh(), "hidden": hidden[-1], "fading": fading, "mean": hidden.mean(0)}


# -- features ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "states"), [(Bytes, {"cell", "squashed", "hidden"}), (Running, set(sentiment.STATES))]
)
def test_features_are_the_states_of_a_text(kind, states):
    model, texts = kind(), words(6)
    found = sentiment.features(model, texts, chunk=16)
    assert found.keys() == states
    model.eval()
    for name, of in found.items():
        assert of.shape == (10, WIDTH)
        assert of.dtype == np.float32
        np.testing.assert_allclose(of, np.stack([alone(model, text)[name] for text in texts]), atol=1e-6)


def states(*args, **how):
    """Return the states of texts side by side."""
    return np.hstack(list(sentiment.features(*args, **how).values()))


@pytest.mark.parametrize("batch", [1, 3, 128])
@pytest.mark.parametrize("chunk", [3, 32, 1000])
def test_features_depend_on_no_batch_and_no_chunk(batch, chunk):
    model, texts = Running(), words(16)
    expected = states(model, texts, batch=7)
    np.testing.assert_allclose(states(model, texts, batch=batch, chunk=chunk), expected, atol=1e-6)


def test_features_depend_on_no_other_text():
    model, texts = Running(), words(20)
    found = states(model, texts)
    backwards = states(model, texts[::-1])[::-1]
    np.testing.assert_allclose(backwards, found, atol=1e-6)
    among = states(model, [*texts[:5], "x" * 700], batch=4)
    np.testing.assert_allclose(among[:5], found[:5], atol=1e-6)


def test_no_padding_is_read():
    model, texts = Bytes(), words(30)
    seen = []
    sentiment.features(model, texts, batch=16, chunk=20, progress=lambda *at: seen.append(at))
    total = sum(len(encode(text)) for text in texts)
    assert sum(steps * batch for steps, batch in model.calls) == total
    assert max(steps for steps, _ in model.calls) <= 20
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_the_model_is_unchanged():
    model = Bytes()
    sentiment.features(model, ["a"])
    assert model.training
    model.eval()
    sentiment.features(model, ["a"])
    assert not model.training


def test_invalid_features():
    model = Bytes()
    with pytest.raises(BlockSparseError, match="texts: expected one or more, got none"):
        sentiment.features(model, [])
    with torch.no_grad():
        model.embedding.weight[ord("q")] = float("nan")
    sentiment.features(model, ["fine"])
    with pytest.raises(BlockSparseError, match="model: expected a finite state after a text"):
        sentiment.features(model, ["fine", "q"])


def test_half_precision_comes_out_as_float32():
    model = Bytes().bfloat16()
    model.initial_state = lambda batch: tuple(torch.zeros(2, batch, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    assert sentiment.features(model, ["a", "bc"])["cell"].dtype == np.float32


# -- the probe -----------------------------------------------------------------------------------------------------


def separable(n=200, width=20, unit=3, noise=0.0, seed=0):
    """Return three parts in which one unit separates the classes."""
    rng = np.random.default_rng(seed)
    parts, labels = [], []
    for _ in range(3):
        x = rng.standard_normal((n, width)).astype(np.float32)
        y = (rng.random(n) < 0.5).astype(int)
        x[:, unit] += np.where(y, 3, -3) * (1 - noise)
        parts.append(x)
        labels.append(y.tolist())
    return parts, labels


def test_the_probe_finds_the_unit_that_tells_the_classes_apart():
    parts, labels = separable()
    steps = []
    found = sentiment.probe(parts, labels, progress=lambda *at: steps.append(at))
    assert found.test > 0.97
    assert found.validation == max(found.tried.values())
    assert found.strength == next(c for c, score in found.tried.items() if score == found.validation)
    assert list(found.tried) == [2.0**k for k in range(-8, 1)]
    assert 1 <= found.used == np.count_nonzero(found.coefficients) < 20
    assert steps == [(i, 9) for i in range(1, 10)]
    unit = sentiment.single_unit(parts, labels, found.coefficients)
    assert (unit.index, unit.above) == (3, 1)
    assert unit.test > 0.97
    again = sentiment.probe(parts, labels)
    assert np.array_equal(again.coefficients, found.coefficients)


def test_the_test_part_does_not_affect_the_probe():
    parts, labels = separable(noise=0.8)
    found = sentiment.probe(parts, labels)
    other = sentiment.probe([*parts[:2], parts[2][::-1]], labels)
    assert other.strength == found.strength
    assert np.array_equal(other.coefficients, found.coefficients)
    assert other.test != found.test


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], (2.5, 1)),
        ([1, 2, 3, 4], [1, 1, 0, 0], (2.5, 0)),
        ([4, 1, 3, 2], [1, 0, 0, 0], (3.5, 1)),
        ([5, 5, 5, 5], [0, 0, 0, 1], (np.inf, 1)),
        ([1, 5, 5, 5], [0, 0, 1, 1], (3, 1)),
    ],
)
def test_thresholds_minimise_errors(values, labels, expected):
    threshold, above = sentiment._threshold(np.array(values, dtype=np.float32), np.array(labels))
    right = np.mean(np.where(np.array(values) > threshold, above, 1 - above) == labels)
    best = np.mean(np.where(np.array(values) > expected[0], expected[1], 1 - expected[1]) == labels)
    assert right == best
    assert (threshold, above) == expected


def test_thresholds_against_brute_force():
    rng = np.random.default_rng(1)
    for _ in range(50):
        values, labels = rng.integers(0, 8, 20).astype(np.float32), rng.integers(0, 2, 20)
        threshold, above = sentiment._threshold(values, labels)
        scores = [np.mean((values > at) == (labels == one)) for at in np.arange(-1, 9) + 0.5 for one in (0, 1)]
        assert np.mean(np.where(values > threshold, above, 1 - above) == labels) == max(scores)


def test_a_probe_without_features_has_no_unit():
    assert sentiment.single_unit([np.ones((4, 2))] * 3, [[0, 1, 0, 1]] * 3, np.zeros(2)) is None


def test_the_baseline_reads_words():
    good, bad = Labelled(["a good film", "good fun"] * 8, [1] * 16), Labelled(["a bad film", "bad taste"] * 8, [0] * 16)
    both = Labelled(good.texts + bad.texts, good.labels + bad.labels)
    found = sentiment.baseline(Splits("films", ("bad", "good"), both, both, both))
    assert (found.test, found.strength) == (1.0, 1.0)
    assert found.terms == 9
    wordless = Labelled(["!", "?"], [0, 1])
    with pytest.raises(BlockSparseError, match="marks: expected texts with words"):
        sentiment.baseline(Splits("marks", ("no", "yes"), wordless, wordless, wordless))


# -- what is kept --------------------------------------------------------------------------------------------------


def test_features_are_cached_by_checkpoint_and_text(tmp_path):
    checkpoint = tmp_path / "last.safetensors"
    checkpoint.write_bytes(b"weights")
    cache = sentiment.CachedFeatures(checkpoint)
    found = {"cell": np.arange(6, dtype=np.float32).reshape(2, 3), "hidden": np.ones((2, 4), dtype=np.float32)}
    assert cache.load(["a", "b"]) is None
    cache.save(["a", "b"], found)
    cache.save(["c"], {name: of[:1] for name, of in found.items()})
    kept = sentiment.CachedFeatures(checkpoint).load(["a", "b"])
    assert kept.keys() == found.keys()
    assert all(np.array_equal(kept[name], of) for name, of in found.items())
    assert cache.load(["ab", ""]) is None
    assert len(list(tmp_path.glob("features/*"))) == 2
    (tmp_path / "features" / "best-1-2.safetensors").touch()

    checkpoint.write_bytes(b"other weights")
    later = sentiment.CachedFeatures(checkpoint)
    assert later.load(["a", "b"]) is None
    later.save(["a", "b"], found)
    assert {path.name for path in tmp_path.glob("features/*")} == {later.path(["a", "b"]).name, "best-1-2.safetensors"}


def test_broken_cached_features_are_computed_again(tmp_path):
    (tmp_path / "last.safetensors").write_bytes(b"weights")
    cache = sentiment.CachedFeatures(tmp_path / "last.safetensors")
    cache.save(["a"], {"cell": np.ones((1, 3), dtype=np.float32)})
    path = cache.path(["a"])
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.load(["a"]) is None
    path.write_bytes(b"")
    assert cache.load(["a"]) is None


def test_a_failing_cache_is_not_an_error(tmp_path):
    (tmp_path / "last.safetensors").write_bytes(b"weights")
    (tmp_path / "features").touch()
    cache = sentiment.CachedFeatures(tmp_path / "last.safetensors")
    cache.save(["a"], {"cell": np.ones((1, 3), dtype=np.float32)})
    assert "the features could not be kept in" in cache.note


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder whose checkpoint loads as a model that counts its loads."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.safetensors").write_bytes(b"weights")
    loaded = []

    def load(path):
        loaded.append(path)
        return Bytes(seed=3)

    charlm = types.ModuleType("blocksparse_lab.recipes.charlm")
    charlm.load = load
    monkeypatch.setitem(sys.modules, "blocksparse_lab.recipes.charlm", charlm)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = [f'{label},"{" ".join(rng.choice(["a", "b"], 6))} {"xyz"[label] * 9}"' for label in [0, 1] * 60]
    (tmp_path / "films.csv").write_text("label,text\n" + "\n".join(rows) + "\n")
    return loaded


def call(*args):
    return command.run("sentiment", *args)


def test_the_command_reports_and_writes(run, tmp_path):
    said = call("run", "--data", "films.csv", "--baseline")
    assert "96 texts to fit, 12 to choose with, 12 to test" in said.stdout
    assert "TF-IDF" in said.stdout
    assert "quick test" not in said.stdout
    found = json.loads((tmp_path / "run" / "sentiment-films.json").read_text())
    result = found["result"]
    assert result["texts"] == {"train": 96, "validation": 12, "test": 12}
    assert result["probe"]["used"] == len(result["probe"]["coefficients"])
    assert result["probe"]["coefficients"][0][0] == result["unit"]["index"]
    assert result["probe"]["test error"] == 1 - result["probe"]["test"]
    assert {"cpu", "torch", "commit", "scikit-learn"} <= set(found["machine"])
    assert (tmp_path / "run" / "sentiment-films.png").read_bytes()[:4] == b"\x89PNG"
    assert len(run) == 1

    call("run/last.safetensors", "--data", "films.csv", "--out", "elsewhere")
    assert len(run) == 1, "the features were kept"
    assert (
        json.loads((tmp_path / "elsewhere" / "sentiment-films.json").read_text())["result"]["probe"] == result["probe"]
    )


def test_other_states_and_deviation_1(run, tmp_path):
    call("run", "--data", "films.csv", "--of", "hidden", "--standardize")
    found = json.loads((tmp_path / "run" / "sentiment-films-hidden-standardized.json").read_text())["result"]
    assert (found["of"], found["standardize"]) == ("hidden", True)
    call("run", "--data", "films.csv", "--of", "hidden")
    assert len(run) == 1, "one reading gives all states"
    other = json.loads((tmp_path / "run" / "sentiment-films-hidden.json").read_text())["result"]
    assert other["probe"]["coefficients"] != found["probe"]["coefficients"]

    refused = error("sentiment", "run", "--data", "films.csv", "--of", "mean")
    assert "of: expected one of cell, hidden, squashed for a model without `outputs`, got mean" in refused


def test_standardized_by_the_training_part_alone():
    rng = np.random.default_rng(0)
    large = rng.standard_normal((3, 50, 4)) * [1, 1000, 1e-3, 0] + [0, 5, 1, 7]
    train, *others = sentiment.standardized(large.astype(np.float32))
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(train.std(0), [1, 1, 1, 0], atol=1e-3)
    expected = (large[1] - large[0].mean(0)) / [*large[0].std(0)[:3], 1]
    np.testing.assert_allclose(others[0], expected, rtol=1e-3, atol=1e-3)


def test_a_limit_is_reported(run, tmp_path):
    said = call("run", "--data", "films.csv", "--limit", "20")
    assert "20 texts to fit, 12 to choose with, 12 to test" in said.stdout
    assert "a quick test of 44 of 120 texts (--limit)" in said.stdout
    assert (tmp_path / "run" / "sentiment-films-limit20.json").exists()


def test_a_probe_without_features_is_reported(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sentiment, "features", lambda model, texts, **_: {"cell": np.zeros((len(texts), 4), np.float32)}
    )
    said = call("run", "--data", "films.csv")
    assert "all coefficients are zero, and there is no best unit" in said.stdout
    assert json.loads((tmp_path / "run" / "sentiment-films.json").read_text())["result"]["unit"] is None
    assert not (tmp_path / "run" / "sentiment-films.png").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "checkpoint: expected a file, or a folder with last.safetensors, got nowhere"),
        (["run", "--data", "yelp"], "data: expected sst, imdb or a csv file, got yelp"),
        (["run", "--data", "films.csv", "--limit", "1"], "limit: expected 2 texts or more"),
        (
            ["run", "--data", "films.csv", "--of", "gate"],
            "of: expected one of cell, squashed, hidden, fading, mean, got gate",
        ),
        (["run", "--data", "films.csv", "--batch", "0"], "batch: expected a positive number, got 0"),
        (["run", "--data", "sst", "--data-dir", "."], "sst: expected sst/train_binary_sent.csv or"),
        (["run", "--data", "films.csv", "--out", "films.csv"], "out: expected a folder to write to"),
        (["run", "--data", "films.csv", "--device", "tpu"], "device: expected cpu, or cuda where there is a GPU"),
    ],
)
def test_mistakes_end_in_a_line_before_any_work(run, args, message):
    assert message in error("sentiment", *args)
    assert run == []


def test_a_probe_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(BlockSparseError, match=r"the probe needs scikit-learn .*pip install scikit-learn"):
        sentiment.probe(*separable())


def test_reviews_and_the_protocol_share_one_encoding():
    assert sentiment.encode is reviews.encode
