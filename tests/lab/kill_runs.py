"""Kill training runs at random moments until they end: each must end with the same tensors as an undisturbed run.

    python tests/lab/kill_runs.py --kills 100 --seed 0 --log docs/development/kills.md

Each run is tiny and saves after each step, on a disk that is made slow, so that many kills hit a file being written. A
run is a process of its own, forked after all imports, and gets SIGKILL, SIGINT or SIGTERM.

    python tests/lab/kill_runs.py --processes 2 --kills 20 --log kills.md

trains with torchrun instead, which restarts all processes after a random one got SIGKILL; with `--shard` under FSDP2.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from blocksparse import checkpoint
from blocksparse_lab.machine import machine
from blocksparse_lab.training import run_log
from blocksparse_lab.training.parallel import Parallel
from blocksparse_lab.training.trainer import Interrupted

sys.path.append(str(Path(__file__).parent))
from recipe_table import RECIPES

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
SLOW = 0.01  # seconds of each fsync and replace
KILLS_OF_A_RUN = 4
TIMES = {"seconds", "bytes_per_second"}


KINDS = {name: RECIPES[name].build for name in ("charlm", "mlp", "resnet", "pixelcnn", "prune")}


# -- their ends ----------------------------------------------------------------------------------------------------


def begun(kind: str, run: Path) -> int:
    """Start the process that trains in the folder."""
    if (process := os.fork()) > 0:
        return process
    code = 1
    try:
        for name in ("fsync", "replace"):
            setattr(os, name, slowly(getattr(os, name)))
        with torch.random.fork_rng(devices=[]):
            KINDS[kind](run).train()
        code = 0
    except (Interrupted, KeyboardInterrupt):
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


# -- under torchrun ------------------------------------------------------------------------------------------------


def worker(kind: str, run: Path, shard: bool) -> None:
    """Train as one process of torchrun, and record its process id."""
    for name in ("fsync", "replace"):
        setattr(os, name, slowly(getattr(os, name)))
    with Parallel(timeout=20).join(), torch.random.fork_rng(devices=[]):
        trainer = KINDS[kind](run, shard=shard)
        (run.parent / f"{run.name}.{trainer.rank}").write_text(str(os.getpid()))
        trainer.train()


def launched(kind: str, run: Path, processes: int, restarts: int, shard: bool) -> subprocess.Popen:
    """Start torchrun for a run."""
    for old in run.parent.glob(f"{run.name}.[0-9]*"):
        old.unlink()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launch += [f"--max-restarts={restarts}", "--monitor-interval=0.1", __file__, "--worker", kind, str(run)]
    launch += ["--shard"] * shard
    return subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pids(run: Path, processes: int) -> list[int]:
    """Return the process ids of all ranks; [] until all are recorded."""
    files = [run.parent / f"{run.name}.{rank}" for rank in range(processes)]
    texts = [file.read_text() for file in files if file.is_file()]
    return [int(text) for text in texts] if len(texts) == processes and all(texts) else []


def killed_by_torchrun(
    kind: str, kills: int, run: Path, processes: int, shard: bool, seconds: float, rng
) -> Counter[str]:
    """Train to the end while random processes are killed; torchrun restarts all each time.

    Raises:
        RuntimeError: the run ended by itself with an error.
    """
    count: Counter[str] = Counter(runs=1)
    launch = launched(kind, run, processes, kills, shard)
    before: set[int] = set()
    while launch.poll() is None:
        now = pids(run, processes)
        # All ranks restart after a kill.
        if count["kills"] < kills and now and not before & set(now):
            time.sleep(rng.uniform(0, 0.8 * seconds))
            with suppress(ProcessLookupError):
                os.kill(rng.choice(now), signal.SIGKILL)
                before = set(now)
                count += Counter(kills=1, writing=bool(list(run.glob("*.part"))))
        time.sleep(0.02)
    if launch.returncode != 0:
        raise RuntimeError(f"{kind} ended with status {launch.returncode}: {launch.communicate()[0][-3000:]}")
    return count


def campaign_of_torchrun(kinds: list[str], kills: int, seed: int, processes: int, shard: bool, folder: Path):
    """Return counts by kind and signal, like `campaign`."""
    rng, found = random.Random(seed), {}
    for nth, kind in enumerate(kinds):
        whole = folder / kind
        launch = launched(kind, whole, processes, 0, shard)
        while not pids(whole, processes):
            if launch.poll():
                raise RuntimeError(launch.communicate()[0])
            time.sleep(0.02)
        started = time.perf_counter()
        if launch.wait() != 0:
            raise RuntimeError(launch.communicate()[0])
        seconds = time.perf_counter() - started
        share = kills // len(kinds) + (nth < kills % len(kinds))
        count: Counter[str] = Counter()
        while count["kills"] < share:
            run = folder / f"{kind}-{count['runs']}"
            wanted = min(KILLS_OF_A_RUN, share - count["kills"])
            one = killed_by_torchrun(kind, wanted, run, processes, shard, seconds, rng)
            count += one + Counter(same=one["kills"] * same(run, whole))
        found[kind, signal.SIGKILL] = count
        print(f"{kind}, SIGKILL: {count['same']} of {count['kills']} to the same tensors", flush=True)
    return found


def slowly(call):
    def slow(*arguments):
        time.sleep(SLOW)
        return call(*arguments)

    return slow


def ended(process: int) -> int:
    """Return the exit status; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def state(run: Path):
    tensors, about = checkpoint.load(run / "last.safetensors")
    lines = [{key: value for key, value in line.items() if key not in TIMES} for line in run_log.read(run)]
    return tensors, about["step"], about["held_out"], lines


