"""Language models fine-tuned to classify texts: what is read, resuming with the same bits, the command, mistakes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from blocksparse import BlockSparseError
from blocksparse_lab import experiments
from blocksparse_lab.data import reviews
from blocksparse_lab.data import text as texts
from blocksparse_lab.data.reviews import Labelled, Splits, encode
from blocksparse_lab.experiments import finetuning, queue
from blocksparse_lab.experiments.experiment import FAILED
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
from blocksparse_lab.models.text_classifier import TextClassifier, TextClassifierConfig
from blocksparse_lab.recipes import charlm, finetune
from blocksparse_lab.recipes.finetune import FinetuneSettings, TextRows
from blocksparse_lab.recipes.text_features import digest
from command import output

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")

DENSE = CharLMConfig(width=24, embedding=8)
SPARSE = CharLMConfig(width=48, embedding=8, pattern="random", density=0.4, block_size=8, seed=1)
KINDS = [
    DENSE,
    SPARSE,
    replace(SPARSE, cell="mlstm", layers=2),
    replace(DENSE, projection=8),
    replace(SPARSE, cell="smallworld", stride=2, weight_norm=True),
]
QUICK = FinetuneSettings(epochs=3, batch=8, longest=20, learning_rate=0.02)


def opinions(count=64, seed=0):
    """Return texts of very different lengths that contain their label."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(count) % 2).tolist()
    words = ("bad", "good")
    texts = ["".join(rng.choice(list("abc é"), rng.integers(0, 40))) + words[label] for label in labels]
    return Labelled(texts, labels)


def splits():
    return Splits("opinions", ("bad", "good"), opinions(), opinions(12, 1), opinions(20, 2))


def batch(texts):
    data = [encode(text) for text in texts]
    return torch.tensor([[*one, *[-1] * (max(map(len, data)) - len(one))] for one in data])


@pytest.mark.parametrize("config", KINDS, ids=lambda of: f"{of.cell}-{of.pattern}-{of.projection}")
def test_scores_are_those_of_a_text_alone_byte_after_byte(config):
    reader = CharLM(config)
    texts = ["", "some text", "é", "x" * 70]
    with torch.no_grad():
        pooled = []
        for text in texts:
            state, hidden = reader.initial_state(1), []
            for byte in encode(text):
                y, state = reader.outputs(torch.tensor([[byte]]), state)
                hidden.append(y[0, 0])
            of = torch.stack(hidden)
            pooled.append(torch.cat([of[-1], of.mean(0), of.amax(0)]))
    model = TextClassifier.of(reader, dropout=0.9).eval()
    expected = model.outlet(torch.stack(pooled))
    torch.testing.assert_close(model(batch(texts)), expected, atol=1e-5, rtol=1e-5)
    assert not any("reader.outlet" in name for name, _ in model.named_parameters())


def test_padding_has_no_gradient():
    model = TextClassifier(TextClassifierConfig(width=8, embedding=4, dropout=0)).double()
    text = batch(["a", "aaaaaaaaaa"])
    model(text)[0].sum().backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(batch(["a"]))[0].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, alone[name], atol=1e-12, rtol=1e-9)


def test_the_last_bytes_of_each_text_are_read():
    rows = TextRows(splits(), longest=9)
    text, labels = rows.take(np.array([5, 2]))
    assert labels.tolist() == [1, 0]
    for row, nth in zip(text.tolist(), (5, 2), strict=True):
        assert bytes(byte for byte in row if byte >= 0) == encode(splits().train.texts[nth])[-9:]
    pairs = (pair for part in rows.held_out(3) for pair in zip(*part, strict=True))
    found = [(bytes(byte for byte in row if byte >= 0), label) for row, label in pairs]
    of = splits().validation
    expected = [(encode(text)[-9:], label) for text, label in zip(of.texts, of.labels, strict=True)]
    assert sorted((text, int(label)) for text, label in found) == sorted(expected)
    assert rows.tested == len(expected) == 12


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_it_learns(tmp_path, config):
    trainer = finetune.trainer(CharLM(config), splits(), tmp_path, QUICK)
    trainer.train()
    assert trainer.held_out == 0
    told = []
    assert finetune.evaluate(tmp_path, splits(), progress=lambda *at: told.append(at)) == 0
    assert told == [(20, 20)]
    wrong = splits()
    wrong.test.labels[3] = 1 - wrong.test.labels[3]
    assert finetune.evaluate(tmp_path, wrong) == 5


