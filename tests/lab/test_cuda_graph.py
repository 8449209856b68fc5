"""When a step is called, captured and replayed; on a GPU, also that a graph trains like plain steps."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from blocksparse_lab.data import text
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
from blocksparse_lab.recipes.charlm import CharLMTask
from blocksparse_lab.training.cuda_graph import GraphedStep
from blocksparse_lab.training.trainer import Callback, Settings, Trainer


class FakeGraph:
    """Replays on the CPU what was called during its capture."""

    def replay(self):
        self.work()

    def pool(self):
        return 0, 0


class Generator:
    """Replaces the GPU's generator."""

    def clone_state(self):
        return self

    def graphsafe_set_state(self, state):
        assert state is self


@pytest.fixture
def calls(monkeypatch):
    """A step that records its calls, and a torch.cuda that works without a GPU; captures can be made to fail."""
    seen, state = [], {"captures": False, "fails": False}

    def work(x):
        if state["captures"]:
            if state["fails"]:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            state["graph"].work = lambda: seen.append(("replayed", x.item()))
        else:
            seen.append(("called", x.item()))

    @contextmanager
    def graph(graph, stream):
        state.update(captures=True, graph=graph)
        try:
            yield
        finally:
            state["captures"] = False

    @contextmanager
    def on(stream):
        yield

    class Stream:
        def wait_stream(self, other):
            pass

    for name, fake in (("Stream", Stream), ("CUDAGraph", FakeGraph), ("graph", graph), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None, raising=False)
    return work, seen, state


def test_warmup_calls_and_replays_are_steps(calls):
    work, seen, _ = calls
    notes = []
    step = GraphedStep(work, notes.append, warmup=2)
    for number in range(5):
        step(torch.tensor(number))
    assert seen == [("called", 0), ("called", 1), ("replayed", 2), ("replayed", 3), ("replayed", 4)]
    assert notes == []


def test_failed_capture_falls_back_to_plain_steps(calls):
    work, seen, state = calls
    state["fails"] = True
    notes = []
    step = GraphedStep(work, notes.append, warmup=1)
    for number in range(4):
        step(torch.tensor(number))
    assert seen == [("called", number) for number in range(4)]
    assert notes == ["training without a CUDA graph, which is slower: operation not permitted"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "wrong",
    [lambda x: x.sum().item(), lambda x: torch.zeros(3).to(x.device), lambda x: torch.randn(x.shape).cuda(), None],
    ids=["waits", "copies", "draws", "raises"],
)
def test_failed_capture_restores_the_gpu(wrong):
    def work(x):
        x.add_(torch.randn_like(x))
        if torch.cuda.is_current_stream_capturing():
            if wrong is None:
                raise ValueError("no")
            wrong(x)

    notes, x = [], torch.zeros(4, 4, device="cuda")
    step = GraphedStep(work, notes.append, warmup=1)
    for _ in range(4):
        step(x)
    assert len(notes) == 1
    assert x.std() > 1  # the calls continued
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    first = torch.randn(8, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(8, device="cuda"))
    good = GraphedStep(lambda x: x.add_(1), notes.append, warmup=1)
    ones = torch.zeros(2, device="cuda")
    for _ in range(3):
        good(ones)
    torch.cuda.synchronize()
    assert len(notes) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_trains_like_plain_steps(tmp_path):
    settings = Settings(steps=20, learning_rate=0.01, warmup=5, ema=0.9, log_every=1, device="cuda")
    results, notes, watch = [], [], Callback()
    watch.note = notes.append
    for graph in (False, True):
        model = CharLM(CharLMConfig(width=64, pattern="barabasi_albert", m=1, block_size=16))
        task = CharLMTask(model, text.split(text.python_topics()[:20_000], 32), 4, 32, device="cuda")
        results.append(Trainer(task, tmp_path / str(graph), replace(settings, cuda_graph=graph)).train(watch))
    assert not [note for note in notes if "graph" in note]
    assert results[0]["held_out"] == pytest.approx(results[1]["held_out"], rel=1e-3)
