"""Tables of numbers: published formats and errors."""

import gzip
import os
import pickle

import numpy as np
import pytest
import torch

from blocksparse import BlockSparseError
from blocksparse_lab.data import cifar10, csv_table, download, images, tables
from blocksparse_lab.data.synthetic import Synthetic
from blocksparse_lab.data.table import Table, standardised
from test_data_idx import write as write_mnist

rng = np.random.default_rng(0)


def batch_bytes(pixels, labels, protocol=2):
    """Pickle a batch as CIFAR-10 does, or as newer versions of Python and numpy do."""
    made = pickle.dumps({b"batch_label": b"a batch", b"data": pixels, b"labels": labels}, protocol)
    # Frames count their bytes; protocol 2, that of the published files, has no frames.
    return made.replace(b"numpy._core", b"numpy.core") if protocol == 2 else made


def write_cifar10(folder, n=6, protocol=2):
    """Write six small batches; return their content."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir()
    made = []
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels, labels = rng.integers(256, size=(n, 3072), dtype=np.uint8), rng.integers(10, size=n).tolist()
        (folder / name).write_bytes(batch_bytes(pixels, labels, protocol))
        made.append((torch.from_numpy(pixels), torch.tensor(labels)))
    return made


def write_madelon(folder, train=12, valid=6):
    for name, n in (("train", train), ("valid", valid)):
        rows = rng.integers(400, 500, size=(n, 500))
        (folder / f"madelon_{name}.data").write_text("".join(" ".join(map(str, row)) + " \n" for row in rows))
        (folder / f"madelon_{name}.labels").write_text("".join(f"{-1 if i % 2 else 1}\n" for i in range(n)))


def write_points(path):
    """Write rows around a point of each of two classes as csv."""
    rng = np.random.default_rng()
    middle = rng.normal(size=(2, 8))
    rows = [[*(middle[i % 2] + rng.normal(size=8)), i % 2] for i in range(100)]
    header = ",".join([*(f"x{i}" for i in range(8)), "label"])
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def refused(message):
    return pytest.raises(BlockSparseError, match=message)


# -- the published sets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("inner", [False, True])
def test_cifar10(tmp_path, protocol, inner):
    made = write_cifar10(tmp_path, protocol=protocol)
    data = tables.load("cifar10", tmp_path / cifar10.FOLDER if inner else tmp_path)
    assert data.train.shape == (30, 3072)
    assert torch.equal(data.train_labels, torch.cat([labels for _, labels in made[:5]]))
    assert torch.equal(data.test_labels, made[5][1])
    pixels = torch.cat([pixels for pixels, _ in made[:5]]).double()
    mean, deviation = pixels.mean(0), pixels.std(0, correction=0)
    for part, own in ((data.train, pixels), (data.test, made[5][0])):
        torch.testing.assert_close(part.double(), (own - mean) / deviation, rtol=1e-5, atol=1e-5)
    assert torch.equal(cifar10.read_batch(tmp_path / cifar10.FOLDER / "data_batch_2")[0], made[1][0])
    whole = images.load("cifar10", tmp_path / cifar10.FOLDER if inner else tmp_path)
    assert whole.shape == (3, 32, 32)
    assert torch.equal(whole.train.flatten(1).double(), pixels)
    # Red first, then row by row.
    assert whole.test[4, 2, 3, 5] == made[5][0][4, 2 * 1024 + 3 * 32 + 5]
    assert torch.equal(whole.test_labels, made[5][1])
    assert whole.classes[6] == "frog"


class Evil:
    def __reduce__(self):
        return os.system, ("echo called; exit 1",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "data_batch_3: expected a batch of CIFAR-10, got a broken one"),
        (b"no pickle", "data_batch_3: expected a batch of CIFAR-10, got a broken one"),
        (pickle.dumps(Evil()), r"got a broken one: \w+\.system is not to be in it"),
        (
            pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [1, 2]}),
            r"of uint8 .*, got float64 \[2, 3072\]",
        ),
        (pickle.dumps({b"data": np.array([[Evil()]]), b"labels": [1]}), "got a broken one"),
        (pickle.dumps([1, 2]), r"data_batch_3: expected data of uint8 \[n, 3072\], got no such data"),
        (batch_bytes(np.zeros((2, 3071), np.uint8), [1, 2]), r"data of uint8 \[n, 3072\], got uint8 \[2, 3071\]"),
        (batch_bytes(np.zeros((2, 3072), np.uint8), [1]), "data_batch_3: expected 2 labels, got 1"),
        (batch_bytes(np.zeros((2, 3072), np.uint8), [1, 10]), "expected labels from 0 to 9, got 10"),
        (batch_bytes(np.zeros((2, 3072), np.uint8), [1, 2])[:-100], "got a broken one"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value[-30:],
)
def test_batches_that_are_broken(tmp_path, content, message, capfd):
    write_cifar10(tmp_path)
    (tmp_path / cifar10.FOLDER / "data_batch_3").write_bytes(content)
    with refused(message):
        tables.load("cifar10", tmp_path)
    assert "called" not in capfd.readouterr().out


def test_batches_that_are_missing(tmp_path):
    with refused(r"cifar10: expected .*data_batch_1 or .*data_batch_1, got neither"):
        tables.load("cifar10", tmp_path)
    write_cifar10(tmp_path)
    (tmp_path / cifar10.FOLDER / "test_batch").unlink()
    with refused(r"cifar10: expected a readable file, got .*test_batch: No such file"):
        tables.load("cifar10", tmp_path)


@pytest.mark.parametrize("inner", ["", "fashion_mnist"])
def test_fashion_mnist(tmp_path, inner):
    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    made = write_mnist(folder)
    data = tables.load("fashion_mnist", tmp_path)
    assert data.features == 784
    assert torch.equal(data.test_labels, made["t10k"][1].long())
    assert data.classes[9] == "Ankle boot"
    whole = images.load("fashion_mnist", tmp_path)
    assert whole.shape == (1, 28, 28)
    assert torch.equal(whole.train[:, 0], made["train"][0])
    assert data.train.mean(0).abs().max() < 1e-5


def test_madelon(tmp_path):
    write_madelon(tmp_path)
    data = tables.load("madelon", tmp_path)
    assert (data.train.shape, data.test.shape) == ((12, 500), (6, 500))
    assert data.test_labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert data.train.std(0, correction=0).sub(1).abs().max() < 1e-5
    with refused(r"madelon: expected --data-dir, a folder with madelon/madelon_train\.data or .*no download, got none"):
        tables.load("madelon")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.data", "1 2 3\n", r"madelon_train\.data, line 1: expected 500 numbers, got 3"),
        (
            "valid.data",
            "1 " * 500 + "\n" + "1 " * 499 + "x\n",
            r"line 2, column 500: expected a finite number, got 'x'",
        ),
        ("train.labels", "1\n0\n", r"madelon_train\.labels, line 2: expected -1 or 1, got 0"),
        ("train.labels", "1\n-1\n", r"madelon_train\.labels: expected 12 labels, one for each row, got 2"),
        ("valid.labels", None, r"madelon: expected a readable file, got .*madelon_valid\.labels: No such file"),
    ],
)
def test_madelon_that_is_broken(tmp_path, name, content, message):
    write_madelon(tmp_path)
    path = tmp_path / f"madelon_{name}"
    path.unlink() if content is None else path.write_text(content)
    with refused(message):
        tables.madelon(tmp_path)


@pytest.mark.parametrize("form", ["published", "packed", "named", "inner"])
def test_higgs(tmp_path, form):
    rows, labels = rng.normal(size=(40, 28)).astype(np.float32), np.arange(40) % 2
    published = "".join(f"{y:.18e},{','.join(f'{v:.18e}' for v in x)}\n" for x, y in zip(rows, labels, strict=True))
    named = ",".join((*tables.HIGGS_COLUMNS[1:], "label")) + "\n"
    named += "".join(f"{','.join(map(repr, map(float, x)))},{y}\n" for x, y in zip(rows, labels, strict=True))
    (tmp_path / "higgs").mkdir()
    if form == "packed":
        (tmp_path / "HIGGS.csv.gz").write_bytes(gzip.compress(published.encode()))
    else:
        path = {"published": "HIGGS.csv", "named": "higgs.csv", "inner": "higgs/higgs.csv"}[form]
        (tmp_path / path).write_text(published if form == "published" else named)
    data = tables.load("higgs", tmp_path)
    assert (len(data.train), len(data.test), data.features) == (32, 8, 28)
    assert data.train_labels.sum() == 16
    # Identify rows by a feature, whose order standardisation keeps.
    order = torch.cat([data.train, data.test])[:, 3].argsort()
    expected = torch.from_numpy(labels)[torch.from_numpy(rows)[:, 3].argsort()]
    assert torch.equal(torch.cat([data.train_labels, data.test_labels])[order], expected)
    assert not torch.equal(tables.load("higgs", tmp_path, seed=1).train, data.train)


def test_higgs_that_is_broken(tmp_path):
    with refused(r"higgs: expected .*HIGGS\.csv\.gz, got none"):
        tables.higgs(tmp_path)
    (tmp_path / "HIGGS.csv").write_text("1,2,3\n0,2,3\n")
    with refused(r"HIGGS\.csv, line 1: expected 29 columns, got 3"):
        tables.higgs(tmp_path)
    (tmp_path / "HIGGS.csv").write_text("label,a\n1,2\n0,3\n")
    with refused(r"HIGGS\.csv: expected 28 features and labels 0 and 1, got 1 and 0, 1"):
        tables.higgs(tmp_path)


# -- csv files ---------------------------------------------------------------------------------------------------------


def test_a_csv_file(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeffx, Target ,y\r\n1,blue,"2.5"\r\n\r\n-1e3,Ant,4\r\n0,blue,5\r\n', encoding="utf-8")
    rows, labels, classes = csv_table.read(path)
    assert rows.tolist() == [[1, 2.5], [-1000, 4], [0, 5]]
    assert labels.tolist() == [1, 0, 1]
    assert classes == ("Ant", "blue")
    path.write_text("label,x\n10,1\n9.0,1\n-1,1\n9,2\n")
    assert csv_table.read(path)[1:][1] == ("-1", "9", "10")


def test_a_csv_file_is_split_with_the_share_of_each_class(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,label\n" + "".join(f"{i},{'rare' if i % 10 == 0 else 'often'}\n" for i in range(100)))
    data = tables.load(path)
    assert (data.rows, data.name, data.classes) == (80, "a.csv", ("often", "rare"))
    assert (int(data.train_labels.sum()), int(data.test_labels.sum())) == (8, 2)
    assert data.digest() == tables.load(path).digest()
    assert data.digest() != tables.load(path, seed=1).digest()
    path.write_text("x,label\n1,a\n2,b\n3,b\n")
    with refused(r"a\.csv: expected two rows or more of class a, to split them, got 1"):
        tables.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: expected names of columns, one of them label, class or target, and features, got nothing"),
        ("a,b\n1,2\n", "line 1: expected names of columns, .*, got a, b"),
        ("label,class\n1,2\n", "line 1: expected names of columns"),
        ("label\n1\n", "line 1: expected names of columns"),
        ("a,b,label\n1,2,0\n1,,1\n", "line 3, column b: expected a finite number, got a hole"),
        ("a,b,label\n1,2,0\n1, ,1\n", "line 3, column b: expected a finite number, got a hole"),
        ("a,b,label\n\n?,2,0\n", r"line 3, column a: expected a finite number, got '\?'"),
        ("a,b,label\n1,nan,0\n", "line 2, column b: expected a finite number, got 'nan'"),
        ("a,b,label\n-inf,1,0\n", "line 2, column a: expected a finite number, got '-inf'"),
        ("a,b,label\n1e39,1,0\n", "line 2, column a: expected a finite number, got '1e39'"),
        ("a,b,label\n1,2,\n", "line 2, column label: expected a label, got a hole"),
        ("a,b,label\n1,2,0\n1,2\n", "line 3: expected 3 columns, got 2"),
        ("a,b,label\n1,2,0\n1,2,0\n", r"a\.csv: expected labels of two classes or more, got only 0 down to line 3"),
        ("a,b,label\n", "expected labels of two classes or more, got no row"),
        ('a,b,label\n1,"2,0\n', "line 2: expected a row of a csv file, got unexpected end of data"),
        ("a,b,label\n1,\udcff,0\n", "line 2: expected UTF-8, got byte 0xff"),
    ],
)
def test_csv_files_that_are_broken(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content.encode(errors="surrogateescape"))
    with refused(message):
        tables.load(tmp_path / "a.csv")


def test_an_unknown_name(tmp_path):
    with refused("data: expected one of fashion_mnist, cifar10, madelon, higgs, or a csv file, got mnist"):
        tables.load("mnist", tmp_path)


# -- what they have in common ------------------------------------------------------------------------------------------


def test_features_that_never_vary_are_0():
    train, test = standardised(torch.full((5, 2), 0.1), torch.tensor([[0.1, 7.0]]))
    assert not train.any()
    assert not test.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels": torch.tensor([0, 2])}, "t, train: expected labels from 0 to 1, got 0 to 2"),
        ({"test_labels": torch.tensor([-1])}, "t, test: expected labels from 0 to 1, got -1 to -1"),
        ({"train_labels": torch.tensor([0])}, r"t, train: expected int64 labels \[2\]"),
        ({"test": torch.zeros(1, 4)}, r"t, test: expected float32 \[n, 3\]"),
        ({"test": torch.zeros(0, 3), "test_labels": torch.zeros(0).long()}, "t, test: expected float32"),
        ({"train": torch.full((2, 3), torch.nan)}, "t, train: expected finite numbers"),
        ({"classes": ("a",)}, "t: expected two classes or more, got a"),
    ],
)
def test_tables_that_do_not_fit(changes, message):
    parts = {"train": torch.zeros(2, 3), "train_labels": torch.tensor([0, 1]), "test": torch.zeros(1, 3)}
    parts |= {"test_labels": torch.tensor([1]), "classes": ("a", "b")}
    with refused(message):
        Table("t", **(parts | changes))


def test_held_out_rows():
    x, y = torch.arange(5.0).view(5, 1), torch.tensor([0, 1, 0, 1, 0])
    data = Table("t", x, y, x, y, ("a", "b"))
    assert [len(part) for part, _ in data.held_out(2)] == [2, 2, 1]
    data = Table("t", x, y, x, y, ("a", "b"), validation=x[:1], validation_labels=y[:1])
    assert [part.tolist() for part, _ in data.held_out(2)] == [[[0.0]]]


def test_synthetic_rows_depend_on_their_number_alone():
    data = Synthetic(features=50, rows=9, tested=5, seed=3)
    x, y = data.take(np.arange(9))
    again, labels = data.take(np.array([7, 2]))
    assert torch.equal(again, x[[7, 2]])
    assert torch.equal(labels, y[[7, 2]])
    assert [len(part) for part, _ in data.held_out(2)] == [2, 2, 1]
    assert not torch.equal(next(data.held_out(2))[0], x[:2])
    assert not torch.equal(Synthetic(features=50, seed=4).take(np.arange(9))[0], x)
    x, y = Synthetic(features=20_000, rows=100).take(np.arange(100))
    means = torch.stack([x[y == label].mean(0) for label in (0, 1)])
    assert 0.9 < (means[0] - means[1]).abs().mean() < 1.2  # half of the features have equal signs
    with refused("rows: expected a positive int, got 0"):
        Synthetic(rows=0)
    x, y = Synthetic(features=1000, rows=1000, carriers=10).take(np.arange(1000))
    means = (x[y == 0].mean(0) - x[y == 1].mean(0)).abs()
    assert 1 <= len(np.flatnonzero(means > 1)) <= 10  # about half have different signs
    assert all(place % 100 == 0 for place in np.flatnonzero(means > 1))
    with refused("carriers: expected an int from 1 to 50, got 51"):
        Synthetic(features=50, carriers=51)


def test_what_is_downloaded_has_a_checksum(tmp_path, monkeypatch):
    fetched = []

    def fetch(url, known_hash, name, progress):
        fetched.append((url, known_hash))
        return tmp_path / name

    monkeypatch.setattr(download, "fetch", fetch)
    (tmp_path / "cifar10").mkdir()
    write_cifar10(tmp_path / "cifar10")
    (tmp_path / "fashion_mnist").mkdir()
    write_mnist(tmp_path / "fashion_mnist")
    assert tables.load("cifar10").rows == tables.load("fashion_mnist").rows == 30
    assert len(fetched) == 5
    assert all(url.startswith("https://") and known_hash.startswith("md5:") for url, known_hash in fetched)


@pytest.mark.skipif("BLOCKSPARSE_TEST_DATA" not in os.environ, reason="BLOCKSPARSE_TEST_DATA, the real files, not set")
@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [
        ("fashion_mnist", (60_000, 784), 10_000, 10),
        ("cifar10", (50_000, 3072), 10_000, 10),
        ("madelon", (2000, 500), 600, 2),
    ],
)
def test_the_published_files(name, train, test, classes):
    data = tables.load(name, os.environ["BLOCKSPARSE_TEST_DATA"])
    assert (data.train.shape, len(data.test), len(data.classes)) == (train, test, classes)
    assert data.train_labels.bincount().tolist() == [train[0] // classes] * classes
    assert data.test_labels.bincount().tolist() == [test // classes] * classes
    assert data.train.mean(0).abs().max() < 1e-4


@pytest.mark.skipif("BLOCKSPARSE_TEST_DATA" not in os.environ, reason="BLOCKSPARSE_TEST_DATA, the real files, not set")
def test_rows_of_higgs():
    data = tables.load("higgs", os.environ["BLOCKSPARSE_TEST_DATA"])
    assert data.features == 28
    assert len(data.test) == pytest.approx(0.2 * (data.rows + len(data.test)), abs=2)
