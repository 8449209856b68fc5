"""Images in the idx format: valid files and errors."""

import gzip
import struct

import pytest
import torch

import blocksparse as bs
from blocksparse_lab.data import idx


def idx_bytes(tensor: torch.Tensor) -> bytes:
    head = struct.pack(f">BBBB{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape)
    return head + bytes(tensor.byte().flatten().tolist())


def write(folder, packed=True, n=30):
    """Write a folder of four small files; return their content."""
    made = {}
    for name in ("train", "t10k"):
        made[name] = torch.randint(256, (n, 28, 28)).byte(), torch.randint(10, (n,)).byte()
        for kind, tensor in zip(("images-idx3", "labels-idx1"), made[name], strict=True):
            data = idx_bytes(tensor)
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(data) if packed else data)
    return made


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_folder(tmp_path, packed):
    made = write(tmp_path, packed)
    data = idx.mnist(tmp_path)
    assert torch.equal(data.train, made["train"][0])
    assert torch.equal(data.test_labels, made["t10k"][1].long())


def test_other_dtypes(tmp_path):
    (tmp_path / "a").write_bytes(struct.pack(">BBBBI2i", 0, 0, 12, 1, 2, -3, 70000))
    assert idx.read(tmp_path / "a").tolist() == [-3, 70000]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "two zero bytes"),
        (b"hello world", "two zero bytes"),
        (idx_bytes(torch.zeros(3, 3))[:-1], r"expected 9 bytes for \[3, 3\], got .*8 bytes"),
        (gzip.compress(idx_bytes(torch.zeros(3, 3)), mtime=0)[:-9], "expected a readable file"),
    ],
)
def test_broken_files(tmp_path, data, message):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(bs.BlockSparseError, match=message):
        idx.read(tmp_path / "a")


def test_missing_files(tmp_path):
    with pytest.raises(bs.BlockSparseError, match=r"folder: expected .*/train-images-idx3-ubyte\.gz or"):
        idx.mnist(tmp_path)
    with pytest.raises(bs.BlockSparseError, match="idx file: expected a readable file"):
        idx.read(tmp_path / "nothing")


def test_labels_that_do_not_match(tmp_path):
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(torch.zeros(7))))
    with pytest.raises(bs.BlockSparseError, match=r"t10k images and labels: expected .*got \[30, 28, 28\] and \[7\]"):
        idx.mnist(tmp_path)
