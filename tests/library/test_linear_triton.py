"""Promises of the Triton backend alone: schedules, launches, tracing, refusals. Interpreted where there is no GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import blocksparse as bs
from blocksparse.ops.attention import flex
from blocksparse.ops.attention.rules import Rules
from blocksparse.ops.gpu import runtime as triton_runtime
from blocksparse.ops.gpu.tiles import Tile, Work, bucket, forget_tuned, gpu_of, slug, use_tiles, write
from blocksparse.ops.linear import triton as backend
from blocksparse.ops.recurrent import fused_gates
from linear_backends import assert_close, forward, running, wgrad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton_runtime.unavailable() is not None, reason=str(triton_runtime.unavailable())),
]

DEVICE = torch.device("cpu" if triton_runtime.interpreting() else "cuda:0")


def test_a_schedule_is_made_once_per_device_dtype_and_bucket():
    layout = bs.patterns.random((64, 96), block_size=16, density=0.5, seed=0)
    made = [backend.schedule(layout, DEVICE, torch.float32, tokens) for tokens in (1, 16, 17, 32)]
    assert made[0] is made[1]
    assert made[2] is made[3]
    assert made[0] is not made[2]
    assert all(tensor.device == DEVICE and tensor.dtype == torch.int32 for tensor in made[0])


def test_forced_tiles_have_schedules_of_their_own():
    layout = bs.patterns.random((64, 96), block_size=16, density=0.5, seed=0)
    plain = backend.schedule(layout, DEVICE, torch.float32, 40)
    with use_tiles(forward=Tile(16, 16, 16, 1, 2, pairs=True)):
        paired = backend.schedule(layout, DEVICE, torch.float32, 40)
    assert plain.forward_tasks.shape[1] == 4
    assert paired.forward_tasks.shape[1] == 5
    assert backend.schedule(layout, DEVICE, torch.float32, 40) is plain


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")  # of infinity times 0
@pytest.mark.parametrize(("related", "rows"), [(True, 2), (False, 1)], ids=["related", "strangers"])
def test_rows_that_share_inputs_are_summed_up_two_at_a_time(related, rows):
    # The second half of the rows has half the inputs of the first, or none.
    mask = torch.eye(4, 8).bool() | torch.eye(8).bool()[4:]
    layout = bs.BlockLayout(
        torch.cat([mask, torch.eye(4, 8).bool() if related else torch.zeros(4, 8).bool()]).numpy(), block_size=32
    )
    with running("triton-tuned"):
        x, values = torch.randn(70, 256).bfloat16(), torch.randn(layout.values_shape).bfloat16()
        x[3, 40] = torch.nan
        x[5, 170] = torch.inf
        expected = x.double() @ bs.to_dense(values, layout).double().T
        got = forward(x, values, layout)
        tasks = backend.schedule(layout, DEVICE, torch.bfloat16, 70).forward_tasks
    assert tasks.shape[1] == 3 + rows
    connected = bs.to_dense(torch.ones(layout.values_shape), layout).bool()
    for token, feature in ((3, 40), (5, 170)):
        seen = connected[:, feature]
        assert not got[token, seen].isfinite().any()
        assert got[token, ~seen].isfinite().all()
    rest = [token for token in range(70) if token not in (3, 5)]
    assert_close(got[rest], expected[rest], 1e-2)


def test_no_schedule_outlives_the_tiles_it_was_made_for(tmp_path, monkeypatch):
    # A schedule for lanes that a kernel does not have would leave outputs unwritten.
    monkeypatch.setenv("BLOCKSPARSE_TILES", str(tmp_path))
    layout = bs.patterns.random((64, 256), block_size=16, density=0.9, seed=0)
    gpu, work = gpu_of(DEVICE), Work("wgrad", torch.float32, (16, 16), bucket(40), layout.density)
    with running("triton-tuned"):
        grad, x = torch.randn(40, 64), torch.randn(40, 256)
        expected = bs.from_dense(grad.double().T @ x.double(), layout)
        for lanes in (16, 64, 32):
            write(tmp_path / f"{slug(gpu.name)}.json", gpu, {work: Tile(16, 16, lanes, 1, 2)}, {})
            forget_tuned()
            assert_close(wgrad(grad, x, layout), expected, 1e-5)
    monkeypatch.undo()
    forget_tuned()


@pytest.mark.parametrize("backend_name", ["triton-tuned", "triton-small", "triton-pairs"])
def test_results_are_the_same_bits_every_time(backend_name):
    layout = bs.patterns.barabasi_albert(128, block_size=16, m=3, seed=0)
    with running(backend_name):
        x, values = torch.randn(40, 128), torch.randn(layout.values_shape)
        assert torch.equal(forward(x, values, layout), forward(x, values, layout))
        assert torch.equal(wgrad(x, x, layout), wgrad(x, x, layout))


def test_launches_are_kept_but_not_without_end(monkeypatch):
    monkeypatch.setattr(backend, "MAX_LAUNCHES", 3)
    layout = bs.patterns.random((32, 32), block_size=16, density=0.7, seed=0)
    with running("triton-tuned"):
        values = torch.randn(layout.values_shape)
        for tokens in (1, 2, 3, 4, 5, 1):
            x = torch.randn(tokens, 32)
            expected = x @ bs.to_dense(values, layout).T
            torch.testing.assert_close(forward(x, values, layout), expected, atol=1e-4, rtol=1e-4)
    assert 0 < len(layout.derived("triton launches", dict)) <= 3


def test_any_alignment_of_the_same_shapes():
    # A kernel compiled for aligned addresses of one tensor must not serve others.
    layout = bs.patterns.random((64, 64), block_size=16, density=0.5, seed=0)
    with running("triton-tuned"):
        for shift, values_shift in ((0, 0), (1, 0), (0, 3), (1, 3), (0, 0)):
            storage, values = torch.randn(64 * 20 + 8), torch.randn(layout.nnz * 256 + 8)
            x = storage[shift : shift + 64 * 20].view(20, 64)
            blocks = values[values_shift : values_shift + layout.nnz * 256].view(layout.values_shape)
            expected = x.double() @ bs.to_dense(blocks, layout).double().T
            torch.testing.assert_close(forward(x, blocks, layout).double(), expected, atol=1e-4, rtol=1e-4)
    assert len(layout.derived("triton launches", dict)) == 4


@pytest.mark.parametrize("split", [False, True])
def test_a_call_like_one_before_it_takes_the_short_way(split):
    # Rows of one block; with `split`, also a hub that is cut in parts and summed up.
    mask = torch.eye(6, 120 if split else 6).bool()
    mask[0] |= split
    layout = bs.BlockLayout(mask, block_size=16)
    with running("triton-tuned"), torch.no_grad():
        values, bias = torch.randn(layout.values_shape), torch.randn(layout.shape[0])
        x = torch.randn(2, 10, layout.shape[1])

        def fast(x, values=values, bias=bias, activation="relu", transpose=False):
            return backend.linear_fast(x, values, bias, layout, transpose, activation)

        assert fast(x) is None, "no call was before"
        expected = (x @ bs.to_dense(values, layout).T + bias).relu()
        for _ in range(2):
            torch.testing.assert_close(bs.linear(x, values, layout, bias, "relu"), expected, atol=1e-4, rtol=1e-4)
            for same in (x, x.flatten(0, 1)):
                found = fast(same)
                torch.testing.assert_close(found.view(expected.shape), expected, atol=1e-4, rtol=1e-4)
        launches = layout.derived("triton launches", dict).values()
        assert {len(some) for some in launches} == {1 + split}
        longer = torch.randn(11, layout.shape[1])
        others = [
            fast(longer),  # other tokens
            fast(x[..., 1:]),
            fast(x.transpose(0, 1)),
            fast(longer.T.contiguous().T),
            fast(x, activation=None),
            fast(x, bias=None),
            fast(x, bias=bias[1:]),
            fast(x, bias=bias.double()),
            fast(x, values.double()),
            fast(x.bfloat16(), values.bfloat16(), bias.bfloat16()),
            fast(x, values[1:]),
            fast(x, values.mT),
            fast(x, transpose=True),
            fast(x.view(-1, 1, 1)),
            fast(torch.tensor(1.0)),
        ]
        assert others == [None] * len(others)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_layout_may_be_dropped_while_another_stream_still_uses_it():
    torch.manual_seed(0)
    x = torch.randn(40, 4096, device="cuda")
    layout = bs.patterns.random((4096, 4096), block_size=16, density=0.2, seed=0)
    values = torch.randn(layout.values_shape, device="cuda")
    expected = x @ bs.to_dense(values, layout).T
    backend.schedule(layout, DEVICE, x.dtype, 40)  # from the memory of the usual stream
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(x[:, :], values, layout)  # compiles
        torch.cuda._sleep(2 * 10**8)
        y = forward(x, values, layout)
    sizes = {index.numel() for index in backend.schedule(layout, DEVICE, x.dtype, 40)}
    layout._derived.clear()
    del layout
    taken = [torch.full((size,), 2**30, dtype=torch.int32, device="cuda") for size in sizes for _ in range(8)]
    torch.cuda.synchronize()
    assert len(taken) == 8 * len(sizes)
    torch.testing.assert_close(y, expected, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("case", ["linear", "steps", "attention"])
def test_index_tensors_are_recorded_on_each_stream(case, monkeypatch):
    told, stream, randn = [], [7], partial(torch.randn, device=DEVICE)
    layout = bs.patterns.random((128, 32), block_size=16, density=1, seed=0)
    if case == "linear":
        place = backend
        x, values = randn(5, 32), randn(*layout.values_shape)

        def call():
            backend.linear(x, values, None, layout, False, None)
    elif case == "steps":
        place = fused_gates
        x, values = randn(5, 32).bfloat16(), randn(*layout.values_shape).bfloat16()
        with bs.use_backend("triton"):
            step = fused_gates.fused_gates_for(values, layout)

        def call():
            state = randn(5, 32)
            step.forward(x, randn(5, 128).bfloat16(), None, state, h_out=x, c_out=state, gates_out=None)
    else:
        place = flex
        q = randn(1, 1, 128, 16)
        square = bs.patterns.random((128, 128), block_size=32, density=0.5, seed=0)

        def call():
            flex.flex(q, q, q, [square], Rules(), lambda q, *of, **options: q)

    monkeypatch.setattr(place, "stream_of", lambda x: stream[0])
    monkeypatch.setattr(place, "keep_for_stream", lambda device, *of: told.append((stream[0], of)))
    for stream[0] in (7, 7, 8, 7):
        call()
    assert [of for of, _ in told] == [7, 8]
    assert all(any(isinstance(each, torch.Tensor) for each in of) for _, of in told)


def test_no_stream_is_recorded_without_a_gpu():
    class Index(torch.Tensor):
        def record_stream(self, stream):
            raise AssertionError

    index = torch.zeros(3, dtype=torch.int32).as_subclass(Index)
    triton_runtime.keep_for_stream(torch.device("cpu"), index, 3)
    assert triton_runtime.stream_of(index) is None


def test_more_tiles_than_a_grid_holds_are_refused(monkeypatch):
    monkeypatch.setattr(triton_runtime, "MAX_PROGRAMS", 3)
    layout = bs.patterns.dense((64, 64), block_size=16)
    with running("triton-tuned"), pytest.raises(bs.BlockSparseError, match="x: expected fewer tokens in one call"):
        forward(torch.randn(5, 64), torch.randn(layout.values_shape), layout)


def test_too_many_blocks_for_its_indices_are_refused():
    with pytest.raises(bs.BlockSparseError, match="layout: expected at most 2147418112 blocks on a GPU, got"):
        backend._schedule(SimpleNamespace(nnz=2**31), DEVICE, torch.float32, 16)


def test_refusals_come_before_any_launch():
    layout = bs.patterns.dense((4, 4), block_size=2)
    with bs.use_backend("triton"):
        with pytest.raises(bs.BlockSparseError, match=r"triton backend refuses: it serves torch\.float32"):
            bs.linear(torch.ones(1, 4, dtype=torch.int32), torch.ones(4, 2, 2, dtype=torch.int32), layout)
        assert bs.linear(torch.ones(1, 4, device="meta"), torch.ones(4, 2, 2, device="meta"), layout).is_meta


def test_the_error_of_out_of_resources_names_a_remedy():
    class OutOfResources(Exception):
        pass

    class Kernel:
        arg_names = ("x_ptr",)

        def __getitem__(self, grid):
            raise OutOfResources("shared memory: required 300000, limit 232448")

    launch = triton_runtime.Launch(Kernel(), (1, 1, 1), 1, {}, Tile(16, 16, 16, 1, 2))
    with pytest.raises(bs.BlockSparseError, match=r"GPU: expected enough shared memory.*required 300000"):
        launch(torch.ones(1, device=DEVICE))


def test_buckets_are_powers_of_two():
    assert [bucket(tokens) for tokens in (0, 1, 16, 17, 100, 8192, 10**9)] == [16, 16, 16, 32, 128, 8192, 8192]
