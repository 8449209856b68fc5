"""Images by name: shapes and errors."""

import pytest
import torch

from blocksparse import BlockSparseError
from blocksparse_lab.data import cifar10, images
from test_data_tables import write_cifar10


def test_a_digest_tells_data_apart(tmp_path):
    made = write_cifar10(tmp_path)
    data, same = (images.load("cifar10", tmp_path) for _ in range(2))
    assert data.digest() == same.digest()
    assert data.digest()["images"] == 5 * len(made[0][0])
    same.test[0, 0, 0, 0] ^= 1
    assert data.digest() != same.digest()


def test_missing_and_broken(tmp_path):
    for name, message in [
        ("cifar10", "cifar10: expected .*data_batch_1"),
        ("fashion_mnist", "folder: expected .*train-images-idx3-ubyte"),
        ("mnist", "images: expected one of cifar10, fashion_mnist, got 'mnist'"),
    ]:
        with pytest.raises(BlockSparseError, match=message):
            images.load(name, tmp_path)
    write_cifar10(tmp_path)
    (tmp_path / cifar10.FOLDER / "data_batch_2").write_bytes(b"")
    with pytest.raises(BlockSparseError, match="data_batch_2: expected a batch of CIFAR-10, got a broken one"):
        images.load("cifar10", tmp_path)


def test_parts_that_do_not_fit():
    some, labels, classes = torch.zeros(4, 1, 6, 6, dtype=torch.uint8), torch.arange(4) % 2, ("a", "b")
    for parts, message in [
        ((some.float(), labels, some, labels), r"of, train: expected uint8 \[n, 1, 6, 6\], got torch.float32"),
        ((some, labels, some[:, :, :5], labels), r"of, test: expected uint8 \[n, 1, 6, 6\], got .* \[4, 1, 5, 6\]"),
        ((some[:0], labels[:0], some, labels), r"of, train: expected uint8 .* \[0, 1, 6, 6\]"),
        ((some, labels[:3], some, labels), r"of, train: expected int64 labels \[4\], got torch.int64 \[3\]"),
        ((some, labels, some, labels + 1), "of, test: expected labels from 0 to 1, got 1 to 2"),
    ]:
        with pytest.raises(BlockSparseError, match=message):
            images.Images("of", *parts, classes)