def same(run: Path, other: Path) -> bool:
    (ours, *rest), (theirs, *others) = state(run), state(other)
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return equal and rest == others and (run / "result.json").is_file() and not list(run.glob("*.part"))


def killed(kind: str, number: int, wanted: int, run: Path, seconds: float, rng: random.Random) -> tuple[int, int]:
    """Train to the end with at most `wanted` kills; return how many hit, and how many of them during a write.

    Raises:
        RuntimeError: the run ended by itself with an error.
    """
    hits = writing = 0
    while hits < wanted:
        process = begun(kind, run)
        # Some kills hit a process's start; most hit a step or the writing after it.
        time.sleep(rng.uniform(0, seconds / 2))
        os.kill(process, number)
        status = ended(process)
        if status == 0:
            break
        if status not in (-number, 130):
            raise RuntimeError(f"{kind} ended with status {status} after {signal.Signals(number).name}")
        hits += 1
        writing += bool(list(run.glob("*.part")))
    else:
        if (status := ended(begun(kind, run))) != 0:
            raise RuntimeError(f"{kind} ended with status {status}")
    return hits, writing


def campaign(kinds: list[str], kills: int, seed: int, folder: Path):
    """Return (kills, kills during a write, runs, kills of runs with the same tensors) by kind and signal."""
    rng, found = random.Random(seed), {}
    KINDS["charlm"](folder / "first").train()  # no run should spend seconds on imports
    cells = [(kind, number) for kind in kinds for number in SIGNALS]
    share = {cell: kills // len(cells) + (nth < kills % len(cells)) for nth, cell in enumerate(cells)}
    for kind in kinds:
        whole = folder / kind
        started = time.perf_counter()
        if (status := ended(begun(kind, whole))) != 0:
            raise RuntimeError(f"{kind} ended with status {status}")
        seconds = time.perf_counter() - started
        for number in SIGNALS:
            count: Counter[str] = Counter()
            for nth in range(20 * kills):
                if count["kills"] == share[kind, number]:
                    break
                run = folder / f"{kind}-{number}-{nth}"
                wanted = min(KILLS_OF_A_RUN, share[kind, number] - count["kills"])
                hits, writing = killed(kind, number, wanted, run, seconds, rng)
                count += Counter(kills=hits, writing=writing, runs=1, same=hits * same(run, whole))
            found[kind, number] = count
            name = signal.Signals(number).name
            print(f"{kind}, {name}: {count['same']} of {count['kills']} to the same tensors", flush=True)
    return found


def report(found, seed: int, processes: int = 1, shard: bool = False) -> str:
    total = sum(found.values(), Counter())
    here = machine("cpu")
    commit = f"{here['commit'][:8]}{' with changes' if here['dirty'] else ''}" if here["commit"] else "unknown"
    if processes == 1:
        about = [
            "# Runs that were killed",
            "",
            f"After {total['same']} of {total['kills']} kills at random moments, the resumed run ended with the",
            "tensors, log and figure of a run that was never killed, bit for bit. Runs are tiny, with a checkpoint",
            f"after each step and up to {KILLS_OF_A_RUN} kills each. A kill in writing leaves an incomplete file.",
            "A process that gets SIGINT or SIGTERM first finishes its step and saves, unless it has not begun.",
        ]
    else:
        about = [
            "# Runs of several processes of which one was killed",
            "",
            f"A random one of {processes} processes of torchrun was killed at random moments. torchrun restarted",
            f"all processes, which resumed from the last checkpoint. After {total['same']} of {total['kills']} kills",
            "the run ended with the tensors, log and figure of a run that was never killed, bit for bit. Runs are",
            f"tiny, with a checkpoint after each step and up to {KILLS_OF_A_RUN} kills each.",
        ]
    lines = [
        *about,
        "",
        "| run | signal | kills | in writing | runs | ended with the same tensors |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for (kind, number), of in [*found.items(), (("all", None), total)]:
        name = signal.Signals(number).name if number else ""
        ended_same = f"{of['same']} of {of['kills']}"
        lines.append(f"| {kind} | {name} | {of['kills']} | {of['writing']} | {of['runs']} | {ended_same} |")
    versions = f"Python {sys.version.split()[0]}, torch {here['torch']}, blocksparse {here['blocksparse']}"
    command = f"python tests/lab/kill_runs.py --kills {total['kills']} --seed {seed}"
    if len(kinds := dict.fromkeys(kind for kind, _ in found)) < len(KINDS):
        command += f" --kinds {','.join(kinds)}"
    command += f" --processes {processes}" if processes > 1 else ""
    command += " --shard" if shard else ""
    return "\n".join([*lines, "", f"Made by `{command}`: commit {commit}, {versions}.", ""])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kinds", default=",".join(KINDS))
    options.add_argument("--log", type=Path)
    options.add_argument("--processes", type=int, default=1, help="more than one: under torchrun")
    options.add_argument("--shard", action="store_true", help="of several: each stores a piece of the model")
    options.add_argument("--worker", nargs=2, metavar=("KIND", "FOLDER"), help="what torchrun starts")
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.worker:
        worker(given.worker[0], Path(given.worker[1]), given.shard)
        return
    kinds = given.kinds.split(",")
    with tempfile.TemporaryDirectory() as folder:
        if given.processes == 1:
            found = campaign(kinds, given.kills, given.seed, Path(folder))
        else:
            found = campaign_of_torchrun(kinds, given.kills, given.seed, given.processes, given.shard, Path(folder))
    if given.log is not None:
        given.log.write_text(report(found, given.seed, given.processes, given.shard))
    total = sum(found.values(), Counter())
    print(f"{total['same']} of {total['kills']} in {total['runs']} runs, {total['writing']} of them in writing")
    sys.exit(total["same"] != total["kills"] or total["kills"] != given.kills)


if __name__ == "__main__":
    main()
