"""Processes that tests send functions or scripts to, forked with PyTorch imported: a test on four takes no start-up."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Each is forked from a server that has these imported and no threads yet.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "blocksparse", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"])


class Processes:
    """Several processes that form one gloo group, the default one.

    Args:
        count: how many.
        timeout: seconds for a collective, and for a whole call twice as many.

    A call runs a function of a module (not a lambda) in all of them, with its arguments, and returns what came of it by
    rank. Where one raises, or dies, an AssertionError has its traceback, and the next call starts all again.
    """

    def __init__(self, count: int, timeout: float = 60):
        self.count, self.timeout = count, timeout
        self.running: list[tuple[Any, Connection]] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.running:
            self._start()
        for _, pipe in self.running:
            pipe.send((function, args))
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.running)}
        while pipes and not failed:
            ready = wait(list(pipes), 2 * self.timeout)
            if not ready:
                failed[min(pipes.values())] = f"no answer of ranks {sorted(pipes.values())} in {2 * self.timeout} s"
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    worked, result = pipe.recv()
                except (EOFError, ConnectionResetError):
                    worked, result = False, "died"
                (results if worked else failed)[rank] = result
        if failed:
            # Those that fail with it, a moment later: which of them was first is not known.
            for pipe in wait(list(pipes), 1) if pipes else ():
                rank = pipes.pop(pipe)
                try:
                    worked, result = pipe.recv()
                except (EOFError, ConnectionResetError):
                    worked, result = False, "died"
                if not worked:
                    failed[rank] = result
            self.close()
            raise AssertionError("\n".join(f"rank {rank} of {self.count}: {text}" for rank, text in failed.items()))
        return [results[rank] for rank in range(self.count)]

    def _start(self) -> None:
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.count):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_work, args=(theirs, rank, self.count, str(store), self.timeout), daemon=True
            )
            process.start()
            theirs.close()
            self.running.append((process, ours))

    def close(self) -> None:
        """Ends them all."""
        for process, pipe in self.running:
            process.kill()
            process.join()
            pipe.close()
        self.running = []


def rendezvous(count: int) -> dict[str, str]:
    """The variables by which `count` processes of this machine find each other, as torchrun sets them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def run_script(
    count: int, script: Path, *arguments: str, folder: Path, timeout: float = 200, **environment: str
) -> str:
    """What a script prints when `count` processes run it in a folder, with torchrun's variables and others.

    As with torchrun, but that PyTorch is imported once for all scripts.
    """
    shared = rendezvous(count)
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    variables = [environment | (shared | rank if count > 1 else {}) for rank in ranks]
    outputs = [folder / f"{script.stem}-{rank}.out" for rank in range(count)]
    running = [
        start_script(script, *arguments, variables=of, output=to) for of, to in zip(variables, outputs, strict=True)
    ]
    begun = time.monotonic()
    for process in running:
        process.join(max(0.0, begun + timeout - time.monotonic()))
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
    said = "".join(output.read_text() for output in outputs)
    assert codes == [0] * count, f"exit codes {codes} (None: not in {timeout} s)\n{said}"
    return said


def start_script(script: Path, *arguments: str, variables: dict[str, str], output: Path) -> Any:
    """The process, just started, of a script that writes what it prints to a file, and runs in the file's folder."""
    process = CONTEXT.Process(target=_run, args=([str(script), *arguments], variables, output), daemon=True)
    process.start()
    return process


def _run(argv: list[str], variables: dict[str, str], output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.environ |= variables
    os.chdir(output.parent)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def _work(pipe: Connection, rank: int, count: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parents[1]))  # pytest names test modules from there
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
