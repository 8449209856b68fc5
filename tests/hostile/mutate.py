"""Read broken files until one does harm: `python tests/hostile/mutate.py --cases 10000 --seed 1`.

A file must load or raise a BlockSparseError, in little time and memory. Any other outcome ends the run with a nonzero
exit status and leaves the file in the folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from blocksparse import BlockSparseError, files
from blocksparse_lab.data import pickles
from hostile.formats import FORMATS, MIB, Format

# Limits per file: seconds, and bytes of memory beyond the initial ones.
MAX_SECONDS = 60
MAX_MEMORY = 400 * MIB
# Bounds that are lowered here, so that they are reached quickly.
MAX_UNPACKED = str(1 / 1024)
LOWER = ((files, "MAX_IN_A_LINE", MIB), (files, "MAX_EMPTY", 10_000), (pickles, "MAX_STEPS", 1 << 15))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Make one to four changes of a file: bits, bytes, lengths, order, truncation, repetition."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(found) + 1) if rng.random() < 0.5 else rng.randrange(min(len(found), 64) + 1)
        end = min(len(found), at + rng.choice((1, 2, 4, 8, 64)))
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at:end] = rng.randbytes(end - at)
            case 2:
                del found[at : rng.choice((end, len(found)))]
            case 3:
                found[at:at] = found[at:end] * rng.choice((1, 2, 1000))
            case 4:  # may be a length or an index
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice((0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1))
                found[at : at + size] = (number % 256**size).to_bytes(size, rng.choice(("little", "big")))
            case 5:
                other = rng.randrange(len(found) + 1)
                found[at:end] = found[other : other + end - at]
            case _:
                some = (b"\0", b"\xff", b"_", b"-", b'"', b"nan", b"1e999", b"[" * 2000, b",", b"\n", b"9" * 5000)
                found[at:end] = rng.choice(some)
    return bytes(found)


def cases(seed: int) -> Iterator[tuple[Format, bytes]]:
    """Yield all malicious files, then mutated files of each format in turn, without end."""
    for form in FORMATS:
        yield form, form.valid[form.name]
        for made in form.hostile.values():
            yield form, made
    rng = random.Random(seed)
    while True:
        for form in FORMATS:
            data = form.valid[form.name]
            if data[:2] == b"\x1f\x8b" and rng.random() < 0.7:  # behind the checksum
                yield form, gzip.compress(mutated(gzip.decompress(data), rng), mtime=0)
            else:
                yield form, mutated(data, rng)


def run(form: Format, content: bytes, folder: Path) -> bool:
    """Return whether the file loads.

    Raises:
        Exception: whatever a reader raises except BlockSparseError.
    """
    for name, data in form.valid.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if name == form.name else data)
    try:
        form.read(folder)
    except BlockSparseError:
        return False
    return True


def on_purpose() -> int:
    """Return the number of files that are not mutated at random."""
    return sum(1 + len(form.hostile) for form in FORMATS)


def _memory() -> int:
    """Return the peak memory in bytes."""
    with suppress(OSError):  # on Linux, where the other call includes the parent's memory
        return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(cases_: int = 3000, seed: int = 0, minutes: float | None = None, folder: Path | None = None) -> str:
    """Read the malicious and some mutated files up to a number or a time, in a process of its own.

    Raises:
        RuntimeError: a file needed too much memory, or raised anything but a BlockSparseError.
    """
    warnings.simplefilter("error")
    os.environ["BLOCKSPARSE_MAX_UNPACKED"] = MAX_UNPACKED
    for module, name, bound in LOWER:
        setattr(module, name, bound)
    faulthandler.enable()
    end = time.monotonic() + 60 * minutes if minutes is not None else None
    work = Path(folder or tempfile.mkdtemp(prefix="hostile-"))
    print(f"files in {work}", flush=True)
    start, count, loaded = _memory(), 0, 0
    most = on_purpose() + cases_
    for count, (form, content) in enumerate(cases(seed)):
        if (count >= most) if end is None else time.monotonic() > end:
            break
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
        try:
            fine = run(form, content, work)
        except Exception as error:
            raise RuntimeError(f"case {count} of seed {seed}, {work / form.name}: {type(error).__name__}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        loaded += fine
        if content == form.valid[form.name] and not fine:
            raise RuntimeError(f"case {count}, a valid {form.name}, was refused")
        if _memory() > start + MAX_MEMORY:
            raise RuntimeError(
                f"case {count} of seed {seed}, {work / form.name}: {_memory() - start:,} bytes of memory"
            )
    shutil.rmtree(work, ignore_errors=True)
    return f"{count} files, of which {loaded} loaded; {(_memory() - start) / MIB:.0f} MiB of memory at most"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--folder", type=Path, help="where the files are written")
    given = parser.parse_args()
    print(main(given.cases, given.seed, given.minutes, given.folder))
