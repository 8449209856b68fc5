"""When a step is called, captured and replayed; on a GPU also that a graph learns the same."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from blocksparse_lab.data import text
from blocksparse_lab.models.char_lm import CharLM, CharLMConfig
from blocksparse_lab.recipes.charlm import CharLMTask
from blocksparse_lab.recipes.cuda_graph import GraphedStep
from blocksparse_lab.recipes.trainer import Callback, Settings, Trainer


class FakeGraph:
    """Replays on the CPU what was called while it was captured."""

    def replay(self):
        self.work()


@pytest.fixture
def calls(monkeypatch):
    """Records a step's calls; torch.cuda is made to work without a GPU, except for captures that should fail."""
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
    return work, seen, state


def test_the_first_calls_are_steps_and_so_are_the_replays(calls):
    work, seen, _ = calls
    notes = []
    step = GraphedStep(work, notes.append, warmup=2)
    for number in range(5):
        step(torch.tensor(number))
    assert seen == [("called", 0), ("called", 1), ("replayed", 2), ("replayed", 3), ("replayed", 4)]
    assert notes == []


def test_where_a_capture_fails_it_goes_on_without(calls):
    work, seen, state = calls
    state["fails"] = True
    notes = []
    step = GraphedStep(work, notes.append, warmup=1)
    for number in range(4):
        step(torch.tensor(number))
    assert seen == [("called", number) for number in range(4)]
    assert notes == ["no CUDA graph: operation not permitted. It goes on without, slower"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_learns_what_steps_learn(tmp_path):
    settings = Settings(steps=20, learning_rate=0.01, warmup=5, ema=0.9, log_every=1, device="cuda")
    results, notes, watch = [], [], Callback()
    watch.note = notes.append
    for graph in (False, True):
        model = CharLM(CharLMConfig(width=64, pattern="barabasi_albert", m=1, block_size=16))
        task = CharLMTask(model, text.split(text.python_topics()[:20_000], 32), 4, 32, device="cuda")
        results.append(Trainer(task, tmp_path / str(graph), replace(settings, cuda_graph=graph)).train(watch))
    assert not [note for note in notes if "graph" in note]
    assert results[0]["held_out"] == pytest.approx(results[1]["held_out"], rel=1e-3)
