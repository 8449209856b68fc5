"""Files that are broken by chance or on purpose load or raise a BlockSparseError, in bounded time and memory."""

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from blocksparse import BlockSparseError, files
from blocksparse.ops.gpu import tiles
from blocksparse_lab.data import (
    cifar10,
    corpora,
    csv_table,
    download,
    idx,
    images,
    pickles,
    planetoid,
    reviews,
    tables,
)
from blocksparse_lab.data.table import split
from hostile import formats, mutate
from processes import start_script

MUTATE = Path(mutate.__file__)


def refused(message):
    return pytest.raises(BlockSparseError, match=message)


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("cases", [60, pytest.param(6000, marks=pytest.mark.full)])
def test_hostile_and_changed_files_load_or_are_refused(cases, tmp_path):
    # In its own process, where a crash is caught and memory is measured.
    command = [sys.executable, str(MUTATE), "--cases", str(cases), "--seed", "0", "--folder", str(tmp_path / "work")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{mutate.on_purpose() + cases} files" in done.stdout


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("{}[1]", "KeyError"),
        pytest.param("len(bytearray(b'x') * 2 * mutate.MAX_MEMORY)", "bytes of memory", marks=pytest.mark.full),
        ("__import__('ctypes').string_at(0)", "Segmentation fault"),
    ],
    ids=["a raw error", "memory", "a crash"],
)
def test_the_run_finds_what_does_harm(harm, message, tmp_path):
    (tmp_path / "script.py").write_text(f"""
import sys
sys.path.insert(0, {str(MUTATE.parents[1])!r})
from hostile import formats, mutate
mutate.FORMATS = (formats.Format(lambda folder: {harm}, {{"a": b"some bytes"}}),)
mutate.main(3)
""")
    done = start_script(tmp_path / "script.py", variables={}, output=tmp_path / "said")
    done.join(100)
    assert done.exitcode
    assert message in (tmp_path / "said").read_text()


# -- what may be unpacked ----------------------------------------------------------------------------------------


@pytest.fixture
def a_mebibyte(monkeypatch):
    monkeypatch.setenv("BLOCKSPARSE_MAX_UNPACKED", str(1 / 1024))


