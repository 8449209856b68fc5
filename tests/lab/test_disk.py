"""A disk that fails at each call in turn: one line of error, an intact checkpoint, a run that resumes to the same
tensors."""

import builtins
import errno
import os
from contextlib import suppress

import pytest
import torch

from blocksparse import BlockSparseError, checkpoint
from blocksparse_lab.training import run_log
from blocksparse_lab.training.trainer import Settings, Task, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = Settings(steps=2, log_every=1, eval_every=2, save_every=1)


class Line(Task):
    unit, per_nat, bytes_per_step = "nats", 1.0, 4

    def __init__(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = torch.nn.Linear(3, 1)

    def loss(self, step):
        return (self.model(torch.randn(4, 3)) - 1).square().mean()

    def evaluate(self, model):
        return 1.0

    def about(self):
        return {"kind": "line"}


class Disk:
    """Counts calls of the disk; call number `fails` and all later ones fail, or that call alone."""

    def __init__(self, patch, fails=0, code=errno.ENOSPC, once=False):
        self.calls, self.fails, self.code, self.once = [], fails, code, once
        for name in ("fsync", "replace"):
            patch.setattr(os, name, self.of(name, getattr(os, name)))
        for module in (checkpoint, run_log):
            patch.setattr(module, "open", self.open, raising=False)

    def of(self, name, call):
        def asked(*arguments):
            self.calls.append(name)
            now = len(self.calls)
            if self.fails and (now == self.fails or (now > self.fails and not self.once)):
                raise OSError(self.code, os.strerror(self.code))
            return call(*arguments)

        return asked

    def open(self, *arguments):
        return File(builtins.open(*arguments), self)


class File:
    def __init__(self, file, disk):
        self.file, self.disk = file, disk

    def __getattr__(self, name):
        own = getattr(self.file, name)
        return self.disk.of(name, own) if name in ("write", "flush", "truncate") else own

    def __iter__(self):
        return iter(self.file)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def ended(run):
    tensors, about = checkpoint.load(run / "last.safetensors")
    lines = [{k: v for k, v in line.items() if k not in ("seconds", "bytes_per_second")} for line in run_log.read(run)]
    return {name: tensor.tolist() for name, tensor in tensors.items()}, about["step"], lines


@pytest.fixture
def no_curves(monkeypatch):
    monkeypatch.setattr(run_log.RunLog, "open_tensorboard", lambda log, after: True)


@pytest.mark.parametrize(
    ("code", "once"),
    [pytest.param(errno.ENOSPC, False, marks=pytest.mark.full), (errno.EIO, True)],
    ids=["full", "error"],
)
def test_a_disk_that_fails_at_any_call(code, once, no_curves, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        Trainer(Line(), tmp_path / "whole", SETTINGS).train()
    assert {"write", "flush", "fsync", "replace"} <= set(disk.calls)
    whole = ended(tmp_path / "whole")
    for nth in range(1, len(disk.calls) + 1):
        run = tmp_path / str(nth)
        with monkeypatch.context() as patch:
            broken = Disk(patch, nth, code, once)
            with pytest.raises(BlockSparseError) as error:
                Trainer(Line(), run, SETTINGS).train()
        assert os.strerror(code) in str(error.value), broken.calls[nth - 1]
        assert "\n" not in str(error.value)
        assert not list(run.glob("*.part"))
        if (run / "last.safetensors").exists():
            checkpoint.load(run / "last.safetensors")
        Trainer(Line(), run, SETTINGS).train()
        assert ended(run) == whole, broken.calls[: nth + 1]
        assert (run / "result.json").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("after", range(4))
def test_curves_that_cannot_be_written(after, tmp_path, monkeypatch):
    writers = pytest.importorskip("tensorboard.summary.writer.record_writer")
    own, calls = writers.RecordWriter.write, []

    def write(writer, record):
        calls.append(record)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return own(writer, record)

    with monkeypatch.context() as patch:
        patch.setattr(writers.RecordWriter, "write", write)
        # A thread writes them: a failure is raised with the next point, or never after the last point.
        with suppress(BlockSparseError):
            Trainer(Line(), tmp_path / "run", SETTINGS).train()
    Trainer(Line(), tmp_path / "run", SETTINGS).train()
    Trainer(Line(), tmp_path / "whole", SETTINGS).train()
    assert ended(tmp_path / "run") == ended(tmp_path / "whole")


@pytest.mark.skipif(run_log.fcntl is None, reason="has no locks")
def test_a_second_process_is_refused_and_the_first_goes_on(no_curves, tmp_path):
    class Two(Line):
        def loss(self, step):
            if step == 1:
                before = (tmp_path / "run" / "log.jsonl").read_bytes()
                with pytest.raises(
                    BlockSparseError, match="expected a run that no other process trains, got one in training"
                ):
                    Trainer(Line(), tmp_path / "run", SETTINGS).train()
                assert (tmp_path / "run" / "log.jsonl").read_bytes() == before
            return super().loss(step)

    Trainer(Two(), tmp_path / "run", SETTINGS).train()
    Trainer(Line(), tmp_path / "whole", SETTINGS).train()
    assert ended(tmp_path / "run") == ended(tmp_path / "whole")


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="follows links")
def test_a_log_that_is_a_link_is_not_written_to(no_curves, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.write_text("precious")
    (run / "log.jsonl").symlink_to(elsewhere)
    with pytest.raises(BlockSparseError, match="run: expected a folder to write to"):
        Trainer(Line(), run, SETTINGS).train()
    assert elsewhere.read_text() == "precious"
