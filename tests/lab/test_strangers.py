"""Foreign run folders, broken or made up: one line of error, in bounded time and memory."""

import json
import time
from functools import cache

import pytest
import torch

from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.models.char_lm import CELLS, CharLM, CharLMConfig
from blocksparse_lab.models.gpt import GPT, GPTConfig
from blocksparse_lab.recipes import charlm, gpt, layouts, mlp, pixelcnn, resnet, sparsify
from blocksparse_lab.training import memory
from blocksparse_lab.training.trainer import Settings, Task, Trainer
from command import error, run

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")

DEEP = json.loads("[" * 45 + "]" * 45)
ODD = [None, "7", -1, 0, 1.5, True, float("nan"), 10**6, 10**9, 10**30, [], {}, DEEP]
CONFIG = {"width": 16, "embedding": 8, "block_size": 8, "pattern": "random", "density": 0.5}
PIXELS = {"filters": 8, "resnets": 1, "sparse": 2, "block_size": 4}
TRANSFORMER = GPTConfig(width=16, layers=1, heads=2, context=8, density=0.5, block_size=8)
RESNET = {
    "classes": 2, "channels": 1, "width": 8, "blocks": [1, 1], "downsample": "stride", "density": 0.5,
    "block_size": 4, "blur": 1, "padding_mode": None,
}  # fmt: skip
IMAGES = {"name": "noise", "shape": [1, 8, 8]}


def saved(folder, model, task):
    folder.mkdir(exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoint.save(folder / "last.safetensors", tensors, {"task": task})
    return folder


@cache
def model_of(kind, cell="lstm"):
    """Return a small model of a kind; tests do not change it."""
    if kind == "charlm":
        return CharLM(CharLMConfig(**CONFIG | {"cell": cell}))
    if kind == "gpt":
        return GPT(TRANSFORMER)
    return pixelcnn.PixelCNNConfig(**PIXELS).build(1) if kind == "pixelcnn" else resnet._network(RESNET)


def charlm_run(folder, **changes):
    cell = changes.get("cell")
    model = model_of("charlm", cell if isinstance(cell, str) and cell in CELLS else "lstm")
    return saved(folder, model, {"kind": "charlm", "model": CONFIG | changes})


def pixelcnn_run(folder, images=(), **changes):
    task = {"kind": "pixelcnn", "model": PIXELS | changes, "data": IMAGES | dict(images)}
    return saved(folder, model_of("pixelcnn"), task)


def gpt_run(folder, **changes):
    return saved(folder, model_of("gpt"), {"kind": "gpt", "model": vars(TRANSFORMER) | changes})


def resnet_run(folder, **changes):
    return saved(folder, model_of("resnet"), {"kind": "classify", "model": {"network": "resnet", **RESNET, **changes}})


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("pattern", ["dense", "random"])
def test_a_language_model_is_loaded_unchanged(cell, pattern, tmp_path):
    config = CharLMConfig(cell=cell, width=16, embedding=8, layers=2, pattern=pattern, block_size=8, density=0.5)
    model = CharLM(config)
    loaded = charlm.load(saved(tmp_path / "run", model, {"kind": "charlm", "model": vars(config)}))
    text = torch.randint(256, (5, 2))
    assert torch.equal(loaded(text)[0], model(text)[0])
    assert loaded.config == config
    assert all(p.requires_grad and p.device.type == "cpu" for p in loaded.parameters())


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize(
    ("made", "load", "names"),
    [
        (gpt_run, gpt.load, ("width", "layers", "heads", "context", "block_size", "seed")),
        (charlm_run, charlm.load, ("cell", "width", "embedding", "layers", "pattern", "block_size")),
        (pixelcnn_run, pixelcnn.load, ("filters", "resnets", "depth", "mixtures", "sparse", "block_size", "dropout")),
        (resnet_run, resnet.load, ("classes", "channels", "width", "blocks", "downsample", "block_size", "density")),
    ],
    ids=["gpt", "charlm", "pixelcnn", "resnet"],
)
def test_a_configuration_that_contradicts_the_tensors(made, load, names, value, tmp_path):
    started = time.monotonic()
    for name in names:
        # Changes that keep the parameters, or are equivalent, load.
        harmless = {"dropout": value == 0, "density": True, "sparse": value is True}
        harmless |= {"seed": type(value) is int and 0 <= value < 2**63}
        if harmless.get(name):
            continue
        run = made(tmp_path / "run", **{name: value})
        with pytest.raises(BlockSparseError):
            load(run)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("task", [None, 7, "charlm", [], {"kind": "charlm"}, {"kind": "charlm", "model": [1]}, DEEP])
def test_invalid_task_descriptions(task, tmp_path):
    run = saved(tmp_path / "run", torch.nn.Linear(2, 2), task)
    for load in (charlm.load, pixelcnn.load, resnet.load, layouts.read, sparsify.open_model):
        with pytest.raises(BlockSparseError):
            load(run)
    error("sample", run)
    error("sparsify", run, "--report-only")
    error("compare", "--topology", run)


@pytest.mark.parametrize("shape", [None, 8, [1, 8], [1, "8", 8], [1, 10**6, 8], [1, 8, None], [10**9, 8, 8]])
def test_invalid_image_shapes(shape, tmp_path):
    with pytest.raises(BlockSparseError):
        pixelcnn.load(pixelcnn_run(tmp_path / "run", {"shape": shape}))


@pytest.mark.parametrize("model", [None, {}, {"sizes": None}, {"sizes": [10**9]}, {"sizes": ["7"]}, {"sizes": [-1]}])
def test_layouts_of_a_net_without_its_sizes(model, tmp_path):
    net = mlp.network(mlp.MLPSettings(hidden=(20, 20), epsilon=2), mlp_data())
    run = saved(tmp_path / "run", net, {"kind": "classify", "model": model})
    with pytest.raises(BlockSparseError):
        layouts.read(run)


def mlp_data():
    from blocksparse_lab.data.synthetic import Synthetic

    return Synthetic(features=30, rows=16, tested=4)


def test_a_run_with_a_config_is_not_read_as_a_transformers_folder(tmp_path):
    run = charlm_run(tmp_path / "run")
    (run / "config.json").write_text("{}")
    assert isinstance(sparsify.open_model(run).model, CharLM)


# -- compare -------------------------------------------------------------------------------------------------------

RUN = {"unit": "nats", "bytes_per_step": 4, "task": {"model": {}}, "settings": {"steps": 9}, "facts": {}}


def compared(folder, config=RUN, log='{"step": 3, "seconds": 1.5, "held_out": 2.5}\n', result=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "log.jsonl").write_text(log)
    if result is not None:
        (folder / "result.json").write_text(result)
    return folder


@pytest.mark.parametrize("key", RUN)
@pytest.mark.parametrize("value", [None, [], 1.5, True, -1, DEEP], ids=lambda value: str(value)[:8])
def test_a_config_of_other_types(key, value, tmp_path):
    assert f"{key}: expected" in error("compare", compared(tmp_path / "run", RUN | {key: value}))
    config = {name: of for name, of in RUN.items() if name != key}
    assert f"{key}: expected" in error("compare", compared(tmp_path / "run", config))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "\0"], ids=lambda text: repr(text[:3]))