def test_a_gzip_file_is_unpacked_up_to_the_limit(tmp_path, a_mebibyte, monkeypatch):
    data = formats.idx_bytes((2 << 20,), bytes(2 << 20))
    path = write(tmp_path / "idx.gz", gzip.compress(data))
    table = write(tmp_path / "a.csv.gz", gzip.compress(b"x,label\n" + b"%032d,a\n%032d,b\n" % (1, 2) * 20_000))
    message = (
        r"expected at most 0\.000977 GiB unpacked \(to allow more, set BLOCKSPARSE_MAX_UNPACKED, in GiB\), got more"
    )
    for read in (lambda: idx.read(path), lambda: csv_table.read(table)):
        with refused(message):
            read()
    monkeypatch.setenv("BLOCKSPARSE_MAX_UNPACKED", "0.01")
    assert idx.read(path).shape == (2 << 20,)
    assert len(csv_table.read(table)[1]) == 40_000


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_is_unpacked_up_to_the_limit(tmp_path, a_mebibyte, monkeypatch, kind):
    content = {"a": bytes(600 << 10), "b": bytes(600 << 10)}
    data = formats.zipped(content) if kind == "zip" else formats.tarred(*map(formats.entry, content, content.values()))
    path = write(tmp_path / f"set.{kind}", data)
    (tmp_path / "out").mkdir()
    with refused(r"set\.(zip|tar\.gz): expected at most .* GiB unpacked"):
        files.unpack(path, tmp_path / "out")
    assert not (tmp_path / "out" / "b").exists()
    monkeypatch.delenv("BLOCKSPARSE_MAX_UNPACKED")
    files.unpack(path, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == content


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_has_a_limit_of_files(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "MAX_MEMBERS", 2)
    content = dict.fromkeys("abc", b"")
    data = formats.zipped(content) if kind == "zip" else formats.tarred(*map(formats.entry, content))
    with refused("expected at most 2 files"):
        files.unpack(write(tmp_path / f"set.{kind}", data), tmp_path)


@pytest.mark.parametrize("given", ["some", "0", "-1", "nan", "inf"])
def test_invalid_limits(monkeypatch, given):
    monkeypatch.setenv("BLOCKSPARSE_MAX_UNPACKED", given)
    with refused("BLOCKSPARSE_MAX_UNPACKED: expected a positive number of GiB"):
        files.most_unpacked(1)


def test_published_data_sets_are_below_the_limit():
    # Packed and unpacked bytes of HIGGS.csv.gz, aclImdb, CIFAR-10 and enwik8.
    for packed, size in (
        (2_816_407_858, 8_035_497_980),
        (84_125_825, 500 << 20),
        (170_498_071, 178 << 20),
        (36, 10**8),
    ):
        files.check_unpacked("set", size, packed)


@pytest.mark.parametrize(
    "name",
    [
        "a link that leads out", "a hard link", "a device", "a pipe", "a name that leads out", "a size below 0",
        "itself again", "no name",
    ],
)  # fmt: skip
def test_an_archive_has_files_and_folders_alone(tmp_path, name):
    (tmp_path / "out").mkdir()
    with refused(r"set\.tar\.gz: expected a whole archive, got a broken archive"):
        files.unpack(write(tmp_path / "set.tar.gz", formats.TARS[name]), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["a folder over a file", "a file over a folder", "a long name"])
def test_members_that_cannot_be_written_are_a_broken_archive(tmp_path, name):
    (tmp_path / "out").mkdir()
    with refused(r"set\.tar\.gz: expected a whole archive, got a broken archive"):
        files.unpack(write(tmp_path / "set.tar.gz", formats.TARS[name]), tmp_path / "out")


def test_a_download_reports_a_corrupt_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSPARSE_DATA", str(tmp_path))
    monkeypatch.setattr(
        download, "_download", lambda url, hash_, path, progress: path.write_bytes(formats.ZIPS["a corrupt block"])
    )
    with refused(
        r"set: expected a download from .* got set\.zip: expected a whole archive, got a broken archive \(error:"
    ):
        download.fetch("http://nowhere/set.zip", "sha256:0", "set")


# -- what is no file ---------------------------------------------------------------------------------------------

READERS = {
    "idx": idx.read,
    "csv": csv_table.read,
    "reviews": reviews.read_csv,
    "cifar10": cifar10.read_batch,
    "text": lambda path: corpora.text.read(path),
    "tiles": tiles.read,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_paths_that_are_not_files(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")  # opening it would block
    for path in (
        tmp_path / "pipe",
        "/dev/zero",
        tmp_path,
        tmp_path / "nothing",
        tmp_path / ("a" * 5000),
        "a\0b",
        3,
        None,
    ):
        with refused("expected a "):
            read(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all files")
def test_an_unreadable_file(tmp_path):
    path = write(tmp_path / "a", b"some")
    path.chmod(0)
    with refused("Permission denied"):
        files.read(path, "file")


@pytest.mark.parametrize("folder", ["a" * 5000, "a\0b", 3, ["a"]])
def test_invalid_folders(folder):
    calls = [
        lambda: tables.load("cifar10", folder),
        lambda: tables.load("fashion_mnist", folder),
        lambda: tables.load("higgs", folder),
        lambda: images.load("cifar10", folder),
        lambda: planetoid.load("cora", folder),
        lambda: reviews.load("sst", folder),
        lambda: corpora.load("enwik8", folder),
        lambda: corpora.load("mine", folder),
    ]
    for call in calls:
        with refused("expected"):
            call()


def test_invalid_names(tmp_path):
    for call in (lambda: tables.load(3), lambda: reviews.load([1]), lambda: corpora.load(["a"], tmp_path)):
        with refused("expected"):
            call()


def test_the_cache_of_an_unknown_user(monkeypatch):
    monkeypatch.setenv("BLOCKSPARSE_DATA", "~no-such-user/data")
    assert download.cache().name == "data"


# -- csv ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "shown"), [("1_0", "1_0"), ("\u0661", "\u0661"), ("9" * 500, "9" * 40)])
def test_numbers_are_of_plain_digits(tmp_path, field, shown):
    path = write(tmp_path / "a.csv", f"x,y,label\n1,1,a\n1,{field},b\n".encode())
    with refused(f"line 3, column y: expected a finite number, got '{shown}'$"):
        csv_table.read(path)


def test_a_label_with_an_underscore_is_a_word(tmp_path):
    path = write(tmp_path / "a.csv", b"x,label\n1,1_0\n1,9\n1,x_1\n")
    assert csv_table.read(path)[2] == ("1_0", "9", "x_1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x,label\n" + b"1," * 600, "line 2: expected fewer than 1,000 characters, got more"),
        (b"x,label\n" + b'"\n",' * 300, "expected rows of at most 1,000 characters, got more"),
        (b"x,label\n" + b"\n" * 101, "expected at most 100 empty lines, got more"),
    ],
    ids=["a line", "a row of many lines", "empty lines"],
)
def test_lines_and_rows_have_a_limit_of_length(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(files, "MAX_IN_A_LINE", 1000)
    monkeypatch.setattr(files, "MAX_EMPTY", 100)
    with refused(rf"a\.csv.*{message}"):
        csv_table.read(write(tmp_path / "a.csv", content))


def test_targets_of_a_regression_are_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,target\n" + "".join(f"1,{i}.5\n" for i in range(40)))
    with refused(r"a\.csv, column target: expected labels of classes.*, got 40 different numbers in 40 rows, which"):
        csv_table.read(path)
    path.write_text("x,label\n" + "".join(f"1,{i}\n" for i in range(1001)))
    with refused("got 1,001 different numbers in 1,001 rows, which looks like the target of a regression"):
        csv_table.read(path)
    # Half stars; many classes of many rows; the same number of classes as words.
    path.write_text("x,label\n" + "".join(f"1,{i % 10 / 2}\n" for i in range(20)))
    assert len(csv_table.read(path)[2]) == 10
    for word in ("", "w"):
        path.write_text("x,label\n" + "".join(f"1,{word}{i % 1200}\n" for i in range(2400)))
        assert len(csv_table.read(path)[2]) == 1200


def test_many_classes_are_found_and_split_in_linear_time(tmp_path):
    # Comparing each pair of 30,000 classes would be 5e8 steps: minutes.
    path = tmp_path / "a.csv"
    path.write_text("x,label\n" + "".join(f"{i % 7},w{i // 2}\n" for i in range(60_000)))
    rows, labels, classes = csv_table.read(path)
    assert [classes[label] for label in labels[[0, 1, 54_321, 59_999]]] == ["w0", "w0", "w27160", "w29999"]
    table = split("a", rows, labels, classes)
    assert torch.equal(table.train_labels, torch.arange(30_000)[labels[::2]])


# -- pickles -----------------------------------------------------------------------------------------------------


HARMLESS = (
    "lists in lists",
    "marks in marks",
    "a memo that doubles",
    "millions of lists",
    "an array that demands 1 T",
    "a dict that grows",
)


LONG = ("millions of lists", "marks in marks", "lists in lists", "a nested key")


# The test of all hostile files reads each too; the longest takes seconds.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in formats.PICKLES]
)
def test_pickles_load_as_plain_data_or_are_refused(tmp_path, name):
    path = write(tmp_path / "a", formats.PICKLES[name])
    if name in HARMLESS:
        pickles.read(path, "file", "a pickle")
    else:
        with refused("a: expected a pickle, got a broken one"):
            pickles.read(path, "file", "a pickle")


def test_a_pickle_has_a_limit_of_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "MAX_STEPS", 100)
    path = write(tmp_path / "a", pickle.dumps(list(range(50))))
    assert pickles.read(path, "file", "a pickle") == list(range(50))
    with refused("more than 100 steps"):
        pickles.read(write(path, pickle.dumps(list(range(200)))), "file", "a pickle")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["uint8", "int32", ">i8", "float32", "float64", "bool"])
