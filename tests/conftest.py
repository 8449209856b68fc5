"""Triton's interpreter where there is no GPU, and random numbers that are the same in every run unless asked for.

`BLOCKSPARSE_TEST_SEED=7` draws others, `BLOCKSPARSE_TEST_SEED=random` others in each run, which prints its seed.
`--rounds 200` runs each test 200 times, each with its own random numbers. Of a test's cases, a part that has each value
of each parameter runs in `make test`; the other combinations are `full`.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import signal
import sys
import zlib
from contextlib import nullcontext

import hypothesis
import pytest
import torch

from interpreter import patch_language_once

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported

# PyTorch notes at its first use which functions `with torch.device(...)` concerns: before a fixture replaces one.
with torch.device("meta"):
    torch.empty(0)

# A shell ignores this signal for background jobs, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SEED = os.environ.get("BLOCKSPARSE_TEST_SEED", "")
if SEED == "random":
    SEED = os.environ["BLOCKSPARSE_TEST_SEED"] = str(secrets.randbits(32))  # for the workers of xdist too
# No time limit per example: a first call may compile or load a library. A failure prints how to draw the example again.
hypothesis.settings.register_profile("blocksparse", deadline=None, derandomize=not SEED, database=None, print_blob=True)
hypothesis.settings.load_profile("blocksparse")


def pytest_addoption(parser):
    parser.addoption("--rounds", type=int, default=1, help="how often each test runs, with other random numbers")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Fail a test file that cannot be imported: `--doctest-ignore-import-errors` would skip all of its tests."""
    report = yield
    if report.skipped and collector.path.name.startswith("test_") and "unable to import" in str(report.longrepr):
        report.outcome = "failed"
    return report


def pytest_terminal_summary(terminalreporter):
    if SEED:
        terminalreporter.write_line(f"drawn with BLOCKSPARSE_TEST_SEED={SEED}")


def pytest_generate_tests(metafunc):
    rounds = metafunc.config.getoption("rounds")
    if rounds > 1:
        metafunc.fixturenames.append("_round")
        metafunc.parametrize("_round", range(rounds))


def seed(name: str) -> None:
    number = zlib.crc32(f"{name} {SEED}".encode())
    torch.manual_seed(number)
    random.seed(number)


def pytest_collection_modifyitems(items):
    """Tests on a `triton` backend are marked `gpu`."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value.startswith("triton") for value in parameters):
            item.add_marker("gpu")
    if not torch.cuda.is_available():
        cases = {}
        for item in items:
            if hasattr(item, "callspec") and not item.get_closest_marker("full"):
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for of_test in cases.values():
            for item in set(of_test) - set(covering(of_test)):
                item.add_marker("full")


def covering(items):
    """Some of a test's cases, with each value of each of its parameters; the other combinations are `full`."""
    left = [(item, set(enumerate(item.callspec._idlist))) for item in items]
    found, seen = [], set()
    while left:
        item, values = max(left, key=lambda case: len(case[1] - seen))
        if not values - seen:
            break
        found.append(item)
        seen |= values
        left.remove((item, values))
    return found


def pytest_collection_finish():
    """Exempt the modules and thousands of tests from garbage collection, which would visit them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if "triton.runtime.interpreter" in sys.modules:
        patch_language_once()
    seed(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Seed shared fixtures by their name, so that they do not depend on which test runs first."""
    if fixturedef.scope == "function":
        return (yield)
    seed(f"{fixturedef.baseid} {fixturedef.argname}")
    result = yield
    seed(request.node.nodeid)
    return result


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread, for steps so small that more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def any_backend():
    """Use the CPU's kernels, or the definition if they are not built."""
    import blocksparse as bs  # only after TRITON_INTERPRET is set

    with nullcontext() if bs.backends()["cpu"] else bs.use_backend("reference"):
        yield


@pytest.fixture
def speeds(monkeypatch):
    """Replaces measured speed-ups by a function of the block-sparse module, or model; lists what was measured."""
    from blocksparse.conversion import speed

    measured = []

    def set_to(ratio):
        def measure(self, dense, sparse, inputs, budget=0.1):
            measured.append((sparse, inputs))
            return ratio(sparse)

        monkeypatch.setattr(speed, "_measured", {})
        monkeypatch.setattr(speed.Speed, "_measure", measure)
        return measured

    return set_to


@pytest.fixture(scope="session")
def processes():
    """Gives `Processes` by their number, started at the first use: `processes(4)(function, *args)`."""
    from processes import Processes  # which starts a server

    started = {}
    yield lambda count: started.setdefault(count, Processes(count))
    for one in started.values():
        one.close()
