"""Large buffers that are used again."""

from __future__ import annotations

import pytest
import torch

from blocksparse.ops import workspace

CPU = torch.device("cpu")
SHAPE = (1024, 1024)


@pytest.fixture(autouse=True)
def empty_workspace():
    workspace.clear()
    yield
    workspace.clear()


def kept():
    return sum(buffer.storage.nbytes() for buffer in workspace._buffers)


def test_memory_is_used_again_once_nothing_refers_to_it():
    first = workspace.empty(SHAPE, torch.float32, CPU)
    address = first.data_ptr()
    view = first[5:7].numpy()
    del first
    assert workspace.empty(SHAPE, torch.float32, CPU).data_ptr() != address  # the array refers to it
    del view
    again = [workspace.empty(SHAPE, torch.float32, CPU) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in again]
    assert again[0].data_ptr() != again[1].data_ptr()


def test_the_latest_idle_buffer_is_taken_first():
    idle = [workspace.empty(SHAPE, torch.float32, CPU) for _ in range(3)]
    latest = idle[-1].data_ptr()
    del idle
    assert [workspace.empty(SHAPE, torch.float32, CPU).data_ptr() for _ in range(3)] == [latest] * 3


def test_shape_dtype_and_strides():
    tensor = workspace.empty((3, 512, 700), torch.bfloat16, CPU)
    assert tensor.shape == (3, 512, 700)
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert not tensor._is_view()


def test_tensors_saved_by_autograd_are_in_use():
    x = workspace.empty(SHAPE, torch.float32, CPU).fill_(2)
    weight = torch.ones(SHAPE, requires_grad=True)
    y = x * weight
    address = x.data_ptr()
    del x
    assert workspace.empty(SHAPE, torch.float32, CPU).data_ptr() != address
    y.sum().backward()
    assert torch.equal(weight.grad, torch.full(SHAPE, 2.0))


def test_buffers_in_shared_memory_are_not_reused():
    tensor = workspace.empty(SHAPE, torch.float32, CPU).fill_(1)
    tensor.share_memory_()
    address = tensor.data_ptr()
    del tensor
    assert workspace.empty(SHAPE, torch.float32, CPU).data_ptr() != address


def test_small_ones_are_not_kept():
    workspace.empty((10, 10), torch.float32, CPU)
    assert kept() == 0


def test_idle_buffers_are_freed(monkeypatch):
    workspace.empty(SHAPE, torch.float32, CPU)
    for i in range(workspace.MAX_IDLE_FACTOR + 2):
        workspace.empty((4096 + i, 1024), torch.float32, CPU)
    workspace.empty((9999, 1024), torch.float32, CPU)
    assert all(buffer.storage.nbytes() > 4 * 1024 * 1024 for buffer in workspace._buffers)
    monkeypatch.setattr(workspace, "MAX_BYTES", 40 << 20)
    for size in (1, 3, 9):
        workspace.empty((size * 1024, 1024), torch.float32, CPU)
    assert kept() <= 40 << 20
    workspace.clear()
    assert kept() == 0


def test_many_small_requests_drive_out_no_large_buffer():
    large = workspace.empty((64, 1024, 1024), torch.float32, CPU).data_ptr()
    for _ in range(2 * workspace.MAX_IDLE_FACTOR):
        workspace.empty(SHAPE, torch.float32, CPU)
    workspace.empty((9999, 1024), torch.float32, CPU)  # a new one, for which there has to be room
    assert workspace.empty((64, 1024, 1024), torch.float32, CPU).data_ptr() == large


def test_many_threads(recwarn):
    from concurrent.futures import ThreadPoolExecutor

    def work(i):
        for _ in range(50):
            tensor = workspace.empty(SHAPE, torch.float32, CPU)
            tensor[0, :8] = i
            if not bool((tensor[0, :8] == i).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_results_are_tensors_of_their_own():
    for _ in range(3):  # made from the storage, then from the tensor before
        tensor = workspace.empty(SHAPE, torch.float32, CPU)
        assert type(tensor) is torch.Tensor
        assert (tensor._version, tensor.is_leaf, tensor._is_view()) == (0, True, False)
        tensor.zero_().requires_grad_().detach_().unsqueeze_(0)
        assert tensor.shape == (1, *SHAPE)
        del tensor
    with torch.inference_mode():
        assert workspace.empty(SHAPE, torch.float32, CPU).is_inference()
    assert not workspace.empty(SHAPE, torch.float32, CPU).is_inference()
    assert len(workspace._buffers) == 1
