"""Processes that run functions or scripts for tests; they are forked with PyTorch imported, so they start quickly."""

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

from blocksparse.errors import BlockSparseError

# The server that forks the processes imports these once, before it has threads. PyTorch's optimizers import dynamo.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
        "blocksparse", "blocksparse.distributed", "blocksparse_lab.experiments", "blocksparse_lab.cli",
    ]
)  # fmt: skip


class Processes:
    """Several processes that form one gloo group, the default group.

    A call runs a module's function (not a lambda) with arguments in all of them, and returns their results by rank. If
    one raises or dies, the call raises an AssertionError with its traceback, and the next call starts new processes.

    Args:
        count: the number of processes.
        timeout: seconds for a collective; a whole call has twice this time.
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
        failures: dict[int, str] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self.running)}
        while pipes:
            # Ranks that fail because another one did follow a moment later: nobody knows which was first.
            ready = wait(list(pipes), 1 if failures else 2 * self.timeout)
            if not ready:
                if not failures:
                    silent = sorted(pipes.values())
                    failures[silent[0]] = f"no answer of ranks {silent} in {2 * self.timeout} s"
                break
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    worked, result = pipe.recv()
                except (EOFError, ConnectionResetError):
                    worked, result = False, "died"
                (results if worked else failures)[rank] = result
        if failures:
            self.close()
            raise AssertionError("\n".join(f"rank {rank} of {self.count}: {text}" for rank, text in failures.items()))
        return [results[rank] for rank in range(self.count)]

    def _start(self) -> None:
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.count):
            ours, theirs = CONTEXT.Pipe()
            arguments = (theirs, rank, self.count, str(store), self.timeout)
            process = CONTEXT.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.running.append((process, ours))

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self.running:
            process.kill()
            process.join()
            pipe.close()
        self.running = []


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the text of the BlockSparseError that a call raises."""
    try:
        function(*args, **options)
    except BlockSparseError as error:
        return str(error)
    raise AssertionError("no BlockSparseError")


def shared_error(group: Processes, function: Callable[..., Any], *args: Any) -> str:
    """Run a function that returns the text of an error on all processes; check that all texts are equal, return one."""
    texts = set(group(function, *args))
    assert len(texts) == 1, texts
    return texts.pop()


def rendezvous(count: int) -> dict[str, str]:
    """Return the environment variables by which `count` processes of this machine meet, as torchrun sets them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def run_script(
    count: int, script: Path, *arguments: str, folder: Path, timeout: float = 200, **environment: str
) -> str:
    """Run a script in a folder by `count` processes, with torchrun's variables and others; return what it prints."""
    shared = rendezvous(count)
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    variables = [environment | (shared | rank if count > 1 else {}) for rank in ranks]
    outputs = [folder / f"{script.stem}-{rank}.out" for rank in range(count)]
    running = [
        start_script(script, *arguments, variables=own, output=output)
        for own, output in zip(variables, outputs, strict=True)
    ]
    start = time.monotonic()
    for process in running:
        process.join(max(0.0, start + timeout - time.monotonic()))
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
    printed = "".join(output.read_text() for output in outputs)
    assert codes == [0] * count, f"exit codes {codes} (None: not in {timeout} s)\n{printed}"
    return printed


def start_script(script: Path, *arguments: str, variables: dict[str, str], output: Path) -> Any:
    """Start a script that prints to a file and runs in the file's folder; return its process."""
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
