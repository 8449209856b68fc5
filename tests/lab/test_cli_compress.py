"""`blocksparse compress`, as users call it."""

import json

import pytest
import torch

import blocksparse as bs
import command
from blocksparse.compression import stages
from blocksparse.nn.module import BlockSparseModule
from blocksparse_lab.data import images, tables, text
from blocksparse_lab.recipes import compress as recipe
from blocksparse_lab.recipes import language_model, mlp, resnet
from recipe_table import noise

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = ["--density", 0.6, "--block-size", 8, "--steps", 4]
TEXT = ["--batch", 4, "--steps", 3, "--width", 32, "--eval-bytes", 300]
KINDS = {
    "charlm": ["--seq", 16, "--embedding", 8, "--pattern", "dense", *TEXT],
    "gpt": ["--seq", 16, "--layers", 1, "--heads", 2, *TEXT],
    "resnet": ["--data", "fashion_mnist", "--epochs", 1, "--batch", 8, "--blocks", "1,1", "--shifted", 0],
    "mlp": ["--data", "fashion_mnist", "--epochs", 1, "--batch", 8, "--method", "dense", "--hidden", "32,32"],
}
LOAD = {"resnet": resnet.load, "mlp": mlp.load}


@pytest.fixture(autouse=True)
def fast_everywhere(monkeypatch):
    """Take all layers as faster, and small images as Fashion-MNIST."""
    monkeypatch.setattr(stages, "keep_faster", lambda model, plan, example: plan)
    monkeypatch.setattr(stages, "densify_slower", lambda model, example, skip: (model, {}))
    monkeypatch.setattr(images, "load", lambda name, *_: noise())
    rows = [part.flatten(1).float() / 255 for part in (noise().train, noise().test)]
    table = tables.Table("fashion_mnist", rows[0], noise().train_labels, rows[1], noise().test_labels, ("a", "b"))
    monkeypatch.setattr(tables, "load", lambda name, *_: table)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "book.txt"
    path.write_bytes(text.python_topics()[:20_000])
    return path


def train(kind, out, book):
    source = ["--text", book] if kind in ("charlm", "gpt") else []
    command.run("train", kind, "--out", out, *source, *KINDS[kind])
    return ["--data", book] if source else []


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_becomes_a_block_sparse_checkpoint(kind, tmp_path, book):
    source = train(kind, tmp_path / "run", book)
    shown = command.run("compress", tmp_path / "run", "--out", tmp_path / "new", *source, *OPTIONS).stdout
    assert "density" in shown
    assert "before, " in shown
    assert shown.splitlines()[-1].startswith("wrote last.safetensors, curve.json, curve.png in")
    model = LOAD.get(kind, language_model.load)(tmp_path / "new")
    assert any(isinstance(module, BlockSparseModule) for module in model.modules())
    curve = json.loads((tmp_path / "new" / "curve.json").read_text())["curve"]
    assert [point["density"] for point in curve] == [1.0, pytest.approx(0.6, abs=0.06)]
    opened = recipe.open_run(tmp_path / "run", *map(str, source[1:]))
    assert opened.held_out(model) == pytest.approx(float(shown.splitlines()[-2].split()[-2]), rel=1e-3)
    if kind in ("charlm", "gpt"):
        command.run("sample", tmp_path / "new", "--length", 3)


def test_the_same_command_resumes(tmp_path, book, monkeypatch):
    source = train("charlm", tmp_path / "run", book)
    step, calls = stages.Training._step, []

    def interrupted(self, optimizer):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return step(self, optimizer)

    monkeypatch.setattr(stages.Training, "_step", interrupted)
    options = ["--density", 0.25, "--block-size", 8, "--steps", 20]
    with pytest.warns(bs.SparsityWarning, match="interrupted"):
        command.run("compress", tmp_path / "run", "--out", tmp_path / "new", *source, *options)
    first = len(calls)
    command.run("compress", tmp_path / "run", "--out", tmp_path / "new", *source, *options)
    assert first == 8
    assert 20 - 8 <= len(calls) - first < 20


def test_mistakes_end_in_one_line(tmp_path, book):
    def error(*arguments):
        return command.error("compress", *arguments, "--out", tmp_path / "new", *OPTIONS)

    (tmp_path / "empty").mkdir()
    assert "run: expected the folder of a finished run of blocksparse train" in error(tmp_path / "empty")
    source = train("charlm", tmp_path / "run", book)
    assert "data: expected --data FILE, the text of the run, got 'book.txt'" in error(tmp_path / "run")
    other = tmp_path / "other.txt"
    for content in (b"other " * 99, b"x" + book.read_bytes()[1:]):
        other.write_bytes(content)
        assert "data: expected the data that the run was trained on" in error(tmp_path / "run", "--data", other)
    command.run("train", "mlp", "--out", tmp_path / "sparse", *KINDS["mlp"], "--method", "set")
    assert "run: expected a run with dense weights to compress, got one whose weights" in error(tmp_path / "sparse")
    assert "minutes and steps" in error(tmp_path / "run", *source, "--minutes", 1)
    assert "skip" in error(tmp_path / "run", *source, "--skip", "nothing")
    assert "out: expected another folder" in command.error("compress", tmp_path / "run", "--out", tmp_path / "run")


@pytest.fixture(scope="module", params=["gpt2", "bert"])
def folder(request, tmp_path_factory, book):
    """A folder of transformers with a tokenizer of single bytes."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    out = tmp_path_factory.mktemp(request.param)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(out)
    torch.manual_seed(0)
    if request.param == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes))
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = transformers.BertModel(transformers.BertConfig(vocab_size=256, max_position_embeddings=32, **sizes))
    model.save_pretrained(out)
    return out


def test_a_folder_of_transformers_becomes_a_block_sparse_one(folder, tmp_path, book):
    import transformers

    shown = command.run("compress", folder, "--out", tmp_path / "new", "--data", book, *OPTIONS).stdout
    assert ("nats per token" if "gpt2" in folder.name else "agreement with the dense model before") in shown
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    model = transformers.AutoModel.from_pretrained(tmp_path / "new")
    assert any(isinstance(module, BlockSparseModule) for module in model.modules())
    curve = json.loads((tmp_path / "new" / "curve.json").read_text())["curve"]
    assert curve[-1]["density"] == pytest.approx(0.6, abs=0.06)


def test_a_folder_with_a_sequence_classifier_is_refused(tmp_path, book):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=256, **sizes)).eval()
    model.save_pretrained(tmp_path / "classifier")
    shown = command.error("compress", tmp_path / "classifier", "--out", tmp_path / "new", "--data", book, *OPTIONS)
    assert "BertForSequenceClassification needs whole samples with special tokens" in shown
    assert "bs.compress(model, batches)" in shown
    batches = [{"input_ids": torch.randint(256, (4, 8)), "attention_mask": torch.ones(4, 8)} for _ in range(4)]
    assert bs.compress(model, batches, 0.6, 8, steps=4).density < 0.7, "as the message says"


def test_a_folder_needs_a_text_and_a_tokenizer(folder, tmp_path, book):
    bare, short = tmp_path / "bare", tmp_path / "short.txt"
    short.write_text("short")
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    for source, data, message in (
        (folder, [], "--data FILE, a text"),
        (folder, ["--data", short], "a text of 568 tokens or more"),
        (bare, ["--data", book], "the tokenizer of the model"),
    ):
        shown = command.error("compress", source, "--out", tmp_path / "new", *data, *OPTIONS)
        assert message in shown