def test_settings_reach_model_trainer_and_task(tmp_path):
    recipe = replace(QUICK, dropout=0.25, dtype="bfloat16", batch=4, seed=7)
    trainer = finetune.trainer(CharLM(SPARSE).double(), splits(), tmp_path, recipe)
    model, settings, task = trainer.model, trainer.settings, trainer.task
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert (model.dropout.p, model.config.dropout) == (0.25, 0.25)
    assert (settings.steps, settings.eval_every, settings.warmup) == (48, 16, 4)
    assert (settings.learning_rate, settings.dtype, settings.seed) == (0.02, "bfloat16", 7)
    assert (task.unit, task.samples, task.bytes_per_step) == ("% validation error", "texts", 80)
    # The seed does not set the layouts, which the language model brings.
    assert model.config.seed == task.about()["model"]["seed"] == SPARSE.seed
    outlets = [TextClassifier.of(CharLM(SPARSE), seed).outlet.weight for seed in (7, 8)]
    assert torch.equal(model.outlet.weight, outlets[0])
    assert not torch.equal(model.outlet.weight, outlets[1])


def test_the_data_digest_depends_on_all_texts():
    def changed(part):
        other = splits()
        getattr(other, part).labels[0] ^= 1
        return other

    others = [replace(splits(), classes=("no", "yes")), *map(changed, ("train", "validation", "test"))]
    digests = [TextRows(of, 9).digest() for of in (splits(), *others)] + [TextRows(splits(), 8).digest()]
    assert len({str(digest) for digest in digests}) == 6


def test_the_command(tmp_path):
    train = opinions(80)
    rows = [f'"{text}",{label}' for text, label in zip(train.texts, train.labels, strict=True)]
    (tmp_path / "opinions.csv").write_text("\n".join(["text,label", *rows]))
    text = ["--data", "python", "--width", "32", "--embedding", "8", "--steps", "3", "--batch", "4", "--seq", "16"]
    output("train", "charlm", "--out", tmp_path / "model", *text)
    command = ["train", "sentiment", "--model", tmp_path / "model", "--data", tmp_path / "opinions.csv"]
    command += ["--epochs", "1", "--batch", "8", "--longest", "30"]
    said = output(*command, "--out", tmp_path / "run")
    assert "lstm, dense, width 32" in said
    assert "opinions.csv, 0 or 1: 64 texts to train on, 8 to choose with, 8 to test" in said
    assert re.search(r"test error \d+\.\d\d % of 8 texts", said)
    assert "this run is finished" in output(*command, "--out", tmp_path / "run")
    limited = output(*command, "--out", tmp_path / "quick", "--limit", "20", "--seed", "3")
    assert "20 texts to train on, 8 to choose with, 8 to test" in limited
    same = reviews.load(tmp_path / "opinions.csv", seed=3).limited(20, 3)
    config = json.loads((tmp_path / "quick" / "config.json").read_text())
    assert config["task"]["data"] == TextRows(same, 30).digest()
    assert config["settings"]["seed"] == 3
    output("train", "charlm", "--out", tmp_path / "other", *text, "--seed", "1")
    command[3] = tmp_path / "other"
    said = output(*command, "--out", tmp_path / "run", code=1)
    assert re.search(r"begun_with \w{16}, got .*begun_with \w{16}", said)
    assert "seed: expected an int, 0 or more and below 4294967296, got -1" in output(
        *command, "--out", tmp_path / "none", "--seed", "-1", code=1
    )
    output(
        "sparsify", tmp_path / "model", "--out", tmp_path / "pruned", "--density", "0.5", "--block-size", "8", "--force"
    )
    command[3] = tmp_path / "pruned"
    assert "lstm, dense, made sparse, width 32" in output(*command, "--out", tmp_path / "of pruned")


