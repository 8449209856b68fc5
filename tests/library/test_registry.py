"""Which backend serves a call, and what a refusal says."""

import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import blocksparse as bs
from blocksparse import compiled_core
from blocksparse.ops import cpu_core, registry
from blocksparse.ops.linear import op

CPU = torch.device("cpu")


def call(dtype=torch.float32):
    layout = bs.BlockLayout([[True]], block_size=4)
    return bs.linear(torch.ones(2, 4, dtype=dtype), torch.ones(layout.values_shape, dtype=dtype), layout)


def chosen(device=CPU, dtype=torch.float32):
    return op.LINEAR.on(device, dtype)


def forget_core():
    for found in (compiled_core.load, cpu_core._load, cpu_core.unavailable):
        if hasattr(found, "cache_clear"):
            found.cache_clear()


@pytest.fixture
def no_core(monkeypatch):
    """Hide the compiled core, as before it was built."""
    monkeypatch.setitem(sys.modules, "blocksparse._core", None)
    monkeypatch.delattr(bs, "_core", raising=False)
    forget_core()
    yield
    forget_core()


def test_an_older_core_has_to_be_built_again(monkeypatch):
    monkeypatch.setitem(sys.modules, "blocksparse._core", object())
    monkeypatch.setattr(bs, "_core", object(), raising=False)
    forget_core()
    try:
        assert "older than this Python code: it lacks plan_blocks. Build it again" in bs.backends()["cpu"].reason
    finally:
        monkeypatch.undo()
        forget_core()


def test_every_backend_is_usable_or_has_a_reason():
    known = bs.backends()
    assert set(known) == {"triton", "cpu", "reference"}
    for name, status in known.items():
        assert status.name == name
        assert bool(status) is status.usable is (status.reason is None)
        assert str(status).startswith("usable" if status else f"off: {status.reason}")
    assert known["cpu"].usable
    assert "instruction set" in known["cpu"].details


def test_a_device_has_its_backend():
    assert chosen() is op.cpu


def test_use_backend_nests():
    with bs.use_backend("reference"):
        assert chosen() is op.reference
        with bs.use_backend("cpu"):
            assert chosen() is op.cpu
            with bs.use_backend("reference"):
                assert chosen() is op.reference
            assert chosen() is op.cpu
        assert chosen() is op.reference
    assert chosen() is op.cpu


def test_use_backend_ends_with_an_exception():
    with pytest.raises(KeyError), bs.use_backend("reference"):
        raise KeyError
    assert chosen() is op.cpu


def test_use_backend_holds_in_other_threads():
    seen = []
    with bs.use_backend("reference"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == [op.reference]


def test_each_use_backend_removes_its_own_entry():
    first, second = bs.use_backend("reference"), bs.use_backend("cpu")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert chosen() is op.cpu
    second.__exit__(None, None, None)
    assert not registry._forced


def test_backward_uses_the_backend_too(monkeypatch):
    def refuses(*_):
        raise AssertionError("the cpu backend was called")

    for product in ("linear", "linear_wgrad"):
        monkeypatch.setattr(op.cpu, product, refuses)
    layout = bs.BlockLayout([[True]], block_size=4)
    values = torch.ones(layout.values_shape, requires_grad=True)
    with bs.use_backend("reference"):
        bs.linear(torch.ones(2, 4, requires_grad=True), values, layout).sum().backward()
    assert (values.grad == 2).all()


def test_unknown_backend():
    with pytest.raises(bs.BlockSparseError, match="backend: expected one of triton, cpu, reference, got 'gpu'"):  # noqa: SIM117
        with bs.use_backend("gpu"):
            pass


@pytest.mark.parametrize("name", [name for name, status in bs.backends().items() if not status])
def test_a_backend_that_is_off_gives_its_reason(name):
    with pytest.raises(bs.BlockSparseError) as caught, bs.use_backend(name):
        pass
    reason = bs.backends()[name].reason
    assert str(caught.value) == f"backend: expected a usable one, got {name!r}, which is off here: {reason}"


def test_the_error_of_a_refused_dtype_has_a_reason_and_a_remedy():
    with pytest.raises(
        bs.BlockSparseError, match=r"linear: expected .* got torch\.int32 on cpu: the cpu backend refuses"
    ) as caught:
        call(torch.int32)
    assert "it serves torch.float32, torch.float64, torch.bfloat16, torch.float16" in str(caught.value)
    assert 'blocksparse.use_backend("reference")' in str(caught.value)
    with bs.use_backend("reference"):
        assert (call(torch.int32) == 4).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn])
def test_the_reference_is_not_recommended_for_what_it_cannot_do(dtype):
    with pytest.raises(bs.BlockSparseError) as caught:
        call(dtype)
    assert "reference" not in str(caught.value)


def test_a_forced_backend_refuses_other_devices():
    with bs.use_backend("cpu"), pytest.raises(bs.BlockSparseError, match="it serves tensors on the CPU, not on cuda"):
        chosen(torch.device("cuda", 0))


def test_a_device_without_backend():
    with pytest.raises(
        bs.BlockSparseError, match=r"linear: expected .* got torch\.float32 on mps: there is no mps backend"
    ):
        chosen(torch.device("mps"))


def test_the_error_of_a_missing_core_explains_the_build(no_core):
    assert not bs.backends()["cpu"]
    for attempt in (call, cpu_core.core, lambda: bs.use_backend("cpu").__enter__()):
        with pytest.raises(bs.BlockSparseError, match=r"blocksparse\._core does not load.*pip install \."):
            attempt()
    with bs.use_backend("reference"):
        assert (call() == 4).all()


def test_the_core_is_back_after_the_test_without_it():
    assert bs.backends()["cpu"]
    assert (call() == 4).all()


def test_meta_tensors_have_shapes_and_no_backend():
    layout = bs.BlockLayout([[True, False]], block_size=4)
    x = torch.empty(3, 5, 8, device="meta", requires_grad=True)
    values = torch.empty(layout.values_shape, device="meta", requires_grad=True)
    y = bs.linear(x, values, layout, activation="gelu")
    assert (y.shape, y.device.type) == ((3, 5, 4), "meta")
    y.sum().backward()
    assert (x.grad.shape, values.grad.shape) == (x.shape, values.shape)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_tensors(device):
    layout = bs.BlockLayout([[True, False]], block_size=4)
    with FakeTensorMode(allow_non_fake_inputs=True):  # the layout's index tensors are real
        x = torch.empty(3, 5, 8, device=device, requires_grad=True)
        values = torch.empty(layout.values_shape, device=device, requires_grad=True)
        y = bs.linear(x, values, layout, torch.empty(4, device=device))
        assert (y.shape, y.device.type) == ((3, 5, 4), device)
        y.sum().backward()
        assert (x.grad.shape, values.grad.shape) == (x.shape, values.shape)
