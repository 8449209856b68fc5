"""The log of a run: lines of JSON, and curves for TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blocksparse.checked import is_int
from blocksparse.checkpoint import parsed
from blocksparse.errors import BlockSparseError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class RunLog:
    """RUN/log.jsonl, locked while open, and TensorBoard's events if it is installed."""

    def __init__(self, run: str | Path):
        self.path = Path(run) / "log.jsonl"
        self._events: Any = None
        try:
            # Refuse links, through which a foreign folder could have another file overwritten.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
            self._file = open(os.open(self.path, flags, 0o666), "a+b")  # noqa: SIM115
        except OSError as error:
            raise BlockSparseError.expected("run", "a folder to write to", f"{run} ({error.strerror})") from error
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._file.close()
                raise BlockSparseError.expected(
                    str(run), "a run that no other process trains", "one in training"
                ) from error
            except OSError:  # file systems without locks
                pass

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        # The checkpoint reported a full disk already, and the lock must be released.
        for one in (self._events, self._file):
            with suppress(OSError):
                if one is not None:
                    one.close()

    def is_empty(self) -> bool:
        return self.path.stat().st_size == 0

    def truncate_after(self, step: int, drop: bool = True) -> int:
        """Drop lines after `step` and an incomplete last line; return the step of the last remaining line.

        With `drop=False` the file does not change.
        """
        with self._disk_errors():
            self._file.seek(0)
            length = last = 0
            for line in self._file:
                if (at := _step(line)) > step:
                    break
                length, last = length + len(line), int(at)
            if drop:
                self._file.truncate(length)
        return last

    def open_tensorboard(self, after: int) -> bool:
        """Send further lines to TensorBoard too, which drops its points after a step; False if it is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return False
        with self._disk_errors():
            self._events = SummaryWriter(str(self.path.parent), purge_step=after + 1)
        return True

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a line, and a point to each TensorBoard curve."""
        with self._disk_errors():
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            for name, value in record.items():
                if self._events is not None and name not in ("step", "seconds"):
                    self._events.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with self._disk_errors():
            os.fsync(self._file.fileno())

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Report failed writes as a BlockSparseError."""
        try:
            yield
        except OSError as error:
            got = f"{error.strerror or error}; run again to resume from the checkpoint"
            raise BlockSparseError.expected(str(self.path), "room to write", got) from error


class NoLog:
    """The log of a rank that writes none."""

    def __enter__(self) -> NoLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: True


def read(run: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log without broken or incomplete ones; [] if there is no log."""
    path = Path(run) / "log.jsonl"
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise BlockSparseError.expected(str(path), "a file to read", error.strerror) from error
    return [json.loads(line) for line in lines if _step(line) < float("inf")]


def _step(line: bytes) -> float:
    """Return the step of a log line; infinity if the line is invalid."""
    try:
        step = parsed(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        step = None
    return float("inf") if step is None or not is_int(step) else step