def test_names_with_brackets_are_printed_as_they_are(tmp_path):
    rows = [
        f'"{text}",{"[/b]" if label else "[red]"}' for text, label in zip(*vars(opinions(80)).values(), strict=True)
    ]
    (tmp_path / "[i].csv").write_text("\n".join(["text,label", *rows]))
    model = tmp_path / "[bold]"
    text = ["--data", "python", "--width", "32", "--embedding", "8", "--steps", "1", "--batch", "4", "--seq", "16"]
    output("train", "charlm", "--out", model, *text)
    data = ["--data", tmp_path / "[i].csv"]
    said = output("train", "sentiment", "--model", model, *data, "--epochs", "1", "--out", tmp_path / "run")
    assert "[bold]" in said
    assert "[i].csv, [/b] or [red]:" in said
    assert "[i].csv: [/b] or [red]" in output("sentiment", model, *data)


@pytest.fixture
def beginnings(monkeypatch):
    """The tiny experiment, and the one with its language models."""
    small = replace(
        experiments.find("imdb-long"),
        text="python",
        contenders={
            name: replace(one, config=config)
            for (name, one), config in zip(
                experiments.find("imdb-long").contenders.items(), (DENSE, SPARSE), strict=True
            )
        },
        settings=charlm.CharLMSettings(steps=2, warmup=1, batch=4, seq=8, evaluated=100),
        seq=8,
        reviews={},
    )
    of = experiments.find("imdb-finetuned")
    contenders = {name: replace(one, settings=QUICK) for name, one in of.contenders.items()}
    of = replace(of, contenders=contenders, seeds=(0, 1))
    monkeypatch.setitem(finetuning.LANGUAGE, "imdb-long", small)

    def upside_down(self, data_dir):
        found = splits()
        found.test.labels[:] = [1 - label for label in found.test.labels]
        return found

    monkeypatch.setattr(type(of), "load", upside_down)
    return small, of


def test_the_experiment(tmp_path, beginnings):
    small, of = beginnings
    runs = tmp_path / "imdb-finetuned"
    with pytest.raises(BlockSparseError, match="dense: expected a finished run of imdb-long to start from"):
        of.trainer("dense", 0, runs / "dense-0", splits())
    for trainer in small.trainers(tmp_path / "imdb-long", seeds=of.seeds):
        trainer.train()
    for trainer in of.trainers(runs):
        contender, _, seed = trainer.run.name.rpartition("-")
        model, _, rest = contender.partition(", ")
        scratch = rest == "from scratch"
        begun = tmp_path / "imdb-long" / f"{model}-{seed}"
        config = replace(small.contenders[model].config, seed=int(seed))
        reader = charlm.network(config) if scratch else charlm.load(begun)
        for name, tensor in trainer.model.reader.state_dict().items():
            assert torch.equal(tensor, reader.state_dict()[name]), (trainer.run.name, name)
        begun_with = "" if scratch else digest(begun / "last.safetensors")
        assert trainer.task.about()["model"]["begun_with"] == begun_with
        assert trainer.settings.seed == int(seed)
        trainer.train()
        assert not of.is_probed(trainer.run)
        of.probe(trainer.run)
        assert of.is_probed(trainer.run)
    paths = experiments.write("imdb-finetuned", of, runs, tmp_path)
    text = paths[1].read_text()
    assert "| pretrained on unlabelled texts | yes | yes | yes | yes | no | no |" in text
    assert "| hidden units | 24 | 48 | 24 | 48 | 24 | 48 |" in text
    assert f"| validation error, % |{' 0.00 ± 0.00 |' * 6}" in text
    assert f"| test error, % |{' 100.00 ± 0.00 |' * 6}" in text
    assert text.count("| test error, against dense | +0.00 ± 0.00 |") == 1


