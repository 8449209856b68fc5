"""Counts the files of the library that a call runs through, and the calls from one of them to another.

python tests/library/trace_calls.py          the counts of a linear layer and of LSTMs, with each call
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import blocksparse as bs

ROOT = Path(bs.__file__).parent


class Trace(NamedTuple):
    """files: those run through. crossings: (from, to, function), for each call from one file to another."""

    files: set[str]
    crossings: list[tuple[str, str, str]]


def traced(call: Callable[[], object]) -> Trace:
    """Traces a call after two others, which leave plans and caches as every later call finds them."""
    call(), call()
    files: set[str] = set()
    crossings: list[tuple[str, str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        here = _file(frame)
        if event != "call" or here is None:
            return
        files.add(here)
        # Past PyTorch's own frames, such as those of nn.Module.
        before = next(filter(None, map(_file, _callers(frame))), None)
        if before is not None and before != here:
            crossings.append((before, here, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Trace(files, crossings)


def _file(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def _callers(frame: FrameType) -> Iterator[FrameType]:
    while (above := frame.f_back) is not None:
        yield (frame := above)


def linear() -> Callable[[], object]:
    layer, x = bs.nn.Linear(256, 256, density=0.5, block_size=32), torch.randn(16, 256)
    return lambda: layer(x)


def lstm() -> Callable[[], object]:
    """Three time steps."""
    module, x = bs.nn.LSTM(128, 256, density=0.25, block_size=32), torch.randn(3, 8, 128)
    return lambda: module(x)


def lstm_step() -> Callable[[], object]:
    """One time step, with the states of the last one."""
    module, x = bs.nn.LSTM(256, 256, density=0.25, block_size=32), torch.randn(1, 8, 256)
    _, states = module(x)
    return lambda: module(x, states)


def main() -> None:
    for make in (linear, lstm, lstm_step):
        call = make()
        for recorded in (False, True):
            with torch.set_grad_enabled(recorded):
                trace = traced(call)
            print(f"{make.__name__}, recorded {recorded}: {len(trace.files)} files, {len(trace.crossings)} crossings")
            for crossing in trace.crossings:
                print("   {:28} -> {:28} {}".format(*crossing))


if __name__ == "__main__":
    main()