def test_arrays_are_read_as_numpy_writes_them(tmp_path, protocol, dtype):
    for array in (np.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4).T, np.zeros((0, 3)), np.array(7)):
        path = write(tmp_path / "a", pickle.dumps({"a": array.astype(dtype)}, protocol))
        found = pickles.read(path, "file", "a pickle")["a"].numpy()
        assert found.dtype == np.dtype(dtype).newbyteorder("=")
        np.testing.assert_array_equal(found, array.astype(dtype))


# -- planetoid ---------------------------------------------------------------------------------------------------


def write_planetoid(folder, **changed):
    for name, data in formats.PLANETOID.items():
        (folder / name).write_bytes(changed.get(name.removeprefix("ind.cora."), data))


# Each is also read as any other pickle, which takes seconds for long ones.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in formats.ALLX]
)
def test_broken_feature_files(tmp_path, name):
    write_planetoid(tmp_path, allx=formats.ALLX[name])
    with refused(
        r"expected (a pickle of planetoid|the parts of cora, which fit each other|at most .* GiB unpacked), got"
    ):
        planetoid.load("cora", tmp_path)


def test_valid_feature_files(tmp_path):
    write_planetoid(tmp_path)
    graph = planetoid.load("cora", tmp_path)
    assert graph.features.nonzero().tolist() == [[0, 0], [1, 4], [2, 2], [3, 1]]
    assert graph.labels.tolist() == [0, 1, 1, 0]
    assert graph.edges.tolist() == [[0, 0, 1, 2], [1, 3, 2, 3]]


