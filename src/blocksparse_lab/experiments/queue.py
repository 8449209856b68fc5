"""Train the missing runs of several experiments side by side, each in a process with one thread."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from blocksparse.errors import BlockSparseError

from ..training.signals import Interrupted
from ..training.trainer import Callback, Trainer
from .experiment import DataDir, Experiment, check_only, run_folder

SECONDS_BETWEEN_NEWS = 0.2


@dataclass(frozen=True)
class Job:
    """A run of an experiment to train."""

    name: str
    experiment: Experiment
    contender: str
    seed: int
    runs: Path

    @property
    def run(self) -> Path:
        return run_folder(self.runs, self.contender, self.seed)

    @property
    def needs(self) -> Path | None:
        """The run that must be finished first, if any."""
        return self.experiment.needs(self.runs, self.contender, self.seed)

    @property
    def is_done(self) -> bool:
        return self.experiment.is_finished(self.run) and self.experiment.is_probed(self.run)

    def is_ready(self) -> bool:
        return self.needs is None or self.experiment.is_finished(self.needs)


@dataclass(frozen=True)
class News:
    """Progress of a run, and at its end whether it finished or why not."""

    text: str = ""
    done: int = 0
    of: int = 0
    finished: bool = False
    failed: bool = False


def missing(
    named: Mapping[str, Experiment], runs: Path, only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Job]:
    """Return the runs that are not finished and probed; each experiment has a folder of its name."""
    check_only(only, (contender for of in named.values() for contender in of.contenders))
    left_out = {name: of.left_out(runs / name) for name, of in named.items()}
    jobs = [
        Job(name, of, contender, seed, runs / name)
        for name, of in named.items()
        for seed in dict.fromkeys(seeds or of.seeds)
        for contender in of.contenders
        if not only or contender in only
    ]
    return [job for job in jobs if not job.is_done and job.run.name not in left_out[job.name]]


def idle_cores() -> int:
    """Return the number of idle cores, at least one."""
    return max(1, (os.cpu_count() or 1) - round(os.getloadavg()[0]))


def train(
    jobs: Sequence[Job], cores: int, seconds: float = math.inf, data_dir: DataDir = None, caught: Sequence[int] = ()
) -> Iterator[tuple[Job, News]]:
    """Train runs; yield their news.

    After `seconds`, or once `caught` has a signal, running trainings finish their step and save; a later call resumes.
    """
    if cores < 1:
        raise BlockSparseError.expected("cores", "a positive int", cores)
    context, end = get_context("spawn"), time.monotonic() + seconds
    waiting, at_work = list(jobs), dict[Any, tuple[Job, Any]]()
    try:
        while not caught and (left := end - time.monotonic()) > 0:
            ready = [job for job in waiting if job.is_ready()]
            for job in ready[: cores - len(at_work)]:
                waiting.remove(job)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(job, data_dir, theirs), daemon=True)
                process.start()
                theirs.close()
                at_work[ours] = job, process
                yield job, News("begins")
            if not at_work:
                break
            connection: Any
            for connection in wait(list(at_work), min(1.0, left)):
                job, process = at_work[connection]
                try:
                    news = connection.recv()
                except EOFError:
                    process.join()
                    news = News(f"the process ended with code {process.exitcode}", failed=True)
                if news.finished or news.failed:
                    del at_work[connection]
                    process.join()
                yield job, news
        else:
            return
        for job in waiting:
            yield job, News(f"needs {job.needs}, which is not finished", failed=True)
    finally:
        for _, process in at_work.values():
            process.terminate()
        for _, process in at_work.values():
            process.join()


def _work(job: Job, data_dir: DataDir, pipe: Connection) -> None:
    """Train and probe a run in its own process."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C reaches the queue alone, which then ends this process
    torch.set_num_threads(1)
    of = job.experiment
    with suppress(Interrupted):
        try:
            trainer = of.trainer(job.contender, job.seed, job.run, of.load(data_dir))
            try:
                trainer.train(_Reporter(trainer, pipe))
            except BlockSparseError as error:
                if not of.record_failure(trainer, error):
                    raise
                pipe.send(News(f"a result: {error}", failed=True))
                return
            of.probe(job.run, data_dir, lambda stage, done, total: pipe.send(News(stage, done, total)))
            pipe.send(News(f"{trainer.held_out:.4f} {trainer.task.unit}", finished=True))
        except BlockSparseError as error:
            pipe.send(News(str(error), failed=True))


class _Reporter(Callback):
    """Reports the progress of a run to the queue."""

    def __init__(self, trainer: Trainer, pipe: Connection):
        self.trainer, self.pipe, self.last, self.text = trainer, pipe, 0.0, ""

    def logged(self, record: Mapping[str, Any]) -> None:
        if "held_out" in record:
            self.text = f"{record['held_out']:.4f} {self.trainer.task.unit}"

    def after_step(self, step: int) -> None:
        if (now := time.monotonic()) - self.last < SECONDS_BETWEEN_NEWS:
            return
        self.last = now
        try:
            self.pipe.send(News(self.text, step, self.trainer.settings.steps))
        except OSError:  # the queue was killed: save and end
            os.kill(os.getpid(), signal.SIGTERM)