def test_files_that_are_not_json(text, tmp_path):
    assert "config.json: expected" in error("compare", compared(tmp_path / "run", text))
    assert "result.json: expected" in error("compare", compared(tmp_path / "run", result=text))


def odd_run(folder, value):
    """Write a run whose facts, log lines and result have this value."""
    model = {"method": value, "sizes": value, "cell": value, "pattern": value, "width": value}
    facts = {"parameters": value, "multiply_adds_per_byte": value, "epochs": value}
    config = RUN | {"task": {"model": model}, "facts": facts, "unit": "[/bold] nats"}
    lines = [value, {"step": value}, {"step": 4, "seconds": value, "held_out": value, "loss": value}, {"seconds": 1}]
    log = "".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 5, "sec'
    return compared(folder, config, log, json.dumps({"machine": value}))


def test_unknown_facts_and_log_lines(tmp_path):
    good = compared(tmp_path / "[good]", RUN | {"unit": "[/bold] nats"})
    odd = [odd_run(tmp_path / f"run {nth}", value) for nth, value in enumerate(ODD)]
    for each in odd:
        said = run("compare", each, good, "--json", tmp_path / "c.json", columns=160).stdout
        assert "2.5000" in said
        assert "[good]" in said
    pytest.importorskip("matplotlib")
    run("compare", *odd, good, "--out", tmp_path / "c.png")
    assert (tmp_path / "c.png").exists()


# -- training ------------------------------------------------------------------------------------------------------


class Line(Task):
    """A task whose model is a line."""

    unit, per_nat, bytes_per_step = "nats", 1.0, 4

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)

    def loss(self, step):
        return self.model(torch.ones(4, 3)).square().mean()

    def evaluate(self, model):
        return 1.0

    def about(self):
        return {"kind": "line"}


SETTINGS = Settings(steps=4, save_every=2, ema=0.9)