@pytest.mark.parametrize(
    "name", ["a node far outside", "a node below 0", "no node", "words for nodes", "lists of lists"]
)
def test_broken_graphs(tmp_path, name):
    write_planetoid(tmp_path, graph=formats.GRAPHS[name])
    with refused("expected the parts of cora, which fit each other, got (edges of node|a graph that is no dict)"):
        planetoid.load("cora", tmp_path)


@pytest.mark.parametrize("name", formats.INDICES)
def test_broken_node_indices(tmp_path, name):
    (tmp_path / "planetoid").mkdir()
    write_planetoid(tmp_path / "planetoid")
    (tmp_path / "planetoid" / "ind.cora.test.index").write_bytes(formats.INDICES[name])
    with refused(r"expected (a file of node numbers|the parts of cora)"):
        planetoid.load("cora", tmp_path)


# -- tiles -------------------------------------------------------------------------------------------------------


def test_tiles_of_odd_values_are_refused_where_they_are_read(tmp_path):
    loaded = []
    for name, content in formats.TILES.items():
        path = write(tmp_path / "tiles.json", content)
        try:
            tiles.read(path)
            loaded.append(name)
        except BlockSparseError as error:
            assert f"tuned tiles: expected a file that `blocksparse tune` wrote, got {path}: " in str(error)  # noqa: PT017
    assert loaded == ["density 0", "density 0.5", "tile's pairs True", "UTF-16"]


def test_tiles_that_cannot_be_written(tmp_path):
    with refused("expected a file to write to, got"):
        tiles.write(write(tmp_path / "file", b"") / "tiles.json", formats.GPU, {}, {})


def test_a_large_json_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON", 10)
    with refused("expected a JSON file of at most 10 bytes, got more"):
        files.read_json(write(tmp_path / "a.json", b"[" * 11), "file")
