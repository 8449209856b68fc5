"""Several threads and forked processes: what docs/understand/threads.md promises, in processes with time-outs."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import blocksparse as bs
from blocksparse.ops import cpu_core
from blocksparse.ops.attention import few_queries
from blocksparse.ops.linear import LINEAR, linear_transposed
from processes import run_script

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
compiled = pytest.mark.skipif(cpu_core.unavailable() is not None, reason="the compiled core is off")

FORKS = """
import os, signal, sys, threading, time
import torch
import blocksparse as bs
from blocksparse.ops import workspace

torch.set_num_threads(2)


def product(size=512):
    # Long enough for PyTorch's threads, in our loops and in its own.
    layout = bs.patterns.random((size, size), block_size=32, density=0.5, seed=0)
    x = torch.linspace(-1, 1, 2 * size * size).view(-1, size).requires_grad_()
    values = torch.linspace(-1, 1, layout.nnz * 1024).view(layout.values_shape).requires_grad_()
    y = bs.linear(x, values, layout, activation="gelu")
    y.sum().backward()
    return y.detach(), x.grad, values.grad


def in_children(count, work, patience=20):
    # Children that are not through after this number of seconds are told by their number.
    late = 0
    for _ in range(count):
        child = os.fork()
        if child == 0:
            signal.alarm(patience)  # which ends it
            try:
                os._exit(0 if work() else 3)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(4)
        status = os.waitpid(child, 0)[1]
        late += status != 0
        if late == 2:
            break
    print(late, "of", count, "failed")
"""


def said_by(script: str, arguments: tuple[str, ...] = (), timeout: float = 100) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(script)
        return run_script(1, path, *arguments, folder=Path(folder), timeout=timeout).strip()


# -- fork --------------------------------------------------------------------------------------------------------


@forks
def test_a_fork_while_another_thread_takes_memory():
    script = """
over = threading.Event()

def take():
    while not over.is_set():
        workspace.empty((1 << 20,), torch.float32, torch.device("cpu"))

thread = threading.Thread(target=take)
thread.start()
time.sleep(0.1)

def work():
    first = workspace.empty((1 << 20,), torch.float32, torch.device("cpu")).fill_(1)
    address = first.data_ptr()
    del first
    return workspace.empty((1 << 20,), torch.float32, torch.device("cpu")).data_ptr() == address

in_children(5, work, 5)
over.set()
"""
    assert said_by(FORKS + script) == "0 of 5 failed"


@forks
def test_a_fork_while_another_thread_transposes_a_layout():
    script = """
over = threading.Event()

def transpose():
    while not over.is_set():
        bs.BlockLayout.from_indices(range(200_000), range(200_000), (200_000, 200_000), 1).T

thread = threading.Thread(target=transpose)
thread.start()
time.sleep(0.2)
in_children(4, lambda: bs.BlockLayout([[1, 0]], 1).T.grid == (2, 1), 5)
over.set()
"""
    assert said_by(FORKS + script) == "0 of 4 failed"


@forks
@pytest.mark.parametrize(
    "before", ["product", *(pytest.param(name, marks=pytest.mark.full) for name in ("torch", "nothing"))]
)
def test_products_in_the_child_of_a_process_that_has_used_its_threads(before):
    script = """
wanted = [torch.empty(0)] * 3
if sys.argv[1] == "product":
    wanted = product()
elif sys.argv[1] == "torch":
    torch.ones(1 << 22).mul(2)

def work():
    found = product()
    if torch.get_num_threads() != 2:
        return False
    torch.ones(1 << 22).mul(2)
    return all(w.numel() == 0 or torch.equal(f, w) for f, w in zip(found, wanted))

