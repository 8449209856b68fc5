"""Text as bytes: sources, splits and windows."""

import pytest
import torch

from blocksparse import BlockSparseError
from blocksparse_lab.data import text


def test_python_topics_are_english_in_a_fixed_order():
    data = text.python_topics()
    assert len(data) > 300_000
    assert data.startswith(b'The "assert" statement')
    assert data == text.python_topics()


def test_read_takes_any_bytes(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(bytes(range(256)))
    assert text.read(path) == bytes(range(256))


def test_read_refuses_missing_and_empty_files_and_folders(tmp_path):
    with pytest.raises(BlockSparseError, match=r"expected a readable file.*nowhere\.txt"):
        text.read(tmp_path / "nowhere.txt")
    with pytest.raises(BlockSparseError, match="expected a readable file"):
        text.read(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(BlockSparseError, match="which is empty"):
        text.read(tmp_path / "empty.txt")


def test_split_keeps_every_byte_in_order():
    data = bytes(range(200))
    parts = text.split(data, context=8, name="mine")
    assert bytes(parts.train.tolist()) + bytes(parts.held_out.tolist()) == data
    assert len(parts.held_out) == 20
    assert parts.name == "mine"


@pytest.mark.parametrize("context", [1, 32, 100])
def test_split_says_how_many_bytes_it_takes(context):
    with pytest.raises(BlockSparseError, match=r"novel: expected about \d+ bytes or more.*got 9 bytes") as caught:
        text.split(b"too short", context, name="novel")
    least = int(str(caught.value).split("about ")[1].split()[0])
    text.split(bytes(least), context)
    with pytest.raises(BlockSparseError):
        text.split(bytes(10 * context), context)


@pytest.mark.parametrize("held_out", [0, 1, -0.5])
def test_split_refuses_parts_outside_of_0_to_1(held_out):
    with pytest.raises(BlockSparseError, match="held_out"):
        text.split(bytes(1000), 8, held_out=held_out)


def test_windows_end_before_their_target():
    data = torch.arange(100, dtype=torch.uint8)
    window, target = text.windows(data, torch.tensor([5, 50, 99]), context=5)
    assert window.dtype == target.dtype == torch.int64
    assert (window[:, -1] == target - 1).all()
    assert (window[:, 0] == target - 5).all()