@pytest.fixture
def stopped(tmp_path):
    task = Line()
    task.model.register_forward_pre_hook(lambda *_: None if trainer.step < 3 else 1 / 0)
    trainer = Trainer(task, tmp_path, SETTINGS)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.weight", torch.zeros(2, 4), r"model\.weight: expected \[2, 3\], torch\.float32, got \[2, 4\]"),
        ("model.weight", torch.zeros(2, 3).double(), "got .2, 3., torch.float64"),
        ("model.bias", None, r"model\.bias: expected \[2\], torch.float32, got none"),
        ("model.colour", torch.zeros(1), "expected only tensors of the model, got model.colour"),
        ("ema.weight", torch.zeros(3), r"ema\.weight: expected \[2, 3\]"),
        ("ema.weight", None, "ema.weight only in one"),
        ("optimizer.weight.exp_avg", torch.zeros(1), r"optimizer\.weight\.exp_avg: expected \[2, 3\], got \[1\]"),
        ("optimizer.weight.exp_avg_sq", torch.zeros(6), r"expected \[2, 3\], got \[6\]"),
        ("optimizer.weight.step", torch.zeros(2), r"optimizer\.weight\.step: expected \[\], got \[2\]"),
        ("optimizer.colour.step", torch.zeros(()), "got optimizer.colour.step"),
        ("trainer.total", None, "trainer.total: expected"),
        ("rng.cpu", torch.zeros(3, dtype=torch.uint8), "rng.cpu: expected"),
        ("rng.cpu", torch.zeros(5056, dtype=torch.uint8), "the state of this task"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, tensor, message, stopped):
    path = stopped / "last.safetensors"
    tensors, about = checkpoint.load(path)
    tensors = {key: of for key, of in tensors.items() if key != name} | ({} if tensor is None else {name: tensor})
    checkpoint.save(path, tensors, about)
    before = path.read_bytes()
    trainer = Trainer(Line(), stopped, SETTINGS)
    own = {key: of.clone() for key, of in trainer.model.state_dict().items()}
    with pytest.raises(BlockSparseError, match=message):
        trainer.train()
    if "state" not in message:
        assert all(torch.equal(of, own[key]) for key, of in trainer.model.state_dict().items())
        assert not trainer.optimizer.state
    assert (trainer.step, path.read_bytes()) == (0, before)


@pytest.mark.parametrize("key", ["step", "seconds", "logged", "held_out", "codes", "settings", "task"])
@pytest.mark.parametrize("value", ["7", -1, [], [1, None], DEEP, 10**9, float("nan"), ...], ids=lambda x: str(x)[:8])
def test_a_checkpoint_without_progress(key, value, stopped):
    path = stopped / "last.safetensors"
    tensors, about = checkpoint.load(path)
    about[key] = value
    if value is ...:
        del about[key]
    checkpoint.save(path, tensors, about)
    harmless = (key == "held_out" and (value is ... or isinstance(value, int | float))) or (
        key in ("settings", "codes") and value in (..., [])
    )
    if harmless or (key == "seconds" and value == 10**9):
        return
    with pytest.raises(BlockSparseError):
        Trainer(Line(), stopped, SETTINGS).train()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"held_out": "1"}', "[" * 100_000], ids=lambda text: text[:5])
def test_a_broken_result(text, tmp_path):
    Trainer(Line(), tmp_path, SETTINGS).train()
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(BlockSparseError, match=r"result\.json"):
        Trainer(Line(), tmp_path, SETTINGS).train()
    (tmp_path / "result.json").unlink()
    assert Trainer(Line(), tmp_path, SETTINGS).train()["held_out"] == 1.0


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["dense", "barabasi_albert", "watts_strogatz", "random"])
def test_a_width_beyond_the_memory(pattern, tmp_path):
    (tmp_path / "text").write_bytes(b"a rose is a rose. " * 500)
    arguments = ["train", "charlm", "--out", tmp_path / "run", "--text", tmp_path / "text", "--batch", 2, "--seq", 8]
    said = error(*arguments, "--pattern", pattern, "--width", 3_200_000_000)
    assert "width 3,200,000,000, layers 1: expected a model that trains in the available " in said
    assert "which need " in said
    assert "params 1,000,000,000,000,000: expected" in error(*arguments, "--params", "1000000G")
    assert not (tmp_path / "run").exists()


def test_other_models_beyond_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 20)
    noise = torch.zeros(8, 1, 8, 8, dtype=torch.uint8)
    for make in (
        lambda: mlp.network(mlp.MLPSettings(hidden=(10**5, 10**5)), mlp_data()),
        lambda: mlp.network(mlp.MLPSettings(method="dense", hidden=(10**4, 10**4)), mlp_data()),
        lambda: pixelcnn.PixelCNNConfig(filters=10**6).build(1),
        lambda: resnet.trainer(resnet.ResNetSettings(width=10**6), images(noise), tmp_path / "run"),
    ):
        with pytest.raises(BlockSparseError, match=r"expected a model that trains in the available 0\.0 GB"):
            make()


def images(pixels):
    from blocksparse_lab.data.images import Images

    labels = torch.zeros(len(pixels), dtype=torch.int64)
    return Images("noise", pixels, labels, pixels, labels, ("a", "b"))