in_children(3, work)
print(all(torch.equal(f, w) for f, w in zip(product(), product())))
"""
    assert said_by(FORKS + script, (before,)) == "0 of 3 failed\nTrue"


# -- threads -----------------------------------------------------------------------------------------------------


def results_of(layout, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, layout.shape[1], generator=generator).requires_grad_()
    values = torch.randn(layout.values_shape, generator=generator).requires_grad_()
    gate = (torch.rand(layout.nnz, generator=generator) < 0.5).float()
    y = bs.linear(x, values, layout)
    y.square().sum().backward()
    with torch.no_grad():
        gated = bs.linear(x, values, layout, gate=gate)
        back = linear_transposed(y.detach(), values, layout)
    return [y.detach(), gated, back, x.grad, values.grad]


@pytest.mark.parametrize("block", [1, 16])
def test_threads_that_share_layouts_nobody_has_planned_give_the_bits_of_one(block):
    def layouts():
        return [bs.patterns.random((96, 64), block_size=block, density=0.4, seed=seed) for seed in range(4)]

    wanted = [[results_of(layout, seed) for seed in range(12)] for layout in layouts()]
    for _ in range(3):
        cold = layouts()
        with ThreadPoolExecutor(4) as pool:
            found = [[pool.submit(results_of, layout, seed) for seed in range(12)] for layout in cold]
            for of, same in zip(found, wanted, strict=True):
                for one, other in zip(of, same, strict=True):
                    assert all(map(torch.equal, one.result(), other))


@compiled
def test_another_call_on_the_layout_does_not_change_the_options_of_a_decoding_call(monkeypatch):
    layout = bs.patterns.sliding_window(64, 64, block_size=16)
    q, k, v = (torch.randn(1, 2, tokens, 16) for tokens in (1, 64, 64))
    key, others = few_queries._key, []

    def decode(scale):
        with torch.no_grad():
            return bs.nn.attention(q, k, v, layout, True, scale=scale)

    def key_while_another_thread_decodes(*args):
        found = key(*args)
        if others:
            others.pop()(0.3)
        return found

    expected = decode(0.1)
    monkeypatch.setattr(few_queries, "_key", key_while_another_thread_decodes)
    others.append(decode)
    assert torch.equal(decode(0.1), expected)


@pytest.mark.parametrize("which", ["backend", "isa"])
def test_each_thread_takes_back_its_own_choice(which):
    """The choice is that of the whole process; the one who entered last is obeyed, whoever leaves first."""
    use, now, first, second = {
        "backend": (
            bs.use_backend,
            lambda: LINEAR.on(torch.device("cpu"), torch.float32).__name__.rpartition(".")[2],
            "reference",
            "cpu",
        ),
        "isa": (cpu_core.use_isa, cpu_core.isa, *[name for name, here in cpu_core.isas().items() if here][:2]),
    }[which]
    usual, entered, leave = now(), threading.Event(), threading.Event()

    def other():
        with use(first):
            entered.set()
            leave.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(20)
    assert now() == first
    with use(second):
        assert now() == second
        leave.set()
        thread.join()
        assert now() == second
    assert now() == usual


def test_choices_that_come_and_go_meanwhile_disturb_no_thread():
    layout = bs.patterns.dense((4, 4), block_size=2)
    x, values, over, failed = torch.ones(1, 4), torch.ones(layout.values_shape), threading.Event(), []

    def choose():
        while not over.is_set():
            with bs.use_backend("reference"):
                pass

    def multiply():
        try:
            for _ in range(3000):
                bs.linear(x, values, layout)
        except Exception as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        others = [threading.Thread(target=choose) for _ in range(2)]
        ours = [threading.Thread(target=multiply) for _ in range(2)]
        for thread in (*others, *ours):
            thread.start()
        for thread in ours:
            thread.join()
        over.set()
        for thread in others:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []


# -- a layout that changes ---------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("block", [1, 32])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_values_that_are_replaced_during_a_product_are_read_to_its_end(kind, block, monkeypatch):
    """Another thread gives the module other values between the checks of a product and its kernel."""
    if kind == "linear":
        layer, x = bs.nn.Linear(128, 128, block_size=block, density=0.5), torch.randn(8, 128)
    else:
        layer = bs.nn.Conv2d(128, 128, 3, padding=1, block_size=block, density=0.5)
        x = torch.randn(2, 128, 6, 6)
    layer.requires_grad_(False)
    wanted, begun, core = layer(x), layer.layout, cpu_core.core()
    larger = bs.patterns.dense(begun.shape, block)
    replaced = []

    class Core:
        def __getattr__(self, name):
            if not replaced:
                replaced.append(name)
                layer.set_layout(larger, torch.full((larger.nnz, *layer.values.shape[1:]), torch.nan))
                # Where the old values lay, if they were freed.
                replaced.extend(torch.full((begun.nnz, *layer.values.shape[1:]), torch.nan) for _ in range(8))
            return getattr(core, name)

    monkeypatch.setattr(cpu_core, "core", Core)
    assert torch.equal(layer(x), wanted)
    assert replaced
    assert layer(x).isnan().all()


def test_a_backward_pass_through_values_that_were_replaced_is_refused():
    layer, x = bs.nn.Linear(8, 8, block_size=2, density=0.5), torch.ones(3, 8, requires_grad=True)
    loss = layer(x).sum()
    turned = layer.layout.T  # of as many blocks
    layer.set_layout(turned, torch.ones(turned.values_shape))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    layer(x).sum().backward()
    assert torch.equal(x.grad, bs.to_dense(layer.values.detach(), turned).sum(0).expand(3, 8))


HAMMER = """
import faulthandler, sys, threading, time
import torch
import blocksparse as bs

faulthandler.enable()
torch.set_num_threads(2)
sys.setswitchinterval(1e-5)
block = int(sys.argv[1])
layer = bs.nn.Linear(256, 256, density=0.5, block_size=block)
layouts = [bs.patterns.random((256, 256), block_size=block, density=d, seed=i) for i, d in enumerate((0.02, 0.9, 0.5))]
values = [torch.ones(layout.values_shape) for layout in layouts]
states = []
for layout, one in zip(layouts, values):
    layer.set_layout(layout, one.clone())
    states.append({name: tensor.clone() for name, tensor in layer.state_dict().items()})
over, calls, unexpected = time.monotonic() + 0.7, {"right": 0, "refused": 0, "changed": 0}, []


def hammer(work):
    while time.monotonic() < over and not unexpected:
        try:
            work()
        except bs.BlockSparseError:
            calls["refused"] += 1
        except RuntimeError as error:  # PyTorch's, of a backward pass
            if "modified by an inplace operation" not in str(error) and "an invalid gradient" not in str(error):
                unexpected.append(repr(error))
            calls["refused"] += 1
        except Exception as error:
            unexpected.append(repr(error))


def forward():
    with torch.no_grad():
        layer(torch.ones(16, 256))
    calls["right"] += 1


def backward():
    x = torch.ones(16, 256, requires_grad=True)
    torch.autograd.grad(layer(x).sum(), x)
    calls["right"] += 1


def change():
    i = calls["changed"] % 3
    if calls["changed"] % 2:
        layer.set_layout(layouts[i], values[i].clone())
    else:
        layer.load_state_dict(states[i])
    calls["changed"] += 1


threads = [threading.Thread(target=hammer, args=(work,)) for work in (forward, backward, change)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert min(calls["right"], calls["changed"]) > 10, calls
print(*unexpected)
"""


@pytest.mark.parametrize("block", ["1", "32"])
def test_a_layout_that_changes_while_others_run_the_module(block):
    assert said_by(HAMMER, (block,)) == ""