def test_missing_and_left_out_runs(tmp_path, beginnings):
    small, of = beginnings
    runs = tmp_path / "imdb-finetuned"
    for trainer in small.trainers(tmp_path / "imdb-long", only=["dense"], seeds=[0]):
        trainer.train()
    failed = tmp_path / "imdb-long" / "small-world-0"
    failed.mkdir()
    (failed / FAILED).write_text('{"failed": "a loss is NaN"}')
    named = {"imdb-finetuned": replace(of, seeds=(0,))}

    def missing():
        return [job.run.name for job in queue.missing(named, tmp_path)]

    assert missing() == ["dense-0", "dense, 4 epochs-0", "dense, from scratch-0", "small-world, from scratch-0"]
    reason = "imdb-long small-world-0: a loss is NaN"
    assert of.left_out(runs) == {"small-world-0": reason, "small-world, 4 epochs-0": reason}
    made = [trainer.run.name for trainer in of.trainers(runs, seeds=[0])]
    assert made == missing()
    trainer = next(of.trainers(runs))
    trainer.train()
    assert "dense-0" in missing()
    of.probe(trainer.run)
    assert "dense-0" not in missing()
    # A run of another net in place of the expected one.
    text = texts.split(b"abc " * 99, 8, name="abc", held_out=0.1)
    other = charlm.CharLMSettings(steps=1, warmup=0, batch=4, seq=8, model=replace(DENSE, width=16))
    charlm.trainer(other, text, tmp_path / "imdb-long" / "dense-1").train()
    with pytest.raises(BlockSparseError, match=r"expected a run of imdb-long, of .*width=24.*, got .*width=16"):
        of.trainer("dense", 1, runs / "dense-1", splits())


def test_bad_input(tmp_path):
    model = TextClassifier(TextClassifierConfig(width=8, embedding=4))
    for call, message in [
        (lambda: model(torch.tensor([[-1, -1], [3, 4]])), "text: expected integers .*, got a text of none"),
        (lambda: model(torch.tensor([[3, -1, 4]])), "text: expected integers .*, got bytes after -1"),
        (lambda: model(torch.tensor([[3, -2]])), "text: expected integers .*, got -2"),
        (lambda: model(torch.tensor([3, 4])), r"text: expected integers .*, got \[2\]"),
        (lambda: model(torch.empty(0, 4, dtype=torch.long)), r"text: expected integers .*, got \[0, 4\]"),
        (lambda: model(torch.tensor([[256]])), "expected rows of a table that has 256, got 256"),
        (lambda: model([[3, 4]]), "text: expected integers .*, got list"),
        (lambda: model(torch.ones(1, 2)), "text: expected integers .*, got torch.float32"),
        (lambda: TextClassifier.of(model.reader), "reader: expected a language model with its output layer"),
        (lambda: FinetuneSettings(longest=0), "longest: expected an int, 1 or more"),
        (lambda: FinetuneSettings(batch="8"), "batch: expected an int, 1 or more, got '8'"),
        (lambda: FinetuneSettings(dropout=None), "dropout: expected a finite number"),
        (lambda: TextClassifierConfig(classes=1), "classes: expected an int, 2 or more"),
        (lambda: TextClassifierConfig(dropout=2), "dropout: expected a number"),
        (
            lambda: finetune.trainer(CharLM(DENSE), splits(), tmp_path, replace(QUICK, batch=99)),
            "batch: expected an int",
        ),
        (lambda: finetune.load(tmp_path), "last.safetensors"),
    ]:
        with pytest.raises(BlockSparseError, match=message):
            call()
