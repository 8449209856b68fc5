"""Byte-level language models: streams, evaluation, samples, checkpoints."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import blocksparse as bs
from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.data import text
from blocksparse_lab.models.char_lm import (
    CharLM,
    CharLMConfig,
    least_parameters,
    multiply_adds,
    parameter_count,
    width_for,
)
from blocksparse_lab.recipes import charlm
from blocksparse_lab.recipes.charlm import CharLMTask
from blocksparse_lab.recipes.language_model import sample
from blocksparse_lab.training.trainer import Settings, Trainer

CONFIG = CharLMConfig(width=32, embedding=8, pattern="barabasi_albert", m=1, block_size=8)
SETTINGS = Settings(steps=6, learning_rate=0.01, warmup=2, eval_every=3, save_every=3, ema=0.5)

pytestmark = pytest.mark.usefixtures("one_thread", "any_backend")


def corpus(length=4000, seq=16):
    return text.split(text.python_topics()[:length], seq)


class Echo(torch.nn.Module):
    """A model whose state sums the bytes read; it scores byte b + 1 after b by a learned number."""

    def __init__(self):
        super().__init__()
        self.sure = torch.nn.Parameter(torch.tensor(3.0))
        self.seen = []

    def initial_state(self, batch):
        return (torch.zeros(1, batch, 1),)

    def forward(self, text, state=None):
        state = self.initial_state(text.shape[1]) if state is None else state
        self.seen.append((text.clone(), state[0].flatten().tolist()))
        after = (state[0] + text.float().sum(0).view(1, -1, 1),)
        return self.sure * F.one_hot((text.long() + 1) % 256, 256), after


def counting(length, held_out=300):
    data = torch.arange(length + held_out).remainder(256).to(torch.uint8)
    return text.Text("counting", data[:length], data[length:])


# -- streams -------------------------------------------------------------------------------------------------------


def test_streams_read_all_of_the_text_in_order_and_begin_again():
    # 101 bytes are 10 chunks of 10 with the byte after them; 3 streams start at chunks 0, 3 and 6.
    task = CharLMTask(Echo(), counting(101), batch=3, seq=10)
    for step in range(12):
        chunk, begins = task.inputs(step)
        at = [(first + step) % 10 for first in (0, 3, 6)]
        assert chunk[0].tolist() == [10 * chunk for chunk in at]
        assert torch.equal(chunk[1:].int(), chunk[:-1].int() + 1)
        assert begins.tolist() == [step == 0 or chunk == 0 for chunk in at]


def test_the_state_is_carried_and_zero_where_a_stream_begins():
    task = CharLMTask(Echo(), counting(41), batch=2, seq=10)
    for step in range(4):
        task.loss(step)
    read = [sum(range(10 * chunk, 10 * chunk + 10)) for chunk in range(4)]
    states = [state for _, state in task.model.seen]
    assert states == [[0, 0], [read[0], read[2]], [read[0] + read[1], 0], [sum(read[:3]), read[0]]]


def test_the_loss_is_the_mean_cross_entropy_of_the_next_byte():
    task = CharLMTask(Echo(), counting(41), batch=2, seq=10)
    expected = -math.log(math.exp(3) / (math.exp(3) + 255))
    assert task.loss(0).item() == pytest.approx(expected, rel=1e-6)


def test_no_gradient_flows_from_step_to_step():
    task = CharLMTask(CharLM(CONFIG), corpus(), batch=4, seq=16)
    task.loss(0)
    task.loss(1).backward()
    assert not any(state.requires_grad for state in task.state_dict().values())


def test_two_short_steps_see_what_one_long_step_sees():
    parts = corpus()
    model = CharLM(CONFIG)
    short, long = CharLMTask(model, parts, 1, 16), CharLMTask(model, parts, 1, 32)
    with torch.no_grad():
        assert (short.loss(0) + short.loss(1)).item() / 2 == pytest.approx(long.loss(0).item(), rel=1e-5)


def test_a_text_that_is_too_short():
    expected = "counting: expected 65 bytes or more to train on, for 4 streams with 16 bytes a step, got 64"
    with pytest.raises(BlockSparseError, match=expected):
        CharLMTask(Echo(), counting(64), batch=4, seq=16)
    CharLMTask(Echo(), counting(65), batch=4, seq=16)
    with pytest.raises(BlockSparseError, match="2 held-out bytes or more, got 1"):
        CharLMTask(Echo(), counting(65, held_out=1), batch=4, seq=16)
    with pytest.raises(BlockSparseError, match="batch: expected a positive int, got 0"):
        CharLMTask(Echo(), counting(65), batch=0)


# -- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [2, 300, 257, 5001])
def test_bits_per_character_are_of_every_held_out_byte_but_the_first(held_out, monkeypatch):
    monkeypatch.setattr(charlm, "EVALUATION_STREAM", 64)
    parts = corpus(60_000)
    parts = replace(parts, held_out=parts.held_out[:held_out])
    task = CharLMTask(Echo(), parts, batch=2, seq=16)
    with torch.no_grad():
        found = task.evaluate(task.model)
        logits = task.model(parts.held_out[:-1, None])[0].squeeze(1)
    expected = F.cross_entropy(logits, parts.held_out[1:].long()).item() / math.log(2)
    assert found == pytest.approx(expected, rel=1e-5)


def test_evaluation_is_in_streams_that_depend_on_the_text_alone(monkeypatch):
    monkeypatch.setattr(charlm, "EVALUATION_STREAM", 100)
    model, parts = CharLM(CONFIG), corpus(20_000)
    few, many = CharLMTask(model, parts, 1, 8), CharLMTask(model, parts, 8, 64)
    with torch.no_grad():
        many.loss(0)  # must not affect an evaluation
        assert few.evaluate(model) == many.evaluate(model)
        part = CharLMTask(model, parts, 4, 16, evaluated=100)
        assert part.evaluate(model) == pytest.approx(
            CharLMTask(model, replace(parts, held_out=parts.held_out[:100]), 4, 16).evaluate(model), rel=1e-6
        )


# -- training and checkpoints --------------------------------------------------------------------------------------


SMALL_WORLD = {"cell": "smallworld", "depth": 2}
AS_PUBLISHED = SMALL_WORLD | {"layouts": "separate", "init": "identity", "stride": 2, "weight_norm": True}


@pytest.mark.parametrize(
    "options",
    [{}, {"projection": 8, "pattern": "dense"}, {"cell": "mlstm", "weight_norm": True}, SMALL_WORLD, AS_PUBLISHED],
)
def test_the_checkpoint_of_a_run_is_a_language_model(options, tmp_path):
    config = replace(CONFIG, **options)
    task = CharLMTask(CharLM(config), corpus(), 4, 16)
    trainer = Trainer(task, tmp_path, SETTINGS)
    result = trainer.train()
    model = charlm.load(tmp_path)
    assert model.config == config
    assert not model.training
    trained = dict(task.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trainer.ema[name]), name
        assert not torch.equal(parameter, trained[name]), name
    with torch.no_grad():
        assert CharLMTask(model, corpus(), 4, 16).evaluate(model) == result["held_out"]


@pytest.mark.parametrize(("layouts", "count"), [("shared", 2), ("separate", 4)])  # one more layout for the four gates
def test_internal_steps_share_blocks_or_have_their_own(layouts, count):
    model = CharLM(replace(CONFIG, **SMALL_WORLD, width=64, layers=2, layouts=layouts))
    assert len({module.layout for module in model.modules() if hasattr(module, "layout")}) == count


def test_strided_inputs_and_outputs():
    model = CharLM(replace(CONFIG, **SMALL_WORLD, stride=4))
    assert model.recurrent.weight_input1_l0.shape == (8, CONFIG.embedding)
    text = torch.randint(256, (3, 2))
    y, _ = model.outputs(text)
    logits, _ = model(text)
    torch.testing.assert_close(logits, model.outlet(y[..., ::4]))
    assert multiply_adds(model.config) < multiply_adds(replace(CONFIG, **SMALL_WORLD))


def test_widths_fit_the_stride():
    small_world = replace(CONFIG, **SMALL_WORLD, width=64)
    for stride in (3, 8, 64):
        config = width_for(replace(small_world, pattern="dense", width=stride, stride=stride), 1_000_000)
        assert config.width % stride == 0
        assert abs(parameter_count(config) / 1_000_000 - 1) < 0.5


def test_weight_norm():
    model = CharLM(replace(CONFIG, weight_norm=True))
    for part in (model.embedding, model.outlet):
        torch.testing.assert_close(part.weight.norm(dim=1), torch.ones(256))
    assert multiply_adds(model.config) == multiply_adds(CONFIG)
    logits, _ = model(torch.randint(256, (3, 2)))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("cell", ["lstm", "smallworld"])
@pytest.mark.parametrize("pattern", ["dense", "random", "barabasi_albert", "block_diagonal"])
def test_a_lower_bound_on_parameters(pattern, cell):
    config = replace(CONFIG, cell=cell, width=256, pattern=pattern)
    least, real = least_parameters(config), parameter_count(config)
    assert 0.4 * real < least <= real


@pytest.mark.parametrize("pattern", ["dense", "barabasi_albert"])
def test_identities_pass_each_unit_on(pattern):
    model = CharLM(replace(CONFIG, **SMALL_WORLD, pattern=pattern, init="identity"))
    weights = bs.densify(model).state_dict()
    assert torch.equal(weights["recurrent.weight_step1_l0"], torch.eye(32))
    assert torch.equal(weights["recurrent.weight_gates_l0"], torch.eye(32).repeat(4, 1))


WRONG = [
    {"projection": 4},
    {"init": "identity"},
    {"layouts": "separate"},
    {"projection": 32, "pattern": "dense"},
    {"stride": 2},
    {"stride": 3, **SMALL_WORLD},
    {"weight_norm": "no"},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_options_of_other_cells(wrong):
    with pytest.raises(BlockSparseError, match=f"{next(iter(wrong))}: expected"):
        replace(CONFIG, **wrong)


def test_a_checkpoint_sets_the_layout(tmp_path):
    task = CharLMTask(CharLM(CONFIG), corpus(), 4, 16)
    other = CharLM(replace(CONFIG, seed=5))
    task.model.load_state_dict(other.state_dict())
    Trainer(task, tmp_path, replace(SETTINGS, steps=1)).train()
    layouts = [
        [module.layout for module in model.modules() if hasattr(module, "layout")]
        for model in (charlm.load(tmp_path / "last.safetensors"), other, CharLM(CONFIG))
    ]
    assert layouts[0] == layouts[1]
    assert layouts[0] != layouts[2]


def test_it_learns(tmp_path):
    task = CharLMTask(CharLM(CONFIG), corpus(20_000), 8, 32)
    Trainer(task, tmp_path, replace(SETTINGS, steps=60, eval_every=0, ema=0.9)).train()
    with torch.no_grad():
        assert task.evaluate(charlm.load(tmp_path)) < 5


def test_checkpoints_of_something_else(tmp_path):
    path = tmp_path / "last.safetensors"
    with pytest.raises(BlockSparseError, match="expected a file"):
        charlm.load(tmp_path)
    checkpoint.save(path, {}, {"task": {"kind": "pixelcnn"}})
    with pytest.raises(BlockSparseError, match="expected a recurrent language model of bytes, got pixelcnn"):
        charlm.load(path)
    checkpoint.save(path, {}, {"task": {"kind": "charlm", "model": {"cell": "lstm", "colour": "red"}}})
    with pytest.raises(BlockSparseError, match="expected the configuration of a CharLM of this version"):
        charlm.load(path)
    checkpoint.save(path, {}, {"task": {"kind": "charlm", "model": {"width": 8}}})
    with pytest.raises(BlockSparseError, match="expected width as its tensors have it, an int from 1 to 0, got 8"):
        charlm.load(path)


def test_another_text_has_another_digest():
    def about(data, **options):
        return CharLMTask(Echo(), text.split(data, 16, **options), 2, 16).about()

    data = text.python_topics()[:1000]
    assert about(data) == about(data, name="another file")
    assert about(data)["text"] != about(data[:-1] + b"#")["text"]
    assert about(data)["text"] != about(data, held_out=0.2)["text"]


# -- samples -------------------------------------------------------------------------------------------------------


def test_a_sample_depends_on_its_seed_alone():
    model = CharLM(CONFIG)
    one, two, other = (b"".join(sample(model, b"The ", 40, seed=seed)) for seed in (0, 0, 1))
    assert len(one) == 40
    assert one == two
    assert one != other


def test_a_sample_carries_the_state():
    model = CharLM(CONFIG)
    written = b"".join(sample(model, b"The ", 12, temperature=0))
    for end in range(12):
        with torch.no_grad():
            logits, _ = model(torch.tensor(list(b"The " + written[:end])).unsqueeze(1))
        assert logits[-1, 0].argmax() == written[end]
    assert written == b"".join(sample(model, b"The ", 12, top_k=1, seed=9))


def test_samples_of_the_likeliest_and_of_nothing():
    model = Echo()
    assert b"".join(sample(model, b"A", 5, temperature=0)) == b"BCDEF"
    assert b"".join(sample(model, b"A", 5, temperature=0.01)) == b"BCDEF"
    assert b"".join(sample(model, b"", 2, temperature=1e-300)) == b"\x0b\x0c"  # after a newline
    assert b"".join(sample(model, b"A", 0)) == b""


@pytest.mark.parametrize(
    "mistake",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": 0}, {"top_k": 257}, {"seed": -1}, {"seed": 2**64}],
)
def test_a_mistake_about_a_sample_is_said_at_once(mistake):
    with pytest.raises(BlockSparseError, match=next(iter(mistake))):
        sample(Echo(), b"A", 5, **mistake)


def test_a_model_that_is_broken_writes_nothing():
    model = Echo()
    torch.nn.init.constant_(model.sure, math.nan)
    with pytest.raises(BlockSparseError, match="model: expected finite scores, got nan"):
        next(sample(model, b"A", 5))
