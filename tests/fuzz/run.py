"""Command line of the fuzz: workers that run cases, and a supervisor that records what they find."""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import cases, log, memory
from .calls import Calls

HERE = Path(__file__).parent
CORPUS = HERE / "corpus.jsonl"
# Exit status of a worker that found a fault and continued.
FOUND = 3
# Seconds after which a case counts as endless.
MAX_SECONDS = 300
# Seconds between log lines.
LOG_SECONDS = 30


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.seed is None:
        options.seed = int(time.time())
    if options.summary:
        print(log.summary(options.summary), end="")
        return 0
    if options.worker:
        return _work(options)
    if options.only is not None or options.corpus:
        return _replay(options)
    return _supervise(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description="Random calls of the compiled core.")
    parser.add_argument("--seed", type=int, help="seed of the cases (default: the time)")
    parser.add_argument("--minutes", type=float, help="how long (default 1, or as long as --calls takes)")
    parser.add_argument("--calls", type=int, help="stop after this number of calls of the core")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default one per CPU)")
    parser.add_argument("--first", type=int, default=0, metavar="INDEX", help="start with this case")
    parser.add_argument("--only", type=int, metavar="INDEX", help="run only this case, and print it")
    parser.add_argument("--corpus", action="store_true", help="run only the cases in corpus.jsonl")
    parser.add_argument("--isa", action="append", help="only on this instruction set; may be repeated")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append counts and faults to this file as JSON lines")
    parser.add_argument("--summary", type=Path, metavar="LOG", help="print a summary of a log")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def corpus(file: Path = CORPUS) -> list[dict]:
    """Return the cases that were found once."""
    return [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []


# -- one case --------------------------------------------------------------------------------------------------------


def attempt(case: dict, calls: Calls) -> str | None:
    """Return the fault of this case, or None."""
    try:
        with memory.tight():
            cases.run(case, calls)
    except Exception as error:
        return ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return None


def run_cases(seed: int, indices: Iterable[int], calls: Calls) -> list[str]:
    """Run the cases of these indices; return the faults with the commands that replay them."""
    found = ((index, attempt(cases.draw(seed, index), calls)) for index in indices)
    return [report(seed, index, fault) for index, fault in found if fault]


def report(seed: int, index: int, fault: str) -> str:
    """Return the line of a fault with the command that replays it."""
    return f"FAULT {fault}\n  {command(seed, index)}"


def command(seed: int, index: int) -> str:
    return f"python tests/fuzz --seed {seed} --only {index}"


def _replay(options: argparse.Namespace) -> int:
    faults = 0
    chosen = corpus() if options.only is None else [cases.draw(options.seed, options.only)]
    calls = Calls(options.isa)
    for case in chosen:
        print(json.dumps(case), flush=True)
        fault = attempt(case, calls)
        print(f"FAULT {fault}" if fault else "right")
        faults += bool(fault)
    return FOUND if faults else 0


# -- workers and their supervisor -----------------------------------------------------------------------------------


def _work(options: argparse.Namespace) -> int:
    """Run the cases first, first + step, ...; the index of each goes to shared memory first, for the supervisor."""
    place, first, step, calls_left, until = json.loads(options.worker)
    calls, faults, began, found = Calls(options.isa), [], time.time(), False
    with open(place, "r+b") as file, mmap.mmap(file.fileno(), 8) as where:
        index = first
        while time.time() < until and calls.total() < calls_left:
            where[:] = struct.pack("<q", index)
            fault = attempt(cases.draw(options.seed, index), calls)
            if fault:
                print(report(options.seed, index, fault), flush=True)
                faults.append({"index": index, "fault": fault})
                found = True
            index += step
            if time.time() > began + LOG_SECONDS:
                log.add(options, calls.counts, faults, time.time() - began)
                calls_left -= calls.total()
                calls.counts.clear()
                faults, began = [], time.time()
    log.add(options, calls.counts, faults, time.time() - began)
    return FOUND if found else 0


def _supervise(options: argparse.Namespace) -> int:
    print(f"seed {options.seed}", flush=True)
    found = subprocess.run([sys.executable, str(HERE), "--corpus"], stdout=subprocess.DEVNULL).returncode != 0
    if found:
        print("FAULT in the corpus\n  python tests/fuzz --corpus", flush=True)
    minutes = options.minutes or (math.inf if options.calls else 1)
    until = time.time() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(_keep_working, options, Path(folder) / str(n), n, until) for n in range(options.jobs)]
    return FOUND if any([found, *(job.result() for job in jobs)]) else 0


def _keep_working(options: argparse.Namespace, place: Path, nth: int, until: float) -> bool:
    """Run workers one after the other, each after the case in which the last one died; return whether any found a
    fault.
    """
    first, found, calls = options.first + nth, False, options.calls // options.jobs if options.calls else 1 << 62
    while True:
        place.write_bytes(struct.pack("<q", first))
        task = json.dumps([str(place), first, options.jobs, calls, until])
        arguments = [f"--seed={options.seed}", *(f"--isa={isa}" for isa in options.isa or ())]
        arguments += [f"--log={options.log}"] if options.log else []
        with tempfile.TemporaryFile() as stderr:
            worker = subprocess.Popen([sys.executable, str(HERE), *arguments, f"--worker={task}"], stderr=stderr)
            status = _wait(worker, place)
            stderr.seek(0)
            output = stderr.read().decode(errors="replace")
        if status is not None and status >= 0:  # it ended by itself
            print(output, end="", flush=True)
            return found or status != 0
        (index,) = struct.unpack("<q", place.read_bytes())
        fault = f"died with status {status}" if status is not None else f"no end within {MAX_SECONDS} s"
        print(f"{output}\n{report(options.seed, index, fault)}", flush=True)
        log.add(options, {}, [{"index": index, "fault": fault, "said": output[-4000:]}], 0)
        first, found = index + options.jobs, True


def _wait(worker: subprocess.Popen, place: Path) -> int | None:
    """Return the worker's status, or None if it is killed because it stays in one case."""
    before, since = b"", time.time()
    while worker.poll() is None:
        time.sleep(0.2)
        now = place.read_bytes()
        if now != before:
            before, since = now, time.time()
        elif time.time() > since + MAX_SECONDS:
            worker.kill()
            worker.wait()
            return None
    return worker.returncode
